"""What Spark's status API knows about a group of jobs."""

import http.client
import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from ebbflow.infra.clock import Clock

_TIMEOUT = 30.0  # seconds per request; the first one of a driver on a busy machine has taken over 10
_SETTLE = 10.0  # seconds that the status API may lag behind the scheduler
_LEAST_PAUSE, _PAUSE = 0.005, 0.05  # seconds between two questions: at first, and at last
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """One failed attempt of a task."""

    stage: int
    index: int  # of the task in its stage
    attempt: int  # of the stage
    message: str
    seconds: float  # between launch and failure


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """Sums over all attempts of all stages of a job group."""

    task_seconds: float = 0.0
    tasks: int = 0
    failed_tasks: int = 0
    retried_stages: int = 0
    shuffle_bytes: int = 0  # written to shuffle files
    spilled_bytes: int = 0  # written to disk for lack of memory
    input_bytes: int = 0


class StatusApi:
    """A client of ``/api/v1`` of one application. Safe for several threads: each call has its connection."""

    def __init__(self, ui_url: str, application_id: str) -> None:
        parts = urlsplit(ui_url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or 80
        self._base = f"{parts.path.rstrip('/')}/api/v1/applications/{quote(application_id)}"

    def get(self, paths: Iterable[str]) -> list[Any]:
        """Return the JSON answers to ``paths`` (below the application), ``None`` for what does not exist.

        Raises ``OSError`` when the driver cannot be asked.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT)
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return [self._one(connection, path) for path in paths]
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(f"Spark's status API answered nonsense: {error}") from error
        finally:
            connection.close()

    def _one(self, connection: http.client.HTTPConnection, path: str) -> Any:
        connection.request("GET", f"{self._base}/{path}", headers={"Accept": "application/json"})
        response = connection.getresponse()
        body = response.read()
        if response.status == http.client.NOT_FOUND:
            return None
        if response.status != http.client.OK:
            raise OSError(f"Spark's status API answered {response.status} to {path}")
        return json.loads(body)

    def attempts(self, stages: Iterable[int]) -> list[dict[str, Any]]:
        """Return every attempt of ``stages`` that was submitted."""
        answers = self.get(f"stages/{stage}" for stage in stages)
        return [
            attempt for answer in answers if answer for attempt in answer if attempt["status"] != "SKIPPED"
        ]

    def failures(self, attempts: Iterable[tuple[int, int]]) -> list[TaskFailure]:
        """Return the failed and killed tasks of (stage, attempt) pairs."""
        pairs = list(attempts)
        answers = self.get(f"stages/{s}/{a}/taskList?status=failed&length={_PAGE}" for s, a in pairs)
        return [
            TaskFailure(
                stage, task["index"], attempt, task.get("errorMessage", ""), task.get("duration", 0) / 1e3
            )
            for (stage, attempt), answer in zip(pairs, answers, strict=True)
            for task in answer or ()
        ]


def group_metrics(api: StatusApi, stages: Iterable[int], clock: Clock) -> GroupMetrics:
    """Sum up the finished ``stages``. Waits up to ten seconds until the API has seen them finish."""
    wanted = sorted(set(stages))
    attempts = api.attempts(wanted)
    deadline, pause = clock.now() + _SETTLE, _LEAST_PAUSE
    while any(a["status"] == "ACTIVE" for a in attempts) and clock.now() < deadline:
        clock.sleep(pause)  # mostly it lags by milliseconds
        pause = min(2 * pause, _PAUSE)
        attempts = api.attempts(wanted)
    torn = [(a["stageId"], a["attemptId"]) for a in attempts if a["numFailedTasks"]]
    # Spark sums run times when a task reports; one whose executor vanished never does.
    lost = sum(f.seconds for f in api.failures(torn) if f.message.startswith("ExecutorLostFailure"))
    return GroupMetrics(
        # a new executor loads most of its classes before a task counts as running
        task_seconds=sum(a["executorRunTime"] + a.get("executorDeserializeTime", 0) for a in attempts) / 1e3
        + lost,
        tasks=sum(a["numCompleteTasks"] + a["numFailedTasks"] + a.get("numKilledTasks", 0) for a in attempts),
        failed_tasks=sum(a["numFailedTasks"] for a in attempts),
        retried_stages=sum(1 for a in attempts if a["attemptId"] > 0),
        shuffle_bytes=sum(a["shuffleWriteBytes"] for a in attempts),
        spilled_bytes=sum(a["diskBytesSpilled"] for a in attempts),
        input_bytes=sum(a["inputBytes"] for a in attempts),
    )
