"""What a training that is an app of a cluster is given by its flow."""

from pathlib import Path
from typing import Any

import pytest

from ebbflow.flows.training.flow import _work
from ebbflow.tasks.training.leased.place import ClusterPlace
from ebbflow.tasks.training.listening import NullTrainingListener
from ebbflow.tasks.training.request import TrainingRequest


@pytest.mark.parametrize("ledger", ["/shared/ledger.db", None])
def test_an_app_looks_for_aggregators_in_the_ledger_of_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: str | None
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "ebbflow.tasks.training.leased.app.run_training_app", lambda *_, **options: given.update(options)
    )
    script = tmp_path / "fit.py"
    script.write_text("")
    request = TrainingRequest(
        str(script), runs_dir=str(tmp_path / "runs"), run_id="r", sync="service", aggregation_cluster="shop"
    )
    place = ClusterPlace(ledger, "shop")
    _work(request, NullTrainingListener(), False, place).as_app()("ledger", "pool", make=None)
    assert given["options"] == {"ledger": ledger}
