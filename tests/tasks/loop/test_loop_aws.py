"""The loop on an emulated AWS over HTTP: nodes are rented, warned of by EventBridge, and given back."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loopcases import ScriptedApp, settings, until

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.loop import Scaling
from ebbflow.planners.model.ledger import Recalled
from ebbflow.tasks.loop import CapacityLoop, LoopPace
from ebbflow.tasks.loop.opening import opened_nodes
from ebbflow.tasks.loop.request import CapacityRequest

if TYPE_CHECKING:
    from tests.aws.emulator import AccountAt

PRICES = 'source = "made up"\nregion = "us-east-1"\n[on_demand]\n"g5.xlarge" = 1.006\n'
PACE = LoopPace(look=0.05, source=0.1, fleet=0.5, settle=0.02, lead=5.0)
RULES = Scaling(pools={"gpu": "gpus"}, boot_s=5.0, wait_s=0.5, idle_s=2.0, hold_s=0.5)


@pytest.mark.processes
def test_nodes_of_aws_are_rented_and_called_back_when_they_are_taken(
    aws_account: "AccountAt", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.aws.emulator import PoolShape

    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    cluster = aws_account.cluster("lab", PoolShape("gpu", "gpu", types=("g5.xlarge",), most=4))
    config = cluster.write(tmp_path / "ebbflow.json")
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    request = CapacityRequest(source=f"aws:{config}", prices=str(prices))
    stop = threading.Event()
    with (
        Ledger.open(str(tmp_path / "ledger.db")) as ledger,
        opened_nodes(request, ledger, ledger.clock) as nodes,
    ):
        loop = CapacityLoop(
            ledger,
            nodes.fleet,
            nodes.source,
            settings(scaling=RULES, leave_s=5.0),
            evictor=nodes.evictor,
            pace=PACE,
            rented=nodes.rented,
            answered=nodes.answered,
        )
        thread = threading.Thread(target=loop.run, args=(stop,), daemon=True)
        thread.start()
        app = ScriptedApp(ledger, "a", 2, more={"min_gpus": 2}).enter()
        until(lambda: len(ledger.state().held("a")) == 2, "leases on rented nodes", app.step)
        taken = app.step().nodes[0]
        aws_account.interrupt([taken], 8.0)  # the group replaces it once it is gone
        until(lambda: ledger.events(kinds=[Recalled]), "the recall")
        recalled = ledger.events(kinds=[Recalled])[0].change
        assert isinstance(recalled, Recalled)
        until(
            lambda: len({one.node for one in ledger.state().held("a")} - {taken}) == 2,
            "leases elsewhere",
            app.step,
        )
        app.finish()
        until(lambda: not cluster.nodes("gpu"), "that idle nodes are given back")
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
