"""One agent of PyTorch's elastic launcher: it meets the other nodes' agents and runs this node's processes once."""

import contextlib
import json
import logging
import os
import time
import traceback
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import LauncherLostError, StorageError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.training.channel.wire import SCRIPT, AgentEnd, Entry, Failure, Order
from ebbflow.infra.training.launcher.worker import RANKS, run_script
from ebbflow.infra.training.process.channel import GENERATION, RUN_ID, Channel
from ebbflow.infra.training.workspace.preparing import located

_POLL = 0.05  # seconds between polls of the processes
_MEET = 0.02  # seconds between polls for other agents
_LOOPBACK = "127.0.0.1"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TAIL = 200  # lines of log that go with a failure
_LONGEST = 32_000  # characters of them


class Rendezvous(RendezvousHandler):  # type: ignore[misc]
    """How agents meet: the launcher has decided who participates and in which order, and knows who is there.

    torch's own way keeps pickles in a store, and runs what they say. Here nothing of the store is read: the
    processes' store is one that the launcher serves, at ``port`` of this node's loopback interface.
    """

    def __init__(self, order: Order, port: int) -> None:
        self._order, self._port = order, port

    @property
    def use_agent_store(self) -> bool:
        """Notify the processes that the store is there already."""
        return True

    def get_backend(self) -> str:
        return "ebbflow"

    def get_run_id(self) -> str:
        return self._order.environment.get(RUN_ID, "")

    def next_rendezvous(self) -> RendezvousInfo:
        """Return once all agents are there. Raises ``RendezvousError``."""
        order = self._order
        try:
            self._meet()
        except LauncherLostError as exc:
            raise RendezvousConnectionError(str(exc)) from exc
        return RendezvousInfo(
            HashStore(), order.node, order.nodes, RendezvousStoreInfo(_LOOPBACK, self._port)
        )

    def _meet(self) -> None:
        channel = Channel.connect()
        assert channel is not None, "the node has put its launcher's address into the environment"
        try:
            end = time.monotonic() + self._order.form
            while (there := channel.meet()) < self._order.nodes:
                if time.monotonic() > end:
                    raise RendezvousTimeoutError(
                        f"Timeout: agents of {there} of {self._order.nodes} nodes came within {self._order.form:g} s"
                    )
                SystemClock().sleep(_MEET)
        finally:
            channel.close()

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Return that no other agent waits."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):  # type: ignore[misc]
    def __init__(self, order: Order, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._order = order
        self._remaining_restarts = 0

    def _assign_worker_ranks(self, *_: Any) -> list[Worker]:
        """Return this node's processes as the launcher has ordered them; nothing is asked of a store."""
        order, found = self._order, []
        for local in range(order.slots):
            rank = order.first_rank + local
            found.append(Worker(local, rank, rank, order.world, order.world))
        return found

    def _exit_barrier(self) -> None:
        """Leave at once: the launcher itself waits for all agents, and knows which of them never come."""


def _mute_torch_logs() -> None:
    """Keep torch's launcher from logging failures: we report them, and its formatter imports a compiler to do so."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


class RankLogs(LogsSpecs):  # type: ignore[misc]
    """Each rank's output and errors in files of its own: ``rank-<n>.out`` and ``rank-<n>.err``."""

    def __init__(self, folder: Path, errors: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._errors = errors

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the files of the ranks with these environments, by local rank, and return where they are."""
        with translated(f"make the processes' logs in {self._folder}"):
            return self._made(envs)

    def _made(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        private.make_folder(self._folder)
        private.make_folder(self._errors)
        found = LogsDest(filtered_stdout="", filtered_stderr="")
        for local, environment in envs.items():
            name = f"rank-{environment['RANK']}"
            found.stdouts[local] = str(self._folder / f"{name}.out")
            found.stderrs[local] = str(self._folder / f"{name}.err")
            found.error_files[local] = environment["TORCHELASTIC_ERROR_FILE"] = str(
                self._errors / f"{name}.json"
            )
            for path in (found.stdouts[local], found.stderrs[local]):
                private.reserve(Path(path))
        return found

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)


def bind_collectives(environment: MutableMapping[str, str], address: str) -> None:
    """Make gloo and NCCL, which do not authenticate peers, use the interface of this node's address and no other.

    A variable that is set already is the user's own, and stays. Nothing happens where no interface has the address.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            for name in _INTERFACES:
                environment.setdefault(name, interface)
            return


def run(order: Order, entry: Entry, port: int) -> AgentEnd:
    """Run one generation on this node and return how it ended; blocks until then.

    ``port``: at which this node's loopback interface leads to the generation's store.
    """
    _mute_torch_logs()
    scratch = Path(entry.folder) / str(order.generation)
    os.environ.update(order.environment)
    os.environ[GENERATION] = str(order.generation)
    bind_collectives(os.environ, entry.address)
    os.environ[SCRIPT] = json.dumps(
        {
            "script": located(order.script, os.environ),
            "arguments": list(order.arguments),
            "folder": str(scratch / RANKS),
        }
    )
    try:
        return _ended(_run(order, entry, port, scratch), Path(order.logs))
    except RendezvousError as error:
        return AgentEnd("unformed", error=f"{type(error).__name__}: {error}".strip(": "), time=time.time())
    except SignalException as error:
        return AgentEnd("ended", error=str(error), time=time.time())
    except StorageError as error:  # the run's directory, whatever the reason: no fault of the script's data
        said = "".join(traceback.format_exception(error, chain=False))
        return AgentEnd("broken", error=said, time=time.time())
    except Exception:
        return AgentEnd("broken", error=traceback.format_exc(), time=time.time())


def _run(order: Order, entry: Entry, port: int, scratch: Path) -> RunResult:
    spec = WorkerSpec(
        role="trainer",
        local_world_size=order.slots,
        rdzv_handler=Rendezvous(order, port),
        entrypoint=run_script,
        max_restarts=order.generation - 1,  # of which none is left: scripts read their number as torchrun's
        monitor_interval=_POLL,
        local_addr=entry.address,
    )
    agent = _Agent(
        order,
        spec,
        logs_specs=RankLogs(Path(order.logs), scratch / "errors"),
        start_method=order.start,
        shutdown_timeout=max(1, round(order.grace)),
    )
    return agent.run()


def _ended(result: RunResult, logs: Path) -> AgentEnd:
    if result.state == WorkerState.SUCCEEDED:
        return AgentEnd("succeeded", time=time.time())
    failures = [_failure(rank, found, logs) for rank, found in result.failures.items()]
    return AgentEnd("failed", tuple(sorted(failures, key=lambda f: (f.time, f.rank))), time=time.time())


def _failure(rank: int, found: ProcessFailure, logs: Path) -> Failure:
    error, at = "", time.time()
    with contextlib.suppress(OSError):  # a process that was killed has none
        at = Path(found.error_file).stat().st_mtime  # the time within is in whole seconds: too coarse
        error = _recorded(found.error_file_data)
    return Failure(
        rank=rank,
        exit_code=found.exitcode,
        signal=found.signal_name() if found.exitcode < 0 else "",
        error=error,
        log=log_tail(logs, rank),
        time=at,
    )


def _recorded(data: Any) -> str:
    """Return the traceback that the process recorded before it ended; empty without one."""
    message = data.get("message") if isinstance(data, Mapping) else None
    if isinstance(message, Mapping):
        return str((message.get("extraInfo") or {}).get("py_callstack") or message.get("message") or "")
    return message if isinstance(message, str) else ""


def log_tail(logs: Path, rank: int) -> str:
    """Return the end of what a rank wrote to its standard error, or to its output where that is empty."""
    for name in (f"rank-{rank}.err", f"rank-{rank}.out"):
        with contextlib.suppress(OSError):
            lines = (logs / name).read_text(errors="replace").splitlines()[-_TAIL:]
            if lines:
                return "\n".join(lines)[-_LONGEST:]
    return ""
