"""Storage to test against: a folder, and S3 over HTTP from moto."""

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run moto's server for the session and return its URL."""
    pytest.importorskip("moto")
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    httpx.get(f"{endpoint}/moto-api/", timeout=5)
                    break
                except httpx.HTTPError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        pytest.fail(f"moto did not start: {log.read_text()[-2000:]}")
                    time.sleep(0.1)
            yield endpoint
        finally:
            server.terminate()
            server.wait(timeout=20)


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Point the AWS environment at moto; return a function that makes a new bucket and returns its URI."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def new_bucket() -> str:
        bucket = f"ebbflow-{os.getpid()}-{next(_buckets)}"
        httpx.put(f"{s3_endpoint}/{bucket}", timeout=20).raise_for_status()
        return f"s3://{bucket}"

    return new_bucket


_buckets = itertools.count()


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URI of a place to write in, once per kind of storage."""
    if request.param == "local":
        return f"{tmp_path}/place"
    new_bucket: Callable[[], str] = request.getfixturevalue("s3")
    return f"{new_bucket()}/place"


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now: float) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += max(0.0, seconds)

    def wait(self, event: object, timeout: float) -> bool:
        self.time += max(0.0, timeout)
        return False


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(time.time())
