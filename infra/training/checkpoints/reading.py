"""Checkpoints of a training for whoever uses the model afterwards."""

from typing import Any

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.checkpoints.sharded_files import DamagedPartError


def load_checkpoint(run: str, *, map_location: Any = "cpu") -> dict[str, Any]:
    """Return the newest checkpoint of a training: ``{"model": ..., "optimizer": ..., ...}`` with whole tensors, of
    however many processes it has parts. Each file is compared with its checksum; no code from the files is run.

    Args:
        run: path or URI of the run's directory, which is in the training's report.
        map_location: device for the tensors, as in ``torch.load``.

    Raises ``TrainingError`` where the run has none that is whole, ``StorageError`` where it cannot be read.
    """
    place = StorageLocation(run)
    folder = CheckpointFolder(place.under("checkpoints"))
    while (found := folder.latest()) is not None:
        try:
            return folder.load(found, map_location=map_location)
        except DamagedPartError as exc:
            folder.set_aside(found, str(exc))
    said = "; ".join(folder.damaged())
    raise TrainingError(f"{place} has no checkpoint that is whole{': ' if said else ''}{said:.500}")
