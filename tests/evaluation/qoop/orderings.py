"""What QOOP's macro-benchmark found, as orderings that a run of ours is held against (QOOP, figure 2.16)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Figures: TypeAlias = Mapping[str, Mapping[str, float]]  # per system: figures by name

QOOP = "QOOP"
DRF_V, TETRIS_V, SJF_V = "DRF + Volcano", "Tetris + Volcano", "SJF + Volcano"
CARBYNE_V, DRF_C, CARBYNE_C = "Carbyne + Volcano", "DRF + Clarinet", "Carbyne + Clarinet"


@dataclass(frozen=True, slots=True)
class Ordering:
    """One claim of the source."""

    claim: str
    holds: Callable[[Figures], bool]


def _faster_than(rival: str) -> Ordering:
    return Ordering(
        f"average completion time: QOOP below {rival}",
        lambda f: f[QOOP]["mean_seconds"] < f[rival]["mean_seconds"],
    )


def _closest(figures: Figures, to: str, among: Sequence[str]) -> str:
    return min(among, key=lambda s: abs(figures[s]["mean_seconds"] - figures[to]["mean_seconds"]))


def _lowest(figures: Figures, figure: str, among: Sequence[str]) -> str:
    return min(among, key=lambda s: figures[s][figure])


def _fairness(label: str, figure: str) -> tuple[Ordering, ...]:
    """The source does not say how it takes the index: both ways are held against it."""
    return (
        Ordering(
            f"{label}: both DRF variants above QOOP",
            lambda f: min(f[DRF_V][figure], f[DRF_C][figure]) > f[QOOP][figure],
        ),
        Ordering(
            f"{label}: QOOP above all that are not DRF",
            lambda f: f[QOOP][figure] > max(f[s][figure] for s in _UNFAIR),
        ),
        Ordering(f"{label}: SJF + Volcano is lowest", lambda f: _lowest(f, figure, _ALL) == SJF_V),
    )


INDICES = (
    ("Jain's index of shares", "jain"),
    ("Jain's index of usable entitlements", "jain_honoured"),
)
_ALL = (DRF_V, TETRIS_V, SJF_V, CARBYNE_V, DRF_C, CARBYNE_C, QOOP)
_UNFAIR = (TETRIS_V, SJF_V, CARBYNE_V, CARBYNE_C)

ORDERINGS: tuple[Ordering, ...] = (
    *(_faster_than(rival) for rival in (DRF_V, TETRIS_V, CARBYNE_V, DRF_C)),
    Ordering(
        "average completion time: SJF + Volcano is lowest",
        lambda f: _lowest(f, "mean_seconds", _ALL) == SJF_V,
    ),
    Ordering(
        "average completion time: of all, QOOP is closest to SJF + Volcano",
        lambda f: _closest(f, SJF_V, [s for s in _ALL if s != SJF_V]) == QOOP,
    ),
    Ordering(
        "average completion time: of the fair and packing baselines, Carbyne + Clarinet comes closest to QOOP",
        lambda f: _closest(f, QOOP, (DRF_V, TETRIS_V, CARBYNE_V, DRF_C, CARBYNE_C)) == CARBYNE_C,
    ),
    Ordering(
        "average completion time: QOOP's is 1.5 times smaller than that of the DRF variants",
        lambda f: min(f[s]["mean_seconds"] for s in (DRF_V, DRF_C)) >= 1.5 * f[QOOP]["mean_seconds"],
    ),
    *(o for label, figure in INDICES for o in _fairness(label, figure)),
    Ordering(
        "makespan: Tetris + Volcano is lowest", lambda f: _lowest(f, "makespan_seconds", _ALL) == TETRIS_V
    ),
    Ordering(
        "makespan: QOOP is next to Tetris + Volcano, or below",
        lambda f: _lowest(f, "makespan_seconds", [s for s in _ALL if s != TETRIS_V]) == QOOP,
    ),
)


def held(seeds: Sequence[Figures], means: Figures) -> list[dict[str, Any]]:
    """Return per claim in how many seeds it holds, out of how many, and whether it holds for the means."""
    return [
        {
            "claim": o.claim,
            "seeds_that_hold": sum(o.holds(figures) for figures in seeds),
            "seeds": len(seeds),
            "holds_on_means": o.holds(means),
        }
        for o in ORDERINGS
    ]
