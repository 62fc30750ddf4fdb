"""What a standalone master tells about its workers, and a driver about its executors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

import httpx

if TYPE_CHECKING:
    import ssl

WorkerState = Literal["ALIVE", "DECOMMISSIONED", "DEAD", "UNKNOWN"]
_RANK: Mapping[str, int] = {"ALIVE": 3, "DECOMMISSIONED": 2, "UNKNOWN": 1, "DEAD": 0}


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as the master sees it."""

    id: str
    host: str
    state: WorkerState
    cores: int
    cores_used: int
    memory: int  # MiB
    ui: str


@dataclass(frozen=True, slots=True)
class Application:
    """One running application as the master sees it."""

    id: str
    name: str
    cores: int  # of its executors
    age: float  # seconds since it registered


@dataclass(frozen=True, slots=True)
class MasterView:
    """What a master tells."""

    url: str  # "spark://host:port"
    workers: tuple[Worker, ...]
    applications: tuple[Application, ...]


@dataclass(frozen=True, slots=True)
class Executor:
    """One executor, or the driver, as the running application sees it."""

    id: str
    host: str
    active: bool
    cores: int
    max_memory: int  # bytes that execution and storage share (spark.memory.fraction of the heap)
    tasks: int = 0  # running now
    shuffled: int = 0  # bytes that it has written for others to read
    busy: float = 0.0  # seconds of tasks that it has run

    @property
    def driver(self) -> bool:
        return self.id == "driver"


def new_client(timeout: float) -> httpx.Client:
    """Return an HTTP client for addresses of the cluster; the user's proxies are not for these."""
    return httpx.Client(timeout=timeout, trust_env=False, follow_redirects=True, verify=_certificates())


@cache
def _certificates() -> "ssl.SSLContext":
    """Read the certificates once: that takes longer than a master's answer, and clients are made for each poll."""
    return httpx.create_ssl_context(trust_env=False)


def get_master(client: httpx.Client, master_ui: str) -> MasterView:
    """Ask the master. Raises ``httpx.HTTPError``, or ``ValueError`` for a foreign answer."""
    return parse_master(_get(client, f"{master_ui.rstrip('/')}/json/"))


def get_workers(client: httpx.Client, master_ui: str) -> list[Worker]:
    """Ask the master for its workers. Raises ``httpx.HTTPError``, or ``ValueError`` for a foreign answer."""
    return parse_workers(_get(client, f"{master_ui.rstrip('/')}/json/"))


def get_executors(
    client: httpx.Client, ui: str, application: str, timeout: float | None = None
) -> list[Executor]:
    """Ask the driver for its executors. Raises ``httpx.HTTPError``, ``ValueError`` for a foreign answer."""
    url = f"{ui.rstrip('/')}/api/v1/applications/{application}/executors"
    return parse_executors(_get(client, url, timeout))


def _get(client: httpx.Client, url: str, timeout: float | None = None) -> object:
    answer = client.get(url, timeout=httpx.USE_CLIENT_DEFAULT if timeout is None else timeout)
    answer.raise_for_status()
    try:
        return cast(object, answer.json())
    except ValueError as error:
        raise ValueError(f"no JSON, but {answer.text[:80]!r}") from error


def parse_master(payload: object) -> MasterView:
    """Read the master's ``/json/``. Raises ``ValueError``."""
    workers = parse_workers(payload)
    assert isinstance(payload, Mapping)
    listed = payload.get("activeapps")
    return MasterView(
        url=str(payload.get("url", "")),
        workers=tuple(workers),
        applications=tuple(
            Application(
                str(entry.get("id", "")),
                str(entry.get("name", "")),
                int(entry.get("cores", 0)),
                float(entry.get("duration", 0)) / 1000,
            )
            for entry in (listed if isinstance(listed, list) else [])
            if isinstance(entry, Mapping)
        ),
    )


def parse_workers(payload: object) -> list[Worker]:
    """Read the master's ``/json/``. Raises ``ValueError``."""
    if not isinstance(payload, Mapping) or not isinstance(payload.get("workers"), list):
        raise ValueError("not a standalone master's answer: it has no list of workers")
    try:
        return [_worker(entry) for entry in payload["workers"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a worker in the master's answer lacks {error}") from error


def _worker(entry: Mapping[str, Any]) -> Worker:
    state = str(entry["state"])
    return Worker(
        id=str(entry["id"]),
        host=str(entry["host"]),
        state=cast(WorkerState, state if state in _RANK else "UNKNOWN"),
        cores=int(entry["cores"]),
        cores_used=int(entry.get("coresused", 0)),
        memory=int(entry["memory"]),
        ui=str(entry.get("webuiaddress", "")),
    )


def parse_executors(payload: object) -> list[Executor]:
    """Read the REST API's list of executors. Raises ``ValueError``."""
    if not isinstance(payload, list):
        raise ValueError("not a list of executors")
    try:
        return [_executor(entry) for entry in payload]
    except (KeyError, TypeError) as error:
        raise ValueError(f"an executor in the driver's answer lacks {error}") from error


def _executor(entry: Mapping[str, Any]) -> Executor:
    return Executor(
        id=str(entry["id"]),
        host=str(entry["hostPort"]).rsplit(":", 1)[0],
        active=bool(entry["isActive"]) and not entry.get("isExcluded", False),
        cores=int(entry["totalCores"]),
        max_memory=int(entry["maxMemory"]),
        tasks=int(entry.get("activeTasks", 0)),
        shuffled=int(entry.get("totalShuffleWrite", 0)),
        busy=float(entry.get("totalDuration", 0)) / 1e3,
    )


def states_by_host(workers: Iterable[Worker]) -> dict[str, WorkerState]:
    """Return each host's state. A master lists dead workers too, so a host's liveliest one counts."""
    states: dict[str, WorkerState] = {}
    for worker in workers:
        if worker.host not in states or _RANK[worker.state] > _RANK[states[worker.host]]:
            states[worker.host] = worker.state
    return states
