"""Values that tests of the ledger share."""

import time
from collections.abc import Callable
from typing import Any

from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import AppEntered, AppSpec, CapacityChanged, Decided, Granted, Lease


class SetClock:
    """A clock that stands still unless told, and lets real time pass where something is waited for."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        time.sleep(min(max(seconds, 0.0), 0.05))

    def wait(self, event: Any, timeout: float) -> bool:
        return bool(event.wait(min(timeout, 0.05)))


def node(name: str, gpus: int = 2, **more: Any) -> Node:
    return Node(name, cores=8, memory=32.0, gpus=gpus, price=1.2, **more)


def nodes(*names: str, revision: int = 1, gpus: int = 2) -> CapacityChanged:
    return CapacityChanged(revision, tuple(node(name, gpus) for name in names))


def app(name: str, **more: Any) -> AppEntered:
    return AppEntered(AppSpec(name, "training", gpus=2, **more))


def lease(number: int, app: str = "a", node: str = "n1", slot: int = 0, since: float = 1_000_000.0) -> Lease:
    return Lease(number, app, node, slot, since, since + 60.0, revision=1, price=0.6, reason="first")


def grant(*leases: Lease) -> Granted:
    return Granted(leases)


def decision(**more: Any) -> Decided:
    return Decided("auction", "the fairest", **{"inputs": {"rho": {"a": 1.5}}, "outcome": {"a": 2}, **more})


def until(condition: Callable[[], object], seconds: float = 150.0) -> None:
    """Wait until ``condition`` holds; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
