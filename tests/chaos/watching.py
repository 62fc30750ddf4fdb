"""Looks all the time at what runs on which GPU, and compares with the ledger's leases."""

import threading
from dataclasses import dataclass, field
from typing import Any, Self

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import Occupant
from ebbflow.infra.local_fleet.state import labels as marks
from ebbflow.planners.model.ledger import Slot
from ebbflow.planners.model.ledger_state import State

_LOOK = 0.4  # s


@dataclass
class Uses:
    """A context manager: samples from its beginning to its end.

    Args:
        fleet: uid of the local fleet.
        ledger: of the cluster.
    """

    fleet: str
    ledger: Ledger
    problems: list[str] = field(default_factory=list)
    looks: int = 0
    seen: int = 0  # GPUs in use, over all looks
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="uses", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(150)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK):
            before = self._state()
            found = marks.occupants(self.fleet)
            self.looks += 1
            self.seen += sum(len(one.slots) for one in found)
            self.problems += twice(found)
            if before is not None and (strangers := of_others(found, before)):
                after = self._state()
                if after is not None:
                    here = marks.occupants(self.fleet)
                    self.problems += sorted(
                        set(strangers) & set(of_others(found, after)) & set(of_others(here, after))
                    )

    def _state(self) -> State | None:
        try:
            return self.ledger.state()
        except LedgerError:
            return None


def twice(found: tuple[Occupant, ...]) -> list[str]:
    """Return GPUs that two launchers use at once: all of whose processes are there still."""
    users: dict[Slot, list[Occupant]] = {}
    for one in found:
        for slot in one.slots:
            users.setdefault(Slot(one.node, slot), []).append(one)
    said = []
    for slot, many in users.items():
        alive = [one for one in many if any(marks.identity(pid) is not None for pid in one.pids)]
        if len(alive) > 1:
            said.append(
                f"GPU {slot.number} of {slot.node} is used by {' and '.join('/'.join(o.parts) for o in alive)}"
            )
    return said


def of_others(found: tuple[Occupant, ...], state: State) -> list[str]:
    """Return what runs on GPUs that the ledger has given to another app."""
    said = []
    for one in found:
        for slot in one.slots:
            number = state.booked.get(Slot(one.node, slot))
            lease = state.leases.get(number) if number is not None else None
            if lease is not None and lease.app != one.app:
                said.append(
                    f"{one.app} runs on GPU {slot} of {one.node}, which lease {number} gives to {lease.app}"
                )
    return said
