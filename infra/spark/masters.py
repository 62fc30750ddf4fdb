"""The standalone master behind a URL, and the executors that suit its workers."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import StageCancelledError
from ebbflow.infra.spark.cluster.state import find_cluster
from ebbflow.infra.spark.master_api import get_master, new_client
from ebbflow.infra.spark.settings import ExecutorShape, addresses, executor_memory, executor_shape
from ebbflow.planners.errors import OptionError

_TIMEOUT = 2.0  # seconds
_AGAIN = 1.0  # seconds between looks for a first worker
_UI_PORT = "8080"  # Spark's default


@dataclass(frozen=True, slots=True)
class Master:
    """A standalone master that answers, and the smallest of its workers."""

    url: str  # "spark://host:port", the same for all who mean this master
    ui: str
    cores: int
    memory: float  # GiB


def find_master(
    url: str,
    conf: Mapping[str, str] | None = None,
    *,
    wait: float = 0.0,
    clock: Clock | None = None,
    note: Callable[[str], object] = lambda _: None,
    stop: threading.Event | None = None,
) -> Master | None:
    """Return the master behind a ``spark://`` URL; ``None`` for others, and where its pages do not answer.

    A local cluster's state file tells where they are; elsewhere they are taken to be at the master's host and
    ``spark.master.ui.port`` (8080), and are believed only if they name this URL. What executors suit is known once
    there is a worker: a master that has none yet gets ``wait`` seconds for the first, of which ``note`` is told.
    Raises ``StageCancelledError`` where ``stop`` is set meanwhile.
    """
    state = find_cluster(url) if url.startswith("spark://") else None
    if state is not None:
        return Master(state.master_url, state.master_ui, state.cores, state.memory / 1024)
    clock, stop = clock or SystemClock(), stop or threading.Event()
    end, told = clock.now() + wait, False
    while True:
        master, answers = _asked(url, conf)
        if master is not None or not answers:
            return master
        if clock.now() >= end:
            if told:
                note(f"{url} has had no worker for {wait:g} s; continuing with Spark's default executors")
            return None
        if not told:
            told = True
            note(f"waiting for the first worker of {url}, at most {wait:g} s")
        if clock.wait(stop, _AGAIN):
            raise StageCancelledError(f"stopped on request, waiting for the first worker of {url}")


def _asked(url: str, conf: Mapping[str, str] | None) -> tuple[Master | None, bool]:
    """Return the master behind a URL, once it has workers, and whether it answers."""
    answers = False
    port = (conf or {}).get("spark.master.ui.port", _UI_PORT)
    with new_client(_TIMEOUT) as client:
        for host, number in addresses(url):
            ui = f"http://{host}:{port}"
            try:
                view = get_master(client, ui)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError):
                continue
            answers = answers or view.url == f"spark://{host}:{number}"
            alive = [w for w in view.workers if w.state == "ALIVE"]
            if view.url == f"spark://{host}:{number}" and alive:
                least = min(w.cores for w in alive), min(w.memory for w in alive) / 1024
                return Master(view.url, ui, *least), True
    return None, answers


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
