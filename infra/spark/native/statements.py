"""Spark's resolved plans as DuckDB's SQL, whole or in two: a part for each slice of one table, and a merge."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ebbflow.infra.spark.native import arithmetic, comparisons, texts, types
from ebbflow.infra.spark.native.aggregates import Calls, Groups, direction
from ebbflow.infra.spark.native.catalyst import PASSED, Attribute, Node, NotNativeError, tree
from ebbflow.infra.spark.native.exchange.early import NOTHING, Early
from ebbflow.infra.spark.native.exchange.rollups import Sets
from ebbflow.infra.spark.native.expressions import Translator, Typed, reading

_RULES = {**arithmetic.RULES, **comparisons.RULES, **texts.RULES}
PARTS = "parts"  # the relation that a merge reads
_JOINS = {
    "Inner": "JOIN",
    "Cross": "JOIN",
    "LeftOuter": "LEFT JOIN",
    "RightOuter": "RIGHT JOIN",
    "FullOuter": "FULL JOIN",
    "LeftSemi": "SEMI JOIN",
    "LeftAnti": "ANTI JOIN",
}


class Query(NamedTuple):
    """A query, and its columns."""

    sql: str
    columns: tuple[Attribute, ...]

    @property
    def source(self) -> str:
        """Return it as an item of a FROM clause."""
        return f"({self.sql})"


@dataclass
class Writer:
    """Writes one plan.

    Args:
        tables: bytes of the relations that scans may read, by name in lower case.
        escapes: the statement may name an escape character.
    """

    tables: Mapping[str, int]
    escapes: bool = False
    scans: dict[int, tuple[str, Node]] = field(default_factory=dict)  # number -> table and its View
    gathers: bool = False  # what slices write are rows, or distinct values, and not only groups
    numbered: set[int] = field(default_factory=set)  # by id(node): operators that choose among equal rows
    stored: dict[int, Query] = field(default_factory=dict)  # by id(node): what stands for an operator
    early: Early = NOTHING  # what was computed of a scan before it was exchanged
    _owners: dict[int, int] = field(default_factory=dict)  # column's id -> number of its scan
    _numbers: dict[int, int] = field(default_factory=dict)  # by id(node) of a View
    _shared: dict[int, Query] = field(default_factory=dict)  # by Spark's id of a common table expression
    _named: dict[str, str] = field(
        default_factory=dict
    )  # common table expressions, those that others read first
    _depth: int = 0  # of the subqueries around what is written
    _passed: frozenset[int] = frozenset()  # by id(node): tests that every row passes, and parts of unions

    def anew(self, passed: frozenset[int], *, keeps: bool = False, early: Early = NOTHING) -> "Writer":
        """Return a writer of the same plan, with the same numbers of scans, that leaves out tests and parts of
        unions, by id(node); where it ``keeps`` them, with what stands for operators here."""
        found = Writer(self.tables, self.escapes, early=early, _numbers=dict(self._numbers), _passed=passed)
        if keeps:
            found.stored, found._shared, found._named = (
                dict(self.stored),
                dict(self._shared),
                dict(self._named),
            )
        return found

    def complete(self, sql: str) -> str:
        """Return ``sql`` with the common table expressions that it reads."""
        needed: set[str] = set()
        texts = [sql]
        while texts:
            for name in re.findall(r"\b[wm]\d+\b", texts.pop()):
                if name in self._named and name not in needed:
                    needed.add(name)
                    texts.append(self._named[name])
        named = ", ".join(f"{name} AS {text}" for name, text in self._named.items() if name in needed)
        return f"WITH {named} {sql}" if named else sql

    def query(self, node: Node) -> Query:
        """Return the query of an operator. Raises ``NotNativeError``."""
        if id(node) in self.stored:
            return self.stored[id(node)]
        if node.scans:
            return self.scan(node)
        if node.kind in PASSED:
            return self.query(node.children[0])
        write = getattr(self, f"_{node.kind.lower()}", None)
        if write is None or node.kind.startswith("_"):
            raise NotNativeError(f"{node.kind} is not proven to be equal")
        found: Query = write(node)
        return found

    def number_of(self, view: Node) -> int:
        """Return the number of the scan that ``view`` is."""
        return self._numbers[id(view)]

    # --- operators ----------------------------------------------------------------------------------------

    def scan(self, node: Node) -> Query:
        """Return what reads a table. Raises ``NotNativeError``."""
        name = _table(node)
        if name.lower() not in self.tables:
            raise NotNativeError(f"the table {name} is in Spark's catalogue only")
        number = self._numbers.setdefault(id(node), len(self._numbers))
        self.scans[number] = (name.lower(), node)
        columns = []
        for (flat,) in node.children[0].fields["output"]:
            found = tree([flat]).attribute
            if types.known(found.type):
                columns.append(found)
        if any(self._owners.setdefault(c.id, number) != number for c in columns):
            raise NotNativeError("two scans have columns of the same ids")
        if not columns:
            raise NotNativeError(f"no column of {name} has a type that is proven to be equal")
        listed = [f"{reading(c)} AS {c.column}" for c in columns] + self.early.carried(node)
        return Query(f"SELECT {', '.join(listed)} FROM s{number}", tuple(columns))

    def _onerowrelation(self, _: Node) -> Query:
        return Query("SELECT 1 AS one", ())

    def _project(self, node: Node) -> Query:
        below = self.query(node.children[0])
        items, carried = node.expressions("projectList"), self.early.carried(node)
        return self._selected(items, below.source, self._expressions(), carried)

    def _selected(
        self, items: tuple[Node, ...], source: str, writer: Translator, carried: Sequence[str] = ()
    ) -> Query:
        if not items:
            raise NotNativeError("a projection without columns is not proven to be equal")
        columns, listed = [], []
        for item in items:
            value = writer.of(item)
            found = item.attribute._replace(type=value.type)
            columns.append(found)
            listed.append(f"{value.sql} AS {found.column}")
        return Query(f"SELECT {', '.join([*listed, *carried])} FROM {source}", tuple(columns))

    def _expand(self, node: Node) -> Query:
        sets = self._sets(node)
        return Query(sets.every(self.query(node.children[0]).source), sets.columns)

    def _sets(self, node: Node) -> Sets:
        """Return the sets of groups for which each row is made once."""
        if not node.fields.get("projections"):
            raise NotNativeError("sets of groups in a subquery are not proven to be equal")
        writer = self._expressions()
        rows = [row.children for row in node.expressions("projections")]
        columns = tuple(tree(flat).attribute for flat in node.fields["output"])
        return Sets(columns, rows, [[writer.of(value).sql for value in row] for row in rows])

    def _filter(self, node: Node) -> Query:
        below = self.query(node.children[0])
        # tests with subqueries last: DuckDB would join all rows before it looks at the others
        tests = sorted(self._tests(node), key=_has_subquery)
        sql = below.source
        for _, group in groupby(tests, key=_has_subquery):
            listed = " AND ".join(self._expressions().of(test).sql for test in group)
            sql = f"(SELECT * FROM {sql} WHERE {listed})"
        return Query(sql[1:-1], below.columns)

    def _tests(self, node: Node) -> list[Node]:
        return [test for test in node.expression("condition").conjuncts() if id(test) not in self._passed]

    def _join(self, node: Node) -> Query:
        left, right = (self._joined(child) for child in node.children)
        kind = node.object("joinType")
        if kind not in _JOINS:
            raise NotNativeError(f"a join of kind {kind or 'unknown'} is not proven to be equal")
        on = node.fields.get("condition")
        tests = self._tests(node) if on else []
        test = " AND ".join(self._expressions().of(one).sql for one in tests) or "true"
        columns = left.columns if kind in ("LeftSemi", "LeftAnti") else left.columns + right.columns
        word = _JOINS[kind]
        if not on and kind in ("Inner", "Cross"):
            return Query(f"SELECT * FROM {left.source} CROSS JOIN {right.source}", columns)
        return Query(f"SELECT * FROM {left.source} {word} {right.source} ON {test}", columns)

    def _joined(self, node: Node) -> Query:
        """Return the query of an input of a join. What is left of it by subqueries is computed before the join, for
        DuckDB would join all rows first; but of the largest relation, of which it is too much to be kept."""
        below = node
        while below.kind in ("Project", *PASSED) and not below.scans:
            below = below.children[0]
        if below.kind == "Filter" and not self._depth and id(below) not in self.stored:
            read = [_table(one).lower() for one in below.children[0].walk() if one.scans]
            small = all(self.tables.get(name, 0) < max(self.tables.values()) for name in read)
            if small and _has_subquery(below.expression("condition")):
                found = self.query(below)
                name = self.held(found.source)
                self.stored[id(below)] = found._replace(sql=f"SELECT * FROM {name}")
        return self.query(node)

    def held(self, source: str) -> str:
        """Have a query be computed once; return the name that it is read by."""
        name = f"m{len(self._named)}"
        self._named[name] = f"MATERIALIZED {source}"
        return name

    def _aggregate(self, node: Node) -> Query:
        above, groups = self.grouped(node)
        return above.over(groups.complete(self.query(node.children[0]).source))

    def sliced(self, node: Node, groups: Groups) -> str:
        """Return the groups of a slice of what an aggregate is of."""
        below = node.children[0]
        sql = groups.sliced(self.query(below).source)
        if below.kind == "Expand":
            sql = self._sets(below).rolled_up(groups, self.query(below.children[0]).source) or sql
        return sql

    def grouped(
        self, node: Node, names: Mapping[str, Typed] | None = None, parts: dict[str, str] | None = None
    ) -> "tuple[Above, Groups]":
        """Return an aggregate in two: what is computed of each group, and the groups.

        ``names`` is what stands for columns below; ``parts`` are those of other aggregates of the same rows, to which
        those of this one are added.
        """
        inner = self._expressions(names)
        keys: dict[str, Typed] = {}
        for number, expression in enumerate(node.expressions("groupingExpressions")):
            value = inner.of(expression)
            if not types.compared(value.type):
                raise NotNativeError(f"grouping by {value.type} is not proven to be equal")
            keys.setdefault(value.sql, Typed(f"g{number}", value.type))
        calls = Calls(inner, {} if parts is None else parts)
        writer = Translator(_RULES, self._subquery, keys, calls.of, self.escapes)
        above = Above(self, node.expressions("aggregateExpressions"), writer)
        above.over("nothing")  # collects the calls
        return above, Groups(keys, calls, self.early.above(node))

    def _sort(self, node: Node) -> Query:
        below = self.query(node.children[0])
        return Query(f"SELECT * FROM {below.source} ORDER BY {self._order(node)}", below.columns)

    def _order(self, node: Node) -> str:
        if node.fields.get("global") is not True:
            raise NotNativeError("a sort within partitions is not proven to be equal")
        keys = []
        for item in node.expressions("order"):
            keys.append(f"{self._expressions().of(item.children[0]).sql} {direction(item)}")
        return ", ".join(keys)

    def _window(self, node: Node) -> Query:
        below = self.query(node.children[0])
        calls = Calls(self._expressions())
        writer = Translator(_RULES, self._subquery, {}, calls.over, self.escapes)
        above = Above(self, node.expressions("windowExpressions"), writer)
        above.over("nothing")  # collects the calls
        if calls.numbered:
            self.numbered.add(id(node))
        parts = ", ".join(f"{call} AS a{i}" for i, call in enumerate(calls.parts))
        found = above.over(f"(SELECT *, {parts} FROM {below.source})")
        listed = f"{_listed(below)}, {found.sql.removeprefix('SELECT ')}"
        return Query(f"SELECT {listed}", below.columns + found.columns)

    def _globallimit(self, node: Node) -> Query:
        self.numbered.add(id(node))
        (child,) = node.children
        if child.kind == "LocalLimit":
            (child,) = child.children
        limit = node.expression("limitExpr")
        if limit.kind != "Literal" or limit.fields["dataType"] != "integer":
            raise NotNativeError("a limit that is computed is not proven to be equal")
        count = int(str(limit.fields["value"]))
        if child.kind == "Sort" and id(child) not in self.stored:
            below = self.query(child.children[0])
            order = self._order(child)
            return Query(f"SELECT * FROM {below.source} ORDER BY {order} LIMIT {count}", below.columns)
        below = self.query(child)
        return Query(f"SELECT * FROM {below.source} LIMIT {count}", below.columns)

    def _distinct(self, node: Node) -> Query:
        below = self.query(node.children[0])
        _exactly(below)
        return Query(f"SELECT DISTINCT {_listed(below)} FROM {below.source}", below.columns)

    def _union(self, node: Node) -> Query:
        if node.fields.get("byName") or node.fields.get("allowMissingCol"):
            raise NotNativeError("a union by name is not proven to be equal")
        read = [child for child in node.children if id(child) not in self._passed]
        arms = [self.query(child) for child in read]
        first = arms[0] if read[:1] == [*node.children[:1]] else self.query(node.children[0])
        if all(arm is first for arm in arms):  # or there are none: only its columns matter
            return first
        for arm in arms:
            if [c.type for c in arm.columns] != [c.type for c in first.columns]:
                raise NotNativeError("a union of unlike types is not proven to be equal")
        sql = " UNION ALL ".join(f"(SELECT {_listed(arm)} FROM {arm.source})" for arm in arms)
        names = ", ".join(f"u{i} AS {c.column}" for i, c in enumerate(first.columns))
        aliases = ", ".join(f"u{i}" for i in range(len(first.columns)))
        return Query(f"SELECT {names} FROM ({sql}) AS u({aliases})", first.columns)

    def _intersect(self, node: Node) -> Query:
        return self._of_sets(node, "INTERSECT")

    def _except(self, node: Node) -> Query:
        return self._of_sets(node, "EXCEPT")

    def _of_sets(self, node: Node, word: str) -> Query:
        left, right = (self.query(child) for child in node.children)
        if node.fields.get("isAll") or [c.type for c in left.columns] != [c.type for c in right.columns]:
            raise NotNativeError(f"{word} ALL, or of unlike types, is not proven to be equal")
        _exactly(left)
        sql = f"(SELECT {_listed(left)} FROM {left.source}) {word} (SELECT {_listed(right)} FROM {right.source})"
        return Query(f"SELECT * FROM ({sql})", left.columns)

    def _withcte(self, node: Node) -> Query:
        *definitions, plan = node.children
        for definition in definitions:
            self.define(definition)
        return self.query(plan)

    def define(self, definition: Node) -> None:
        """Have a common table expression read by its name from now on. Raises ``NotNativeError``."""
        number = int(definition.fields["id"])
        self._shared[number] = self.query(definition.children[0])
        self._named[f"w{number}"] = self._shared[number].source

    def _cterelationref(self, node: Node) -> Query:
        number = int(node.fields["cteId"])
        if number not in self._shared or node.fields.get("recursive"):
            raise NotNativeError("a recursive query is not proven to be equal")
        columns = tuple(tree(flat).attribute for flat in node.fields["output"])
        pairs = zip(self._shared[number].columns, columns, strict=True)
        listed = ", ".join(f"{old.column} AS {new.column}" for old, new in pairs)
        return Query(f"SELECT {listed} FROM w{number}", columns)

    # --- expressions --------------------------------------------------------------------------------------

    def condition(self, test: Node, names: Mapping[str, Typed] | None = None) -> str:
        """Return a test of rows; ``names`` is what stands for their columns. Raises ``NotNativeError``."""
        return self._expressions(names).of(test).sql

    def inner(self, plan: Node) -> str:
        """Return the query of a subquery that reads nothing of what is around it. Raises ``NotNativeError``."""
        self._depth += 1
        try:
            return self.query(plan).sql
        finally:
            self._depth -= 1

    def _expressions(self, replaced: Mapping[str, Typed] | None = None) -> Translator:
        return Translator(_RULES, self._subquery, replaced or {}, None, self.escapes)

    def _subquery(self, node: Node) -> tuple[str, tuple[str, ...]]:
        if node.fields.get("joinCond"):
            raise NotNativeError("a subquery that was taken apart already is not proven to be equal")
        plan, exists = node.expression("plan"), node.kind == "Exists"
        while exists and plan.kind in ("Project", *PASSED) and not plan.scans:
            plan = plan.children[0]  # a column that is listed would be read, and exchanged
        self._depth += 1
        try:
            found = self.query(plan)
        finally:
            self._depth -= 1
        return f"SELECT 1 FROM {found.source}" if exists else found.sql, tuple(c.type for c in found.columns)


@dataclass
class Above:
    """What an aggregate computes of each group."""

    owner: Writer
    items: tuple[Node, ...]
    writer: Translator

    def over(self, groups: str) -> Query:
        """Return it over ``groups``."""
        return self.owner._selected(self.items, groups, self.writer)


def _table(view: Node) -> str:
    return str(view.fields["desc"]["identifier"]["table"])


def _has_subquery(node: Node) -> bool:
    return any(n.kind in ("ScalarSubquery", "Exists", "ListQuery") for n in node.walk())


def _listed(query: Query) -> str:
    return ", ".join(c.column for c in query.columns)


def _exactly(query: Query) -> None:
    for column in query.columns:
        if not types.exact(column.type):
            raise NotNativeError(f"comparing whole rows with {column.type} is not proven to be equal")
