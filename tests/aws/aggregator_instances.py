"""Instances of this machine, as far as aggregators go."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tests.aws.cluster import Cluster

_SERVICE = "ebbflow.infra.aggregation.shared_process"
_PATIENCE = 150.0  # s; machines that run tests are busy


class AggregatorInstances:
    """What ``ebbflow-aggregator.service`` and the agent do on instances of a pool, in processes of this machine.

    Args:
        lab: whose pool it is.
        pool: name of it.
        cluster: in the ledger, whose trainings they serve.
        folder: for their files.
        environment: variables that differ from those of this process, such as that of the ledger.
    """

    def __init__(
        self,
        lab: Cluster,
        pool: str,
        cluster: str,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._lab, self._pool, self._cluster, self._folder = lab, pool, cluster, folder
        self._environment = os.environ | dict(environment or {})
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(0.3):
            there = {one["id"] for one in self._lab.nodes(self._pool) if one["state"] == "running"}
            for name in there - self.services.keys():
                files = [str(self._folder / f"{name}.{what}") for what in ("ended", "draining")]
                arguments = [name, self._cluster, "127.0.0.1", "1", name, *files]
                self.services[name] = subprocess.Popen(
                    [sys.executable, "-P", "-m", _SERVICE, *arguments], env=self._environment
                )
            for name in self.services.keys() - there:
                self.services[name].kill()

    def notice(self, name: str, seconds: float) -> None:
        """Interrupt an instance; its agent finds out, and finds out again after it was started again."""
        self._lab.account.interrupt([name], seconds)
        (self._folder / f"{name}.draining").write_text(repr(time.time() + seconds))
        for _ in range(2):
            self.services[name].send_signal(signal.SIGTERM)
            time.sleep(0.5)

    def close(self) -> None:
        """End all processes."""
        self._stop.set()
        self._thread.join(_PATIENCE)
        for one in self.services.values():
            one.kill()
            one.wait(_PATIENCE)
