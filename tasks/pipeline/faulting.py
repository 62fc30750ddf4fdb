"""Carries out the faults that a pipeline's file asks for, on nodes of this machine."""

import threading
from collections.abc import Callable, Sequence

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model.ledger import OVER
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.pipeline.file.spec import FaultSpec

_LOOK = 0.2  # s


class Faults:
    """Does to the nodes what ``faults`` say, in a thread of its own.

    A fault's time counts from the moment at which its step, or the first of all, is seen running in the ledger. A
    pool in place of a node means the newest of its nodes that is leased, or else the newest.

    Args:
        apps: the app of each step in the ledger.
        say: hears what is done.
    """

    def __init__(
        self,
        faults: Sequence[FaultSpec],
        fleet: LocalFleet,
        ledger: Ledger,
        apps: Callable[[str], str],
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._left = sorted(faults, key=lambda fault: fault.after)
        self._fleet, self._ledger, self._apps, self._say, self._clock = fleet, ledger, apps, say, clock
        self._began: dict[str, float] = {}  # step -> when it was first seen running; "" for the first of all
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ebbflow-faults", daemon=True)

    def begin(self) -> None:
        """Start looking."""
        if self._left:
            self._thread.start()

    def end(self) -> None:
        """Do nothing more; waits for what is being done."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(30.0)

    def _run(self) -> None:
        while self._left and not self._clock.wait(self._stop, _LOOK):
            try:
                self._look(self._ledger.state())
            except (LedgerError, ClusterError):
                continue  # it is looked at again; the loop says what is wrong with it

    def _look(self, state: State) -> None:
        now = self._clock.now()
        for id_, record in state.apps.items():
            if record.phase == "running" or record.first_lease is not None or record.phase in OVER:
                self._began.setdefault("", now)
                self._began.setdefault(id_, now)
        for fault in list(self._left):
            since = self._began.get(self._apps(fault.step) if fault.step else "")
            if since is not None and now >= since + fault.after:
                self._do(fault, state)
                self._left.remove(fault)

    def _do(self, fault: FaultSpec, state: State) -> None:
        node = self.choose(fault.node, state)
        if node is None:
            self._say(f"scripted: there is no node of {fault.node} to take away")
            return
        try:
            if fault.kind == "kill":
                self._say(f"scripted: {node} is killed without notice")
                self._fleet.kill(node)
            else:
                self._say(f"scripted: notice to {node}: it leaves in {fault.notice:g} s")
                self._fleet.notice(node, fault.notice)
        except EbbflowError as error:
            self._say(f"scripted: that did not work: {error}")

    def choose(self, name: str, state: State) -> str | None:
        """Return the node that ``name`` means now; ``None`` where there is none."""
        view = [node for node in self._fleet.view() if node.state == "alive"]
        if any(node.id == name for node in view):
            return name
        leased = {slot.node for slot in state.booked}
        found = [node for node in view if node.pool == name]
        if not found:
            return None
        return max(found, key=lambda node: (node.id in leased, node.since)).id
