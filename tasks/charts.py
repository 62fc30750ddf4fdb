"""Charts for benchmark pages: grouped bars and cumulative distributions."""

import math
from collections.abc import Mapping, Sequence

from ebbflow.tasks.svg import document, fit, hatch, tag, text, text_width, ticks, titled, unique
from ebbflow.tasks.wording import number_text

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
) -> str:
    """Draw the empirical cumulative distribution of each series as steps; ``label`` names the x axis.

    Non-finite values count as never reached: their curve ends below 1. Series differ by colour and dash.
    ``mark`` is a value to compare with, drawn as a line; the axis then reaches at least so far.
    """
    finite = {name: sorted(v for v in values if math.isfinite(v)) for name, values in series.items()}
    values = [v for ordered in finite.values() for v in ordered] + ([] if mark is None else [mark])
    low, high = min([0.0, *values]), max(values, default=1.0)
    high = high if high > low else low + 1.0
    legend, top = _legend(list(series), "", 32.0, width, bars=False)
    left, right, bottom = 44.0, width - 20.0, top + height - 60

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    def y(share: float) -> float:
        return bottom - share * (bottom - top)

    parts = [text(10, 20, title, class_="bold", style="font-size:14px"), *legend]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(tag("line", x1=left, x2=right, y1=y(share), y2=y(share), class_="grid"))
        parts.append(text(left - 6, y(share) + 4, f"{share:.0%}", text_anchor="end", class_="soft small"))
    for tick in ticks(high - low, max(3, int(width / 110))):
        at = x(low + tick)
        parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="grid"))
        anchor = "end" if at > right - 16 else "middle"
        parts.append(text(at, bottom + 17, number_text(low + tick), text_anchor=anchor, class_="soft small"))
    axis = f"{label} ({unit})" if label and unit else label or unit
    parts.append(text((left + right) / 2, bottom + 34, axis, text_anchor="middle", class_="soft small"))
    if mark is not None:
        parts.append(tag("line", x1=x(mark), x2=x(mark), y1=top, y2=bottom, stroke="var(--soft)"))
    for number, (name, ordered) in enumerate(finite.items()):
        total = len(series[name])
        points = [f"{x(low):.1f},{y(0):.1f}"]
        for count, value in enumerate(ordered):
            points += [
                f"{x(value):.1f},{y(count / total):.1f}",
                f"{x(value):.1f},{y((count + 1) / total):.1f}",
            ]
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
