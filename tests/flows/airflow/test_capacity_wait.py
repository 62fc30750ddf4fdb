"""Where capacity is looked for: a ledger that a loop keeps, or a Spark master."""

from pathlib import Path

import pytest

from ebbflow.flows.airflow.wait import LedgerProbe, MasterProbe, lookout, workers_room
from ebbflow.infra.errors import EngineUnavailableError, LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.spark.master_api import MasterView, Worker
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import CapacityChanged


def test_the_ledger_of_the_named_cluster_is_looked_at(tmp_path: Path) -> None:
    file = str(tmp_path / "ledger.db")
    Ledger.open(file, cluster="west").close()
    with Ledger.open(file, cluster="east") as ledger:
        lead = ledger.lead("test")
        lead.write([CapacityChanged(1, (Node("n1", 4, 8.0, gpus=2),))])
        east, west = LedgerProbe(file, "east"), LedgerProbe(file, "west")
        assert (east.look().gpus, west.look().gpus) == (2, 0)
        lead.write([CapacityChanged(2, (Node("n2", 4, 8.0, gpus=1),))])
        assert (east.look().nodes, east.look().free_gpus) == (2, 3)
        for one in (east, west, east):
            one.close()


def test_a_ledger_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(LedgerError):
        LedgerProbe(str(tmp_path / "ledger.db"))
    assert not (tmp_path / "ledger.db").exists()


def test_only_workers_that_live_count_and_the_cores_that_nobody_has() -> None:
    workers = (
        Worker("w1", "h1", "ALIVE", 4, 3, 4096, ""),
        Worker("w2", "h2", "DECOMMISSIONED", 8, 0, 8192, ""),
        Worker("w3", "h3", "ALIVE", 2, 0, 2048, ""),
    )
    seen = workers_room(MasterView("spark://m:7077", workers, ()))
    assert (seen.nodes, seen.cores, seen.free_cores, seen.memory, seen.gpus) == (2, 6, 3, 6.0, 0)


def test_a_master_that_does_not_answer_is_named() -> None:
    away = MasterProbe("spark://127.0.0.1:9")  # the port of the discard service, where nobody listens
    with pytest.raises(EngineUnavailableError, match=r"spark://127\.0\.0\.1:9"):
        away.look()
    away.close()


@pytest.mark.parametrize("url", ["local[2]", "http://host", "spark://"])
def test_what_is_no_master_is_refused(url: str) -> None:
    with pytest.raises(OptionError, match="spark://HOST:PORT"):
        MasterProbe(url)


def test_a_master_and_a_ledger_at_once_are_refused() -> None:
    with pytest.raises(OptionError, match="not both"):
        lookout(master="spark://m:7077", ledger="x.db")
