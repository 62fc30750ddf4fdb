"""Log lines as JSON, each with the ids of what it is about: run, app, stage."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType

_NONE: Mapping[str, str] = MappingProxyType({})
_ids: ContextVar[Mapping[str, str]] = ContextVar("ebbflow_log_ids", default=_NONE)


def current_ids() -> Mapping[str, str]:
    """Return the ids of what this thread works at."""
    return _ids.get()


@contextmanager
def log_ids(**ids: str) -> Iterator[None]:
    """Add ids to what this thread logs meanwhile, beside those of enclosing blocks; other threads name their own."""
    token = _ids.set({**_ids.get(), **ids})
    try:
        yield
    finally:
        _ids.reset(token)


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: ``time`` (UTC), ``level``, ``logger``, ``message``, ids, ``error``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        said: dict[str, str] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **current_ids(),
        }
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False, default=str)
