"""A server of Spark Connect. Where its client is not installed nothing here is collected: make connect."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = ["*"] if find_spec("grpc_status") is None else []

_START = 150.0  # seconds


class ConnectServer:
    """A process of Spark's own server, with two cores of this machine."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.port = port or _free_port()
        self.url = f"sc://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        import pyspark

        from ebbflow.infra.spark.java import find_java

        home = Path(pyspark.__file__).parent
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.local.dir": str(self.folder / "local"),
        }
        command = [str(home / "bin" / "spark-submit"), "--master", "local[2]", "--driver-memory", "1g"]
        for key, value in settings.items():
            command += ["--conf", f"{key}={value}"]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        environment = {**os.environ, "JAVA_HOME": str(find_java().home), "SPARK_HOME": str(home)}
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "server.log").open("ab"),
        )
        deadline = time.monotonic() + _START
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.2)

    def kill(self) -> None:
        """End it at once."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=30)

    def stop(self) -> None:
        """End it if it runs."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0):
                return True
        except OSError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """Return a server that runs; a test that ends it starts it again."""
    found = ConnectServer(tmp_path_factory.mktemp("connect"))
    found.start()
    try:
        yield found
    finally:
        found.stop()
