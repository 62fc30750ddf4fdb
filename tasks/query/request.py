"""The request of one query run, checked before anything starts.

Commands are made of its fields, so every start of the command line imports this module: heavy imports wait.
"""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ebbflow.infra.storage import user_files
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import options
from ebbflow.planners.model.options import option

if TYPE_CHECKING:
    from ebbflow.infra.query.table_results import Into
    from ebbflow.infra.tables.logs.catalogues import IcebergCatalogue

Engine = Literal["auto", "spark", "duckdb"]
StageEngine = Literal["spark", "native", "auto"]
PlannerName = Literal["qoop", "clarinet", "volcano", "single"]
# SQL settings of Spark that change how a result is computed, not what it is
_HOW = (
    "adaptive", "artifact", "autoBroadcastJoinThreshold", "broadcastTimeout", "catalogImplementation", "cbo",
    "codegen", "connect", "debug", "execution", "files.max", "files.min", "files.open", "hive",
    "inMemoryColumnarStorage", "join", "maxBroadcastTableSize", "optimizer", "repl", "shuffle", "sources",
    "streaming", "ui", "variable", "warehouse",
)  # fmt: skip
_RULES = "optimizer.excludedRules"  # but this one: means of short decimals are rounded by a rule of the optimiser's
LOCAL = "local[2]"  # the master where none is named: Spark in this process


def default_store() -> str:
    """Return the directory that keeps checkpoints unless a request names another."""
    return str(home() / "store")


@dataclass(frozen=True)
class QueryRequest:
    """One query run. Raises ``OptionError`` for a value that breaks its rule."""

    sql: str
    tables: str | None = option(
        None,
        "Directory of the tables: Parquet files, directories of them, tables of Delta Lake and Iceberg. DIR or "
        "s3://bucket/prefix, or iceberg://CATALOG/NAMESPACE of pyiceberg's configuration",
        metavar="DIR",
    )
    catalog: bool = option(
        False, "Tables of the Spark session's catalog instead of a directory of tables", flags="--catalog"
    )
    at: str = option(
        "",
        "Version or time that tables of Delta Lake and Iceberg are read at: a version or snapshot ID, or ISO 8601 in "
        "UTC unless it says otherwise",
        unless="their newest versions",
        metavar="VERSION",
    )
    engine: Engine = option(
        "auto",
        "Engine that runs the stages: spark, duckdb (embedded, needs no Java), or auto: duckdb where no Spark master "
        "is named and this machine can hold what the query reads, else spark",
        metavar="NAME",
    )
    stages: StageEngine = option(
        "auto",
        "How Spark runs a stage: spark (its SQL), native (DuckDB in its tasks, where answers are proven equal), or "
        "auto, by cost, where executors have memory and Python packages for it",
        metavar="NAME",
    )
    master: str = option(
        "",
        "Spark master: local[2], spark://host:7077, sc://host:15002 (Spark Connect), ...; local-fleet[:NAME] for "
        "that of ebbflow local up",
        unless=f"{LOCAL}, where Spark runs",
    )
    planner: PlannerName = option(
        "qoop",
        "Planner of the query: qoop re-plans at each change of capacity, clarinet and volcano plan once, single runs "
        "one statement",
        in_file="planner of the query: qoop re-plans at each change of capacity, clarinet and volcano plan once, "
        "single runs one statement",
        metavar="NAME",
    )
    materialize: Literal["cost", "every-join", "none"] = option(
        "cost",
        "Materialization of intermediate results as checkpoints: where it pays (cost), after every-join, or none",
        metavar="WHERE",
    )
    dialect: str = option("spark", "SQL dialect of the query, as sqlglot names it")
    output: str | None = option(
        None,
        "Parquet file for the rows of the result: FILE or s3://bucket/key",
        flags="--output,-o",
        metavar="FILE",
    )
    into: str | None = option(
        None,
        "Table that the rows of the result are written into, once for each run: DIR or s3://bucket/prefix of Delta "
        "Lake, or iceberg://CATALOG/NAMESPACE/TABLE of pyiceberg's configuration. It is made if it is not there",
        metavar="TABLE",
    )
    into_mode: Literal["create", "append", "overwrite", "overwrite-partitions", "merge"] = option(
        "append",
        "What becomes of the rows that the table of --into has: create fails if it is there, append keeps them, "
        "overwrite replaces all, overwrite-partitions those of the partitions that the result has, merge those with "
        "keys (--into-key) that the result has",
        metavar="HOW",
    )
    into_key: tuple[str, ...] = option((), "Column that rows are merged by. Repeatable", metavar="COLUMN")
    into_partition: tuple[str, ...] = option(
        (), "Column that the table of --into is partitioned by where it is made. Repeatable", metavar="COLUMN"
    )
    into_format: Literal["delta", "parquet"] = option(
        "delta",
        "What --into DIR is: delta, a table of Delta Lake, or parquet, a local directory of Parquet files",
        metavar="NAME",
    )
    report: tuple[str, ...] = option(
        (), "File for the report, .html (a page) or .json (the data). Repeatable", unless=None, metavar="FILE"
    )
    metrics: str = option(
        "",
        "Serve /metrics for Prometheus and /healthz at HOST:PORT while it runs, such as 127.0.0.1:9467",
        unless="not served",
        metavar="HOST:PORT",
    )
    store: str = option(
        default_store,
        "Directory of the checkpoints, DIR or s3://bucket/prefix; it must outlive every node. With memory+ before "
        "it, checkpoints go to free memory of nodes first (engine duckdb)",
        unless="store/ in ~/.cache/ebbflow",
        metavar="DIR",
    )
    durable: Literal["before-commit", "behind"] = option(
        "before-commit",
        "When a checkpoint of a memory+ store is committed: before-commit, once the store behind has its data, or "
        "behind, earlier: a stage whose data is missing later is computed again",
        metavar="WHEN",
    )
    memory_tier: Literal["auto", "always"] = option(
        "auto",
        "Use of nodes' memory before a memory+ store: auto, where it is measured to be faster, or always",
        metavar="WHEN",
    )
    reuse: bool = option(True, "Reuse of stages that earlier runs finished")
    hysteresis: float = option(  # QOOP, Fig 2.15: 10-25 %
        0.15, "Fraction of the remaining time that a switch to another plan must save", min=0
    )
    interruption_rate: float | None = option(
        None,
        "Expected interruptions per node-hour",
        unless="estimated from observed losses; 0 on DuckDB, whose process sees none",
        unit="per node-hour",
        min=0,
    )
    weight: float = option(
        1.0,
        "Weight of this query among those that share the cluster: its share is its weight over their sum",
        above=0,
    )
    calibrate: bool = option(
        False, "Measurement of the engine's speed before the query, unless it is known", flags="--calibrate"
    )
    executor_memory: str | None = option(None, "Heap size of an executor, such as 1400m")
    conf: dict[str, str] = option(dict, "Further Spark settings")
    verify: bool = option(
        False,
        "Comparison of the result with DuckDB's on the same files; exit status 3 if they differ",
        in_file="comparison of the result with DuckDB's on the same files",
        flags="--verify",
    )
    allow_functions: tuple[str, ...] = option(
        (), "Functions that the SQL may call though they reach beyond the tables, such as read_csv"
    )
    fraction: float = option(
        1.0, "Fraction of the cluster that this query may count on", above=0, max=1, command=False
    )
    name: str = ""
    engine_reason: str = ""  # why auto has become this engine
    store_budget: float = option(
        20.0, "Size limit of checkpoints kept for later runs", unit="GiB", min=0, command=False
    )

    def __post_init__(self) -> None:
        from sqlglot.dialects.dialect import Dialect

        from ebbflow.planners.query.running.replanner import validate_options
        from ebbflow.planners.query.sql.forbidden import checked_functions

        options.check(self)
        options.check_metrics(self.metrics)
        check_master(self.master)
        try:
            Dialect.get_or_raise(self.dialect)
        except ValueError as error:
            raise OptionError(f"dialect must be one that sqlglot knows: {error}") from error
        if not self.sql.strip():
            raise OptionError("sql must hold a query; got an empty text")
        if bool(self.tables) == self.catalog:
            raise OptionError(
                "name the tables by tables=DIR (--tables DIR), a directory of Parquet files, or by catalog=True "
                f"(--catalog), not both; got {'both' if self.catalog else 'neither'}"
            )
        if self.at:
            from ebbflow.infra.tables.logs.versions import moment

            if self.catalog:
                raise OptionError(
                    "at (--at) needs tables=DIR (--tables DIR): a session's catalog has its own versions"
                )
            moment(self.at)
        if self.catalog and self.engine == "duckdb":
            raise OptionError("catalog=True needs engine spark: the embedded DuckDB has no catalog")
        if self.stages != "auto" and self.engine == "duckdb":
            raise OptionError(f"stages={self.stages} (--stages) needs engine spark; got {self.engine}")
        if self.calibrate and self.engine != "duckdb" and self.master.startswith("sc://"):
            raise OptionError(
                "calibrate (--calibrate) measures speed by the times of tasks, which a server of Spark Connect does "
                "not tell; leave it out"
            )
        if not self.store.strip():
            raise OptionError("store must name a directory, local or s3://; got an empty text")
        if self.store_place.tiered and (self.engine == "spark" or self.catalog):
            raise OptionError(
                f"store {self.store!r} needs engine duckdb, as Spark's executors do not read nodes' memory; give the "
                f"store behind it: {str(self.store_place.behind)!r} (--store), or --engine duckdb"
            )
        if self.engine == "spark" and not self.master:
            object.__setattr__(self, "master", LOCAL)
        self.store_place, self.tables_place, self.output_place, self.into_table  # noqa: B018  raises for a wrong one
        validate_options(self.hysteresis, 0.0, 0.0)
        object.__setattr__(self, "report", options.check_report_paths(self.report))
        object.__setattr__(self, "allow_functions", checked_functions(self.allow_functions))

    @cached_property
    def store_place(self) -> StorageLocation:
        """Return where checkpoints are."""
        return StorageLocation(self.store)

    @cached_property
    def tables_place(self) -> "StorageLocation | IcebergCatalogue | None":
        """Return the directory of the tables, or their catalogue of Iceberg; ``None`` for those of a session."""
        from ebbflow.infra.tables.logs.catalogues import SCHEME, IcebergCatalogue

        if self.tables and self.tables.startswith(SCHEME):
            return IcebergCatalogue.of(self.tables)
        return StorageLocation(self.tables) if self.tables else None

    @cached_property
    def output_place(self) -> StorageLocation | None:
        """Return where the rows of the result are written; ``None``: only to the store."""
        return StorageLocation(self.output) if self.output else None

    @cached_property
    def into_table(self) -> "Into | None":
        """Return the table that the rows of the result are written into, if any. Raises ``OptionError``."""
        chosen = {name: getattr(self, f"into_{name}") for name in ("mode", "key", "partition", "format")}
        named = [name for name, value in chosen.items() if value and value not in ("append", "delta")]
        if not self.into:
            if named:
                raise OptionError(f"into_{named[0]} (--into-{named[0]}) needs into (--into), the table")
            return None
        from ebbflow.infra.query.table_results import Into

        return Into.of(self.into, self.into_format, self.into_mode, self.into_key, self.into_partition)

    @classmethod
    def of(cls, sql: str, **options: Any) -> "QueryRequest":
        """Return a request for ``sql``, which may be a file's path."""
        return cls(read_sql(sql), **options)


def read_sql(text_or_path: str) -> str:
    """Return SQL text; an existing file's path, or anything ending in ``.sql``, is read."""
    from ebbflow.planners.query.sql.nesting import LONGEST

    text = text_or_path.strip()
    looks_like_path = text.endswith(".sql") and "\n" not in text
    if looks_like_path or (len(text) < 1024 and not set("\n ") & set(text) and Path(text).is_file()):
        # four bytes a character at most
        return user_files.read_text(
            text, max_bytes=4 * LONGEST, error=lambda said: OptionError(f"the query: {said}")
        )
    return text_or_path


_MASTER = re.compile(
    r"spark://[^\s:,/]+:[0-9]{1,5}(,[^\s:,/]+:[0-9]{1,5})*|spark://\[[0-9a-fA-F:]+\]:[0-9]{1,5}"
)


_CONNECT = re.compile(r"sc://([^\s:,/;\[\]]+|\[[0-9a-fA-F:]+\])(:[0-9]{1,5})?(/(;[^\s;=]+=[^\s;]*)*)?")
_PLAIN = ("use_ssl", "user_agent", "user_id")  # parameters that are no secrets


def check_master(master: str) -> None:
    """Raise ``OptionError`` for a Spark master's address of the wrong form, or one of Spark Connect with what may be
    a secret. Nothing is connected to."""
    if master.startswith("sc://"):
        place, *parameters = master.split(";")
        if other := [name for one in parameters if (name := one.partition("=")[0]) not in _PLAIN]:
            raise OptionError(
                f"the address of a Spark Connect server must not hold {other[0][:40]!r}, which logs and reports "
                f"would show; it may have {', '.join(_PLAIN)}, and a token goes into SPARK_CONNECT_AUTHENTICATE_TOKEN"
            )
        if not _CONNECT.fullmatch(master):
            raise OptionError(f"a Spark Connect server's address is sc://HOST:PORT; got {place!r:.120}")
    if master.startswith("spark://") and not _MASTER.fullmatch(master):
        raise OptionError(f"a Spark master's address is spark://HOST:PORT; got {master!r:.120}")


def meaning(request: QueryRequest) -> str:
    """Return what decides, besides SQL and tables, over results: the engine, and those settings that may change
    what a statement means. Checkpoints made under others are not reused."""
    told = [(key, request.conf[key]) for key in settings_of_meaning(request)]
    # raise the number when the types or values that DuckDB stores change: older outputs are not read then
    engine = "duckdb-4" if request.engine == "duckdb" else request.engine
    return f"{engine}-{hashlib.sha256(repr(told).encode()).hexdigest()[:12]}" if told else engine


def settings_of_meaning(request: QueryRequest) -> list[str]:
    """Return the names of those settings of Spark's that may change what a statement means."""
    prefix = "spark.sql."
    return sorted(
        key
        for key in request.conf
        if key.startswith(prefix)
        and (key == prefix + _RULES or not key.removeprefix(prefix).startswith(_HOW))
    )
