"""The partial allocation auction as numbers: what every solver reads, and what it answers.

Values are gains: ln(ρ of winning nothing) - ln(ρ of the row), so that losing is worth 0 and any constant factor on
one app's table cancels. Slack of the formulas is 1e-12.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from math import exp

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.bids import BidTable, Offer
from ebbflow.planners.scheduling.locality import Array, Level


class Kind(IntEnum):
    """What a row needs. One GPU fits anywhere, and so does anything when there is one machine or one rack."""

    MACHINE = 0
    RACK = 1
    ANY = 2


@dataclass(frozen=True, eq=False)
class Problem:
    """Tables against an offer, rows of all apps in one array each, grouped by app and then by kind."""

    offer: Offer
    tables: tuple[BidTable, ...]
    owner: Array
    gpus: Array
    kind: Array
    anchor: Array
    gain: Array
    start: Array  # first row of each app
    row: Array  # its place in the app's own table

    @classmethod
    def of(cls, offer: Offer, tables: Sequence[BidTable]) -> "Problem":
        """Return the problem. Rows that the offer cannot hold are dropped; row 0 of every app stays.

        Raises ``OptionError``.
        """
        if len({t.app for t in tables}) != len(tables):
            raise OptionError("two bid tables are of the same app")
        sizes = [len(t.gpus) for t in tables]
        owner = np.repeat(np.arange(len(tables)), sizes)
        row = np.concatenate([np.arange(n) for n in sizes]) if tables else np.zeros(0, int)

        def joined(name: str, dtype: type) -> Array:
            return (
                np.concatenate([getattr(t, name) for t in tables]).astype(dtype)
                if tables
                else np.zeros(0, dtype)
            )

        gpus, level, anchor, rho = (
            joined("gpus", int),
            joined("level", int),
            joined("anchor", int),
            joined("rho", float),
        )
        kind = np.where(
            level <= Level.MACHINE, Kind.MACHINE, np.where(level == Level.RACK, Kind.RACK, Kind.ANY)
        )
        kind[(gpus == 0) | ((gpus == 1) & (anchor < 0))] = Kind.ANY
        limit = _limits(offer, kind, anchor)
        if np.count_nonzero(offer.rack_free) <= 1:
            kind[kind == Kind.RACK] = Kind.ANY
        if np.count_nonzero(offer.free) <= 1:
            kind[:] = Kind.ANY
        anchor = np.where(kind == Kind.ANY, -1, anchor)
        gain = (np.log([t.rho[0] for t in tables]))[owner] - np.log(rho) if tables else rho
        kept = (row == 0) | ((gpus <= limit) & (gain > 1e-12))
        order = np.flatnonzero(kept)
        order = order[np.lexsort((-gain[order], gpus[order], kind[order], row[order] > 0, owner[order]))]
        key = np.stack([owner[order], kind[order], gpus[order]])
        order = order[np.append(True, np.any(key[:, 1:] != key[:, :-1], axis=0))[: len(order)]]
        start = np.searchsorted(owner[order], np.arange(len(tables)))
        return cls(
            offer,
            tuple(tables),
            owner[order],
            gpus[order],
            kind[order],
            anchor[order],
            gain[order],
            start,
            row[order],
        )

    @property
    def apps(self) -> int:
        return len(self.tables)

    @cached_property
    def largest(self) -> int:
        """Return the most free GPUs of one machine."""
        return int(self.offer.free.max()) if len(self.offer.free) else 0

    @cached_property
    def start_rho(self) -> Array:
        """Return ρ of winning nothing, by app."""
        return np.array([t.rho[0] for t in self.tables])

    @cached_property
    def anchors(self) -> tuple[Array, Array]:
        """Return the machine and the rack that each app's rows are anchored to, -1 for none."""
        found = np.full((2, self.apps), -1)
        for kind in (Kind.MACHINE, Kind.RACK):
            chosen = (self.kind == kind) & (self.gpus > 0)
            found[kind, self.owner[chosen]] = self.anchor[chosen]
        return found[0], found[1]

    def without(self, app: int) -> "Problem":
        """Return the problem without one app, the whole offer still there."""
        return Problem.of(self.offer, [t for i, t in enumerate(self.tables) if i != app])

    def value(self, rows: Array) -> float:
        """Return Σ gains of one row an app (indices into the arrays)."""
        return float(self.gain[rows].sum())


def _limits(offer: Offer, kind: Array, anchor: Array) -> Array:
    """Return the most GPUs that a request of each row's kind and anchor can get."""
    limit = np.full(len(kind), offer.total)
    for which, free in ((Kind.MACHINE, offer.free), (Kind.RACK, offer.rack_free)):
        chosen = kind == which
        if chosen.any():
            limit[chosen] = np.where(anchor[chosen] >= 0, free[anchor[chosen]], free.max())
    return limit


Bundle = dict[int, int]
"""GPUs by machine number."""


@dataclass(frozen=True)
class Solution:
    """One row and one bundle an app, and a proven bound on the value of any other choice."""

    rows: Array  # indices into the problem's arrays
    bundles: tuple[Bundle, ...]
    value: float  # Σ gains
    bound: float  # no feasible choice is worth more
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Return by how much the bidders' geometric-mean ρ may exceed the optimum's: exp((bound - value)/N) - 1."""
        return exp(max(self.bound - self.value, 0.0) / len(self.rows)) - 1.0 if len(self.rows) else 0.0
