"""What changes from run to run in a query: clocks become literals, other volatile functions are noted."""

from datetime import UTC, datetime, timedelta
from typing import cast

from sqlglot import exp

from ebbflow.planners.query.sql.dialect import spark_sql
from ebbflow.planners.query.sql.functions import (
    CALLS,
    CLOCK_DATES,
    CLOCK_LOCAL,
    CLOCK_NAMES,
    CLOCK_TIMES,
    CLOCK_ZONED,
    CLOCKS,
    changes,
)

# Days from today, of the words that Spark reads as a date or a time.
_DAYS = {"now": 0, "today": 0, "tomorrow": 1, "yesterday": -1}


_TIMES = (exp.DType.TIMESTAMP, exp.DType.TIMESTAMPTZ, exp.DType.TIMESTAMPLTZ, exp.DType.TIMESTAMPNTZ)


def freeze(query: exp.Query, now: datetime, dialect: str = "spark") -> tuple[exp.Query, tuple[str, ...]]:
    """Replace clock functions by literals of ``now`` (UTC) and note volatile functions.

    Spark evaluates clock functions once per statement; a query that is split into statements must fix them
    once for all of them. ``dialect`` is the query's: to DuckDB the time now has a time zone.
    """
    zoned = dialect.lower() == "duckdb"
    stamp = now.astimezone(UTC)
    notes: dict[str, None] = {}

    def literal(node: exp.Expr) -> exp.Expr:
        word = _moment(node, stamp)
        if word is not None:
            notes[f"{spark_sql(node)} is fixed at {word.name} for this run"] = None
            node.set("this", word)
            return node
        name = node.name.lower() if isinstance(node, exp.Anonymous) else node.key
        if zoned and name == "ago" and isinstance(node, exp.Anonymous) and len(node.expressions) == 1:
            since = exp.cast(node.expressions[0], exp.DType.INTERVAL)
            return exp.paren(exp.Sub(this=literal(exp.CurrentTimestamp()), expression=since), copy=False)
        clock = isinstance(node, CLOCKS) or (isinstance(node, exp.Anonymous) and name in CLOCK_NAMES)
        if not clock:
            if is_volatile_function(node):
                notes[f"{spark_sql(node)} is not deterministic: stages that contain it are never reused"] = (
                    None
                )
            return node
        time_zone = zoned and (isinstance(node, exp.CurrentTime) or name in CLOCK_ZONED)
        if isinstance(node, exp.CurrentDate) or name in CLOCK_DATES:
            kind, value = "DATE", stamp.date().isoformat()
        elif isinstance(node, exp.CurrentTime | exp.Localtime) or name in CLOCK_TIMES:
            kind, value = "TIME", stamp.strftime("%H:%M:%S.%f")
        elif isinstance(node, exp.Localtimestamp | exp.CurrentDatetime) or name in CLOCK_LOCAL:
            kind, value = "TIMESTAMPNTZ", stamp.strftime("%Y-%m-%d %H:%M:%S.%f")
        else:  # an instant, whatever the session's time zone is
            kind, value = "TIMESTAMPTZ", stamp.strftime("%Y-%m-%d %H:%M:%S.%f+00:00")
        notes[f"{spark_sql(node)} is fixed at {value} for this run"] = None
        frozen = exp.cast(exp.Literal.string(value), kind)
        return exp.cast(frozen, "TIMETZ") if time_zone else frozen

    return cast("exp.Query", query.transform(literal)), tuple(notes)


def _moment(node: exp.Expr, stamp: datetime) -> exp.Literal | None:
    """Return the literal for a word such as ``today`` that ``node`` reads as a date or a time."""
    if isinstance(node, exp.Cast):
        kind = node.to.this
    elif isinstance(node, exp.TsOrDsToDate) and node.args.get("format") is None:
        kind = exp.DType.DATE
    else:
        return None
    word = node.this.name.strip().lower() if isinstance(node.this, exp.Literal) else ""
    if word not in _DAYS or kind not in (exp.DType.DATE, *_TIMES):
        return None
    day = stamp + timedelta(days=_DAYS[word])
    if kind == exp.DType.DATE:
        return exp.Literal.string(day.date().isoformat())
    if word != "now":
        day = day.replace(hour=0, minute=0, second=0, microsecond=0)
    zone = "" if kind == exp.DType.TIMESTAMPNTZ else "+00:00"
    return exp.Literal.string(day.strftime("%Y-%m-%d %H:%M:%S.%f") + zone)


def is_volatile_function(node: exp.Expr) -> bool:
    """Tell whether ``node`` itself is a call whose value differs from row to row or run to run, or a word that
    stands for another day each day where it is compared with a date."""
    if isinstance(node, exp.Literal):
        return node.is_string and node.name.strip().lower() in _DAYS
    return changes(node)


def is_volatile(node: exp.Expr) -> bool:
    """Tell whether ``node`` contains a volatile function or a sample."""
    return any(is_volatile_function(n) for n in node.find_all(*CALLS, exp.Literal))


def draws_again(query: exp.Query) -> bool:
    """Tell whether a SELECT uses an alias for a random value: qualifying would put the call in the alias' place."""
    for select in query.find_all(exp.Select):
        drawn = {i.alias.lower() for i in select.selects if isinstance(i, exp.Alias) and is_volatile(i)}
        for column in select.find_all(exp.Column) if drawn else ():
            order = column.find_ancestor(exp.Order)  # that of a SELECT names its outputs
            own = order is None or isinstance(order.parent, exp.Window)
            if own and not column.table and column.name.lower() in drawn:
                return True
    return False
