"""Themis: finish-time-fair GPU auctions in rounds (Mahajan et al., NSDI 2020, section 5; PhD thesis 2021, chapter 3).

Whenever GPUs are free, the worst-off 1 - f of the apps bid for them in one partial allocation auction; what winners
forfeit as hidden payments goes at random to apps that did not bid; everything is leased. A node with a firm notice is
worth only until its deadline: leases on it end there and it is not offered again, because a bid counts on its bundle
until the app's end.

GPUs that an auction left over go to apps that did not bid, at random (Themis, NSDI 2020, section 5.1).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, isfinite
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App, Decision, Grant, Placement, View, gpus_of
from ebbflow.planners.scheduling.auction.auction import AuctionOptions, Outcome, auction
from ebbflow.planners.scheduling.bids import BidTable, Offer, prepare_bid
from ebbflow.planners.scheduling.locality import Level, TableBidder
from ebbflow.planners.scheduling.themis.leases import BidderState, Lease, Leases, firm_deadlines, standings

Leftovers = Literal["gpu", "machine", "affine"]
"""``gpu``: one draw a GPU. ``machine``: one draw for all that is left on a machine, which keeps gangs together.
``affine``: as ``gpu``, but among apps that held GPUs of that machine until now, if there are any."""


Accepts = Callable[[App, Mapping[str, int], Mapping[str, int]], bool]
"""Whether an app holding the first counts by node wants to hold the second."""


def give_away(
    free: dict[str, int],
    apps: Sequence[App],
    holding: dict[str, dict[str, int]],
    before: Mapping[str, Mapping[str, int]],
    accepts: Accepts,
    mode: Leftovers,
    rng: np.random.Generator,
) -> dict[str, dict[str, int]]:
    """Draw an owner among ``apps`` for what is ``free`` by node; return what each got.

    ``free`` and ``holding`` (all GPUs by app and node) are updated. An app takes part while it has unmet demand, and
    may decline. One that cannot run on a single GPU more takes as many as it needs, from the drawn node first.
    """
    given: dict[str, dict[str, int]] = {}
    wanting = [i for i, a in enumerate(apps) if a.max_gpus > sum(holding[a.id].values())]
    for node in list(free):
        able = list(wanting)
        while free[node] > 0 and able:
            drawn = able
            if mode == "affine":
                had = {i: (before.get(apps[i].id, {}), holding[apps[i].id]) for i in able}
                drawn = [i for i, (was, now) in had.items() if was.get(node, 0) > now.get(node, 0)] or able
            index = drawn[int(rng.integers(len(drawn)))]
            app = apps[index]
            has = sum(holding[app.id].values())
            number = max(app.min_gpus - has, 1)
            if mode == "machine":
                number = max(number, min(free[node], app.max_gpus - has))
            taken = _take(free, node, number)
            after = dict(holding[app.id])
            for where, gpus in taken.items():
                after[where] = after.get(where, 0) + gpus
            if not taken or not accepts(app, holding[app.id], after):
                able.remove(index)
                continue
            for where, gpus in taken.items():
                free[where] -= gpus
                mine = given.setdefault(app.id, {})
                mine[where] = mine.get(where, 0) + gpus
            holding[app.id] = after
            if sum(after.values()) >= app.max_gpus:
                wanting.remove(index)
                able.remove(index)
    return given


def _take(free: Mapping[str, int], first: str, number: int) -> dict[str, int]:
    """Return ``number`` GPUs, from ``first`` and then the fullest offers; nothing if there are fewer."""
    taken: dict[str, int] = {}
    for node in (
        [first, *sorted((n for n in free if n != first), key=lambda n: -free[n])] if number > 1 else [first]
    ):
        gpus = min(free[node], number)
        if gpus:
            taken[node] = gpus
            number -= gpus
        if not number:
            return taken
    return {}


@dataclass(frozen=True, slots=True)
class Themis:
    """The policy. Every app must have a ``bidder``; a :class:`TableBidder` answers fastest."""

    knob: float = 0.8  # f: 1 - f of the apps with unmet demand bid, at least one
    lease_s: float = 600.0
    kappa: float = 2.0  # ρ of holding nothing over ρ on one GPU
    pool_s: float = 0.0  # leases ending so soon count as ended: one round instead of several
    leftovers: Leftovers = "gpu"
    options: AuctionOptions = field(default_factory=AuctionOptions)
    name: str = "themis"
    elastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.knob <= 1.0:
            raise OptionError(f"the fairness knob must be within 0 and 1; got {self.knob}")
        if not (isfinite(self.lease_s) and self.lease_s > 0.0 <= self.pool_s < self.lease_s):
            raise OptionError(f"need 0 <= pool_s < lease_s, finite; got {self.pool_s} and {self.lease_s} s")
        if not self.kappa > 1.0:
            raise OptionError(f"kappa must be > 1; got {self.kappa}")
        if self.leftovers not in get_args(Leftovers):
            raise OptionError(
                f"leftovers must be one of {', '.join(get_args(Leftovers))}; got {self.leftovers!r}"
            )

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Hold one round if GPUs are free and wanted. Raises :class:`OptionError` for an app without a bidder."""
        for app in view.apps:
            if app.bidder is None:
                raise OptionError(f"Themis asks every app for bids; {app.id!r} has no bidder")
        round_ = _Round(self, view, memory if isinstance(memory, Leases) else None)
        return round_.decision(rng)


class _Round:
    def __init__(self, policy: Themis, view: View, memory: Leases | None):
        self.policy, self.view, self.memory = policy, view, memory
        self.standing = {s.app.id: s for s in standings(view, memory, policy.lease_s, policy.pool_s)}
        used: dict[str, int] = {}
        for standing in self.standing.values():
            for node, gpus in standing.kept.items():
                used[node] = used.get(node, 0) + gpus
        self.offer = Offer.of(view.capacity, used, frozenset(firm_deadlines(view)))
        self.racks = {n.id: n.rack for n in view.capacity.nodes}
        self.reasons: dict[str, str] = {}
        self.won: dict[str, list[Lease]] = {}
        self.notes: dict[str, float] = {}

    def decision(self, rng: np.random.Generator) -> Decision:
        wanting = [s for s in self.standing.values() if s.unmet > 0]
        if self.offer.total and wanting:
            self._hold(wanting, rng)
        leases, grants = {}, {}
        for app, standing in self.standing.items():
            mine = (*standing.live, *self.won.get(app, ()))
            leases[app] = mine
            grants[app] = self._grant(standing, mine)
        ends = [lease.until for mine in leases.values() for lease in mine if lease.until > self.view.now]
        rounds = (self.memory.rounds if self.memory else 0) + bool(self.notes)
        memory = Leases({app: mine for app, mine in leases.items() if mine}, rounds)
        return Decision(grants, memory, min(ends, default=inf), self.notes)

    def _hold(self, wanting: list[BidderState], rng: np.random.Generator) -> None:
        policy, offer = self.policy, self.offer
        rho = {s.app.id: self._current(s) for s in wanting}
        order = sorted(wanting, key=lambda s: (*(-r for r in rho[s.app.id]), s.app.service, s.app.number))
        count = max(1, ceil((1.0 - policy.knob) * len(order) - 1e-9))
        bidders, others = order[:count], order[count:]
        for standing in others:
            self.reasons[standing.app.id] = (
                f"not among the {count} worst-off of {len(order)}: rho {_shown(rho[standing.app.id][0])}, "
                f"bidders from {_shown(rho[bidders[-1].app.id][0])}"
            )
        before = {
            s.app.id: {offer.index[n]: g for n, g in s.ended.items() if n in offer.index} for s in bidders
        }
        least = {s.app.id: max(s.app.min_gpus - gpus_of(tuple(s.kept.items())), 1) for s in bidders}
        tables = [t for t in (self._table(s) for s in bidders) if t is not None]
        outcome = auction(offer, tables, policy.options, before=before, least=least, rng=rng)
        for table in tables:
            self._settle(table.app, outcome)
        weakened, idle = self._leftovers(outcome, bidders, others, rng)
        self.notes = {
            "apps": float(len(order)), "bidders": float(len(tables)), "offered": float(offer.total),
            "gap": outcome.gap, "bound": outcome.bound, "value": outcome.value,
            "forfeited_share": outcome.forfeited / offer.total,
            "leftover_share": sum(outcome.leftover.values()) / offer.total,
            "to_bidders": float(weakened), "idle": float(idle), "worst_rho": rho[order[0].app.id][0],
        }  # fmt: skip

    def _current(self, standing: BidderState) -> tuple[float, float]:
        """Return ρ with what the app held until now (infinite without a gang), and ρ on the smallest gang."""
        app, now = standing.app, self.view.now
        held = dict(standing.kept)
        for node, gpus in standing.ended.items():
            held[node] = held.get(node, 0) + gpus
        bidder = app.bidder
        assert bidder is not None
        if sum(held.values()) >= max(app.min_gpus, 1):
            value = bidder.rho(tuple(held.items()), self.view.capacity, now)
            return value, value
        alone = bidder.rho(((self.offer.nodes[0], max(app.min_gpus, 1)),), self.view.capacity, now)
        return inf, alone

    def _table(self, standing: BidderState) -> BidTable | None:
        app = standing.app
        assert app.bidder is not None
        table = prepare_bid(
            app.id, app.bidder, self.offer, self.view.capacity, self.view.now,
            max_gpus=app.max_gpus, min_gpus=app.min_gpus, held=tuple(standing.kept.items()), kappa=self.policy.kappa,
        )  # fmt: skip
        if table is None:
            self.reasons[app.id] = (
                f"pending (Resources): none of the {self.offer.total} free GPUs improves its rho"
            )
        return table

    def _settle(self, app: str, outcome: Outcome) -> None:
        won, grant, kept = outcome.won[app], outcome.grants[app], outcome.kept[app]
        if not won:
            self.reasons[app] = (
                f"pending (Priority): {len(outcome.kept) - 1} other bidders gain more from the"
                f" {self.offer.total} free GPUs"
            )
            return
        # a bundle that is kept for a moment only would be over before it began
        lease_s = self.policy.lease_s * (max(kept, 1e-3) if self.policy.options.rounding == "time" else 1.0)
        self.reasons[app] = (
            f"won {sum(won.values())} GPUs (rho {_shown(outcome.rho[app])}), keeps {sum(grant.values())} after a "
            f"hidden payment of {1.0 - kept:.0%}"
        )
        if grant:
            gpus = tuple((self.offer.nodes[m], g) for m, g in sorted(grant.items()))
            self.won.setdefault(app, []).append(Lease(gpus, self.view.now + lease_s))

    def _leftovers(
        self,
        outcome: Outcome,
        bidders: list[BidderState],
        others: list[BidderState],
        rng: np.random.Generator,
    ) -> tuple[int, int]:
        """Give leftovers away; return GPUs that had to go to bidders, and those nobody takes."""
        free = {self.offer.nodes[m]: g for m, g in outcome.leftover.items()}
        holding = {}
        for standing in (*bidders, *others):
            held = standing.kept
            for lease in self.won.get(standing.app.id, ()):
                for node, gpus in lease.gpus:
                    held[node] = held.get(node, 0) + gpus
            holding[standing.app.id] = held
        before = {
            s.app.id: {n: g + s.kept.get(n, 0) for n, g in s.ended.items()} for s in (*bidders, *others)
        }
        asked = _DemandCache(self)
        sent = 0
        for group in (others, bidders):
            given = give_away(
                free, [s.app for s in group], holding, before, asked.accepts, self.policy.leftovers, rng
            )
            for app, counts in given.items():
                number = sum(counts.values())
                sent += number if group is bidders else 0
                until = self.view.now + self.policy.lease_s
                self.won.setdefault(app, []).append(Lease(tuple(counts.items()), until))
                self.reasons[app] = f"{self.reasons.get(app, '')}; drew {number} left-over GPUs".removeprefix(
                    "; "
                )
        return sent, sum(free.values())

    def _grant(self, standing: BidderState, leases: tuple[Lease, ...]) -> Grant:
        app = standing.app
        counts: dict[str, int] = {}
        for lease in leases:
            for node, gpus in lease.gpus:
                counts[node] = counts.get(node, 0) + gpus
        placement: Placement = app.held if counts == dict(app.held) else tuple(sorted(counts.items()))
        until = min((lease.until for lease in leases), default=inf)
        reason = self.reasons.get(app.id, "")
        if standing.lost:
            reason = f"lost {standing.lost} GPUs with their node; {reason}".removesuffix("; ")
        if not reason:
            reason = "lease continues" if placement else "pending (Resources): no free GPUs"
        return Grant(placement, until, reason)


class _DemandCache:
    """Whether apps want more GPUs, each answer asked for once."""

    def __init__(self, round_: _Round):
        self._round = round_
        self._known: dict[tuple[str, int, Level], float] = {}

    def accepts(self, app: App, has: Mapping[str, int], after: Mapping[str, int]) -> bool:
        """Tell whether ρ does not rise; from nothing to a gang that can run it always falls."""
        if sum(after.values()) < app.min_gpus:
            return False
        return sum(has.values()) < max(app.min_gpus, 1) or self._rho(app, after) <= self._rho(app, has)

    def _rho(self, app: App, counts: Mapping[str, int]) -> float:
        bidder, view = app.bidder, self._round.view
        assert bidder is not None
        if not isinstance(bidder, TableBidder):
            return bidder.rho(tuple(counts.items()), view.capacity, view.now)
        gpus, level = sum(counts.values()), Level.MACHINE
        if len(counts) > 1:
            level = Level.RACK if len({self._round.racks.get(n) for n in counts}) == 1 else Level.CLUSTER
        elif gpus == 1:
            level = Level.SLOT
        key = app.id, gpus, level
        if key not in self._known:
            self._known[key] = float(bidder.rho_at(np.array([gpus]), np.array([int(level)]), view.now)[0])
        return self._known[key]


def _shown(rho: float) -> str:
    return f"{rho:.3g}" if isfinite(rho) else "unbounded"
