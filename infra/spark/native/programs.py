"""What a stage's tasks run: one statement a slice of the largest table, and one over what the slices have written."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.catalyst import (
    Node,
    NotNativeError,
    arms,
    divisible,
    gathering_of,
    last,
    limit_above,
    ranked,
    sources,
    way_down,
)
from ebbflow.infra.spark.native.exchange.costs import Exchanged, Statements
from ebbflow.infra.spark.native.exchange.early import NOTHING, Early, early_groups
from ebbflow.infra.spark.native.exchange.hashes import BUCKET, BUCKETS, Exchange
from ebbflow.infra.spark.native.exchange.program import Program, scans_in
from ebbflow.infra.spark.native.exchange.within import Learnable, within
from ebbflow.infra.spark.native.expressions import cast, identifier
from ebbflow.infra.spark.native.narrowing import (
    RANGED,
    Narrowing,
    around,
    columns,
    fully_joined,
    members,
    narrowings,
    passes,
    pushed,
    reach,
)  # fmt: skip
from ebbflow.infra.spark.native.statements import PARTS, Query, Writer

_ONE_VALUE = 0.1  # of rows that pass a test for one value
_RANGE = 1 / 3  # of rows that pass another test (P. Selinger et al., SIGMOD 1979, table 1)
_LEAST = 0.01  # of rows that tests leave
_SMALLER = 4  # times that a relation is smaller than one of which it leaves only rows with its keys


def program(
    plan: Node, output: Sequence[tuple[str, str]], sizes: Mapping[str, int], *, escapes: bool
) -> Program:
    """Return the program of a statement.

    Args:
        plan: as Spark has resolved it.
        output: (name, Spark SQL type) that Spark would write.
        sizes: bytes of the relations that it may read, by lower-case name.
        escapes: the statement may name an escape character.

    Raises:
        NotNativeError: something in it is not proven to be equal.
    """
    writer = Writer(sizes, escapes)
    whole, split = statements_of(writer, plan, output)
    scans = {number: table for number, (table, _) in writer.scans.items()}
    gathering = gathering_of(last(plan))
    below = last(plan) if gathering is None else gathering.children[0]
    found = [(sizes[str(v.fields["desc"]["identifier"]["table"]).lower()], v) for v in divisible(below)]
    full = [] if found else fully_joined(below)
    exchanger = Exchanger(writer, plan, below, tuple(output), sizes)
    pairs = tuple((writer.number_of(view), column.name) for view, column in full)
    cut: dict[str, Any] = {}
    if found:
        view = max(found, key=lambda pair: pair[0])[1]
        number, cut = writer.number_of(view), cut_of(writer, plan, below, view)
    elif pairs and all(exchanger.can(n, name, full[0][1].type) for n, name in pairs):
        number = max(pairs, key=lambda pair: sizes[scans[pair[0]]])[0]
    else:
        split = None
    parted = partial(_parted, writer, plan, tuple(output), below)
    # operators on the way down to the gathering one see all rows
    numbered = bool(writer.numbered - {id(node) for node in way_down(last(plan))})
    used = exchanger.used(whole if split is None else split.first)
    some: dict[str, Any] = {
        "exchanger": exchanger,
        "gathers": writer.gathers,
        "numbered": numbered,
        "used": used,
        "parted": parted,
    }
    if split is None:
        return Program(scans, None, "", "", whole, tuple(output), **some)
    return Program(scans, number, split.first, split.merge, whole, tuple(output), **cut, full=pairs, **some)


def cut_of(writer: Writer, plan: Node, root: Node, view: Node) -> dict[str, Any]:
    """Return what slices of a scan can leave out of others, and of itself, as is known or can be learned: fields of
    their program."""
    return {
        "narrowings": narrowings(plan, root, view, writer.number_of),
        "within": within(pushed(root, view), view),
        "learnable": partial(_learnable, writer, plan, view),
    }


def _learnable(writer: Writer, plan: Node, view: Node) -> list[Learnable]:
    """Return what others that are filtered can tell of the rows of a scan that joins with them leave."""
    number = writer.number_of(view)
    return [
        Learnable(column, writer.number_of(small), f"SELECT min({key}), max({key}) FROM {kept}")
        for small, _, kept, each, key in _filtered(writer, plan)
        for other, column in each.others
        if other == number and each.type in RANGED
    ]


def _filtered(writer: Writer, plan: Node) -> Iterator[tuple[Node, list[Node], str, Narrowing, str]]:
    """Iterate over the scans that have tests of their own: the scan, these tests, what they leave of it, and a column
    outside of whose values nothing needs rows of others, with the name that it has there."""
    for _, view in [*writer.scans.values()]:
        root = reach(plan, view)
        if tests := [test for test in pushed(root, view) if test.kind != "InSubquery"]:
            where = " AND ".join(writer.condition(test) for test in tests)
            kept = f"(SELECT * FROM {writer.scan(view).source} WHERE {where})"
            for each in narrowings(plan, root, view, writer.number_of):
                (key,) = (c.column for c in columns(view) if c.name == each.column)
                yield view, tests, kept, each, key


def _parted(
    writer: Writer, plan: Node, output: Sequence[tuple[str, str]], below: Node
) -> tuple[Program, ...]:
    """Return the programs of the parts of the largest union that is larger than each scan that can be sliced."""

    def size(node: Node) -> int:
        return sum(writer.tables[writer.scans[writer.number_of(v)][0]] for v in node.walk() if v.scans)

    union = max(sources(below), key=size, default=below)
    found = list[Program]()
    for arm, others in arms(union) if union.kind == "Union" else ():
        own = writer.anew(others)
        _, split = statements_of(own, plan, output)
        if split is None:
            return ()
        numbers = scans_in(split.first) & own.scans.keys()
        scans = {number: own.scans[number][0] for number in sorted(numbers)}
        view = max(divisible(arm), key=size, default=None)
        sliced = None if view is None else own.number_of(view)
        cut = {} if view is None else cut_of(own, plan, arm, view)
        used = Exchanger(own, plan, below, tuple(output), writer.tables).used(split.first)
        found.append(
            Program(scans, sliced, split.first, split.merge, split.first, tuple(output), **cut, used=used)
        )
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Exchanger:
    """Writes what exchanges scans of a statement, and the statement over what is exchanged.

    What the statement drops of a scan by itself is dropped before it is written: rows that fail tests of the scan's
    columns, and those whose key is not in what is left of a much smaller relation that they are joined with.
    Nothing is computed of those, so that nothing of them fails, as it may where Spark computes it before a join.
    (Semi-join reduction; P. Bernstein and D. Chiu, JACM 1981.)
    """

    writer: Writer
    plan: Node
    below: Node  # each of its rows comes from one row of the scan that is sliced
    output: tuple[tuple[str, str], ...]
    sizes: Mapping[str, int]

    def can(self, number: int, column: str, kind: str) -> bool:
        """Tell whether a scan can be exchanged by a column, together with a key of type ``kind``."""
        view = self.writer.scans[number][1]
        kinds = {c.name: c.type for c in columns(view)}
        alike = _hash_type(kinds[column]) == _hash_type(kind)  # hashes of other types are others
        return alike and BUCKET not in {n.lower() for n in kinds} and around(self.below, view) is not None

    def used(self, first: str) -> dict[int, tuple[str, ...]]:
        """Return by scan the columns that a statement names not only where it reads the scan."""
        count = Counter(re.findall(r"\bc\d+\b", first))
        found = {}
        for number, (_, view) in self.writer.scans.items():
            found[number] = tuple(c.name for c in columns(view) if count[c.column] > 1)
        return found

    def of(self, keys: Mapping[int, str], early: Early = NOTHING) -> Exchanged:
        """Return what exchanges the scans of ``keys`` by a column each, of one of them groups where some are made
        ``early``; what each row that is written has passed is not asked again."""
        tests = {number: self._tests(number) for number in keys}
        passed = frozenset(id(test) for some in tests.values() for test in some)
        whole, split = statements_of(self.writer.anew(passed, early=early), self.plan, self.output)
        assert split is not None  # as of the whole plan
        apart = None
        if (grouped := self._grouped(keys)) is not None:
            apart = statements_of(self.writer.anew(passed, early=early), self.plan, self.output, grouped)[1]
        used, read = self.used(split.first), self._read(split.first)
        reducing = self._reducing(keys)
        found = {
            number: self._exchange(number, column, used[number], tests[number], reducing[number], early)
            for number, column in keys.items()
            if number in read
        }

        def over(sql: str) -> str:
            for number, one in found.items():
                sql = one.over(sql, self.writer.scan(self.writer.scans[number][1]).columns)
            return sql

        split = split._replace(first=over(split.first))
        apart = split if apart is None else apart._replace(first=over(apart.first))
        return Exchanged(found, split, apart, over(whole), read)

    def early(self, keys: Mapping[int, str], number: int) -> Exchanged | None:
        """Return ``of`` with groups of a scan; ``None``: something needs each of its rows."""
        if (aggregate := self._aggregate()) is None:
            return None
        passed = frozenset(id(test) for one in keys for test in self._tests(one))
        calls = self.writer.anew(passed, keeps=True).grouped(aggregate)[1].calls  # with its table expressions
        found = early_groups(aggregate, calls, self.writer.scans[number][1], keys[number], passed)
        return self.of(keys, found) if found is not None else None

    def _grouped(self, keys: Mapping[int, str]) -> Node | None:
        """Return the aggregate right above ``below`` if rows of one group have one key."""
        aggregate = self._aggregate()
        by = aggregate.expressions("groupingExpressions") if aggregate is not None else ()
        groups = {k.attribute.id for k in by if k.kind == "AttributeReference"}
        for view in divisible(self.below):
            name = keys.get(self.writer.number_of(view))
            if any(passes(self.below, view, c) in groups for c in columns(view) if c.name == name):
                return aggregate
        return None

    def _aggregate(self) -> Node | None:
        gathering = gathering_of(last(self.plan))
        return gathering if gathering is not None and gathering.kind == "Aggregate" else None

    def _read(self, sql: str) -> frozenset[int]:
        return scans_in(sql) & self.writer.scans.keys()

    def _tests(self, number: int) -> list[Node]:
        view = self.writer.scans[number][1]
        root = around(self.below, view)
        found = pushed(root, view) if root is not None else []
        return [test for test in found if test.kind != "InSubquery" or self._smaller(test, number)]

    def _smaller(self, test: Node, number: int) -> bool:
        """Tell whether what a test for membership reads is much smaller than a scan."""
        read = [view for view in test.children[-1].expression("plan").walk() if view.scans]
        return sum(map(self._size, read)) * _SMALLER <= self._size(self.writer.scans[number][1])

    def _size(self, view: Node) -> int:
        return self.sizes[self.writer.scans[self.writer.number_of(view)][0]]

    def _reducing(self, keys: Mapping[int, str]) -> dict[int, list[tuple[str, float]]]:
        """Return by scan the conditions, each with the part of rows that may pass it, by which joins and tests with
        others leave only rows whose keys these have."""
        found: dict[int, list[tuple[str, float]]] = {number: [] for number in keys}
        writer = self.writer

        def add(number: int, column: str, values: str, size: int, part: float) -> None:
            if number in found and size * _SMALLER <= self._size(view := writer.scans[number][1]):
                (name,) = (c.column for c in columns(view) if c.name == column)
                if (condition := f"{name} IN ({values})", part) not in found[number]:
                    found[number].append((condition, part))

        for one in members(self.plan, writer.number_of):
            plan = one.test.children[-1].expression("plan")
            size = sum(self._size(view) for view in plan.walk() if view.scans)
            add(one.scan, one.column, writer.inner(plan), size, _ONE_VALUE)
        for view, tests, kept, each, key in _filtered(writer, self.plan):
            part = max(prod(_passing(test) for test in tests), _LEAST)
            for number, column in each.others:
                add(number, column, f"SELECT {key} FROM {kept}", self._size(view), part)
        return found

    def _exchange(
        self,
        number: int,
        column: str,
        used: Collection[str],
        tests: Sequence[Node],
        reducing: Sequence[tuple[str, float]],
        early: Early,
    ) -> Exchange:
        view = self.writer.scans[number][1]
        scan, grouped = self.writer.scan(view), id(view) in early.through
        used = {one.name for one in early.by} if grouped else {*used, column}
        kept = [c for c in scan.columns if c.name in used]
        listed = [*early.carried(view), *(f"{c.column} AS {identifier(c.name)}" for c in kept)]
        key = next(cast(c.column, _hash_type(c.type)) for c in scan.columns if c.name == column)
        conditions = [self.writer.condition(test) for test in tests]
        conditions += [text for text, _ in reducing if text not in conditions]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        source = f"(SELECT * FROM {scan.source}{where})"
        listed.append(f"CAST(hash({key}) % {BUCKETS} AS INTEGER) AS {identifier(BUCKET)}")
        sql = f"SELECT {', '.join(listed)} FROM {early.groups(source) if grouped else source}"
        part = prod(part for _, part in reducing)
        return Exchange(
            sql,
            tuple(c.name for c in kept),
            self.used(sql)[number],
            tuple(sorted(self._read(where) - {number})),
            max(part * _ONE_VALUE ** sum(test.kind == "InSubquery" for test in tests), _LEAST),
            tuple(early.columns) if grouped else (),
            grouped,
            within(tests, view),
        )


def _passing(test: Node) -> float:
    """Return which part of rows may pass a test, as far as its kind tells."""
    return _ONE_VALUE if test.kind == "EqualTo" else _RANGE


def _hash_type(kind: str) -> str:
    return "long" if kind in types.INTEGERS else kind


def statements_of(
    writer: Writer, plan: Node, output: Sequence[tuple[str, str]], grouped: Node | None = None
) -> tuple[str, Statements | None]:
    """Return what runs on all rows, and what runs on slices; ``None``: that cannot be merged.

    ``grouped`` is an aggregate each of whose groups is in one slice, or a window of which all partitions are.
    """
    whole = writer.complete(result(writer.query(plan), output))
    plan = last(plan)
    gathering = gathering_of(plan, grouped)
    if gathering is None:
        return whole, Statements(whole, "")
    first = _first(writer, plan, gathering)
    if first is None:
        return whole, None
    first, merge = writer.complete(first), writer.complete(result(writer.query(plan), output))
    return whole, Statements(first, merge)


def result(query: Query, columns: Sequence[tuple[str, str]]) -> str:
    """Return ``query`` with the names and types that Spark would give its columns."""
    listed = []
    if len({name.lower() for name, _ in columns}) < len(columns):
        raise NotNativeError("a column appears twice")  # which Spark refuses
    for column, (name, kind) in zip(query.columns, columns, strict=True):
        if column.name != name or types.normal(kind) != column.type.replace("void", "string"):
            raise NotNativeError(f"the column {name} would be {column.type}, not {kind}")
        listed.append(f"{cast(column.column, types.normal(kind))} AS {identifier(name)}")
    return f"SELECT {', '.join(listed)} FROM ({query.sql})"


def _first(writer: Writer, plan: Node, gathering: Node) -> str | None:
    """Return the statement of a slice, and let ``writer`` write the merge from now on; ``None``: it cannot be
    merged."""
    if gathering.kind == "Aggregate":
        above, groups = writer.grouped(gathering)
        if groups.calls.whole:
            return None
        writer.gathers = bool(groups.calls.values)
        first = writer.sliced(gathering, groups)
        writer.stored[id(gathering)] = above.over(groups.merged(PARTS))
        return first[1:-1]
    best = ranked(plan, gathering) if gathering.kind == "Window" else None
    if best is not None:
        below, rows = writer.query(gathering.children[0]), writer.query(gathering)
        writer.stored[id(gathering.children[0])] = Query(f"SELECT * FROM {PARTS}", below.columns)
        listed = ", ".join(c.column for c in below.columns)
        return f"SELECT {listed} FROM {rows.source} WHERE c{best[0]} <= {best[1]}"
    writer.gathers = gathering.kind == "Window"
    top = (limit_above(plan, gathering) if gathering.kind != "Window" else None) or gathering
    part = writer.query(top) if top.kind in ("GlobalLimit", "Distinct") else writer.query(top.children[0])
    parts = Query("SELECT * FROM parts", part.columns)
    child = gathering.children[0]
    if gathering.kind == "GlobalLimit" and child.kind == "LocalLimit":
        child = child.children[0]
    writer.stored[id(child)] = parts
    listed = ", ".join(c.column for c in part.columns)
    return f"SELECT {listed} FROM ({part.sql})"
