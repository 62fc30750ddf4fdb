"""A rehearsal: a few steps, a checkpoint, and whether it can be read back, before many GPUs are launched."""

import shutil
import tempfile
from contextlib import suppress
from typing import Any

import psutil
import torch

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.checkpoints import CheckpointFolder
from ebbflow.infra.training.metrics import RunStatistics
from ebbflow.infra.training.prepared import Prepared


def rehearse(prepared: Prepared, statistics: RunStatistics, folder: str | None, steps: int) -> dict[str, Any]:
    """Save and load the run's state beside its checkpoints and return what the ``steps`` just done took.

    Raises ``TrainingError`` when what is read differs from what was saved, and ``StorageError`` when it cannot be
    written.
    """
    temporary = None if folder else tempfile.mkdtemp(prefix="ebbflow-canary-")
    place = f"{folder}/canary" if folder else str(temporary)
    try:
        checkpoints = CheckpointFolder(place, keep=1)
        saved = checkpoints.save(prepared.state(), prepared.progress.step, {"reason": "canary"})
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
        if "://" not in place:
            with suppress(OSError):
                shutil.rmtree(place)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True))


def _peak() -> int:
    """Return the most memory used, bytes: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return int(psutil.Process().memory_info().rss)
