"""One Spark for engines of a process that ask for the same one after the other: a JVM takes seconds of a processor to
start and to warm up, and tests close theirs often."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext

from ebbflow.infra.spark import session as sessions
from ebbflow.infra.spark.settings import is_local

_TESTS_OWN = ("PYTEST_CURRENT_TEST", "EBBFLOW_HOME", "COLUMNS")  # variables that a JVM does not look at


class KeptSpark:
    """Counts as one more user of each local Spark, until one with other settings is to start."""

    def __init__(self) -> None:
        self._kept: Any = None
        self._begun: tuple[object, ...] = ()
        self._authenticated, self._shared = sessions.authenticated, sessions._SharedSession

    def authenticated(self, chosen: Mapping[str, str]) -> dict[str, str]:
        """Do what it is called for, at the beginning of each start; what cannot be used ends."""
        found = self._authenticated(chosen)
        kept = self._kept
        if kept is not None and (
            self._begun != _begun(found) or not sessions._lives(kept, SparkContext._active_spark_context)
        ):
            self.end()
        return found

    def shared(self, chosen: Mapping[str, str], session: Any, process: Any) -> Any:
        """Take note of what has started."""
        made = self._shared(chosen, session, process)
        if is_local(chosen["spark.master"]):
            self._kept, self._begun = made, _begun(chosen)
            made.users += 1
        return made

    def end(self) -> None:
        """Stop using it."""
        kept, self._kept = self._kept, None
        if kept is not None:
            sessions.stop_session(kept.session, kept.process)


def _begun(chosen: Mapping[str, str]) -> tuple[object, ...]:
    variables = {name: text for name, text in os.environ.items() if name not in _TESTS_OWN}
    return dict(chosen), variables, Path.cwd()


@contextmanager
def kept_spark() -> Iterator[None]:
    """Keep a local Spark from one engine to the next."""
    kept = KeptSpark()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "authenticated", kept.authenticated)
        patch.setattr(sessions, "_SharedSession", kept.shared)
        try:
            yield
        finally:
            kept.end()
