"""Moments along a cluster's time, and what sorts names."""

import re

from ebbflow.tasks.drawing.wording import clock_text

_STEPS = (
    0.001, 0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 10800.0, 21600.0, 86400.0, 604800.0,
)  # fmt: skip


def ticks(since: float, until: float, most: int = 5, levels: int = 4) -> list[list[tuple[float, str]]]:
    """Return (per cent, label) by level of detail: at most ``most`` at first, then those that finer levels add.

    Each step of time divides the next longer one, so that a finer level only adds.
    """
    span = max(until - since, 1e-6)
    first = next((i for i, step in enumerate(_STEPS) if span / step <= most), len(_STEPS) - 1)
    step = _STEPS[first]
    while span / step > most:  # of years
        step *= 2
    found: list[list[tuple[float, str]]] = []
    seen: set[int] = set()
    for level in range(levels):
        index = first - level
        if index < 0 or (level and span / _STEPS[index] > 400):
            break
        fine = step if level == 0 else _STEPS[index]
        marks = []
        number = -(-since // fine)
        while number * fine <= until:
            at = number * fine
            key = round((at - since) * 1000)
            if key not in seen:
                seen.add(key)
                marks.append(((at - since) / span * 100, clock_text(at, fine)))
            number += 1
        found.append(marks)
    return found


def natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts ``node-2`` before ``node-10``."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"([0-9]+)", name)]
