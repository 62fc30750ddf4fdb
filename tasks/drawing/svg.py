"""A little SVG: escaped elements, one palette for light and dark, text widths, scales and label placement.

Colours follow Okabe and Ito's set, which stays distinct under the common colour-vision deficiencies; every
meaning that a colour carries is carried by a pattern, a mark or a word as well.
"""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

STYLE = """
.eb{--bg:#fff;--ink:#1d2733;--soft:#5a6775;--line:#d8dee5;--panel:#f6f8fa;--area:#c9dcec;--edge:#33658a;
--done:#0072b2;--done-ink:#fff;--reused:#009e73;--cut:#8894a1;--cut-bg:#eef1f4;--fail:#c24a00;--switch:#8a3f7f;
--expect:#9a6a00;--s0:#0072b2;--s1:#d98200;--s2:#009e73;--s3:#8a3f7f;--s4:#56b4e9;--s5:#5a6775;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif;
font-size:12px;background:var(--bg)}
@media screen and (prefers-color-scheme:dark){.eb{--bg:#151b22;--ink:#e4e9ee;--soft:#9aa7b4;--line:#323c47;
--panel:#1c242d;--area:#27455c;--edge:#7fb7de;--done:#2a86c0;--done-ink:#fff;--reused:#2cc296;--cut:#8894a1;
--cut-bg:#262f39;--fail:#f2803a;--switch:#d795cb;--expect:#e0b04c;--s0:#4aa3dd;--s1:#f0a83a;--s2:#2cc296;
--s3:#d795cb;--s4:#8fd0f5;--s5:#9aa7b4}}
.eb text{fill:var(--ink)}.eb .soft{fill:var(--soft)}.eb .small{font-size:11px}.eb .bold{font-weight:600}
.eb .grid{stroke:var(--line);stroke-width:1;fill:none}.eb .panel{fill:var(--panel)}
.eb .halo{stroke:var(--panel);stroke-width:3px;paint-order:stroke;stroke-linejoin:round}
""".replace("\n", "")

_NARROW = frozenset("iljftrI.,:;'|!()[] ·-1")
_WIDE = frozenset("mwMW@%⋈→↺∞≈…—")


def tag(name: str, body: str | Iterable[str] = "", /, **attributes: object) -> str:
    """Return one element. ``body`` is markup already; attributes are escaped and ``None`` leaves one out.

    Underscores in attribute names become dashes and a trailing one is dropped, as in ``class_``.
    """
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_value(value))}"
        for key, value in attributes.items()
        if value is not None
    )
    inner = body if isinstance(body, str) else "".join(body)
    return f"<{name}{shown}>{inner}</{name}>" if inner else f"<{name}{shown}/>"


def text(x: float, y: float, content: str, /, **attributes: object) -> str:
    """Return a text element with ``content`` escaped."""
    return tag("text", clean(content), x=x, y=y, **attributes)


def titled(title: str, *parts: str, **attributes: object) -> str:
    """Return a group that shows ``title`` when pointed at."""
    return tag("g", [tag("title", clean(title)), *parts], **attributes)


def clean(content: str) -> str:
    """Return ``content`` escaped and without the control characters that XML forbids."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", content))


def document(
    width: float, height: float, title: str, description: str, body: Iterable[str], *, least: float = 0.0
) -> str:
    """Return a whole picture that scales to the width it is given and follows the light or dark scheme.

    It never grows beyond its own ``width`` nor shrinks below ``least``, where its container may scroll.
    """
    return tag(
        "svg",
        [
            tag("title", clean(title)),
            tag("desc", clean(description)),
            tag("style", STYLE),
            tag("rect", width=width, height=height, fill="var(--bg)"),
            *body,
        ],
        xmlns="http://www.w3.org/2000/svg",
        class_="eb",
        role="img",
        aria_label=clean(title),
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        width="100%",
        style=f"display:block;max-width:{_value(width)}px"
        + (f";min-width:{_value(least)}px" if least else ""),
    )


def unique(*parts: object) -> str:
    """Return an identifier for definitions, equal for equal ``parts``: pictures may share a page."""
    return "eb" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def hatch(identifier: str, *, colour: str, ground: str, angle: int = 45, gap: float = 6) -> str:
    """Return a striped pattern, referred to as ``url(#identifier)``."""
    return tag(
        "pattern",
        [
            tag("rect", width=gap, height=gap, fill=ground),
            tag("line", x1=0, y1=0, x2=0, y2=gap, stroke=colour, stroke_width=gap * 0.45),
        ],
        id=identifier,
        width=gap,
        height=gap,
        patternUnits="userSpaceOnUse",
        patternTransform=f"rotate({angle})",
    )


def text_width(content: str, size: float = 12) -> float:
    """Estimate, rather too wide than too narrow, how many units ``content`` takes in a system font."""
    return size * sum(_advance(c) for c in content)


def fit(content: str, width: float, size: float = 12) -> str:
    """Return ``content``, its middle replaced by an ellipsis where it is wider than ``width``."""
    line = " ".join(content.split())
    if text_width(line, size) <= width:
        return line
    low, high = 0, len(line)
    while low < high:
        middle = (low + high + 1) // 2
        if text_width(_elide(line, middle), size) <= width:
            low = middle
        else:
            high = middle - 1
    return _elide(line, low) if low else ""


def ticks(limit: float, about: int = 8) -> list[float]:
    """Return round steps (1, 2 or 5 times a power of ten) from 0 up to at most ``limit``."""
    if not math.isfinite(limit) or limit <= 0:
        return [0.0]
    raw = limit / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    return [step * i for i in range(int(limit / step + 1e-9) + 1)]


def place_labels(
    items: Sequence[tuple[float, float]], left: float, right: float, gap: float = 6
) -> list[tuple[int, float]]:
    """Place labels of given (centre, width) without overlap; return each one's (row, left edge).

    A label stays centred where it can, is kept between ``left`` and ``right``, and moves to the first row
    in which it touches no other.
    """
    placed: list[tuple[int, float]] = [(0, 0.0)] * len(items)
    rows: list[list[tuple[float, float]]] = []
    for index in sorted(range(len(items)), key=lambda i: items[i][0]):
        centre, width = items[index]
        start = max(left, min(centre - width / 2, right - width))
        span = (start, start + width)
        row = next((r for r, taken in enumerate(rows) if not _touches(span, taken, gap)), len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(span)
        placed[index] = (row, start)
    return placed


def lanes(intervals: Sequence[tuple[float, float]], gap: float = 0.0) -> list[int]:
    """Return a lane for each (start, end) so that no two in a lane overlap or come closer than ``gap``.

    First fit in order of start uses as many lanes as intervals overlap at most.
    """
    result = [0] * len(intervals)
    ends: list[float] = []
    for index in sorted(range(len(intervals)), key=lambda i: (intervals[i][0], intervals[i][1], i)):
        start, end = intervals[index]
        lane = next((n for n, last in enumerate(ends) if last + gap <= start), len(ends))
        if lane == len(ends):
            ends.append(end)
        ends[lane] = end
        result[index] = lane
    return result


def _touches(span: tuple[float, float], taken: Iterable[tuple[float, float]], gap: float) -> bool:
    return any(span[0] < end + gap and start < span[1] + gap for start, end in taken)


def data_url(svg: str) -> str:
    """Return a picture as an address that holds it."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _elide(line: str, keep: int) -> str:
    tail = keep // 3
    return line[: keep - tail].rstrip() + "…" + (line[len(line) - tail :].lstrip() if tail else "")


def _advance(character: str) -> float:
    if character in _NARROW:
        return 0.42
    if character in _WIDE:
        return 1.0
    if ord(character) > 0x2E80:
        return 1.05
    return 0.74 if character.isupper() else 0.64


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
