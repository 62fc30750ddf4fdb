"""Which queries, systems and schedules are compared, and in which order."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import sqlglot
from sqlglot.errors import SqlglotError

from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.sql.dialect import spark_sql
from tests.benchmarks.sql.schedules import SCHEDULES, Schedule, check

Suite = Literal["tpch", "tpcds"]
System = Literal["spark", "spark-cbo", "spark-tuned", "spark-tuned-cbo", "ebbflow"]
SUITES: tuple[Suite, ...] = get_args(Suite)
SYSTEMS: tuple[System, ...] = get_args(System)
PLAIN: tuple[System, ...] = ("spark", "spark-cbo", "spark-tuned", "spark-tuned-cbo")
ANALYSED: tuple[System, ...] = ("spark-cbo", "spark-tuned-cbo")  # with column statistics
TUNED: tuple[System, ...] = ("spark-tuned", "spark-tuned-cbo")

# TPC-H: every query that joins three relations or more in one block. TPC-DS: star and snowflake joins of three
# relations or more, from one dimension filter (Q42) to three fact tables (Q25, Q29) and dimensions of dimensions.
QUERIES: dict[Suite, tuple[int, ...]] = {
    "tpch": (2, 3, 5, 7, 8, 9, 10, 11, 18, 21),
    "tpcds": (3, 7, 19, 25, 26, 27, 29, 43, 52, 55, 91, 96),
}


@dataclass(frozen=True, slots=True, order=True)
class Query:
    """One query of a suite."""

    suite: Suite
    number: int

    @property
    def name(self) -> str:
        return f"{self.suite}-q{self.number}"


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run. ``pair`` counts rounds in which all systems take their turn, from 0."""

    query: Query
    schedule: Schedule
    pair: int
    system: System

    @property
    def case(self) -> tuple[str, int, str]:
        return (self.query.suite, self.query.number, self.schedule)

    @property
    def key(self) -> str:
        return f"{self.query.name}/{self.schedule}/{self.pair}/{self.system}"


@dataclass(frozen=True)
class Plan:
    """All that is to be compared. Raises ``OptionError`` for a value that breaks its rule."""

    queries: tuple[Query, ...]
    schedules: tuple[Schedule, ...] = SCHEDULES
    systems: tuple[System, ...] = SYSTEMS
    pairs: int = 5
    workers: int = 3
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.queries or not self.schedules or not self.systems:
            raise OptionError("at least one query, one schedule and one system must be given")
        if self.pairs < 1:
            raise OptionError(f"pairs must be >= 1; got {self.pairs}")
        for system in self.systems:
            if system not in SYSTEMS:
                raise OptionError(f"a system must be one of {', '.join(SYSTEMS)}; got {system!r}")
        for schedule in self.schedules:
            check(schedule, self.workers)

    @property
    def scaled_by(self) -> System:
        """Return the system whose undisturbed time scales the schedules: the first plain Spark, else Ebbflow."""
        return next((system for system in self.systems if system != "ebbflow"), "ebbflow")

    def rounds(self) -> Iterator[tuple[Run, ...]]:
        """Return the rounds in order; the runs of one round follow each other, so that the same weather holds.

        Undisturbed ones come first: after a loss an executor is new, none of its code is compiled, and whoever
        runs next would pay for it. Of the disturbed ones, all cases have had a round before any has the next: a
        benchmark that is cut short is still balanced. Which system begins rotates from round to round and from case
        to case.
        """
        cases = list(enumerate(product(self.queries, self.schedules)))
        undisturbed = [case for case in cases if case[1][1] == "none"]
        disturbed = [case for case in cases if case[1][1] != "none"]
        for some in (undisturbed, disturbed):
            for pair in range(self.pairs):
                for number, (query, schedule) in some:
                    yield tuple(
                        Run(query, schedule, pair, system) for system in rotated(self.systems, pair + number)
                    )

    def narrowed(self, runs: tuple[Run, ...], first: Mapping[System, float]) -> tuple[Run, ...]:
        """Return the runs of a round after the first: of several plain Sparks only the one that was soonest there.

        ``first`` are the seconds that each system took in the case's first round.
        """
        if not runs[0].pair:
            return runs
        plain = [run.system for run in runs if run.system in PLAIN and run.system in first]
        best = min(plain, key=lambda system: first[system], default=None)
        return tuple(run for run in runs if run.system not in PLAIN or run.system == best)

    def seed_of(self, run: Run) -> str:
        """Return what a run's schedule is drawn from: equal for the systems of a round."""
        return f"{self.seed}/{run.query.name}/{run.schedule}/{run.pair}"


def rotated(systems: Sequence[System], by: int) -> tuple[System, ...]:
    """Return ``systems`` with the first ``by`` moved to the end.

    >>> rotated(("spark", "spark-cbo", "ebbflow"), 1)
    ('spark-cbo', 'ebbflow', 'spark')
    """
    by %= len(systems)
    return (*systems[by:], *systems[:by])


def chosen_queries(suites: Iterable[str], asked: Iterable[str] = ()) -> tuple[Query, ...]:
    """Return the asked queries, ``5`` (of every suite) or ``tpch:5``; without any, each suite's own choice.

    Raises ``OptionError`` for an unknown suite or a word that names no query.
    """
    known: list[Suite] = []
    for suite in suites:
        if suite not in SUITES:
            raise OptionError(f"a suite must be one of {', '.join(SUITES)}; got {suite!r}")
        known.append(suite)  # type: ignore[arg-type]
    found = []
    for word in asked:
        prefix, _, number = word.strip().rpartition(":")
        last = 99 if prefix == "tpcds" or (not prefix and "tpcds" in known) else 22
        if not number.isdigit() or not 1 <= int(number) <= last or (prefix and prefix not in known):
            raise OptionError(f"queries must be numbers such as 5 or {known[0]}:5, by commas; got {word!r}")
        found += [Query(s, int(number)) for s in known if not prefix or s == prefix]
    if not found:
        found = [Query(suite, number) for suite in known for number in QUERIES[suite]]
    return tuple(dict.fromkeys(found))


def query_text(query: Query, tables: Path) -> str:
    """Return a query in Spark's SQL: TPC-H's come with Ebbflow, others' lie in ``queries/`` in or beside the
    tables, in DuckDB's dialect, as ``ebbflow data tpcds`` writes them.

    Raises ``OptionError`` when there is no such file.
    """
    name = f"q{query.number}.sql"
    if query.suite == "tpch":
        try:
            return (files("ebbflow.flows") / "tpch" / name).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise OptionError(f"TPC-H has queries 1 to 22; got {query.number}") from error
    for folder in (tables / "queries", tables.parent / "queries"):
        if (folder / name).is_file():
            return _for_spark(query, (folder / name).read_text(encoding="utf-8"))
    raise OptionError(f"{query.name} has no text: put it into {tables.parent / 'queries' / name}")


def _for_spark(query: Query, text: str) -> str:
    """Return DuckDB's text as Spark takes it; all systems are given the same. Raises ``OptionError``."""
    try:
        (found,) = (e for e in sqlglot.parse(text, read="duckdb") if e is not None)
    except (SqlglotError, ValueError) as error:
        raise OptionError(f"{query.name} is not one statement in DuckDB's dialect: {error}") from error
    return spark_sql(found, pretty=True)
