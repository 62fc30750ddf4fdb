"""How numbers and names read in reports, pictures and on the console."""

import math
from collections.abc import Callable
from datetime import UTC, datetime

_UNITS = ("", " k", " M", " G", " T", " P")


def seconds_text(value: float | None) -> str:
    """Return a duration for people: ``0.42 s``, ``38.2 s``, ``12 min 30 s``; infinite is ``never``."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "never"
    if abs(value) < 9.995:
        return f"{value:.2f} s"
    if abs(value) < 99.95:
        return f"{value:.1f} s"
    if abs(value) < 600:
        return f"{value:.0f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def clock_text(at: float, step: float = 1.0) -> str:
    """Return a moment, s since the Unix epoch, as a clock in UTC shows it: as fine as ``step`` seconds need.

    Days begin with their date, and steps of a day have nothing else.
    """
    try:
        moment = datetime.fromtimestamp(at, UTC)
    except (OverflowError, ValueError, OSError):  # beyond the calendar
        return f"{number_text(at)} s"
    if step >= 86400 or (step > 1 and moment.hour == moment.minute == moment.second == 0):
        return f"{moment:%b} {moment.day}"
    if step < 1:
        return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}"
    return f"{moment:%H:%M}" if step >= 60 else f"{moment:%H:%M:%S}"


def dated(since: float, until: float) -> Callable[[float], str]:
    """Return what writes moments of this span of time: with their day where it has more than one."""
    if clock_text(since, 86400.0) == clock_text(until, 86400.0):
        return clock_text
    return lambda at: f"{clock_text(at, 86400.0)} {clock_text(at)}"


def count_text(value: float | None) -> str:
    """Return a count for people: exact below 10,000, then ``15 k``, ``1.5 M``, ``2.3 G``."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) < 10_000 else _scaled(value, 1000, _UNITS)


def bytes_text(value: float | None) -> str:
    """Return a size for people in powers of 1024: ``512 B``, ``3.4 MiB``."""
    if value is None or not math.isfinite(value):
        return "–"
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def memory_text(gib: float) -> str:
    """Return a memory size given in GiB: ``12 GiB``, ``0.50 GiB``."""
    return f"{gib:.2f} GiB" if gib < 1 else f"{gib:.3g} GiB" if gib < 1000 else f"{gib:.0f} GiB"


def number_text(value: float) -> str:
    """Return a plain number with three significant digits and no exponent: ``0.417``, ``38.2``, ``1,234``."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def money_text(value: float | None) -> str:
    """Return a sum of dollars: ``$12.30``, with four digits below ten cents."""
    return "–" if value is None else f"${value:,.4f}" if 0 < value < 0.1 else f"${value:,.2f}"


def plural(count: int, noun: str, many: str = "") -> str:
    """Return ``1 stage`` or ``3 stages``; ``many`` is the plural where it takes more than an "s"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {many or noun + 's'}"


def printable(text: str) -> str:
    """Return ``text`` with control characters, which could steer a terminal, replaced; line ends stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def shorten(text: str, limit: int) -> str:
    """Return ``text`` in one line of at most ``limit`` characters, its middle replaced by an ellipsis.

    Both ends stay, because stage names differ there: the first and the last relation joined.
    """
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    if limit < 5:
        return line[: max(limit - 1, 0)] + "…"
    tail = (limit - 1) // 3
    return f"{line[: limit - 1 - tail].rstrip()}…{line[len(line) - tail :].lstrip()}"


def label_text(text: str, limit: int) -> str:
    """Return somebody's own words in one line of at most ``limit`` characters.

    What could steer a terminal or turn the direction of the text around it is replaced.
    """
    return shorten(printable(text), limit)


def against(seconds: float, expected: float | None) -> str:
    """Compare a run's time with the first plan's expectation: ``12 % faster than the 41.0 s expected``."""
    if expected is None or not math.isfinite(expected) or expected <= 0:
        return "no expectation at start"
    change = (seconds - expected) / expected
    if abs(change) < 0.005:
        return f"as the {seconds_text(expected)} expected"
    if change >= 1:  # percentages say little from there on
        return f"{seconds / expected:,.0f} times the {seconds_text(expected)} expected"
    word = "slower" if change > 0 else "faster"
    return f"{abs(change):.0%} {word} than the {seconds_text(expected)} expected".replace("%", " %")


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    step = 0
    while abs(value) >= base and step < len(units) - 1:
        value /= base
        step += 1
    if step == 0:
        return f"{value:.0f}{units[0]}"
    return f"{value:.1f}{units[step]}" if abs(value) < 10 else f"{value:.0f}{units[step]}"
