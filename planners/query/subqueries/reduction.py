"""Correlated subqueries kept to what the outer query can ask them for: semi-join reduction by magic sets.

An engine evaluates a correlated subquery for all values of its correlation columns at once, joins later, and so
aggregates or shuffles rows that no outer row meets. Where the outer query filters the relation that the values come
from, the subquery is told:

    before: ... WHERE p.brand = 'x' AND l.q < (SELECT avg(m.q) FROM lineitem m WHERE m.part = p.part)
    after:  ... AND l.q < (SELECT avg(m.q) FROM lineitem m WHERE m.part = p.part
                           AND m.part IN (SELECT p.part FROM part p WHERE p.brand = 'x'))

The new condition follows from the correlation and the outer conditions, so the value for every outer row that counts
stays what it was. It is added where it saves more than it costs (Bancilhon et al., PODS 1986; decided by cost as in
Seshadri et al., SIGMOD 1996).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlglot import exp

from ebbflow.planners.model import ColumnStatistics, TableStatistics
from ebbflow.planners.query.costs.cost import CostModel
from ebbflow.planners.query.costs.operators import Size, scan
from ebbflow.planners.query.estimates.relations import Values, member_values, values_after
from ebbflow.planners.query.estimates.selectivity import conjunction
from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.joingraph import Column
from ebbflow.planners.query.sql.predicates import (
    canonical,
    columns_of,
    conjuncts,
    free_columns,
    has_subquery,
    is_correlated,
    sources,
)
from ebbflow.planners.query.subqueries.known import AnalyzedChain
from ebbflow.planners.query.views.column_types import Families, families
from ebbflow.planners.query.views.views import View, ViewChain

KEY_BYTES = 16.0  # of one value in a broadcast set of keys
MOST_KEYS = 1e6  # in such a set
_NODES = 3  # that a set of keys is taken to be broadcast to: the share is not known yet


def reduced(chain: ViewChain, known: AnalyzedChain) -> ViewChain:
    """Return ``chain`` with the conditions that pay added to its correlated subqueries."""
    if known.model.engine != "spark" or not any(correlated(view) for view in chain.views):
        return chain  # DuckDB does as much by itself
    kinds = families(chain, known.catalogue)
    views = tuple(Reduction(view, chain, known, kinds[view.name]).result() for view in chain.views)
    changed = any(new is not old for new, old in zip(views, chain.views, strict=True))
    return replace(chain, views=views) if changed else chain


def correlated(view: View) -> bool:
    """Tell whether some subquery of a condition in ``view`` may be correlated: a quick look."""
    return not view.opaque and any(
        isinstance(select.parent, (exp.Subquery, exp.Exists, exp.In))
        and any(True for _ in free_columns(select))
        for select in view.query.find_all(exp.Select)
    )


@dataclass(frozen=True)
class Key:
    """A column that correlates: ``inner`` of the subquery equals ``outer``, found in ``alias`` outside."""

    inner: exp.Column
    outer: Column


@dataclass
class Reduction:
    """The reduction of one view."""

    view: View
    chain: ViewChain
    known: AnalyzedChain
    families: Families

    def result(self) -> View:
        """Return the view with its correlated subqueries kept to what the outer query can ask for."""
        if not correlated(self.view):
            return self.view
        query = self.view.query.copy()
        changed = False
        for select in list(query.find_all(exp.Select)):
            changed |= self._select(select)
        return replace(self.view, query=query) if changed else self.view

    def gain(self, select: exp.Select) -> float:
        """Return the core-seconds that the conditions for the subqueries of ``select`` itself save."""
        return sum(found[1] for found in self._found(select))

    def _select(self, select: exp.Select) -> bool:
        found = list(self._found(select))
        for inner, _, condition in found:
            inner.where(condition, copy=False)
        return bool(found)

    def _found(self, select: exp.Select) -> Iterator[tuple[exp.Select, float, exp.Expr]]:
        tables = plain_tables(select)
        where = select.args.get("where")
        if where is None or not tables:
            return
        parts = conjuncts(where.this.copy())
        classes = _Classes(parts, tables, self.families)
        for inner in subqueries_of(where):
            if is_volatile(inner):
                continue
            for key in keys_of(inner, tables):
                best = self._best(inner, key, parts, tables, classes)
                if best is not None:
                    yield inner, *best

    def _best(
        self,
        inner: exp.Select,
        key: Key,
        parts: Sequence[exp.Expr],
        tables: Mapping[str, str],
        classes: "_Classes",
    ) -> tuple[float, exp.Expr] | None:
        """Return what restricts ``key`` to the values that the outer query can ask for, if that pays."""
        source = plain_tables(inner).get(key.inner.table, "")
        kind = self.families.get(source, {}).get(key.inner.name)
        asked = self.asked_rows(inner, key.inner.table, source)
        best: tuple[float, exp.Expr] | None = None
        for column in classes.of(key.outer):
            name = tables[column[0]]
            if kind is None or self.families.get(name, {}).get(column[1]) != kind:
                continue  # a conversion could make other values equal
            local = [p for p in parts if {a for a, _ in columns_of(p)} == {column[0]} and _repeatable(p)]
            for found in self._reducers(key.inner, column, name, local):
                gain = saved(self.known.model, asked, found.distinct / max(found.whole, 1.0), found.distinct)
                gain -= self.known.model.core_seconds(scan(Size(found.rows, found.bytes_read)))
                if gain > 0.0 and (best is None or gain > best[0]):
                    best = gain, found.condition
        if best is None:
            return None
        stated = {canonical(p) for p in conjuncts(inner.args["where"].this.copy())}
        return None if canonical(best[1]) in stated else best

    def _reducers(
        self, inner: exp.Column, column: Column, table: str, local: Sequence[exp.Expr]
    ) -> Iterator["_Reducer"]:
        known = self._statistics(table)
        if known is None or not local:
            return
        whole = known.columns.get(column[1], ColumnStatistics())
        rows = known.rows * self._fraction(table, column[0], local)
        values = values_after(whole, known.rows, rows)
        alone = [
            p for p in local if columns_of(p) == {column} and isinstance(p, exp.In) and p.args.get("query")
        ]
        for part in alone:  # the outer condition itself, restated
            found = self._members(part)
            if found is not None:
                copy = part.copy()
                copy.set("this", inner.copy())
                broadcast(copy.args["query"].unnest())
                yield _Reducer(copy, found.distinct, values.whole, found.rows, found.bytes_read)
        select = exp.select(exp.column(column[1], table=column[0])).from_(
            exp.alias_(exp.Table(this=exp.to_identifier(table)), column[0], table=True)
        )
        select.where(*(p.copy() for p in local), copy=False)
        broadcast(select)
        used = {n for p in local for _, n in columns_of(p)} | {column[1]}
        condition = exp.In(this=inner.copy(), query=exp.Subquery(this=select))
        yield _Reducer(condition, values.distinct, values.whole, known.rows, known.read(used))

    # --- statistics ---------------------------------------------------------------------------------------

    def _statistics(self, table: str) -> "_Known | None":
        if table in self.view.reads_views:
            return None
        found = self.known.catalogue.get(table)
        return None if found is None or found.statistics is None else _Known(found.statistics)

    def asked_rows(self, inner: exp.Select, alias: str, source: str) -> float:
        """Return how many rows of the subquery's relation its own conditions leave."""
        known = self._statistics(source)
        if known is None:
            names = self.chain.by_name[source].reads_tables if source in self.view.reads_views else ()
            return max((k.rows for n in names if (k := self._statistics(n)) is not None), default=0.0)
        parts = conjuncts(inner.args["where"].this.copy())
        own = [p for p in parts if {a for a, _ in columns_of(p)} == {alias}]
        return known.rows * self._fraction(source, alias, own)

    def _fraction(self, table: str, alias: str, parts: Sequence[exp.Expr]) -> float:
        measured = self.known.fractions.get(f"{table.lower()} {alias}", {})
        whole = measured.get(" AND ".join(sorted(canonical(p) for p in parts)))
        if whole is not None:
            return whole
        known = self._statistics(table)
        columns = known.columns if known is not None else {}
        rest = []
        result = 1.0
        for part in parts:
            found = measured.get(canonical(part))
            if found is None and isinstance(part, exp.In) and part.args.get("query"):
                members = self._members(part)
                outer = columns.get(part.this.name) if isinstance(part.this, exp.Column) else None
                if members is not None and outer is not None and outer.distinct:
                    found = min(members.distinct / outer.distinct, 1.0)
            if found is None:
                rest.append(part)
            else:
                result *= found
        return result * conjunction(rest, lambda c: columns.get(c[1]))

    def _members(self, part: exp.In) -> Values | None:
        def relation(name: str) -> "_Known | None":
            return self._statistics(name)

        return member_values(part, relation, self._fraction)


def saved(model: CostModel, asked: float, kept: float, keys: float) -> float:
    """Return the core-seconds saved when of ``asked`` rows those with one of ``keys`` values are kept: every row is
    looked up, those that fail are neither shuffled nor aggregated."""
    if keys > MOST_KEYS:
        return 0.0
    rates = model.rates
    a_row = rates.aggregated_rows + KEY_BYTES * rates.shuffled_bytes
    built = keys * (rates.built_rows + KEY_BYTES * rates.broadcast_bytes) * _NODES
    return asked * ((1.0 - min(kept, 1.0)) * a_row - rates.probed_rows) - built


@dataclass(frozen=True)
class _Reducer:
    condition: exp.Expr
    distinct: float  # values it admits
    whole: float  # values there are
    rows: float  # read to make it
    bytes_read: float


class _Known:
    """A table's statistics, by lower-case column."""

    def __init__(self, statistics: TableStatistics) -> None:
        self.rows = statistics.rows
        self.bytes = statistics.bytes
        self.columns = {name.lower(): s for name, s in statistics.columns.items()}

    def read(self, names: set[str]) -> float:
        """Return the stored bytes of some columns."""
        total = sum(s.width for s in self.columns.values())
        used = sum(self.columns[n].width for n in names if n in self.columns)
        return self.bytes * (used / total if total > 0.0 else 1.0)


class _Classes:
    """Columns of one SELECT that its WHERE makes equal; those of different families are only compared."""

    def __init__(self, parts: Sequence[exp.Expr], tables: Mapping[str, str], kinds: Families) -> None:
        self._sets: dict[Column, set[Column]] = {}
        for part in parts:
            if isinstance(part, exp.EQ) and all(
                isinstance(s, exp.Column) for s in (part.this, part.expression)
            ):
                one, other = ((s.table, s.name) for s in (part.this, part.expression))
                first, second = (kinds.get(tables.get(c[0], ""), {}).get(c[1]) for c in (one, other))
                if first is not None and first == second:
                    merged = self._sets.get(one, {one}) | self._sets.get(other, {other})
                    for column in merged:
                        self._sets[column] = merged

    def of(self, column: Column) -> list[Column]:
        return sorted(self._sets.get(column, {column}))


def _repeatable(part: exp.Expr) -> bool:
    """Tell whether evaluating ``part`` a second time is cheap and gives the same."""
    if is_volatile(part) or is_correlated(part):
        return False
    return not has_subquery(part) or (isinstance(part, exp.In) and isinstance(part.this, exp.Column))


def broadcast(select: exp.Select) -> None:
    """Have the only table of ``select`` broadcast: the engine knows the size of its files, not of its rows."""
    alias = select.args["from_"].this.alias_or_name
    hint = exp.Anonymous(this="BROADCAST", expressions=[exp.to_identifier(alias)])
    select.set("hint", exp.Hint(expressions=[hint]))


def plain_tables(select: exp.Select) -> dict[str, str]:
    """Return the tables and views that ``select`` joins, by alias."""
    start = select.args.get("from_")
    items = [start.this] if start is not None else []
    items += [j.this for j in select.args.get("joins") or ()]
    return {
        t.alias_or_name: t.name
        for t in items
        if isinstance(t, exp.Table) and isinstance(t.this, exp.Identifier)
    }


def subqueries_of(where: exp.Where) -> Iterator[exp.Select]:
    """Yield the SELECTs directly below the conditions of ``where``, not those inside them."""
    for select in list(where.find_all(exp.Select)):
        outer = select.parent_select
        if outer is where.parent and isinstance(select.parent, (exp.Subquery, exp.Exists, exp.In)):
            yield select


def keys_of(inner: exp.Select, tables: Mapping[str, str]) -> Iterator[Key]:
    """Yield the equalities in the WHERE of ``inner`` between a column of its own and one of ``tables``."""
    where = inner.args.get("where")
    own = sources(inner)
    for part in conjuncts(where.this.copy()) if where is not None else ():
        if not isinstance(part, exp.EQ):
            continue
        for a, b in ((part.this, part.expression), (part.expression, part.this)):
            columns = isinstance(a, exp.Column) and isinstance(b, exp.Column)
            if columns and a.table in own and b.table not in own and b.table in tables:
                yield Key(a, (b.table, b.name))
