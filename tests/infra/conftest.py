"""Storage to test against: a folder, and S3 over HTTP from the emulated AWS."""

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from tests.aws.emulator import Emulator


@pytest.fixture(scope="session")
def s3_endpoint(aws_emulator: "Emulator") -> str:
    """Return the URL of S3 for the session."""
    return aws_emulator.url


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
        httpx.put(
            f"{s3_endpoint}/{bucket}", timeout=20, verify=False
        ).raise_for_status()  # nothing to verify with
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
