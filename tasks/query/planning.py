"""Reads tables, statistics, samples and history, and makes a planner of them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial

from sqlglot import exp

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError, TableError
from ebbflow.infra.protocols import Relation, SqlEngine
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.duckdb_statements import output_names, refusal
from ebbflow.infra.query.local import slowness
from ebbflow.infra.query.pins import Pins
from ebbflow.infra.storage import files
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.tables import parquet as tables
from ebbflow.infra.tables import statistics
from ebbflow.infra.tables.logs import snapshots
from ebbflow.infra.tables.partitions import pruned
from ebbflow.planners.errors import OptionError, UnknownColumnError
from ebbflow.planners.model import Catalogue, Measured, Table, TableStatistics, Work
from ebbflow.planners.query.costs.cost import DEFAULTS
from ebbflow.planners.query.costs.sampling import questions
from ebbflow.planners.query.costs.stage_engines import StageEngineName
from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.plan.pruning import partition_filters
from ebbflow.planners.query.planner import PlannerOptions, QueryPlanner
from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.functions import reaches_out
from ebbflow.planners.query.sql.parse import ParsedQuery, parse, parse_query
from ebbflow.planners.query.sql.references import columns_named, outside_tables, table_names
from ebbflow.planners.query.sql.translation.whole import alike, check_said, refused
from ebbflow.planners.query.views.views import view_chain
from ebbflow.tasks.drawing.wording import bytes_text
from ebbflow.tasks.query.request import QueryRequest, meaning

_WHOLE = ("tinyint", "smallint", "int")  # of which engines compare as of bigint
_HISTORY = 300  # finished stages remembered per engine and place


@dataclass(frozen=True)
class Gathered:
    """What is known before anything is planned: the query as it is meant, its tables, and how fast stages were."""

    parsed: ParsedQuery
    now: datetime  # what its clock functions are frozen to
    relations: Mapping[str, Relation]  # by lower-case name
    catalogue: Catalogue  # the same, with versions; with statistics those that the query names
    history: Sequence[Measured]  # of finished stages at this place, oldest first
    everything: bool = False  # functions are allowed that may read whatever the process may
    unpruned: Mapping[str, Relation] = field(default_factory=dict)  # tables, with all files, that lost some
    notes: tuple[str, ...] = ()  # on what was found, for people

    @property
    def versions(self) -> dict[str, str]:
        """Return the tables' versions by lower-case name."""
        return {name: table.version for name, table in self.catalogue.tables.items()}

    def pins(self) -> dict[str, str]:
        """Return the versions of the tables with a log that the query names, by lower-case name."""
        return {r.name.lower(): r.log.version for r in self.read() if r.log is not None}

    def read(self) -> tuple[Relation, ...]:
        """Return the tables that the query names, with all of their files."""
        whole = {**self.relations, **self.unpruned}
        return tuple(relation for name, relation in whole.items() if name in self._named)

    @cached_property
    def _named(self) -> frozenset[str]:
        return frozenset(name.lower() for name in table_names(self.parsed.expression))


def prepare(
    request: QueryRequest,
    store: ParquetCheckpointStore,
    clock: Clock,
    *,
    run_id: str,
    engine: Callable[[], SqlEngine | None] = lambda: None,
    options: PlannerOptions | None = None,
    pins: Pins | None = None,
) -> tuple[Gathered, QueryPlanner]:
    """Return the query's tables, statistics and history, and a planner that has them and samples of the tables.

    Args:
        request: the query.
        store: keeps statistics and history.
        clock: gives the time that clock functions of the SQL are frozen to.
        run_id: unique to the run.
        engine: waits for the engine, whose catalog has the tables for ``request.catalog``, and which names what
            the query does not name; ``None`` where none starts.
        options: of the planner; those of ``request`` unless given.
        pins: versions of tables that an earlier run of the query began with.

    Raises ``TableError``, ``PlanningError``, ``StorageError``.
    """
    gathered = gather(request, store, clock, run_id=run_id, engine=engine, pins=pins)
    return gathered, planner_of(request, gathered, store, run_id=run_id, options=options)


def gather(
    request: QueryRequest,
    store: ParquetCheckpointStore,
    clock: Clock,
    *,
    run_id: str,
    engine: Callable[[], SqlEngine | None] = lambda: None,
    pins: Pins | None = None,
) -> Gathered:
    """Find the tables, and read their statistics (cached by version) and the history. Raises as ``prepare``."""
    cache = store.cache("statistics")
    pinned = pins.known() if pins is not None and request.reuse else {}
    parsed, whole, now, named = _read(request, clock, engine, cache, pinned)
    pruned = _pruned(request, parsed, {name: whole[name] for name in named if name in whole})
    relations = {**whole, **pruned}
    used = columns_named(parsed.expression)
    at_once = min(files.PARALLEL_READS, len(named))
    collect = partial(statistics.collect, cache=cache, clock=clock, names=used, at_once=at_once)

    def known(n: str) -> Table:
        return _table(relations[n], run_id, meaning(request), collect if n in named else None)

    catalogue = Catalogue(dict(zip(relations, files.in_parallel(known, [*relations]), strict=True)))
    # last: tables that cannot be read leave nothing in the store
    files.in_parallel(lambda one: tables.keep_columns(one, cache), [*whole.values()])
    return Gathered(
        parsed,
        now,
        relations,
        catalogue,
        read_history(store, request),
        reaches_out(frozenset(request.allow_functions)),
        {name: whole[name] for name in pruned},
        (
            *snapshots.version_words([whole[name] for name in sorted(named & whole.keys())], pinned),
            *(_pruning_words(whole[name], kept) for name, kept in sorted(pruned.items())),
        ),
    )


def tables_of(request: QueryRequest, clock: Clock) -> tuple[ParsedQuery, tuple[Relation, ...]]:
    """Return the query and the tables of ``request.tables`` that it names.

    Raises ``TableError``, ``PlanningError``.
    """
    parsed, relations, _, named = _read(request, clock, lambda: None, None, {})
    relations |= _pruned(request, parsed, {name: relations[name] for name in named if name in relations})
    return parsed, tuple(relation for name, relation in relations.items() if name in named)


def _pruned(
    request: QueryRequest, parsed: ParsedQuery, relations: Mapping[str, Relation]
) -> dict[str, Relation]:
    """Return those of the partitioned tables that the query reads some files of only, with these."""
    keys = {
        name: snapshots.keys(one) if one.log is not None else dict.fromkeys(one.partitions, ())
        for name, one in relations.items()
    }
    kinds = {
        name: {c.lower(): "bigint" if kind in _WHOLE else kind for c, kind in one.columns if c in keys[name]}
        for name, one in relations.items()
        if keys[name]
    }
    if not kinds:
        return {}
    plain = Catalogue({name: Table(one.name, one.columns, "") for name, one in relations.items()})
    analysis = Analysis.of(view_chain(parsed, plain), plain, "")
    filters = partition_filters(analysis, kinds, portable=request.engine != "duckdb")
    kept = {
        name: pruned(relations[name], places, keys[name] if relations[name].log is not None else None)
        for name, places in filters.items()
    }
    return {name: one for name, one in kept.items() if len(one.files) < len(relations[name].files)}


def _pruning_words(whole: Relation, kept: Relation) -> str:
    return (
        f"{whole.name}: {len(kept.files):,} of {len(whole.files):,} files are read, {bytes_text(kept.bytes)} of "
        f"{bytes_text(whole.bytes)}; the others' partitions do not pass the query's filters"
    )


def _read(
    request: QueryRequest,
    clock: Clock,
    engine: Callable[[], SqlEngine | None],
    cache: JsonStore | None,
    pinned: Mapping[str, str],
) -> tuple[ParsedQuery, dict[str, Relation], datetime, set[str]]:
    """Return the query, its tables, what its clock functions are frozen to, and the names of its tables."""
    # a syntax error is told before any file is opened
    tree = parse(request.sql, request.dialect, request.allow_functions)
    named = {name.lower() for name in table_names(tree)}
    relations, known = _relations(request, engine, tree, cache, pinned)
    # unknown tables and columns too: what cannot be planned leaves nothing in the store
    plain = {name: Table(one.name, one.columns, "") for name, one in relations.items()}
    if not named <= relations.keys():  # whoever names a table that is not there is told the others
        plain = {name.lower(): Table(name, (), "") for name in known} | plain
    catalogue = Catalogue(plain)
    read = [one for name, one in relations.items() if name in named]
    now = datetime.fromtimestamp(clock.now(), UTC)

    def parsed(outputs: Sequence[str] | None = None) -> ParsedQuery:
        return parse_query(
            request.sql,
            catalogue,
            now=now,
            dialect=request.dialect,
            allowed=request.allow_functions,
            outputs=outputs,
            engine="duckdb" if request.engine == "auto" else request.engine,
            tree=tree,
        )

    def asked() -> tuple[str, ...] | None:
        return _output_names(request, tree, read, engine)

    try:
        outputs = asked() if request.engine == "duckdb" else None
        found = parsed(outputs)
    except UnknownColumnError:
        outputs = asked() if request.engine == "spark" else None
        if outputs is None:
            raise
        found = parsed(outputs)
    if found.unnamed and request.engine == "spark":
        found = parsed(asked())
    check_said(found.expression, request.dialect, request.engine)
    if outputs is None and request.engine == "duckdb":
        _check_accepted(request, found.expression, read)
    return found, relations, now, named


def _check_accepted(request: QueryRequest, tree: exp.Query, read: Sequence[Relation]) -> None:
    """Raise what DuckDB says of a query that it refuses, though its parts may run."""
    text = request.sql if request.dialect.lower() == "duckdb" else duckdb_sql(tree)
    if reason := refusal(text, read, reaches_out(frozenset(request.allow_functions))):
        raise refused(reason, request.dialect)


def _output_names(
    request: QueryRequest, tree: exp.Expr, read: Sequence[Relation], engine: Callable[[], SqlEngine | None]
) -> tuple[str, ...] | None:
    """Return the names that the engine gives to the columns of the result; ``None`` where no engine can tell."""
    own = request.dialect.lower() == request.engine
    if request.engine == "duckdb":
        allowed = reaches_out(frozenset(request.allow_functions))
        names = output_names(request.sql if own else duckdb_sql(tree), read, allowed)  # as written
        if names is None and not own:  # or else as told
            names = output_names(duckdb_sql(alike(tree.copy(), request.dialect)), read, allowed)
        return names
    running, text = engine(), request.sql if own else spark_sql(alike(tree.copy(), request.dialect))
    return None if running is None else running.output_names(text, read)


def planner_of(
    request: QueryRequest,
    gathered: Gathered,
    store: ParquetCheckpointStore,
    *,
    run_id: str,
    options: PlannerOptions | None = None,
) -> QueryPlanner:
    """Return the query's planner, with the engine's built-in costs: a session fits them to the history.

    Selectivities that statistics do not give are measured on samples of the tables (cached). Raises as ``prepare``.
    """
    stages, links = stage_engines_of(request, gathered), _behind_links(gathered, store)
    slow = slowness(request.engine)
    models = {name: model.behind_links(*links).slower(slow) for name, model in DEFAULTS.items()}
    planner = QueryPlanner(
        gathered.parsed,
        gathered.catalogue,
        models["native" if request.engine == "spark" and stages != "spark" else request.engine],
        now=gathered.now,
        salt=run_id,
        options=options or PlannerOptions(cuts=request.materialize),
        rivals=(models["spark"],) if stages == "auto" and request.engine == "spark" else (),
        tier=store.tier(),
    )
    planner.sample(_measure(planner, gathered, store.cache("statistics")))
    return planner


def _behind_links(gathered: Gathered, store: ParquetCheckpointStore) -> tuple[float, float]:
    """Return which parts of the bytes of tables, and of stages' outputs, are in object storage."""
    sizes = [(one.bytes, one.scheme == "s3") for one in gathered.read()]
    tables = sum(size for size, remote in sizes if remote) / max(sum(size for size, _ in sizes), 1)
    return tables, float(store.place.scheme == "s3" and store.tier() is None)


def stage_engines_of(request: QueryRequest, gathered: Gathered) -> StageEngineName:
    """Return how Spark may run the query's stages: what the request says, or its SQL where ``auto`` has no choice."""
    read = gathered.read()
    reached = not request.store_place.tiered and not any(one.external for one in read)
    return "spark" if request.stages == "auto" and not reached else request.stages


def _relations(
    request: QueryRequest,
    engine: Callable[[], SqlEngine | None],
    tree: exp.Query,
    cache: JsonStore | None,
    pinned: Mapping[str, str],
) -> tuple[dict[str, Relation], list[str]]:
    """Return the tables that the query names, and the names of all there are, or of none where it names no others."""
    if request.tables_place:
        place = request.tables_place
        there = {source.name.lower(): source for source in tables.sources(place)}
        named = sorted({name.lower() for name in table_names(tree)} & there.keys())
        used = columns_named(tree)
        logged = [there[name].name for name in named if there[name].log is not None]
        if request.at.isdecimal() and len(logged) > 1:
            raise OptionError(
                f"at={request.at} (--at) is a version of one table, and the query names {' and '.join(logged)}; "
                f"give a time instead"
            )
        at, own = request.at, request.engine == request.dialect.lower() == "duckdb"

        def one(n: str) -> Relation:
            return tables.table_of(place, there[n], used, cache, at=at, pinned=pinned.get(n, ""), json=own)

        found = dict(zip(named, files.in_parallel(one, named), strict=True))
        return found, [source.name for source in there.values()]
    running = engine()
    assert running is not None
    for table in outside_tables(tree):
        if any("." in part.name for part in table.parts):
            raise TableError(
                f"table {table.name!r}: a session's table or view of such a name needs a view without a dot"
            )
    # some catalogues tell capitals apart
    spelled = {name.lower(): name for name in sorted(table_names(tree))}
    relations = {r.name.lower(): r for r in running.tables(spelled.values())}
    known = [*relations] if spelled.keys() <= relations.keys() else [*relations, *running.table_list()]
    if spelled and not known and not any("." in name for name in spelled):
        raise TableError("the session's catalogue has no tables; register some, or give --tables DIR")
    return relations, known


def _table(
    relation: Relation, run_id: str, meaning: str, collect: Callable[[Relation], TableStatistics] | None
) -> Table:
    if relation.external:  # nothing tells whether its content changed: its stages live for this run only
        return Table(relation.name, relation.columns, f"external-{run_id}")
    version = f"{tables.version(relation)}-{meaning}"
    known = collect(relation) if collect is not None else None
    return Table(relation.name, relation.columns, version, known)


def _measure(planner: QueryPlanner, gathered: Gathered, cache: JsonStore) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    by_table: dict[str, list[tuple[str, str, str]]] = {}
    for q in questions(planner.analysis, gathered.catalogue):
        by_table.setdefault(q.table.lower(), []).append((q.scope, q.key, q.sql))
    used = columns_named(gathered.parsed.expression) if by_table else None
    for name, asked in by_table.items():
        relation = gathered.relations.get(name)
        if relation is None or relation.external:
            continue
        fractions = statistics.selectivity(relation, [sql for _, _, sql in asked], cache, names=used)
        for (scope, key, _), fraction in zip(asked, fractions, strict=True):
            if fraction is not None:
                out.setdefault(scope, {})[key] = fraction
    return out


def _place(request: QueryRequest) -> str:
    """Name where stages run: figures of one place say little of another."""
    loopback = request.master.startswith(("local", "spark://127."))
    where = "this-machine" if request.engine == "duckdb" or loopback else request.master
    return f"{request.engine}-{hashlib.sha256(where.encode()).hexdigest()[:12]}"


def read_history(store: ParquetCheckpointStore, request: QueryRequest) -> list[Measured]:
    """Return what is remembered of finished stages, oldest first, with the times that they would take on cores as
    they are now; damaged entries are left out."""
    raw, slow = store.cache("history").get(_place(request)), slowness(request.engine)
    out = []
    for item in raw if isinstance(raw, list) else []:
        with suppress(TypeError, KeyError):
            out.append(Measured(**{**item, "work": Work(**item["work"])}).slower(slow))
    return out


def remember(store: ParquetCheckpointStore, request: QueryRequest, measured: Sequence[Measured]) -> None:
    """Add finished stages to the history, keeping the newest; on whole cores they would take what is kept."""
    if measured:
        slow = slowness(request.engine)
        kept = [*read_history(store, request), *measured][-_HISTORY:]
        with suppress(StorageError):  # estimates only: the query itself has its result
            store.cache("history").put(_place(request), [m.slower(1.0 / slow).values() for m in kept])
