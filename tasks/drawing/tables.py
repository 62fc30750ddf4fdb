"""Rows as an HTML table, as notebooks show them."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ebbflow.tasks.drawing.wording import label_text, plural

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS = 30  # shown at most
_CELL = 80  # characters of a cell


def table_html(table: "pa.Table", total_rows: int) -> str:
    """Return every row of ``table``, the first of ``total_rows``, as HTML; all text of them is escaped."""
    names = table.column_names
    rows = zip(*(column.to_pylist() for column in table.columns[:_COLUMNS]), strict=True)
    body = "".join(_row("td", [_text(value) for value in row]) for row in rows)
    rest = [plural(total_rows, "row")]
    if total_rows > table.num_rows:
        rest[0] += f", the first {table.num_rows} shown"
    if len(names) > _COLUMNS:
        rest.append(plural(len(names) - _COLUMNS, "more column"))
    return (
        f"<table><thead>{_row('th', [label_text(name, _CELL) for name in names[:_COLUMNS]])}</thead>"
        f"<tbody>{body}</tbody></table><p>{'; '.join(rest)}</p>"
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _text(value: Any) -> str:
    return "NULL" if value is None else label_text(str(value), _CELL)
