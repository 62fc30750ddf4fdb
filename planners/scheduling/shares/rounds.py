"""Rounds: a matrix of shares becomes leases of one round each (Gavel, OSDI 2020, section 5).

Apps are chosen by what they should have received over what they have, so that over many rounds everyone gets its
share. The rules and their oddities are those of the public simulators of Gavel and Shockwave (NSDI 2023).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Decision, Grant, Placement, Run, View, gpus_of
from ebbflow.planners.scheduling.locality import throughput
from ebbflow.planners.scheduling.placement import FreeCapacity, fewest_nodes
from ebbflow.planners.scheduling.shares.rules import Demand, ShareRule

ByType = Mapping[str, Mapping[str, float]]
"""A figure per GPU type and app."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What rounds remember: who should have received what, and who did."""

    entries: ByType = field(default_factory=dict)  # fractions of time; apps of the last allocation only
    received: ByType = field(default_factory=dict)  # s since the last allocation, and half a round
    deficits: ByType = field(default_factory=dict)  # s, from earlier allocations
    totals: Mapping[str, float] = field(default_factory=dict)  # s received by all, by type
    gpus: Mapping[str, int] = field(default_factory=dict)
    apps: frozenset[str] = frozenset()
    dirty: bool = True  # apps or GPUs came or went, or a lease gained nothing
    last_reset: float = 0.0  # s; 0 also means never
    now: float = -inf  # s, of the last decision
    until: float = -inf  # s, end of the leases
    leases: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # app: type, run time at its start
    rule: Any = None  # the share rule's own memory


@dataclass(frozen=True, slots=True)
class RoundBased:
    """A policy that follows the shares of ``rule`` in rounds of at most ``round_s``.

    Shares are computed anew when apps or GPUs came or went, at most every ``reset_s``; an app that arrives in
    between waits for that. ``types`` are GPU types from fast to slow, for rules that fill fast types first.
    """

    rule: ShareRule
    round_s: float = 120.0
    reset_s: float = 1000.0
    types: tuple[str, ...] = ("v100", "p100", "k80")

    def __post_init__(self) -> None:
        if not self.round_s > 0:
            raise OptionError(f"round_s must be > 0; got {self.round_s}")
        if not self.reset_s >= 0:
            raise OptionError(f"reset_s must be >= 0; got {self.reset_s}")

    @property
    def name(self) -> str:
        return self.rule.name

    def decide(self, view: View, memory: Ledger | None, rng: np.random.Generator) -> Decision:
        """Return leases of one round; between rounds, what is held stays held."""
        before = memory or Ledger()
        ran = view.ran or _measured(view, before)
        gpus = _gpus(view)
        if before.leases and not view.ran and view.now < before.until and gpus == before.gpus:
            return _unchanged(view, before)
        book = self._book(view, before, ran, gpus)
        anew = book.dirty and (view.now - book.last_reset >= self.reset_s or book.last_reset == 0)
        anew = anew and bool(gpus or not view.apps)  # nothing to share before GPUs come back
        if anew:
            book = self._allocate(view, book)
        chosen = self._choose(view, book, rng)
        known = {app for shares in book.entries.values() for app in shares}
        leases = {app.id: gpu for app, gpu in chosen if app.id in known}
        placed = _place([(app, gpu) for app, gpu in chosen if app.id in leases], view)
        until = view.now + self.round_s
        grants = {
            app.id: Grant(placed[app.id], until, f"due a round on {leases[app.id]}")
            if app.id in leases
            else Grant(reason=_waits(app, known))
            for app in view.apps
        }
        times = {app.id: app.run_time for app in view.apps}
        book = replace(
            book,
            now=view.now,
            until=until,
            leases={app: (gpu, times[app]) for app, gpu in leases.items()},
        )
        return Decision(
            grants, book, until if view.apps else inf, {"allocated": float(anew and bool(view.apps))}
        )

    def _book(self, view: View, before: Ledger, ran: Iterable[Run], gpus: Mapping[str, int]) -> Ledger:
        """Return the ledger after the leases that ended, departures and arrivals."""
        half = self.round_s / 2
        apps = frozenset(app.id for app in view.apps)
        received = {gpu: dict(before.received.get(gpu, {})) for gpu in gpus}
        totals = {gpu: before.totals.get(gpu, 0.0) for gpu in gpus}
        dirty = before.dirty or apps != before.apps or gpus != before.gpus
        for run in ran:
            dirty = dirty or run.failed
            if not run.failed and run.type in received:
                received[run.type][run.app] = received[run.type].get(run.app, half) + run.seconds
                totals[run.type] += run.seconds
        # Nothing runs and no time has passed: everybody waits for an allocation, so it must not wait any longer.
        stuck = not before.leases and view.now == before.now
        return replace(
            before,
            entries={
                gpu: {a: x for a, x in shares.items() if a in apps}
                for gpu, shares in before.entries.items()
                if gpu in gpus
            },
            received={gpu: {a: times.get(a, half) for a in apps} for gpu, times in received.items()},
            deficits={gpu: {a: before.deficits.get(gpu, {}).get(a, 0.0) for a in apps} for gpu in gpus},
            totals=totals,
            gpus=gpus,
            apps=apps,
            dirty=dirty,
            last_reset=0.0 if stuck else before.last_reset,
        )

    def _allocate(self, view: View, book: Ledger) -> Ledger:
        """Return the ledger with new shares; what is still owed of the old ones becomes deficits."""
        if not view.apps:
            return replace(book, last_reset=view.now, dirty=False, totals=dict.fromkeys(book.gpus, 0.0))
        half, passed = self.round_s / 2, view.now - book.last_reset
        deficits = {
            gpu: {
                app.id: book.deficits[gpu][app.id]
                + (book.entries.get(gpu, {}).get(app.id, 0.0) * passed - (book.received[gpu][app.id] - half))
                for app in view.apps
            }
            for gpu in book.gpus
        }
        demand = demand_of(view, book.gpus)
        shares, memory = self.rule.shares(demand, book.rule)
        shares = np.clip(shares, 0.0, 1.0)
        return replace(
            book,
            entries={
                gpu: dict(zip(demand.apps, shares[:, column].tolist(), strict=True))
                for column, gpu in enumerate(demand.types)
            },
            received={gpu: dict.fromkeys(demand.apps, half) for gpu in book.gpus},
            deficits=deficits,
            totals={gpu: _repeated(half, len(demand.apps)) for gpu in book.gpus},
            dirty=False,
            last_reset=view.now,
            rule=memory,
        )

    def _choose(self, view: View, book: Ledger, rng: np.random.Generator) -> list[tuple[App, str]]:
        """Return who gets a gang of which type in this round, types in order, most urgent apps first."""
        order = [gpu for gpu in self.types if gpu in book.gpus]
        order += sorted(set(book.gpus) - set(order))
        if not self.rule.fastest_first:
            shuffle(order, rng)
        chosen: list[tuple[App, str]] = []
        taken: set[str] = set()
        for gpu in order:
            left = book.gpus[gpu]
            entries, received = book.entries.get(gpu, {}), book.received[gpu]
            deficits, total = book.deficits[gpu], book.totals[gpu]
            ranked = []
            for number, app in enumerate(view.apps):
                if app.id in taken or app.gpus > left or not throughput(app, gpu) > 0:
                    continue
                share = entries.get(app.id, 0.0)
                priority = share / (received[app.id] / total) if share and total else 0.0
                if priority > 0 or self.rule.work_conserving:
                    ranked.append((-priority, -deficits[app.id], -share, number, app))
            ranked.sort()
            for *_, app in ranked:
                if app.gpus <= left:
                    left -= app.gpus
                    taken.add(app.id)
                    chosen.append((app, gpu))
                    if not left:
                        break
        return chosen


def shuffle(items: list[str], rng: np.random.Generator) -> None:
    """Shuffle in place as Python's ``random.Random.shuffle`` does, drawing 32-bit words from ``rng``.

    With a generator on the Mersenne twister, seeded as Python seeds its own, the order is Python's.
    """
    for last in range(len(items) - 1, 0, -1):
        bits = (last + 1).bit_length()
        pick = last + 1
        while pick > last:
            pick = int(rng.integers(0, 1 << 32, dtype=np.uint32)) >> (32 - bits)
        items[last], items[pick] = items[pick], items[last]


def demand_of(view: View, gpus: Mapping[str, int]) -> Demand:
    """Return the demand of all apps of ``view`` as arrays."""
    types = tuple(sorted(gpus))
    apps = sorted(view.apps, key=lambda app: app.number)

    def column(values: Iterable[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.fromiter(values, dtype=float)

    return Demand(
        apps=tuple(app.id for app in apps),
        types=types,
        throughput=column(throughput(app, gpu) for app in apps for gpu in types).reshape(
            len(apps), len(types)
        ),
        gang=column(app.gpus for app in apps),
        weight=column(app.weight for app in apps),
        remaining=column(app.remaining for app in apps),
        age=column(view.now - app.arrival for app in apps),
        gpus=column(gpus[gpu] for gpu in types),
    )


def _gpus(view: View) -> dict[str, int]:
    gpus: dict[str, int] = {}
    for node in view.capacity.usable:
        if node.gpus:
            gpus[node.instance_type] = gpus.get(node.instance_type, 0) + node.gpus
    return gpus


def _measured(view: View, book: Ledger) -> list[Run]:
    """Return the leases that ended, from the apps' run times, where nobody keeps account of them."""
    started = ((app, *book.leases[app.id]) for app in view.apps if app.id in book.leases)
    return [Run(app.id, gpu, app.run_time - since) for app, gpu, since in started if app.run_time > since]


def _unchanged(view: View, book: Ledger) -> Decision:
    grants = {
        app.id: Grant(app.held, book.until, "round in progress")
        if app.held
        else Grant(reason="pending: next round")
        for app in view.apps
    }
    return Decision(grants, book, book.until)


def _waits(app: App, known: set[str]) -> str:
    return (
        "pending (Priority): other apps are further below their shares"
        if app.id in known
        else "pending: next allocation"
    )


def _repeated(value: float, times: int) -> float:
    """Return ``value`` summed ``times`` times, as the artefacts do."""
    total = 0.0
    for _ in range(times):
        total += value
    return total


def _place(chosen: Sequence[tuple[App, str]], view: View) -> dict[str, Placement]:
    """Return nodes for everyone: what is held where that still serves, else as few nodes as there are."""
    nodes: dict[str, list[Node]] = {}
    for node in view.capacity.usable:
        if node.gpus:
            nodes.setdefault(node.instance_type, []).append(node)
    rooms = {gpu: FreeCapacity(members) for gpu, members in nodes.items()}
    placed: dict[str, Placement] = {}
    for app, gpu in chosen:
        if app.held and gpus_of(app.held) == app.gpus and rooms[gpu].covers(app.held):
            placed[app.id] = app.held
            rooms[gpu].hold(app.held)
    for app, gpu in chosen:
        if app.id not in placed:
            placement = fewest_nodes(rooms[gpu], app, app.gpus)
            assert placement is not None  # the type's GPUs were counted when the app was chosen
            placed[app.id] = placement
    return placed
