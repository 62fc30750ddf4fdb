"""One iteration of a training as a timeline: its compute, and what each channel carries, one picture over another."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ebbflow.tasks.drawing.svg import document, fit, tag, text, text_width, ticks, titled

_LANE, _BAR, _TITLE = 26.0, 20.0, 24.0  # heights
_LEFT, _RIGHT = 84.0, 14.0
_PAINTS = 5


class TimelineBar(Protocol):
    """Something that runs on a lane from ``start`` to ``end``, s."""

    @property
    def lane(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def iterations_svg(title: str, iterations: Mapping[str, Sequence[TimelineBar]], *, width: float = 960) -> str:
    """Draw iterations over one another on one scale of time.

    Args:
        title: of the picture.
        iterations: caption -> what runs; a bar's colour is that of its name up to the last digit.
        width: units; 960 suits a page, 400 a phone.
    """
    longest = max((bar.end for bars in iterations.values() for bar in bars), default=0.0)
    scale = (width - _LEFT - _RIGHT) / longest if longest > 0 else 0.0
    kinds = sorted({_kind(bar.name) for bars in iterations.values() for bar in bars})
    paints = {kind: f"var(--s{k % _PAINTS})" for k, kind in enumerate(kinds)}
    body: list[str] = []
    y = 8.0
    for caption, bars in iterations.items():
        end = max((bar.end for bar in bars), default=0.0)
        body.append(text(_LEFT, y + 13, f"{caption}: {_milliseconds(end)}", class_="bold"))
        y += _TITLE
        lanes = sorted({bar.lane for bar in bars}, key=lambda lane: (lane != "compute", lane))
        height = _LANE * max(len(lanes), 1)
        body.append(tag("rect", x=_LEFT, y=y, width=width - _LEFT - _RIGHT, height=height, class_="panel"))
        for at in ticks(longest) if longest > 0 else []:
            x = _LEFT + at * scale
            body.append(tag("line", x1=x, x2=x, y1=y, y2=y + height, class_="grid"))
        for k, lane in enumerate(lanes):
            top = y + k * _LANE
            body.append(text(_LEFT - 6, top + 17, lane, class_="soft", text_anchor="end"))
            for bar in (one for one in bars if one.lane == lane):
                body.append(_drawn(bar, top + (_LANE - _BAR) / 2, scale, paints[_kind(bar.name)]))
        y += height + 10
    for at in ticks(longest) if longest > 0 else []:
        body.append(
            text(_LEFT + at * scale, y + 6, _milliseconds(at), class_="soft small", text_anchor="middle")
        )
    said = "; ".join(
        f"{caption}: {len(bars)} bars, {_milliseconds(max((bar.end for bar in bars), default=0.0))}"
        for caption, bars in iterations.items()
    )
    return document(width, y + 16, title, said, body)


def _drawn(bar: TimelineBar, y: float, scale: float, paint: str) -> str:
    x, wide = _LEFT + bar.start * scale, max((bar.end - bar.start) * scale - 0.6, 0.6)
    parts = [tag("rect", x=x, y=y, width=wide, height=_BAR, rx=2, fill=paint, fill_opacity=0.85)]
    label = fit(bar.name, wide - 6, 11)
    if label and wide > text_width(label, 11) + 4:
        parts.append(text(x + 4, y + 14, label, class_="small halo"))
    return titled(f"{bar.name}: {_milliseconds(bar.start)} to {_milliseconds(bar.end)}", *parts)


def _kind(name: str) -> str:
    return name.rstrip("0123456789/").removeprefix("before ").removeprefix("until ") or name


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
