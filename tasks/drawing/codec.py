"""Reports as JSON texts, in the form of ``infra/storage/values.py``."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from ebbflow.infra.errors import ReportError
from ebbflow.infra.storage.values import Form

T = TypeVar("T")
Upgrade: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]  # a report's data in the format that follows
_REPORTS = Form(strict=False)


def to_text(report: Any, form: int, **more: Any) -> str:
    """Return a report as JSON text of format ``form``, with ``more`` keys; what JSON lacks is ``null``."""
    data: dict[str, Any] = {"format": form, **encode(report), **more}
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def from_text(kind: type[T], text: str, form: int, upgrades: Mapping[int, Upgrade] | None = None) -> T:
    """Read what ``to_text`` wrote. Keys unknown to this version are ignored.

    Args:
        kind: class of the report.
        text: JSON text of the report.
        form: format of this version.
        upgrades: by an older format, what turns a report's data into the format that follows it.

    Raises:
        ReportError: ``text`` is no report, is damaged, or has a format that cannot be turned into ``form``.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"not a report: {error}") from error
    older = upgrades or {}
    while isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] in older:
        data = {**older[data["format"]](data), "format": data["format"] + 1}
    if not isinstance(data, dict) or data.get("format") != form:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ReportError(f"a report of format {form} is needed; got {found!r:.80}")
    try:
        return _REPORTS.from_plain(kind, data)
    except (ValueError, TypeError) as error:
        raise ReportError(f"the report is damaged: {error}") from error


def encode(value: Any) -> Any:
    """Return ``value`` as dictionaries, lists, strings, numbers, booleans and ``None``."""
    return _REPORTS.to_plain(value)
