"""An elastic job as a step of a pipeline: its workers are on leased slots of nodes that are killed."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ebbflow.infra.elastic.apps.kmeans import KMeans
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import LocalFleet, list_fleets
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError, PipelineFileError
from ebbflow.tasks.elastic.data import stored_input
from ebbflow.tasks.elastic.request import ElasticAppRequest, ElasticRequest
from ebbflow.tasks.pipeline.file.read import parse_pipeline
from ebbflow.tasks.pipeline.run import NullWatcher, PipelineRequest, run_steps
from ebbflow.tasks.pipeline.view import ClusterView
from tests.elastic_own import write_application
from tests.elastic_results import undisturbed

ITERATIONS = 3000


def points(folder: Path) -> None:
    """Write a table of points around three centres."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(900, 2)) * 0.3 + np.repeat([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]], 300, axis=0)
    table = pa.table({"x": x[:, 0], "y": x[:, 1], "of": ["a"] * 900})
    pq.write_table(table, folder / "points.parquet")


def shop(folder: Path, iterations: int = ITERATIONS) -> dict[str, Any]:
    """Return a pipeline of a query and an elastic job on its result."""
    points(folder / "tables")
    pool = {"kind": "gpu", "nodes": 2, "max_nodes": 3, "price": 0.9}
    return {
        "name": "shop",
        "cluster": {"local": {"pools": {"gpu": pool}}},
        "queries": {"points": {"sql": "SELECT * FROM points WHERE x < 100", "tables": "tables"}},
        "elastic_jobs": {
            "groups": {
                "app": "kmeans",
                "input": "${queries.points.file}",
                "classes": 3,
                "executors": 6,
                "iterations": iterations,
                "workers": 2,
                "termination_grace": "5s",
            }
        },
        "loop": {
            "lease_duration": "20s",
            "auction_interval": "2s",
            "termination_grace": "5s",
            "scaling": {"scale_out_after": "1s", "scale_in_idle": "5s"},
        },
        "store": str(folder / "store"),
    }


class Heard(NullWatcher):
    """Kills a node once the job is under way, or stops the run."""

    def __init__(self, act: Any) -> None:
        self._act, self.lines, self._done = act, list[str](), False
        self._view: ClusterView | None = None

    def watch(self, view: ClusterView, steps: Any) -> None:
        self._view = view

    def note(self, text: str) -> None:
        self.lines.append(text)

    def tick(self) -> None:
        assert self._view is not None
        if self._done:
            return
        report = self._view.ledger.reports(["one.groups"]).get("one.groups")
        held = self._view.ledger.state().held("one.groups")
        both = sum("joined: " in line for line in self.lines) > 1  # a worker that has not joined is no loss
        if report is not None and report.step > 20 and len(held) == 2 and both:
            self._done = True
            self._act(held)


def check_result(outcome: Any, folder: Path, iterations: int = ITERATIONS) -> None:
    """Hold the result to that of a run which nothing disturbs."""
    groups = outcome.step("groups")
    data = folder / "runs" / "one" / "runs" / "one.groups" / "input.npz"
    app = KMeans(str(data), 3, 6, iterations)
    with np.load(groups.results["file"]) as found:
        assert np.array_equal(found["centres"], app.centres(undisturbed(app, iterations)))
    assert groups.details["iterations"] == iterations


def killing() -> Heard:
    """Return a watcher that has a node killed on which a worker runs."""

    def kill(held: Any) -> None:
        with LocalFleet.attach("one") as fleet:
            fleet.kill(held[0].node)

    return Heard(kill)


@pytest.mark.processes
def test_a_job_that_loses_a_node_comes_to_the_same_bits(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(shop(tmp_path), sort_keys=False))
    heard = killing()
    request = PipelineRequest(str(file), run_id="one", runs_dir=str(tmp_path / "runs"))
    outcome = run_steps(request, heard)
    assert outcome.state == "finished", (outcome, heard.lines)
    check_result(outcome, tmp_path)
    assert outcome.step("groups").details["lost workers"] >= 1
    with Ledger.open(str(tmp_path / "runs" / "one" / "ledger.db"), cluster="one", create=False) as ledger:
        state = ledger.state()
        assert ledger.verify() == []
        assert not state.leases
        assert {(app.spec.kind, app.phase) for app in state.apps.values()} == {
            ("query", "finished"),
            ("elastic", "finished"),
        }
    page = json.loads((tmp_path / "runs" / "one" / "cluster.json").read_text())
    assert {lease["app"] for lease in page["leases"]} == {"one.groups"}
    assert list_fleets() == []


@pytest.mark.processes
def test_an_application_of_the_users_own_runs_where_it_was_allowed(tmp_path: Path) -> None:
    write_application(tmp_path / "code")
    numbers = np.random.default_rng(5).random(4000)
    np.savez(tmp_path / "numbers.npz", x=numbers)
    plain = shop(tmp_path)
    del plain["queries"]
    plain["elastic_jobs"] = {
        "cells": {
            "app": "histogram.py:Histogram",
            "workdir": "code",
            "input": "numbers.npz",
            "parameters": {"cells": 4},
            "executors": 4,
            "iterations": 5,
            "workers": 2,
            "termination_grace": "5s",
        }
    }
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(plain, sort_keys=False))
    given: dict[str, Any] = {"run_id": "one", "runs_dir": str(tmp_path / "runs")}
    with pytest.raises(
        PipelineFileError, match=f"elastic_jobs.cells.workdir: .*--allow-workdir {tmp_path}/code"
    ):
        run_steps(PipelineRequest(str(file), **given), NullWatcher())
    outcome = run_steps(
        PipelineRequest(str(file), **given, allow_workdirs=(str(tmp_path / "code"),)), NullWatcher()
    )
    assert outcome.state == "finished", outcome
    cells = outcome.step("cells")
    counts = np.histogram(numbers, 4, (0.0, 1.0))[0]
    with np.load(cells.results["file"]) as found:
        assert [int(found[str(cell)]) for cell in range(4)] == counts.tolist()
    assert cells.results["objective"] == repr(-float(counts.max()))
    assert (tmp_path / "runs" / "one" / "runs" / "one.cells" / "code" / "code.json").is_file()


@pytest.mark.slow
@pytest.mark.processes
def test_a_job_that_was_stopped_resumes_from_its_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(shop(tmp_path), sort_keys=False))
    stop = threading.Event()
    request = PipelineRequest(str(file), run_id="one", runs_dir=str(tmp_path / "runs"))
    first = run_steps(request, Heard(lambda _: stop.set()), stop=stop)
    assert first.state == "stopped", first
    assert list((tmp_path / "runs" / "one" / "elastic" / "one.groups").glob("snapshot-*/manifest.json"))
    heard = killing()
    outcome = run_steps(PipelineRequest(resume="one", runs_dir=str(tmp_path / "runs")), heard)
    assert outcome.state == "finished", (outcome, heard.lines)
    check_result(outcome, tmp_path)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    def refused(match: str, **keys: Any) -> None:
        plain = shop(tmp_path)
        plain["elastic_jobs"]["groups"] |= keys
        with pytest.raises(PipelineFileError, match=match):
            parse_pipeline(yaml.safe_dump(plain), "shop.yaml", str(tmp_path))

    refused("app must be one of mlr, kmeans, lda, or FILE.py:CLASS of the user's own; got 'svm'", app="svm")
    refused("workdir must name the directory of the application a.py:A", app="a.py:A")
    refused("workdir is for an application of the user's own", workdir="code")
    refused("needs 4 GPUs; the pools of kind gpu have 3 at most", workers=4)
    refused("max_workers must be at most executors", max_workers=7)
    refused("1 <= workers <= max_workers", max_workers=1)
    refused(r"elastic_jobs.groups.input: there is no file or directory 'gone.npz'", input="gone.npz")
    refused(r"there is no 'gone' in queries", input="${queries.gone.file}")
    with pytest.raises(OptionError, match="input must name the data"):
        ElasticAppRequest(ElasticRequest("mlr"), "a", str(tmp_path), str(tmp_path))


@pytest.mark.parametrize(
    ("app", "columns", "message"),
    [
        ("mlr", {"x": [1.0, 2.0]}, "it lacks the columns y; it has x"),
        ("mlr", {"x": [1.0, None], "y": [0, 1]}, "no value may be NULL; the columns x have some"),
        ("mlr", {"x": [1.0, 2.0], "y": [0, 7]}, "y must be below the 2 classes"),
        ("kmeans", {"x": ["a", "b"]}, "it has 2 rows and 0 columns of numbers"),
        ("kmeans", {"x": [1.0, 1.0]}, "it has 1 different rows, fewer than the 2 clusters"),
        ("lda", {"document": [0, 1]}, "it lacks the columns word; it has document"),
    ],
)
def test_tables_that_cannot_serve(
    app: str, columns: dict[str, list[Any]], message: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(OptionError, match=message):
        stored_input(str(tmp_path / "t.parquet"), app, 2, "y", StorageLocation(tmp_path / "run"))


def test_a_table_is_kept_as_it_was_first_read(tmp_path: Path) -> None:
    table = pa.table({"b": [2, 1, 2], "y": [0, 1, 1], "a": [0.5, 0.25, 0.5], "name": ["x", "y", "z"]})
    pq.write_table(table, tmp_path / "t.parquet")
    place = StorageLocation(tmp_path / "run")
    path = stored_input(str(tmp_path / "t.parquet"), "mlr", 2, "y", place)
    (tmp_path / "t.parquet").unlink()
    assert stored_input(str(tmp_path / "t.parquet"), "mlr", 2, "y", place) == path
    with np.load(path) as found:
        assert found["x"].tolist() == [[2, 0.5], [1, 0.25], [2, 0.5]]
        assert found["y"].tolist() == [0, 1, 1]
    pq.write_table(table, tmp_path / "t.parquet")
    path = stored_input(str(tmp_path / "t.parquet"), "kmeans", 2, "y", StorageLocation(tmp_path / "other"))
    with np.load(path) as found:
        assert found["start"].tolist() == [[2, 0, 0.5], [1, 1, 0.25]]
