"""Starting and stopping the JVM and the SparkContext."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.spark.cluster.authentication import authenticated, is_sensitive, properties_text
from ebbflow.infra.spark.failures import chain, headline
from ebbflow.infra.spark.settings import addresses, is_local, stays_on_this_machine
from ebbflow.infra.storage import private
from ebbflow.infra.storage.scratch import ScratchFolder

_CONNECT_SECONDS = 5.0  # per master and attempt
_STOP_SECONDS = 15.0
_LOOPBACK = "127.0.0.1"
_LOG = "driver.log"
_lock = threading.Lock()  # the environment and SparkContext's class attributes belong to the process
_COPIES: "weakref.WeakSet[Any]" = weakref.WeakSet()  # of sessions of callers


@dataclass
class _SharedSession:
    """The session that this process has started, and how many engines use it."""

    chosen: Mapping[str, str]
    session: Any
    process: "DriverProcess"
    users: int = 1


_started: list[_SharedSession] = []  # one at most


@dataclass(frozen=True, slots=True)
class DriverProcess:
    """The JVM that carries the SparkContext, and where it has its files."""

    gateway: Any
    folder: ScratchFolder

    @property
    def log(self) -> Path:
        """What it wrote to its standard error."""
        return self.folder.path / _LOG


def check_master(master: str, *, timeout: float = _CONNECT_SECONDS) -> None:
    """Raise ``EngineUnavailableError`` unless some master of a ``spark://`` URL accepts TCP in ``timeout`` s.

    Spark itself would retry for a minute and then stop with an unrelated message.
    """
    reasons = []
    for host, port in addresses(master):
        try:
            with socket.create_connection((host, port), timeout=timeout):
                return
        except OSError as error:
            reasons.append(f"{host}:{port}: {error}")
    if reasons:
        raise EngineUnavailableError(
            f"no Spark master at {master} ({'; '.join(reasons)}): check the address, that the master runs "
            "and that no firewall is in between"
        )


def start_session(chosen: Mapping[str, str]) -> tuple[Any, DriverProcess]:
    """Start a JVM with the settings ``chosen``, and the secret of its master, and return its SparkSession.

    A session that was started with the same settings, and not stopped yet, is returned again: Spark allows
    one SparkContext a process. Raises ``EngineUnavailableError`` when Java, PySpark or the master is missing,
    or when this process has a SparkContext with other settings.
    """
    master = chosen["spark.master"]
    chosen = authenticated(chosen)
    java_home = _java_home()
    try:
        from pyspark import SparkContext
    except ImportError as error:
        raise EngineUnavailableError("PySpark is missing: pip install 'prefect-ebbflow[spark]'") from error
    if not (is_local(master) or master.startswith(("spark://", "yarn", "k8s://"))):
        raise EngineUnavailableError(
            f"unknown Spark master {master!r}: use local[N], spark://HOST:PORT, yarn or k8s://URL"
        )
    check_master(master)
    with _lock:
        active = SparkContext._active_spark_context
        if active is not None:
            for started in _started:
                if started.chosen == chosen and _lives(started, active):
                    started.users += 1
                    return started.session, started.process
            raise EngineUnavailableError(
                f"this process already has a SparkContext (application {active.appName!r}, with other settings "
                "or not of our making): stop it, or use SparkEngine.attach"
            )
        session, process = _launch(chosen, java_home)
        _started[:] = [_SharedSession(dict(chosen), session, process)]
        return session, process


def _lives(started: _SharedSession, active: Any) -> bool:
    child = started.process.gateway.proc
    return started.session.sparkContext is active and (child is None or child.poll() is None)


def stop_session(session: Any, process: DriverProcess | None) -> None:
    """Stop the context and, when it is ours, its JVM, so that a later start gets its own settings.

    While other engines use it nothing is stopped.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    with _lock:
        for started in _started:
            if started.process is process:
                started.users -= 1
                if started.users > 0:
                    return
        _started.clear()
        context = session.sparkContext
        # a JVM that has died already cannot be asked to stop
        with contextlib.suppress(Exception):
            session.stop()
        if SparkContext._active_spark_context is context:  # PySpark forgets a context only if its JVM answers
            SparkContext._active_spark_context = None
            SparkSession._instantiatedSession = None
        if process is not None:
            if SparkContext._gateway is process.gateway:
                SparkContext._gateway = None
                SparkContext._jvm = None
            _end(process)


def _java_home() -> Path:
    from ebbflow.infra.spark.java import find_java

    return find_java().home


def _launch(chosen: Mapping[str, str], java_home: Path) -> tuple[Any, DriverProcess]:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    conf = SparkConf(loadDefaults=False)  # stands on the command line of the JVM, for all to read
    for key, value in chosen.items():
        if not is_sensitive(key):
            conf.set(key, value)
    scratch = ScratchFolder("spark")
    folder, log = str(scratch.path), scratch.path / _LOG
    if "spark.local.dir" not in chosen and not chosen["spark.master"].startswith(("yarn", "k8s:")):
        # the driver's shuffles and spills; Spark itself makes their directories readable
        conf.set("spark.local.dir", folder)
    if "spark.sql.warehouse.dir" not in chosen and "spark.sql.catalogImplementation" not in chosen:
        # Spark would make a directory "spark-warehouse" wherever the user happens to be
        conf.set("spark.sql.warehouse.dir", f"{folder}/warehouse")
    hidden = {key: value for key, value in chosen.items() if is_sensitive(key)}
    if hidden:
        private.write_secret(f"{folder}/spark.conf", properties_text(hidden))
    variables = {"JAVA_HOME": str(java_home), **_submit_arguments(f"{folder}/spark.conf", hidden)}
    if pages := _pages(chosen["spark.master"]):
        variables |= pages
        for key, value in _reached_at(chosen).items():
            conf.set(key, value)
    process = None
    try:
        with private.open_file(log, "xb") as output, _environment(variables), _own_interrupt_handler():
            gateway = launch_gateway(conf=conf, popen_kwargs={"stdout": output, "stderr": output})
            process = DriverProcess(gateway, scratch)
            for key, value in hidden.items():
                conf.set(key, value)
            context = SparkContext(gateway=gateway, conf=conf)
            if context._jsc.sc().isStopped():
                raise RuntimeError("the SparkContext stopped at once")
            _hush()
            return SparkSession(context), process
    except Exception as error:
        reason = headline(chain(error))  # while there is a JVM to ask
        tail = _tail(log)
        SparkContext._active_spark_context = None
        SparkContext._gateway = None
        SparkContext._jvm = None
        if process is not None:
            _end(process)
        scratch.close()
        raise EngineUnavailableError(
            f"Spark did not start on {chosen['spark.master']}: {reason}"
            + (f"; its log ends with: {tail}" if tail else "")
        ) from error


def _pages(master: str) -> dict[str, str]:
    """Return the variables that keep the driver's pages and status API, which know no users, on loopback."""
    if stays_on_this_machine(master):
        return {"SPARK_LOCAL_IP": _LOOPBACK}
    if master.startswith("spark://") and "SPARK_LOCAL_IP" not in os.environ:
        return {"SPARK_LOCAL_IP": _LOOPBACK, "SPARK_PUBLIC_DNS": _LOOPBACK}
    return {}


def _reached_at(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return what keeps the driver reachable for executors elsewhere although its pages are on loopback.

    It takes the address from which this machine speaks to the master, and no other; nothing where the user's
    settings name one.
    """
    named = "spark.driver.host" in chosen or "spark.driver.host" in _spark_defaults()
    if named or not (masters := addresses(chosen["spark.master"])):
        return {}
    for host, port in masters:
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[4])  # sends nothing: the system only chooses the way
                address = probe.getsockname()[0]
            address = f"[{address}]" if ":" in address else address
            return {"spark.driver.host": address, "spark.driver.bindAddress": address}
    return {}


def _spark_defaults() -> str:
    """Return the user's own file of Spark's defaults, which Spark reads, too; empty without one."""
    folder = os.environ.get("SPARK_CONF_DIR") or f"{os.environ.get('SPARK_HOME', '')}/conf"
    with contextlib.suppress(OSError):
        return Path(folder, "spark-defaults.conf").read_text(encoding="utf-8", errors="replace")
    return ""


def _submit_arguments(file: str, hidden: Mapping[str, str]) -> dict[str, str]:
    if not hidden:
        return {}
    given = os.environ.get("PYSPARK_SUBMIT_ARGS") or "pyspark-shell"
    return {"PYSPARK_SUBMIT_ARGS": f"--properties-file {shlex.quote(file)} --load-spark-defaults {given}"}


def copy_of(session: Any) -> Any:
    """Return a session of its own with the settings and views that a caller's has now."""
    from pyspark.sql.session import _monkey_patch_RDD

    found = type(session)(session.sparkContext, session._jsparkSession.cloneSession())
    _monkey_patch_RDD(session)  # RDD.toDF is the newest session's
    _COPIES.add(found)
    return found


@contextlib.contextmanager
def active_kept(session: Any) -> Iterator[None]:
    """Have the same session be the active one afterwards, for PySpark and in this thread of the JVM: a copy of the
    caller's ``session`` becomes it by ``createDataFrame``."""
    from pyspark.sql import SparkSession

    java = SparkSession._get_j_spark_session_class(session._jvm)
    known, before = SparkSession._activeSession, java.getActiveSession()
    try:
        yield
    finally:
        if SparkSession._activeSession in _COPIES:
            SparkSession._activeSession = session if known in _COPIES else known
        with contextlib.suppress(Exception):  # a JVM that is gone has none
            if before.isDefined():
                java.setActiveSession(before.get())
            else:
                java.clearActiveSession()


def _end(process: DriverProcess) -> None:
    child = process.gateway.proc
    with contextlib.suppress(Exception):
        process.gateway.shutdown()
    if child is not None:
        if child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()  # the gateway server ends when its standard input does
        try:
            child.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(timeout=_STOP_SECONDS)
    process.folder.close()


def _hush() -> None:
    """Stop PySpark from printing a stack trace of every failed statement: the engine raises what it says."""
    from pyspark.logger import PySparkLogger

    PySparkLogger.getLogger("SQLQueryContextLogger").disabled = True


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def _own_interrupt_handler() -> Iterator[None]:
    """Keep the process' own SIGINT handler: SparkContext replaces it, and with it Prefect's cancellation."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _tail(log: Path, lines: int = 5) -> str:
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    kept = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("\tat ")]
    return " | ".join(kept[-lines:])
