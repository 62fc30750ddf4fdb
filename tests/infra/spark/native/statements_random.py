"""Random statements of what native stages claim to compute as Spark does, and tables to run them on."""

import datetime as dt
import random
import re
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = (
    ("k", "int"), ("i", "int"), ("j", "int"), ("l", "bigint"), ("d", "decimal(7,2)"), ("e", "decimal(15,2)"),
    ("w", "decimal(38,10)"), ("x", "double"), ("s", "string"), ("r", "string"), ("t", "date"), ("u", "date"),
    ("b", "boolean"), ("z", "timestamp"), ("y", "timestamp_ntz"), ("f", "float"), ("h", "smallint"),
)  # fmt: skip
_ARROW = {
    "int": pa.int32(), "bigint": pa.int64(), "decimal(7,2)": pa.decimal128(7, 2),
    "decimal(15,2)": pa.decimal128(15, 2), "decimal(38,10)": pa.decimal128(38, 10), "double": pa.float64(),
    "string": pa.string(), "date": pa.date32(), "boolean": pa.bool_(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"), "float": pa.float32(),
    "smallint": pa.int16(),
}  # fmt: skip
_TEXTS = ["", "a", "abc", "ABC", "ab c", " b ", "ähnlich", "日本語", "😀x", "a%b", "a_b", "'", "10", "z" * 40]
_DAYS = ["0500-01-01", "1582-10-10", "1900-02-28", "2000-02-29", "2023-01-31", "2024-12-31", "5000-12-31"]


def table(path: Path, rng: random.Random, *, wild: bool, repeated: bool = False, rows: int = 60) -> None:
    """Write a table; ``wild`` has the values at which types end, ``repeated`` keys that are null or not unique."""

    def whole(bits: int) -> int:
        if wild and rng.random() < 0.4:
            return rng.choice([2 ** (bits - 1) - 1, -(2 ** (bits - 1)), 0, -1, 1])
        return rng.randint(-50, 50)

    def number(precision: int, scale: int) -> Decimal:
        digits = rng.randint(1, precision if wild else min(precision, 6))
        return Decimal(rng.randint(-(10**digits) + 1, 10**digits - 1)).scaleb(-scale)

    def key(row: int) -> int | None:
        chance = rng.random()
        return None if chance < 0.1 else rng.choice([7, rng.randrange(rows)]) if chance < 0.3 else row

    def time() -> dt.datetime:
        year = rng.choice([500, 1582, 1969, 2000, 5000]) if wild else rng.randint(1965, 2030)
        micros = rng.choice([0, 0, 500_000, 999_999, rng.randrange(86_400_000_000)])
        return dt.datetime(year, rng.randint(1, 12), rng.randint(1, 28)) + dt.timedelta(microseconds=micros)

    made = {
        "int": lambda: whole(32),
        "bigint": lambda: whole(64),
        "decimal(7,2)": lambda: number(7, 2),
        "decimal(15,2)": lambda: number(15, 2),
        "decimal(38,10)": lambda: number(38, 10),
        "double": lambda: rng.choice([0.0, -0.0, 1.5, -2.25, 1e10, 0.1, *([float("nan"), 1e308] * wild)]),
        "string": lambda: rng.choice(_TEXTS),
        "date": lambda: dt.date.fromisoformat(
            rng.choice(_DAYS)
            if wild
            else f"{rng.randint(1990, 2030)}-0{rng.randint(1, 9)}-{rng.randint(10, 28)}"
        ),
        "boolean": lambda: rng.random() < 0.5,
        "timestamp": lambda: time().replace(tzinfo=dt.UTC),
        "timestamp_ntz": time,
        "float": lambda: rng.choice([0.0, -0.0, 1.5, -2.25, 0.1, *([float("nan"), 1e38] * wild)]),
        "smallint": lambda: whole(16),
    }
    columns = {}
    for name, kind in COLUMNS:
        values = [made[kind]() if rng.random() > 0.15 else None for _ in range(rows)]
        if name == "k":
            values = [key(row) for row in range(rows)] if repeated else list(range(rows))
        columns[name] = pa.array(values, _ARROW[kind])
    pq.write_table(pa.table(columns), path, row_group_size=20)


class Expressions:
    """Random expressions by type."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def of(self, kind: str, depth: int) -> str:
        """Return an expression of ``kind`` with at most ``depth`` levels."""
        made = getattr(self, f"_{kind}")
        found: str = made(depth)
        return found

    def any(self, depth: int) -> str:
        """Return an expression of any kind."""
        return self.of(
            self.rng.choice(["int", "long", "decimal", "double", "text", "date", "bool", "time", "clock"]),
            depth,
        )

    def _chosen(self, kind: str, depth: int) -> str:
        a, b = self.of(kind, depth - 1), self.of(kind, depth - 1)
        test = self.of("bool", depth - 1)
        return self.rng.choice([
            f"CASE WHEN {test} THEN {a} ELSE {b} END", f"CASE WHEN {test} THEN {a} END", f"coalesce({a}, {b})",
            f"if({test}, {a}, {b})", f"nullif({a}, {'1.5D' if kind == 'double' else b})", f"nvl({a}, {b})",
        ])  # fmt: skip

    def _int(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(
                ["i", "j", "k", "i", "j", "7", "0", "-3", "2147483647", "CAST(NULL AS INT)"]
            )
        a, b = self.of("int", depth - 1), self.of("int", depth - 1)
        t, u, s = self.of("date", depth - 1), self.of("date", depth - 1), self.of("text", depth - 1)
        return self.rng.choice([
            f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"(- {a})", f"abs({a})", f"({a} % {b})", f"year({t})",
            f"month({t})", f"day({t})", f"quarter({t})", f"extract(year FROM {t})", f"length({s})",
            f"datediff({t}, {u})", f"dayofweek({t})", f"weekday({t})", f"dayofyear({u})", f"weekofyear({t})",
            f"hour({self.of('time', depth - 1)})", f"minute({self.of('clock', depth - 1)})", "second(z)", "(h + 1)",
            f"extract(hour FROM {self.of('clock', 0)})", f"instr({s}, 'b')", f"greatest({a}, {b})",
            f"CAST({self.of('long', depth - 1)} AS INT)", self._chosen("int", depth),
        ])  # fmt: skip

    def _long(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(["l", "l", "12345678901", "CAST(i AS BIGINT)"])
        a, b = self.of("long", depth - 1), self.of("long", depth - 1)
        i = self.of("int", depth - 1)
        return self.rng.choice([
            f"({a} + {b})", f"({a} - {i})", f"({a} * {i})", f"(- {a})", f"abs({a})", f"({a} % {b})",
            self._chosen("long", depth), f"floor({self.of('double', 0)})", "ceil(x)", f"least({a}, {b})",
        ])  # fmt: skip

    def _decimal(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(
                ["d", "e", "d", "e", "w", "0.05", "1", "100.00", "-7.5", "0.000001", "1BD"]
            )
        a, b = self.of("decimal", depth - 1), self.of("decimal", depth - 1)
        kind = self.rng.choice(
            ["decimal(7,2)", "decimal(10,0)", "decimal(18,6)", "decimal(38,18)", "decimal(5,4)"]
        )
        return self.rng.choice([
            f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} / {b})", f"(- {a})", f"abs({a})",
            f"CAST({a} AS {kind})", f"CAST({self.of('int', depth - 1)} AS {kind})", f"({a} + {self.of('int', 0)})",
            f"(e / {b})", f"(d * {a})", f"round({a}, {self.rng.randint(0, 4)})", self._chosen("decimal", 1),
        ])  # fmt: skip

    def _double(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(
                ["x", "x", "1.5D", "CAST(i AS DOUBLE)", "CAST(d AS DOUBLE)", "CAST(w AS DOUBLE)"]
            )
        a, b = self.of("double", depth - 1), self.of("double", depth - 1)
        return self.rng.choice([
            f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} / {b})", f"(i / {b})",
            f"round({a}, {self.rng.randint(0, 4)})", self._chosen("double", depth), "CAST(f AS DOUBLE)", f"(- {a})",
            f"abs({a})", f"greatest({a}, {b})", f"sqrt({a})", "(f + x)", "CAST(h AS DOUBLE)",
        ])  # fmt: skip

    def _text(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(["s", "r", "s", "'ab'", "'it''s'", "''", "CAST(i AS STRING)"])
        a, b = self.of("text", depth - 1), self.of("text", depth - 1)
        at, count = self.rng.randint(1, 4), self.rng.randint(0, 5)
        return self.rng.choice([
            f"substring({a}, {at}, {count})", f"({a} || {b})", f"concat({a}, {b}, 'x')", f"left({a}, {count})",
            self._chosen("text", depth), f"trim({a})", f"rtrim({a})", f"ltrim({a})", f"replace({a}, 'b', {b})",
        ])  # fmt: skip

    def _date(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(["t", "u", "t", "DATE '1998-12-01'", "CAST('2020-02-29' AS DATE)"])
        a, count = self.of("date", depth - 1), self.rng.randint(0, 40)
        return self.rng.choice([
            f"({a} + INTERVAL '{count}' DAY)", f"({a} - INTERVAL '{count}' MONTH)", f"date_add({a}, {count})",
            f"date_sub({a}, j)", f"({a} + INTERVAL '{count}' YEAR)", self._chosen("date", depth),
            f"trunc({a}, '{self.rng.choice(['MM', 'year', 'QUARTER', 'week'])}')", f"last_day({a})",
            f"CAST({self.of('time', depth - 1)} AS DATE)", f"to_date({self.of('clock', depth - 1)})",
        ])  # fmt: skip

    def _time(self, depth: int) -> str:
        return self._timed("timestamp", "z", depth)

    def _clock(self, depth: int) -> str:
        return self._timed("timestamp_ntz", "y", depth)

    def _timed(self, kind: str, column: str, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(
                [column, column, f"{kind} '1998-12-01 10:20:30.5'", f"{kind} '2020-02-29'"]
            )
        a, b = self._timed(kind, column, depth - 1), self._timed(kind, column, depth - 1)
        unit = self.rng.choice(
            ["year", "QUARTER", "MM", "week", "day", "HOUR", "minute", "second", "millisecond"]
        )
        count = self.rng.randint(0, 40)
        other = self.rng.choice(["z", "y", self.of("date", depth - 1)])
        return self.rng.choice([
            f"date_trunc('{unit}', {a})" if kind == "timestamp" else a, f"({a} + INTERVAL '{count}' DAY)",
            f"({a} - INTERVAL '{count}' MINUTE)", f"({a} + INTERVAL '{count}' MONTH)", f"CAST({other} AS {kind})",
            f"coalesce({a}, {b})", f"greatest({a}, {b})",
        ])  # fmt: skip

    def _bool(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(["b", "b", "(i < j)", "(s IS NULL)", "true", "(i = 3)"])
        kind = self.rng.choice(["int", "long", "decimal", "text", "date", "double", "time", "clock"])
        a, b, c = (self.of(kind, depth - 1) for _ in range(3))
        p, q = self.of("bool", depth - 1), self.of("bool", depth - 1)
        text = self.of("text", depth - 1)
        sign = self.rng.choice(["<", "<=", ">", ">=", *(["=", "<>", "<=>"] * (kind != "double"))])
        return self.rng.choice([
            f"({a} {sign} {b})", f"({a} {sign} {b})", f"({a} BETWEEN {b} AND {c})", f"({p} AND {q})", f"({p} OR {q})",
            f"(NOT {p})", f"({a} IS NULL)", f"({a} IS NOT NULL)", f"({text} LIKE 'a%b')", f"({text} LIKE '_b%')",
            f"({text} NOT LIKE '%b')", f"({text} IN ('a', 'abc', NULL))", "(i IN (1, 2, j))",
            f"startswith({text}, 'a')", f"contains({text}, s)", f"endswith({text}, r)",
            f"(i + 0.5 > {self.of('decimal', 0)})", "(z >= '1998-12-01')",
            f"({self.of('time', 0)} < {self.of('date', 0)})",
            f"isnan({self.of('double', 0)})", "(f > 1)", "(x = 1.5D)", "(x IN (0.0D, 1.5D))",
            "(0.1D <> x)", "(h < i)", "(z BETWEEN '1969-06-01' AND '2001-01-01')",
            "(y > z)",
        ])  # fmt: skip


def statement(rng: random.Random) -> str:
    """Return a random statement over the tables ``one`` and ``two``."""
    some = Expressions(rng)
    kind = rng.choice(["rows", "groups", "joined", "all", "sets", "inner", "windows"])
    where = f" WHERE {some.of('bool', 2)}" if rng.random() < 0.6 else ""
    if kind == "rows":
        items = ", ".join(f"{some.any(2)} AS c{n}" for n in range(rng.randint(1, 5)))
        order = rng.choice(
            [" ORDER BY k", " ORDER BY s DESC, k", " ORDER BY t NULLS LAST, k DESC LIMIT 7", ""]
        )
        return f"SELECT k, {items} FROM one{where}{order}"
    if kind == "sets":
        word = rng.choice(["UNION", "UNION ALL", "INTERSECT", "EXCEPT"])
        return f"SELECT i, s FROM one{where} {word} SELECT j, s FROM two"
    if kind == "inner":
        return rng.choice([
            f"SELECT k, s FROM one WHERE i IN (SELECT j FROM two{where})",
            "SELECT k, s FROM one WHERE i NOT IN (SELECT j FROM two WHERE j IS NOT NULL)",
            "SELECT k FROM one WHERE EXISTS (SELECT 1 FROM two WHERE two.i = one.j AND two.s <> one.s)",
            "SELECT k FROM one WHERE NOT EXISTS (SELECT 1 FROM two WHERE two.i = one.j)",
            "SELECT k FROM one WHERE e > (SELECT avg(e) FROM two WHERE two.s = one.s)",
            "WITH m AS (SELECT s, sum(e) AS v FROM one GROUP BY s) SELECT s FROM m WHERE v = (SELECT max(v) FROM m)",
            "SELECT k, s FROM one WHERE i NOT IN (SELECT j FROM two)",
        ])  # fmt: skip
    if kind == "windows":
        return _windows(rng, some, where)
    value, other = some.of("decimal", 1), some.of("int", 1)
    calls = rng.sample([
        "count(*)", f"sum({value})", "avg(e)", "avg(d)", f"avg({value})", f"sum({other})", f"avg({other})",
        f"min({some.of('date', 1)})",
        f"max({some.of('text', 1)})", f"count({some.any(1)})", "count(DISTINCT s)", f"min({value})", "sum(l)",
        f"sum(CASE WHEN {some.of('bool', 1)} THEN e ELSE 0 END) / sum(e)", "count(*) FILTER (WHERE b)",
        "sum(d)", "max(w)",
        "0.2 * avg(w)", "sum(DISTINCT j)", "avg(DISTINCT CAST(e AS DECIMAL(9,1)))", "sum(x)", "avg(x * 2)", "min(x)",
        "max(x)", "count(DISTINCT x)", "stddev(x)", "var_pop(x)", "stddev_pop(i)", "variance(j)", "stddev_samp(d)",
        f"count({some.of('double', 1)})", "sum(x) FILTER (WHERE b)", "bool_or(b)", "every(i > 3)",
        "count_if(b)", "max(z)", f"min({some.of('clock', 1)})", "sum(f)", "min(f)", "max(h)", "count(DISTINCT z)",
        "stddev(e) FILTER (WHERE b)", "sum(abs(-x))",
    ], 3)  # fmt: skip
    items = ", ".join(f"{call} AS c{n}" for n, call in enumerate(calls))
    if kind == "all":
        return rng.choice([f"SELECT {items} FROM one{where}", _subqueries(rng, some, calls)])
    key = rng.choice(
        ["s", "b", "t", "substring(s, 1, 1)", "year(t)", "i % 3", "s, b", "DISTINCT", "x", "x, b"]
    )
    if key == "DISTINCT":
        return f"SELECT DISTINCT s, b FROM one{where} ORDER BY s, b"
    if kind == "groups" and rng.random() < 0.3:
        sets = rng.choice(["ROLLUP(s, b)", "CUBE(s, b)", "GROUPING SETS ((s), (b, s), ())", "s, ROLLUP(b)"])
        listed = f"s, b, grouping(s) AS g, grouping(s) + grouping(b) AS h, {items}"
        rows = f"SELECT {listed} FROM one{where} GROUP BY {sets}"
        ranked = f"SELECT s, b, h, rank() OVER (PARTITION BY h, s ORDER BY c0, b) AS r FROM ({rows})"
        return rng.choice([rows, f"{rows} HAVING count(*) > 2", ranked])
    if kind == "groups":
        having = rng.choice(["", " HAVING count(*) > 2", " HAVING sum(e) > 0"])
        return f"SELECT {key}, {items} FROM one{where} GROUP BY {key}{having}"
    word = rng.choice(["JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "LEFT SEMI JOIN", "LEFT ANTI JOIN"])
    same = rng.choice(
        [
            "one.i = two.j",
            "one.i = two.j",
            "one.l = two.i",
            "one.s = two.r",
            "one.e = two.e",
            "one.b = two.b",
        ]
    )
    test = rng.choice(["one.k > two.k", "two.k < 30 AND one.j > 0", "one.t > two.t"])
    joined = f"FROM one {word} two ON {same} AND {test}{rng.choice(['', ' WHERE one.k < 40'])}"
    if word in ("LEFT SEMI JOIN", "LEFT ANTI JOIN"):
        return f"SELECT one.k, one.s {joined}"
    return f"SELECT one.s, count(*) AS n, sum(one.e) AS v {joined} GROUP BY one.s"


def _subqueries(rng: random.Random, some: Expressions, calls: list[str]) -> str:
    """Return a statement with subqueries of rows of one table that pass tests."""
    tests = ["", " WHERE i BETWEEN -20 AND 20", " WHERE b OR s IS NULL", f" WHERE {some.of('bool', 1)}"]
    items = ", ".join(f"(SELECT {call} FROM one{rng.choice(tests)}) AS c{n}" for n, call in enumerate(calls))
    return f"SELECT {items} FROM two WHERE k < 2"


def _windows(rng: random.Random, some: Expressions, where: str) -> str:
    """Return a statement with calls over windows, of rows or of groups."""
    by = rng.choice(["", "PARTITION BY s ", "PARTITION BY b, year(t) ", "PARTITION BY i % 3 "])
    order = rng.choice(["ORDER BY k", "ORDER BY e DESC, k", "ORDER BY t NULLS LAST, s DESC NULLS FIRST"])
    running = f"{by}ORDER BY s, k {rng.choice(['ROWS', 'RANGE'])} BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW"
    rest = f"{by}ORDER BY k DESC ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING"
    value, whole = some.of("decimal", 1), some.of("int", 1)
    calls = rng.sample([
        f"rank() OVER ({by}{order})", f"dense_rank() OVER ({by}{order})", f"row_number() OVER ({by}ORDER BY k)",
        f"sum({value}) OVER ({by})", f"sum(e) OVER ({by}{order})", f"sum(i) OVER ({running})",
        f"sum(l) OVER ({rest})", f"avg(e) OVER ({running})", f"avg(d) OVER ({by})",
        f"avg({whole}) OVER ({by}{order})", f"max(s) OVER ({rest})", f"count(*) OVER ({by}{order})",
        f"count({some.any(1)}) OVER ({by})", f"d * 100 / sum(d) OVER ({by})",
        f"min({some.of('date', 1)}) OVER ({running})", f"rank() OVER ({by}ORDER BY x DESC)", f"sum(x) OVER ({by})",
        f"max(x) OVER ({running})",
    ], 3)  # fmt: skip
    if rng.random() < 0.5:
        items = ", ".join(f"{call} AS c{n}" for n, call in enumerate(calls))
        rows = f"SELECT k, s, {items} FROM one{where}"
        return rng.choice([rows, f"SELECT * FROM ({rows}) WHERE k < 30", f"{rows} ORDER BY k DESC LIMIT 7"])
    grouped = (
        "SELECT s, b, sum(e) AS v, sum(sum(e)) OVER (PARTITION BY b) AS w, avg(sum(d)) OVER (PARTITION BY s) AS x, "
        f"rank() OVER (PARTITION BY b ORDER BY sum(e) DESC, s) AS r FROM one{where} GROUP BY s, b"
    )
    rank = rng.choice([f"rank() OVER ({by}{order})", f"row_number() OVER ({by}ORDER BY k)"])
    first = (
        f"(SELECT k, s, {rank} AS r FROM one{where}) WHERE r {rng.choice(['<= 3', '= 1', '< 3 AND k > 9'])}"
    )
    best = f"dense_rank() OVER (PARTITION BY b ORDER BY sum(e) DESC) AS r FROM one{where} GROUP BY s, b"
    return rng.choice([
        grouped, f"SELECT * FROM ({grouped}) WHERE r <= 2 ORDER BY b, r, s LIMIT 5", f"SELECT * FROM {first}",
        f"SELECT s, count(*) AS n FROM {first} GROUP BY s", f"SELECT * FROM (SELECT s, b, {best}) WHERE r <= 2",
    ])  # fmt: skip


def united(rng: random.Random) -> str:
    """Return a statement over the rows of several ones."""
    arms = [
        rng.choice([
            "SELECT k, s, e AS v FROM one WHERE i < 30", "SELECT k, r, CAST(d AS DECIMAL(15,2)) FROM one",
            "SELECT k, s, e + d FROM two", "SELECT one.k, two.s, one.e FROM one JOIN two ON one.k = two.k",
            "SELECT k, s, sum(e) FROM one GROUP BY k, s", "SELECT k, 'x', CAST(0 AS DECIMAL(7,2)) FROM two",
            "SELECT k, s, e FROM one WHERE k IN (SELECT k FROM two) UNION ALL SELECT k, s, 1.5 FROM one",
        ])
        for _ in range(rng.randint(2, 3))
    ]  # fmt: skip
    rows = f"({' UNION ALL '.join(arms)}) AS u(k, s, v)"
    return rng.choice([
        f"SELECT s, count(*) AS n, sum(v) AS v, avg(v) AS a FROM {rows} GROUP BY s",
        f"SELECT two.s, count(*) AS n, max(v) AS v FROM two JOIN {rows} ON two.k = u.k WHERE v > 0 GROUP BY two.s",
        f"SELECT k, s, v FROM {rows} ORDER BY k, s, v LIMIT 9", f"SELECT DISTINCT s FROM {rows}",
        f"SELECT k, v FROM {rows} WHERE v > (SELECT avg(e) FROM one WHERE one.k = u.k)",
        f"SELECT u.k, v, two.i FROM {rows} LEFT JOIN two ON two.k = u.k AND two.i < u.v",
        f"SELECT s, v, sum(v) OVER (PARTITION BY s) AS w FROM {rows}", f"SELECT k, s, v FROM {rows}",
        f"SELECT count(DISTINCT s) AS n FROM {rows}", f"SELECT s, k, sum(v) AS v FROM {rows} GROUP BY ROLLUP(s, k)",
    ])  # fmt: skip


def keyed(rng: random.Random) -> str:
    """Return a statement whose tables are joined, compared and grouped by ``k``."""
    if rng.random() < 0.6:
        return f"SELECT k, i, s, e FROM {_related(rng, 3)}"
    shared = f"WITH m AS (SELECT k, i, s, e FROM {_related(rng, 2)})"
    return f"{shared} SELECT k, i, s, e FROM {_related(rng, 3, ('one', 'one', 'two', 'm'))}"


def _related(rng: random.Random, depth: int, tables: tuple[str, ...] = ("one", "one", "two")) -> str:
    """Return a relation of the columns k, i, s and e, with an alias."""
    name = f"r{rng.randrange(10**9)}"
    if depth == 0 or rng.random() < 0.2:
        return f"(SELECT k, i, s, e FROM {rng.choice(tables)}) {name}"
    below = _related(rng, depth - 1, tables)
    left = below.rpartition(" ")[2]
    form = rng.choice(["join", "join", "join", "where", "where", "group", "distinct", "limit"])
    if form == "group":
        return f"(SELECT k, min(i) AS i, min(s) AS s, max(e) AS e FROM {below} GROUP BY k) {name}"
    if form == "distinct":
        return f"(SELECT DISTINCT k, i, s, e FROM {below}) {name}"
    if form == "limit":
        return f"(SELECT k, i, s, e FROM {below} ORDER BY k, i, s, e LIMIT 30) {name}"
    other = _related(rng, depth - 1, tables)
    right = other.rpartition(" ")[2]
    if form == "where":
        test = rng.choice([
            f"{left}.k IN (SELECT k FROM {other})", f"{left}.k NOT IN (SELECT k FROM {other})",
            f"EXISTS (SELECT 1 FROM {other} WHERE {right}.k = {left}.k AND {right}.i < 20)",
            f"NOT EXISTS (SELECT 1 FROM {other} WHERE {left}.k = {right}.k AND {right}.s <> {left}.s)",
            f"{left}.e > (SELECT avg(e) FROM {other} WHERE {right}.k = {left}.k)",
            f"({left}.i < 10 OR {left}.k IN (SELECT k FROM {other}))", f"{left}.i = {left}.k", f"{left}.i < 20",
        ])  # fmt: skip
        return f"(SELECT k, i, s, e FROM {below} WHERE {test}) {name}"
    word = rng.choice(
        ["JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "LEFT SEMI JOIN", "LEFT ANTI JOIN", ","]
    )
    tests = [
        f"{left}.k = {right}.k",
        f"{left}.i < {right}.i",
        f"{left}.k = {left}.i",
        f"{right}.k = {left}.i",
    ]
    chosen = " AND ".join(rng.sample(tests, rng.choice([1, 1, 2])))
    shown = (
        rng.choice([left, right]) if word in ("JOIN", "RIGHT JOIN", ",", "FULL JOIN", "LEFT JOIN") else left
    )
    on = "WHERE" if word == "," else "ON"
    columns = ", ".join(f"{shown}.{c} AS {c}" for c in "kise")
    return f"(SELECT {columns} FROM {below} {word} {other} {on} {chosen}) {name}"


def counted(rng: random.Random) -> str:
    """Return a statement that computes of one table's rows, joined with another's, calls for each group."""
    of, other = rng.choice([("two", "one"), ("one", "two")])
    value, whole = (
        re.sub(r"\b[a-z]\b", lambda column: f"{of}.{column[0]}", rng.choice(some))
        for some in (("e", "d", "e * (1 - d)", "e - 1"), ("i", "j", "i - j", "l"))
    )
    calls = rng.sample([
        "count(*)", f"count({of}.i)", f"sum({value})", f"avg({of}.d)", f"sum({whole})", f"avg({of}.i)",
        f"min({of}.t)", f"max({of}.s)", f"min({whole})", f"count({of}.s) * 2", "count(1)", "count(1 + 1)",
        f"max({value})", f"sum({of}.x)", f"avg({of}.x)", f"stddev({of}.x)", f"stddev({of}.i)", f"max({of}.x)",
    ], 3)  # fmt: skip
    word = rng.choice(["JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "JOIN", "LEFT JOIN"])
    on = (f"{of}.s NOT LIKE '%b'", f"{of}.i < {other}.i", f"{other}.j > 3", f"{of}.t < DATE '2020-01-01'")
    tests = " AND ".join(["one.k = two.k", *rng.sample(on, rng.randint(0, 1))])
    where = rng.choice(
        ["", f" WHERE {of}.j < 30", f" WHERE {other}.s IS NOT NULL", f" WHERE {of}.b OR {other}.b"]
    )
    by = rng.choice(
        [f"{other}.k", f"{of}.k", f"{other}.k, {other}.s", f"{other}.b", f"{of}.b, {other}.k", ""]
    )
    tables = rng.choice(["one", "(SELECT k, i, j, l, e, d, t, s, b FROM one WHERE i > -40) one"])
    items = ", ".join(f"{call} AS c{n}" for n, call in enumerate(calls))
    groups = f"SELECT {items} FROM {tables} {word} two ON {tests}{where}"
    if not by:
        return groups
    having = rng.choice(["", " HAVING count(*) > 1"])
    grouped = f"{groups} GROUP BY {by}{having}"
    return rng.choice([grouped, f"SELECT c0, count(*) AS n FROM ({grouped}) GROUP BY c0"])
