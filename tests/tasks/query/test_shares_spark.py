"""Three real queries at once on one real cluster: each has its share, is told of it, and takes what others leave.

A measurement over minutes; what decides shares is tested in ``test_sharing.py`` and ``test_share_rules.py``.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

CORES = 4
WAIT = 400.0  # seconds; what does not happen within them does not happen
TOLERANCE = 0.15
POLL = 0.2  # seconds between two looks at the master

# A flow of its own: it starts its engine, then waits for its query on standard input.
FLOW = """
import json, sys, time
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.opening import opened_engine
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from ebbflow.tasks.query.request import QueryRequest

def say(event, **what):
    print(json.dumps({"event": event, "at": time.time(), **what}), flush=True)

class Telling(NullQueryListener):
    def stage_progress(self, stage, progress):
        if progress.tasks_running:
            say("running", left=progress.tasks_total - progress.tasks_done)

    def capacity_changed(self, capacity, change):
        say("told", change=change)

options = json.loads(sys.argv[1])
with opened_engine(QueryRequest("SELECT 1", **options)) as opened:
    say("open", application=opened.application)
    ask = json.loads(sys.stdin.readline())
    say("asked")
    request = QueryRequest(ask["sql"], **options, weight=ask["weight"], materialize="none", verify=True)
    outcome = execute(request, PlainOrchestrator(Telling()), opened=opened)
    say("answered", rows=outcome.report.rows)
print(json.dumps({"event": "report", "report": json.loads(outcome.report.to_json())}), flush=True)
"""


@dataclass
class Flow:
    """A query in a process of its own, and what it says."""

    options: dict[str, Any]
    log: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FLOW, json.dumps(self.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"event"'):
                self.events.append(json.loads(line))

    def ask(self, sql: str, weight: float) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"sql": sql, "weight": weight}), file=self.process.stdin, flush=True)

    def all(self, event: str) -> list[dict[str, Any]]:
        return [e for e in list(self.events) if e["event"] == event]

    def when(self, event: str) -> dict[str, Any]:
        """Wait for the first such event."""

        def seen() -> bool:
            ended = self.process.poll() is not None and not self.all(event)
            assert not ended or self.process.stdout is None or self._late(event), self.log.read_text()[-3000:]
            return bool(self.all(event))

        until(seen)
        return self.all(event)[0]

    def _late(self, event: str) -> bool:
        time.sleep(1.0)  # what it said last may still be read
        return bool(self.all(event))

    @property
    def application(self) -> str:
        return str(self.when("open")["application"])


@dataclass
class Sampler:
    """Asks the master, a few times a second, how many cores each application holds."""

    ui: str
    samples: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while not self.ended.wait(POLL):
                try:
                    apps = client.get(f"{self.ui}/json/").json()["activeapps"]
                except httpx.HTTPError:
                    continue
                self.samples.append((time.time(), {a["id"]: a["cores"] for a in apps}))

    def first(self, after: float, what: Callable[[dict[str, int]], bool]) -> float:
        """Return when ``what`` was first seen after a moment."""
        return next((at for at, held in list(self.samples) if at >= after and what(held)), float("inf"))

    def core_seconds(self, application: str, begin: float, end: float) -> float:
        inside = [(at, held) for at, held in self.samples if begin <= at <= end]
        return sum(held.get(application, 0) * (later - at) for (at, held), (later, _) in pairwise(inside))


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not reached():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory, tpch_medium: str) -> str:
    """Return a folder with items in 48 files, each of which is a task, and a table to compare them with."""
    import duckdb

    folder = tmp_path_factory.mktemp("lake")
    (folder / "items").mkdir()
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE items AS SELECT l_orderkey AS id, l_partkey % 1000 AS part, l_shipmode AS mode, "
        f"l_comment AS words FROM '{tpch_medium}/lineitem.parquet' WHERE l_orderkey < 60000"
    )
    for i in range(48):
        path = folder / "items" / f"{i}.parquet"
        connection.execute(f"COPY (SELECT * FROM items WHERE (id // 8) % 48 = {i}) TO '{path}'")
    probes = "SELECT part AS part2, words AS words2, id % 3 AS third FROM items WHERE id < 40000"
    connection.execute(f"COPY ({probes}) TO '{folder}/probes.parquet'")
    connection.close()
    return str(folder)


@pytest.fixture
def cluster(_home: None) -> Iterator[LocalSparkCluster]:
    with LocalSparkCluster.start("shares", workers=CORES, memory="1g") as cluster:
        yield cluster


def pairs(letters: str, some: str) -> str:
    """Return a query that compares many pairs of texts: work that is divided among all tasks."""
    pattern = "%".join(letters)
    return (
        "SELECT mode, count(*) AS n FROM items JOIN probes ON part = part2 "
        f"WHERE concat(words, words2) LIKE '%{pattern}%' AND {some} GROUP BY mode"
    )


def test_three_queries_hold_their_shares_and_take_over_what_the_first_leaves(
    cluster: LocalSparkCluster, lake: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    options = {
        "tables": lake,
        "master": cluster.master_url,
        "store": str(tmp_path / "store"),
        "executor_memory": "600m",
        "conf": {
            "spark.driver.memory": "700m",
            "spark.sql.files.maxPartitionBytes": "256k",
            "spark.sql.files.openCostInBytes": "256k",
            "spark.sql.adaptive.coalescePartitions.enabled": "false",
            "spark.sql.shuffle.partitions": "48",
        },
    }
    sampler = Sampler(cluster.master_ui)
    threading.Thread(target=sampler.run, daemon=True).start()
    flows = [Flow(options, tmp_path / f"{i}.log") for i in range(3)]
    try:
        for flow in flows:
            flow.when("open")
        # Nobody limits an application without a query: the one that registered first has all cores.
        until(lambda: sampler.first(0.0, lambda held: CORES in held.values()) < float("inf"))
        holder = max(sampler.samples[-1][1], key=lambda a: sampler.samples[-1][1][a])
        first = next(f for f in flows if f.application == holder)
        second, third = (f for f in flows if f is not first)
        weights = {first.application: 2.0, second.application: 1.0, third.application: 1.0}

        first.ask(pairs("aeio", "third >= 0"), 2.0)
        first.when("running")
        assert sampler.samples[-1][1][holder] == CORES  # alone, it is not limited

        second.ask(pairs("bcdf", "third = 1"), 1.0)
        third.ask(pairs("lmno", "third = 2"), 1.0)
        arrived = third.when("asked")["at"]
        told = first.when("told")["at"]
        # a claim's name begins with the moment of its arrival, in milliseconds
        until(lambda: len(list((tmp_path / "store/cache/shares").glob("*/*.json"))) == len(flows))
        claims = sorted(int(f.name[:15]) / 1000 for f in (tmp_path / "store/cache/shares").glob("*/*.json"))
        shared = {a: int(w) for a, w in weights.items()}
        until(lambda: sampler.first(arrived, lambda held: held == shared) < float("inf"))
        shrunk = sampler.first(arrived, lambda held: held.get(holder, 0) <= 2)
        begin = sampler.first(arrived, lambda held: held == shared)
        for flow in flows:
            flow.when("report")
    finally:
        sampler.ended.set()
        for flow in flows:
            flow.process.kill()
            flow.process.wait(150)
    reports = {f.application: f.when("report")["report"] for f in flows}
    assert all(r["verified"] for r in reports.values()), [r["verification"] for r in reports.values()]

    # each has its share for as long as all three have work for it
    ended = {a: r["started"] + max(s["ended"] for s in r["stages"]) for a, r in reports.items()}
    end = min(max(e["at"] for e in f.all("running") if e["left"] >= CORES) for f in flows)
    total = sum(sampler.core_seconds(a, begin, end) for a in weights)
    parts = {a: sampler.core_seconds(a, begin, end) / total for a in weights}
    measured = {
        "common_seconds": round(end - begin, 1),
        "used": round(total / (CORES * (end - begin)), 3),
        "parts": [round(p, 3) for p in parts.values()],
        "told_after": round(told - claims[1], 2),  # of the first other query's arrival
        "shrunk_after": round(shrunk - claims[2], 2),  # of the last one's
        "all_shared_after": round(begin - claims[2], 2),
    }
    print(json.dumps(measured))
    for name, value in measured.items():
        record_property(name, value)
    for application, weight in weights.items():
        assert parts[application] == pytest.approx(weight / sum(weights.values()), rel=TOLERANCE), measured
    unseen = 2 * POLL / (end - begin)  # a change may be seen so much late at both ends
    assert measured["used"] > 1 - TOLERANCE - unseen, measured

    # the first was told, planned on it, and says so
    triggers = [d["trigger"] for d in reports[holder]["decisions"]]
    assert any("queries share the cluster: 4 ->" in t for t in triggers), triggers
    assert any("3 queries share the cluster" in c["change"] for c in reports[holder]["capacity"])

    # what the one that ended first held went to the others
    gone = min(ended, key=ended.__getitem__)
    others = [a for a in weights if a != gone]
    grown = sampler.first(ended[gone], lambda held: sum(held.get(a, 0) for a in others) == CORES)
    assert grown < max(ended.values()) + 1.0, measured
