"""Reports as the files that a request names: a page or data, by the file's ending."""

from collections.abc import Callable, Iterable

from ebbflow.infra.storage.files import write_text


def write_reports(paths: Iterable[str], *, html: Callable[[], str], json: Callable[[], str]) -> None:
    """Write a report to each of ``paths`` atomically.

    Args:
        paths: files that end in ``.html`` or ``.json``; see ``planners.model.options.check_report_paths``.
        html: makes the page; called once per page.
        json: makes the data as JSON text.

    Raises:
        StorageError: a file cannot be written; those after it are not written.
    """
    for path in paths:
        write_text(path, html() if path.lower().endswith(".html") else json())
