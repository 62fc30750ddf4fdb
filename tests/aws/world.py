"""What stands behind the emulated AWS: time, accounts, events on their way, and a record of everything that happened.

Only the server's process uses it, under ``World.lock``.
"""

import heapq
import itertools
import json
import math
import random
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.aws.clock import ScaledClock
from tests.aws.faults import Faults

SPOT, ON_DEMAND = "spot", "on-demand"
WARNING = 120.0  # seconds between a warning and the end of an instance
ALIVE = ("pending", "running", "shutting-down", "stopping")  # billed, or about to be


@dataclass
class Kill:
    """End process ``pid`` at the ``after``-th next call of ``action``, before or when that is executed."""

    pid: int
    after: int
    executed: bool
    action: str = ""  # begins with this; empty: any


@dataclass
class Account:
    """One account's settings and record."""

    id: str
    rng: random.Random
    faults: Faults = field(default_factory=Faults)
    most: dict[str, int | None] = field(default_factory=dict)  # nodes that AWS has, by market; None: no bound
    launch_seconds: float = 0.0  # until an instance runs
    drain_seconds: float = 0.0  # until an agent tells its group that the node is drained
    kill: Kill | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[tuple[str, str], tuple[str, Any]] = field(
        default_factory=dict
    )  # answers by action and token
    warned: dict[str, float] = field(default_factory=dict)  # ends of instances, by id
    activities: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by group, newest first
    errors: list[str] = field(default_factory=list)  # of the emulator itself


class World:
    """All accounts of one server."""

    def __init__(self, clock: ScaledClock, seed: int) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # something more is to be done later
        self.clock = clock
        self.errors: list[str] = []
        self._seed = seed
        self._count = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._accounts: dict[str, Account] = {}
        self._cause = ["unknown"]

    def account(self, name: str) -> Account:
        if name not in self._accounts:
            self._accounts[name] = Account(name, random.Random(f"{self._seed} {name}"))
        return self._accounts[name]

    def reset(self) -> None:
        self._accounts.clear()
        self._due.clear()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do ``action`` in ``seconds`` of the clock."""
        heapq.heappush(self._due, (self.clock.now() + seconds, next(self._count), action))
        self.changed.notify()

    def idle(self) -> float:
        """Return the seconds of the wall for which nothing is due."""
        return (self._due[0][0] - self.clock.now()) / self.clock.speed if self._due else math.inf

    def step(self) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= self.clock.now():
            _, _, action = heapq.heappop(self._due)
            with self.noting():
                action()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep errors of the emulator itself for ``errors``: a test that meets one is void."""
        try:
            yield
        except Exception:
            self.errors.append(traceback.format_exc())

    @contextmanager
    def because(self, cause: str) -> Iterator[None]:
        """Write ``cause`` to the record of what happens inside."""
        self._cause.append(cause)
        try:
            yield
        finally:
            self._cause.pop()

    def note(self, account: str, kind: str, **content: Any) -> None:
        self.account(account).log.append(
            {"at": self.clock.now(), "kind": kind, "cause": self._cause[-1], **content}
        )

    # --- instances --------------------------------------------------------------------------------------------

    def instances(self, account: str, region: str) -> list[Any]:
        from moto.ec2.models import ec2_backends

        return list(ec2_backends[account][region].all_instances())

    def room(self, account: str, region: str, market: str) -> int:
        """Return how many more nodes of ``market`` AWS has."""
        most = self.account(account).most.get(market)
        if most is None:
            return 1_000_000
        has = sum(
            i.state in ALIVE and (i.lifecycle or ON_DEMAND) == market for i in self.instances(account, region)
        )
        return max(0, most - has)

    def warn(self, account: str, region: str, ids: list[str], seconds: float, end: bool) -> None:
        """Warn that instances will be taken away in ``seconds``, and take them away then."""
        for instance_id in ids:
            self.note(account, "warned", instance=instance_id)
            self.account(account).warned[instance_id] = self.clock.now() + seconds
            self.instance_event(
                account,
                region,
                instance_id,
                "EC2 Spot Instance Interruption Warning",
                {"instance-action": "terminate"},
            )
            if end:
                self.later(seconds, lambda instance_id=instance_id: self.take(account, region, instance_id))

    def take(self, account: str, region: str, instance_id: str) -> None:
        """Take an instance away, as AWS does when it wants spot capacity back."""
        from moto.autoscaling.models import autoscaling_backends
        from moto.ec2.models import ec2_backends

        backend = ec2_backends[account][region]
        with self.because("AWS"):
            instance = backend.get_instance(instance_id)
            if instance.state not in ALIVE:
                return
            instance.terminate()
            instance.state_reason.code = "Server.SpotInstanceTermination"
            autoscaling_backends[account][region].notify_terminate_instances([instance_id])

    # --- events -----------------------------------------------------------------------------------------------

    def instance_event(
        self, account: str, region: str, instance_id: str, kind: str, detail: dict[str, Any]
    ) -> None:
        """Tell EventBridge about an instance."""
        arn = f"arn:aws:ec2:{region}:{account}:instance/{instance_id}"
        self.event(account, region, "aws.ec2", kind, {"instance-id": instance_id, **detail}, [arn])

    def event(
        self, account: str, region: str, source: str, kind: str, detail: dict[str, Any], resources: list[str]
    ) -> None:
        """Send an event through the rules, as late and as often as the account's faults say."""
        message = {
            "version": "0",
            "id": str(uuid.UUID(int=self.account(account).rng.getrandbits(128), version=4)),
            "detail-type": kind,
            "source": source,
            "account": account,
            "time": datetime.fromtimestamp(self.clock.now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "region": region,
            "resources": resources,
            "detail": detail,
        }
        faults, rng = self.account(account).faults, self.account(account).rng
        for _ in range(2 if rng.random() < faults.twice else 1):
            self.later(rng.random() * faults.late, lambda: self._deliver(account, region, message))

    def _deliver(self, account: str, region: str, message: dict[str, Any]) -> None:
        """Give an event to the queues of all rules that it matches; moto leaves out some of its fields."""
        from moto.events.models import events_backends
        from moto.sqs.models import sqs_backends

        for rule in list(events_backends[account][region].event_buses["default"].rules.values()):
            if rule.event_pattern.matches_event(message):
                for target in rule.targets:
                    name = target["Arn"].rsplit(":", 1)[-1]
                    sqs_backends[account][region].send_message(name, json.dumps(message))


def moto_time(clock: ScaledClock) -> datetime:
    """Return the time as moto keeps it: UTC without a zone."""
    return datetime.fromtimestamp(clock.now(), UTC).replace(tzinfo=None)
