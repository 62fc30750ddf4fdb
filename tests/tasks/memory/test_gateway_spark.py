"""Stock Spark, as PySpark brings it, reads and writes a store with nodes' memory before it, through the gateway."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest
from pyarrow.dataset import dataset
from pyarrow.fs import FileSelector

from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.storage.filesystems import filesystem
from ebbflow.tasks.memory.gateway import OpenGateway, gateway, spark_settings
from tests.infra.memory.lenders import Lender

if TYPE_CHECKING:
    from tests.aws.emulator import AccountAt

pytestmark = [pytest.mark.spark(shared=True), pytest.mark.timeout(600)]

TABLE = """SELECT id, id % 7 AS part, concat('text ', id % 977) AS word, id / 3 AS share FROM range(20000)"""
SUMS = ("count(*)", "sum(id)", "sum(part)", "count(DISTINCT word)", "round(sum(share), 3)")


class Nodes:
    """Two nodes that lend memory, and gateways to what is behind it."""

    def __init__(self, folder: Path) -> None:
        self.registry = MemoryRegistry(folder / "memory")
        self.registry.token(create=True)
        self.lenders = [Lender(self.registry, f"node-{number}") for number in range(2)]
        self.behind = folder / "tables"
        self.notes: list[str] = []

    def gateway(self, store: object) -> AbstractContextManager[OpenGateway]:
        return gateway(f"memory+{store}", use="always", notify=self.notes.append, registry=self.registry)

    def kill(self) -> None:
        for one in self.lenders:
            one.close()


@pytest.fixture(name="nodes")
def _nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.kill()


def _session(engine: SparkEngine, served: OpenGateway, key: str) -> Any:
    """Return a session that is told of the gateway while Spark runs."""
    found = engine._session.newSession()
    for name, value in spark_settings(served.host, served.port, key).items():
        found.conf.set(name, value)
    return found


def _objects(path: str) -> list[str]:
    found = filesystem("s3").get_file_info(FileSelector(path, recursive=True))
    return [info.path for info in found if info.is_file]


def test_spark_writes_and_reads_through_memory_and_the_store_has_it_all(
    nodes: Nodes, aws_account: "AccountAt"
) -> None:
    aws_account.client("s3").create_bucket(Bucket="gateway")
    with (
        nodes.gateway(nodes.behind) as served,
        nodes.gateway("s3://gateway/tables") as remote,
        SparkEngine.start("local[2]", memory="1g") as engine,
    ):
        assert nodes.notes == ["memory tier on: asked for, with 2 peers"] * 2
        assert served.settings.stat().st_mode & 0o777 == 0o600
        told = dict(line.split(" ", 1) for line in served.settings.read_text().splitlines())
        assert told == {
            f"spark.hadoop.{name}": value
            for name, value in spark_settings(served.host, served.port, served.key).items()
        }
        without, stranger = engine._session.newSession(), _session(engine, served, "0" * 64)
        for one, said in (
            (without, "the key of the gateway is missing"),
            (stranger, "refreshing access token"),
        ):
            one.conf.set("fs.webhdfs.impl.disable.cache", "true")
            with pytest.raises(Exception, match=said):
                one.read.parquet(f"{served.url}plain")
        assert not nodes.behind.joinpath("plain").exists()

        spark = _session(engine, served, served.key)
        table = spark.sql(TABLE)

        def behind(path: str) -> Any:
            return duckdb.sql(
                f"SELECT {', '.join(SUMS)} FROM read_parquet('{nodes.behind}/{path}')"
            ).fetchall()[0]

        def read(path: str, kind: str = "parquet") -> Any:
            frame = spark.read.format(kind).schema(table.schema).load(f"{served.url}{path}")
            return tuple(frame.selectExpr(*SUMS).first())

        table.coalesce(2).write.parquet(f"{served.url}plain")
        wanted = behind("plain/*.parquet")
        assert wanted[:4] == (20_000, 199_990_000, sum(n % 7 for n in range(20_000)), 977)
        assert read("plain") == wanted
        with pytest.raises(Exception, match="already exists"):
            table.write.parquet(f"{served.url}plain")
        table.filter("part < 3").coalesce(1).write.mode("overwrite").parquet(f"{served.url}plain")
        assert behind("plain/*.parquet")[:3] == (8572, 85_704_286, 8571), "0, 1 and 2"
        table.filter("part >= 3").coalesce(1).write.mode("append").parquet(f"{served.url}plain")
        assert behind("plain/*.parquet") == wanted

        table.coalesce(2).write.partitionBy("part").parquet(f"{served.url}parts of all")
        assert behind("parts of all/part=*/*.parquet") == wanted
        assert read("parts of all") == wanted
        table.coalesce(1).write.orc(f"{served.url}orc")
        assert read("orc", "orc") == wanted

        there = _session(engine, remote, remote.key)

        def read_there() -> Any:
            return tuple(there.read.parquet(f"{remote.url}parts of all").selectExpr(*SUMS).first())

        for mode in ("error", "overwrite"):
            rows = there.sql(TABLE).filter("part < 3" if mode == "error" else "true")
            rows.coalesce(1).write.mode(mode).partitionBy("part").parquet(f"{remote.url}parts of all")
        objects = _objects("gateway/tables")
        assert sum(name.endswith(".parquet") for name in objects) == 7, "those of the first write went"
        assert not [name for name in objects if "_temporary" in name or ".ebbflow-gateway" in name]
        data = dataset("gateway/tables/parts of all", filesystem=filesystem("s3"), partitioning="hive")
        with duckdb.connect() as connection:
            connection.register("stored", data.to_table())
            assert connection.sql(f"SELECT {', '.join(SUMS)} FROM stored").fetchall()[0] == wanted
        assert read_there() == wanted

        for one in (served, remote):
            assert one.tier is not None
            assert one.tier.session is not None
            metrics = one.tier.session.blocks.metrics
            assert metrics.remote_hits > 0, "what it wrote is read from memory"
            assert metrics.store_hits == metrics.fallbacks == 0
        nodes.kill()
        assert read("parts of all") == read_there() == wanted, "from the store"
        assert not list(nodes.behind.rglob("_temporary"))
        assert [one for one in (nodes.behind / ".ebbflow-gateway").iterdir() if one.is_file()] == []
    assert not served.settings.exists()
    assert behind("parts of all/part=*/*.parquet") == wanted
