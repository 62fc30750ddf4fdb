"""Engines for queries: started with a source of their capacity, entered among those that share their cluster."""

import re
import shutil
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sqlglot import exp

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.packages import require
from ebbflow.infra.protocols import CapacitySource, Relation, SqlEngine
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.duckdb_statements import refusal
from ebbflow.infra.query.local import LocalCapacity, quota_notes, usable_memory
from ebbflow.infra.query.shares import FileShareRegistry
from ebbflow.infra.tables.logs.snapshots import unpacked
from ebbflow.planners import hazard as recovery
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Capacity, Share
from ebbflow.planners.query.costs.query_engines import EngineChoice, Fit
from ebbflow.planners.query.sql.dialect import duckdb_sql
from ebbflow.planners.query.sql.functions import reaches_out
from ebbflow.planners.query.sql.translation.whole import duckdb_lacks, spark_lacks
from ebbflow.tasks.query.planning import tables_of
from ebbflow.tasks.query.request import LOCAL, QueryRequest
from ebbflow.tasks.query.sharing import SharedCapacity

if TYPE_CHECKING:
    from ebbflow.infra.spark.connect.engine import ConnectEngine
    from ebbflow.infra.spark.engine import SparkEngine
    from ebbflow.infra.spark.masters import Master

_ZONE = "spark.sql.session.timeZone"
# no setting of Spark's: that a query has functions of the session's
_FUNCTIONS = "spark.sql.session.functions"
_ARRIVAL = 45.0  # seconds to wait at the start for the first executors
_FIRST_WORKER = 300.0  # seconds for a master's first worker: a node may be launched for this query
_SETTLED = 1.5  # seconds without a new one after which all are taken to be there
_POLL = 0.1
_PRIOR_HOURS = 1.0  # how much evidence a stated hazard counts for


@dataclass
class OpenedEngine:
    """A started engine, where its capacity is seen, and with whom that is shared."""

    engine: SqlEngine
    source: CapacitySource
    closers: list[Callable[[], None]] = field(default_factory=list)
    notes: tuple[str, ...] = ()  # what it cannot tell, for the report
    settled: bool = False  # the first executors have come: a later query need not wait for them
    cluster: str = ""  # what its queries share with others who name it so; empty: nothing
    application: str = ""  # Spark's id of it
    unit: int = 1  # cores in which it can be held to a share...
    whole: bool = True  # ...or, if not, the engine divides among its queries itself
    hold: Callable[[float | None], None] = lambda cores: None
    allied: Callable[[frozenset[str]], None] = lambda applications: None


def choose_engine(
    request: QueryRequest, clock: Clock | None = None, opened: OpenedEngine | None = None
) -> QueryRequest:
    """Return ``request`` with the engine that ``auto`` is for it, and why; another one as it is.

    ``opened`` is an engine that the caller keeps. Raises what planning raises for a query that is wrong.
    """
    if request.engine != "auto":
        return request
    choice = _choice(request, clock or SystemClock(), opened)
    return replace(request, engine=choice.engine, engine_reason=choice.reason)


def _choice(request: QueryRequest, clock: Clock, opened: OpenedEngine | None) -> EngineChoice:
    if opened is not None:
        return EngineChoice(opened.engine.name, "it runs already")
    if request.store_place.tiered:
        return EngineChoice(
            "duckdb", "the store is behind nodes' memory, which Spark's executors do not read"
        )
    for said, name in (
        (request.master, "a master"),
        (request.catalog, "Spark's catalogue"),
        (request.executor_memory, "the memory of executors"),
        (request.conf, "a setting of Spark's"),
        (request.stages != "auto", "a way of running Spark's stages"),
    ):
        if said:
            return EngineChoice("spark", f"{name} is named")
    parsed, relations = tables_of(request, clock)
    tree = parsed.expression
    columns = {column.name.lower() for column in tree.find_all(exp.Column)}
    everything = tree.find(exp.Star) is not None
    read = sum(_unpacked(one, None if everything else columns) for one in relations)
    fit = Fit(
        read,
        usable_memory(),
        shutil.disk_usage(tempfile.gettempdir()).free / 2**30,
        _without_duckdb(tree, request, relations),
    )
    choice = fit.choose()
    if choice.engine == "spark":  # asking Java for its version takes a quarter of a second
        choice = replace(fit, without_spark=spark_lacks(tree, request.dialect) or _without_spark()).choose()
    return choice


def _unpacked(relation: Relation, columns: set[str] | None) -> float:
    """Return the bytes of a table's columns, unpacked but encoded; of all of them without ``columns``."""
    return unpacked(
        relation, [name for name, _ in relation.columns if columns is None or name.lower() in columns]
    )


def _without_duckdb(tree: exp.Query, request: QueryRequest, read: Sequence[Relation]) -> str:
    if reason := duckdb_lacks(tree, request.dialect):
        return reason
    return refusal(duckdb_sql(tree), read, reaches_out(frozenset(request.allow_functions)))


def _without_spark() -> str:
    from ebbflow.infra.spark.java import find_java

    try:
        require("pyspark", "Spark", "spark")
        find_java()
    except EngineUnavailableError as error:
        return str(error)
    return ""


@contextmanager
def opened_engine(
    request: QueryRequest,
    clock: Clock | None = None,
    note: Callable[[str], object] = lambda _: None,
    stop: threading.Event | None = None,
) -> Iterator[OpenedEngine]:
    """Start the engine and its capacity source; both are closed at the end.

    ``note`` is told of a wait for a Spark master's first worker, which ``stop`` ends: ``StageCancelledError``.
    """
    clock = clock or SystemClock()
    if on_connect(request):
        with connected(request, clock) as (_, opened):
            yield opened
        return
    request = choose_engine(request, clock)
    own = request.engine == "duckdb"
    opened = _open_duckdb(request, clock) if own else _open_spark(request, clock, note, stop)
    with ExitStack() as leaving:  # the engine last, whatever fails before
        leaving.callback(opened.engine.close)
        for close in reversed(opened.closers):
            leaving.callback(close)
        yield opened


def _open_duckdb(request: QueryRequest, clock: Clock) -> OpenedEngine:
    from ebbflow.infra.query.duckdb import DuckDbEngine

    source = LocalCapacity(clock=clock, hazard=request.interruption_rate or 0.0)
    node = source.capacity().nodes[0]
    engine = DuckDbEngine.start(node.cores, node.memory, clock=clock)
    return OpenedEngine(engine, source, notes=quota_notes(), cluster=f"duckdb {socket.gethostname()}")


def _open_spark(
    request: QueryRequest, clock: Clock, note: Callable[[str], object], stop: threading.Event | None
) -> OpenedEngine:
    from ebbflow.infra.spark.engine import SparkEngine
    from ebbflow.infra.spark.masters import executors_for, find_master

    master = find_master(request.master, request.conf, wait=_FIRST_WORKER, clock=clock, note=note, stop=stop)
    shape = executors_for(master, request.conf, request.executor_memory)
    engine = SparkEngine.start(
        request.master,
        memory=shape.heap if shape else request.executor_memory,
        cores=shape.cores if shape else None,
        conf=request.conf,
        catalog=request.catalog,
        clock=clock,
        weight=request.weight,
    )
    return _watched_spark(engine, master, request, clock)


def _watched_spark(
    engine: "SparkEngine", master: "Master | None", request: QueryRequest, clock: Clock
) -> OpenedEngine:
    from ebbflow.infra.spark.settings import is_local
    from ebbflow.infra.spark.watch import ExecutorWatch

    def hazard(losses: int, node_seconds: float) -> float:
        if request.interruption_rate is None:
            return recovery.hazard(losses, node_seconds)
        return recovery.hazard(losses, node_seconds, request.interruption_rate * _PRIOR_HOURS, _PRIOR_HOURS)

    held = engine.shape if master else None
    watch = ExecutorWatch(
        engine.ui_url,
        engine.application_id,
        hazard=hazard,
        master_url=engine.master,
        master_ui=master.ui if master else "",
        shape=held,
        lost=engine.lost_executors.tell,
        present=engine.warm_up.see if request.stages != "spark" else lambda _: None,
        clock=clock,
    )
    return OpenedEngine(
        engine,
        watch,
        [watch.close],
        settled=is_local(engine.master),
        cluster=master.url if master and held else f"application {engine.application_id}",
        application=engine.application_id,
        unit=held.cores if held else 1,
        whole=held is not None,
        hold=engine.hold,
        allied=watch.ally,
    )


def request_in(session: Any, request: QueryRequest) -> QueryRequest:
    """Return ``request`` as it runs in a SparkSession that the caller has: on Spark, with the session's settings, and
    on its tables and views unless it names a directory. Raises ``OptionError`` and, for a session of Spark Connect,
    ``EngineUnavailableError``."""
    from ebbflow.infra.spark.connect import session as connect

    remote = connect.is_connect(session)
    if not remote and not hasattr(session, "_jsparkSession"):
        raise OptionError(
            "session must be a SparkSession of this process or of Spark Connect; got "
            f"a value of type {type(session).__module__}.{type(session).__name__}"
        )
    if request.engine == "duckdb":
        raise OptionError("session needs engine spark or auto; got 'duckdb'")
    if remote:
        connect.check_session(session)
    elif session.sparkContext._jsc is None:
        raise OptionError("session has been stopped; give one that runs")
    for name, value in (
        ("master", request.master if request.master != LOCAL else ""),
        ("conf", ", ".join(sorted(request.conf))),  # whose values may be secrets
        ("executor_memory", request.executor_memory),
    ):
        if value:
            raise OptionError(f"{name} is the session's own; leave it out; got {value!r}")
    master = connect.address(session) if remote else session.sparkContext.master
    with connect.translated("the start", master) if remote else nullcontext():
        own = _settings(connect.limited(session) if remote else session, request)
    return replace(request, engine="spark", engine_reason="a session is given", master=master, conf=own)


def _settings(session: Any, request: QueryRequest) -> dict[str, str]:
    """Return the settings of a session that results depend on."""
    own = {name: text for name, text in session.conf.getAll.items() if name.startswith("spark.sql.")}
    own.pop(_ZONE, None)
    if (zone := session.conf.get(_ZONE)) != "UTC":  # that of sessions of our own; by default it is the JVM's
        own[_ZONE] = zone
    if request.tables and _calls_own(session, request.sql):
        own[_FUNCTIONS] = uuid.uuid4().hex
    return own


def _calls_own(session: Any, sql: str) -> bool:
    """Tell whether a query may call a function that somebody has registered: what it does can change."""
    names = {row[0].lower().rpartition(".")[2] for row in session.sql("SHOW USER FUNCTIONS").collect()}
    called = set(re.findall(r"(\w+)`?\s*\(", sql.lower()))
    return not names.isdisjoint(called)


@contextmanager
def engine_in(session: Any, request: QueryRequest, clock: Clock | None = None) -> Iterator[OpenedEngine]:
    """Use a SparkSession that the caller has, for ``request_in``; it runs on afterwards, as it was.

    Its executors cannot be held to a share. Raises ``EngineUnavailableError``.
    """
    from ebbflow.infra.spark.connect.session import is_connect

    clock = clock or SystemClock()
    if is_connect(session):
        from ebbflow.infra.spark.connect.engine import ConnectEngine

        with closing(ConnectEngine(session, clock)) as running:
            yield _of_connect(running, request)
        return
    from ebbflow.infra.spark.engine import SparkEngine

    engine = SparkEngine.attach(session, clock, request.weight)
    with ExitStack() as leaving:
        leaving.callback(engine.close)
        opened = _watched_spark(engine, _master_of(engine.master), request, clock)
        for close in reversed(opened.closers):
            leaving.callback(close)
        yield opened


def _of_connect(engine: "ConnectEngine", request: QueryRequest) -> OpenedEngine:
    from ebbflow.infra.spark.connect.engine import WITHOUT

    source = engine.capacity(request.interruption_rate or 0.0)
    note = WITHOUT.format(cores=source.capacity().cores)
    return OpenedEngine(engine, source, notes=(note,), settled=True, cluster=engine.address, whole=False)


def on_connect(request: QueryRequest) -> bool:
    """Tell whether the master of a request is a server of Spark Connect."""
    return request.engine != "duckdb" and request.master.startswith("sc://")


@contextmanager
def connected(
    request: QueryRequest, clock: Clock | None = None
) -> Iterator[tuple[QueryRequest, OpenedEngine]]:
    """Open a session of the Spark Connect server that is the master of ``request``; yield the request as it runs
    there, and the engine. The session is ended afterwards. Raises ``EngineUnavailableError`` and ``OptionError``."""
    from ebbflow.infra.spark.connect import session as connect

    session = connect.open_session(request.master, request.conf)
    try:
        inner = request_in(session, replace(request, master="", conf={}))
        with engine_in(session, inner, clock) as opened:
            yield replace(inner, engine_reason=request.engine_reason or "a master is named"), opened
    finally:
        connect.end_session(session)


def _master_of(address: str) -> "Master | None":
    """Return the standalone master of a running application, if its page answers: it knows of dead workers."""
    from ebbflow.infra.spark.masters import find_master

    with suppress(EngineUnavailableError, OptionError):
        return find_master(address, {})
    return None


def shared_source(
    opened: OpenedEngine, request: QueryRequest, store: ParquetCheckpointStore, clock: Clock
) -> CapacitySource:
    """Enter the query among those that share its cluster, and return its capacity with its share.

    The registry is in the store, which all flows on a cluster can reach.
    """
    if not opened.cluster:
        return opened.source
    return SharedCapacity(
        opened.source,
        FileShareRegistry(store.place.under("cache/shares"), opened.cluster, clock),
        clock,
        weight=request.weight,
        fraction=request.fraction,
        unit=opened.unit,
        whole=opened.whole,
        application=opened.application,
        hold=opened.hold,
        allied=opened.allied,
    )


def arrived_capacity(source: CapacitySource, clock: Clock | None = None, settled: bool = False) -> Capacity:
    """Wait, bounded, until the first executors have registered and no more come, or all have that can; ``settled``
    tells that those that are there are all."""
    clock = clock or SystemClock()
    deadline = clock.now() + _ARRIVAL
    seen, held, since = source.capacity(), _held(source), clock.now()
    while clock.now() < deadline:
        settled = settled or held is None
        wanted = Share.of(seen).total.cores
        if seen.nodes and (settled or wanted <= 0):
            break
        if seen.nodes and held and (_all_come(source, held, wanted) or clock.now() - since >= _SETTLED):
            break
        clock.sleep(_POLL)
        newer, now_held = source.capacity(), _held(source)
        if not newer.same_nodes(seen) or now_held != held:
            seen, held, since = newer, now_held, clock.now()
    return seen


def _held(source: CapacitySource) -> int | None:
    """Return the cores that the engine has already; ``None`` where they need not come."""
    inner = _inner(source)
    return None if isinstance(inner, LocalCapacity) else getattr(inner, "held", 1)


def _all_come(source: CapacitySource, held: int, wanted: float) -> bool:
    """Tell whether the engine has all of the query's cores: only where capacity is not just what it has."""
    return bool(getattr(_inner(source), "of_cluster", False)) and held >= wanted


def _inner(source: CapacitySource) -> CapacitySource:
    return source.source if isinstance(source, SharedCapacity) else source
