"""The partial allocation auction of Themis (NSDI 2020, section 5.1): proportionally fair wins less hidden payments.

    offer = Offer(("m0", "m1"), np.array([4, 4]), np.array([0, 0]))
    outcome = auction(offer, tables)
    outcome.grants["app"], outcome.leftover, outcome.gap

The winners' rows maximise Π 1/ρ. Solvers: ``concave`` (exact, where placement does not matter), ``exact`` (a mixed-
integer programme), ``search`` (for scale, with a proven gap). ``auto`` takes the first that fits.

From kept fractions to whole GPUs: five ways, since the source leaves it open.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import expm1, floor
from typing import Literal, get_args

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.auction.concave import is_concave, solve_concave
from ebbflow.planners.scheduling.auction.exact import solve_exact
from ebbflow.planners.scheduling.auction.payments import Tier, kept_fractions
from ebbflow.planners.scheduling.auction.problem import Bundle, Problem, Solution
from ebbflow.planners.scheduling.auction.relaxation import Relaxation, relax
from ebbflow.planners.scheduling.auction.search import solve_search
from ebbflow.planners.scheduling.bids import BidTable, Offer
from ebbflow.planners.scheduling.locality import Array

Rounding = Literal["floor-at-one", "floor", "nearest", "stochastic", "time"]
"""``floor-at-one`` keeps at least the smallest useful number, so that a small win is not lost whole; ``floor`` and
``nearest`` as they say; ``stochastic`` rounds up with the fraction's probability; ``time`` keeps every GPU for c of
the lease."""


def kept_gpus(
    kept: float, gpus: int, mode: Rounding, least: int = 1, rng: np.random.Generator | None = None
) -> int:
    """Return how many of ``gpus`` stay: 0, or between ``least`` (the gang that can run at all) and ``gpus``."""
    if not gpus or mode == "time":
        return gpus
    exact = kept * gpus + 1e-9  # 0.5 of 2 is 1 whatever the last digit
    if mode == "floor-at-one":
        return min(max(least, floor(exact)), gpus)
    if mode == "nearest":
        number = floor(exact + 0.5)
    else:
        number = floor(exact)
        if mode == "stochastic":
            assert rng is not None
            number += int(rng.random() < exact - number - 2e-9)
    return min(number, gpus) if number >= least else 0


def released(bundle: Bundle, number: int) -> Bundle:
    """Return ``number`` GPUs to give up: from where the bundle has fewest, so that the rest keeps or narrows its
    level."""
    out: Bundle = {}
    for machine in sorted(bundle, key=lambda m: (bundle[m], -m)):
        taken = min(bundle[machine], number)
        if taken:
            out[machine] = taken
            number -= taken
    return out


Solver = Literal["auto", "concave", "exact", "search"]


@dataclass(frozen=True, slots=True)
class AuctionOptions:
    """How an auction is solved. ``payments`` "auto": no extra solve where the solver needs none, ``exact`` after
    ``exact``, else ``prices``; "none" lets winners keep everything."""

    solver: Solver = "auto"
    payments: Tier | Literal["auto", "none"] = "auto"
    rounding: Rounding = "floor-at-one"
    exact_bidders: int = 8  # most bidders that "auto" solves exactly
    exact_gpus: int = 64  # and most GPUs
    target: float = 0.002  # gap at which a search stops
    repairs: int = 200  # most, of a search that is not at its target
    seconds: float = 10.0  # of one exact solve

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("solver", self.solver, get_args(Solver)),
            ("payments", self.payments, (*get_args(Tier), "auto", "none")),
            ("rounding", self.rounding, get_args(Rounding)),
        ):
            if value not in allowed:
                raise OptionError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        if not (self.target >= 0.0 and self.seconds > 0.0 and self.repairs >= 0):
            raise OptionError(
                f"need target >= 0, repairs >= 0, seconds > 0; got {self.target}, {self.repairs}, {self.seconds}"
            )


@dataclass(frozen=True)
class Outcome:
    """What an auction decided, by app id; bundles are GPUs by machine number of the offer."""

    won: Mapping[str, Bundle]  # G_pf
    grants: Mapping[str, Bundle]  # after the hidden payment
    kept: Mapping[str, float]  # c
    rho: Mapping[str, float]  # of the winning row
    leftover: Bundle  # forfeited, or wanted by nobody
    forfeited: int  # GPUs of it that were payments
    value: float  # Σ ln(ρ of nothing / ρ won)
    bound: float  # no allocation is worth more
    solver: str
    notes: Mapping[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Return by how much the geometric mean of ρ may exceed the optimum's."""
        return expm1(max(self.bound - self.value, 0.0) / len(self.kept)) if self.kept else 0.0


def auction(
    offer: Offer,
    tables: Sequence[BidTable],
    options: AuctionOptions = AuctionOptions(),
    *,
    before: Mapping[str, Bundle] | None = None,
    least: Mapping[str, int] | None = None,
    rng: np.random.Generator | None = None,
) -> Outcome:
    """Sell ``offer`` to the apps of ``tables``.

    ``before``: GPUs whose lease just ended, which an app keeps where that costs nothing. ``least``: the smallest win
    an app can use. ``rng`` is needed for stochastic rounding only. Raises :class:`OptionError` for a solver that does
    not fit.
    """
    if options.rounding == "stochastic" and rng is None:
        raise OptionError("stochastic rounding needs a generator")
    problem = Problem.of(offer, tables)
    had = tuple((before or {}).get(t.app, {}) for t in tables)
    solution, kept, solver = _solved(problem, options, had if any(had) else (), rng)
    won, grants, forfeited = {}, {}, 0
    left = {m: int(g) for m, g in enumerate(offer.free) if g}
    for app, table in enumerate(tables):
        bundle = solution.bundles[app]
        gpus = sum(bundle.values())
        smallest = (least or {}).get(table.app, 1)
        back = gpus - kept_gpus(float(kept[app]), gpus, options.rounding, smallest, rng)
        forfeited += back
        given = released(bundle, back)
        won[table.app] = bundle
        grants[table.app] = {m: g - given.get(m, 0) for m, g in bundle.items() if g > given.get(m, 0)}
        for machine, number in grants[table.app].items():
            left[machine] -= number
    return Outcome(
        won=won,
        grants=grants,
        kept={t.app: float(c) for t, c in zip(tables, kept, strict=True)},
        rho={t.app: float(t.rho[problem.row[r]]) for t, r in zip(tables, solution.rows, strict=True)},
        leftover={m: g for m, g in left.items() if g},
        forfeited=forfeited,
        value=solution.value,
        bound=solution.bound,
        solver=solver,
        notes=solution.notes,
    )


def _solved(
    problem: Problem, options: AuctionOptions, had: tuple[Bundle, ...], rng: np.random.Generator | None
) -> tuple[Solution, Array, str]:
    """Return the solution, kept fractions and which solver it was."""
    solver = options.solver
    concave = solver in ("auto", "concave") and is_concave(problem)
    if solver == "concave" and not concave:
        raise OptionError("the concave solver needs tables without placement and with falling marginal gains")
    if solver == "auto":
        small = problem.apps <= options.exact_bidders and problem.offer.total <= options.exact_gpus
        solver = "concave" if concave else "exact" if small else "search"
    ones = np.ones(problem.apps)
    relaxation: Relaxation | None = None
    if solver == "concave":
        solution, kept = solve_concave(problem, had)
        if options.payments in ("auto", "exact"):
            return solution, kept, solver
    elif solver == "exact":
        solution = solve_exact(problem, had, options.seconds)
    else:
        relaxation = relax(problem) if problem.apps and problem.offer.total else None
        solution = solve_search(problem, had, options.target, relaxation, options.repairs, rng)
    if options.payments == "none" or problem.apps <= 1 or not problem.offer.total:
        return solution, ones, solver
    default: Tier = "exact" if solver == "exact" else "prices"
    tier = default if options.payments == "auto" else options.payments
    return solution, kept_fractions(problem, solution, tier, relaxation), solver
