"""One agent of PyTorch's elastic launcher: it meets the other nodes' agents and runs this node's processes once."""

import contextlib
import json
import logging
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ebbflow.infra import private
from ebbflow.infra.training.launcher.wire import SCRIPT, AgentEnd, Entry, Failure, Order
from ebbflow.infra.training.launcher.worker import RANKS, run_script

_LOOK = 0.05  # seconds between looks at the processes
_TAIL = 200  # lines of log that go with a failure
_LONGEST = 32_000  # characters of them


class _Agent(LocalElasticAgent):  # type: ignore[misc]
    def _exit_barrier(self) -> None:
        """Leave at once: the launcher itself waits for all agents, and knows which of them never come."""


def _hush() -> None:
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


def run(order: Order, entry: Entry) -> AgentEnd:
    """Run one generation on this node and return how it ended; blocks until then."""
    _hush()
    scratch = Path(entry.folder) / str(order.generation)
    os.environ.update(order.environment)
    os.environ[SCRIPT] = json.dumps(
        {"script": order.script, "arguments": list(order.arguments), "folder": str(scratch / RANKS)}
    )
    try:
        return _ended(_run(order, entry, scratch), Path(order.logs))
    except RendezvousError as error:
        return AgentEnd("unformed", error=f"{type(error).__name__}: {error}".strip(": "), time=time.time())
    except SignalException as error:
        return AgentEnd("ended", error=str(error), time=time.time())
    except Exception:
        return AgentEnd("broken", error=traceback.format_exc(), time=time.time())


def _run(order: Order, entry: Entry, scratch: Path) -> RunResult:
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=entry.store,
            run_id=f"{entry.run}-{order.generation}",
            min_nodes=order.nodes,
            max_nodes=order.nodes,
            local_addr=entry.address,
            is_host=0,
            join_timeout=max(1, round(order.form)),
            close_timeout=10,
            read_timeout=max(1, round(order.form)),
        )
    )
    spec = WorkerSpec(
        role="trainer",
        local_world_size=order.slots,
        rdzv_handler=handler,
        entrypoint=run_script,
        max_restarts=0,
        monitor_interval=_LOOK,
        local_addr=entry.address,
    )
    agent = _Agent(
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
