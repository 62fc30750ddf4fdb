"""Emulated S3 as slow as an object store far away, for this process and those that it starts."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.benchmarks.slow_proxy import SlowProxy
from tests.infra.memory.lenders import until


@contextmanager
def slow_s3(bucket: str) -> Iterator[None]:
    """Serve S3 with an empty bucket behind a ``SlowProxy`` within the block; the environment names it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    emulator = subprocess.Popen([sys.executable, "-m", "tests.aws.server", "--port", str(port)])
    try:
        until(lambda: _answers(port), 120)
        httpx.put(f"http://127.0.0.1:{port}/{bucket}", timeout=20).raise_for_status()
        with SlowProxy("127.0.0.1", port) as proxy:
            os.environ.update(
                {
                    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
                    "AWS_REGION": "us-east-1",
                    "AWS_ACCESS_KEY_ID": "testing",
                    "AWS_SECRET_ACCESS_KEY": "testing",
                    "AWS_EC2_METADATA_DISABLED": "true",
                }
            )
            yield
    finally:
        emulator.kill()
        emulator.wait(60)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
