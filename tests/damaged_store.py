"""A query whose stages are in a store, run again and again as if by new processes; for damage in that store."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.results import read_checkpoint
from ebbflow.infra.storage.checksums import unsealed
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.tasks.query.driver import Driver
from ebbflow.tasks.query.request import QueryRequest
from tests.tasks.driving import Obedient, Ride, Scripted

SQL = """
    SELECT a.name, sum(f.v * b.w) AS s, count(*) AS n FROM f JOIN a ON f.a = a.a JOIN b ON f.b = b.b
    WHERE b.w > 0.1 GROUP BY a.name
"""


class Store:
    """A query of two stages, ``inner`` and ``sink``, whose checkpoints are in ``folder``."""

    def __init__(self, folder: Path, engine: Scripted) -> None:
        tables = folder / "tables"
        tables.mkdir()
        pq.write_table(
            pa.table(
                {"a": [i % 5 for i in range(400)], "b": [i % 9 for i in range(400)], "v": list(range(400))}
            ),
            tables / "f.parquet",
        )
        pq.write_table(pa.table({"a": list(range(5)), "name": list("vwxyz")}), tables / "a.parquet")
        pq.write_table(pa.table({"b": list(range(9)), "w": [i / 4 for i in range(9)]}), tables / "b.parquet")
        self.folder, self.engine = folder / "store", engine
        self.ride = Ride(
            QueryRequest(
                SQL, tables=str(tables), engine="duckdb", materialize="every-join", store=str(self.folder)
            )
        )
        self.plan: QueryExecutionPlan = max(self.ride.plans, key=lambda plan: len(plan.stages))
        self.sink = self.plan.sink.output_fp
        (self.inner,) = self.plan.sink.inputs
        self.rows = self.run()[1]

    def run(self) -> tuple[Driver, list[dict[str, Any]]]:
        """Run as a new process does; return the driver and the answer's rows, sorted."""
        self.ride.store = ParquetCheckpointStore(StorageLocation(self.folder))
        driver = self.ride.drive(self.engine, Obedient(self.ride.plans, []), self.plan)
        assert driver.result is not None
        rows = read_checkpoint(driver.result).to_pylist()
        return driver, sorted(rows, key=lambda row: str(row["name"]))

    def manifest(self, fingerprint: str) -> Path:
        return self.folder / "manifests" / f"{fingerprint}.json"

    def part(self, fingerprint: str) -> Path:
        said = unsealed(self.manifest(fingerprint).read_bytes())
        return self.folder / said["data"] / said["files"][0]["name"]

    def set_aside(self, fingerprint: str) -> int:
        return len(list((self.folder / "damaged").glob(f"{fingerprint}-*.json")))


def computed(driver: Driver) -> set[str]:
    """Return the fingerprints of the stages that the run computed."""
    return {stage.fingerprint for stage in driver.recorder.stages if stage.status == "completed"}
