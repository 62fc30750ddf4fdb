"""A rehearsal: a few steps, a checkpoint, and whether it can be read back, before many GPUs are launched."""

import os
import resource
import tempfile
from contextlib import suppress
from typing import Any

import torch

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.metrics import RunStatistics
from ebbflow.infra.training.prepared import PreparedTraining


def rehearse(
    prepared: PreparedTraining, statistics: RunStatistics, run: StorageLocation | None, steps: int
) -> dict[str, Any]:
    """Save and load the run's state beside its checkpoints and return what the ``steps`` just done took.

    Raises ``TrainingError`` when what is read differs from what was saved, and ``StorageError`` when it cannot be
    written.
    """
    root = run or StorageLocation(tempfile.mkdtemp(prefix="ebbflow-preflight-"))
    place = root.under("preflight")
    try:
        checkpoints = CheckpointFolder(place, keep=1)
        saved = checkpoints.save(prepared.state(), prepared.progress.step, {"reason": "preflight"})
        found = checkpoints.latest()
        if found is None:
            raise TrainingError(f"the checkpoint in {place} cannot be found again")
        loaded = checkpoints.load(found)
        for name, value in prepared.inner.state_dict().items():
            if isinstance(value, torch.Tensor) and not _equal(loaded["model"][name], value.cpu()):
                raise TrainingError(f"{name} comes back from the checkpoint in {place} with other values")
        return {
            "steps": steps,
            "checkpoint_bytes": saved.bytes,
            "checkpoint_seconds": saved.seconds,
            "peak_bytes": _peak(),
            "statistics": statistics.to_json(),
        }
    finally:
        with suppress(OSError):
            root.remove_folder("preflight")
            if run is None:
                os.rmdir(root.root)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.is_floating_point() or first.is_complex():
        return bool(torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True))
    return bool(torch.equal(first, second))


def _peak() -> int:
    """Return the most memory used, bytes: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
