"""What a launcher checks and sets up before anything runs."""

import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.protocols import TrainingJob
from ebbflow.infra.protocols.trainings import PACKED
from ebbflow.infra.storage.filesystems import resolve, translated
from ebbflow.infra.training.channel.wire import Order
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.planners.errors import OptionError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# ``torch._dynamo`` takes seconds, and the first DistributedDataParallel of a process imports it; scipy's optimizers
# are imported where a speed is fitted
PRELOAD = ("torch.nn.parallel", "torch._dynamo", "scipy.optimize", "ebbflow.infra.training.run")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class Options:
    """How a launcher works; ``TorchTrainer`` explains each. Raises ``OptionError``."""

    minimum: int = 1
    node_timeout: float = 3600.0
    rescue: float = 20.0
    form: float = 60.0
    hang: HangRule = field(default_factory=HangRule)
    stragglers: bool = True
    replace: bool = True
    preload: tuple[str, ...] = PRELOAD
    start: Literal["fork", "spawn"] = "fork"
    variables: Mapping[str, str] = field(default_factory=dict)
    replica: int = 1
    ledger: str | None = field(default=None, repr=False)  # may hold a password

    def __post_init__(self) -> None:
        if self.start not in ("fork", "spawn"):
            raise OptionError(f"start must be 'fork' or 'spawn'; got {self.start!r}")
        if self.minimum < 1:
            raise OptionError(f"minimum must be >= 1 slot; got {self.minimum}")
        for name in ("node_timeout", "rescue", "form"):
            if not (value := getattr(self, name)) > 0:
                raise OptionError(f"{name} must be > 0 seconds; got {value}")


def checked_job(job: TrainingJob) -> TrainingJob:
    """Return a job that can be run, with absolute paths. Raises ``OptionError``, ``StorageError``."""
    if not _ID.fullmatch(job.id):
        raise OptionError(f"a run id holds letters, digits, dashes, dots and underscores; got {job.id!r}")
    script = job.script if "://" in job.script else str(Path(job.script).expanduser().absolute())
    if script.startswith(PACKED):
        if not job.code:
            raise OptionError(f"the script {job.script!r} is a file of packed code; the job has none")
    else:
        with translated(f"check the script {script}"):
            storage, path = resolve(script)
            if not storage.get_file_info(path).is_file:
                raise OptionError(f"there is no script {job.script!r}")
    if not job.folder:
        raise OptionError("a run needs a directory that all nodes share; got none")
    folder = job.folder if "://" in job.folder else str(Path(job.folder).expanduser().absolute())
    try:
        json.dumps([list(job.arguments), dict(job.environment)])
    except TypeError as exc:
        raise OptionError(f"arguments and environment of a script are text; {exc}") from exc
    return replace(job, script=script, folder=folder)


def checked_placement(placement: Mapping[str, int]) -> dict[str, int]:
    """Return a copy of a placement that can be used: slots (GPUs, or processor slots on this machine) by node.

    Raises ``OptionError``.
    """
    if not placement:
        raise OptionError("a placement must name a node at least")
    for name, slots in placement.items():
        if not _NODE.fullmatch(name):
            raise OptionError(f"a node's name holds letters, digits, dashes, dots, underscores; got {name!r}")
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise OptionError(f"node {name} must have 1 slot at least; got {slots!r}")
    return dict(placement)


def fresh_name(taken: Iterable[str]) -> str:
    """Return a name that no node in ``taken`` ever had."""
    numbers = [int(n.removeprefix("node-")) for n in taken if re.fullmatch(r"node-\d+", n)]
    return f"node-{max(numbers, default=0) + 1}"


def load_torch() -> None:
    """Import what ``serve_store`` needs, while nodes do the same: it takes a second."""
    import torch.distributed  # noqa: F401


def serve_store() -> "TCPStore":
    """Serve a store for the processes of one generation, on this machine's loopback interface only.

    torch's store does not authenticate its clients: another user of this machine may disturb a training by it.
    Nothing that is kept there is ever run, and nothing of the launcher's is kept there. Raises ``TrainingError``.
    """
    from torch.distributed import TCPStore

    try:
        listener = socket.create_server((_LOOPBACK, 0), backlog=512)
    except OSError as exc:
        why = os.strerror(exc.errno or 0)
        raise TrainingError(f"the launcher cannot listen on {_LOOPBACK}: {why}") from exc
    bound = int(listener.getsockname()[1])
    return TCPStore(
        _LOOPBACK,
        bound,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_STORE_TIMEOUT),
        master_listen_fd=listener.detach(),
    )


def preparation(job: TrainingJob, options: Options) -> Order | None:
    """Return what a node does before its first generation; ``None``: nothing, the job has no code of its own."""
    if not job.code:
        return None
    variables = {**job.environment, **options.variables}
    return Order(
        "prepare",
        environment=variables,
        code=_below(job.folder, job.code),
        secrets=tuple(options.variables),
    )


def _below(folder: str, name: str) -> str:
    """Return the path or address of ``name``, which may begin with ``../``, relative to ``folder``."""
    folder = folder.rstrip("/")
    while name.startswith("../"):
        folder, name = folder.rpartition("/")[0], name.removeprefix("../")
    return f"{folder}/{name}"
