"""Random queries over four small tables with NULLs: joins of all kinds, subqueries, groups, views."""

import random

import duckdb

TABLES = {"a": ["k", "x", "z"], "b": ["k", "j", "y"], "c": ["j", "z", "w"], "d": ["k", "j", "w"]}
_ROWS = 7
_SIGNS = ("=", "<", "<=", "<>", ">")
_JOINS = ("JOIN",) * 6 + ("LEFT JOIN",) * 2 + (
    "RIGHT JOIN", "FULL JOIN", "LEFT SEMI JOIN", "LEFT ANTI JOIN", "CROSS JOIN", "CROSS JOIN",
)  # fmt: skip
_DEEPEST = 2


def fill(connection: duckdb.DuckDBPyConnection, rng: random.Random) -> None:
    """Create the tables."""
    for table, columns in TABLES.items():
        connection.execute(f"CREATE TABLE {table} ({', '.join(f'{c} INTEGER' for c in columns)})")
        for _ in range(_ROWS):
            values = ", ".join(rng.choice(("0", "1", "2", "3", "NULL")) for _ in columns)
            connection.execute(f"INSERT INTO {table} VALUES ({values})")


def random_query(rng: random.Random) -> str:
    """Return a query that is valid over the tables."""
    known = dict(TABLES)
    views: dict[str, list[str]] = {}
    parts = []
    for number in range(rng.choice((0, 0, 0, 1, 2))):
        text, columns = _select(rng, 1, known)
        name = rng.choice([n for n in (f"v{number}", f"v{number}", "a", "result") if n not in views])
        parts.append(f"{name} AS ({text})")
        views[name] = known[name] = columns
    text, _ = _select(rng, 0, known)
    return f"WITH {', '.join(parts)} {text}" if parts else text


def random_repeats(rng: random.Random) -> str:
    """Return a query in which several SELECTs have the same FROM and WHERE."""
    source, columns = _from(rng, 1, dict(TABLES))
    known = dict(TABLES)
    body = (
        f"{source} WHERE {' AND '.join(_predicate(rng, columns, known) for _ in range(rng.choice((1, 2))))}"
    )
    one, other, more = (_expression(rng, columns) for _ in range(3))
    key = rng.choice(columns)
    return rng.choice(
        (
            f"SELECT {key} AS g, sum({one}) AS m FROM {body} GROUP BY {key} "
            f"HAVING sum({one}) >= (SELECT avg({other}) FROM {body})",
            f"SELECT {one} AS o FROM {body} UNION ALL SELECT {other} AS o FROM {body}",
            f"SELECT {one} AS o, (SELECT count({other}) FROM {body}) AS n FROM {body}",
            f"WITH v AS (SELECT {key} AS k, max({one}) AS m FROM {body} GROUP BY {key}), "
            f"w AS (SELECT {other} AS o FROM {body}) SELECT v.m, w.o, {more} AS x FROM v, w, {body} "
            f"AND v.k = w.o",
        )
    )


def _select(rng: random.Random, depth: int, known: dict[str, list[str]]) -> tuple[str, list[str]]:
    source, columns = _from(rng, depth, known)
    conditions = " AND ".join(_predicate(rng, columns, known) for _ in range(rng.choice((0, 0, 1, 1, 2))))
    where = f" WHERE {conditions}" if conditions else ""
    if rng.random() < 0.25:
        keys = rng.sample(columns, min(len(columns), rng.choice((1, 2))))
        names = [f"g{i}" for i in range(len(keys))]
        items = [f"{key} AS {name}" for key, name in zip(keys, names, strict=True)]
        items.append(f"{rng.choice(('sum', 'min', 'count'))}({rng.choice(columns)}) AS m")
        having = " HAVING count(*) > 1" if rng.random() < 0.3 else ""
        text = f"SELECT {', '.join(items)} FROM {source}{where} GROUP BY {', '.join(keys)}{having}"
        names.append("m")
    else:
        names = [f"o{i}" for i in range(rng.choice((1, 2, 3)))]
        chosen = ", ".join(f"{_expression(rng, columns)} AS {name}" for name in names)
        text = f"SELECT {'DISTINCT ' if rng.random() < 0.15 else ''}{chosen} FROM {source}{where}"
    if depth > 0 and rng.random() < 0.15:
        other, others = _select(rng, _DEEPEST, known)
        if len(others) == len(names):
            text += f" UNION {rng.choice(('', 'ALL '))}{other}"
    return text, names


def _from(rng: random.Random, depth: int, known: dict[str, list[str]]) -> tuple[str, list[str]]:
    columns: list[str] = []
    text = ""
    for number in range(rng.choice((1, 2, 2, 3, 3, 4) if depth == 0 else (1, 2, 2, 3))):
        alias = f"t{depth}_{number}" if rng.random() < 0.6 else f"r{number}"
        if depth < _DEEPEST and rng.random() < 0.25:
            inner, names = _select(rng, depth + 1, known)
            item = f"({inner}) AS {alias}"
        else:
            table = rng.choice(list(known))
            names, item = known[table], f"{table} AS {alias}"
        own = [f"{alias}.{name}" for name in names]
        if not text:
            text, columns = item, own
            continue
        kind = rng.choice(_JOINS)
        text += f" {kind} {item}" + ("" if kind == "CROSS JOIN" else f" ON {_on(rng, columns, own)}")
        if kind not in ("LEFT SEMI JOIN", "LEFT ANTI JOIN"):
            columns = columns + own
    return text, columns


def _expression(rng: random.Random, columns: list[str]) -> str:
    column = rng.choice(columns)
    others = (f"{column} + 1", "1", f"coalesce({column}, 7)", f"CASE WHEN {column} = 1 THEN 5 ELSE 6 END")
    return column if rng.random() < 0.75 else rng.choice(others)


def _on(rng: random.Random, left: list[str], right: list[str]) -> str:
    parts = [f"{rng.choice(left)} {'=' if rng.random() < 0.85 else '<'} {rng.choice(right)}"]
    if rng.random() < 0.3:
        parts.append(_simple(rng, left + right))
    if rng.random() < 0.1:
        parts.append(rng.choice(("1 = 1", "TRUE", "1 = 0")))
    return " AND ".join(parts)


def _simple(rng: random.Random, columns: list[str]) -> str:
    """Return a predicate without a subquery."""
    column, value = rng.choice(columns), rng.choice("0123")
    kind = rng.random()
    if kind < 0.4:
        return f"{column} {rng.choice(_SIGNS)} {rng.choice(columns)}"
    if kind < 0.65:
        return f"{column} {rng.choice(_SIGNS)} {value}"
    if kind < 0.75:
        return f"{column} IS {rng.choice(('', 'NOT '))}NULL"
    if kind < 0.82:
        return f"{column} {rng.choice(('', 'NOT '))}IN ({value}, {rng.choice(('3', 'NULL'))})"
    one, other = _simple(rng, columns), _simple(rng, columns)
    if kind < 0.9:
        return f"({one} OR {other})"
    if kind < 0.95:
        return f"(({one} AND {columns[0]} = 1) OR ({columns[0]} = 1 AND {other}))"
    return f"NOT ({one} AND {other})"


def _predicate(rng: random.Random, columns: list[str], known: dict[str, list[str]]) -> str:
    if rng.random() < 0.7:
        return _simple(rng, columns)
    table = rng.choice(list(known))
    inner = [f"s.{name}" for name in known[table]]
    column, own = rng.choice(columns), rng.choice(inner)
    no = rng.choice(("", "NOT "))
    joined = f"{table} AS s {rng.choice(('', '', 'LEFT '))}JOIN b AS s2 ON {own} = s2.k"
    joined += rng.choice(("", ", d AS s3", " JOIN d AS s3 ON s2.j = s3.j"))
    wide = [*inner, "s2.k", "s2.j", "s2.y"]
    return rng.choice(
        (
            f"{no}EXISTS (SELECT 1 FROM {table} AS s WHERE {_simple(rng, [*inner, column])} AND {own} = {column})",
            f"{no}EXISTS (SELECT {rng.choice(('1', 's2.y'))} FROM {joined} WHERE {_simple(rng, [*wide, column])}"
            f" AND {rng.choice(wide)} = {column} AND {_simple(rng, wide)})",
            f"{no}EXISTS (SELECT 1 FROM {joined} WHERE {_simple(rng, wide)})",
            f"{column} {no}IN (SELECT {own} FROM {table} AS s WHERE {_simple(rng, inner)})",
            f"{column} {no}IN (SELECT {own} FROM {table} AS s JOIN b AS s2 ON {own} = s2.k GROUP BY {own})",
            f"{column} {no}IN (SELECT {own} FROM {joined})",
            f"{column} {no}IN (SELECT {own} FROM {joined} UNION SELECT k FROM d AS s4 "
            f"WHERE {_simple(rng, ['s4.j'])})",
            f"{column} >= (SELECT min({own}) FROM {table} AS s WHERE {_simple(rng, inner)})",
            f"{column} {rng.choice(_SIGNS)} (SELECT {rng.choice(('min', 'count'))}({rng.choice(wide)}) FROM {joined}"
            f" WHERE {rng.choice(wide)} = {column} AND {_simple(rng, wide)})",
        )
    )
