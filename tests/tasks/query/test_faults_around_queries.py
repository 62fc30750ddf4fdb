"""Faults of what is around a query, on DuckDB: its process stands still, clocks jump, its store is out of reach."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.storage.files import locked
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.tasks.query.request import QueryRequest
from tests.chaos.faketime import FakeTime
from tests.chaos.proxy import Proxy
from tests.query_process import finished, process, until_a_stage_is_done
from tests.tasks.driving import FOUR_TABLES

if TYPE_CHECKING:
    from tests.aws.emulator import Emulator

pytestmark = pytest.mark.processes


@pytest.fixture(name="ask")
def _ask(tmp_path: Path, tpch_large: str) -> Callable[..., QueryRequest]:
    def ask(**options: Any) -> QueryRequest:
        chosen = {
            "engine": "duckdb",
            "materialize": "every-join",
            "store": str(tmp_path / "store"),
            "verify": True,
        }
        return QueryRequest(FOUR_TABLES, **({"tables": tpch_large} | chosen | options))

    return ask


Ask = Callable[..., QueryRequest]


@pytest.mark.slow
def test_a_query_whose_process_stands_still_for_a_while_is_right(ask: Ask) -> None:
    request = ask()
    child = process(request)
    try:
        until_a_stage_is_done(request, child)
        # a process that is stopped while it holds the store's lock, for milliseconds at a time, keeps it
        with locked(f"{request.store}/manifests/.lock", SystemClock()):
            child.send_signal(signal.SIGSTOP)
        other = finished(process(request))  # elsewhere, what stands still keeps nobody from the store
        child.send_signal(signal.SIGCONT)
        report = finished(child)
    finally:
        child.kill()
        child.communicate(timeout=150)
    assert report["verified"]
    assert other["verified"]
    assert not report["problems"] + other["problems"]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_a_clock_that_jumps_by_an_hour_while_a_query_runs_changes_no_answer_and_loses_no_checkpoint(
    ask: Ask, tmp_path: Path, seconds: float
) -> None:
    request, clock = ask(), FakeTime(tmp_path / "clock", seconds)
    child = process(request, clock.environment)
    try:
        until_a_stage_is_done(request, child)
        clock.jump(-seconds)
        assert finished(child)["verified"]
    finally:
        child.kill()
        child.communicate(timeout=150)
    again = finished(process(request))  # by the machine's own clock
    assert again["verified"]
    assert {status for _, status in again["stages"]} == {"reused"}
    assert not again["problems"]


# --- a store on S3, with a network between ------------------------------------------------------------------


@pytest.fixture(name="network")
def _network(aws_emulator: "Emulator") -> Iterator[Proxy]:
    with Proxy(httpx.URL(aws_emulator.url).port or 80) as proxy:
        yield proxy


def _environment(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture(name="bucket")
def _bucket(aws_emulator: "Emulator", monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    for name, value in _environment(httpx.URL(aws_emulator.url).port or 80).items():
        monkeypatch.setenv(name, value)
    name = f"around-{os.getpid()}-{request.node.name[-6:].strip('[]')}"
    httpx.put(f"{aws_emulator.url}/{name}", timeout=20).raise_for_status()
    return f"s3://{name}/store"


def _checkpoints(bucket: str) -> set[str]:
    return {
        checkpoint.fingerprint for checkpoint in ParquetCheckpointStore(StorageLocation(bucket)).checkpoints()
    }


@pytest.mark.slow
def test_a_slow_network_to_the_store_delays_a_query_and_changes_nothing(
    ask: Ask, network: Proxy, bucket: str, tpch: str
) -> None:
    network.set("slow")
    report = finished(process(ask(store=bucket, tables=tpch), _environment(network.port)))
    assert report["verified"]
    assert not report["problems"]


def test_a_query_that_loses_its_store_ends_with_the_reason_and_goes_on_from_what_it_had(
    ask: Ask, network: Proxy, bucket: str
) -> None:
    request = ask(store=bucket)
    child = process(request, _environment(network.port))
    try:
        while not (kept := _checkpoints(bucket)):
            assert child.poll() is None, child.communicate()[1][-3000:]
        network.set("cut")
        _, said = child.communicate(timeout=240)  # within a bound
        network.set("open")
    finally:
        child.kill()
        child.communicate(timeout=150)
    if child.returncode == 0:
        pytest.fail("it ended before the network was lost")
    last = said.strip().splitlines()[-1]
    assert "StorageError" in last, said[-3000:]
    assert bucket.removeprefix("s3://").split("/")[0] in last
    kept = _checkpoints(bucket)
    report = finished(process(request, _environment(network.port)))
    assert report["verified"]
    assert {fp for fp, status in report["stages"] if status == "reused"} <= kept
    assert not {fp for fp, status in report["stages"] if status == "completed"} & kept
