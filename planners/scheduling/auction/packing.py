"""Where chosen rows go: the machines and racks that hold them."""

from collections.abc import Sequence

import numpy as np

from ebbflow.planners.scheduling.auction.problem import Bundle, Kind, Problem
from ebbflow.planners.scheduling.locality import Array

State = tuple[int, list[Bundle], list[Array]]


class Packing:
    """Free GPUs by machine and rack, and who holds which."""

    def __init__(self, problem: Problem, before: Sequence[Bundle] = ()):
        offer = problem.offer
        self.problem = problem
        self.free = offer.free.copy()
        self.rack_free = offer.rack_free.copy()
        self.total = offer.total
        self.rows = problem.start.copy()
        self.bundles: list[Bundle] = [{} for _ in range(problem.apps)]
        self.before = before or [{}] * problem.apps  # GPUs by machine whose lease just ended
        self.own = np.zeros(problem.apps, int)  # GPUs won, by app
        self.spot = np.full(problem.apps, -1)  # the machine of a bundle on one machine
        self.home = np.full(problem.apps, -1)  # the rack of a bundle in one rack
        self._members = [np.flatnonzero(offer.rack == r) for r in range(len(offer.rack_free))]

    @property
    def value(self) -> float:
        return self.problem.value(self.rows)

    def place(self, row: int, keep: bool = True) -> bool:
        """Give the owner of ``row`` (who holds nothing) a bundle for it; False when nothing fits.

        ``keep``: prefer what it had before.
        """
        problem = self.problem
        app, gpus, anchor = int(problem.owner[row]), int(problem.gpus[row]), int(problem.anchor[row])
        kind = problem.kind[row]
        if gpus > self.total:
            return False
        had = self.before[app] if keep else {}
        if kind == Kind.MACHINE:
            machine = anchor if anchor >= 0 else self._machine(gpus, had)
            if machine < 0 or self.free[machine] < gpus:
                return False
            bundle = {machine: gpus}
        elif kind == Kind.RACK:
            rack = anchor if anchor >= 0 else self._rack(gpus, had)
            if rack < 0 or self.rack_free[rack] < gpus:
                return False
            bundle = self._collect(gpus, self._members[rack], had)
        else:
            bundle = self._collect(gpus, np.arange(len(self.free)), had)
        self.set(app, row, bundle)
        return True

    def set(self, app: int, row: int, bundle: Bundle) -> None:
        """Give an app that holds nothing exactly ``bundle``."""
        self.rows[app], self.bundles[app] = row, bundle
        self._take(bundle, 1)
        rack = self.problem.offer.rack
        self.own[app] = sum(bundle.values())
        self.spot[app] = next(iter(bundle)) if len(bundle) == 1 else -1
        homes = {int(rack[m]) for m in bundle}
        self.home[app] = homes.pop() if len(homes) == 1 else -1

    def inside(self, rack: int, gpus: int) -> Bundle:
        """Return ``gpus`` free GPUs of one rack."""
        return self._collect(gpus, self._members[rack], {})

    def clear(self, app: int) -> tuple[int, Bundle]:
        """Take everything from an app; return what :meth:`set` would give back."""
        row, bundle = int(self.rows[app]), self.bundles[app]
        self._take(bundle, -1)
        self.rows[app], self.bundles[app] = self.problem.start[app], {}
        self.own[app], self.spot[app], self.home[app] = 0, -1, -1
        return row, bundle

    def state(self) -> State:
        """Return what :meth:`restore` takes."""
        arrays = (self.free, self.rack_free, self.rows, self.own, self.spot, self.home)
        return self.total, list(self.bundles), [a.copy() for a in arrays]

    def restore(self, state: State) -> None:
        """Go back to an earlier state."""
        self.total, self.bundles = state[0], list(state[1])
        copies = [a.copy() for a in state[2]]
        self.free, self.rack_free, self.rows, self.own, self.spot, self.home = copies

    def _take(self, bundle: Bundle, sign: int) -> None:
        rack = self.problem.offer.rack
        for machine, gpus in bundle.items():
            self.free[machine] -= sign * gpus
            self.rack_free[rack[machine]] -= sign * gpus
            self.total -= sign * gpus

    def _machine(self, gpus: int, had: Bundle) -> int:
        """Return the machine had before, else the tightest one in the tightest rack, ``-1`` when none fits."""
        for machine in sorted(had, key=lambda m: -had[m]):
            if self.free[machine] >= gpus:
                return machine
        best = _tightest(self.free, gpus)
        if best < 0:
            return best
        equal = np.flatnonzero(self.free == self.free[best])  # small requests gather in few racks
        return int(equal[self.rack_free[self.problem.offer.rack[equal]].argmin()])

    def _rack(self, gpus: int, had: Bundle) -> int:
        rack = self.problem.offer.rack
        for machine in sorted(had, key=lambda m: -had[m]):
            if self.rack_free[rack[machine]] >= gpus:
                return int(rack[machine])
        return _tightest(self.rack_free, gpus)

    def _collect(self, gpus: int, machines: Array, had: Bundle) -> Bundle:
        """Return ``gpus`` GPUs of ``machines``: those had before, then from the fullest machines on."""
        bundle: Bundle = {}
        allowed = set(machines.tolist()) if had else ()
        for machine in sorted(had, key=lambda m: -had[m]):
            taken = min(had[machine], int(self.free[machine]), gpus) if machine in allowed else 0
            if taken:
                bundle[machine] = taken
                gpus -= taken
        if not gpus:
            return bundle
        free = self.free[machines]
        for machine in bundle:
            free[machines == machine] -= bundle[machine]
        order = np.argsort(free, kind="stable")
        upto = np.cumsum(free[order])
        last = int(np.searchsorted(upto, gpus))
        for position in range(int(np.searchsorted(upto, 0, side="right")), last + 1):
            index = int(order[position])
            taken = int(free[index]) if position < last else gpus - (int(upto[last - 1]) if last else 0)
            machine = int(machines[index])
            bundle[machine] = bundle.get(machine, 0) + taken
        return bundle


def _tightest(free: Array, gpus: int) -> int:
    """Return the unit with the fewest free GPUs that holds ``gpus``, ``-1`` when none does."""
    room = np.where(free >= gpus, free, np.iinfo(free.dtype).max)
    best = int(room.argmin()) if len(room) else -1
    return best if best >= 0 and free[best] >= gpus else -1


def pack(
    problem: Problem, rows: Array, before: Sequence[Bundle] = (), keep: bool = True
) -> tuple[Packing, list[int]]:
    """Place ``rows``, the hardest first; return the packing and the rows that found no room."""
    packing = Packing(problem, before)
    hard = np.lexsort((rows, -problem.gpus[rows], problem.anchor[rows] < 0, problem.kind[rows]))
    if keep and before:  # renewals first: what was held before certainly fits
        renewed = np.array([bool(before[problem.owner[r]]) for r in rows[hard]])
        hard = np.concatenate([hard[renewed], hard[~renewed]])
    failed = [int(r) for r in rows[hard] if problem.gpus[r] and not packing.place(int(r), keep)]
    return packing, failed
