"""Queries whose tables and store are on S3, on a Spark without a client for it."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, WriterProperties, write_deltalake
from pyiceberg.catalog import load_catalog
from pyiceberg.utils.config import Config

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.exchange import division, ranges
from ebbflow.infra.spark.native.slices import Cut
from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.tables.logs.versions import s3_settings
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from tests.chaos.proxy import Proxy
from tests.infra.tables.deleting import DELETING, delete_by_vector
from tests.query_process import process

if TYPE_CHECKING:
    from tests.aws.emulator import Emulator

pytestmark = [pytest.mark.spark, pytest.mark.timeout(280)]

Q3 = (Path(__file__).parents[3] / "flows" / "tpch" / "q3.sql").read_text()
CANARY = "cAnArYs3S3"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": f"AKIA{CANARY}",
    "AWS_SECRET_ACCESS_KEY": f"secret/{CANARY}",
    "AWS_SESSION_TOKEN": f"token-{CANARY}",
}
OTHERS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION")


@pytest.fixture(scope="module", name="network")
def _network(aws_emulator: "Emulator") -> Iterator[Proxy]:
    with Proxy(httpx.URL(aws_emulator.url).port or 80) as proxy:
        yield proxy


@pytest.fixture(scope="module", name="opened")
def _opened(tpch: str, network: Proxy) -> Iterator[OpenedEngine]:
    """Spark, begun with credentials in the environment; where S3 is, only this process is told, and later."""
    with pytest.MonkeyPatch.context() as patch:
        for name in OTHERS:
            patch.delenv(name, raising=False)
        for name, value in {**CREDENTIALS, "AWS_EC2_METADATA_DISABLED": "true"}.items():
            patch.setenv(name, value)
        patch.setattr(division, "_SMALLEST", 1 << 18)
        with opened_engine(
            QueryRequest("SELECT 1", tables=tpch, engine="spark", master="local[2]")
        ) as opened:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{network.port}")
            patch.setenv("AWS_REGION", "us-east-1")
            yield opened


@pytest.fixture(scope="module", name="bucket")
def _bucket(opened: OpenedEngine, aws_emulator: "Emulator", tpch: str) -> str:
    """Return the address of a bucket with the tables that the queries here read."""
    httpx.put(f"{aws_emulator.url}/object-storage-spark", timeout=20).raise_for_status()
    for table in ("customer", "orders", "lineitem"):
        fs, path = resolve(f"s3://object-storage-spark/tables/{table}.parquet")
        with fs.open_output_stream(path) as out:
            # row groups that slices are made of
            pq.write_table(pq.read_table(Path(tpch) / f"{table}.parquet"), out, row_group_size=8000)
    return "s3://object-storage-spark"


def request_of(bucket: str, store: str, sql: str = Q3, **options: Any) -> QueryRequest:
    return QueryRequest(
        sql,
        tables=f"{bucket}/tables",
        store=f"{bucket}/{store}",
        engine="spark",
        master="local[2]",
        **options,
    )


def objects(address: str) -> dict[str, bytes]:
    """Return the content of all objects below ``address``."""
    from pyarrow.fs import FileSelector

    fs, path = resolve(address)
    found = fs.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
    return {info.path: fs.open_input_file(info.path).read() for info in found if info.is_file}


def test_a_query_runs_on_its_tasks_own_client_and_shows_no_secret(
    opened: OpenedEngine, bucket: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="ebbflow")
    request = request_of(bucket, "store", materialize="every-join", verify=True)
    report = execute(request, opened=opened).report
    assert report.verified, report.verification
    assert len(report.stages) > 1
    assert all("native" in stage.note.split(", ") for stage in report.stages), report.stages
    assert any("all stages run natively" in problem for problem in report.problems)
    kept = objects(f"{bucket}/store")
    assert max(stage.tasks for stage in report.stages) > 1  # some in slices
    assert not [path for path in kept if "/." in path]  # nothing unfinished is left
    shown = report.to_json() + repr(report) + caplog.text + "".join(capfd.readouterr())
    assert CANARY not in shown
    assert not [path for path, content in kept.items() if CANARY.encode() in content]


def test_slow_and_failing_answers_of_s3_are_tried_again(
    opened: OpenedEngine, bucket: str, network: Proxy
) -> None:
    before = network.cuts
    over = threading.Event()

    def disturb() -> None:
        """Be slow, and lose the connections of tasks for a moment, until some were lost."""
        while network.cuts < before + 2 and not over.wait(0.3):
            network.set("cut")
            time.sleep(0.1)
            network.set("slow")

    class Disturbing(NullQueryListener):
        """Begins with the first stage: what the driver reads before is a moment of its own."""

        def stage_started(self, stage: Stage) -> None:
            if not thread.ident:
                thread.start()

    network.set("slow")
    thread = threading.Thread(target=disturb)
    try:
        report = execute(request_of(bucket, "slow"), PlainOrchestrator(Disturbing()), opened=opened).report
    finally:
        over.set()
        thread.join(150)
        network.set("open")
    assert network.cuts > before
    assert report.rows == 10
    assert all("native" in stage.note.split(", ") for stage in report.stages)


def test_a_killed_query_is_resumed_from_what_its_stages_have_left(opened: OpenedEngine, bucket: str) -> None:
    request = request_of(bucket, "resumed", materialize="every-join")
    child = process(request)
    try:
        deadline = time.monotonic() + 150
        while not [path for path in objects(f"{bucket}/resumed/manifests") if path.endswith(".json")]:
            assert child.poll() is None, child.communicate()[1][-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait(timeout=150)
    report = execute(replace(request, verify=True), opened=opened).report
    assert report.verified, report.verification
    assert [stage.status for stage in report.stages].count("reused") >= 1


def test_deleted_rows_are_left_out_by_tasks_of_whole_files_and_of_row_groups(
    opened: OpenedEngine, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "t"
    rows = [{"v": v, "w": v * 3 % 11, "p": max(0, (v - 4700) // 300)} for v in range(5900)]
    write_deltalake(
        table,
        pa.Table.from_pylist(rows),
        partition_by=["p"],  # files of 5000, 300, 300 and 300 rows
        configuration=DELETING,
        writer_properties=WriterProperties(max_row_group_size=1000),
    )
    (large,) = (table / "p=0").iterdir()
    assert pq.read_metadata(large).num_row_groups == 5
    gone = {"p=0": [1000, 1001, 1999, *range(4000, 4500), 4999], "p=2": [0, 299]}
    for folder, numbers in gone.items():
        delete_by_vector(table, 0, numbers, folder)
    fs, path = resolve(f"{bucket}/deleting/t")
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        with fs.open_output_stream(f"{path}/{file.relative_to(table)}") as out:
            out.write(file.read_bytes())
    monkeypatch.setattr(division, "_SMALLEST", 1)
    made: list[Cut] = []

    def cuts(relation: Relation, count: int, needed: Any) -> list[Cut]:
        found = whole(relation, count, needed)
        made.extend(found)
        return found

    whole = ranges.cuts
    monkeypatch.setattr(ranges, "cuts", cuts)
    deleted = {*gone["p=0"], *(5300 + number for number in gone["p=2"])}
    left = [row for row in rows if row["v"] not in deleted]
    asked = {  # the filters' columns are not all among those that are selected
        "SELECT sum(v) AS v FROM t WHERE w > 3": sum(row["v"] for row in left if row["w"] > 3),
        "SELECT count(*) AS v FROM t WHERE w = 3 AND v < 4400": sum(
            row["w"] == 3 and row["v"] < 4400 for row in left
        ),
    }
    for number, (sql, wanted) in enumerate(asked.items()):
        request = request_of(bucket, f"deleting-store-{number}", sql=sql)
        outcome = execute(replace(request, tables=f"{bucket}/deleting"), opened=opened)
        assert outcome.to_arrow().to_pylist() == [{"v": wanted}]
        assert all("native" in stage.note.split(", ") for stage in outcome.report.stages)
        assert max(stage.tasks for stage in outcome.report.stages) > 1
    cut = [some for one in made for some in one.rows if "/p=0/" in some.path]
    assert len(cut) > 1, "the large file is not divided"


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_results_are_written_into_tables_by_tasks_and_committed_by_metadata(
    opened: OpenedEngine,
    bucket: str,
    aws_emulator: "Emulator",
    tpch: str,
    format: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(division, "_SMALLEST", 1)
    # not through the network's threads here, for which Delta Lake's library leaves Python no time
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_emulator.url)
    said = s3_settings()
    for name, value in {
        "URI": f"sqlite:///{tmp_path}/catalog.db",
        "WAREHOUSE": f"{bucket}/warehouse",
        "S3__ENDPOINT": said["AWS_ENDPOINT_URL"],
        "S3__REGION": said["AWS_REGION"],
        "S3__ACCESS_KEY_ID": said["AWS_ACCESS_KEY_ID"],
        "S3__SECRET_ACCESS_KEY": said["AWS_SECRET_ACCESS_KEY"],
    }.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAKE__{name}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    catalog = load_catalog("lake")
    catalog.create_namespace("n")
    into = "iceberg://lake/n/orders" if format == "iceberg" else f"{bucket}/lake/orders"
    asked = (
        "SELECT o_orderkey AS k, o_orderdate AS day, o_orderstatus AS status, o_totalprice AS x FROM orders"
    )
    made = request_of(bucket, "into", sql=asked, into=into, into_partition=("status",))
    execute(made, opened=opened)
    rows = {
        row["o_orderkey"]: (row["o_orderdate"], row["o_orderstatus"], row["o_totalprice"])
        for row in pq.read_table(Path(tpch) / "orders.parquet").to_pylist()
    }

    def there() -> dict[Any, Any]:
        if format == "iceberg":
            found = catalog.load_table("n.orders").scan().to_arrow()
        else:
            found = DeltaTable(into, storage_options=s3_settings()).to_pyarrow_table()
        told = {row["k"]: (row["day"], row["status"], row["x"]) for row in found.to_pylist()}
        assert len(told) == found.num_rows
        return told

    assert there() == rows
    place = f"{bucket}/warehouse/n/orders" if format == "iceberg" else into
    files = [path for path in objects(place) if path.endswith(".parquet")]
    assert len(files) > len({status for _, status, _ in rows.values()}), "some tasks have written"

    changed = f"SELECT k, day, 'X' AS status, x FROM ({asked}) WHERE k < 1000"
    execute(replace(made, sql=changed, into_mode="merge", into_key=("k",), into_partition=()), opened=opened)
    assert there() == {k: (day, "X" if k < 1000 else status, x) for k, (day, status, x) in rows.items()}
    assert not [path for path in objects(place) if "/.ebbflow" in path], "nothing that tasks left"
    catalog.close()


def test_what_must_run_on_spark_sql_is_refused_with_the_jar_that_it_needs(
    opened: OpenedEngine, bucket: str
) -> None:
    told = r"hadoop-aws:3\.[0-9.]+, with the bundle of software\.amazon\.awssdk"
    with pytest.raises(EngineUnavailableError, match=told + r".*stages=spark \(--stages\) rules them out"):
        execute(request_of(bucket, "refused", stages="spark"), opened=opened)
    assert not objects(f"{bucket}/refused/data")
    lagged = "SELECT o_orderkey, lag(o_orderkey) OVER (ORDER BY o_orderkey) AS r FROM orders"
    with pytest.raises(EngineUnavailableError, match=told + ".* runs on Spark SQL, for .*not proven"):
        execute(request_of(bucket, "refused", sql=lagged), opened=opened)
