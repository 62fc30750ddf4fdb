"""A node: it imports what training needs once, then runs one agent after another, each in a process of its own.

Started as ``python -m ebbflow.infra.training.launcher.node`` with ``EBBFLOW_NODE_ENTRY`` in its environment, on
whatever machine. It obeys its launcher's orders, shows signs of life, and ends, with everything below it, when the
launcher is gone. SIGTERM is a notice: the node tells its launcher that it will be gone soon.

An entry may name another program of ours, such as an elastic job's worker, which the process then becomes.
"""

import contextlib
import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import LauncherLostError, MessageError
from ebbflow.infra.logs.shipping import ShippingProcess
from ebbflow.infra.machine import devices, processes
from ebbflow.infra.storage import private
from ebbflow.infra.storage.files import home
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.client import MessageClient
from ebbflow.infra.training.channel.node_line import NodeLine
from ebbflow.infra.training.channel.wire import (
    ENTRY,
    AgentEnd,
    Entry,
    Heartbeat,
    Order,
    RankState,
    agent_end_from,
    entry_from,
    to_json,
)
from ebbflow.infra.training.launcher import tunnel
from ebbflow.infra.training.launcher.worker import RANKS
from ebbflow.infra.training.process import channel
from ebbflow.infra.training.process.printed_steps import PrintedSteps
from ebbflow.infra.training.workspace.preparing import become_prepared, prepare

NOTICE = "notice"  # file, in the node's directory, with the time at which the node will be gone
READY = "ready"  # file, in the node's directory, once all is imported
_POLL = 0.03  # seconds between polls for orders and at the agent
_LOOKS = 20  # of an agent at its processes that have all ended, after which it is sure that it sees no end
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK = os.sysconf("SC_CLK_TCK")
_EXIT_CODE = 49  # place in /proc/PID/stat, behind the name


class Node:
    """The node's loop; one thread, so that it can fork at any time.

    ZeroMQ has threads of its own in this process, which run no Python. A forked child has none of them and never
    touches the connection; it holds a copy of the socket, so that the launcher goes by signs of life and not by
    whether the connection lasts.
    """

    def __init__(self, entry: Entry, line: NodeLine) -> None:
        self._entry = entry
        self._line = line
        self._clock = SystemClock()
        self._agent = 0  # process id; 0: none runs
        self._generation = 0
        self._beats = 0
        self._last_beat = 0.0
        self._slots = 0
        self._ranks: list[dict[str, Any]] = []  # what the generation's processes have said of themselves
        self._notice: float | None = None
        self._empty_since: tuple[float, int] | None = None
        self._tunnel = 0  # process id; 0: none runs
        self._shipping: ShippingProcess | None = (
            None  # of logs, where the run's directory is in object storage
        )
        self._printed: PrintedSteps | None = (
            None  # of rank 0, where it runs here and tells its launcher nothing
        )

    def run(self) -> None:
        """Serve until told to leave or the launcher is gone."""
        signal.signal(signal.SIGTERM, self._on_notice)
        try:
            while self._serve():
                self._line.wait(_POLL)
        except LauncherLostError as exc:
            print(exc, file=sys.stderr, flush=True)
            self._end_processes(self._entry.grace)
        self._end_processes(0.0)

    def _serve(self) -> bool:
        self._look_at_agent()
        while (order := self._line.next_order()) is not None:
            if order.do == "leave":
                return False
            if order.do == "launch":
                self._launch(order)
            elif order.generation != self._generation or not self._agent:
                continue
            elif order.do == "kill":
                self._signal(signal.SIGKILL, order.rank)
            elif order.do == "terminate":
                self._signal(signal.SIGTERM)
            else:
                self._close(AgentEnd("ended", error="ended by the launcher", time=time.time()))
        now = self._clock.now()
        if now - self._last_beat >= self._entry.beat or (self._agent and self._find_ranks()):
            self._last_beat = now
            self._beats += 1
            ranks = self._look_at_ranks()
            generation = self._generation if self._agent else 0
            steps = self._printed_steps()
            self._line.show(Heartbeat(self._beats, generation, ranks, self._notice, *steps))
            if self._agent and self._has_dead_ranks(ranks, now):
                # Had one ended with an error, the agent would have seen that and ended as well.
                self._close(
                    AgentEnd("succeeded", error="its processes ended without a report", time=time.time())
                )
        return True

    # --- the agent ----------------------------------------------------------------------------------------

    def _launch(self, order: Order) -> None:
        self._end_processes(0.0)  # nothing of an older generation may be left
        self._generation, self._slots, self._ranks = order.generation, order.slots, []
        folder = self._end_file(order.generation).parent
        shutil.rmtree(folder, ignore_errors=True)  # of processes that these replace
        private.make_folder(folder)
        self._empty_since = None
        self._printed = None
        if order.own_checkpoints and order.first_rank == 0:
            logs = tuple(Path(order.logs) / f"rank-0.{stream}" for stream in ("out", "err"))
            self._printed = PrintedSteps(logs, order.step_pattern)
        self._ship_logs(order)
        port = order.store
        if self._entry.tunnel:
            process, port = tunnel.start(self._entry.launcher, self._entry.server, order.generation)
            self._tunnel = process.pid
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forks beside threads; those here are ZeroMQ's, and hold none of Python's locks
            warnings.simplefilter("ignore", DeprecationWarning)
            self._agent = os.fork()
        if self._agent == 0:
            self._become_agent(order, port, parent)

    def _ship_logs(self, order: Order) -> None:
        """Have the logs of this node copied to the run's directory, unless they are written there anyway."""
        folder = order.environment.get(channel.RUN_FOLDER, "")
        if self._shipping is None and "://" in folder:
            logs = Path(order.logs)  # DIRECTORY/generation-N/NODE
            own = Path(self._entry.folder) / "shipping.log"
            self._shipping = ShippingProcess(logs.parents[1], logs.name, f"{folder.rstrip('/')}/logs", own)

    def _become_agent(self, order: Order, port: int, parent: int) -> NoReturn:
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                from ebbflow.infra.training.launcher import agent

                end = agent.run(order, self._entry, port)
                private.write_text(self._end_file(order.generation), to_json(end))
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _look_at_agent(self) -> None:
        if not self._agent:
            return
        pid, status = os.waitpid(self._agent, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            end = AgentEnd("broken", error=f"the agent ended with status {code}", time=time.time())
            with contextlib.suppress(OSError, MessageError):
                end = agent_end_from(self._end_file(self._generation).read_text())
            self._close(end)

    def _has_dead_ranks(self, ranks: tuple[RankState, ...], now: float) -> bool:
        """Return whether the agent waits for processes that are gone: ``os._exit`` does not tell it.

        Where one has failed and the agent has yet to look at it, or has and got no time since, it is only late.
        """
        if not ranks or any(rank.state not in "XZ" or _failed(rank.pid) for rank in ranks):
            self._empty_since = None
            return False
        since, waits = self._empty_since = self._empty_since or (now, _waits(self._agent))
        return now - since > self._entry.deserted and _waits(self._agent) - waits >= _LOOKS

    def _close(self, end: AgentEnd) -> None:
        """End what is left of the generation and tell the launcher how it ended."""
        self._end_processes(0.0)
        if self._shipping is not None:
            self._shipping.flush()
        first, last = self._printed_steps()
        end = replace(end, first_step=first, last_step=last)
        self._line.report(self._generation, end)
        self._last_beat = 0.0

    def _printed_steps(self) -> tuple[int, int]:
        """Return the first and the highest step that rank 0 has printed; -1: none."""
        if self._printed is None:
            return -1, -1
        self._printed.look()
        return self._printed.first, self._printed.last

    def _end_file(self, generation: int) -> Path:
        return Path(self._entry.folder) / str(generation) / "end.json"

    # --- processes ----------------------------------------------------------------------------------------

    def _find_ranks(self) -> bool:
        """Take note of processes that have begun since the last look, and return whether there are any."""
        if len(self._ranks) >= self._slots:
            return False
        folder = Path(self._entry.folder) / str(self._generation) / RANKS
        known = len(self._ranks)
        with contextlib.suppress(OSError):
            paths = sorted(path for path in folder.iterdir() if path.name.isdigit())
            self._ranks = [json.loads(path.read_text()) for path in paths]
        return len(self._ranks) > known

    def _look_at_ranks(self) -> tuple[RankState, ...]:
        found = []
        for said in self._ranks:
            state, cpu = _look_at(said["pid"])
            found.append(RankState(said["rank"], said["pid"], state, cpu, said["started"]))
        return tuple(found)

    def _signal(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all of this node."""
        self._find_ranks()
        for found in self._look_at_ranks():
            if rank in (None, found.rank) and found.state not in "XZ":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found.pid, number)

    def _end_processes(self, grace: float) -> None:
        """End all processes below this one: those left after ``grace`` seconds by SIGKILL, until none is left.

        The tunnel, which they may need to the last, is not waited for.
        """
        end = self._clock.now() + grace
        while True:
            _reap()
            kept = self._shipping.pid if self._shipping is not None else 0
            below = [p for p in psutil.Process().children(recursive=True) if p.pid != kept and _lives(p)]
            if all(process.pid == self._tunnel for process in below):
                end = 0.0
            if not below:
                break
            if self._clock.now() >= end:
                for process in below:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            self._clock.sleep(_POLL)
        self._agent = self._tunnel = 0

    def _on_notice(self, _signal: int, _frame: FrameType | None) -> None:
        self._notice = time.time() + self._entry.grace
        with contextlib.suppress(OSError, ValueError):
            self._notice = float((Path(self._entry.folder) / NOTICE).read_text())
        self._last_beat = 0.0


def _reap() -> None:
    """Collect children that have ended: the agent, and what it left behind, which falls to this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _look_at(pid: int) -> tuple[str, float]:
    """Return a process' state and the processor seconds that it and what it started (loaders of data) have used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0.0
    used = sum(map(int, fields[11:15])) / _TICK  # its own and that of children that have ended
    with contextlib.suppress(OSError):  # not every kernel lists children
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            used += _look_at(int(child))[1]
    return fields[0], used


def _waits(pid: int) -> int:
    """Return how often a process has waited so far, as it does after each look at its own; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt")), 0)


def _failed(pid: int) -> bool:
    """Return whether a process has ended with an error that its parent has yet to learn."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] == "Z" and fields[_EXIT_CODE] != "0"


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # other systems than Linux do without
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def connect(entry: Entry) -> tuple[NodeLine, MessageClient]:
    """Return this node's end of the conversation with its launcher, which may be yet to learn the node's key.

    Puts what the node's processes need for theirs into the environment. Raises ``LauncherLostError``, or
    ``TrainingError`` where the node has no key.
    """
    pair = keys.own(os.environ)
    os.environ[channel.CHANNEL], os.environ[keys.SERVER_KEY] = entry.launcher, entry.server
    client = MessageClient(entry.launcher, entry.server, pair, timeout=entry.connect)
    client.await_connection()
    return NodeLine(client, entry.connect, entry.read), client


def _fetch(entry: Entry) -> None:
    """Make the user's code importable, after everything that is installed. Raises ``EbbflowError``."""
    made = prepare(entry.code, entry.run, Path(entry.cache) if entry.cache else home(), SystemClock())
    if made.directory is not None:
        sys.path.append(str(made.directory))


def main() -> None:
    """Serve as a node."""
    entry = entry_from(os.environ[ENTRY])
    devices.hold_to(entry.devices)
    private.make_folder(Path(entry.folder))
    if entry.program:
        private.reserve(Path(entry.folder) / READY)
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # a notice: who has started the program hears of it, too
        for name in processes.ONE_THREAD:  # several share a machine, and more threads round sums differently
            os.environ.setdefault(name, "1")
        program = importlib.import_module(entry.program)
        found = (entry.launcher, entry.server, keys.own(os.environ), entry.address)
        program.serve(*found, *entry.arguments, fetch=partial(_fetch, entry) if entry.code else None)
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if entry.prepare:
        become_prepared(entry, *connect(entry), "ebbflow.infra.training.launcher.node")
    # whether there is a GPU must be found out without touching it: a touched one cannot be used after a fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    importlib.import_module("ebbflow.infra.training.launcher.agent")
    for module in entry.preload:
        try:
            importlib.import_module(module)
        except ImportError:  # the script will say so where it needs the module
            traceback.print_exc()
    line, _ = connect(entry)
    private.reserve(Path(entry.folder) / READY)
    Node(entry, line).run()


if __name__ == "__main__":
    main()
