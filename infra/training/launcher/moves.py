"""What is asked of a generation that runs, and its doing: to stop, to yield to a notice, to move to other nodes."""

import threading
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

from ebbflow.infra.clock import Clock
from ebbflow.infra.training.launcher.generation import Generation
from ebbflow.infra.training.launcher.hang import StragglerDetector
from ebbflow.infra.training.launcher.job import Options, fresh_name
from ebbflow.infra.training.launcher.journal import Record
from ebbflow.infra.training.launcher.members import Members
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.training.replicas import whole_replicas

if TYPE_CHECKING:
    from ebbflow.infra.training.launcher.service import Workforce

_PREPARING = 0.5  # of the time to a deadline, that new nodes may take; the rest is for saving
_SPARE = 3.0  # seconds before a deadline by which a run has to save: processes take their time to end
_LEAST = 1.0  # seconds to save in, however late it is
_UNSTARTED = "did not start"
_LOST = "lost its processes again and again"


Join = Callable[[Generation, dict[str, int]], None]


class Control:
    """The latest wishes: a placement to move to, and a deadline to stop by. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._target: dict[str, int] | None = None
        self._reason = ""
        self._by: float | None = None
        self._stop: float | None = None
        self._ending = (0, "")  # a generation, and why it is to end
        self.closed = False

    def resize(self, placement: Mapping[str, int], reason: str = "resize", by: float | None = None) -> None:
        with self._lock:
            self._target, self._reason, self._by = dict(placement), reason, by
            self._changed.set()

    def end_generation(self, number: int, reason: str) -> None:
        with self._lock:
            self._ending = number, reason
            self._changed.set()

    def ending(self, number: int) -> str:
        """Return why this generation is to end; empty: not requested."""
        of, reason = self._ending
        return reason if of == number else ""

    def stop(self, deadline: float) -> None:
        with self._lock:
            self._stop = deadline if self._stop is None else min(self._stop, deadline)
            self._changed.set()

    def close(self) -> None:
        self.closed = True
        self._changed.set()

    @property
    def target(self) -> dict[str, int] | None:
        return self._target

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def by(self) -> float | None:
        """Return when the nodes outside ``target`` must be free, seconds since the Unix epoch; ``None``: any time."""
        return self._by

    @property
    def deadline(self) -> float | None:
        """Return when to stop, seconds since the Unix epoch; ``None``: not requested."""
        return self._stop

    def drop(self, placement: Mapping[str, int]) -> None:
        """Forget the wish for ``placement``, unless it has been replaced by another."""
        self.change(placement, None)

    def change(self, placement: Mapping[str, int], other: Mapping[str, int] | None) -> None:
        """Wish for ``other`` instead of ``placement``, by the same time, unless that has been replaced by another."""
        with self._lock:
            if self._target == dict(placement):
                self._target = None if other is None else dict(other)

    def pause(self, seconds: float, clock: Clock) -> None:
        """Wait ``seconds``, or until something new is asked."""
        clock.wait(self._changed, seconds)
        self._changed.clear()


class Resizer:
    """Serves one run's wishes, one generation after another."""

    def __init__(
        self, control: Control, members: Members, record: Record, options: Options, clock: Clock
    ) -> None:
        self._control, self._members, self._record = control, members, record
        self._options, self._clock = options, clock
        self._lateness = StragglerDetector() if options.stragglers else None
        self._preparing: dict[str, int] = {}  # placement whose new nodes have been started
        self._leaving: set[str] = set()  # nodes that were asked to leave in place
        self._prepared_by = inf  # when the run moves even if they are not ready
        self._told_by = inf  # when those with a notice save, even if none has joined that they can tell

    def restart(self) -> None:
        """Begin with a new generation."""
        self._preparing = {}
        self._leaving = set()
        self._told_by = inf
        if self._lateness is not None:
            self._lateness.restart()

    def serve(
        self, generation: Generation, grace: float, join: Join = lambda generation, nodes: None
    ) -> None:
        """Pass on to the generation what was asked; it gets ``grace`` seconds to save where nothing else is said.

        ``join`` lets nodes join a generation that others leave and join while it trains.
        """
        control = self._control
        if control.deadline is not None:
            self._record.stand(state="stopping")
            generation.ask_to_stop("stop", control.deadline)
        names = [name for name in generation.placement if name in self._members]
        notices = [at for name in names if (at := self._members[name].notice) is not None]
        workforce = generation.workforce if generation.stop is None else None
        if workforce is not None and workforce.changes and self._serve_in_place(generation, workforce, join):
            return
        if notices:
            generation.ask_to_stop("notice", min(notices))
        elif (reason := control.ending(generation.number)) and generation.stop is None:
            generation.ask_to_stop(reason, self._clock.now() + grace)
        elif control.target is not None and generation.stop is None:
            self._move(control.target, generation, grace)

    def _serve_in_place(self, generation: Generation, workforce: "Workforce", join: Join) -> bool:
        """Let nodes join and leave while the others train; return whether nothing else is to be done."""
        control, members = self._control, self._members
        if control.deadline is not None or control.ending(generation.number):
            return False
        target = control.target
        placement = generation.placement
        if target is not None and any(placement.get(name, slots) != slots for name, slots in target.items()):
            return False  # a node's share of the machine changes
        noticed = [name for name in placement if name in members and members[name].notice is not None]
        leaving = set(noticed) | (set(placement) - set(target) if target is not None else set())
        staying = set(placement) - leaving
        if leaving and (not staying or sum(placement[name] for name in staying) < self._options.minimum):
            return False
        if any(workforce.must_stay(name) for name in leaving):
            return False
        if not noticed or not all(workforce.outside(name) for name in staying):
            self._told_by = inf
        else:
            now, end = self._clock.now(), min(members[name].notice or inf for name in noticed)
            self._told_by = min(self._told_by, now + _PREPARING * (end - now))
            if now >= self._told_by:
                return False
        for name in sorted(self._leaving & staying):
            self._record.note("worker-stays", node=name)
            workforce.stay(name)
        self._leaving &= leaving
        for name in leaving - self._leaving:
            self._leaving.add(name)
            self._record.note("worker-leaves", node=name)
            if workforce.outside(name):
                generation.dismiss(name, "it left before it had joined")
            else:
                workforce.retire(name)
        if target is not None:
            new = {name: slots for name, slots in target.items() if name not in placement}
            members.start({name: slots for name, slots in new.items() if workforce.may_start(name)})
            failed = self._unready(new) | {name: _LOST for name in new if not workforce.may_start(name)}
            ready = {name: slots for name, slots in new.items() if name not in failed and members[name].ready}
            if ready:
                join(generation, ready)
            if failed:
                self._go_without(failed, target, generation)
            elif target == placement and not workforce.retired & set(target):  # which start again
                control.drop(target)
        return True

    def _go_without(
        self, failed: Mapping[str, str], target: Mapping[str, int], generation: Generation
    ) -> None:
        """End ``failed`` nodes, of which it says why each is, and move to the others of ``target``."""
        self._members.end(failed)
        rest = {name: slots for name, slots in target.items() if name not in failed}
        rest = whole_replicas(rest, self._options.replica)
        reason = "; ".join(f"{name} {why}" for name, why in failed.items())
        unstarted = [name for name, why in failed.items() if why == _UNSTARTED]
        self._record.note("resize-changed", without=list(failed), unstarted=unstarted, reason=reason)
        self._control.change(target, rest if rest and rest != generation.placement else None)

    def look_for_straggler(self, report: Report, generation: Generation) -> None:
        """Ask for a move away from the node that holds all others up, when a report shows that one does."""
        if self._lateness is None or self._control.target is not None:
            return
        rank = self._lateness.look(self._clock.now(), report.content.get("compute_seconds"))
        if rank is not None and generation.workforce is not None:
            rank = generation.workforce.member(rank)
        if rank is None or not (node := generation.node_of(rank)):
            return
        target = {n: s for n, s in generation.placement.items() if n != node}
        if self._options.replace:
            target[fresh_name(self._members.named)] = generation.placement[node]
        if target:
            self._record.note("straggler", rank=rank, node=node, target=target)
            self._control.resize(target, "straggler")

    def _move(self, target: dict[str, int], generation: Generation, grace: float) -> None:
        """Start the nodes to move to; when all are ready, or given up, ask the run to save and leave."""
        if target == generation.placement:
            self._control.drop(target)
            return
        by, now = self._control.by, self._clock.now()
        new = [name for name in target if name not in generation.placement]
        if target != self._preparing:
            self._preparing = target
            self._prepared_by = inf if by is None else now + _PREPARING * (by - now)
            self._members.start({name: target[name] for name in new})
        if failed := self._unready(new):
            self._go_without(failed, target, generation)
        elif now >= self._prepared_by or all(self._members[name].ready for name in new):
            end = now + grace if by is None else min(now + grace, max(by - _SPARE, now + _LEAST))
            generation.ask_to_stop(self._control.reason, end)

    def _unready(self, names: Iterable[str]) -> dict[str, str]:
        """Return nodes that cannot be waited for, and why."""
        members, form = self._members, self._options.form
        return {name: _UNSTARTED for name in names if name not in members or members.late(name, form)}
