"""The standalone master behind a URL, and the executors that suit its workers."""

from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from ebbflow.infra.spark.cluster.state import find_cluster
from ebbflow.infra.spark.master_api import get_master, new_client
from ebbflow.infra.spark.settings import ExecutorShape, addresses, executor_memory, executor_shape
from ebbflow.planners.errors import OptionError

_TIMEOUT = 2.0  # seconds
_UI_PORT = "8080"  # Spark's default


@dataclass(frozen=True, slots=True)
class Master:
    """A standalone master that answers, and the smallest of its workers."""

    url: str  # "spark://host:port", the same for all who mean this master
    ui: str
    cores: int
    memory: float  # GiB


def find_master(url: str, conf: Mapping[str, str] | None = None) -> Master | None:
    """Return the master behind a ``spark://`` URL; ``None`` for others, and where its pages do not answer.

    A local cluster's state file tells where they are; elsewhere they are taken to be at the master's host and
    ``spark.master.ui.port`` (8080), and are believed only if they name this URL.
    """
    state = find_cluster(url) if url.startswith("spark://") else None
    if state is not None:
        return Master(state.master_url, state.master_ui, state.cores, state.memory / 1024)
    port = (conf or {}).get("spark.master.ui.port", _UI_PORT)
    with new_client(_TIMEOUT) as client:
        for host, number in addresses(url):
            ui = f"http://{host}:{port}"
            try:
                view = get_master(client, ui)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError):
                continue
            alive = [w for w in view.workers if w.state == "ALIVE"]
            if view.url == f"spark://{host}:{number}" and alive:
                return Master(view.url, ui, min(w.cores for w in alive), min(w.memory for w in alive) / 1024)
    return None


def executors_for(
    master: Master | None, conf: Mapping[str, str] | None = None, heap: str | None = None
) -> ExecutorShape | None:
    """Return the executors for an application on ``master``; what ``conf`` and ``heap`` say already wins.

    ``None`` without a master: Spark's defaults hold then. Raises ``OptionError``.
    """
    if master is None:
        return None
    conf = conf or {}
    shape = executor_shape(master.cores, master.memory)
    cores, heap = conf.get("spark.executor.cores"), heap or conf.get("spark.executor.memory")
    if cores is not None:
        if not cores.isdigit() or int(cores) < 1:
            raise OptionError(f"spark.executor.cores must be a whole number >= 1; got {cores!r}")
        count = max(1, master.cores // int(cores))
        shape = ExecutorShape(int(cores), executor_memory(master.memory / count))
    return ExecutorShape(shape.cores, heap) if heap else shape
