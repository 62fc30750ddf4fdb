"""The processes of one generation: who they are, what they agree on, and how the loss of one shows."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.process import agreeing

# What gloo, NCCL and the stores say when a peer is gone or silent. Gloo raises plain RuntimeErrors.
_PEER_LOST = (
    "gloo/transport",
    "connection closed by peer",
    "connection reset by peer",
    "application timeout caused pair closure",
    "nccl communicator was aborted",
    "ncclremoteerror",
    "watchdog caught collective operation timeout",
)


class ViewChangedError(Exception):
    """Processes have been lost before a step was agreed on; the others repeat it. Never leaves a step."""


@dataclass(frozen=True, slots=True)
class World:
    """One process's place among all of its generation."""

    rank: int = 0
    size: int = 1  # processes, one a GPU where there are GPUs
    local_rank: int = 0
    nodes: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def elastic(self) -> bool:
        """Tell whether processes come and go while the others train on."""
        return False

    @classmethod
    def join(cls, timeout: float, environment: Mapping[str, str] = os.environ) -> "World":
        """Join the processes that torchrun has started; without torchrun, be alone.

        gloo carries CPU tensors and NCCL CUDA tensors. A collective that takes over ``timeout`` seconds is an error.
        Raises ``TrainingError`` when the others cannot be reached.
        """
        size = int(environment.get("WORLD_SIZE", "1"))
        local_rank = int(environment.get("LOCAL_RANK", "0"))
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        rank = int(environment.get("RANK", "0"))
        local_size = max(1, int(environment.get("LOCAL_WORLD_SIZE", size)))
        nodes = int(environment.get("GROUP_WORLD_SIZE", -(-size // local_size)))
        if size > 1:
            # a lost peer must raise here, where a survivor can save, and not end the process
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            try:
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout)
                )
            except (RuntimeError, ValueError) as exc:
                raise TrainingError(f"process {rank} of {size} cannot reach the others: {exc}") from exc
        return cls(rank, size, local_rank, nodes, device)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all processes, each place on its own. One small all-reduce."""
        if self.size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        found: list[float] = summed.tolist()
        return found

    def sum_step(self, values: Sequence[float]) -> list[float]:
        """Return the sums with which a step ends; see ``sum``."""
        return self.sum(values)

    def from_first(self, value: object) -> object:
        """Return what the first process gives; see ``agreeing`` for what can travel."""
        return value if self.size == 1 else agreeing.from_first(value)

    def from_all(self, value: object) -> list[Any]:
        """Return what each process gives, by rank; see ``agreeing`` for what can travel."""
        return [value] if self.size == 1 else agreeing.from_all(value)

    def check_same(self, asked: Mapping[str, object]) -> None:
        """Raise ``TrainingError``, in all processes, where they do not all ask for the same; it says who differs."""
        first, *others = self.from_all(dict(asked))
        for rank, other in enumerate(others, 1):
            for name, value in first.items():
                if other[name] != value:
                    raise TrainingError(
                        f"all processes must ask for the same: {name} is {value!r} in process 0 and "
                        f"{other[name]!r} in process {rank}; let it depend on neither the rank nor the machine"
                    )

    def leave(self) -> None:
        """End communication; may be called twice."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def peer_lost(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, says that another process is gone or silent."""
    while error is not None:
        if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
            return True
        if isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in _PEER_LOST):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
