"""Calibration measures every case, says truthfully what it did, and is kept."""

import json
from pathlib import Path

import pytest

from ebbflow.infra.protocols import StageJob, StageResult
from ebbflow.infra.query.calibration import CASES, calibrate, measure
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.model import Measured, Work

ROWS = 8_000


class _CountingEngine(DuckDbEngine):
    """Counts statements, and rows written by name."""

    jobs = 0

    def run(self, job: StageJob, on_progress: object = None) -> StageResult:
        type(self).jobs += 1
        return super().run(job)


@pytest.fixture(name="engine")
def _engine():
    _CountingEngine.jobs = 0
    engine = _CountingEngine.start(threads=1, memory_gb=1)
    yield engine
    engine.close()


def test_every_case_runs_and_names_its_work(engine: DuckDbEngine) -> None:
    found = measure(engine, 1.0, rows=ROWS)
    assert list(found) == [case.name for case in CASES]
    for name, measured in found.items():
        assert measured.engine == "duckdb"
        assert measured.wall_seconds > 0, name
        assert measured.work.scanned_rows > 0, name
        assert measured.work.tasks == measured.tasks > 0, name
        assert measured.work.shuffled_bytes == measured.work.broadcast_bytes == 0, name


def test_the_cases_together_exercise_every_kind_of_work() -> None:
    total = Work(tasks=1)
    for case in CASES:
        total = total.plus(case.work(ROWS))
    assert all(amount > 0 for amount in total.vector())


def test_joins_emit_as_many_rows_as_their_work_says(engine: DuckDbEngine, tmp_path: Path) -> None:
    from ebbflow.infra.query import calibration

    tables = calibration._write_tables(StorageLocation(tmp_path), ROWS)
    by_name = {case.name: case for case in CASES}
    joins = {
        "merge join": "SELECT fact.k FROM fact JOIN part ON fact.k = part.k",
        "broadcast join": "SELECT fact.k FROM fact JOIN dim ON fact.d = dim.d",
    }
    for name, count in joins.items():
        case = by_name[name]
        folder = tmp_path / name
        folder.mkdir()
        relations = tuple(tables[t] for t in case.tables)
        result = engine.run(StageJob(name, name, count, relations, StorageLocation(folder.as_uri())))
        assert result.rows == case.work(ROWS).joined_rows


def test_a_given_folder_is_left_as_it_was(engine: DuckDbEngine, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    calibrate(engine, 1.0, folder=StorageLocation(tmp_path), rows=ROWS)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_calibration_is_measured_once_for_an_engine_and_a_number_of_cores(
    engine: DuckDbEngine, tmp_path: Path
) -> None:
    cache = JsonStore(StorageLocation(tmp_path / "cache"))
    first = calibrate(engine, 1.0, rows=ROWS, cache=cache)
    jobs = _CountingEngine.jobs
    assert calibrate(engine, 1.0, rows=ROWS, cache=cache) == first
    assert _CountingEngine.jobs == jobs
    assert all(isinstance(m, Measured) and isinstance(m.work, Work) for m in first)
    calibrate(engine, 2.0, rows=ROWS, cache=cache)
    assert _CountingEngine.jobs > jobs


@pytest.mark.parametrize("kept", [None, [], "text", [{"engine": "duckdb"}], [{"work": {"unknown": 1}}]])
def test_what_another_version_kept_is_measured_again(engine: DuckDbEngine, kept: object) -> None:
    class Cache:
        value = kept

        def get(self, key: str) -> object:
            return self.value

        def put(self, key: str, value: object) -> None:
            self.value = json.loads(json.dumps(value))

    cache = Cache()
    assert len(calibrate(engine, 1.0, rows=ROWS, cache=cache)) == len(CASES)
    assert len(cache.value) == len(CASES)  # type: ignore[arg-type]
