"""Twenty fault schedules of the two-phase commit among real gloo processes; run as a module with names of schedules.

``python -m tests.infra.communication.commit_faults NAME ...`` runs those without a kill one after the other in one
world of three ranks, and each with a kill in a world of its own.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from ebbflow.infra.communication.planned import PlannedCommunication
from tests.infra.communication.ranks import ANY_PLAN, elastic
from tests.infra.training.worlds import EXCHANGE, fork_world

RANKS = 3
LATE = 1.5  # s
QUIET = 1.5  # s without a report after which no plan is waited for any more


class Fault(NamedTuple):
    """What goes wrong with the store of a rank.

    ``cut``: it fails for good from ``at`` on, as if its control plane had crashed. ``kill``: its process is killed
    there, before the message, or after it. ``drop``: the message never arrives. ``late``: it comes ``LATE`` s later.
    """

    kind: str  # cut, kill, killed after, drop, late
    at: str  # what is done, with the beginning of its key
    rank: int = 0
    ends: str = (
        "ddp"  # what is reported at the end: plan, or ddp with a reason; else all stay on DDP without a word
    )
    vote_timeout: float = 20.0  # s


SCHEDULES = {
    **{
        f"coordinator cut off at: {at}": Fault("cut", at)
        for at in (
            "get profile/1", "set recorded", "set outcome/1", "check vote/1", "get vote/1", "set decision/1",
            "get decision/1",
        )
    },
    **{
        f"coordinator killed at: {at}": Fault("kill", at)
        for at in ("set recorded", "set outcome/1", "get vote/1", "set decision/1")
    },
    "coordinator killed after: set decision/1": Fault("killed after", "set decision/1"),
    "lost: a profile": Fault("drop", "set profile/1/1", 1, ""),
    "lost: the plan": Fault("drop", "set outcome/1", vote_timeout=1.0),
    "lost: a vote": Fault("drop", "set vote/1/2", 2, vote_timeout=1.0),
    "lost: the decision": Fault("drop", "set decision/1", 0, "committed"),
    "late: a profile": Fault("late", "set profile/1/2", 2, "plan"),
    "late: a vote, in time": Fault("late", "set vote/1/1", 1, "plan"),
    "late: a vote, after the deadline": Fault("late", "set vote/1/1", 1, vote_timeout=0.5),
    "late: the decision on one rank": Fault("late", "check decision/1", 2, "plan"),
}  # fmt: skip


class FaultyStore:
    """A store with one fault."""

    def __init__(self, store: dist.Store, fault: Fault | None) -> None:
        self._store, self._fault = store, fault
        self._broken = False
        self._asked: float | None = None  # when a message that is late was first asked for

    def _meets(self, done: str) -> bool:
        """Do what happens at this step; tell whether the message goes another way than usual."""
        if self._broken:
            raise RuntimeError("the store is gone")
        fault = self._fault
        if fault is None or not done.startswith(fault.at):
            return False
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "cut":
            self._broken = True
            raise RuntimeError("the store is gone")
        return True

    def set(self, key: str, value: str) -> None:
        if not self._meets(f"set {key}"):
            self._store.set(key, value)
            return
        assert self._fault is not None
        if self._fault.kind == "killed after":
            self._store.set(key, value)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault.kind == "late":
            timer = threading.Timer(LATE, self._store.set, (key, value))
            timer.daemon = True
            timer.start()

    def get(self, key: str) -> bytes:
        self._meets(f"get {key}")
        found: bytes = self._store.get(key)
        return found

    def check(self, keys: list[str]) -> bool:
        if self._meets(f"check {keys[0]}") and self._store.check(keys):
            self._asked = time.monotonic() if self._asked is None else self._asked
            return time.monotonic() - self._asked >= LATE
        return bool(self._store.check(keys))


class Watched:
    """What a rank's training ran: the version of each step, and the planned communication itself."""

    def __init__(self, rank: int, fault: Fault) -> None:
        self._fault = fault if fault.rank == rank else None
        self.versions: list[int] = []
        self.one: PlannedCommunication | None = None
        self._quiet = 0.0, -1

    def meddle(self, step: int, one: PlannedCommunication) -> None:
        if step == 0:
            self.one = one
            one._control._store = FaultyStore(one._control._store, self._fault)  # type: ignore[assignment]
        self.versions.append(one.switch.version)

    def quiet(self, reports: int) -> bool:
        """Tell whether no report has come for a while."""
        since, before = self._quiet
        if before != reports:
            self._quiet = time.monotonic(), reports
            return False
        return time.monotonic() - since > QUIET


def message_fault(rank: int, name: str) -> None:
    """Train with a fault that leaves all processes alive; ranks run one version at a time, the right one at last."""
    fault, watched = SCHEDULES[name], Watched(rank, SCHEDULES[name])

    def over(told: list[dict[str, object]], one: PlannedCommunication) -> bool:
        last = str(told[-1]["state"]) if told else ""
        return last == fault.ends and (last in ("plan", "ddp") or watched.quiet(len(told)))

    settings = replace(ANY_PLAN, measure_seconds=0.2, vote_timeout=fault.vote_timeout)
    _, told = elastic(rank, True, settings, until=over, meddle=watched.meddle, steps=40, name=name)
    everywhere: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, watched.versions)
    assert all(one == everywhere[0] for one in everywhere), (name, everywhere)
    assert set(watched.versions) <= {0, 1}
    assert watched.versions[-1] == (1 if fault.ends == "plan" else 0)
    if fault.kind != "cut":  # one that is cut off may have committed a plan before
        assert sorted(watched.versions) == watched.versions, (name, watched.versions)
    if rank == 0 and fault.ends == "ddp":
        reason = str(told[-1]["reason"])
        assert ("the store is gone" if fault.kind == "cut" else "no vote of ranks") in reason, (name, reason)


def killed_coordinator(rank: int, name: str, meeting: str) -> None:
    """Lose the coordinator's process; the others ran one version until then, and begin on plain collectives again."""
    fault, watched = SCHEDULES[name], Watched(rank, SCHEDULES[name])
    settings = replace(ANY_PLAN, measure_seconds=0.2)
    try:
        elastic(rank, True, settings, until=lambda *_: False, meddle=watched.meddle, name=name)
    except RuntimeError:
        pass  # a peer is lost: what ends a generation of a training
    else:
        raise AssertionError(f"{name}: the training continues without its first rank")
    assert watched.one is not None
    watched.one.close()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", f"file://{meeting}/again", rank=rank - 1, world_size=RANKS - 1, timeout=EXCHANGE
    )
    everywhere: list[list[int]] = [[]] * (RANKS - 1)
    dist.all_gather_object(everywhere, watched.versions)
    both = min(map(len, everywhere))
    assert both > 10
    assert max(map(len, everywhere)) - both <= 1, "no rank trains on alone"
    assert everywhere[0][:both] == everywhere[1][:both], (name, everywhere)
    assert set(watched.versions) <= ({0, 1} if fault.kind == "killed after" else {0})
    again = Watched(rank, Fault("none", "-", -1))
    elastic(rank - 1, True, settings, until=lambda *_: True, meddle=again.meddle, steps=20, name="again")
    assert again.versions[0] == 0, "the next generation begins without a plan"
    dist.all_gather_object(everywhere, again.versions)
    assert everywhere[0] == everywhere[1]


def main(names: list[str]) -> None:
    """Run schedules."""
    torch.set_num_threads(1)
    alive = [name for name in names if not SCHEDULES[name].kind.startswith("kill")]

    def _all(rank: int) -> None:
        for name in alive:
            message_fault(rank, name)

    if alive:
        fork_world(_all, RANKS)
    for name in names:
        if name not in alive:
            with tempfile.TemporaryDirectory() as meeting:

                def _one(rank: int, name: str = name, meeting: str = meeting) -> None:
                    killed_coordinator(rank, name, meeting)

                fork_world(_one, RANKS, killed={0})
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
