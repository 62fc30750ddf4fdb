"""A rehearsal: a few steps, a checkpoint, and whether it can be read back, before many GPUs are launched."""

import os
import resource
import tempfile
from contextlib import suppress
from typing import Any

import torch

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder, VerifiedCheckpoint
from ebbflow.infra.training.checkpoints.shards import local
from ebbflow.infra.training.metrics import RunStatistics
from ebbflow.infra.training.prepared import PreparedTraining
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.sharded.restoring import cut_for


def rehearse(
    prepared: PreparedTraining,
    statistics: RunStatistics,
    generation: Generation,
    steps: int,
    *,
    weighs_sync: bool = False,
) -> dict[str, Any]:
    """Save and load the run's state beside its checkpoints and return what the ``steps`` just done took.

    With ``weighs_sync`` also what aggregators would cost. Where the state is sharded all processes do so together,
    each with its part; else the first does alone.

    Raises ``TrainingError`` when what is read differs from what was saved, and ``StorageError`` when it cannot be
    written.
    """
    run, world, sharded = generation.place, generation.world, prepared.sharding is not None
    main, named = world.rank == 0 or not sharded, str(run or "")
    if run is None and main:
        named = tempfile.mkdtemp(prefix="ebbflow-preflight-")
    root = StorageLocation(str(world.from_first(named)) if sharded else named)
    place = root.under("preflight")
    try:
        checkpoints = CheckpointFolder(place, keep=1)
        step, note = prepared.progress.step, {"reason": "preflight"}
        if sharded:
            saved = checkpoints.save_sharded(prepared.state(), step, note, world=world)
            found = world.from_first(checkpoints.latest() if world.rank == 0 else None)
        else:
            saved = checkpoints.save(prepared.state(), step, note)
            found = checkpoints.latest()
        if not isinstance(found, VerifiedCheckpoint):
            raise TrainingError(f"the checkpoint in {place} cannot be found again")
        loaded = checkpoints.load(found, cut=cut_for(prepared.inner, prepared.optimizer) if sharded else None)
        for name, value in prepared.inner.state_dict().items():
            if isinstance(value, torch.Tensor) and not _equal(loaded["model"][name], local(value).cpu()):
                raise TrainingError(f"{name} comes back from the checkpoint in {place} with other values")
        return {
            "steps": steps,
            "checkpoint_bytes": saved.bytes,
            "checkpoint_seconds": saved.seconds,
            "peak_bytes": _peak(),
            "statistics": statistics.to_json(),
            **({"service": _service(prepared)} if weighs_sync else {}),
        }
    finally:
        if sharded:
            world.from_all(None)  # all have read it
        with suppress(OSError):
            if main:
                root.remove_folder("preflight")
            if main and run is None:
                os.rmdir(root.root)


def _service(prepared: PreparedTraining) -> dict[str, Any]:
    from ebbflow.infra.training.service.costs import service_costs  # with ZeroMQ

    if prepared.sharding is not None:
        return {"obstacle": "the model is sharded"}
    return service_costs(prepared.inner, prepared.optimizer)


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.is_floating_point() or first.is_complex():
        return bool(torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True))
    return bool(torch.equal(first, second))


def _peak() -> int:
    """Return the most memory used, bytes: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
