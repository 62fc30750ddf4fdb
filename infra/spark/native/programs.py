"""What a stage's tasks run: one statement a slice of the largest table, and one over what the slices have written."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.catalyst import Node, NotNativeError
from ebbflow.infra.spark.native.expressions import cast, identifier
from ebbflow.infra.spark.native.narrowing import Narrowing, columns, narrowings, on_path, pushed
from ebbflow.infra.spark.native.slices import BUCKET, BUCKETS, Exchange
from ebbflow.infra.spark.native.statements import Query, Writer

_GATHERING = ("Sort", "GlobalLimit", "Distinct", "Aggregate")
_PASSED = ("Project", "Filter", "SubqueryAlias", "ResolvedHint", "View")
_BOTH = ("Inner", "Cross")
_LEFT = ("LeftOuter", "LeftSemi", "LeftAnti")


@dataclass(frozen=True)
class Program:
    """The statements of a stage. ``first`` reads a slice of the scan ``sliced``, or all of it; ``merge`` reads all
    that ``first`` has written as the relation ``parts``, and is empty where that is the result already."""

    scans: Mapping[int, str]  # relation s<number> -> table, in lower case
    sliced: int | None  # the scan that may be sliced; ``None``: ``whole`` runs in one task
    first: str
    merge: str
    whole: str
    columns: tuple[tuple[str, str], ...]  # (name, Spark SQL type) of the result
    narrowings: tuple[Narrowing, ...] = ()  # what ``first`` can leave out of other scans
    hashed: Mapping[tuple[int, str], Exchange] = field(default_factory=dict)
    """By a scan and a column of it that narrowings name: what writes its rows in the order of the column's hash, for
    ``first`` to read them in place of the scan."""

    @property
    def keys(self) -> list[dict[int, str]]:
        """Return the ways to exchange: scans, the sliced one among them, with a column each of equal values."""
        found, sliced = list[dict[int, str]](), self.sliced
        for one in self.narrowings if sliced is not None else ():
            own = (sliced or 0, one.column)
            columns = dict([*one.others, own])
            if own in self.hashed:
                found.append({n: column for n, column in columns.items() if (n, column) in self.hashed})
        return found

    @property
    def file(self) -> str:
        """Return the name of the file that ``first`` writes, for the number of its part."""
        return ".native-{:05d}.parquet" if self.merge else "part-{:05d}.parquet"


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
    whole = writer.complete(_result(writer.query(plan), output))
    scans = {number: table for number, (table, _) in writer.scans.items()}
    whole_plan, plan = plan, plan.children[-1] if plan.kind == "WithCTE" else plan
    gathering = _gathering(plan)
    below = plan if gathering is None else gathering.children[0]
    found = [(sizes[str(v.fields["desc"]["identifier"]["table"]).lower()], v) for v in _divisible(below)]
    if not found:
        return Program(scans, None, "", "", whole, tuple(output))
    view = max(found, key=lambda pair: pair[0])[1]
    number, narrowed = writer.number_of(view), narrowings(whole_plan, below, view, writer.number_of)
    if gathering is None:
        hashed = _hashed(writer, below, number, narrowed, whole)
        return Program(scans, number, whole, "", whole, tuple(output), narrowed, hashed)
    first = _first(writer, plan, gathering)
    if first is None:
        return Program(scans, None, "", "", whole, tuple(output))
    first, merge = writer.complete(first), writer.complete(_result(writer.query(plan), output))
    hashed = _hashed(writer, below, number, narrowed, first)
    return Program(scans, number, first, merge, whole, tuple(output), narrowed, hashed)


def _hashed(
    writer: Writer, below: Node, sliced: int, narrowed: Sequence[Narrowing], first: str
) -> dict[tuple[int, str], Exchange]:
    """Return the statements that write rows by the hash of a key: of the sliced scan and of those that it narrows.

    Not of scans in subqueries: none of their columns or rows could be left out, as Spark does.
    """
    used = Counter(re.findall(r"\bc\d+\b", first))
    found = {}
    for one in narrowed:
        for number, column in ((sliced, one.column), *one.others):
            view = writer.scans[number][1]
            kinds = {c.name: c.type for c in columns(view)}
            alike = _hash_type(kinds[column]) == _hash_type(one.type)  # hashes of other types are others
            if alike and on_path(below, view) and BUCKET not in {name.lower() for name in kinds}:
                found[number, column] = _by_hash(writer, below, view, column, used)
    return found


def _hash_type(kind: str) -> str:
    return "long" if kind in types.INTEGERS else kind


def _by_hash(writer: Writer, below: Node, view: Node, column: str, used: Mapping[str, int]) -> Exchange:
    scan = writer.scan(view)
    # a column that the statement names only where it reads the scan is in no result
    listed, key = [], ""
    for c in scan.columns:
        read = used[c.column] > 1 or c.name == column
        listed.append(f"{c.column if read else cast('NULL', c.type)} AS {identifier(c.name)}")
        if c.name == column:
            key = cast(c.column, _hash_type(c.type))
    tests = [writer.condition(test) for test in pushed(below, view)]
    where = f" WHERE {' AND '.join(tests)}" if tests else ""
    sql = (
        f"SELECT {', '.join(listed)}, CAST(hash({key}) % {BUCKETS} AS INTEGER) AS {identifier(BUCKET)} "
        f"FROM (SELECT * FROM {scan.source}{where}) ORDER BY {identifier(BUCKET)}"
    )
    return Exchange(sql, tuple(c.name for c in scan.columns))


def _result(query: Query, columns: Sequence[tuple[str, str]]) -> str:
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
        if groups.calls.distinct:
            return None
        first = groups.complete(writer.query(gathering.children[0]).source)
        writer.stored[id(gathering)] = above.over(groups.merged())
        return first[1:-1]
    top = _limit_above(plan, gathering) or gathering
    part = writer.query(top) if top.kind in ("GlobalLimit", "Distinct") else writer.query(top.children[0])
    parts = Query("SELECT * FROM parts", part.columns)
    child = gathering.children[0]
    if gathering.kind == "GlobalLimit" and child.kind == "LocalLimit":
        child = child.children[0]
    writer.stored[id(child)] = parts
    listed = ", ".join(c.column for c in part.columns)
    return f"SELECT {listed} FROM ({part.sql})"


def _limit_above(plan: Node, sort: Node) -> Node | None:
    """Return the limit right above ``sort``: the first rows of all are among the first of each slice."""
    for node in plan.walk():
        if node.kind == "GlobalLimit":
            child = node.children[0]
            below = child.children[0] if child.kind == "LocalLimit" else child
            if below is sort:
                return node
    return None


def _gathering(plan: Node) -> Node | None:
    """Return the lowest operator on the way from the result down that must see all rows."""
    found, node = None, plan
    while node.kind in (*_PASSED, *_GATHERING, "LocalLimit") and node.children:
        if node.kind in _GATHERING:
            found = node
        node = node.children[0]
    return found


def _divisible(node: Node) -> list[Node]:
    """Return the scans below ``node`` whose slices give slices of its rows: each row of it comes of one of theirs."""
    if node.scans:
        return [node]
    if node.kind in _PASSED:
        return _divisible(node.children[0])
    if node.kind == "Join":
        left, right = node.children
        kind = node.object("joinType")
        if kind in _BOTH:
            return _divisible(left) + _divisible(right)
        if kind in _LEFT:
            return _divisible(left)
        if kind == "RightOuter":
            return _divisible(right)
    return []
