"""The tables and columns that a query names."""

from collections.abc import Iterator

from sqlglot import exp


def outside_tables(node: exp.Expr) -> Iterator[exp.Table]:
    """Yield the tables under ``node`` that no WITH in scope defines; table functions are none.

    Before: ``WITH t AS (SELECT * FROM t) SELECT * FROM t, u``; yields the inner ``t`` and ``u``.
    """
    left: list[tuple[exp.Expr, frozenset[str]]] = [(node, frozenset())]  # and what is defined there
    while left:
        found, bound = left.pop()
        named = isinstance(found, exp.Table) and isinstance(found.this, exp.Identifier)
        if isinstance(found, exp.Table) and named and (found.db or folded(found.name) not in bound):
            yield found
        below = []
        with_ = found.args.get("with_")
        if with_ is not None:
            for cte in with_.expressions:
                name = frozenset({folded(cte.alias)})
                below.append((cte.this, bound | name if with_.recursive else bound))
                bound |= name
        below += [(child, bound) for child in found.iter_expressions() if child is not with_]
        left += reversed(below)


def folded(name: str) -> str:
    """Return a name as DuckDB compares it, in lower case as far as it is ASCII: to Python, the sign of Kelvin is a k,
    and a WITH of that name would hide a file's."""
    return name.encode().lower().decode()


def table_names(query: exp.Expr) -> frozenset[str]:
    """Return the names in FROM and JOIN that the query does not define itself, as qualified as they are written."""
    return frozenset(whole_name(t) for t in outside_tables(query))


def whole_name(table: exp.Table) -> str:
    """Return the name of a table with those of its schema and its database, as written."""
    return ".".join(part.name for part in table.parts)


def columns_named(query: exp.Expr) -> frozenset[str] | None:
    """Return the names of the columns, of whichever table, that a query names, in lower case; ``None`` where it
    stands for columns that it does not name.

    >>> import sqlglot
    >>> columns_named(sqlglot.parse_one("SELECT count(*) FROM t WHERE A = 1"))
    frozenset({'a'})
    """
    used: set[str] = set()
    for node in query.walk():
        match node:
            case exp.Column():
                used.add(node.name.lower())
            case exp.Star() if not isinstance(node.parent, exp.Count):
                return None
            case exp.Columns() | exp.Pivot():
                return None
            case exp.Join():
                if node.method == "NATURAL":
                    return None
                used |= {name.name.lower() for name in node.args.get("using") or ()}
    return frozenset(used)
