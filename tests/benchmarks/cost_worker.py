"""Does one kind of work again and again with the code of one checkout: ``python cost_worker.py CHECKOUT``.

It runs by itself, imports no other test, and uses what older checkouts have, too. A line of JSON on standard
input names the work, a line of JSON on standard output says its seconds.
"""

import importlib
import json
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ebbflow.infra.storage.places import StorageLocation

QUERY = """
    SELECT n_name, o_orderpriority, sum(l_quantity) AS quantity, count(*) AS items
    FROM customer JOIN orders ON c_custkey = o_custkey JOIN lineitem ON l_orderkey = o_orderkey
    JOIN nation ON c_nationkey = n_nationkey
    WHERE o_orderdate < DATE '1997-01-01' GROUP BY n_name, o_orderpriority
"""
MODEL = 12_000_000  # parameters
EVENTS = 100


def _first(*names: str) -> types.ModuleType:
    """Return the first of these modules that the checkout has: the last is where it was in older ones."""
    for name in names[:-1]:
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return importlib.import_module(names[-1])


class Work:
    """What can be asked for; each returns nothing and is timed as a whole, but for what ``prepare`` did."""

    def __init__(self, tables: str, folder: Path) -> None:
        self._tables, self._folder, self._number = tables, folder, 0

    def _fresh(self) -> Path:
        self._number += 1
        shutil.rmtree(self._folder / str(self._number - 1), ignore_errors=True)
        place = self._folder / str(self._number)
        place.mkdir()
        return place

    def _query(self, store: Path) -> None:
        query = _first("ebbflow.tasks.query.run", "ebbflow.tasks.query")
        request = _first("ebbflow.tasks.query.request", "ebbflow.tasks.request")
        asked = request.QueryRequest(
            QUERY,
            tables=self._tables,
            engine="duckdb",
            store=str(store / "store"),
            **{
                "materialize"
                if "materialize" in request.QueryRequest.__dataclass_fields__
                else "cuts": "every-join"
            },
        )
        query.execute(asked, query.PlainOrchestrator())

    def query(self) -> Callable[[], None]:
        """A query whose stages are computed and stored."""
        place = self._fresh()
        return lambda: self._query(place)

    def again(self) -> Callable[[], None]:
        """A query whose result is in the store; the process has verified none of it."""
        place = self._fresh()
        self._query(place)
        # seen for the first time under another name
        moved = place.with_name(f"{place.name}-moved")
        shutil.rmtree(moved, ignore_errors=True)
        place.rename(moved)

        def work() -> None:
            self._query(moved)

        return work

    def save(self) -> Callable[[], None]:
        """A full checkpoint of a model, until it is durable."""
        import torch

        checkpoints = _first(
            "ebbflow.infra.training.checkpoints.folder", "ebbflow.infra.training.checkpoints"
        )
        state = {"model": {"w": torch.ones(MODEL)}, "run": {"step": 1}}
        folder = checkpoints.CheckpointFolder(StorageLocation(self._fresh()))
        return lambda: folder.save(state, 1)

    def ledger(self) -> Callable[[], None]:
        """Events written to a ledger in SQLite, and the state read back."""
        ledgers = importlib.import_module("ebbflow.infra.ledger")
        model = importlib.import_module("ebbflow.planners.model.ledger")
        path = str(self._fresh() / "ledger.db")

        def work() -> None:
            with ledgers.Ledger.open(path) as ledger:
                for number in range(EVENTS):
                    ledger.write([model.AppEntered(model.AppSpec(f"a{number}", "training", gpus=2))])
            with ledgers.Ledger.open(path) as ledger:
                assert len(ledger.state().apps) == EVENTS

        return work


def main() -> None:
    checkout, tables = sys.argv[1:]
    package: Any = types.ModuleType("ebbflow")
    package.__path__ = [checkout]  # as setuptools maps it
    sys.modules["ebbflow"] = package
    with tempfile.TemporaryDirectory(prefix="ebbflow-cost-") as folder:
        work = Work(tables, Path(folder))
        for line in sys.stdin:
            act = getattr(work, json.loads(line)["work"])()
            begun, cpu = time.perf_counter(), time.process_time()
            act()
            said = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
            print("\n" + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
