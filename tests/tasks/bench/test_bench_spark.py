"""The whole comparison on a real cluster: one small query, one worker killed, right answers, nothing left over."""

import json
from pathlib import Path

import psutil
import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.spark.cluster.state import list_clusters
from tests.benchmarks.sql import runner
from tests.benchmarks.sql.cases import Plan, Query, System
from tests.benchmarks.sql.class_archive import java_options
from tests.benchmarks.sql.records import Journal
from tests.benchmarks.sql.rig import RigOptions, TestCluster, started_rig
from tests.benchmarks.sql.runner import Bench, Step
from tests.benchmarks.sql.summary import summarise
from tests.benchmarks.sql.systems import Outcome, Task, run_system

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


def test_one_query_with_one_kill(tpch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Step] = []
    known: list[int] = []  # finished stages that Ebbflow remembers before each run of its own

    def remembering(system: System, rig: TestCluster, task: Task, template: Path) -> Outcome:
        if system == "ebbflow":
            files = (template / "cache" / "history").glob("*.json")
            known.append(sum(len(json.loads(file.read_text())["value"]) for file in files))
        return run_system(system, rig, task, template)

    monkeypatch.setattr(runner, "run_system", remembering)
    plan = Plan((Query("tpch", 3),), ("kill",), ("spark", "ebbflow"), pairs=1, workers=2)
    bench = Bench(
        plan,
        {"tpch": Path(tpch)},
        RigOptions(2, 0.5, "1400m"),
        tmp_path,
        SystemClock(),
        steps.append,
        rehearsals=0,
        baselines=1,
    )
    assert bench.run()

    journal = Journal(tmp_path)
    assert {r.system: (r.ok, r.right) for r in journal.records.values()} == {
        "spark": (True, True),
        "ebbflow": (True, True),
    }
    span = journal.spans["tpch-q3"]
    killed = journal.records["tpch-q3/kill/0/spark"]
    assert [h.what for h in killed.happenings] == ["kill"]
    assert span / 2 <= killed.happenings[0].at
    for record in journal.records.values():
        figures = record.metrics
        assert figures["wall"] == pytest.approx(record.wall, abs=1e-3)
        assert 0 < figures["planning"] < record.wall
        assert 0 < figures["task_seconds"] <= 2 * record.wall + 1.0  # two workers of one core
        assert 0 <= figures["wasted"] <= figures["task_seconds"]
        assert figures["input_bytes"] > 0
        assert figures["stages"] >= 2
    assert known[0] == 0 < known[1]
    (case,) = summarise(journal)["cases"]
    assert case["better"] == "spark"
    assert case["ratio"] > 0
    assert [s.record.system for s in steps if s.record] == [
        "spark",
        "ebbflow",
        "spark",
        "spark",
        "ebbflow",
    ]

    assert not list_clusters()
    assert not [c for c in psutil.Process().children(recursive=True) if "spark" in " ".join(c.cmdline())]
    before = journal.path.read_text()
    assert Bench(plan, {"tpch": Path(tpch)}, RigOptions(2), tmp_path, SystemClock(), steps.append).run()
    assert journal.path.read_text() == before  # all was there: nothing was started


def test_executors_load_their_classes_from_the_archive(tmp_path: Path) -> None:
    log = tmp_path / "classes.log"
    options = f"{java_options(tmp_path)} -Xlog:class+load:file={log}"
    with started_rig(RigOptions(1, 0.5, "1400m", java_options=options), SystemClock()) as rig:
        rig.session.range(10).selectExpr("sum(id)").collect()
    loaded = [
        line for line in log.read_text().splitlines() if " org.apache.spark.executor.Executor source:" in line
    ]
    assert len(loaded) == 1
    assert "shared objects file (top)" in loaded[0]
