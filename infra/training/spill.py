"""Where the last checkpoint of a run goes when the run's directory cannot take it, and how it comes back.

Layout::

    <place>/ebbflow-spill-<user id>-<run>-<hash of its directory and mark>/step-.../    as ``CheckpointFolder`` has it
    <run's directory>/mark                                                              random, of this run alone

A place is a directory of the node's own disk, unless the user names one that all nodes reach: what lies on a node's
disk is found by a process of that node alone. The mark keeps a run from taking over what another left that had its
directory before.
"""

import hashlib
import logging
import os
import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder, SavedCheckpoint, VerifiedCheckpoint
from ebbflow.planners.errors import EbbflowError

_MARK = "mark"
log = logging.getLogger(__name__)
_HEX = re.compile(r"[0-9a-f]{32}")


def spill_places(chosen: str = "") -> list[str]:
    """Return the directories to try, in order: the user's, or those of this machine that outlive the process."""
    if chosen:
        return [chosen]
    own = [Path("/var/tmp"), Path(tempfile.gettempdir())]  # noqa: S108  below, nobody else may enter
    return list(dict.fromkeys(str(path) for path in own if path.is_dir()))


class Spill:
    """The places of one run.

    Args:
        run: the run's directory.
        chosen: the user's place; those of this machine unless given.
    """

    def __init__(self, run: StorageLocation, chosen: str = "", *, clock: Clock | None = None) -> None:
        self._run = run
        self._chosen = chosen
        self._clock = clock
        self.mark = ""  # before it is known nothing is spilled, and nothing found
        self.problems: list[str] = []  # checkpoints in the places that cannot serve, and why

    def take_mark(self, *, create: bool = True) -> str:
        """Return the run's mark, made when there is none yet, or else empty. Raises ``StorageError``."""
        said = self._read()
        if not _HEX.fullmatch(said) and create:
            said = secrets.token_hex(16)
            with translated(f"write {self._run.uri_of(_MARK)}"):
                self._run.write(_MARK, f"{said}\n".encode())
        self.mark = said
        return said

    def known_mark(self) -> str:
        """Return the mark, which another process has made. Raises ``StorageError``, also where it is not there."""
        if not self.take_mark(create=False):
            raise StorageError(f"the run's mark is not in {self._run.uri}: is it mounted?")
        return self.mark

    def _read(self) -> str:
        with translated(f"read {self._run.uri_of(_MARK)}"):
            try:
                return self._run.read(_MARK).decode(errors="replace").strip()
            except FileNotFoundError:
                return ""

    def checkpoints(self, keep: int) -> CheckpointFolder:
        """Return the run's own full checkpoints, of which ``keep`` stay.

        Where a mount is away, what is written into the directory that is left in its place does not count.
        """
        return CheckpointFolder(self._run.under("checkpoints"), keep, clock=self._clock, check=self._check)

    def _check(self) -> None:
        """Raise ``StorageError`` where the run's directory is another one than it was."""
        if self.mark and self._run.local and self._read() != self.mark:
            raise StorageError(
                f"the run's mark is not in {self._run.uri}: what is there is not the run's directory; is it mounted?"
            )

    def save(self, state: Mapping[str, Any], step: int, reason: str, timeout: float) -> SavedCheckpoint:
        """Save in the first place that takes it. Raises ``StorageError`` with what each place says."""
        said = []
        for place in self._places():
            try:
                self._make_private(place)
                note = {"reason": reason, "run": self._run.uri, "host": socket.gethostname()}
                folder = CheckpointFolder(place, 1, clock=self._clock)
                return folder.save(state, step, note, timeout=timeout)
            except StorageError as exc:
                said.append(str(exc))
        raise StorageError("; ".join(said) or "no directory on this machine can take it")

    def newest(self, above: int) -> tuple[CheckpointFolder, VerifiedCheckpoint] | None:
        """Return the newest whole checkpoint of more than ``above`` steps.

        A place of this machine that cannot be read is passed over, and noted in ``problems``. Raises ``StorageError``
        for one that the user chose: what is in it may be all that there is of the last steps.
        """
        best: tuple[CheckpointFolder, VerifiedCheckpoint] | None = None
        for folder in self._there():
            try:
                found = folder.latest()
            except StorageError as exc:
                if self._chosen:
                    raise StorageError(
                        f"the run's last steps may be in {folder.uri}, where checkpoints are spilled to, and it "
                        f"cannot be read: {exc}"
                    ) from exc
                # as if it were on another node: the run's own directory decides
                self.problems.append(f"{folder.uri} cannot be read: {exc}")
                log.warning("%s", self.problems[-1])
                continue
            self.problems += folder.problems()
            if found is not None and found.step > (above if best is None else best[1].step):
                best = folder, found
        return best

    def clear(self, upto: int) -> None:
        """Delete what the run's directory now has as well: checkpoints of ``upto`` steps and fewer."""
        for folder in self._there():
            # what cannot be deleted takes up room, and is compared again when it is looked at
            with suppress(StorageError, OSError):
                found = folder.latest()
                if found is not None and found.step <= upto:
                    folder.discard(found)
                place = folder.place
                if place.local:
                    os.rmdir(place.root)  # unless there is more in it

    def _there(self) -> list[CheckpointFolder]:
        """Return the places that hold something of this run and of this user."""
        found = []
        for place in self._places():
            try:
                with translated(f"look at {place.uri}"):
                    if place.local and not os.path.lexists(place.root):
                        continue
                    if place.local:
                        _check_private(place)
                    found.append(CheckpointFolder(place, 1, clock=self._clock))
            except StorageError:  # somebody else's
                continue
        return found

    def _places(self) -> list[StorageLocation]:
        run = self._run.root.rsplit("/", 1)[-1][:60]
        mark = hashlib.sha256(f"{self._run.uri}\n{self.mark}".encode()).hexdigest()[:16]
        name = f"ebbflow-spill-{os.geteuid()}-{run}-{mark}"
        found: list[StorageLocation] = []
        if not self.mark:
            return found
        for place in spill_places(self._chosen):
            try:
                found.append(StorageLocation(place).under(name))
            except EbbflowError:
                continue
        return found

    def _make_private(self, place: StorageLocation) -> None:
        if place.local:
            with translated(f"make {place.uri}"):
                private.make_folder(os.path.dirname(place.root))
                if not os.path.lexists(place.root):
                    private.make_folder(place.root, exist_ok=False)
                _check_private(place)


def _check_private(place: StorageLocation) -> None:
    """Raise ``StorageError`` for a directory that another user may have made or can write: its model is not ours."""
    there = os.lstat(place.root)
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & 0o077:
        raise StorageError(f"{place.uri} is not a directory of this user alone (mode 0700); it is not used")
