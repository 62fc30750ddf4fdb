"""Whether executors can run native stages, and what their Python workers import before the first one.

Executors get this module's source to be asked, since they may not have it. Run as a program it is Spark's daemon of
Python workers (``DAEMON``).
"""

import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol

_LONGEST = 60.0  # s that workers may take for their imports
_CLOSING = 10  # times that what runs is cancelled...
_IDLE = 50.0  # s after which Spark may soon end workers that it has nothing for
_AGAIN = 0.1  # ...each so many s after the last one: Spark forgets what it was told before a job begins
DAEMON = "ebbflow.infra.spark.native.probe"
"""Value of ``spark.python.daemon.module`` where executors have this package for certain: without it they would have
no Python at all. Spark ends workers that it has nothing for after a minute, and this daemon forks others that have
their imports done."""
_log = logging.getLogger(__name__)
_warmed: dict[tuple[str, str], float] = {}  # when, by application and executor


def versions(_: int, __: Iterator[Any]) -> Iterator[dict[str, str]]:
    """Yield the versions of what a native stage needs on an executor."""
    from importlib import metadata

    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in ("duckdb", "pyarrow", "prefect-ebbflow"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    yield found


def trouble(context: Any) -> str:
    """Return why the executors of ``context`` cannot run native stages; empty if they can. Raises Spark's errors."""
    from pyspark import cloudpickle

    here = next(versions(0, iter(())))
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        (there,) = context.parallelize([0], 1).mapPartitionsWithIndex(versions).collect()
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    unlike = [f"{name} {there[name]}, here {here[name]}" for name in here if there[name] != here[name]]
    return f"executors have other versions: {', '.join(unlike)}" if unlike else ""


def warmed(_: int, __: Iterator[Any]) -> Iterator[bool]:
    """Import what tasks of native stages need; what Spark calls. Yield whether that could be done."""
    try:
        from ebbflow.infra.spark.native.worker import warm_up

        warm_up()
    except Exception:  # the first task that needs it tells
        yield False
    else:
        yield True


class Executor(Protocol):
    """What is known of an executor; see ``infra.spark.master_api``."""

    @property
    def id(self) -> str: ...
    @property
    def active(self) -> bool: ...
    @property
    def driver(self) -> bool: ...
    @property
    def cores(self) -> int: ...


class WarmUp:
    """Has the Python workers of executors that come import what native tasks need, one for each of their slots.

    By a Spark job in a thread of its own, for which nobody waits and which tells nobody what fails: a task that
    comes to a worker without its imports takes seconds longer. Spark gives each free slot one of the job's tasks.

    Args:
        context: whose executors they are.
        trouble: tells why none can run native tasks, for which it may ask one; empty if they can. What it is given
            is set when that is to end.
    """

    def __init__(self, context: Any, trouble: Callable[[threading.Event], str]) -> None:
        self._context = context
        self._application = str(context.applicationId)
        self._trouble = trouble
        self._forked = context.getConf().get("spark.python.daemon.module", "") == DAEMON
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._slots = 0  # to be warmed up
        self._thread: threading.Thread | None = None
        self._group = ""  # of the jobs that run
        self._closed = threading.Event()

    def see(self, executors: Iterable[Executor]) -> None:
        """Take note of the executors that there are; those not seen before are warmed up. Raises nothing."""
        present = {one.id: one.cores for one in executors if one.active and not one.driver}
        with self._lock:
            if self._closed.is_set() or present.keys() <= self._known:
                return
            # by another engine of the application
            recent = 0.0 if self._forked else time.monotonic() - _IDLE
            self._known |= {one for one in present if _warmed.get((self._application, one), 0.0) > recent}
            if present.keys() <= self._known:
                return
            self._known |= present.keys()
            self._slots = sum(present.values())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ebbflow-warm-up", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End what runs, within about a second, and warm up nothing from now on. Raises nothing."""
        with self._lock:
            self._closed.set()
            thread = self._thread
        for _ in range(_CLOSING):
            self._cancel()
            if thread is None or not thread.is_alive():
                return
            thread.join(_AGAIN)

    def _run(self) -> None:
        while True:
            with self._lock:
                slots, self._slots = self._slots, 0
                if self._closed.is_set() or not slots:
                    self._thread = None
                    return
                self._group = f"ebbflow-warm-up-{uuid.uuid4().hex[:8]}"
            try:
                self._context.setJobGroup(self._group, "imports of native tasks", interruptOnCancel=True)
                if self._trouble(self._closed):
                    return  # and remains the thread: there is no second try
                known = set(self._known)
                self._warm(slots)
                _warmed.update({(self._application, one): time.monotonic() for one in known})
            except Exception as error:  # executors that leave meanwhile, or all of Spark
                _log.debug("executors were not warmed up: %s", error)
            finally:
                self._group = ""

    def _warm(self, slots: int) -> None:
        if self._closed.is_set():  # while an executor was asked
            return
        limit = threading.Timer(_LONGEST, self._cancel)
        limit.daemon = True
        limit.start()
        try:
            count = max(1, slots // max(1, int(self._context.getConf().get("spark.task.cpus", "1"))))
            self._context.parallelize(range(count), count).mapPartitionsWithIndex(warmed).collect()
        finally:
            limit.cancel()

    def _cancel(self) -> None:
        if group := self._group:
            with suppress(Exception):  # a JVM that is gone runs nothing
                self._context.cancelJobGroup(group)


def serve() -> None:
    """Be Spark's daemon of Python workers, with what these import already there."""
    from pyspark import daemon

    with suppress(Exception):  # a worker that needs what is missing tells
        threads = len(os.listdir("/proc/self/task"))
        import pyspark.worker  # noqa: F401

        from ebbflow.infra.spark.native.worker import load

        load()
        if len(os.listdir("/proc/self/task")) > threads:  # forked, their locks would stay held
            os.execv(sys.executable, [sys.executable, "-P", "-m", "pyspark.daemon", *sys.argv[1:]])  # noqa: S606
    daemon.manager()


if __name__ == "__main__":
    serve()
