"""``LocalFleet``: nodes of this machine that come and go as rented ones do.

*Planned* is what targets said, *requested* what the keeper is to have, *observed* what has come up and is there. All
of it stands in one file; any process may ``attach`` by the fleet's name.
"""

import atexit
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ebbflow.infra import files, processes
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError, InfraError, PriceError
from ebbflow.infra.local_fleet import begin, changes, marks
from ebbflow.infra.local_fleet.book import FleetBook, LocalNode
from ebbflow.infra.local_fleet.life import finish, look, teardown
from ebbflow.infra.local_fleet.machine_clock import MachineClock, shift
from ebbflow.infra.local_fleet.marks import Occupant
from ebbflow.infra.local_fleet.pools import LocalPool, PoolKind, check, shared
from ebbflow.infra.local_fleet.rooms import Room, rooms
from ebbflow.infra.local_fleet.store import BookFile
from ebbflow.infra.local_fleet.view import NodeView, known, offers, view
from ebbflow.infra.protocols import Applied, Refusal
from ebbflow.infra.spark import options
from ebbflow.infra.training import devices
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Notice, NoticeKind
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target
from ebbflow.planners.model.prices import Series

if TYPE_CHECKING:
    from ebbflow.infra.local_fleet.nodes import FleetNodes

_POLL = 0.05  # s between looks while something is waited for
_HELD = 5.0  # s for processes to stand still, which those in the midst of a system call do a moment later
_DOWN = 30.0  # s for the keeper to take everything down; beyond, the caller does it


class LocalFleet:
    """A handle on one fleet. A ``FleetControl``, a ``CapacitySource``, a ``PriceSource``, and what evicts apps.

    Get one by ``start`` or ``attach``. ``close`` lets go of the fleet, ``down`` takes it down; a fleet that is not to
    stay goes down with the process that started it, however that one ends. As a context manager it is taken down at
    the end by whoever started it. Safe for several threads.
    """

    def __init__(
        self,
        file: BookFile,
        uid: str,
        clock: Clock,
        *,
        hazard: Callable[[int, float], float] | None = None,
        own: Mapping[PoolKind, Room] | None = None,
        keeper: Callable[[], None] | None = None,
        mine: bool = False,
    ) -> None:
        self._file, self.uid, self._theirs = file, uid, clock
        book = file.read()
        self._clock = MachineClock(book.offset if book is not None else 0.0)
        self._hazard = hazard or (lambda losses, seconds: losses / max(seconds, 3600.0) * 3600.0)
        self._rooms = own or rooms(file.folder, self._clock)
        self._start_keeper = keeper or self._spawn_keeper
        self._mine, self._pid = mine, os.getpid()
        self._acting = threading.RLock()  # one change at a time of this handle
        self._child: subprocess.Popen[bytes] | None = None  # the keeper, where this process has started it

    @classmethod
    def start(
        cls,
        pools: Sequence[LocalPool],
        name: str = "local",
        *,
        stay: bool = False,
        gpus: Sequence[str] | None = None,
        wait: float | None = 120.0,
        hazard: Callable[[int, float], float] | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Start a fleet, and wait until its first nodes are up.

        Args:
            pools: what it consists of.
            name: by which others attach; also of the Spark cluster, where there is one.
            stay: whether the fleet survives this process; it then runs until ``down``.
            gpus: that GPU nodes share out, as ``CUDA_VISIBLE_DEVICES`` names them; by default all that this process
                may use, if they are enough for the first nodes. Without any, slots are processors.
            wait: for the first nodes, s; ``None``: not at all.
            hazard: estimates losses per node-hour from losses and node-seconds seen; by default their quotient, with
                an hour at least.
            clock: of whoever uses this handle: deadlines are told by it.

        Raises ``OptionError``, or ``ClusterError`` when the name is taken or the nodes do not come up.
        """
        options.check(name, 0, 1)
        found = check(pools)
        clock = clock or SystemClock()
        file = BookFile.of(name, clock)
        gpus = shared(found, devices.visible(), gpus)
        file.folder.mkdir(parents=True, exist_ok=True)
        with files.locked(str(file.folder / ".starting"), clock):  # until others see that it runs
            uid = begin.claim(file, name, found, gpus, stay, clock)
            fleet = cls(file, uid, clock, hazard=hazard, mine=not stay)
            if not stay:
                atexit.register(fleet._at_exit)
            try:
                fleet._ensure_keeper()
            except BaseException:
                fleet.down()
                raise
        try:
            if wait is not None:
                fleet.wait(lambda book: all(len(book.seen(p)) >= p.start for p in book.pools), wait)
        except BaseException:
            fleet.down()
            raise
        return fleet

    @classmethod
    def attach(
        cls,
        name: str = "local",
        *,
        hazard: Callable[[int, float], float] | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """Open a fleet that this or another process started. Raises ``ClusterError`` when there is none."""
        options.check(name, 0, 1)
        clock = clock or SystemClock()
        file = BookFile.of(name, clock)
        book = file.read()
        if book is None or not book.up:
            running = ", ".join(fleet.name for fleet in begin.list_fleets()) or "none"
            option = "" if name == "local" else f" --name {name}"
            raise ClusterError(
                f"there is no local fleet {name!r} (running: {running}); start it: ebbflow nodes up{option}"
            )
        return cls(file, book.uid, clock, hazard=hazard)

    # --- what it is -----------------------------------------------------------------------------------------

    @property
    def book(self) -> FleetBook:
        """Return all that is known of the fleet. Raises ``ClusterError`` once it is down."""
        book = self._file.read()
        if book is None or book.uid != self.uid or not book.up:
            raise ClusterError(f"the fleet {self._file.folder.name!r} has been taken down")
        return book

    @property
    def name(self) -> str:
        return self._file.folder.name

    @property
    def folder(self) -> Path:
        """Return where its file, logs and scratch are."""
        return self._file.folder

    @property
    def spark_master(self) -> str:
        """Return the URL of the Spark master; empty before the first Spark node has begun to start."""
        spark = self.book.spark
        return spark.master_url if spark is not None else ""

    @property
    def kept(self) -> bool:
        """Tell whether the keeper is there; ``repair`` and ``apply`` start another if it is not."""
        return marks.alive(self.book.keeper)

    def lost(self, id_: str) -> str:
        """Return how a node went that is gone or going; empty while it is there."""
        try:
            book = self.book
        except ClusterError as error:
            return str(error)
        node = book.node(id_)
        if node is not None and node.visible:
            return ""
        return book.ended(id_) or "there is no such node"

    def frozen(self, id_: str) -> bool:
        """Tell whether a node stands still."""
        node = self.book.node(id_)
        return node is not None and self._room(node).frozen(node)

    def view(self) -> tuple[NodeView, ...]:
        """Return all nodes, those that start too, with what runs on them."""
        book = look(self._file, self.book, self._rooms, self._clock)
        return view(book, self._rooms, self._shift())

    def wait(self, reached: Callable[[FleetBook], bool], seconds: float) -> FleetBook:
        """Return the book once ``reached`` holds of it. Raises ``ClusterError`` when that takes longer."""
        end = self._clock.now() + seconds
        while not reached(book := self.book):
            if self._clock.now() > end:
                short = [pool for pool in book.pools if len(book.seen(pool)) < book.plans[pool.name].nodes]
                why = "; ".join(f"{p.name}: {book.state(p, self._clock.now()).short_why}" for p in short)
                raise ClusterError(
                    f"the nodes of the fleet {self.name!r} are not there after {seconds:g} s"
                    + (f" ({why})" if why else "")
                    + f"; logs are in {self.folder / 'logs'}"
                )
            self._clock.sleep(_POLL)
        return book

    # --- FleetControl ---------------------------------------------------------------------------------------

    def observe(self) -> Fleet:
        """See ``FleetControl``. Raises ``ClusterError`` once the fleet is down, ``StorageError``."""
        with contextlib.suppress(ClusterError):
            self._ensure_keeper()  # what a crash of it took down comes again
        book = look(self._file, self.book, self._rooms, self._clock)
        now, by = self._clock.now(), self._shift()
        pools = tuple(_later(book.state(pool, now), by) for pool in book.pools)
        return Fleet(book.epoch, now + by, pools, _moved(book.told(), by))

    def take_notices(self, notices: Sequence[Notice]) -> int:
        """See ``FleetControl``. What is told ends no node: that is what ``notice`` does."""
        heard = _moved(notices, -self._shift())
        return self._change(lambda book: changes.hear(book, heard)).epoch

    def apply(self, target: Target, *, dry_run: bool = False) -> Applied:
        """See ``FleetControl``."""
        book = self.book
        known(book, target.pool)
        if target.nodes < 0 or not 0 <= target.on_demand <= target.nodes:
            raise OptionError(
                f"a target must have nodes >= on_demand >= 0; got {target.nodes} nodes, {target.on_demand} on-demand"
            )
        said = Applied(0)

        def change(current: FleetBook) -> FleetBook:
            nonlocal said
            later, asked, refused = changes.plan(current, target, self._clock.now())
            said = Applied(current.epoch, asked, refused, dry_run)
            return later

        with self._acting:
            look(self._file, book, self._rooms, self._clock)
            after = change(self.book) if dry_run else self._change(change)
            if not dry_run:
                self._ensure_keeper()
        return said if dry_run else replace(said, epoch=after.epoch)

    def terminate(self, ids: Sequence[str], *, dry_run: bool = False) -> Applied:
        """See ``FleetControl``. The nodes are gone when this returns. Raises ``ClusterError`` for one that stays."""
        said = Applied(0)

        def change(current: FleetBook) -> FleetBook:
            nonlocal said
            later, asked, refused = changes.end(current, ids, "ended, as was asked")
            said = Applied(current.epoch, asked, refused, dry_run)
            return later

        with self._acting:
            book = look(self._file, self.book, self._rooms, self._clock)
            if dry_run:
                change(book)
                return said
            book = self._change(change)
            for ask in said.asked:
                if (node := book.node(ask.of)) is not None:
                    finish(self._file, book, node, self._rooms, self._clock)
            return replace(said, epoch=self.book.epoch)

    def repair(self, *, dry_run: bool = False) -> Applied:
        """Start another keeper where there is none: it does the rest, as it does all the time."""
        book = self.book if dry_run else look(self._file, self.book, self._rooms, self._clock)
        refused: tuple[Refusal, ...] = ()
        if not dry_run:
            self._ensure_keeper()
        elif not marks.alive(book.keeper):
            refused = (
                Refusal(book.name, "its keeper is gone, and nothing is started before there is another"),
            )
        return Applied(book.epoch, (), refused, dry_run)

    def close(self) -> None:
        """Let go of the fleet, which goes on. May be called twice."""

    # --- CapacitySource, PriceSource ------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """See ``CapacitySource``: the nodes of all pools, with the fleet's own epoch."""
        fleet = self.observe()
        nodes = sorted((node for pool in fleet.pools for node in pool.nodes), key=lambda node: node.id)
        hazard = self._hazard(*self.book.experience(self._clock.now()))
        return Capacity(fleet.epoch, tuple(nodes), fleet.notices, fleet.at, hazard)

    def offers(self, pool: str) -> tuple[Offer, ...]:
        """Return what a pool's nodes pretend to cost. Raises ``OptionError`` for an unknown pool."""
        return offers(known(self.book, pool))

    def series(self, zone: str, instance_type: str, start: float) -> Series:
        """Raise ``PriceError``: the prices of local nodes stand still, and nobody has kept them."""
        raise PriceError(
            f"there are no past prices of {instance_type}: local nodes pretend to cost the same always"
        )

    def on_demand(self, instance_type: str) -> float | None:
        """Return what an on-demand node of this type pretends to cost, $/h; ``None`` when there is none."""
        found = [p.price_in("on-demand") for p in self.book.pools if p.instance_type == instance_type]
        return min(found, default=None)

    def problems(self) -> list[str]:
        """Return what keeps pools from starting nodes."""
        return [f"{name}: {plan.failed}" for name, plan in self.book.plans.items() if plan.failed]

    def dollars(self) -> float:
        """Return what all nodes of this fleet have pretended to cost until now."""
        return self.book.dollars(self._clock.now())

    # --- what may happen to nodes -----------------------------------------------------------------------------

    def notice(self, id_: str, seconds: float = 120.0, kind: NoticeKind = "interruption") -> float:
        """Give a node notice; an interrupted one is ended ``seconds`` from now, a rebalance advice is only said.

        What runs there is told at once. A later notice moves the deadline. Returns it, Unix time in s. Raises
        ``OptionError``, or ``ClusterError`` for a node that is not there.
        """
        if not 0 <= seconds < float("inf"):
            raise OptionError(f"seconds must be >= 0 and finite; got {seconds}")
        deadline, by = self._clock.now() + seconds, self._shift()
        if kind == "rebalance":
            self.book.there(id_)
            self.take_notices([Notice(id_, deadline + by, kind)])
            return deadline + by

        def change(book: FleetBook) -> FleetBook:
            book.there(id_)
            return book.noted(id_, deadline=deadline).short(self._clock.now())

        book = self._change(change)
        node = book.there(id_)
        self._room(node).tell(book, node, deadline)
        return deadline + by

    def kill(self, id_: str) -> None:
        """Take a node away at once: SIGKILL to every process of every app on it. It is gone when this returns.

        Its pool starts another if it is planned. Raises ``ClusterError`` for a node that is not there.
        """

        def change(book: FleetBook) -> FleetBook:
            book.there(id_)
            return book.noted(id_, fate="killed without notice")

        book = self._change(change)
        if (node := book.node(id_)) is not None:
            finish(self._file, book, node, self._rooms, self._clock)

    def freeze(self, id_: str) -> None:
        """Stop (SIGSTOP) all processes of a node, as when its machine hangs. Raises ``ClusterError``."""
        self._hold(id_, True)

    def thaw(self, id_: str) -> None:
        """Let a frozen node go on. Raises ``ClusterError``."""
        self._hold(id_, False)

    def add(self, pool: str, count: int = 1) -> int:
        """Plan ``count`` nodes more in a pool, or fewer, within its limits; return how many are planned then.

        Fewer end no node: name those that are to leave to ``terminate``. Raises ``OptionError``.
        """
        found = known(self.book, pool)

        def change(book: FleetBook) -> FleetBook:
            plan = book.plans[pool]
            nodes = min(max(plan.nodes + count, found.least), found.most)
            later = book.planned(pool, nodes=nodes, reason="by hand", again=0.0)
            return changes.cancel(later, pool).short(self._clock.now())

        with self._acting:
            book = self._change(change)
            self._ensure_keeper()
        return book.plans[pool].nodes

    def shut(self, pool: str, seconds: float) -> None:
        """Let a pool get no node for ``seconds``, as when a market has no capacity; 0: let it get some again."""
        if not 0 <= seconds < float("inf"):
            raise OptionError(f"seconds must be >= 0 and finite; got {seconds}")
        known(self.book, pool)
        self._change(lambda book: book.planned(pool, shut=self._clock.now() + seconds))

    # --- apps -----------------------------------------------------------------------------------------------

    def nodes_for(
        self,
        app: str,
        logs: Path | str | None = None,
        *,
        grace: float = 30.0,
        environment: Mapping[str, str] | None = None,
    ) -> "FleetNodes":
        """Return a ``NodePool`` for one launcher of ``app`` on the fleet's GPU nodes; see ``FleetNodes``."""
        from ebbflow.infra.local_fleet.nodes import FleetNodes

        if not app:
            raise OptionError("an app must have an id")
        return FleetNodes(self, app, logs, grace=grace, environment=environment, clock=self._clock)

    def left_over(self, app: str) -> tuple[Occupant, ...]:
        """Return what runs for ``app`` on any node, whoever started it."""
        return marks.occupants(self.uid, app=app)

    def occupants(self, node: str = "") -> tuple[Occupant, ...]:
        """Return what runs for any app, on all nodes or one."""
        return marks.occupants(self.uid, node)

    def evict(self, app: str, node: str) -> bool:
        """Kill what ``app`` runs on ``node``, in whichever process it was started; true once nothing is left.

        Raises ``ClusterError`` when something outlives SIGKILL for 20 s.
        """
        if not app or not node:
            raise OptionError(f"an app and a node must be named; got {app!r} and {node!r}")
        marks.destroy(marks.below(self.uid, node, app), self._clock)
        return True

    def present(self) -> list[tuple[str, str]]:
        """Return each app with each node on which anything of it runs, whoever started it."""
        return sorted({(one.app, one.node) for one in self.occupants()})

    # --- its end --------------------------------------------------------------------------------------------

    def down(self) -> None:
        """End all nodes and everything that runs on them. May be called twice; logs stay."""
        atexit.unregister(self._at_exit)
        book = self._file.read()
        if book is None or book.uid != self.uid:
            return
        if book.up:
            self._change(lambda current: replace(current, up=False))
        end = self._clock.now() + _DOWN
        while marks.alive(book.keeper) and book.uid == self.uid and self._clock.now() < end:
            self._clock.sleep(_POLL)
            book = self._file.read() or book
        if book.uid != self.uid:
            return
        if marks.alive(book.keeper):
            processes.destroy(begin.keeper_mark(self.uid), [], self._clock)
        teardown(self._file, self.uid, self._rooms, self._clock)
        while processes.members(begin.keeper_mark(self.uid)) and self._clock.now() < end:
            self._clock.sleep(_POLL)
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=5)
            self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mine:
            self.down()

    # --- how ------------------------------------------------------------------------------------------------

    def _hold(self, id_: str, still: bool) -> None:
        """Stop a node's processes or let them go on, and wait, bounded, until that shows."""
        book = self.book
        node = book.there(id_)
        room = self._room(node)
        room.freeze(book, node, still)
        end = self._clock.now() + _HELD
        while room.frozen(node) != still and self._clock.now() < end:
            self._clock.sleep(_POLL)

    def _shift(self) -> float:
        """Return what to add to a time of the book to have it by the clock of whoever uses this handle, s."""
        return shift(self._theirs.now(), self._clock)

    def _change(self, how: Callable[[FleetBook], FleetBook]) -> FleetBook:
        return self._file.change(self.uid, how)

    def _room(self, node: LocalNode) -> Room:
        pool = self.book.pool(node.pool)
        assert pool is not None
        return self._rooms[pool.kind]

    def _ensure_keeper(self) -> None:
        if not marks.alive(self.book.keeper):
            self._start_keeper()

    def _spawn_keeper(self) -> None:
        child = begin.spawn_keeper(self._file, self.uid, self._clock)
        if self._mine:
            self._child = child
        else:
            child.returncode = 0  # Popen warns of children not waited for; this one may outlive us

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:  # not in a forked child, which runs the same handlers
            try:
                self.down()
            except InfraError as error:  # the keeper sees that we are gone
                sys.stderr.write(f"{error}\n")


def _moved(notices: Sequence[Notice], by: float) -> tuple[Notice, ...]:
    return tuple(replace(notice, deadline=notice.deadline + by) for notice in notices)


def _later(state: PoolState, by: float) -> PoolState:
    since = None if state.short_since is None else state.short_since + by
    return replace(state, short_since=since, on_demand_since=state.on_demand_since + by)
