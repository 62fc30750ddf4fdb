"""Files that a report is written to: a page (``.html``) or data (``.json``), by their endings."""

from collections.abc import Callable, Iterable
from pathlib import PurePath

from ebbflow.infra.storage.files import write_text
from ebbflow.planners.errors import OptionError

ENDINGS = (".html", ".json")


def check_report_files(paths: Iterable[str]) -> None:
    """Raise ``OptionError`` for the first path whose ending is neither ``.html`` nor ``.json``."""
    for path in paths:
        if PurePath(path).suffix not in ENDINGS:
            raise OptionError(f"report must be a file that ends in .html or .json; got {path!r}")


def report_paths(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the paths that a flow's parameter ``report`` names: none, one, or several."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def write_report_files(paths: Iterable[str], page: Callable[[], str], data: Callable[[], str]) -> None:
    """Write a report to each of its files.

    Args:
        paths: checked by ``check_report_files``.
        page: makes the HTML page.
        data: makes the JSON text.

    Raises ``ReportError`` for a file that cannot be written.
    """
    for path in paths:
        write_text(path, page() if PurePath(path).suffix == ".html" else data())
