"""The processes of one generation: who they are, what they agree on, and how the loss of one shows."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.process import agreeing, nccl

if TYPE_CHECKING:
    from ebbflow.infra.training.channel.messages import StopRequest

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
BACKEND = "EBBFLOW_BACKEND"  # what carries tensors of GPUs, if not NCCL


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
    _losses: nccl.LossWatch = field(default_factory=nccl.LossWatch, init=False, repr=False, compare=False)

    @property
    def elastic(self) -> bool:
        """Tell whether processes come and go while the others train on."""
        return False

    @property
    def fixed(self) -> str:
        """Return why processes cannot come and go, where they might have; else empty."""
        return ""

    @property
    def data_rank(self) -> int:
        """Return its place among those that get examples of their own."""
        return self.rank

    @property
    def data_size(self) -> int:
        """Return how many groups of processes get examples of their own; with tensor parallelism several are one."""
        return self.size

    @property
    def data_nodes(self) -> int:
        """Return the nodes that these are on, as far as the speed of their exchange depends on it."""
        return self.nodes

    @classmethod
    def join(cls, timeout: float, environment: Mapping[str, str] = os.environ) -> "World":
        """Join the processes that torchrun has started; without torchrun, be alone.

        What carries tensors: see ``backends``. A collective that takes over ``timeout`` seconds is an error.
        Raises ``TrainingError`` when the others cannot be reached.
        """
        size = int(environment.get("WORLD_SIZE", "1"))
        local_rank = int(environment.get("LOCAL_RANK", "0"))
        device = take_device(local_rank)
        rank = int(environment.get("RANK", "0"))
        local_size = max(1, int(environment.get("LOCAL_WORLD_SIZE", size)))
        nodes = int(environment.get("GROUP_WORLD_SIZE", -(-size // local_size)))
        if size > 1:
            nccl.prepare()  # a lost peer must not end the process, which can save
            try:
                dist.init_process_group(backends(device, environment), timeout=timedelta(seconds=timeout))
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

    def lost(self, error: BaseException) -> bool:
        """Take note of an error in a collective; return whether the step is to be repeated for it."""
        return False

    def heard(self, stop: "StopRequest | None") -> None:
        """Do what follows from what the launcher says; called in the thread that listens to it.

        ``stop``: its request to stop, if there is any.
        """
        self._losses.look(lost=stop is not None and stop.lost)

    def check_reduced(self) -> None:
        """Raise ``DistBackendError`` where what was exchanged of a step is void. The GPU has done all of it."""
        if self.device.type == "cuda":
            nccl.check()

    def is_first(self) -> bool:
        """Tell the script whether this is the first process."""
        return self.rank == 0

    def within(self) -> AbstractContextManager[None]:
        """Return a context of the run's own exchanges; what the script exchanges is looked for outside of it."""
        return nullcontext()

    def repeat_broken(self) -> None:
        """Raise ``ViewChangedError`` where processes were lost while gradients were exchanged."""

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
            if self.device.type == "cuda":
                nccl.close()
            else:
                dist.destroy_process_group()


def take_device(local_rank: int) -> torch.device:
    """Return the device that a process trains on, made torch's own where it is a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backends(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """Return what carries tensors: gloo those of CPUs, NCCL those of GPUs, or gloo where ``EBBFLOW_BACKEND`` says so.

    NCCL refuses two processes that share a GPU or have slices of one. Raises ``TrainingError`` for another value.
    """
    asked = environment.get(BACKEND, "nccl").lower()
    if asked not in ("nccl", "gloo"):
        raise TrainingError(f"{BACKEND} must be nccl or gloo; got {asked!r}")
    return f"cpu:gloo,cuda:{asked}" if device.type == "cuda" else "gloo"


def group_store(environment: Mapping[str, str], timeout: float) -> dist.Store:
    """Return the store that a launcher serves for a generation. Raises ``TrainingError``."""
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as exc:
        raise TrainingError(
            f"the store of the generation, at {host}:{port}, cannot be reached: {exc}"
        ) from exc


def peer_lost(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, says that another process is gone or silent."""
    while error is not None:
        if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
            return True
        if isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in _PEER_LOST):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
