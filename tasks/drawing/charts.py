"""Charts for benchmark and simulation pages: grouped bars, cumulative distributions, lines over time."""

import math
from collections.abc import Mapping, Sequence

from ebbflow.tasks.drawing.svg import document, fit, hatch, tag, text, text_width, ticks, titled, unique
from ebbflow.tasks.drawing.wording import number_text

_COLOURS = tuple(f"var(--s{i})" for i in range(6))
_DASHES = (None, "7 4", "2 3", "9 3 2 3", "1 4", "12 4")
_BAR = 15.0


def bars_svg(
    title: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    unit: str = "s",
    width: float = 720,
) -> str:
    """Draw horizontal bars, one block per group and one bar per series, each with its value.

    ``series`` maps a name to one value a group; ``None`` and non-finite values show as "–". Up to six series
    differ by colour and by stripes. Raises ``ValueError`` when a series has another length than ``groups``.
    """
    for name, values in series.items():
        if len(values) != len(groups):
            raise ValueError(f"series {name!r} must have {len(groups)} values; got {len(values)}")
    key = unique(title, groups, sorted(series), width)
    left = 14 + min(max((text_width(g) for g in groups), default=0.0), width * 0.34)
    most = max((v for values in series.values() for v in map(_known, values) if v is not None), default=0.0)
    most = most if most > 0 else 1.0
    room = width - left - 78
    parts = [_patterns(key, len(series)), text(10, 20, title, class_="bold", style="font-size:14px")]
    legend, y = _legend(list(series), key, 32.0, width, bars=True)
    parts += legend
    top = y - 4
    for index, group in enumerate(groups):
        block = len(series) * (_BAR + 3)
        label = fit(group, left - 14)
        parts.append(titled(group, text(left - 8, y + block / 2 + 2, label, text_anchor="end")))
        for number, (name, values) in enumerate(series.items()):
            value = _known(values[index])
            wide = max(value or 0.0, 0.0) / most * room
            shown = "–" if value is None else f"{number_text(value)} {unit}".strip()
            bar = tag(
                "rect", x=left, y=y, width=max(wide, 1.0), height=_BAR, rx=2, fill=_paint(number, key),
                stroke=_COLOURS[number % 6],
            )  # fmt: skip
            words = text(left + wide + 6, y + 12, shown, class_="small")
            parts.append(titled(f"{group}, {name}: {shown}", "" if value is None else bar, words))
            y += _BAR + 3
        y += 12
    if not groups:
        parts.append(text(10, y + 8, "no values", class_="soft"))
        y += 20
    parts.append(tag("line", x1=left, x2=left, y1=top, y2=y - 8, class_="grid"))
    return document(width, y + 2, title, _summary(series, unit), parts)


def cdf_svg(
    title: str,
    series: Mapping[str, Sequence[float]],
    *,
    label: str = "",
    unit: str = "s",
    width: float = 720,
    height: float = 320,
    mark: float | None = None,
    log: bool = False,
) -> str:
    """Draw the empirical cumulative distribution of each series as steps; ``label`` names the x axis.

    Non-finite values count as never reached: their curve ends below 1. Series differ by colour and dash.
    ``mark`` is a value to compare with, drawn as a line; the axis then reaches at least so far. A ``log`` axis
    begins at the smallest value above 0.
    """
    finite = {name: sorted(v for v in values if math.isfinite(v)) for name, values in series.items()}
    values = [v for ordered in finite.values() for v in ordered] + ([] if mark is None else [mark])
    low, high = min([0.0, *values]), max(values, default=1.0)
    if log:
        low = min([v for v in values if v > 0], default=1.0)
        high = max(high, low)
    high = high if high > low else (low * 10 if log else low + 1.0)
    legend, top = _legend(list(series), "", 32.0, width, bars=False)
    left, right, bottom = 44.0, width - 20.0, top + height - 60

    def x(value: float) -> float:
        if log:
            return left + math.log(max(value, low) / low) / math.log(high / low) * (right - left)
        return left + (value - low) / (high - low) * (right - left)

    def y(share: float) -> float:
        return bottom - share * (bottom - top)

    parts = [text(10, 20, title, class_="bold", style="font-size:14px"), *legend]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(tag("line", x1=left, x2=right, y1=y(share), y2=y(share), class_="grid"))
        parts.append(text(left - 6, y(share) + 4, f"{share:.0%}", text_anchor="end", class_="soft small"))
    marks = (
        _decades(low, high) if log else [low + tick for tick in ticks(high - low, max(3, int(width / 110)))]
    )
    for value in marks:
        at = x(value)
        parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="grid"))
        anchor = "end" if at > right - 16 else "middle"
        parts.append(text(at, bottom + 17, number_text(value), text_anchor=anchor, class_="soft small"))
    axis = f"{label} ({unit})" if label and unit else label or unit
    parts.append(text((left + right) / 2, bottom + 34, axis, text_anchor="middle", class_="soft small"))
    if mark is not None:
        parts.append(tag("line", x1=x(mark), x2=x(mark), y1=top, y2=bottom, stroke="var(--soft)"))
    for number, (name, ordered) in enumerate(finite.items()):
        total = len(series[name])
        points = [f"{x(low):.1f},{y(0):.1f}"]
        below = 0
        for count in _shown(len(ordered)):
            value = ordered[count]
            points += [
                f"{x(value):.1f},{y(below / total):.1f}",
                f"{x(value):.1f},{y((count + 1) / total):.1f}",
            ]
            below = count + 1
        if ordered:
            points.append(f"{right:.1f},{y(len(ordered) / total):.1f}")
        parts.append(
            titled(
                name,
                tag("polyline", points=" ".join(points), fill="none", stroke=_COLOURS[number % 6],
                    stroke_width=2.2, stroke_dasharray=_DASHES[number % 6], stroke_linejoin="round"),
            )
        )  # fmt: skip
    return document(width, bottom + 44, title, _summary(series, unit), parts)


def lines_svg(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    label: str = "",
    unit: str = "",
    most: float | None = None,
    width: float = 720,
    height: float = 260,
) -> str:
    """Draw each series as a line through its (x, y) points; ``label`` names the x axis, ``unit`` that of y.

    Series differ by colour and dash. The y axis reaches from 0 to ``most``, by default the largest value.
    """
    points = [point for line in series.values() for point in line]
    low, high = min([0.0, *(x for x, _ in points)]), max((x for x, _ in points), default=1.0)
    high = high if high > low else low + 1.0
    top_value = most or max((y for _, y in points), default=1.0) or 1.0
    legend, top = _legend(list(series), "", 32.0, width, bars=False)
    scale = ticks(top_value, 4)
    left = 14 + max(text_width(number_text(value), 11) for value in scale)
    right, bottom = width - 20.0, top + height - 60

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (x - low) / (high - low) * (right - left)
        return across, bottom - min(y / top_value, 1.0) * (bottom - top)

    parts = [text(10, 20, title, class_="bold", style="font-size:14px"), *legend]
    for value in scale:
        _, at = place(low, value)
        parts.append(tag("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        parts.append(text(left - 6, at + 4, number_text(value), text_anchor="end", class_="soft small"))
    for tick in ticks(high - low, max(3, int(width / 110))):
        at, _ = place(low + tick, 0.0)
        anchor = "end" if at > right - 16 else "middle"
        parts.append(text(at, bottom + 17, number_text(low + tick), text_anchor=anchor, class_="soft small"))
    words = fit(f"{unit} over {label}" if unit and label else unit or label, width - 20, 11)
    parts.append(text((left + right) / 2, bottom + 34, words, text_anchor="middle", class_="soft small"))
    for number, (name, line) in enumerate(series.items()):
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        curve = tag(
            "polyline", points=drawn, fill="none", stroke=_COLOURS[number % 6], stroke_width=2,
            stroke_dasharray=_DASHES[number % 6], stroke_linejoin="round",
        )  # fmt: skip
        parts.append(titled(name, curve))
    description = {name: [y for _, y in line] for name, line in series.items()}
    return document(width, bottom + 44, title, _summary(description, unit), parts)


def _shown(count: int, most: int = 1000) -> list[int]:
    """Return which of ``count`` ordered values to draw: all, or evenly spaced ones with the first and last."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _decades(low: float, high: float) -> list[float]:
    """Return the powers of ten from ``low`` to ``high``; with 2 and 5 times them where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    tens = [10.0**power for power in range(first, last + 1)]
    fine = [ten * step for ten in tens for step in (1, 2, 5)]
    inside = [value for value in tens if low <= value <= high]
    return inside if len(inside) > 2 else [value for value in fine if low <= value <= high]


def _patterns(key: str, count: int) -> str:
    return tag(
        "defs",
        [
            hatch(
                f"{key}{i}", colour="var(--bg)", ground=_COLOURS[i % 6], angle=(45, -45, 90)[i % 3], gap=5 + i
            )
            for i in range(1, count)
        ],
    )


def _paint(number: int, key: str) -> str:
    return _COLOURS[0] if number == 0 else f"url(#{key}{number})"


def _legend(names: Sequence[str], key: str, y: float, width: float, *, bars: bool) -> tuple[list[str], float]:
    parts, x = [], 10.0
    for number, name in enumerate(names):
        wide = 30 + text_width(name, 11) + 14
        if x + wide > width and x > 10:
            x, y = 10.0, y + 18
        if bars:
            sample = tag("rect", x=x, y=y, width=20, height=11, rx=2, fill=_paint(number, key),
                         stroke=_COLOURS[number % 6])  # fmt: skip
        else:
            sample = tag("line", x1=x, x2=x + 22, y1=y + 6, y2=y + 6, stroke=_COLOURS[number % 6],
                         stroke_width=2.4, stroke_dasharray=_DASHES[number % 6])  # fmt: skip
        parts += [sample, text(x + 27, y + 9.5, name, class_="small")]
        x += wide
    return parts, y + 26


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _summary(series: Mapping[str, Sequence[float | None]], unit: str) -> str:
    """Return each series' mean in words, for readers who do not see the picture."""
    parts = []
    for name, values in series.items():
        known = [v for v in values if v is not None and math.isfinite(v)]
        mean = f"mean {number_text(sum(known) / len(known))} {unit}".rstrip() if known else "no values"
        parts.append(f"{name}: {mean}")
    return "; ".join(parts)
