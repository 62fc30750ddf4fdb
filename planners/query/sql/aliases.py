"""Names that FROM gives to the columns of a table or view, made names of a derived table."""

from sqlglot import exp

from ebbflow.planners.model import Catalogue


def expand_column_aliases(query: exp.Query, catalogue: Catalogue) -> exp.Query:
    """Return a qualified query whose tables and views have no column aliases in FROM.

    Before: ``SELECT t.x FROM a AS t(x)``; after: ``SELECT t.x FROM (SELECT t.k AS x, t.v AS v FROM a AS t) AS t``.
    Changes ``query``. Raises ``ValueError`` where the columns of such a table are not known.
    """
    for table in list(query.find_all(exp.Table)):
        names = table.alias_column_names
        if not names or not isinstance(table.this, exp.Identifier):
            continue
        columns = _columns(table, catalogue)
        if len(names) > len(columns) or any(table.args.get(key) for key in ("pivots", "sample", "joins")):
            raise ValueError(f"columns of {table.name} have other names in FROM")
        alias = table.alias
        items = [
            exp.alias_(exp.column(column, table=alias), name)
            for column, name in zip(columns, [*names, *columns[len(names) :]], strict=True)
        ]
        bare = exp.alias_(exp.Table(this=table.this.copy()), alias, table=True)
        named = exp.TableAlias(this=exp.to_identifier(alias))
        table.replace(exp.Subquery(this=exp.select(*items).from_(bare), alias=named))
    return query


def _columns(table: exp.Table, catalogue: Catalogue) -> list[str]:
    """Return the names of a table's or view's columns, none where they are not known."""
    below, node = table, table.parent
    while node is not None:
        with_ = node.args.get("with_")
        for cte in reversed(with_.expressions if with_ is not None and with_ is not below else ()):
            if cte.alias == table.name:
                return cte.this.named_selects
        if isinstance(node, exp.With):
            if node.recursive:
                return []
            before = node.expressions[: next(i for i, c in enumerate(node.expressions) if c is below)]
            for cte in reversed(before):
                if cte.alias == table.name:
                    return cte.this.named_selects
        below, node = node, node.parent
    known = catalogue.get(table.name)
    return [name.lower() for name, _ in known.columns] if known is not None else []
