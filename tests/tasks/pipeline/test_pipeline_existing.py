"""A pipeline on a cluster that is there already: its trainings run on a local fleet that a loop elsewhere leads."""

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from pipelines import pairs_script, write_pairs

from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.planners.capacity.values import Settings
from ebbflow.planners.errors import PipelineFileError
from ebbflow.planners.model.ledger import Granted
from ebbflow.tasks.apps.lease_table import rules_of
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.node_sources import opened_nodes
from ebbflow.tasks.capacity.request import CapacityRequest
from ebbflow.tasks.pipeline.outcome import PipelineOutcome
from ebbflow.tasks.pipeline.run import PipelineRequest, run_steps
from tests.tasks.apps.app_loops import until
from tests.tasks.apps.toy_trainings import Script

PACE = LoopIntervals(
    poll_interval=0.05,
    capacity_poll_interval=0.2,
    fleet_poll_interval=0.5,
    batch_delay=0.02,
    leader_lease=5.0,
    status_interval=0.1,
)


def pipeline(base: Path, **existing: Any) -> Path:
    write_pairs(base / "tables")
    (base / "fit.py").write_text(pairs_script(1, 0.0))
    plain = {
        "name": "shop",
        "cluster": {"existing": {"ledger": str(base / "led.db"), "name": "lab", **existing}},
        "queries": {"pairs": {"sql": "SELECT x, twice AS y FROM pairs", "tables": "tables"}},
        "trainings": {
            "fit": {
                "script": "fit.py",
                "arguments": ["--data", "${queries.pairs.path}"],
                "environment": {"TOLD": "7"},
                "termination_grace": "5s",
                "preflight": "never",
            }
        },
    }
    file = base / "shop.yaml"
    file.write_text(yaml.safe_dump(plain, sort_keys=False))
    return file


@pytest.mark.slow
@pytest.mark.processes
def test_trainings_run_on_the_named_fleet_of_a_loop_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = joined(tmp_path, monkeypatch)
    assert float(outcome.step("fit").results["metrics.told"]) == 7.0


@pytest.mark.processes
def test_apps_enter_a_cluster_that_is_there_and_hold_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same without torch, which takes most of its time: what is started on the node trains nothing."""
    monkeypatch.setattr(
        "ebbflow.infra.training.launcher.trainer.TorchTrainer", Script(steps=100, pause=0.01).trainer
    )
    assert joined(tmp_path, monkeypatch).step("fit").details["steps"] == 100


def joined(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineOutcome:
    """Run a pipeline on a fleet and a ledger of others, and check what they know of it."""
    monkeypatch.setenv("EBBFLOW_HOME", str(folder / "home"))
    shared = folder / "shared"
    file = pipeline(folder, fleet="shared", directory=str(shared))
    pool = LocalPool("gpu", "gpu", initial=1, max_nodes=1, price=0.9)
    stop = threading.Event()
    with (
        LocalFleet.start([pool], "shared", gpus=()),
        Ledger.open(str(folder / "led.db"), cluster="lab") as ledger,
        opened_nodes(CapacityRequest(source="local:shared"), ledger, ledger.clock) as nodes,
    ):
        settings = Settings(lease_s=20.0, interval_s=2.0, termination_grace_s=7.0, scaling=None)
        loop = nodes.loop(ledger, settings, pace=PACE)
        thread = threading.Thread(target=loop.run, args=(stop,), daemon=True)
        thread.start()
        try:
            request = PipelineRequest(
                str(file), run_id="one", runs_dir=str(folder / "runs"), flow_run="a-run"
            )
            outcome = run_steps(request)
            until(lambda: not ledger.state().leases, "end of the leases")
        finally:
            stop.set()
            thread.join(150)
        assert outcome.state == "finished", outcome
        assert outcome.step("fit").results["directory"] == f"{shared}/pipelines/one/runs/one.fit"
        grants = [e.change for e in ledger.events(kinds=[Granted])]
        assert {lease.node for one in grants if isinstance(one, Granted) for lease in one.leases} == {"gpu-1"}
        assert {app.spec.flow_run for app in ledger.state().apps.values()} == {"a-run"}
        assert rules_of(ledger).grace == 7.0, "leases are over for the apps when they are for that loop"
    return outcome


def test_a_fleet_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    file = pipeline(tmp_path, fleet="gone")
    with Ledger.open(str(tmp_path / "led.db"), cluster="lab") as ledger:
        ledger.lead("a loop elsewhere", 600.0)
        with pytest.raises(
            PipelineFileError, match=r"cluster\.existing\.fleet: there is no local fleet 'gone'"
        ):
            run_steps(PipelineRequest(str(file), runs_dir=str(tmp_path / "runs")))


def test_a_training_without_nodes_says_what_is_missing(tmp_path: Path) -> None:
    file = pipeline(tmp_path)
    with Ledger.open(str(tmp_path / "led.db"), cluster="lab") as ledger:
        ledger.lead("a loop elsewhere", 600.0)
        with pytest.raises(PipelineFileError, match=r"name the local fleet .*\(cluster\.existing\.fleet\)"):
            run_steps(PipelineRequest(str(file), run_id="one", runs_dir=str(tmp_path / "runs")))
