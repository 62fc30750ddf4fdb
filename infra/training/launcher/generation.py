"""One generation, from the order to launch until the last of its processes is gone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ebbflow.infra.clock import Clock
from ebbflow.infra.protocols import GenerationEnd, GenerationKind, RankFailure
from ebbflow.infra.training.channel.wire import AgentEnd, Heartbeat, Order
from ebbflow.infra.training.launcher import decide
from ebbflow.infra.training.launcher import job as jobs
from ebbflow.infra.training.launcher.hang import HangRule, HangWatch
from ebbflow.infra.training.launcher.members import Loss, Members, Note, SlotTime
from ebbflow.infra.training.process.channel import Report, StopRequest

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ebbflow.infra.training.channel.exchange import Exchange, GenerationChannel
    from ebbflow.infra.training.launcher.service import Workforce

_TIMEOUT = 10.0  # seconds for a node to end processes that it has been told to kill
_SPARE = 2.0  # seconds past a deadline before what is left is killed
_SAID_END = ("finished", "stopped", "preflight")


@dataclass(slots=True)
class Generation:
    """Follows the processes of one world: ``look`` is called until it returns true; ``end`` says how it ended."""

    number: int
    placement: dict[str, int]
    members: Members
    exchange: "Exchange"
    clock: Clock
    note: Note
    hang: HangRule
    rescue: float  # seconds that survivors get to save
    form: float  # seconds in which the processes must come up
    on_report: Callable[[Report], None] = lambda _: None
    own_checkpoints: bool = False  # whether the script knows of no launcher (``RunSettings``)
    workforce: "Workforce | None" = None  # where gradients meet at aggregators
    minimum: int = 1  # slots that the training needs
    begun: float = field(init=False)
    stop: StopRequest | None = None
    _watch: HangWatch = field(init=False)
    _held: SlotTime = field(init=False)
    _channel: "GenerationChannel | None" = None  # once it is launched
    _store: "TCPStore | None" = None  # of its processes
    _ends: dict[str, AgentEnd] = field(default_factory=dict)
    _lost: dict[str, Loss] = field(default_factory=dict)
    _hung: str = ""
    _suspects: list[str] = field(default_factory=list)
    _cutoff: float | None = None
    _killed: float | None = None  # when the nodes were told to end what is left
    _nodes: dict[int, str] = field(default_factory=dict)  # rank -> node
    _said: set[str] = field(default_factory=set)
    _first: int = -1
    _last: int = -1
    _saved: int = -1
    _unsaved: int | None = None  # step of an end of the run that was not saved
    _running: bool = False  # whether all processes were seen, of a script with own checkpoints
    _requested: bool = False  # whether it was asked to stop, for whatever reason but a loss

    def __post_init__(self) -> None:
        self.begun = self.clock.now()
        self._held = SlotTime(self.begun)
        self._watch = HangWatch(self.hang.quiet() if self.own_checkpoints else self.hang, self.begun)

    def launch(self, order: Order, logs: Mapping[str, str]) -> None:
        """Send the order to all nodes of the placement; ``logs`` is each node's directory for them.

        Ranks follow the placement's order. Raises ``TrainingError``.
        """
        store = self._store = jobs.serve_store()
        ranks, first = {}, 0
        for name, slots in self.placement.items():
            ranks[name] = range(first, first + slots)
            first += slots
        by_key = {self.members[name].key: own for name, own in ranks.items()}
        if self.workforce is not None:
            self._channel = self.workforce.open(ranks, by_key, store.port)
        else:
            self._channel = self.exchange.open(self.number, by_key, store.port)
        for place, (name, own) in enumerate(ranks.items()):
            self.members.send(
                name,
                replace(
                    order,
                    generation=self.number,
                    nodes=len(ranks),
                    slots=len(own),
                    node=place,
                    first_rank=own.start,
                    world=first,
                    store=store.port,
                    logs=logs[name],
                ),
            )

    def join(self, placement: Mapping[str, int], order: Order, logs: Mapping[str, str]) -> None:
        """Send the order to nodes whose processes join the others at the end of a step."""
        assert self.workforce is not None
        assert self._store is not None
        for name, launch in self.workforce.orders(
            placement, replace(order, generation=self.number, store=self._store.port), self.members, logs
        ).items():
            self._ends.pop(name, None)
            self._lost.pop(name, None)
            self.placement[name] = launch.slots
            self._held.enter(name, self.clock.now())
            self.members.send(name, launch)
            self.note("worker-joins", node=name, ranks=[launch.first_rank + i for i in range(launch.slots)])

    def recovers(self, name: str, *, script_failed: bool = False, note: bool = True) -> bool:
        """Return whether the others train on when a node's workers are lost; ``note`` why, where they do not."""
        if self.workforce is None:
            return False
        left = sum(self.placement[node] for node in self._left if node != name)
        ends = self._ending
        found = self.workforce.recovery(name, left, self.minimum, stopping=ends, script_failed=script_failed)
        if note and not found.in_place and not ends:
            self.note("restarts", node=name, reason=found.reason)
        return found.in_place

    @property
    def _ending(self) -> bool:
        return self.stop is not None or self._killed is not None or bool(self._said & set(_SAID_END))

    def close(self) -> None:
        """Release what only its processes needed, once they are gone."""
        if self._channel is not None:
            self._channel.close()
        if self.workforce is not None and self._store is not None:
            self.workforce.close()
        self._store = None

    # --- what happens to it -------------------------------------------------------------------------------

    def ask_to_stop(self, reason: str, deadline: float) -> None:
        """Ask all processes to save and leave; those left at the deadline are killed."""
        if self.stop is None or self.stop.deadline is None or deadline < self.stop.deadline:
            self.stop = StopRequest(reason, deadline, lost=self.stop is not None and self.stop.lost)
            self._request(self.stop)
            self.note("stop-requested", reason=reason, deadline=deadline)
            self._cut(deadline + _SPARE)
            self._requested = True

    def look(self, lost: Mapping[str, Loss]) -> bool:
        """Take in what happened, with the nodes ``lost`` since the last look, and return whether all is over."""
        now = self.clock.now()
        for name, loss in lost.items():
            if name in self.placement:
                self._held.leave(name, self.placement[name], now)
            if name in self.placement and name not in self._ends:
                if self.recovers(name):
                    self._release(name, loss.how)
                    continue
                self._lost[name] = loss
                self._without(name)
                self._suspects += [name] if loss.hung else []
                self._end_after_loss(f"node {name} was lost: {loss.how}", now)
        for name in self._left:
            if name not in self.members:
                self._lost[name] = Loss("ended by the launcher")
                self._without(name)
        self._listen(now)
        self._collect(now)
        self._look_at_workforce(now)
        if not (left := self._left):
            self._listen(now)  # what was said last
            return True
        self._look_for_hang(now, left)
        self._enforce(now, left)
        return False

    @property
    def step(self) -> int:
        return max(self._last, self._saved)

    def node_of(self, rank: int) -> str:
        """Return the node that a rank runs on; empty when that is not known."""
        return self._nodes.get(rank, "")

    def end(self) -> GenerationEnd:
        """Return how it ended. ``idle`` is left to the launcher, which knows the generations before."""
        failures = decide.failures_of(self._ends, self.members.log)
        kind, reason = self._outcome(failures)
        gone = self.workforce.gone if self.workforce is not None else ()
        ended = self.clock.now()
        return GenerationEnd(
            generation=self.number, kind=kind, reason=reason, placement=dict(self.placement),
            left=self.members.usable(self.placement, gone), failures=failures,
            suspects=tuple(dict.fromkeys(self._suspects)), started=self.begun, ended=ended,
            first_step=self._first, last_step=self.step, saved_step=self._saved,
            slot_seconds=self._held.total(self.placement, ended),
        )  # fmt: skip

    # --- how ----------------------------------------------------------------------------------------------

    @property
    def _left(self) -> list[str]:
        """Return the nodes whose agents still run."""
        return [n for n in self.placement if n not in self._ends and n not in self._lost]

    def _without(self, name: str) -> None:
        if self.workforce is not None:
            self.workforce.end_node(name)

    def _request(self, stop: StopRequest) -> None:
        if self._channel is not None:
            self._channel.request_stop(stop)
        if self.own_checkpoints:
            for name in self._left:
                if name in self.members:
                    self.members.send(name, Order("terminate", generation=self.number))

    def _cut(self, at: float) -> None:
        self._cutoff = at if self._cutoff is None else min(self._cutoff, at)

    def _end_after_loss(self, reason: str, now: float) -> None:
        """Somebody is gone: the others cannot continue, and get a while to save what they have."""
        before, self.stop = self.stop, decide.after_loss(self.stop, reason, now + self.rescue)
        if before is None or not (before.lost or self.own_checkpoints):  # which SIGTERM tells, once
            self._request(self.stop)
        # workers that have not met wait for each other, and have nothing to save
        waits = self.workforce is not None and not self.workforce.formed and "started" not in self._said
        if waits or before is None:
            self._cut(now if waits else now + self.rescue)

    def _listen(self, now: float) -> None:
        for report in self._channel.reports() if self._channel is not None else ():
            self._watch.report(now)
            self._said.add(report.kind)
            if report.kind == "finished" and not report.content.get("saved"):
                self._unsaved = report.step
            begins = report.kind == "started"
            if begins and self.own_checkpoints and self._first >= 0:
                continue  # its output has said so
            if (begins and not self.own_checkpoints) or report.kind in (*_SAID_END, "members", "moments"):
                said = {**report.content, "step": report.step, "rank": report.rank, "at": report.time}
                self.note(report.kind, **said)
            if self.workforce is not None and self.workforce.hear(report):
                self.ask_to_stop(self.workforce.obstacle, now + self.rescue)
            if begins and self._first < 0:
                self._first, self._watch.rule = report.step, self.hang
            self._last = max(self._last, report.step)
            if decide.saves(report):
                self._saved = max(self._saved, report.step)
            self.on_report(report)

    def _collect(self, now: float) -> None:
        for name in self._left:
            member = self.members[name]
            if member.beat is not None and member.beat.generation == self.number:
                self._nodes.update({rank.rank: name for rank in member.beat.ranks})
                self._watch.look(now, member.beat.ranks)
                self._look_for_start(now)
                self._take_printed(member.beat, now)
            if (end := member.wire.agent_end(self.number)) is not None:
                if end.state != "succeeded" and self.recovers(name, script_failed=decide.script_failed(end)):
                    self._release(name, decide.describe_end(end), idle=not decide.script_failed(end))
                    continue
                if self.workforce is not None and name in self.workforce.retired and self.recovers(name):
                    self.dismiss(name, "it was asked to leave")
                    continue
                self._ends[name] = end
                self._without(name)
                self._take_printed(end, now)
                self.note("agent-ended", node=name, state=end.state, at=end.time)
                if end.state != "succeeded" and self._killed is None:
                    self._end_after_loss(f"processes of node {name} failed", now)

    def _look_for_start(self, now: float) -> None:
        """Take note that all processes run, where none of them says so itself."""
        if self.own_checkpoints and not self._running and len(self._nodes) == sum(self.placement.values()):
            self._running = True
            self.note("started", own_checkpoints=True, world=len(self._nodes), rank=0, at=now)

    def _take_printed(self, shown: Heartbeat | AgentEnd, now: float) -> None:
        """Take in how far the output of a script with own checkpoints says that it is."""
        if not self.own_checkpoints or shown.last_step <= self._last:
            return
        if self._first < 0:
            self._first, self._watch.rule = shown.first_step, self.hang
            self.on_report(Report("started", 0, now, self._first))
        self._last = shown.last_step
        self._watch.report(now)
        size = {"gpus": sum(self.placement.values()), "nodes": len(self.placement)}
        self.on_report(Report("step", 0, now, self._last, size))

    def dismiss(self, name: str, how: str) -> None:
        """Let the others train on without a node, which is not needed any more."""
        self._release(name, how)
        self.members.end([name])

    def _release(self, name: str, how: str, *, idle: bool = False) -> None:
        """Let the others train on without a node; one that is ``idle`` may join them again."""
        workforce = self.workforce
        assert workforce is not None
        for rank in workforce.ranks.get(name, ()):
            self._watch.forget(rank, self.clock.now())
        workforce.leave(name, how)
        self._held.leave(name, self.placement.pop(name), self.clock.now())
        self.note("worker-lost", node=name, how=how, idle=idle)
        if idle and name in self.members and self.members[name].notice is None:
            workforce.idle.append(name)

    def _look_at_workforce(self, now: float) -> None:
        """Let workers train on without those that do not move, or without an aggregator."""
        workforce = self.workforce
        if workforce is None or self._killed is not None:
            return
        for name in workforce.stranded(self._left) if self._ending else ():
            self.members.send(name, Order("end", generation=self.number))
        if not workforce.changes:
            return
        if not self._ending and (reason := workforce.deserted(self._left)):
            self._end_after_loss(reason, now)
        for name in self._left:
            workforce.follow(name, self.members[name].beat)
        for name, how in workforce.silent().items():
            if self.recovers(name, note=False):  # else it is looked at again
                self._suspects.append(name)
                self.dismiss(name, how)
        for name in workforce.lost_aggregators():
            self.note("aggregator-lost", aggregator=name)
            if not workforce.has_state:
                self._end_after_loss(f"{name} was lost, which had no mirror", now)

    def _look_for_hang(self, now: float, left: list[str]) -> None:
        if self._hung or self._killed is not None:
            return
        if (verdict := self._watch.verdict(now)) is None:
            if not (self.stop or self._said or self._nodes) and now - self.begun > self.form + _SPARE:
                self._cut(now)  # the agents should have given up by now
            return
        nodes = {self.node_of(rank) for rank in verdict.ranks}
        if self.stop or (nodes and all(map(self.recovers, nodes))):  # none waits for a deadline because of it
            for rank in verdict.ranks:
                self.note("hang", reason=verdict.reason, ranks=[rank], nodes=[self.node_of(rank)])
                self._kill(rank)
                self._watch.forget(rank, now)
                if self.workforce is not None and not self.stop:
                    self.workforce.leave_rank(rank)
            return
        self._hung = verdict.reason
        self._suspects += [self._nodes[rank] for rank in verdict.ranks if rank in self._nodes]
        self.note("hang", reason=verdict.reason, ranks=list(verdict.ranks), nodes=self._suspects)
        for rank in verdict.ranks:
            self._kill(rank)
        self._end_after_loss(verdict.reason, now)

    def _kill(self, rank: int) -> None:
        """Kill one process, so that those that wait for it notice and save."""
        if (name := self.node_of(rank)) in self.members:
            self.members.send(name, Order("kill", generation=self.number, rank=rank))

    def _enforce(self, now: float, left: list[str]) -> None:
        if self._cutoff is None or now < self._cutoff:
            return
        if self._killed is None:
            self._killed = now
            self.note("cut-off", nodes=left)
            for name in left:
                self.members.send(name, Order("end", generation=self.number))
        elif now - self._killed > _TIMEOUT:
            for name in left:  # a node that cannot even kill is no use
                self._lost[name] = Loss("it did not end its processes when requested", hung=True)
                self._suspects.append(name)
            self.members.end(left)

    def _outcome(self, failures: tuple[RankFailure, ...]) -> tuple[GenerationKind, str]:
        if self._unsaved is not None:
            return "failed", f"the script ended, and step {self._unsaved} is not saved"
        if "finished" in self._said:
            return "finished", "the script finished"
        if "preflight" in self._said and not failures:
            return "preflight", "the trial steps passed"
        if self._hung:
            return "hung", self._hung
        if self._lost:
            how = "; ".join(f"node {name}: {loss.how}" for name, loss in self._lost.items())
            return ("hung" if all(loss.hung for loss in self._lost.values()) else "lost"), how
        if self.own_checkpoints and self._requested and self.stop is not None:
            # whatever the status: a script may leave with 0 after SIGTERM, and is not done for that
            killed = "" if self._killed is None else ": killed at the deadline"
            return "stopped", f"{self.stop.reason}{killed}"
        if self.workforce is not None and not self.workforce.has_state and self.stop is not None:
            return "lost", self.stop.reason
        if failures and any(f.rank is not None for f in failures):
            return "failed", decide.describe(next(f for f in failures if f.rank is not None))
        if "stopped" in self._said:
            return "stopped", self.stop.reason if self.stop else "the run was requested to stop"
        if failures:
            unformed = all(end.state == "unformed" for end in self._ends.values())
            return ("unformed" if unformed or not self._said else "failed"), decide.describe(failures[0])
        if self.stop is None and self.own_checkpoints and not decide.any_ended(self._ends):
            return "finished", "the script ended with status 0"
        return decide.silent(self.stop, self._ends, self.form)
