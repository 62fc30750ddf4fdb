"""A pipeline for real: a query on DuckDB feeds a training on nodes of this machine, one of which is killed."""

import json
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from pipelines import pairs_script, write_pairs

from ebbflow.infra.errors import PipelineRunError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import list_fleets
from ebbflow.infra.storage import checksums
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import Decided
from ebbflow.tasks.pipeline.coordinator import Attempt
from ebbflow.tasks.pipeline.record import RunFolder
from ebbflow.tasks.pipeline.run import NullWatcher, PipelineRequest, run_steps
from ebbflow.tasks.pipeline.view import ClusterView


@pytest.fixture
def shop(tmp_path: Path) -> dict[str, Any]:
    """Return a pipeline whose data are there: y = 2 x."""
    write_pairs(tmp_path / "tables")
    (tmp_path / "fit.py").write_text(pairs_script(4, 0.02))
    return {
        "name": "shop",
        "cluster": {
            "local": {
                "pools": {"gpu": {"kind": "gpu", "nodes": 1, "max_nodes": 2, "price": 0.9, "on_demand_price": 3.0}},
                "faults": ["fit+1s:kill:gpu"],
            }
        },
        "teams": {"sales": {"weight": 2}},
        "queries": {
            "pairs": {
                "team": "sales",
                "sql": "SELECT x, twice AS y FROM pairs WHERE x < 1",
                "tables": "tables",
                "verify": True,
            },
            "again": {"team": "sales", "sql": "SELECT max(y) AS top FROM pairs", "tables": "${queries.pairs.path}"},
        },
        "trainings": {
            "fit": {
                "team": "sales",
                "script": "fit.py",
                "arguments": ["--data", "${queries.pairs.path}"],
                "environment": {"TOLD": "${env:A_SECRET_NUMBER}"},
                "checkpoint_interval": "1s",
                "termination_grace": "5s",
            }
        },
        "loop": {"lease_duration": "20s", "auction_interval": "2s", "termination_grace": "5s",
                 "scaling": {"scale_out_after": "1s", "scale_in_idle": "5s"}},
        "store": str(tmp_path / "store"),
    }  # fmt: skip


class Heard(NullWatcher):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.view: ClusterView | None = None

    def watch(self, view: ClusterView, steps: Any) -> None:
        self.view = view

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.processes
def test_a_query_feeds_a_training_whose_node_is_killed(
    shop: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_NUMBER", "7654321")
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(shop, sort_keys=False))
    heard = Heard()
    outcome = run_steps(
        PipelineRequest(
            str(file), run_id="one", runs_dir=str(tmp_path / "runs"), report=(str(tmp_path / "page.html"),)
        ),
        heard,
    )
    assert outcome.state == "finished", outcome
    pairs, again, fit = outcome.steps
    assert pairs.results["rows"] == "512"
    assert pairs.details["equal to DuckDB's result"] is True
    assert pq.read_table(again.results["path"]).to_pylist() == [{"top": pytest.approx(2 * 511 / 512)}]
    assert abs(float(fit.results["metrics.slope"]) - 2) < 0.2
    assert float(fit.results["metrics.told"]) == 7654321.0
    assert any("is killed without notice" in line for line in heard.lines)

    folder = tmp_path / "runs" / "one"
    record = RunFolder(folder.parent, "one").load()[0]
    for query in (pairs, again):
        file_of = query.results["file"]
        assert record.steps[query.name].files == {file_of: checksums.of_place(StorageLocation(file_of))}
    with Ledger.open(str(folder / "ledger.db"), cluster="one", create=False) as ledger:
        state = ledger.state()
        assert ledger.verify() == []
        assert {app.phase for app in state.apps.values()} == {"finished"}
        assert not state.leases
        decided = [event.change for event in ledger.events() if isinstance(event.change, Decided)]
    assert {"auction", "recovery"} <= {one.kind for one in decided}
    assert all(one.reason for one in decided)
    leases = json.loads((folder / "cluster.json").read_text())["leases"]
    assert len({lease["node"] for lease in leases}) >= 2  # it went on elsewhere
    assert "<svg" in (tmp_path / "page.html").read_text()

    assert list_fleets() == []
    for path in folder.rglob("*"):  # the secret itself is nowhere, but for what the script has reported
        if path.is_file() and "runs" not in path.relative_to(folder).parts and path.name != "outcome.json":
            assert b"A_SECRET_NUMBER=7654321" not in path.read_bytes(), path
    assert "${env:A_SECRET_NUMBER}" in (folder / "pipeline.yaml").read_text()


def test_a_secret_that_is_not_set_is_told_and_nothing_else_runs(
    shop: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbflow.tasks.pipeline.carry import Carrier
    from ebbflow.tasks.pipeline.file.read import read_pipeline
    from ebbflow.tasks.pipeline.record import RunFolder
    from ebbflow.tasks.pipeline.site import Site

    monkeypatch.delenv("A_SECRET_NUMBER", raising=False)
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(shop, sort_keys=False))
    pipeline = read_pipeline(file)
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        site = Site(ledger, "one", pools=lambda *_: None)  # type: ignore[arg-type,return-value]
        carrier = Carrier(site, pipeline, RunFolder(tmp_path, "one"), ledger.clock)
        attempt = Attempt(pipeline.steps["fit"], "one.fit", 1, str, None, threading.Event())
        with pytest.raises(
            OptionError, match=r"\$\{env:A_SECRET_NUMBER\} is asked for, but the environment has no"
        ):
            carrier(attempt)
        assert not ledger.state().apps


def test_a_ledger_with_a_password_is_named_by_the_environment_and_never_shown(
    shop: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop["cluster"] = {"existing": {"ledger": "${env:LEDGER_OF_TEST}"}}
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(shop, sort_keys=False))
    request = PipelineRequest(str(file), runs_dir=str(tmp_path / "runs"))
    monkeypatch.delenv("LEDGER_OF_TEST", raising=False)
    with pytest.raises(OptionError, match="the environment has no LEDGER_OF_TEST"):
        run_steps(request)
    monkeypatch.setenv("LEDGER_OF_TEST", str(tmp_path / "led.db"))
    monkeypatch.setenv("A_SECRET_NUMBER", "1")
    del shop["trainings"]  # for which the cluster has no nodes
    file.write_text(yaml.safe_dump(shop, sort_keys=False))
    with pytest.raises(OptionError, match=r"there is no ledger .*led\.db"):
        run_steps(request)
    Ledger.open(str(tmp_path / "led.db")).close()
    with pytest.raises(PipelineRunError, match="no capacity loop is the leader of the cluster 'local'"):
        run_steps(request)


def test_steps_of_a_pipeline_on_a_cluster_that_is_led(shop: dict[str, Any], tmp_path: Path) -> None:
    shop["cluster"] = {"existing": {"ledger": str(tmp_path / "led.db")}}
    del shop["trainings"]
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(shop, sort_keys=False))
    with Ledger.open(str(tmp_path / "led.db")) as ledger:
        ledger.lead("a loop elsewhere", 600.0)
        outcome = run_steps(PipelineRequest(str(file), run_id="two", runs_dir=str(tmp_path / "runs")))
        assert outcome.state == "finished", outcome
        assert set(ledger.state().apps) == {"two.pairs", "two.again"}
        specs = [record.spec for record in ledger.state().apps.values()]
        assert {(spec.team, spec.pipeline, spec.weight) for spec in specs} == {("sales", "two", 2.0)}
