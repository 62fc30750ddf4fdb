"""Processes that tests of the ledger kill, race or starve: ``python ledger_child.py COMMAND URL CLUSTER ...``.

What is in the ledger for certain is told in a file, a line each time a write has returned.
"""

import os
import random
import resource
import sys
from pathlib import Path

from ebbflow.infra.errors import LedgerBusyError, LedgerUnavailableError, StaleLoopError
from ebbflow.infra.ledger import Leadership, Ledger
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppSpec,
    CapacityChanged,
    Change,
    Decided,
    Ended,
    Extended,
    Granted,
    Lease,
    Slot,
)
from ebbflow.planners.model.ledger_state import State

GPUS = [(f"n{n}", slot) for n in range(3) for slot in range(4)]
APPS = [f"a{n}" for n in range(4)]


def set_up(ledger: Ledger, lead: Leadership) -> None:
    """Enter apps and nodes, once."""
    state = ledger.state()
    changes: list[Change] = [AppEntered(AppSpec(a, "training", gpus=2)) for a in APPS if a not in state.apps]
    if not state.nodes:
        changes.append(CapacityChanged(1, tuple(Node(f"n{n}", 8, 32.0, gpus=4) for n in range(3))))
    lead.write(changes)


def step(state: State, rng: random.Random, reason: str) -> list[Change]:
    """Return a few changes that end some leases and grant others, by one who signs them."""
    ended = [n for n in state.leases if rng.random() < 0.3]
    kept = [n for n in state.leases if n not in ended]
    taken = {slot for slot, n in state.booked.items() if n in kept}
    free = [gpu for gpu in GPUS if Slot(*gpu) not in taken and rng.random() < 0.4]
    number = state.last_lease
    granted = [
        Lease(number + k, rng.choice(APPS), name, slot, 0.0, 60.0, 1, reason=reason)
        for k, (name, slot) in enumerate(free, 1)
    ]
    changes: list[Change] = [Decided("auction", reason, inputs={"free": len(free)})]
    if ended:
        changes.append(Ended(tuple(ended), reason))
    if kept:
        changes.append(Extended(tuple(kept), rng.random() * 100, reason))
    if granted:
        changes.append(Granted(tuple(granted)))
    return changes


def write_for_ever(url: str, cluster: str, told: str, seed: str) -> None:
    rng = random.Random(seed)
    with Ledger.open(url, cluster=cluster) as ledger, Path(told).open("a") as out:
        lead = ledger.lead(f"child-{os.getpid()}", take_over=True)
        set_up(ledger, lead)
        while True:
            written = lead.write(step(ledger.state(), rng, "steady"))
            out.write(f"{written[-1].number}\n")
            out.flush()


def race(url: str, cluster: str, name: str, rounds: str) -> None:
    """Lead by turns with another process, which takes over in the middle of what this one does."""
    rng = random.Random(name)
    left = int(rounds)
    with Ledger.open(url, cluster=cluster) as ledger:
        lead: Leadership | None = None
        while left:
            try:
                if lead is None:
                    lead = ledger.lead(name, 5.0, take_over=rng.random() < 0.5)
                    set_up(ledger, lead)
                lead.write(step(ledger.state(), rng, name))
                left -= 1
                if rng.random() < 0.1:
                    lead.resign()
            except (StaleLoopError, LedgerBusyError):
                lead = None
        if lead is not None:
            lead.resign()


def fill_disk(url: str, cluster: str) -> None:
    """Write until the file can grow no more; say what happened; go on when there is room again."""
    rng = random.Random(1)
    with Ledger.open(url, cluster=cluster) as ledger:
        lead = ledger.lead("filler")
        set_up(ledger, lead)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
        written = 0
        for _ in range(3000):
            try:
                written = lead.write(step(ledger.state(), rng, "x" * 2000))[-1].number
            except LedgerUnavailableError as error:
                print("refused:", error)
                break
        else:
            raise SystemExit("the limit was never met")
        for _ in range(3):  # still full
            try:
                lead.write(step(ledger.state(), rng, "x" * 200_000))
            except LedgerUnavailableError:
                continue
            raise SystemExit("there was no room, but a write returned")
        assert ledger.state().number == written, (ledger.state().number, written)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        lead.write(step(ledger.state(), rng, "room again"))
        assert ledger.verify() == []
        print("verified")


if __name__ == "__main__":
    {"write": write_for_ever, "race": race, "fill": fill_disk}[sys.argv[1]](*sys.argv[2:])
