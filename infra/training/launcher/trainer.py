"""``TorchTrainer``: one elastic PyTorch training, generation after generation, on a pool of nodes."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.machine import processes
from ebbflow.infra.protocols import Decide, TrainingEvent, TrainingJob, TrainingStatus
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.launcher.decide import Persist
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.infra.training.launcher.job import (
    PRELOAD,
    Options,
    checked_job,
    checked_placement,
    preparation,
)
from ebbflow.infra.training.launcher.journal import Journal, Record
from ebbflow.infra.training.launcher.loop import Loop
from ebbflow.infra.training.launcher.members import Members
from ebbflow.infra.training.launcher.moves import Control
from ebbflow.infra.training.launcher.pool import NodePool
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.model.trainings import RunSettings

log = logging.getLogger(__name__)

_LEAVING = 15.0  # s beyond the grace for processes of a launcher that is gone
_CLOSING = 60.0  # seconds for the loop to end once nothing is to be saved any more


class TorchTrainer:
    """Runs one training on ``pool``; implements ``infra.protocols.Trainer``.

    Args:
        pool: where nodes come from; closed with the trainer.
        logs: directory for the processes' logs; by default ``logs`` in the run's directory, which must then be local.
        decide: what follows when a generation has ended; by default ``launcher.decide.Persist``.
        minimum: slots below which the default waits for more.
        node_timeout: seconds that the run may wait for nodes before it fails.
        rescue: seconds that survivors of a loss get to save.
        form: seconds in which started processes must meet, and started nodes report.
        hang: bounds beyond which something is taken to hang.
        stragglers: whether a node that holds the others up is replaced.
        replace: whether a node that hung, or holds up, is replaced by a new one or ignored.
        preload: modules that nodes import once, before processes start from them.
        start: ``"fork"``: processes start from their warm node; ``"spawn"``: from nothing, seconds later, for scripts
            that cannot bear a fork.
        port: at which nodes reach the launcher, on the pool's host; 0: any.
        variables: environment variables of the script's processes, which are recorded nowhere.
        replica: slots that hold one replica of the model; where some nodes do not start, it uses a multiple of it.
        on_report: called in the launcher's thread with all that processes report.
        ledger: address of the ledger in which shared aggregators are found, recorded nowhere; ``None``: that of
            ``$EBBFLOW_LEDGER``.

    Raises ``OptionError``, or ``TrainingError`` when the port cannot be had.
    """

    def __init__(
        self,
        pool: NodePool,
        *,
        logs: Path | str | None = None,
        decide: Decide | None = None,
        minimum: int = 1,
        node_timeout: float = 3600.0,
        rescue: float = 20.0,
        form: float = 60.0,
        hang: HangRule | None = None,
        stragglers: bool = True,
        replace: bool = True,
        preload: Sequence[str] = PRELOAD,
        start: Literal["fork", "spawn"] = "fork",
        port: int = 0,
        variables: Mapping[str, str] | None = None,
        replica: int = 1,
        on_report: Callable[[Report], None] | None = None,
        ledger: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._options = Options(
            minimum,
            node_timeout,
            rescue,
            form,
            hang or HangRule(),
            stragglers,
            replace,
            tuple(preload),
            start,
            dict(variables or {}),
            replica,
            ledger,
        )
        self._pool, self._logs = pool, logs
        self._decide = decide
        self._on_report = on_report
        self._clock = clock or SystemClock()
        from ebbflow.infra.training.channel.exchange import Exchange  # with ZeroMQ, of the extra ``train``

        self._exchange = Exchange(pool.host, port)
        self._record = Record(self._clock)
        self._control = Control()
        self._grace = RunSettings().termination_grace
        self._loop: Loop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def launch(self, job: TrainingJob, placement: Mapping[str, int]) -> None:
        """Start the run. Raises ``OptionError``, ``RunLockedError`` or ``TrainingError``."""
        self._launch(job, placement)

    def _launch(self, job: TrainingJob, placement: Mapping[str, int], lock: RunLock | None = None) -> None:
        """Start the run, whose lock may be held already; it is free again where this fails."""
        try:
            if self._thread is not None or self._closed:
                raise TrainingError("a trainer runs one training; make another one")
            wanted, job = checked_placement(placement), checked_job(job)
            place = StorageLocation(job.folder)
            journal = Journal(place)
            logs = self._choose_logs(journal)
            lock = lock or RunLock(place, job.id).acquire()
            self._begin(job, wanted, journal, logs, lock)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    def _begin(
        self, job: TrainingJob, wanted: dict[str, int], journal: Journal, logs: Path, lock: RunLock
    ) -> None:
        options, record = self._options, self._record
        self._grace = (job.settings or RunSettings()).termination_grace
        record.stand(placement=wanted)
        record.begin(journal, job, self._pool.uid)
        members = Members(
            self._pool,
            self._exchange,
            job.id,
            self._clock,
            record.note,
            grace=self._grace,
            preload=options.preload,
            silence=options.hang.silence,
            stopped=options.hang.stopped,
            prepare=preparation(job, options),
        )
        decide = self._decide or Persist(options.minimum, options.replace, lambda: members.named)
        loop = self._loop = Loop(
            job, self._exchange, self._pool.uid, members, record, self._control, decide, options, logs,
            self._on_report, self._clock,
        )  # fmt: skip
        record.note("launched", placement=wanted, script=job.script)
        if record.reached >= 0:
            record.note("resumed", reached=record.reached, saved=record.best)
        self._thread = threading.Thread(
            target=loop.run, args=(wanted, lock.release), name="ebbflow-trainer", daemon=True
        )
        self._thread.start()

    def resume(
        self,
        folder: str,
        placement: Mapping[str, int] | None = None,
        settings: RunSettings | None = None,
    ) -> None:
        """Continue with a run whose launcher is gone, from its newest checkpoint; by default on its last placement.

        ``settings`` replace the run's last ones, but for what a process' memory was found to hold.

        Raises ``TrainingError`` when there is none, it is finished, or what its launcher has left does not end, and
        ``RunLockedError``, at once, when its launcher lives.
        """
        place = StorageLocation(folder)
        journal = Journal(place)
        job, last, state, generation, pool = journal.read_run()
        if state == "finished":
            raise TrainingError(f"run {job.id} is finished; there is nothing to resume")
        lock = RunLock(place, job.id).acquire()
        try:
            self._await_end_of(pool, job.settings or RunSettings())
            before = replace(
                job.settings or RunSettings(), restart=False
            )  # that was the user's word for that time
            job = replace(job, settings=before if settings is None else settings.keeping(before))
            self._record.take_up(journal, generation)
        except BaseException:
            lock.release()
            raise
        self._launch(replace(job, folder=folder), placement or last, lock)

    def resize(self, placement: Mapping[str, int], deadline: float | None = None) -> None:
        """Grow, shrink or move; see ``Trainer``. Raises ``TrainingError``."""
        wanted = checked_placement(placement)
        if self._loop is None or self._loop.over.is_set():
            raise TrainingError("the run has ended or was never launched; there is nothing to resize")
        self._control.resize(wanted, by=deadline)

    def end_generation(self, number: int, reason: str) -> None:
        """Request that this generation saves and leaves; ``decide`` states what follows."""
        self._control.end_generation(number, reason)

    def stop(self, deadline: float | None = None) -> None:
        """Save and leave; without ``deadline`` within the settings' grace."""
        self._control.stop(self._clock.now() + self._grace if deadline is None else deadline)

    def status(self) -> TrainingStatus:
        """Return where the run stands."""
        status = self._record.status
        generation = self._loop.generation if self._loop else None
        return replace(status, step=max(status.step, generation.step)) if generation else status

    def events(self, after: int = 0) -> Sequence[TrainingEvent]:
        """Return the events with numbers above ``after``."""
        return self._record.events(after)

    def wait(self, timeout: float) -> TrainingStatus:
        """Return when the run has ended, or after ``timeout`` seconds."""
        if self._loop is not None:
            self._clock.wait(self._loop.over, timeout)
        return self.status()

    def close(self) -> None:
        """End everything at once, without saving."""
        self._closed = True
        self._control.close()
        if self._thread is not None:
            self._thread.join(timeout=_CLOSING)
        self._pool.close()
        self._exchange.close()

    def __enter__(self) -> "TorchTrainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _choose_logs(self, journal: Journal) -> Path:
        if self._logs is not None:
            return Path(self._logs).absolute()
        if journal.local is None:
            raise TrainingError(
                f"the run's directory {journal.uri} is not local; say where logs go (logs=...)"
            )
        return journal.local / "logs"

    def _await_end_of(self, pool: str, settings: RunSettings) -> None:
        """Wait until the processes of a launcher that died have saved and left; its guardian sees to that."""
        patience, waited = settings.termination_grace + _LEAVING, False
        end = self._clock.now() + patience
        while not self._pool.gone(pool):
            if self._clock.now() > end:
                raise TrainingError(
                    f"processes of the run's earlier launcher{_here(pool)} are still there {patience:g} s after it "
                    "has gone, which is more than they get to save in; end them, then resume the run"
                )
            if not waited:
                log.warning(
                    "the run's earlier launcher is gone; waiting until its processes%s have saved and left, %g s "
                    "at most",
                    _here(pool),
                    patience,
                )
                waited = True
            self._clock.sleep(0.2)


def _here(pool: str) -> str:
    """Return which processes of a pool are on this machine, for the reader; empty: none."""
    found = ", ".join(map(str, sorted(processes.members(f"{pool}/"))))
    return f" ({found})" if found else ""
