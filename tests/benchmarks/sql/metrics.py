"""What one run cost, from Spark's own status API: the same arithmetic for every system compared.

Definitions:

* A task's time is the time for which it held a core, launch to end on the driver's clock (``duration``); of a
  task that vanished with its executor and has none, the time to the end of the run.
* *Useful* is the time of the last successful task for each partition of each distinct piece of work, if the
  statement that it belongs to contributed to the result. Pieces of work are told apart by the data sets that
  a stage computes (``rddIds``), because Spark runs a lost stage again under another number too.
* *Wasted* is all other task time: failed and killed tasks, tasks whose output was lost and computed again,
  and everything of statements that were cancelled, failed, run again, or whose output no later one read.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.spark.metrics import StatusApi

_SETTLE = 20.0  # seconds that cancelled tasks may take to end
_LOOK = 0.2
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([\d.,]+) (ms|s|min|m|h)\b")
_BROADCAST_TIMES = ("time to collect", "time to build", "time to broadcast")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one run; seconds and bytes."""

    wall: float
    planning: float  # from the text's hand-over until Spark's first job
    idle: float  # after that, with no stage running: planning in between, committing, waiting
    task_seconds: float
    wasted: float  # of ``task_seconds``
    tasks: int
    failed_tasks: int  # failed or killed
    jobs: int
    stages: int  # attempts that ran
    retried: int  # stage attempts after the first
    waiting: float  # summed over stages, from submission to the first task
    scheduler_delay: float  # summed over tasks
    deserialize: float  # summed over tasks: reading code and closures
    run: float  # summed over tasks: in user code, waiting for shuffles included
    cpu: float  # summed over tasks
    gc: float
    fetch_wait: float  # summed over tasks: waiting for shuffle blocks
    broadcast: float  # summed over broadcasts: collect, build and send
    input_bytes: int
    shuffle_bytes: int  # written
    spilled_bytes: int  # to disk
    output_bytes: int

    @property
    def useful(self) -> float:
        return self.task_seconds - self.wasted


@dataclass(frozen=True)
class ApiSnapshot:
    """Answers of the status API about one run."""

    jobs: Sequence[Mapping[str, Any]]
    stages: Sequence[Mapping[str, Any]]  # attempts that ran, each with its "tasks"
    executions: Sequence[Mapping[str, Any]]  # SQL statements with their plan's "nodes"


class Window:
    """What an application does between its making and ``close``, which nobody else may be using meanwhile."""

    def __init__(self, api: StatusApi, clock: Clock) -> None:
        self._api = api
        self._clock = clock
        jobs, executions = self._list()
        self._job = max((j["jobId"] for j in jobs), default=-1)
        self._execution = max((e["id"] for e in executions), default=-1)

    def close(self) -> ApiSnapshot:
        """Wait, bounded, until nothing runs any more, and return what happened. Raises ``OSError``."""
        quiet(self._api, self._clock, _SETTLE)
        jobs, executions = self._list(details=True)
        mine = [j for j in jobs if j["jobId"] > self._job]
        stages = sorted({s for j in mine for s in j["stageIds"]})
        answers = self._api.get(f"stages/{s}?details=true" for s in stages)
        attempts = [
            a for answer in answers for a in answer or () if a["status"] not in ("SKIPPED", "PENDING")
        ]
        return ApiSnapshot(mine, attempts, [e for e in executions if e["id"] > self._execution])

    def _list(self, details: bool = False) -> tuple[list[Any], list[Any]]:
        sql = f"sql?details={str(details).lower()}&planDescription=false&length=1000"
        jobs, executions = self._api.get(["jobs", sql])
        return jobs or [], executions or []


def quiet(api: StatusApi, clock: Clock, timeout: float) -> bool:
    """Wait until no stage is active, at most ``timeout`` seconds; return whether that was reached."""
    end = clock.now() + timeout
    while True:
        (active,) = api.get(["stages?status=active"])
        if not active:
            return True
        if clock.now() >= end:
            return False
        clock.sleep(_LOOK)


def measure(
    raw: ApiSnapshot, began: float, ended: float, *, useful: Callable[[str], bool] = lambda group: True
) -> Metrics:
    """Return the figures of a run from ``began`` to ``ended`` (seconds since the Unix epoch).

    ``useful(job group)`` tells whether a statement contributed to the result.
    """
    group_of = {stage: job.get("jobGroup", "") for job in raw.jobs for stage in job["stageIds"]}
    total, wasted = _task_seconds(raw.stages, ended, lambda s: useful(group_of.get(s, "")))
    tasks = [t for s in raw.stages for t in s.get("tasks", {}).values()]
    first = min((at for j in raw.jobs if (at := seconds(j.get("submissionTime"))) is not None), default=ended)
    first = min(max(first, began), ended)
    spans = [_span(s, ended) for s in raw.stages]
    return Metrics(
        wall=ended - began,
        planning=first - began,
        idle=(ended - first) - covered(((max(a, first), min(b, ended)) for a, b in spans)),
        task_seconds=total,
        wasted=wasted,
        tasks=len(tasks),
        failed_tasks=sum(t["status"] in ("FAILED", "KILLED") for t in tasks),
        jobs=len(raw.jobs),
        stages=len(raw.stages),
        retried=sum(s["attemptId"] > 0 for s in raw.stages),
        waiting=sum(
            max(0.0, launched - submitted)
            for s in raw.stages
            if (launched := seconds(s.get("firstTaskLaunchedTime"))) is not None
            and (submitted := seconds(s.get("submissionTime"))) is not None
        ),
        scheduler_delay=sum(t.get("schedulerDelay", 0) for t in tasks) / 1e3,
        deserialize=_sum(raw.stages, "executorDeserializeTime") / 1e3,
        run=_sum(raw.stages, "executorRunTime") / 1e3,
        cpu=_sum(raw.stages, "executorCpuTime") / 1e9,
        gc=_sum(raw.stages, "jvmGcTime") / 1e3,
        fetch_wait=_sum(raw.stages, "shuffleFetchWaitTime") / 1e3,
        broadcast=_broadcast(raw.executions),
        input_bytes=_sum(raw.stages, "inputBytes"),
        shuffle_bytes=_sum(raw.stages, "shuffleWriteBytes"),
        spilled_bytes=_sum(raw.stages, "diskBytesSpilled"),
        output_bytes=_sum(raw.stages, "outputBytes"),
    )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > max(start, end):
            total += stop - max(start, end)
            end = stop
    return total


def seconds(moment: str | None) -> float | None:
    """Return a moment of the status API, ``2026-01-31T12:00:00.123GMT``, in seconds since the Unix epoch."""
    if not moment:
        return None
    return datetime.strptime(moment, "%Y-%m-%dT%H:%M:%S.%fGMT").replace(tzinfo=UTC).timestamp()


def duration(text: str) -> float:
    """Return a time as SQL metrics show it, in seconds; the total comes last line's first.

    >>> duration("240 ms"), duration("total (min, med, max)\\n1.5 s (1 ms, 2 ms, 3 ms)")
    (0.24, 1.5)
    """
    found = _DURATION.search(text.rsplit("\n", 1)[-1])
    return float(found.group(1).replace(",", "")) * _UNITS[found.group(2)] if found else 0.0


def contributing(
    outputs: Mapping[str, str], inputs: Mapping[str, Collection[str]], result: Collection[str]
) -> frozenset[str]:
    """Return the statements whose output the result rests on, by following what each one read.

    ``outputs`` maps a statement to the folder that it wrote, if it succeeded, and ``inputs`` to the files
    that it read; ``result`` is the folder or the files that hold the result.
    """
    found: set[str] = set()
    wanted = list(result)
    while wanted:
        place = wanted.pop()
        for statement, folder in outputs.items():
            if statement not in found and _inside(place, folder):
                found.add(statement)
                wanted.extend(inputs.get(statement, ()))
    return frozenset(found)


def _inside(path: str, folder: str) -> bool:
    folder = folder.rstrip("/")
    return path.rstrip("/") == folder or path.startswith(folder + "/")


def _task_seconds(
    stages: Iterable[Mapping[str, Any]], ended: float, useful: Callable[[int], bool]
) -> tuple[float, float]:
    """Return all task time and the wasted part of it."""
    total = wasted = 0.0
    done: defaultdict[tuple[tuple[int, ...], int], list[tuple[float, float]]] = defaultdict(list)
    for stage in stages:
        work = tuple(sorted(stage.get("rddIds", (-1 - stage["stageId"],))))
        for task in stage.get("tasks", {}).values():
            launched = seconds(task.get("launchTime")) or ended
            spent = task["duration"] / 1e3 if "duration" in task else max(0.0, ended - launched)
            total += spent
            if task["status"] == "SUCCESS" and useful(stage["stageId"]):
                done[work, task.get("partitionId", task["index"])].append((launched, spent))
            else:
                wasted += spent
    for attempts in done.values():
        wasted += sum(spent for _, spent in sorted(attempts)[:-1])
    return total, wasted


def _span(stage: Mapping[str, Any], ended: float) -> tuple[float, float]:
    start = seconds(stage.get("submissionTime"))
    stop = seconds(stage.get("completionTime"))
    stop = ended if stop is None else stop
    return (stop if start is None else start, stop)


def _sum(stages: Iterable[Mapping[str, Any]], key: str) -> int:
    return sum(int(s.get(key, 0)) for s in stages)


def _broadcast(executions: Iterable[Mapping[str, Any]]) -> float:
    return sum(
        duration(metric["value"])
        for execution in executions
        for node in execution.get("nodes", ())
        if node["nodeName"] == "BroadcastExchange"
        for metric in node.get("metrics", ())
        if metric["name"] in _BROADCAST_TIMES
    )
