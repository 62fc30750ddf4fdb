"""``TorchTrainer``: one elastic PyTorch training, generation after generation, on a pool of nodes."""

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import InfraError, TrainingError
from ebbflow.infra.protocols import (
    Continue,
    Decide,
    GenerationEnd,
    Halt,
    TrainingEvent,
    TrainingJob,
    TrainingState,
    TrainingStatus,
)
from ebbflow.infra.training import channel as wires
from ebbflow.infra.training.channel import Channel, Report, RunSettings
from ebbflow.infra.training.launcher import placement as placements
from ebbflow.infra.training.launcher.control import Control
from ebbflow.infra.training.launcher.decide import Persist
from ebbflow.infra.training.launcher.generation import Generation
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.infra.training.launcher.journal import Journal
from ebbflow.infra.training.launcher.lateness import Lateness
from ebbflow.infra.training.launcher.members import Members
from ebbflow.infra.training.launcher.pool import NodePool
from ebbflow.infra.training.launcher.wire import Order
from ebbflow.planners.errors import EbbflowError, OptionError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# ``torch._dynamo`` takes seconds, and the first DistributedDataParallel of a process imports it
PRELOAD = ("torch.nn.parallel", "torch._dynamo", "ebbflow.infra.training.run")
_LOOK = 0.03  # seconds between looks
_ENDED: tuple[TrainingState, ...] = ("finished", "stopped", "failed")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_STORE_TIMEOUT = timedelta(seconds=30)


class TorchTrainer:
    """Runs one training on ``pool``; implements ``infra.protocols.Trainer``.

    Args:
        pool: where nodes come from; closed with the trainer.
        logs: folder for the processes' logs; by default ``logs`` in the run's folder, which must then be local.
        decide: what follows when a generation has ended; by default ``Persist``.
        minimum: slots below which the default waits for more.
        patience: seconds that the run may wait for nodes before it fails.
        rescue: seconds that survivors of a loss get to save.
        form: seconds in which started processes must meet, and started nodes report.
        hang: bounds beyond which something is taken to hang.
        stragglers: whether a node that holds the others up is replaced.
        replace: whether a node that hung, or holds up, is replaced by a new one or left out.
        preload: modules that nodes import once, before processes start from them; scripts that cannot bear to be
            forked from such a process need ``start="spawn"``.
        port: of the store, on the pool's host; 0: any.
        on_report: called in the launcher's thread with all that processes say.

    Raises ``TrainingError`` when the port cannot be had.
    """

    def __init__(
        self,
        pool: NodePool,
        *,
        logs: Path | str | None = None,
        decide: Decide | None = None,
        minimum: int = 1,
        patience: float = 3600.0,
        rescue: float = 10.0,
        form: float = 60.0,
        hang: HangRule | None = None,
        stragglers: bool = True,
        replace: bool = True,
        preload: Sequence[str] = PRELOAD,
        start: str = "fork",
        port: int = 0,
        on_report: Callable[[Report], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if start not in ("fork", "spawn"):
            raise OptionError(f"start must be 'fork' or 'spawn'; got {start!r}")
        for name, value in (("patience", patience), ("rescue", rescue), ("form", form)):
            if not value > 0:
                raise OptionError(f"{name} must be > 0 seconds; got {value}")
        self._pool, self._logs = pool, logs
        self._patience, self._rescue, self._form = patience, rescue, form
        self._hang = hang or HangRule()
        self._lateness = Lateness() if stragglers else None
        self._replace = replace
        self._preload, self._start = tuple(preload), start
        self._on_report = on_report
        self._clock = clock or SystemClock()
        self._decide: Decide = decide or Persist(minimum, replace, lambda: self._members.named)
        self._store = _serve(pool.host, port)
        self._control = Control()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._events: list[TrainingEvent] = []
        self._status = TrainingStatus("starting", 0, {}, -1)
        self._generation: Generation | None = None
        self._best = -1  # newest step that is saved
        self._idle = 0
        self._next = 1  # generation
        self._environment: dict[str, str] = {}
        self._closed = False

    # --- Trainer ------------------------------------------------------------------------------------------

    def launch(self, job: TrainingJob, placement: Mapping[str, int]) -> None:
        """Start the run; see ``Trainer``."""
        if self._thread is not None or self._closed:
            raise TrainingError("a trainer runs one training; make another one")
        wanted = placements.check(placement)
        self._job = checked(job)
        self._settings = job.settings or RunSettings()
        self._journal = Journal(job.folder)
        self._log_folder = self._choose_logs()
        self._journal.write_run(self._job, wanted, "running", self._next - 1)
        self._members = Members(
            self._pool,
            self._store,
            job.id,
            self._clock,
            self._note,
            grace=self._settings.grace,
            preload=self._preload,
            silence=self._hang.silence,
            stopped=self._hang.stopped,
        )
        self._note("launched", placement=wanted, script=job.script)
        self._thread = threading.Thread(
            target=self._main, args=(wanted,), name="ebbflow-trainer", daemon=True
        )
        self._thread.start()

    def resume(self, folder: str, placement: Mapping[str, int] | None = None) -> None:
        """Go on with a run whose launcher is gone, from its newest checkpoint; by default on its last placement.

        Raises ``TrainingError`` when there is none, or it is finished.
        """
        journal = Journal(folder)
        job, last, state, generation = journal.read_run()
        if state == "finished":
            raise TrainingError(f"run {job.id} is finished; there is nothing to go on with")
        self._events = journal.events()
        self._next = 1 + max([generation, *(event.generation for event in self._events)])
        self._best = max([-1, *(_saved(event) for event in self._events)])
        self.launch(replace(job, folder=folder), placement or last)

    def resize(self, placement: Mapping[str, int]) -> None:
        """Grow, shrink or move; see ``Trainer``."""
        wanted = placements.check(placement)
        if self._over.is_set() or self._thread is None:
            raise TrainingError("the run has ended or was never launched; there is nothing to resize")
        self._control.resize(wanted)

    def stop(self, deadline: float | None = None) -> None:
        """Save and leave; without ``deadline`` after the settings' grace."""
        grace = self._settings.grace if self._thread else 0.0
        self._control.stop(self._clock.now() + grace if deadline is None else deadline)

    def status(self) -> TrainingStatus:
        """Return where the run stands."""
        with self._lock:
            status, generation = self._status, self._generation
        step = max(status.step, generation.step) if generation else status.step
        return replace(status, step=step)

    def events(self, after: int = 0) -> Sequence[TrainingEvent]:
        """Return the events with numbers above ``after``."""
        with self._lock:
            return [event for event in self._events if event.number > after]

    def wait(self, timeout: float) -> TrainingStatus:
        """Return when the run has ended, or after ``timeout`` seconds."""
        self._clock.wait(self._over, timeout)
        return self.status()

    def close(self) -> None:
        """End everything at once."""
        self._closed = True
        self._control.close()
        if self._thread is not None:
            self._thread.join(timeout=60)
        self._pool.close()

    def __enter__(self) -> "TorchTrainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the loop -----------------------------------------------------------------------------------------

    def _main(self, placement: dict[str, int]) -> None:
        halt = Halt("failed", "the launcher itself failed")
        try:
            halt = self._run(placement)
        except EbbflowError as exc:
            halt = Halt("failed", str(exc))
        except Exception as exc:  # whoever waits must hear of it
            halt = Halt("failed", f"the launcher itself failed: {type(exc).__name__}: {exc}")
            raise
        finally:
            self._finish(halt)

    def _finish(self, halt: Halt) -> None:
        try:
            self._members.end(self._members.names)
            self._note("ended", state=halt.state, reason=halt.reason)
            state = self._status
            self._journal.write_run(self._job, state.placement, halt.state, state.generation)
        except InfraError as exc:
            halt = replace(halt, reason=f"{halt.reason}; {exc}")
        finally:
            assert halt.state != "waiting"
            self._stand(state=halt.state, reason=halt.reason)
            self._over.set()

    def _run(self, placement: dict[str, int]) -> Halt:
        while True:
            end = self._once(placement)
            self._book(end)
            verdict = self._follow(end)
            if isinstance(verdict, Halt) and verdict.state == "waiting":
                verdict = self._wait_for_nodes(verdict)
            if isinstance(verdict, Halt):
                return verdict
            self._note(
                "continues", placement=dict(verdict.placement), reason=verdict.reason, delay=verdict.delay
            )
            placement = placements.check(verdict.placement)
            if verdict.settings is not None:
                self._settings = verdict.settings
                self._job = replace(self._job, settings=verdict.settings)
            self._environment |= verdict.environment
            self._members.end([n for n in self._members.names if n not in placement])
            self._delay(verdict.delay)

    def _once(self, placement: dict[str, int]) -> GenerationEnd:
        """Run one generation to its end."""
        number, self._next = self._next, self._next + 1
        self._stand(state="starting", generation=number, placement=placement)
        channel = Channel(self._store, self._job.id, number)
        self._journal.write_run(self._job, placement, "running", number)
        generation = Generation(
            number,
            placement,
            self._members,
            channel,
            self._clock,
            self._note,
            self._hang,
            self._rescue,
            self._form,
            self._hear,
        )
        self._members.start(placement)
        lost = self._await_ready(placement)
        if lost:
            return self._unformed(generation, lost)
        with self._lock:
            self._generation = generation
        self._note("generation", placement=placement)
        generation.launch(self._order(number), {n: self._logs_of(n, number) for n in placement})
        while not generation.look(self._members.look()):
            self._serve_wishes(generation)
            self._control.pause(_LOOK, self._clock)
        end = generation.end()
        with self._lock:
            self._generation = None
        self._forget(number)
        return end

    def _await_ready(self, placement: Mapping[str, int]) -> dict[str, str]:
        """Wait until the nodes have reported; return those that have not, and why."""
        end = self._clock.now() + self._form
        lost: dict[str, str] = {}
        while not self._control.closed and self._control.deadline is None:
            gone = self._members.look()
            lost |= {n: f"{loss.how}\n{self._members.log(n)}" for n, loss in gone.items() if n in placement}
            missing = [n for n in placement if n in self._members and not self._members[n].ready]
            if lost or not missing:
                return lost
            if self._clock.now() >= end:
                self._members.end(missing)
                return {n: f"it did not report within {self._form:g} s" for n in missing}
            self._control.pause(_LOOK, self._clock)
        return {n: "the run was stopped before it began" for n in placement}

    def _unformed(self, generation: Generation, lost: Mapping[str, str]) -> GenerationEnd:
        end = generation.end()
        reason = "; ".join(f"node {name} did not come up: {how}" for name, how in lost.items())
        left = {name: slots for name, slots in end.left.items() if name not in lost}
        return replace(end, kind="unformed", reason=reason, left=left, suspects=tuple(lost), failures=())

    def _serve_wishes(self, generation: Generation) -> None:
        """Pass on what is asked of the run, and what its nodes ask for."""
        control, now = self._control, self._clock.now()
        if control.closed:
            generation.ask_to_stop("closed", now)
        if control.deadline is not None:
            self._stand(state="stopping")
            generation.ask_to_stop("stop", control.deadline)
        notices = [
            deadline
            for name in generation.placement
            if name in self._members and (deadline := self._members[name].notice) is not None
        ]
        if notices:
            generation.ask_to_stop("notice", min(notices))
        elif control.target is not None and generation.stop is None:
            self._prepare(control.target, generation)

    def _prepare(self, target: dict[str, int], generation: Generation) -> None:
        """Start the nodes to move to; when all are ready, or given up, ask the run to save and leave."""
        if target == generation.placement:
            self._control.drop(target)
            return
        new = {n: s for n, s in target.items() if n not in generation.placement}
        missing = {n: s for n, s in new.items() if n not in self._members}
        late = [n for n in new if n in self._members and self._is_late(n)]
        if late or (missing and self._members.named & set(missing)):
            failed = [*late, *(n for n in missing if n in self._members.named)]
            self._members.end(late)
            self._note("resize-changed", without=failed, reason="these nodes did not come up")
            self._control.drop(target)
            rest = {n: s for n, s in target.items() if n not in failed}
            if rest and rest != generation.placement:
                self._control.resize(rest, self._control.reason)
            return
        self._members.start(missing)
        if all(self._members[n].ready for n in new):
            generation.ask_to_stop(self._control.reason, self._clock.now() + self._settings.grace)

    def _is_late(self, name: str) -> bool:
        member = self._members[name]
        return not member.ready and self._clock.now() - member.started > self._form

    def _hear(self, report: Report) -> None:
        if report.kind in ("started", "step") and self._status.state == "starting":
            self._stand(state="running")
        if report.kind == "step" and self._lateness is not None:
            self._replace_straggler(report)
        if report.kind in ("checkpoint", "metrics", "skipped"):
            self._note(report.kind, **{**report.content, "step": report.step, "rank": report.rank})
        if self._on_report is not None:
            self._on_report(report)

    def _replace_straggler(self, report: Report) -> None:
        assert self._lateness is not None
        rank = self._lateness.look(self._clock.now(), report.content.get("rank_ready_s"))
        generation = self._generation
        if rank is None or generation is None or self._control.target is not None:
            return
        node = generation.node_of(rank)
        target = {n: s for n, s in generation.placement.items() if n != node}
        if self._replace and node:
            target[placements.fresh(self._members.named)] = generation.placement[node]
        if node and target:
            self._note("straggler", rank=rank, node=node, target=target)
            self._control.resize(target, "straggler")

    def _follow(self, end: GenerationEnd) -> Continue | Halt:
        """Return what comes next: what was asked for, or what is decided."""
        control = self._control
        if control.closed:
            return Halt("stopped", "closed")
        if end.kind == "finished":
            return Halt("finished", end.reason)
        if control.deadline is not None:
            return Halt("stopped", end.reason)
        target = control.target
        if target is not None and end.kind in ("stopped", "lost", "hung", "unformed"):
            control.drop(target)
            return Continue(target, control.reason)
        return self._decide(end)

    def _wait_for_nodes(self, halt: Halt) -> Continue | Halt:
        self._stand(state="waiting", reason=halt.reason)
        self._note("waiting", reason=halt.reason)
        end = self._clock.now() + self._patience
        while self._clock.now() < end:
            if self._control.closed or self._control.deadline is not None:
                return Halt("stopped", halt.reason)
            if (target := self._control.target) is not None:
                self._control.drop(target)
                return Continue(target, self._control.reason)
            self._members.look()
            self._control.pause(_LOOK, self._clock)
        return Halt("failed", f"{halt.reason}; no nodes came within {self._patience:g} s")

    def _delay(self, seconds: float) -> None:
        end = self._clock.now() + seconds
        while (left := end - self._clock.now()) > 0:
            if self._control.closed or self._control.deadline is not None or self._control.target is not None:
                return
            self._control.pause(min(left, 1.0), self._clock)

    # --- what is written down -----------------------------------------------------------------------------

    def _book(self, end: GenerationEnd) -> None:
        gained = end.saved_step > self._best
        self._best = max(self._best, end.saved_step)
        self._idle = 0 if gained or end.kind == "stopped" else self._idle + 1
        end = replace(end, idle=self._idle)
        if self._lateness is not None:
            self._lateness.restart()
        self._stand(end=end, reason=end.reason, step=max(self._status.step, end.last_step))
        self._note(
            "generation-ended",
            how=end.kind,
            reason=end.reason,
            left=dict(end.left),
            suspects=list(end.suspects),
            failures=[
                {"rank": f.rank, "node": f.node, "exit_code": f.exit_code, "signal": f.signal}
                for f in end.failures
            ],
            first_step=end.first_step,
            last_step=end.last_step,
            saved_step=end.saved_step,
        )

    def _note(self, kind: str, /, **content: Any) -> None:
        with self._lock:
            number = self._events[-1].number + 1 if self._events else 1
            event = TrainingEvent(number, self._clock.now(), kind, self._status.generation, content)
            self._events.append(event)
        self._journal.append(event)

    def _stand(self, **changes: Any) -> None:
        with self._lock:
            self._status = replace(self._status, **changes)

    # --- odds and ends ------------------------------------------------------------------------------------

    def _order(self, number: int) -> Order:
        environment = {
            **self._job.environment,
            **self._environment,
            wires.RUN_ID: self._job.id,
            wires.RUN_FOLDER: self._job.folder,
            wires.GENERATION: str(number),
            wires.CHANNEL: f"{self._pool.host}:{self._store.port}",
            wires.SETTINGS: self._settings.to_json(),
        }
        return Order(
            "launch",
            script=self._job.script,
            arguments=self._job.arguments,
            environment=environment,
            start="fork" if self._start == "fork" else "spawn",
            form=self._form,
            grace=self._rescue,
        )

    def _choose_logs(self) -> Path:
        if self._logs is not None:
            return Path(self._logs).absolute()
        if self._journal.local is None:
            raise TrainingError(
                f"the run's folder {self._job.folder} is not local; say where logs go (logs=...)"
            )
        return self._journal.local / "logs"

    def _logs_of(self, node: str, number: int) -> str:
        return str(self._log_folder / f"generation-{number}" / node)

    def _forget(self, number: int) -> None:
        """Take what an old generation has left out of the store, so that a long run's does not grow."""
        marks = (f"{self._job.id}-{number}", f"ebbflow/{self._job.id}/{number}/")
        for key in self._store.list_keys():
            if any(mark in key for mark in marks):
                self._store.delete_key(key)


def checked(job: TrainingJob) -> TrainingJob:
    """Return a job that can be run, with absolute paths. Raises ``OptionError``."""
    if not _ID.fullmatch(job.id):
        raise OptionError(f"a run id holds letters, digits, dashes, dots and underscores; got {job.id!r}")
    script = Path(job.script).expanduser().absolute()
    if not script.is_file():
        raise OptionError(f"there is no script {job.script!r}")
    if not job.folder:
        raise OptionError("a run needs a folder that all nodes share; got none")
    folder = job.folder if "://" in job.folder else str(Path(job.folder).expanduser().absolute())
    try:
        json.dumps([list(job.arguments), dict(job.environment)])
    except TypeError as exc:
        raise OptionError(f"arguments and environment of a script are text; {exc}") from exc
    return replace(job, script=str(script), folder=folder)


def _serve(host: str, port: int) -> "TCPStore":
    """Start the store on a port that is ours before anything is told of it. Raises ``TrainingError``."""
    try:
        listener = socket.create_server((host, port), backlog=512)
    except OSError as exc:
        raise TrainingError(
            f"the launcher cannot listen on {host}:{port}: {os.strerror(exc.errno or 0)}"
        ) from exc
    from torch.distributed import TCPStore

    bound = int(listener.getsockname()[1])
    return TCPStore(
        host,
        bound,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def _saved(event: TrainingEvent) -> int:
    step = event.content.get("saved_step", -1)
    return step if isinstance(step, int) else -1
