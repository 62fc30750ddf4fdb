"""Nodes: which there are, what they cost, and how they are rented."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from ebbflow.planners.model import Capacity
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Fleet, Offer, Target
from ebbflow.planners.model.gangs import GangRequest, GangTarget
from ebbflow.planners.model.prices import Series


class CapacitySource(Protocol):
    """Where observed capacity comes from."""

    def capacity(self) -> Capacity:
        """Look now and return what is there. The revision grows whenever nodes or notices differ from the last look.

        A source that cannot be reached for a moment returns the last known capacity; it raises
        ``EngineUnavailableError`` only when it never could be reached.
        """
        ...


# --- prices ---------------------------------------------------------------------------------------------------


class PriceSource(Protocol):
    """What machines cost, now and before. Safe for several threads."""

    def offers(self, pool: str) -> tuple[Offer, ...]:
        """Return what a pool can be made of, at present prices; sorted by type, zone and market.

        ``interruptions`` of the offers are 0: they are learnt from what was lost, not told by a market. Raises
        ``OptionError`` for an unknown pool, ``InfraError`` when prices cannot be had and none are remembered.
        """
        ...

    def series(self, zone: str, instance_type: str, start: float) -> Series:
        """Return the spot prices from ``start`` (s since the Unix epoch), or as far back as is known, to now.

        Raises ``PriceError`` where there are none, ``InfraError`` when they cannot be had.
        """
        ...

    def on_demand(self, instance_type: str) -> float | None:
        """Return the list price, $/h; ``None`` when it is not known, and ``problems`` says why."""
        ...

    def problems(self) -> list[str]:
        """Return and forget what could not be had, as sentences for people."""
        ...


# --- fleets of nodes that are rented ------------------------------------------------------------------------

AskKind = Literal["size", "on-demand", "protect", "end", "gang"]


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """One thing that was asked of the provider, or that a dry run would ask."""

    kind: AskKind
    of: str  # the pool, gang or node
    value: int = 0  # size: nodes; on-demand: nodes that must be on-demand; end: 1 where a replacement follows
    call: str = ""  # the provider's operation, such as "autoscaling:SetDesiredCapacity"
    parameters: Mapping[str, object] = field(default_factory=dict)  # of the call

    def __str__(self) -> str:
        what = {
            "size": f"{self.of}: {self.value} nodes",
            "on-demand": f"{self.of}: {self.value} nodes on-demand at least",
            "protect": f"{self.of}: keep the provider from choosing nodes to end",
            "end": f"end {self.of}" + (", which is replaced" if self.value else ""),
            "gang": f"{self.of}: {self.value} nodes, all or nothing",
        }
        return what[self.kind]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that was wanted and not asked for."""

    of: str  # the pool, gang or node
    why: str


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """What became of a target."""

    revision: int  # of the fleet when it was applied
    asked: tuple[ProviderCall, ...] = ()
    refused: tuple[Refusal, ...] = ()
    dry_run: bool = False


class FleetControl(Protocol):
    """Nodes that are rented: what is planned, what was asked for, what has arrived.

    A target is recorded durably before anything is asked for, so a crash at any point leaves nothing but a difference
    between planned and requested, which ``repair`` removes. Nothing that lacks the cluster's tags is ever changed.
    Safe for several threads.
    """

    def observe(self) -> Fleet:
        """Look now. The revision grows whenever nodes or notices differ from the last look, also after a restart.

        Raises ``AwsError`` (or the provider's own) when the provider does not answer.
        """
        ...

    def take_notices(self, notices: Sequence[Notice]) -> int:
        """Record that nodes will leave, durably; return the revision afterwards, which has grown if that is news.

        Of one node the firmest notice counts, then the earliest. Notices of nodes that are never seen are dropped
        some minutes after their deadline.
        """
        ...

    def apply(self, target: Target, *, dry_run: bool = False) -> ApplyResult:
        """Plan what ``target`` says, and ask for it.

        Growth is asked for at once. No node is ended here: a smaller target first cancels what has not arrived, and
        its ``drain`` is kept as ``PoolState.draining`` until ``terminate`` ends those nodes, drained. A target for a
        revision other than the fleet's present one is refused, and a size outside the pool's limits moved to it, all
        with the reason. Raises ``OptionError`` for an unknown pool, ``NotOursError``, ``AwsError``.
        """
        ...

    def terminate(self, ids: Sequence[str], *, dry_run: bool = False) -> ApplyResult:
        """End these nodes, in order. They must have been drained: nothing is asked of them any more.

        Those beyond the planned number of their pool are not replaced, others are. Nodes that are gone are refused,
        as are those that would leave a pool below its least. If one of them is not ours ``NotOursError`` is raised
        and nothing is done.
        """
        ...

    def repair(self, *, dry_run: bool = False) -> ApplyResult:
        """Ask again for what is planned and not asked for, and end or adopt what a crash left half done.

        Call it at the start, and now and then; when there is nothing to do it asks for nothing.
        """
        ...

    def close(self) -> None:
        """Close connections; nodes stay. May be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Gang:
    """A gang and what was asked for it, or would be."""

    name: str
    pool: str
    nodes: tuple[str, ...]  # empty after a dry run, and for one that was not started
    ask: ProviderCall | None = None  # None for a gang that was held already, and for one that was not started
    refused: str = ""  # why it was not started; it never is for want of machines, which is an error


class GangControl(Protocol):
    """Nodes that are rented all at once, for one run, and returned all at once. Safe for several threads."""

    def held(self, request: GangRequest) -> bool:
        """Tell whether the gang is held already, so that starting it again asks for nothing.

        Raises ``OptionError`` for a gang of the same name that is another, or is being returned, and
        ``StorageError``.
        """
        ...

    def start(self, target: GangTarget, *, dry_run: bool = False) -> Gang:
        """Return the gang, whole; one that is held already as it is.

        A target for a revision other than the fleet's present one is refused, with the reason. Raises ``OptionError``
        (as ``held``, and for an unknown pool), ``InsufficientCapacityError`` when whatever had come was returned, and
        ``AwsUnavailableError`` when it is not known what became of the request: the same request can be made again.
        """
        ...

    def end(self, name: str, *, dry_run: bool = False) -> Sequence[ProviderCall]:
        """Return a gang's nodes; return what was asked. Unknown and ended gangs ask for nothing.

        Raises ``NotOursError`` with nothing done, and ``AwsError``.
        """
        ...


@runtime_checkable
class ReplacingFleetControl(Protocol):
    """A ``FleetControl`` whose provider starts a node only when another is gone, unless it is asked before."""

    def replace_leaving(self, notices: Sequence[Notice], *, dry_run: bool = False) -> ApplyResult:
        """Have nodes started at once in place of those with these firm notices, which keep the time that is left.

        Those that are gone or were replaced already are passed over; those that cannot be replaced yet are refused,
        with the reason. Raises ``NotOursError`` before anything is done, and the provider's errors.
        """
        ...
