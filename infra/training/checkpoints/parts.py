"""One process' part in the checkpoints of sharded state: copied, written in the background, and made to count.

Nothing here waits for another process. Those that save together agree on the name first, and on who commits once all
parts are written; ``CheckpointFolder.save_sharded`` and the runs' saver do so.
"""

import time
from collections.abc import Mapping
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.training.checkpoints.files import CheckpointFiles, discarded_on_error
from ebbflow.infra.training.checkpoints.manifest import Manifest
from ebbflow.infra.training.checkpoints.sharded_files import parts_of, write_part
from ebbflow.infra.training.checkpoints.shards import Division, split
from ebbflow.infra.training.checkpoints.states import Signature, Staging, signature
from ebbflow.infra.training.checkpoints.writer import BackgroundWriter


class PartWriter:
    """Writes this process' part of one checkpoint after another; one at a time.

    Args:
        files: of the checkpoints' directory.
        clock: for the time in a manifest.
    """

    def __init__(self, files: CheckpointFiles, clock: Clock) -> None:
        self._files, self._clock = files, clock
        self._staging = Staging()
        self._writer: BackgroundWriter[None] = BackgroundWriter(
            f"a part of a checkpoint in {files.place.uri}"
        )
        self.signature: Signature = {}  # of the model in the last state
        self.division = Division()  # of the last state

    @property
    def busy(self) -> bool:
        """Return whether a part is being written."""
        return self._writer.busy

    def begin(self, name: str, state: Mapping[str, Any], *, spare: bool = False) -> float:
        """Copy what lies in this process and write it in the background; return how long the copy took, seconds.

        Of several processes with the same part the first one writes it, or whoever calls with ``spare``.

        Raises ``OptionError`` for what could not be read back, ``StorageError`` while another part is being written.
        """
        self._writer.check_idle()  # what is being written lies in the buffers of the next copy
        begun = time.monotonic()
        rest, pieces, division = split(state)
        values = {str(number): tensor for number, (_, tensor) in enumerate(pieces)}
        copied, ready = self._staging.copy({"rest": rest, "values": values})
        self.signature, self.division = signature(state.get("model", state)), division
        pairs = [(piece, copied["values"][str(number)]) for number, (piece, _) in enumerate(pieces)]

        def job() -> None:
            if ready is not None:
                ready.synchronize()
            if division.replica == 0 or spare:
                with translated(f"save the checkpoint {self._files.place.uri_of(name)}"):
                    write_part(self._files.place, name, division, pairs, copied["rest"])

        self._writer.start(job)
        return time.monotonic() - begun

    def join(self, timeout: float) -> None:
        """Return when no part is being written, or after ``timeout`` seconds; ``wait`` says how it ended."""
        self._writer.join(timeout)

    def complete(self, name: str) -> bool:
        """Return whether all parts of a checkpoint are written. Raises ``StorageError``."""
        return parts_of(self._files.place, name) is not None

    def wait(self, timeout: float) -> None:
        """Wait for the part. Raises its error, or ``StorageError`` after ``timeout`` seconds."""
        self._writer.wait(timeout)

    def commit(self, name: str, step: int, note: Any) -> int | None:
        """Make the parts a checkpoint and return its bytes; ``None`` while some are missing. One process does it.

        Raises ``StorageError``.
        """
        files = parts_of(self._files.place, name)
        if files is None:
            return None
        manifest = Manifest(step, self._clock.now(), "sharded", files, self.signature, note)
        return discarded_on_error(self._files, name, lambda: manifest).size

    def discard(self, name: str) -> None:
        """Delete what there is of a checkpoint that will not be finished."""
        self._files.discard(name)


def missing_parts(uri: str) -> StorageError:
    """Return the error of a checkpoint of which a part is not there although all were written."""
    return StorageError(f"{uri} lacks parts that other processes wrote; all must reach the same directory")
