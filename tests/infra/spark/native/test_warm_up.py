"""Python workers that are asked, and import what native tasks need, before the first of them; no Spark."""

import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.infra.errors import StageCancelledError
from ebbflow.infra.spark.master_api import Executor
from ebbflow.infra.spark.native import probe, stages
from ebbflow.infra.spark.native.probe import DAEMON, WarmUp, warmed

WAIT = 150.0


def executor(name: str, cores: int = 2, *, active: bool = True) -> Executor:
    return Executor(name, "10.0.0.1", active, cores, 1 << 30)


@dataclass
class Context:
    """A SparkContext whose jobs ``before`` may hold up or end by an error."""

    before: Callable[[int], None] = lambda tasks: None
    jobs: list[int] = field(default_factory=list)  # tasks of each
    groups: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    applicationId: str = field(default_factory=lambda: uuid.uuid4().hex)
    conf: dict[str, str] = field(default_factory=dict)

    def getConf(self) -> Any:
        return SimpleNamespace(get=self.conf.get)

    def setJobGroup(self, group: str, *_: object, **__: object) -> None:
        self.groups.append(group)

    def cancelJobGroup(self, group: str) -> None:
        self.cancelled.append(group)

    def parallelize(self, values: range, count: int) -> Any:
        def collect() -> list[bool]:
            with self.changed:
                self.jobs.append(count)
                self.changed.notify_all()
            self.before(count)
            return [True] * count

        rdd = SimpleNamespace(collect=collect)
        return SimpleNamespace(mapPartitionsWithIndex=lambda function: rdd if function is warmed else None)

    def until(self, jobs: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.jobs) >= jobs, WAIT)


def test_each_executor_that_comes_is_warmed_up_once_in_all_its_slots() -> None:
    context = Context()
    warm_up = WarmUp(context, lambda closed: "")
    warm_up.see([executor("driver"), executor("0", active=False)])
    warm_up.see([executor("0"), executor("1")])
    context.until(1)
    for _ in range(3):
        warm_up.see([executor("0"), executor("1")])
    warm_up.see([executor("1"), executor("2", 3)])
    context.until(2)
    warm_up.close()
    warm_up.see([executor("3")])
    assert context.jobs == [4, 5]


def test_another_engine_of_the_application_warms_up_only_those_that_are_not_warm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context, now = Context(), [1000.0]
    monkeypatch.setattr(probe.time, "monotonic", lambda: now[0])
    for engine, jobs in enumerate(([2], [2], [2, 4], [2, 4, 4])):
        if engine == 3:
            now[0] += 60.0  # Spark has ended idle workers
        warm_up = WarmUp(context, lambda closed: "")
        warm_up.see([executor("0"), executor("1")] if engine > 1 else [executor("0")])
        thread = warm_up._thread
        if thread is not None:
            thread.join(WAIT)
        assert context.jobs == jobs
        warm_up.close()


def test_workers_of_a_daemon_that_has_their_imports_are_warmed_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context, now = Context(conf={"spark.python.daemon.module": DAEMON}), [1000.0]
    monkeypatch.setattr(probe.time, "monotonic", lambda: now[0])
    for _ in range(2):
        warm_up = WarmUp(context, lambda closed: "")
        warm_up.see([executor("0")])
        if (thread := warm_up._thread) is not None:
            thread.join(WAIT)
        warm_up.close()
        now[0] += 60.0
    assert context.jobs == [2]


def test_sparks_daemon_forks_workers_that_have_their_imports_and_has_no_thread_of_its_own() -> None:
    kept = ("PATH", "HOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "LANG")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    daemon = subprocess.Popen(
        [sys.executable, "-m", DAEMON, "pyspark.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment | {"PYTHON_WORKER_FACTORY_SECRET": "secret"},
    )
    try:
        assert daemon.stdout is not None
        (port,) = struct.unpack("!i", daemon.stdout.read(4))
        assert len(os.listdir(f"/proc/{daemon.pid}/task")) == 1
        with socket.create_connection(("127.0.0.1", port), WAIT) as worker:
            (pid,) = struct.unpack("!i", worker.recv(4, socket.MSG_WAITALL))
            mapped = Path(f"/proc/{pid}/maps").read_text()
            assert "_duckdb" in mapped, "the worker has it without a task"
    finally:
        daemon.stdin.close() if daemon.stdin else None  # how Spark ends its daemon
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(WAIT)
        daemon.kill()


def test_whoever_sees_executors_waits_for_nothing_and_a_slow_job_ends_with_the_engine() -> None:
    released = threading.Event()
    context = Context(lambda tasks: released.wait(WAIT) and None)
    warm_up = WarmUp(context, lambda closed: "")
    warm_up.see([executor("0")])
    context.until(1)
    warm_up.see([executor("0"), executor("1")])
    assert context.jobs == [2]
    warm_up.close()
    released.set()
    assert set(context.cancelled) == set(context.groups)
    assert len(context.cancelled) > 1, "Spark forgets what it is told before a job begins"


def test_an_engine_that_closes_ends_what_asks_an_executor_and_no_job_follows() -> None:
    context, asked, told = Context(), threading.Event(), list[str]()

    def trouble(closed: threading.Event) -> str:
        told.extend(context.groups)
        asked.set()
        assert closed.wait(WAIT)
        return ""

    warm_up = WarmUp(context, trouble)
    warm_up.see([executor("0")])
    assert asked.wait(WAIT)
    thread = warm_up._thread
    assert thread is not None
    warm_up.close()
    thread.join(WAIT)
    assert not thread.is_alive()
    assert told == context.groups == list(dict.fromkeys(context.cancelled)), "it asks in a group of its own"
    assert not context.jobs


def test_engines_of_one_application_ask_its_executors_once_and_whoever_waits_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: queue.Queue[str] = queue.Queue()
    answers: queue.Queue[str | None] = queue.Queue()

    def trouble(context: Any) -> str:
        asked.put(context.applicationId)
        if (answer := answers.get(timeout=WAIT)) is None:
            raise RuntimeError("its job was cancelled")
        return answer

    conf = SimpleNamespace(get=lambda key, default: default)
    context = SimpleNamespace(
        master="local[2]", getConf=lambda: conf, defaultParallelism=2, applicationId=uuid.uuid4().hex
    )
    monkeypatch.setattr(stages, "trouble", trouble)
    monkeypatch.setattr(stages, "_probed", {})
    engines = [stages.NativeStages(context, owned=False) for _ in range(3)]
    cancelled = [threading.Event() for _ in engines]
    with ThreadPoolExecutor(len(engines)) as pool:
        try:
            first = pool.submit(engines[0].trouble, cancelled[0])
            asked.get(timeout=WAIT)
            second, third = (pool.submit(engines[n].trouble, cancelled[n]) for n in (1, 2))
            cancelled[1].set()
            with pytest.raises(StageCancelledError):
                second.result(WAIT)
            assert not first.done()
            cancelled[0].set()
            answers.put(None)
            with pytest.raises(StageCancelledError):
                first.result(WAIT)
            answers.put("other versions")
            assert third.result(WAIT) == "other versions", "what was cancelled is no answer"
        finally:
            for _ in engines:
                answers.put("")
    assert asked.qsize() == 1
    assert engines[0].trouble(threading.Event()) == engines[1].known_trouble == "other versions"


def test_what_fails_is_nobodys_failure_and_the_next_executors_are_tried() -> None:
    failed = threading.Event()

    def fails(tasks: int) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("the executor is lost")

    context = Context(fails)
    warm_up = WarmUp(context, lambda closed: "")
    warm_up.see([executor("0")])
    context.until(1)
    warm_up.see([executor("1")])
    context.until(2)
    warm_up.close()


def test_executors_that_cannot_run_native_tasks_are_left_alone() -> None:
    asked = threading.Event()

    def trouble(closed: threading.Event) -> str:
        asked.set()
        return "executors have other versions"

    context = Context()
    warm_up = WarmUp(context, trouble)
    warm_up.see([executor("0")])
    assert asked.wait(WAIT)
    thread = warm_up._thread
    assert thread is not None
    thread.join(WAIT)
    warm_up.see([executor("1")])
    assert not context.jobs


def test_a_worker_tells_whether_it_has_imported_all(monkeypatch: Any) -> None:
    nothing: Iterator[Any] = iter(())
    assert list(warmed(0, nothing)) == [True]
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    assert list(warmed(0, nothing)) == [False]
