"""Collects what all actors hold: for a snapshot, or as the result."""

import os
from collections.abc import Callable
from math import inf

from ebbflow.infra.elastic.master.job_state import JobState
from ebbflow.infra.elastic.wire.messages import Address, Capture, CaptureResult, Drain, Exit, Resume
from ebbflow.infra.elastic.wire.snapshot import Snapshot, SnapshotFolder, attempt
from ebbflow.infra.errors import ElasticError


class SnapshotCoordinator:
    """Takes one snapshot after another, and the result at the end. ``go_on`` is called after a snapshot."""

    def __init__(
        self, job_state: JobState, go_on: Callable[[], None], *, resume: bool, restart: bool = False
    ) -> None:
        self._job_state, self._go_on = job_state, go_on
        self._folder = SnapshotFolder(job_state.folder, job_state.settings.keep)
        self.newest: Snapshot | None = self._whole(restart) if resume else None
        self.due = inf  # when the next snapshot is
        self._taking: tuple[int, str] = (0, "")  # number and directory of the snapshot that is being taken
        self._captured: dict[Address, CaptureResult] = {}
        self._since = 0.0

    def reload(self) -> Snapshot | None:
        """Look again which snapshot is the newest whole one, if there was any, and return it.

        Raises ``ElasticError`` where there was one and none is whole any more.
        """
        self.newest = self._whole() if self.newest else None
        return self.newest

    def _whole(self, restart: bool = False) -> Snapshot | None:
        """Return the newest whole snapshot, and say which are damaged; begin again without one only if told to."""
        found, damaged = self._folder.latest(), self._folder.damaged
        for what in damaged:
            self._job_state.log("snapshot-damaged", what=what)
        if found is None and damaged and not restart:
            raise ElasticError(
                f"none of the job's snapshots is usable: {'; '.join(damaged)}. Nothing was deleted: restore one "
                f"from a backup, or restart from the beginning (ebbflow elastic --resume --restart)"
            )
        if found is None and damaged:
            self._folder.set_aside()
        return found

    def begin(self) -> None:
        """Begin a snapshot: let workers run out of tasks."""
        job_state = self._job_state
        self._taking = self._folder.begin()
        self._since = job_state.now()
        job_state.enter("draining")
        job_state.awaited = set(job_state.nodes.workers())
        job_state.broadcast(sorted(job_state.awaited), Drain())

    def drained(self, sender: Address) -> None:
        """Note that a worker has run out of tasks."""
        job_state = self._job_state
        if job_state.phase == "draining":
            job_state.awaited.discard(sender)
            if not job_state.awaited:
                job_state.enter("capturing")
                self._capture(self._taking[1])

    def gather(self) -> None:
        """Collect the result."""
        self._job_state.enter("gathering")
        self._capture(None)

    def captured(self, sender: Address, message: CaptureResult) -> None:
        """Take in one actor's part; with the last one, end."""
        job_state = self._job_state
        if job_state.phase == "capturing" and message.contents is not None:
            # written here for an actor that cannot
            message.error = attempt(_file(self._taking[1], sender), message.contents)
            message.contents = None
        self._captured[sender] = message
        job_state.awaited.discard(sender)
        if job_state.awaited:
            return
        if job_state.phase == "capturing":
            self._end_snapshot()
        else:
            self._end()

    def _capture(self, folder: str | None) -> None:
        job_state = self._job_state
        self._captured = {}
        job_state.awaited = {*job_state.nodes.workers(), *job_state.nodes.servers()}
        for address in sorted(job_state.awaited):
            path = _file(folder, address) if folder and job_state.shared else None
            job_state.send(address, Capture(path, records=folder is not None))

    def _end_snapshot(self) -> None:
        job_state = self._job_state
        errors = [captured.error for captured in self._captured.values() if captured.error]
        number, folder = self._taking
        files = [_file(folder, address) for address in self._captured]
        executors = tuple(file for file in files if file.endswith("-worker.bin"))
        snapshot = Snapshot(number, folder, executors, tuple(sorted(set(files) - set(executors))))
        state = {
            "driver": job_state.driver.state_dict(),
            "ledger": job_state.ledger.state_dict(),
            "executors": job_state.executors,
            "shards": job_state.application.shards,
        }
        try:
            if not errors:
                self._folder.commit(snapshot, state)
                self.newest = snapshot
                job_state.log("snapshot", number=number, seconds=job_state.now() - self._since)
        except ElasticError as error:
            errors.append(str(error))
        if errors:  # the job continues with the snapshot before
            job_state.log("snapshot failed", reason=errors[0])
        job_state.broadcast([address for address in self._captured if address.endswith("/worker")], Resume())
        self._go_on()

    def _end(self) -> None:
        job_state = self._job_state
        for address, captured in self._captured.items():
            contents = captured.contents or {}
            if address.endswith("/worker"):
                job_state.states.update(contents)
            else:
                for values in contents.values():
                    job_state.values.update(values)
        job_state.enter("done")
        job_state.log("finished", tasks=job_state.ledger.clock.version)
        job_state.broadcast(job_state.nodes.actors(), Exit())


def _file(folder: str, address: Address) -> str:
    return os.path.join(folder, address.replace("/", "-") + ".bin")
