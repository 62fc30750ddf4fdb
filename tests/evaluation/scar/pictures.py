"""Pictures of SCAR's evaluation: values with their intervals beside published bands, points over a diagonal."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ebbflow.tasks.drawing.svg import document, fit, tag, text, text_width, ticks, titled
from ebbflow.tasks.drawing.wording import number_text

_ROW = 20.0
_MARKS = 3  # kinds of points


class Row(NamedTuple):
    """A value with its 95 % interval, and the band that was published for it."""

    label: str
    value: float
    low: float
    high: float
    band: tuple[float, float] | None = None


def intervals_svg(
    title: str, sections: Mapping[str, Sequence[Row]], *, label: str, unit: str = "%", width: float = 720
) -> str:
    """Draw each row as a point with whiskers on one scale, published bands behind; ``label`` names the scale."""
    rows = [row for section in sections.values() for row in section]
    reached = [value for row in rows for value in (row.low, row.high, *(row.band or ()))]
    low, high = min([0.0, *reached]), max([1.0, *reached])
    left = 24 + min(max((text_width(row.label, 11) for row in rows), default=0.0), width * 0.4)
    right = width - 96

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    parts = [text(10, 20, title, class_="bold", style="font-size:14px")]
    if any(row.band for row in rows):
        parts.append(tag("rect", x=10, y=31, width=20, height=11, fill="var(--area)"))
        parts.append(text(36, 41, "published range", class_="small"))
    y = 56.0
    top = y
    drawn: list[str] = []
    for name, section in sections.items():
        drawn.append(text(10, y + 12, fit(name, width - 20), class_="bold"))
        y += _ROW
        for row in section:
            drawn.append(_row(row, x, y, left, right, unit))
            y += _ROW
        y += 8
    for mark in _scale(low, high):
        parts.append(tag("line", x1=x(mark), x2=x(mark), y1=top, y2=y, class_="grid"))
        parts.append(text(x(mark), y + 14, number_text(mark), text_anchor="middle", class_="soft small"))
    parts.append(tag("line", x1=x(0), x2=x(0), y1=top, y2=y, stroke="var(--soft)"))
    words = fit(f"{label} ({unit})" if unit else label, width - 20, 11)
    parts.append(text((left + right) / 2, y + 32, words, text_anchor="middle", class_="soft small"))
    spoken = "; ".join(
        f"{name}, {row.label}: {number_text(row.value)} {unit}"
        for name, section in sections.items()
        for row in section
    )
    return document(width, y + 42, title, spoken, [*parts, *drawn])


def _row(row: Row, x: Callable[[float], float], y: float, left: float, right: float, unit: str) -> str:
    middle = y + _ROW / 2
    shown = f"{number_text(row.value)} {unit}".strip()
    parts = [text(left - 10, middle + 4, fit(row.label, left - 20, 11), text_anchor="end", class_="small")]
    if row.band:
        begin, end = x(row.band[0]), x(row.band[1])
        parts.append(tag("rect", x=begin, y=y + 2, width=end - begin, height=_ROW - 4, fill="var(--area)"))
    parts += [
        tag(
            "line", x1=x(row.low), x2=x(row.high), y1=middle, y2=middle, stroke="var(--s0)", stroke_width=1.8
        ),
        *(
            tag(
                "line",
                x1=x(end),
                x2=x(end),
                y1=middle - 4,
                y2=middle + 4,
                stroke="var(--s0)",
                stroke_width=1.8,
            )
            for end in (row.low, row.high)
        ),
        tag("circle", cx=x(row.value), cy=middle, r=4, fill="var(--s0)"),
        text(right + 10, middle + 4, shown, class_="small"),
    ]
    words = f"{row.label}: {shown} ({number_text(row.low)} to {number_text(row.high)})"
    if row.band:
        words += f", published {number_text(row.band[0])} to {number_text(row.band[1])}"
    return titled(words, *parts)


def scatter_svg(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    across: str,
    up: str,
    width: float = 720,
    height: float = 380,
) -> str:
    """Draw points, up to three kinds by colour and shape, with the line on which both values are equal."""
    points = [point for line in series.values() for point in line]
    xs, ys = [0.0, 1.0, *(a for a, _ in points)], [0.0, 1.0, *(b for _, b in points)]
    (low, high), (bottom_value, top_value) = (min(xs), max(xs)), (min(ys), max(ys))
    left, right, top, bottom = 58.0, width - 20, 56.0, height - 48

    def place(a: float, b: float) -> tuple[float, float]:
        return (
            left + (a - low) / (high - low) * (right - left),
            bottom - (b - bottom_value) / (top_value - bottom_value) * (bottom - top),
        )

    parts = [text(10, 20, title, class_="bold", style="font-size:14px")]
    at = 10.0
    for number, name in enumerate(series):
        parts += [_mark(at + 8, 37, number), text(at + 20, 41, name, class_="small")]
        at += 44 + text_width(name, 11)
    for value in _scale(bottom_value, top_value):
        _, y = place(low, value)
        parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(text(left - 6, y + 4, number_text(value), text_anchor="end", class_="soft small"))
    for value in _scale(low, high):
        x, _ = place(value, 0)
        parts.append(text(x, bottom + 16, number_text(value), text_anchor="middle", class_="soft small"))
    begin, end = max(low, bottom_value), min(high, top_value)
    (x1, y1), (x2, y2) = place(begin, begin), place(end, end)
    parts.append(tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke="var(--soft)", stroke_width=1.5))
    for number, (name, line) in enumerate(series.items()):
        marks = [_mark(*place(a, b), number) for a, b in line]
        parts.append(titled(name, *marks))
    parts.append(text((left + right) / 2, bottom + 34, across, text_anchor="middle", class_="soft small"))
    parts.append(
        text(14, (top + bottom) / 2, up, text_anchor="middle", class_="soft small",
             transform=f"rotate(-90 14 {(top + bottom) / 2:.0f})")
    )  # fmt: skip
    spoken = "; ".join(f"{name}: {len(line)} points" for name, line in series.items())
    return document(width, height, title, f"{up} over {across}. {spoken}", parts)


def _mark(x: float, y: float, number: int) -> str:
    colour, x, y = f"var(--s{number % _MARKS})", round(x, 1), round(y, 1)
    if number % _MARKS == 0:
        return tag("circle", cx=x, cy=y, r=2.6, fill="none", stroke=colour, stroke_width=1.3)
    if number % _MARKS == 1:
        return tag("path", d=f"M{x - 3} {y + 2.5}h6l-3 -5.5z", fill="none", stroke=colour, stroke_width=1.3)
    return tag("path", d=f"M{x - 2.6} {y - 2.6}l5.2 5.2m0 -5.2l-5.2 5.2", stroke=colour, stroke_width=1.4)


def _scale(low: float, high: float) -> list[float]:
    """Return round values from ``low``, at most 0, to ``high``."""
    step = ticks(high - low, 6)
    step_size = step[1] if len(step) > 1 else high - low
    first = -int(-low / step_size + 1e-9)
    return [step_size * number for number in range(first, int(high / step_size + 1e-9) + 1)]
