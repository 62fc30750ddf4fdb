"""One chaotic run: a real controller on an emulated AWS where everything goes wrong that can, and what must hold.

A run is decided by its seed: which faults, when the controller is killed (by the server, at a call that is executed
or not), what is interrupted, and how many nodes are wanted when. ``run`` returns what was found; ``violations`` is
empty if nothing was lost.
"""

import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.infra.aws.naming import MANAGED_BY_TERRAFORM
from ebbflow.infra.aws.notices.store import NoticeFile
from tests.aws import controller
from tests.aws.controller import POOL, Journal, Orders
from tests.aws.emulator import REGION, AccountAt, Cluster, Emulator, PoolShape
from tests.aws.faults import Faults
from tests.aws.invariants import violations

MOST = 30
GROWN = 20  # nodes
ENOUGH = 14  # running nodes, before anything is done to them
SHARE = 0.3  # of the nodes that are interrupted
SETTLES = (
    900.0  # seconds of the clock within which the fleet must be as planned once nothing goes wrong any more
)
WAITS = 240.0  # seconds of the clock for which a phase is waited for while things go wrong
LAUNCH, DRAIN = 30.0, 15.0  # seconds
STOPS = 20.0  # seconds of the wall for a controller to stop

CHANGES = (
    "SetDesiredCapacity",
    "UpdateAutoScalingGroup",
    "TerminateInstance",
)  # calls that must not get lost
READS = ("ReceiveMessage", "DeleteMessage")

FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Kill:
    """The controller ends at the ``after``-th call of ``action`` (empty: any), which AWS carries out or not."""

    action: str
    after: int
    executed: bool


@dataclass(frozen=True)
class Script:
    """What happens in a run."""

    faults: Faults
    on_demand_base: int
    shrunk: int
    last: int
    on_demand: int
    dry: int | None  # spot nodes that AWS has at first; None: enough
    gang: int
    order: tuple[str, ...]  # of the phases between growing and the end
    patience: tuple[float, ...]  # share of the wait before each of them that is waited
    kills: tuple[Kill, ...]
    at_notices: Kill | None  # once warnings are on their way

    @classmethod
    def of(cls, seed: int) -> "Script":
        rng = random.Random(seed)
        order = ["interrupt", "shrink", *(["gang"] if rng.random() < 0.5 else [])]
        rng.shuffle(order)
        return cls(
            faults=Faults(
                throttled=rng.choice([0.0, 0.05, 0.15]),
                failed=rng.choice([0.0, 0.05]),
                dropped_before=rng.choice([0.0, 0.05]),
                dropped_after=rng.choice([0.0, 0.05, 0.1]),
                delayed=0.05,
                twice=rng.choice([0.0, 0.3]),
                again=rng.choice([0.0, 0.2]),
                shuffled=True,
                late=rng.choice([0.0, 5.0, 20.0]),
            ),
            on_demand_base=rng.choice([0, 0, 2]),
            shrunk=rng.randint(6, 14),
            last=rng.randint(4, 18),
            on_demand=rng.choice([0, 0, 1, 4]),
            dry=rng.choice([None, None, 0, 5, 11]),
            gang=rng.randint(2, 5),
            order=tuple(order),
            patience=tuple(rng.choice([0.1, 0.3, 1.0]) for _ in order),
            kills=tuple(
                Kill(rng.choice(["", "", *CHANGES]), int(2 ** rng.uniform(0, 6.5)), rng.random() < 0.6)
                for _ in range(rng.randint(1, 3))
            ),
            at_notices=rng.choice([None, Kill(rng.choice(READS), rng.randint(1, 3), rng.random() < 0.7)]),
        )


@dataclass
class Keeper:
    """Keeps a controller running: whenever it was killed another one is started."""

    cluster: Cluster
    folder: Path
    kills: list[Kill]
    process: Any = None
    killed: list[float] = field(default_factory=list)
    problem: str = ""

    def start(self) -> None:
        account = self.cluster.account
        url, clock = account.emulator.url, account.emulator.clock
        arguments = dict(account.environment), self.cluster.settings, url, self.folder, clock
        self.process = FORK.Process(target=_child, args=(self.folder, arguments), daemon=True)
        self.process.start()
        if self.kills:
            self.arm(self.kills.pop(0))

    def arm(self, kill: Kill) -> None:
        """Let the present controller come to this end, unless it meets another before."""
        after = kill.after if not kill.action else min(kill.after, 4)
        self.cluster.account.kill(self.process.pid, after, executed=kill.executed, action=kill.action)

    def tend(self) -> None:
        if self.process.is_alive() or self.problem:
            return
        if self.process.exitcode == -9:
            self.killed.append(self.cluster.account.emulator.clock.now())
            self.start()
        else:
            self.problem = f"the controller ended by itself ({self.process.exitcode}): {_said(self.folder)}"

    def stop(self) -> None:
        """Let the controller come to its end."""
        self.process.join(STOPS)
        if self.process.is_alive():
            self.problem = self.problem or f"the controller did not stop within {STOPS:g} s"
            self.process.kill()
            self.process.join(STOPS)
        elif self.process.exitcode:
            self.problem = f"the controller ended with {self.process.exitcode}: {_said(self.folder)}"


def warm() -> None:
    """Load what every controller needs, and let those that are forked share botocore's descriptions of services."""
    import boto3
    from botocore.loaders import JSONFileLoader

    load, loaded = JSONFileLoader.load_file, {}

    def load_file(self: Any, path: str) -> Any:
        if path not in loaded:
            loaded[path] = load(self, path)
        return loaded[path]

    JSONFileLoader.load_file = load_file
    session = boto3.session.Session(aws_access_key_id="x", aws_secret_access_key="x", region_name=REGION)
    for service in ("ec2", "autoscaling", "sqs"):
        session.client(service)


def _child(folder: Path, arguments: tuple[Any, ...]) -> None:
    with (folder / "controller.err").open("a") as err:
        os.dup2(err.fileno(), 2)
        try:
            controller.main(*arguments)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)


def _said(folder: Path) -> str:
    return (folder / "controller.err").read_text()[-1500:]


def run(emulator: Emulator, seed: int, folder: Path) -> dict[str, Any]:
    """Return what came of the run with this seed."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    script = Script.of(seed)
    account = emulator.account()
    cluster = account.cluster("lab", PoolShape(POOL, most=MOST, on_demand_base=script.on_demand_base))
    foreign = _others(account, cluster)
    account.configure(launch_seconds=LAUNCH, drain_seconds=DRAIN)
    if script.dry is not None:
        account.configure(most={"spot": script.dry + 2})  # two are the other cluster's
    Orders(GROWN, script.on_demand).write(folder)
    keeper = Keeper(cluster, folder, list(script.kills))
    account.faults(script.faults)
    keeper.start()
    try:
        _Run(cluster, script, folder, keeper, random.Random(f"targets {seed}"), foreign).play()
    finally:
        keeper.stop()
    state = account.state()
    journal = Journal(folder).read()
    book = NoticeFile(folder / "notices.json").read()
    found = violations(state, journal, book, cluster, script.last)
    if keeper.problem:
        found.insert(0, keeper.problem)
    return {
        "seed": seed,
        "seconds": time.monotonic() - began,
        "violations": found,
        **_figures(state, journal, cluster, keeper, emulator.clock.speed),
    }


def _others(account: AccountAt, cluster: Cluster) -> list[str]:
    """Start nodes that are none of the controller's business; return the ids of those that are spot."""
    other = account.cluster("other", PoolShape(POOL))
    account.client("autoscaling").set_desired_capacity(
        AutoScalingGroupName=other.names.group(POOL), DesiredCapacity=2
    )
    account.strangers(2)
    account.strangers(1, cluster.names.tags(MANAGED_BY_TERRAFORM, role="spark-master"))
    return [node["id"] for node in other.nodes(POOL)]


@dataclass
class _Run:
    cluster: Cluster
    script: Script
    folder: Path
    keeper: Keeper
    rng: random.Random
    foreign: list[str]
    wanted: int = GROWN
    gang: int = 0

    def play(self) -> None:
        account = self.cluster.account
        phases = {"interrupt": self._interrupt, "shrink": self._shrink, "gang": self._hold_gang}
        for patience, phase in zip(self.script.patience, self.script.order, strict=True):
            self._wait(self._whole, WAITS * patience)
            account.configure(most={"spot": None})
            self._wait(self._some, WAITS)
            phases[phase]()
        self._wait(self._whole, WAITS * 0.3)
        self.wanted, self.gang = self.script.last, 0
        self._order()
        self._wait(lambda: not self.keeper.kills, WAITS * 0.3)
        account.faults(Faults())
        self._wait(self._settled, SETTLES * account.emulator.clock.speed)
        account.spare()
        self._order(stop=True)

    def _interrupt(self) -> None:
        """Take ``SHARE`` of the nodes away, of those that are spot and that the controller has seen."""
        self._wait(lambda: len(self._takeable()) >= self._share(), WAITS)
        nodes, count, account = self._takeable(), self._share(), self.cluster.account
        self.rng.shuffle(nodes)
        if self.script.at_notices is not None:
            self.keeper.arm(self.script.at_notices)
        account.interrupt([*nodes[:count], *self.foreign[:1]])
        account.rebalance(nodes[count : count + 2])

    def _share(self) -> int:
        return round(SHARE * len(self.cluster.nodes(POOL)))

    def _takeable(self) -> list[str]:
        seen = [line for line in Journal(self.folder).read() if line["kind"] == "seen"]
        known = set(seen[-1]["nodes"]) if seen else set()
        return [n["id"] for n in self.cluster.nodes(POOL) if n["market"] == "spot" and n["id"] in known]

    def _shrink(self) -> None:
        self.wanted = self.script.shrunk
        self._order()

    def _hold_gang(self) -> None:
        self.gang = self.script.gang
        self._order()

    def _order(self, *, stop: bool = False) -> None:
        Orders(self.wanted, min(self.script.on_demand, self.wanted), self.gang, stop).write(self.folder)

    def _wait(self, true: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so, for ``seconds`` of the clock at most; the end says whether that was enough."""
        clock = self.cluster.account.emulator.clock
        until = clock.now() + seconds
        while clock.now() < until and not self.keeper.problem:
            self.keeper.tend()
            if true():
                return
            time.sleep(0.05)

    def _some(self) -> bool:
        running = sum(node["state"] == "running" for node in self.cluster.nodes(POOL))
        return running >= min(ENOUGH, self.wanted)

    def _whole(self) -> bool:
        nodes = [n for n in self.cluster.nodes(POOL) if "ebbflow:gang" not in n["tags"]]
        return len(nodes) == self.wanted and all(n["state"] == "running" for n in nodes)

    def _settled(self) -> bool:
        """Tell whether all is as ordered, and nothing is on its way that will change it."""
        state, names = self.cluster.account.state(), self.cluster.names
        alive = {i["id"]: i for i in state["instances"] if i["alive"] and names.owns(i["tags"])}
        seen = [line for line in Journal(self.folder).read() if line["kind"] == "seen"]
        warned = {entry["instance"] for entry in state["log"] if entry["kind"] == "warned"}
        least = min(self.wanted, max(self.script.on_demand, self.script.on_demand_base))
        planned, requested, _, draining = seen[-1]["pools"][POOL]
        return (
            len(alive) == self.wanted
            and sorted(alive) == sorted(seen[-1]["nodes"])
            and list(seen[-1]["pools"]) == [POOL]
            and (planned, requested, draining) == (self.wanted, self.wanted, [])
            and not warned & set(alive)
            # or spot would be tried again for the others
            and sum(i["market"] == "on-demand" for i in alive.values()) <= least
        )


def _figures(
    state: dict[str, Any], journal: list[dict[str, Any]], cluster: Cluster, keeper: Keeper, speed: float
) -> dict[str, Any]:
    log = state["log"]
    ours = {i["id"] for i in state["instances"] if cluster.names.owns(i["tags"])}
    first: dict[str, float] = {}
    for line in journal:
        for node, kind in line.get("notices", {}).items():
            if kind == "interruption":
                first.setdefault(node, line["at"])
    warned = {e["instance"]: e["at"] for e in log if e["kind"] == "warned" and e["instance"] in ours}
    faults: dict[str, int] = {}
    for entry in log:
        if entry["kind"] == "call" and entry["fault"]:
            faults[entry["fault"]] = faults.get(entry["fault"], 0) + 1
    return {
        "kills": len(keeper.killed),
        "calls": sum(e["kind"] == "call" for e in log),
        "faults": faults,
        "launched": sum(e["kind"] == "launched" and e["instance"] in ours for e in log),
        "interrupted": len(warned),
        "notice_seconds": sorted((first[n] - at) / speed for n, at in warned.items() if n in first),
    }
