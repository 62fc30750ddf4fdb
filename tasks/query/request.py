"""What a user asks for: one query run, checked before anything starts."""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlglot.dialects.dialect import Dialect

from ebbflow.infra.storage import user_files
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.places import Place
from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.planner import CutPolicy, PlannerOptions
from ebbflow.planners.query.running.baselines import policy_named
from ebbflow.planners.query.running.replanner import validate_options
from ebbflow.planners.query.sql.forbidden import checked_functions
from ebbflow.planners.query.sql.nesting import LONGEST


def default_store() -> str:
    """Return where checkpoints go unless asked otherwise."""
    return str(home() / "store")


@dataclass(frozen=True)
class QueryRequest:
    """One query run. Raises ``OptionError`` for a value that breaks its rule."""

    sql: str
    tables: str | None = None  # folder of Parquet tables, local or s3://
    catalog: bool = False  # or the tables that the engine's own catalogue knows
    engine: str = "spark"
    master: str = "local[2]"
    policy: str = "qoop"
    cuts: CutPolicy = "cost"
    dialect: str = "spark"
    store: str = field(default_factory=default_store)
    reuse: bool = True  # of checkpoints that earlier runs have finished
    hysteresis: float = 0.15  # fraction by which another plan must be sooner (QOOP, Fig 2.15: 10-25 %)
    hazard: float | None = None  # expected losses per node-hour; None: learnt from what is observed
    fraction: float = 1.0  # of the cluster that this query may count on
    weight: float = 1.0  # among the queries that share the cluster
    executor_memory: str | None = None
    conf: dict[str, str] = field(default_factory=dict)  # further Spark settings
    out: str | None = None  # write the result here, as one Parquet file
    json: str | None = None  # write the report here
    report: str | None = None  # write the HTML report here
    title: str = ""
    calibrate: bool = False  # measure the engine first if nothing is known of its speed
    verify: bool = False  # compare the result with DuckDB on the same files
    store_budget: float = 20.0  # GiB of checkpoints kept for later runs
    allow_functions: tuple[
        str, ...
    ] = ()  # that reach beyond the tables, such as read_csv; else SQL may not call them

    def __post_init__(self) -> None:
        _one_of("engine", self.engine, ("spark", "duckdb"))
        policy_named(self.policy)
        check_master(self.master)
        PlannerOptions(cuts=self.cuts)
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
        if not 0.0 < self.fraction <= 1.0:
            raise OptionError(f"fraction must be in (0, 1]; got {self.fraction}")
        if not 0.0 < self.weight < math.inf:
            raise OptionError(f"weight must be > 0 and finite; got {self.weight}")
        if self.hazard is not None and not 0.0 <= self.hazard < math.inf:
            raise OptionError(f"hazard must be >= 0 losses per node-hour and finite; got {self.hazard}")
        if not 0.0 <= self.store_budget < math.inf:
            raise OptionError(f"store_budget must be >= 0 GiB and finite; got {self.store_budget}")
        if not self.store.strip():
            raise OptionError("store must name a folder, local or s3://; got an empty text")
        self.store_place, self.tables_place, self.out_place  # noqa: B018  a wrong one is refused here
        validate_options(self.hysteresis, 0.0, 0.0)
        object.__setattr__(self, "allow_functions", checked_functions(self.allow_functions))

    @cached_property
    def store_place(self) -> Place:
        """Return where checkpoints are."""
        return Place(self.store)

    @cached_property
    def tables_place(self) -> Place | None:
        """Return the folder of tables; ``None`` for those of a catalogue."""
        return Place(self.tables) if self.tables else None

    @cached_property
    def out_place(self) -> Place | None:
        """Return where the result is to be written."""
        return Place(self.out) if self.out else None

    @classmethod
    def of(cls, sql: str, **options: Any) -> "QueryRequest":
        """Return a request for ``sql``, which may be a file's path."""
        return cls(read_sql(sql), **options)


def read_sql(text_or_path: str) -> str:
    """Return SQL text; an existing file's path, or anything ending in ``.sql``, is read."""
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


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
