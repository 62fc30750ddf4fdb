"""What moving a model between aggregators costs while it trains, and what sharing aggregators costs trainings.

::

    python -m tests.benchmarks.aggregation_moves moves --megabytes 500 --workers 2
    python -m tests.benchmarks.aggregation_moves sharing --trainings 4 --megabytes 20

Workers are processes whose computing is a wait of ``--compute`` seconds (timed workers); they push all gradients
(momentum), commit and pull. ``moves``: all tensors go from one aggregator to another; prints by how much rounds
meanwhile were longer than the median before (``exposed``: the sum, other work included; ``added``: by medians of
rounds before, meanwhile and after), for how long whole rounds of gradients waited for copies (``waited``), and what
it takes instead to save parameters and moments, end, and begin again from the file on new aggregators. ``sharing``:
the same trainings at once on private aggregators, one each, and on shared ones; prints the slowdown of the median
round for each number of servers. One JSON object a row. With ``--network RATE``, such as 200mbit, each worker and
each aggregator is a node of its own (network namespace) whose link carries as much each way; needs root::

    python -m tests.benchmarks.aggregation_moves sharing --trainings 4 --megabytes 5 --network 200mbit
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.infra.aggregation import moves as migrations
from ebbflow.infra.aggregation.agent import AggregationAgent
from ebbflow.infra.aggregation.aggregator import SERVICE, Aggregator
from ebbflow.infra.aggregation.frames import AggregatorAddress
from ebbflow.infra.aggregation.rules import Sgd, rule_values
from ebbflow.infra.machine.encrypted_router import CurveKeys
from ebbflow.infra.machine.network import links, namespaces, registry
from ebbflow.infra.machine.network.plan import NetworkPlan, parse_rates

PATIENCE = 300.0  # s
BEFORE, WARM_UP, AFTER = 13, 3, 10  # rounds
RULE = rule_values(Sgd(lr=1e-3, momentum=0.9))


def worker(given: dict[str, Any]) -> None:
    """Train until a line arrives; print when each round began and ended; save where the line is a path."""
    keys = CurveKeys(given["public"], given["secret"])
    where = {name: AggregatorAddress(*one) for name, one in given["aggregators"].items()}
    hosts, names = sorted(where), [f"t{i}" for i in range(given["tensors"])]
    table = {name: [hosts[i % len(hosts)]] for i, name in enumerate(names)}
    agent = AggregationAgent(keys, where, table, timeout_s=PATIENCE, share_memory=not given["wire"])
    ones = np.ones(given["elements"], np.float32)
    if given.get("load"):
        with np.load(given["load"]) as saved:
            begin = {name: np.concatenate((saved[name], saved[f"{name}.momentum"])) for name in names}
        options = {"rule": RULE, "step": 1, "moments": ["momentum"]}
    else:
        begin, options = dict.fromkeys(names, ones), {"rule": RULE, "step": 0, "moments": []}
    agent.init({name: one.data.cast("B") for name, one in begin.items()}, dict.fromkeys(names, options))
    del begin
    data = {name: ones.copy() for name in names}
    agent.pull(names, 0)
    agent.parameters(names)
    asked: list[str] = []
    threading.Thread(target=lambda: asked.append(sys.stdin.readline().strip()), daemon=True).start()
    number = 0
    while True:
        begun = time.monotonic()
        time.sleep(given["compute"])
        for name in names:
            agent.push(name, data[name].data.cast("B"), number, 1, given["rank"], given["world"])
        agent.norms(names)
        # what has arrived before the commit of the first worker is the same for all
        agent.commit({name: {} for name in names}, number, 1)
        for name, frame in agent.parameters(names).items():
            np.copyto(data[name], np.frombuffer(frame.payload, np.float32))
        number += 1
        print(json.dumps([begun, time.monotonic()]), flush=True)
        if given["rounds"] and number == given["rounds"]:
            break
        if asked and number >= int(asked[0].partition(" ")[0]):
            break
    if path := (asked[0].partition(" ")[2] if asked else ""):
        found = {
            f"{name}.momentum": np.frombuffer(one.payload, np.float32)
            for name, one in agent.states(names, number).items()
        }
        with open(path, "wb") as file:
            np.savez(file, **data, **found)
            os.fsync(file.fileno())
    agent.close()


def aggregator(name: str, host: str, *, wire: bool = False) -> None:
    """Be an aggregator that listens on an address and gives others tensors, by commands on standard input."""
    if wire:
        migrations._MOST_SHARED = 0
    made = Aggregator(name, host)
    targets: dict[tuple[str, str], tuple[str, AggregatorAddress]] = {}

    def move() -> None:
        while True:
            made.move(dict(targets))
            time.sleep(0.2)

    threading.Thread(target=move, daemon=True).start()
    print(json.dumps([made.address, made.public, made.peer]), flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case {"admit": job, "peers": peers}:
                made.admit(job, peers)
            case {"move": target, "where": where}:
                targets |= {
                    (one.job_id, one.name): (target, AggregatorAddress(*where)) for one in made.held()
                }
        print(json.dumps([len(made.held()), made.waited]), flush=True)
    made.close()


class Rig:
    """Nodes with limited links, one for each process; without a rate all are on loopback."""

    plan: NetworkPlan | None = None
    nodes = 0

    @classmethod
    @contextmanager
    def limited(cls, rate: str) -> Iterator[None]:
        """Give each process that is started meanwhile a node with a link of this rate; empty: none."""
        if not rate:
            yield
            return
        links.check()
        with tempfile.TemporaryDirectory() as folder:
            cls.plan = registry.reserve(os.urandom(6).hex(), folder, parse_rates(rate))
            try:
                links.make_bridges(cls.plan)
                yield
            finally:
                registry.release(cls.plan.tag)
                cls.plan = None

    @classmethod
    def node(cls) -> tuple[str, str]:
        """Return the namespace and the address of another node."""
        if cls.plan is None:
            return "", "127.0.0.1"
        cls.nodes += 1
        links.add_node(cls.plan, f"node-{cls.nodes}", cls.nodes)
        return cls.plan.namespace(f"node-{cls.nodes}"), cls.plan.links[0].address(cls.nodes)


class Child:
    """A process of this benchmark, on a node of its own; ``lines`` are what it has printed.

    Args:
        what: it is: ``worker``, to which ``given`` is said, or ``aggregator``, of which ``given`` is the name.
        more: further arguments.
    """

    def __init__(self, what: str, given: str, *more: str) -> None:
        space, address = Rig.node()
        command = [sys.executable, "-m", "tests.benchmarks.aggregation_moves", what, given]
        command += [address, *more] if what == "aggregator" else more
        self.process = namespaces.within(
            space,
            lambda: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True),
        )
        self.lines: list[Any] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def wait(self, lines: int) -> Any:
        """Return the last line once there are so many."""
        end = time.monotonic() + PATIENCE
        while len(self.lines) < lines:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("a process of the benchmark has ended, or prints nothing")
            time.sleep(0.02)
        return self.lines[-1]

    def ask(self, **values: Any) -> Any:
        before = len(self.lines)
        self.say(json.dumps(values))
        return self.wait(before + 1)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)


class Training:
    """Timed workers of one training on aggregators; ``others`` admit them, too."""

    def __init__(
        self, job: str, hosts: dict[str, Child], given: argparse.Namespace, *others: Child, **more: Any
    ) -> None:
        pairs = [CurveKeys.make() for _ in range(given.workers)]
        for one in (*hosts.values(), *others):
            one.ask(admit=job, peers={f"w{i}": keys.public for i, keys in enumerate(pairs)})
        order = {
            "aggregators": {name: one.lines[0][:2] for name, one in hosts.items()},
            "elements": int(given.megabytes * 1e6 / 4 / given.tensors), "tensors": given.tensors,
            "compute": given.compute, "world": given.workers, "wire": given.wire, "rounds": 0, **more,
        }  # fmt: skip
        self.workers = [
            Child("worker", json.dumps({**order, "rank": i, "public": keys.public, "secret": keys.secret}))
            for i, keys in enumerate(pairs)
        ]

    def rounds(self) -> list[tuple[float, float]]:
        """Return when each round began and ended, of the slowest worker."""
        ended = zip(*(one.lines for one in self.workers), strict=False)
        return [(min(begun for begun, _ in each), max(end for _, end in each)) for each in ended]

    def until(self, count: int) -> None:
        for one in self.workers:
            one.wait(count)

    def stop(self, path: str = "") -> None:
        """End after one round for all of them; the first saves where a path is given."""
        last = max(len(one.lines) for one in self.workers) + 2
        for i, one in enumerate(self.workers):
            one.say(f"{last} {path if i == 0 else ''}")
        for one in self.workers:
            one.end()


def moves(given: argparse.Namespace) -> dict[str, Any]:
    """Return what a migration costs, and what a restart costs."""
    wire = ["wire"] if given.wire else []
    hosts = {name: Child("aggregator", name, *wire) for name in "AB"}
    for one in hosts.values():
        one.wait(1)
    for name, one in hosts.items():
        one.ask(
            admit=SERVICE, peers={other: its.lines[0][2] for other, its in hosts.items() if other != name}
        )
    training = Training("job", {"A": hosts["A"]}, given, hosts["B"])
    training.until(BEFORE)
    began = time.monotonic()
    left, _ = hosts["A"].ask(move="B", where=hosts["B"].lines[0][:2])
    while left:
        time.sleep(0.1)
        left, _ = hosts["A"].ask(held=True)
    took = time.monotonic() - began
    _, waited = hosts["B"].ask(held=True)
    training.until(len(training.rounds()) + AFTER)
    found = training.rounds()
    usual = statistics.median(end - begun for begun, end in found[WARM_UP:BEFORE])
    during = [end - begun for begun, end in found if end > began and begun < began + took]
    after = [end - begun for begun, end in found if begun >= began + took]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "saved.npz")
        training.stop(path)
        last = training.rounds()[-1][1]
        for one in hosts.values():
            one.end()
        fresh = {"C": Child("aggregator", "C")}
        fresh["C"].wait(1)
        again = Training("job", fresh, given, load=path)
        again.until(1)
        restart = again.rounds()[0][1] - last - usual
        again.stop()
        fresh["C"].end()
    exposed = sum(max(one - usual, 0.0) for one in during)
    # other work lengthens rounds of all three parts alike
    rest = statistics.median([*(end - begun for begun, end in found[WARM_UP:BEFORE]), *after])
    added = (statistics.median(during) - rest) * len(during)
    return {
        "megabytes": given.megabytes, "tensors": given.tensors, "workers": given.workers,
        "median_round_s": round(usual, 3), "rounds_during": len(during), "moving_s": round(took, 2),
        "exposed_ms": round(exposed * 1e3), "exposed_ms_per_tensor": round(exposed * 1e3 / given.tensors, 1),
        "added_ms_per_tensor": round(added * 1e3 / given.tensors, 1),
        "waited_ms_per_tensor": round(waited * 1e3 / given.tensors, 2),
        "median_during_s": round(statistics.median(during), 3), "longest_during_s": round(max(during), 3),
        "median_after_s": round(statistics.median(after), 3), "restart_s": round(restart, 2),
    }  # fmt: skip


def sharing(given: argparse.Namespace, servers: int) -> list[float]:
    """Return the median round of each training, all at once, on so many aggregators."""
    hosts = {f"a{i}": Child("aggregator", f"a{i}") for i in range(servers)}
    for one in hosts.values():
        one.wait(1)
    names = sorted(hosts)
    trainings = [
        Training(f"job-{i}", {names[i % servers]: hosts[names[i % servers]]}, given, rounds=given.rounds)
        for i in range(given.trainings)
    ]
    found = []
    for one in trainings:
        one.until(given.rounds)
        found.append(statistics.median(end - begun for begun, end in one.rounds()[WARM_UP:]))
        for each in one.workers:
            each.end()
    for child in hosts.values():
        child.end()
    return found


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["worker"]:
        worker(json.loads(sys.argv[2]))
        return
    if sys.argv[1:2] == ["aggregator"]:
        aggregator(sys.argv[2], sys.argv[3], wire="wire" in sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("moves", "sharing"))
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--compute", type=float, default=0.5)
    parser.add_argument("--trainings", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--wire", action="store_true", help="send all, as between two machines")
    parser.add_argument("--network", default="", metavar="RATE", help="limit of each process's link")
    given = parser.parse_args()
    with Rig.limited(given.network):
        measure(given)


def measure(given: argparse.Namespace) -> None:
    """Measure as is asked, and print."""
    for _ in range(given.pairs):
        if given.what == "moves":
            print(json.dumps({**moves(given), "load": round(os.getloadavg()[0], 1)}), flush=True)
            continue
        for servers in sorted({1, given.trainings // 2, given.trainings - 1} - {0, given.trainings}):
            private = sharing(given, given.trainings)  # beside each, as other work comes and goes
            shared = sharing(given, servers)
            slower = [ours / own - 1 for ours, own in zip(shared, private, strict=True)]
            row = {
                "network": given.network, "trainings": given.trainings, "servers": servers,
                "saved": 1 - servers / given.trainings,
                "private_round_s": round(statistics.median(private), 4),
                "shared_round_s": round(statistics.median(shared), 4),
                "slowdown": round(statistics.median(slower), 4), "worst": round(max(slower), 4),
                "load": round(os.getloadavg()[0], 1),
            }  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
