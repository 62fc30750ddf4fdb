"""Tables and words that the evaluation pages share."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

Pictures = dict[str, str]


class Figure(NamedTuple):
    """One published figure beside ours; ``low`` and ``high`` are our least and largest over seeds."""

    claim: str
    published: float | None
    ours: float
    low: float | None = None
    high: float | None = None
    why: str = ""
    form: str = "{:,.2f}"
    stated: str = ""  # what was published, where it is no single number


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)]) + "\n"


def figures(rows: Iterable[Figure], *, last: str = "why different") -> str:
    """Return the table of published and measured figures, with their ratio."""
    return table(("figure", "published", "ours", "ratio", last), [_row(row) for row in rows])


def _row(row: Figure) -> tuple[str, ...]:
    ours = row.form.format(row.ours)
    if row.low is not None and row.high is not None and row.low != row.high:
        ours += f" ({row.form.format(row.low)} to {row.form.format(row.high)})"
    if row.published is None:
        return row.claim, row.stated or "–", ours, "–", row.why
    ratio = row.ours / row.published if row.published else float("nan")
    shown = f"{ratio:.2f}" if isfinite(ratio) else "–"
    return row.claim, row.stated or row.form.format(row.published), ours, shown, row.why


def orders(rows: Iterable[tuple[str, Sequence[bool]]]) -> str:
    """Return the table of orders: what should hold, whether it does, and in how many runs."""
    shown = [
        (claim, _extent(sum(holds), len(holds)), f"{sum(holds)} of {len(holds)}") for claim, holds in rows
    ]
    return table(("order", "holds", "in runs"), shown)


def _extent(held: int, runs: int) -> str:
    if not runs:
        return "not run"
    if held == runs:
        return "yes"
    return "mostly" if 2 * held > runs else "in some" if held else "in none"


def pictures_of(folder: str, drawn: Iterable[str]) -> str:
    """Return the Markdown that shows pictures."""
    return "\n".join(f"![{name}]({folder}{name}.svg)\n" for name in drawn)


def grouped(found: Mapping[str, Any], prefix: str) -> list[Any]:
    """Return the results called ``prefix`` and a number, by number. Raises ``KeyError`` if there are none."""
    numbers = sorted(
        int(match[1]) for name in found if (match := re.fullmatch(re.escape(prefix) + r"-(\d+)", name))
    )
    if not numbers:
        raise KeyError(f"no experiment is called {prefix} and a number")
    return [found[f"{prefix}-{number}"] for number in numbers]
