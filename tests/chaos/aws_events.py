"""What happens in a chaotic run on emulated AWS: events as a seed says, and the machines behind instances."""

import random
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ebbflow.infra.errors import ClusterError
from ebbflow.tasks.pipeline.run import NullWatcher
from ebbflow.tasks.pipeline.view import ClusterView
from tests.infra.aws.torch_hosts import Hosts

if TYPE_CHECKING:
    from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
    from tests.aws.cluster import Cluster

KINDS = ("interrupt", "take", "kill", "stop")
LOOK = 0.2  # s between looks at instances and processes


@dataclass(frozen=True)
class Event:
    """Something that happens ``after`` s since a step runs."""

    step: str
    after: float
    kind: str
    notice: float = 0.0  # s


def events_of(seed: int, spark: bool) -> list[Event]:
    """Return what happens in a run."""
    rng = random.Random(seed)
    steps = ["fit", "rates", "groups", *(["pairs"] if spark else [])]
    found = [
        Event(step, rng.uniform(0.5, 4.0), rng.choice(("interrupt", "take", "kill")), rng.uniform(4.0, 30.0))
        for step in rng.sample(steps, rng.randint(2, len(steps)))
    ]
    if rng.random() < 0.5:
        found.append(Event(rng.choice(["fit", "rates", "groups"]), rng.uniform(1.0, 6.0), "stop"))
    return found


class Machines:
    """What is behind the instances: their processes end with them, and those of the Spark pool have a worker."""

    def __init__(self, lab: "Cluster", hosts: Hosts, spark: "LocalSparkCluster | None") -> None:
        self._lab, self._hosts, self._spark = lab, hosts, spark
        self._known: dict[str, str] = {}  # workers of the Spark pool: starting, there, gone
        self._warned: set[str] = set()
        self._gone: set[str] = set()
        self._work = ThreadPoolExecutor(2)
        self._stop = threading.Event()
        self.problems: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(150)
        self._work.shutdown(wait=True)

    def warn(self, node: str, seconds: float) -> None:
        """Do what a node's agent does at a notice: Spark decommissions the worker."""
        if self._spark is not None and self._known.get(node) == "there":
            with suppress(ClusterError):
                self._spark.notice(node, seconds)

    def _run(self) -> None:
        while not self._stop.wait(LOOK):
            try:
                self._look()
            except Exception:
                self.problems.append(traceback.format_exc()[-500:])

    def _look(self) -> None:
        for one in self._lab.account.state()["instances"]:
            node = one["id"]
            if not one["alive"]:
                if node not in self._gone:
                    self._gone.add(node)
                    self._hosts.take(node)
                    if self._spark is not None and node in self._known:
                        self._work.submit(self._end, node)
            elif self._is_new_worker(one):
                self._known[node] = "starting"
                self._work.submit(self._begin, node)

    def _is_new_worker(self, one: dict[str, Any]) -> bool:
        in_pool = one["tags"].get("ebbflow:pool") == "etl"
        return self._spark is not None and in_pool and one["id"] not in self._known

    def _begin(self, node: str) -> None:
        assert self._spark is not None
        ec2 = self._lab.account.client("ec2")
        try:
            found = ec2.describe_instances(InstanceIds=[node])["Reservations"][0]["Instances"][0]
            self._spark.add(node_id=node, host=found["PrivateIpAddress"])
            self._known[node] = "there"
        except ClusterError as error:
            if node not in self._gone:
                self.problems.append(f"no Spark worker on {node}: {error}")
        if node in self._gone:
            self._end(node)

    def _end(self, node: str) -> None:
        assert self._spark is not None
        with suppress(ClusterError):
            self._spark.kill(node)


class Injector(NullWatcher):
    """Lets the events of a run happen."""

    def __init__(self, lab: "Cluster", hosts: Hosts, machines: Machines, events: Sequence[Event]) -> None:
        self._lab, self._hosts, self._machines = lab, hosts, machines
        self.left = list(events)
        self.done: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.stop = threading.Event()
        self._view: ClusterView | None = None
        self._since: dict[str, float] = {}

    def watch(self, view: ClusterView, steps: Any) -> None:
        self._view = view

    def note(self, text: str) -> None:
        self.lines.append(f"{time.strftime('%H:%M:%S')} {text}")
        print(self.lines[-1], flush=True)

    def tick(self) -> None:
        assert self._view is not None
        state, now = self._view.ledger.state(), time.monotonic()
        for event in list(self.left):
            app = f"one.{event.step}"
            record = state.apps.get(app)
            if record is None or record.phase != "running":
                continue
            if now - self._since.setdefault(event.step, now) < event.after:
                continue
            if event.step == "pairs":
                nodes = [one["id"] for one in self._lab.nodes("etl")]
            else:
                nodes = sorted({lease.node for lease in state.held(app)})
            if event.kind != "stop" and not nodes:
                continue
            self.left.remove(event)
            self._do(event, nodes[0] if nodes else "")

    def _do(self, event: Event, node: str) -> None:
        self.note(f"EVENT {event.kind} for {event.step} on {node}")
        if event.kind == "stop":
            self.stop.set()
        elif event.kind == "take":
            self._lab.account.take([node])
        elif event.kind == "interrupt":
            self._lab.account.interrupt([node], event.notice)
            self._machines.warn(node, event.notice)
        proof = node or "stopped"
        if event.kind == "kill":
            killed = self._hosts.take(node)
            proof = f"{killed} processes on {node}" if killed else ""
        self.done.append({"kind": event.kind, "step": event.step, "proof": proof})
