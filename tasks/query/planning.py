"""Reads tables, statistics, samples and history, and makes a planner of them."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError, TableError
from ebbflow.infra.protocols import Relation, SqlEngine
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.tables import parquet as tables
from ebbflow.infra.tables import statistics
from ebbflow.planners.model import Catalogue, Measured, Table, Work
from ebbflow.planners.query.costs.cost import DEFAULTS
from ebbflow.planners.query.costs.sampling import questions
from ebbflow.planners.query.planner import PlannerOptions, QueryPlanner
from ebbflow.planners.query.sql.functions import reaches_out
from ebbflow.planners.query.sql.parse import parse, parse_query, table_names
from ebbflow.tasks.query.request import QueryRequest

_HISTORY = 300  # finished stages remembered per engine and place
# SQL settings of Spark that change how a result is computed, not what it is
_HOW = (
    "adaptive", "autoBroadcastJoinThreshold", "broadcastTimeout", "cbo", "codegen", "execution", "files",
    "inMemoryColumnarStorage", "join", "maxBroadcastTableSize", "optimizer", "shuffle", "sources", "ui",
)  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """Everything that planning and running need to know of the data."""

    planner: QueryPlanner  # with the engine's built-in costs: a session fits them to the history
    relations: Mapping[str, Relation]  # by lower-case name
    versions: Mapping[str, str]
    history: Sequence[Measured]
    everything: bool = False  # functions are allowed that may read whatever the process may

    def read(self) -> tuple[Relation, ...]:
        """Return the tables that the query names."""
        named = {name.lower() for name in table_names(self.planner.parsed.expression)}
        return tuple(relation for name, relation in self.relations.items() if name in named)


def prepare(
    request: QueryRequest,
    store: ParquetCheckpointStore,
    clock: Clock,
    *,
    run_id: str,
    engine: SqlEngine | None = None,
) -> Prepared:
    """Find the tables, collect their statistics (cached by version), sample predicates, build the planner.

    ``engine`` is needed for its catalogue only. Raises ``TableError``, ``PlanningError``, ``StorageError``.
    """
    # a syntax error is told before any file is opened
    named = {
        name.lower() for name in table_names(parse(request.sql, request.dialect, request.allow_functions))
    }
    relations = _relations(request, engine)
    # unknown tables and columns too: what cannot be planned leaves nothing in the store
    plain = Catalogue({name: Table(one.name, one.columns, "") for name, one in relations.items()})
    parse_query(
        request.sql,
        plain,
        now=datetime.fromtimestamp(clock.now(), UTC),
        dialect=request.dialect,
        allowed=request.allow_functions,
    )
    cache = store.cache("statistics")
    known = {
        name: _table(relation, run_id, meaning(request), cache if name in named else None, clock)
        for name, relation in relations.items()
    }
    catalogue = Catalogue(known)
    planner = QueryPlanner(
        request.sql,
        catalogue,
        DEFAULTS[request.engine],
        now=datetime.fromtimestamp(clock.now(), UTC),
        salt=run_id,
        dialect=request.dialect,
        options=PlannerOptions(cuts=request.cuts),
        allowed=request.allow_functions,
    )
    planner.sample(_measure(planner, catalogue, relations, cache))
    versions = {name: table.version for name, table in known.items()}
    history = read_history(store, request)
    return Prepared(planner, relations, versions, history, reaches_out(frozenset(request.allow_functions)))


def _relations(request: QueryRequest, engine: SqlEngine | None) -> dict[str, Relation]:
    if request.tables:
        found: Iterable[Relation] = tables.discover(request.tables)
    else:
        assert engine is not None
        found = engine.tables()
    relations = {r.name.lower(): r for r in found}
    if not relations:
        raise TableError("the session's catalogue has no tables; register some, or give --tables DIR")
    return relations


def meaning(request: QueryRequest) -> str:
    """Return what decides, besides SQL and tables, over results: the engine, and those settings that may change
    what a statement means. Checkpoints made under others are not reused."""
    prefix = "spark.sql."
    told = sorted(
        (key, value)
        for key, value in request.conf.items()
        if key.startswith(prefix) and not key.removeprefix(prefix).startswith(_HOW)
    )
    return (
        f"{request.engine}-{hashlib.sha256(repr(told).encode()).hexdigest()[:12]}" if told else request.engine
    )


def _table(relation: Relation, run_id: str, meaning: str, cache: JsonStore | None, clock: Clock) -> Table:
    if relation.external:  # nothing tells whether its content changed: its stages live for this run only
        return Table(relation.name, relation.columns, f"external-{run_id}")
    version = f"{tables.version(relation)}-{meaning}"
    known = statistics.collect(relation, cache, clock=clock) if cache is not None else None
    return Table(relation.name, relation.columns, version, known)


def _measure(
    planner: QueryPlanner, catalogue: Catalogue, relations: Mapping[str, Relation], cache: JsonStore
) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    by_table: dict[str, list[tuple[str, str, str]]] = {}
    for q in questions(planner.analysis, catalogue):
        by_table.setdefault(q.table.lower(), []).append((q.scope, q.key, q.sql))
    for name, asked in by_table.items():
        relation = relations.get(name)
        if relation is None or relation.external:
            continue
        fractions = statistics.selectivity(relation, [sql for _, _, sql in asked], cache)
        for (scope, key, _), fraction in zip(asked, fractions, strict=True):
            if fraction is not None:
                out.setdefault(scope, {})[key] = fraction
    return out


# --- history of finished stages ----------------------------------------------------------------------------


def _place(request: QueryRequest) -> str:
    """Name where stages run: figures of one place say little of another."""
    loopback = request.master.startswith("local") or "//127." in request.master
    where = "this-machine" if request.engine == "duckdb" or loopback else request.master
    return f"{request.engine}-{hashlib.sha256(where.encode()).hexdigest()[:12]}"


def read_history(store: ParquetCheckpointStore, request: QueryRequest) -> list[Measured]:
    """Return what is remembered of finished stages, oldest first; damaged entries are left out."""
    raw = store.cache("history").get(_place(request))
    out = []
    for item in raw if isinstance(raw, list) else []:
        try:
            out.append(Measured(**{**item, "work": Work(**item["work"])}))
        except (TypeError, KeyError):
            continue
    return out


def remember(store: ParquetCheckpointStore, request: QueryRequest, measured: Sequence[Measured]) -> None:
    """Add finished stages to the history, keeping the newest."""
    if measured:
        kept = [*read_history(store, request), *measured][-_HISTORY:]
        with suppress(StorageError):  # estimates only: the query itself has its result
            store.cache("history").put(_place(request), [asdict(m) for m in kept])
