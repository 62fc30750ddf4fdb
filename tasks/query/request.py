"""What a user asks for: one query run, checked before anything starts.

Commands are made of what it declares, so that every start of the command line imports it: what is heavy waits.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ebbflow.infra.storage import user_files
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import options
from ebbflow.planners.model.options import asked

Engine = Literal["spark", "duckdb"]
PolicyName = Literal["qoop", "clarinet", "volcano", "single"]


def default_store() -> str:
    """Return where checkpoints go unless asked otherwise."""
    return str(home() / "store")


@dataclass(frozen=True)
class QueryRequest:
    """One query run. Raises ``OptionError`` for a value that breaks its rule."""

    sql: str
    tables: str | None = asked(
        None, "Folder of Parquet files, or of folders of them: DIR or s3://bucket/prefix", metavar="DIR"
    )
    catalog: bool = asked(False, "Use the tables that the Spark session's catalogue knows", flags="--catalog")
    engine: Engine = asked("spark", "Engine that runs the stages: spark, or duckdb (embedded, needs no Java)")
    stages: Literal["spark", "native", "auto"] = asked(
        "spark",
        "How Spark runs a stage: spark (its SQL), native (DuckDB in its tasks, where answers are proven equal), or "
        "auto, by cost",
        metavar="NAME",
    )
    master: str = asked(
        "local[2]", "Spark master: local[2], spark://host:7077, ...; 'cluster' is the one of cluster up"
    )
    policy: PolicyName = asked(
        "qoop",
        "Re-planning policy: qoop re-plans at each change, clarinet and volcano choose once, single runs one "
        "statement",
        in_file="how it is re-planned",
        metavar="NAME",
    )
    cuts: Literal["cost", "every-join", "none"] = asked(
        "cost",
        "Where plans are cut into stages: by cost, after every-join, or none",
        in_file="where plans are cut into stages",
        metavar="WHERE",
    )
    dialect: str = asked("spark", "SQL dialect of the query, as sqlglot names it")
    out: str | None = asked(None, "Write the result to this Parquet file", metavar="FILE")
    json: str | None = asked(None, "Write the report to this JSON file", metavar="FILE")
    report: str | None = asked(None, "Write the report to this HTML page", metavar="FILE")
    store: str = asked(
        default_store,
        "Where checkpoints live, DIR or s3://bucket/prefix; it must outlive every node",
        unless="store/ in ~/.cache/ebbflow",
        metavar="DIR",
    )
    reuse: bool = asked(True, "Take finished stages of earlier runs")
    hysteresis: float = asked(  # QOOP, Fig 2.15: 10-25 %
        0.15, "Fraction of the remaining time by which another plan must be sooner", least=0
    )
    hazard: float | None = asked(
        None,
        "Expected node losses per node-hour",
        unless="learnt from what happens",
        unit="losses per node-hour",
        least=0,
    )
    weight: float = asked(
        1.0,
        "Weight of this query among those that share the cluster: its share is its weight over their sum",
        above=0,
    )
    calibrate: bool = asked(
        False, "Measure the engine first if nothing is known of its speed", flags="--calibrate"
    )
    executor_memory: str | None = asked(None, "Heap size of an executor, such as 1400m")
    conf: dict[str, str] = asked(dict, "Further Spark settings")
    verify: bool = asked(
        False,
        "Compare the result with DuckDB's",
        in_file="compare the result with DuckDB's on the same files",
        flags="--verify",
    )
    allow_functions: tuple[str, ...] = asked(
        (), "That SQL may call though they reach beyond the tables, such as read_csv"
    )
    fraction: float = asked(
        1.0, "Of the cluster that this query may count on", above=0, most=1, command=False
    )
    title: str = ""
    store_budget: float = asked(
        20.0, "Of checkpoints kept for later runs", unit="GiB", least=0, command=False
    )

    def __post_init__(self) -> None:
        from sqlglot.dialects.dialect import Dialect

        from ebbflow.planners.query.running.replanner import validate_options
        from ebbflow.planners.query.sql.forbidden import checked_functions

        options.check(self)
        check_master(self.master)
        try:
            Dialect.get_or_raise(self.dialect)
        except ValueError as error:
            raise OptionError(f"dialect must be one that sqlglot knows: {error}") from error
        if not self.sql.strip():
            raise OptionError("sql must hold a query; got an empty text")
        if bool(self.tables) == self.catalog:
            raise OptionError(
                "name the tables by tables=DIR (--tables DIR), a folder of Parquet files, or by catalog=True "
                f"(--catalog), not both; got {'both' if self.catalog else 'neither'}"
            )
        if self.catalog and self.engine == "duckdb":
            raise OptionError("catalog=True needs engine spark: the embedded DuckDB has no catalogue")
        if self.stages != "spark" and self.engine != "spark":
            raise OptionError(f"stages={self.stages} (--stages) needs engine spark; got {self.engine}")
        if not self.store.strip():
            raise OptionError("store must name a folder, local or s3://; got an empty text")
        self.store_place, self.tables_place, self.out_place  # noqa: B018  a wrong one is refused here
        validate_options(self.hysteresis, 0.0, 0.0)
        object.__setattr__(self, "allow_functions", checked_functions(self.allow_functions))

    @cached_property
    def store_place(self) -> StorageLocation:
        """Return where checkpoints are."""
        return StorageLocation(self.store)

    @cached_property
    def tables_place(self) -> StorageLocation | None:
        """Return the folder of tables; ``None`` for those of a catalogue."""
        return StorageLocation(self.tables) if self.tables else None

    @cached_property
    def out_place(self) -> StorageLocation | None:
        """Return where the result is to be written."""
        return StorageLocation(self.out) if self.out else None

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


def check_master(master: str) -> None:
    """Raise ``OptionError`` for the address of a Spark master that cannot be one. Nothing is asked."""
    if master.startswith("spark://") and not _MASTER.fullmatch(master):
        raise OptionError(f"a Spark master's address is spark://HOST:PORT; got {master!r:.120}")
