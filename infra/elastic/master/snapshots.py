"""Collects what all actors hold: for a snapshot, or as the result."""

import os
from collections.abc import Callable
from math import inf

from ebbflow.infra.elastic.master.job_state import JobState
from ebbflow.infra.elastic.wire.messages import Address, Capture, Captured, Drain, Exit, Resume
from ebbflow.infra.elastic.wire.snapshot import Snapshot, SnapshotFolder
from ebbflow.infra.errors import ElasticError


class SnapshotCoordinator:
    """Takes one snapshot after another, and the result at the end. ``go_on`` is called after a snapshot."""

    def __init__(
        self, board: JobState, go_on: Callable[[], None], *, resume: bool, restart: bool = False
    ) -> None:
        self._board, self._go_on = board, go_on
        self._folder = SnapshotFolder(board.folder, board.settings.keep)
        self.newest: Snapshot | None = self._whole(restart) if resume else None
        self.due = inf  # when the next snapshot is
        self._taking: tuple[int, str] = (0, "")  # number and folder of the snapshot that is being taken
        self._captured: dict[Address, Captured] = {}
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
            self._board.log("snapshot-damaged", what=what)
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
        board = self._board
        self._taking = self._folder.begin()
        self._since = board.now()
        board.enter("draining")
        board.awaited = set(board.nodes.workers())
        board.tell(sorted(board.awaited), Drain())

    def drained(self, sender: Address) -> None:
        """Note that a worker has run out of tasks."""
        board = self._board
        if board.phase == "draining":
            board.awaited.discard(sender)
            if not board.awaited:
                board.enter("capturing")
                self._capture(self._taking[1])

    def gather(self) -> None:
        """Collect the result."""
        self._board.enter("gathering")
        self._capture(None)

    def captured(self, sender: Address, message: Captured) -> None:
        """Take in one actor's part; with the last one, end."""
        board = self._board
        self._captured[sender] = message
        board.awaited.discard(sender)
        if board.awaited:
            return
        if board.phase == "capturing":
            self._end_snapshot()
        else:
            self._end()

    def _capture(self, folder: str | None) -> None:
        board = self._board
        self._captured = {}
        board.awaited = {*board.nodes.workers(), *board.nodes.servers()}
        for address in sorted(board.awaited):
            board.send(address, Capture(_file(folder, address) if folder else None))

    def _end_snapshot(self) -> None:
        board = self._board
        errors = [captured.error for captured in self._captured.values() if captured.error]
        number, folder = self._taking
        files = [_file(folder, address) for address in self._captured]
        executors = tuple(file for file in files if file.endswith("-worker.bin"))
        snapshot = Snapshot(number, folder, executors, tuple(sorted(set(files) - set(executors))))
        state = {
            "driver": board.driver.state_dict(),
            "ledger": board.ledger.state_dict(),
            "executors": board.executors,
            "shards": board.application.shards,
        }
        try:
            if not errors:
                self._folder.commit(snapshot, state)
                self.newest = snapshot
                board.log("snapshot", number=number, seconds=board.now() - self._since)
        except ElasticError as error:
            errors.append(str(error))
        if errors:  # the job goes on with the snapshot before
            board.log("snapshot failed", reason=errors[0])
        board.tell([address for address in self._captured if address.endswith("/worker")], Resume())
        self._go_on()

    def _end(self) -> None:
        board = self._board
        for address, captured in self._captured.items():
            contents = captured.contents or {}
            if address.endswith("/worker"):
                board.states.update(contents)
            else:
                for values in contents.values():
                    board.values.update(values)
        board.enter("done")
        board.log("finished", tasks=board.ledger.clock.version)
        board.tell(board.nodes.actors(), Exit())


def _file(folder: str, address: Address) -> str:
    return os.path.join(folder, address.replace("/", "-") + ".bin")
