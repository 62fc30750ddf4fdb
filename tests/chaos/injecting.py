"""Carries out what a script says, each fault at its time, and keeps proof that it happened."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbflow.infra.errors import InfraError, LedgerError
from ebbflow.infra.local_fleet.state import labels as marks
from ebbflow.infra.local_fleet.view import NodeView
from tests.chaos.faults import Fault
from tests.chaos.keeping import Kept
from tests.chaos.scene import POOLS, Scene

SETTLED = 15.0  # s after which a process holds its run
_VICTIM = 6.0  # s that a victim is waited for
_LOOK = 0.05  # s


@dataclass
class Done:
    """What became of one fault."""

    kind: str
    at: float  # s after the beginning
    victim: str = ""
    proof: str = ""  # that it happened; empty: it did not
    why_not: str = ""
    number: int = 0  # of the ledger's last event before it
    until: float = 0.0  # s after the beginning, when it was over
    led: bool = False  # the loop that was killed was the one that led

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Injector:
    """Does to a scene what its script says, in threads of its own; ``end`` puts right what lasts.

    Args:
        scene: where.
        loops: processes of the capacity loop.
        apps: processes that hold pipelines; new ones may be added.
        twin: starts a second process for a run that is held, and returns how it ended.
    """

    scene: Scene
    loops: Sequence[Kept]
    apps: list[Kept]
    twin: Callable[[Kept], subprocess.CompletedProcess[bytes]]
    say: Callable[[str], None] = lambda _: None
    done: list[Done] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _began: float = 0.0
    _wall: float = 0.0
    _walls: threading.Lock = field(default_factory=threading.Lock)
    _disk: threading.Lock = field(default_factory=threading.Lock)
    _network: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Start; times of the script count from here."""
        self._began = time.monotonic()
        thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        """Do nothing more, and wait for what is under way."""
        self._stop.set()
        for thread in list(self._threads):
            thread.join(150)

    def _run(self) -> None:
        for fault in self.scene.script.faults:
            if self._stop.wait(max(0.0, self._began + fault.at - time.monotonic())):
                self._note(fault, why_not="everything had ended before")
                continue
            thread = threading.Thread(target=self._do, args=(fault,), name=f"fault-{fault.kind}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _note(self, fault: Fault, **fields: Any) -> Done:
        one = Done(fault.kind, round(time.monotonic() - self._began, 2), **fields)
        self.done.append(one)
        return one

    def _do(self, fault: Fault) -> None:
        one = self._note(fault, number=self._number())
        act: Mapping[str, Callable[[Fault, Done], None]] = {
            "kill-spark": self._kill_node,
            "kill-gpu": self._kill_node,
            "notice-spark": self._notice,
            "notice-gpu": self._notice,
            "freeze-spark": self._freeze_node,
            "freeze-gpu": self._freeze_node,
            "kill-app": self._kill_process,
            "kill-loop": self._kill_process,
            "freeze-app": self._freeze_process,
            "freeze-loop": self._freeze_process,
            "kill-worker": self._kill_worker,
            "twin-app": self._twin,
            "database": self._database,
            "disk": self._fill,
            "clock": self._jump,
        }
        try:
            act[fault.kind](fault, one)
        except (InfraError, OSError) as error:
            one.why_not = str(error)
        one.until = round(time.monotonic() - self._began, 2)
        self.say(f"{one.at:6.1f} s {one.kind} {one.victim}: {one.proof or 'not done, ' + one.why_not}")

    def _number(self) -> int:
        try:
            with self.scene.open() as ledger:
                return ledger.state().number
        except LedgerError:
            return -1  # it is away

    # --- nodes ----------------------------------------------------------------------------------------------

    def _node(self, fault: Fault) -> NodeView | None:
        """Return a node of the kind; of the GPU nodes rather one that is used."""
        pool = POOLS[fault.kind.partition("-")[2]]
        fleet, end = self.scene.fleet, time.monotonic() + _VICTIM
        while True:
            found = [node for node in fleet.view() if node.pool == pool and node.state == "alive"]
            used = {one.node for one in fleet.occupants()}
            busy = [node for node in found if node.id in used]
            # nine times of ten one that is used
            chosen = busy if busy and fault.way % 10 else found
            if chosen:
                return chosen[fault.way % len(chosen)]
            if time.monotonic() > end or self._stop.is_set():
                return None
            self._stop.wait(_LOOK)

    def _kill_node(self, fault: Fault, one: Done) -> None:
        if (node := self._node(fault)) is None:
            one.why_not = "no such node was there"
            return
        one.victim = node.id
        if fault.way % 3 == 0:  # as the kernel does it: the fleet is not asked
            book = self.scene.fleet.state
            found = book.node(node.id)
            if found is None or found.process is None:
                one.why_not = "it had gone"
                return
            os.kill(found.process.pid, signal.SIGKILL)
            one.proof = f"SIGKILL to the process {found.process.pid} that stands for it"
        else:
            self.scene.fleet.kill(node.id)
            one.proof = "SIGKILL to all on it"

    def _notice(self, fault: Fault, one: Done) -> None:
        if (node := self._node(fault)) is None:
            one.why_not = "no such node was there"
            return
        one.victim = node.id
        self.scene.fleet.notice(node.id, fault.seconds)
        one.proof = f"it had {fault.seconds:g} s"

    def _freeze_node(self, fault: Fault, one: Done) -> None:
        if (node := self._node(fault)) is None:
            one.why_not = "no such node was there"
            return
        one.victim = node.id
        self.scene.fleet.pause(node.id)
        one.proof = f"SIGSTOP to all on it for {fault.seconds:g} s"
        self._stop.wait(fault.seconds)
        try:
            self.scene.fleet.resume(node.id)
        except InfraError as error:
            one.proof += f"; then it was gone: {error}"

    def _kill_worker(self, fault: Fault, one: Done) -> None:
        end = time.monotonic() + _VICTIM
        while not self._stop.is_set() and time.monotonic() < end:
            pids = [(o, pid) for o in self.scene.fleet.occupants() for pid in o.pids]
            if pids:
                occupant, pid = pids[fault.way % len(pids)]
                one.victim = f"{occupant.app} on {occupant.node}"
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                one.proof = f"SIGKILL to process {pid}"
                return
            self._stop.wait(_LOOK)
        one.why_not = "no training ran"

    # --- processes ------------------------------------------------------------------------------------------

    def _process(self, fault: Fault) -> Kept | None:
        many = self.loops if fault.kind.endswith("loop") else self.apps
        end = time.monotonic() + _VICTIM
        while True:
            found = [kept for kept in list(many) if kept.pid]
            if found:
                return found[fault.way % len(found)]
            if time.monotonic() > end or self._stop.is_set():
                return None
            self._stop.wait(_LOOK)

    def _kill_process(self, fault: Fault, one: Done) -> None:
        kept = self._process(fault)
        one.led = kept is not None and self._leads(kept.pid)
        pid = kept.kill(group=bool(fault.way % 2), back=fault.back) if kept is not None else 0
        if kept is None or not pid:
            one.why_not = "no such process was there"
            return
        one.victim = kept.name
        one.proof = (
            f"SIGKILL to process {pid}{' and its session' if fault.way % 2 else ''}, {fault.back:g} s away"
        )

    def _leads(self, pid: int) -> bool:
        """Tell whether a process leads the cluster, by the holder's name in the ledger."""
        try:
            with self.scene.open() as ledger:
                lead = ledger.leader()
        except LedgerError:
            return False
        return lead is not None and f":{pid}:" in lead.holder

    def _freeze_process(self, fault: Fault, one: Done) -> None:
        kept = self._process(fault)
        pid = kept.pid if kept is not None else 0
        identity = marks.identity(pid) if pid else None
        if kept is None or identity is None:
            one.why_not = "no such process was there"
            return
        one.victim = kept.name
        os.kill(pid, signal.SIGSTOP)
        one.proof = f"SIGSTOP to process {pid} for {fault.seconds:g} s"
        self._stop.wait(fault.seconds)
        if marks.alive(identity):
            os.kill(pid, signal.SIGCONT)

    def _twin(self, fault: Fault, one: Done) -> None:
        kept = self._process(fault)
        if kept is None or not kept.pid:
            one.why_not = "no such process was there"
            return
        one.victim = kept.name
        # one that has only begun may not hold the run yet, and then the second is the first
        before, old = kept.pid, time.monotonic() - kept.starts[-1] > SETTLED
        try:
            ended = self.twin(kept)
        except subprocess.TimeoutExpired:
            one.proof = "it goes on with the run, which the first had let go of; ended"
            refused = False
        else:
            said = ended.stdout.decode(errors="replace").strip().splitlines()
            one.proof = f"it ended with {ended.returncode}: {said[-1][:200] if said else ''}"
            refused = ended.returncode != 0
        if not refused and old and before == kept.pid:
            one.proof, one.why_not = "", "WRONG: two processes held one run"

    # --- what they stand on ---------------------------------------------------------------------------------

    def _database(self, fault: Fault, one: Done) -> None:
        proxy = self.scene.proxy
        if proxy is None:
            self._lock_file(fault, one)
            return
        with self._network:
            cuts, held = proxy.cuts, proxy.held
            proxy.set("cut" if fault.way % 2 else "silent")
            self._stop.wait(fault.seconds)
            proxy.set("open")
            if proxy.cuts > cuts:
                one.proof = f"{proxy.cuts - cuts} connections were cut or refused within {fault.seconds:g} s"
            elif proxy.held > held:
                one.proof = f"nothing came through for {fault.seconds:g} s"
            else:
                one.why_not = "nobody was connected"

    def _lock_file(self, fault: Fault, one: Done) -> None:
        """Hold SQLite's write lock: nobody can write."""
        connection = sqlite3.connect(self.scene.direct, isolation_level=None, timeout=20.0)
        try:
            connection.execute("BEGIN IMMEDIATE")
            self._stop.wait(fault.seconds)
            connection.execute("ROLLBACK")
            one.proof = f"its write lock was held for {fault.seconds:g} s"
        except sqlite3.Error as error:  # such as another fault that holds it, or a full disk
            one.why_not = str(error)
        finally:
            connection.close()

    def _fill(self, fault: Fault, one: Done) -> None:
        if not self.scene.mounted:
            one.why_not = "a small disk can be mounted by root only"
            return
        ballast = self.scene.disk / "ballast"
        with self._disk:
            end, refused = time.monotonic() + fault.seconds, 0
            with ballast.open("wb", buffering=0) as file:
                while time.monotonic() < end and not self._stop.is_set():  # what others let go of, too
                    try:
                        while True:
                            file.write(bytes(1 << 16))
                    except OSError:
                        refused += 1
                    self._stop.wait(0.1)
                size = file.tell()
            ballast.unlink()
        one.proof = f"{size >> 20} MiB of ballast left no room for {fault.seconds:g} s" if refused else ""

    def _jump(self, fault: Fault, one: Done) -> None:
        with self._walls:
            # so that it does not run away: two jumps in one direction are one
            self._wall = (
                fault.seconds if abs(self._wall + fault.seconds) > 4000 else self._wall + fault.seconds
            )
            beside = self.scene.wall.with_suffix(".new")
            beside.write_text(repr(self._wall))
            beside.replace(self.scene.wall)
        probe = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            env=dict(self.scene.environment),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        ahead = float(probe.stdout or "nan") - time.time()
        one.victim = f"{fault.seconds:+g} s"
        if abs(ahead - self._wall) < 3.0:
            one.proof = f"a process that begins now is {ahead:+.1f} s off"
        else:
            one.why_not = f"a process is {ahead:+.1f} s off, not {self._wall:+.1f} s: {probe.stderr[-200:]}"
