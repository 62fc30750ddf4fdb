"""Statements whose operators that must see all rows are divided each by itself.

Where no slices of one relation give slices of a statement's rows, as above joins of aggregates, or unions of them,
each aggregate may still be one of what slices of its own input have computed. Tasks compute those, in waves: one that
reads what another one has found comes later. What is left reads groups in place of tables, and runs in one task.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.aggregates import Groups
from ebbflow.infra.spark.native.catalyst import (
    PASSED,
    Node,
    NotDoneError,
    NotNativeError,
    arms,
    divisible,
    sources,
)
from ebbflow.infra.spark.native.exchange.costs import PAYS, Size, bytes_read, scan_sizes, sooner, waves_cost
from ebbflow.infra.spark.native.exchange.program import Program, Slice, scans_in
from ebbflow.infra.spark.native.expressions import Typed
from ebbflow.infra.spark.native.narrowing import columns
from ebbflow.infra.spark.native.programs import cut_of, result
from ebbflow.infra.spark.native.statements import PARTS, Above, Query, Writer
from ebbflow.infra.spark.native.worker import Done, Part
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation

_EXPRESSIONS = ("projectList", "aggregateExpressions", "groupingExpressions", "windowExpressions")
_SUBQUERIES = ("Exists", "ScalarSubquery", "ListQuery")
MERGED = 2 << 30  # bytes of files that one task may merge
_RELATION = re.compile(rf"\b{PARTS}\d+\b")


Computing: TypeAlias = Callable[
    [list[Slice], list[str], Sequence[Relation], int], tuple[list[list[str]], list[Done]]
]
"""Computes slices as files of these names, over these relations, when so many later ones follow; returns the names of
the files that there are of each, and what became of the tasks."""


class Piece(NamedTuple):
    """What tasks compute of one operator, each of a slice."""

    name: str  # of the relation that what they have written is to others
    slices: tuple[Slice, ...]

    @property
    def files(self) -> list[str]:
        """Return the names of the files that the tasks write."""
        return [f".native-{self.name}-{n:05d}.parquet" for n in range(len(self.slices))]


class Waves(NamedTuple):
    """What tasks run wave by wave, and the statement that reads what all of them have written."""

    pieces: tuple[tuple[Piece, ...], ...]
    merge: str
    sliced: frozenset[int]  # scans of which tasks read slices, or all
    left: Mapping[int, Size]  # of the scans that ``merge`` reads
    room: int  # bytes that each task of a later wave can hold of what earlier ones have found

    @property
    def slices(self) -> list[Slice]:
        """Return all slices."""
        return [one for wave in self.pieces for piece in wave for one in piece.slices]

    def pays(self, sizes: Mapping[int, Size], cores: int, *, divided: bool) -> bool:
        """Tell whether the waves are done sooner on ``cores`` than what else there is: one task that reads scans of
        these ``sizes``, or, where the statement must be ``divided``, Spark SQL."""
        slices, left, whole = self.slices, bytes_read(self.left), bytes_read(sizes)
        others, tasks = sum(one.read for one in slices), min(len(slices), cores)
        sliced = bytes_read({number: sizes[number] for number in self.sliced})
        cost = waves_cost(sliced, others, left, len(self.pieces), tasks)
        return sooner(cost, whole, cores) if divided else cost < PAYS * whole

    def run(
        self,
        output: StorageLocation,
        scans: Sequence[Relation],
        run: Computing,
    ) -> tuple[Part, list[Done]]:
        """Have ``run`` compute the slices of each wave. Return what is left to run, and what became of the tasks.

        Raises ``NotDoneError`` where they have written too much for one task, or for each of a later wave.
        """
        done, relations, later = list[Done](), list(scans), len(self.slices)
        for number, wave in enumerate(self.pieces, start=1):
            slices = [one for piece in wave for one in piece.slices]
            later -= len(slices)
            files, ended = run(slices, [name for piece in wave for name in piece.files], relations, later)
            done += ended
            for piece in wave:
                own, files = files[: len(piece.slices)], files[len(piece.slices) :]
                infos = output.fs().get_file_info([output.path(name) for names in own for name in names])
                written = tuple(FileEntry(info.path, info.size, 0.0) for info in infos)
                relations.append(Relation(piece.name, output.scheme, written, ()))
            found, read = relations[len(scans) :], _read(self.pieces[number:])
            held = sum(one.bytes for one in found if one.name in read)
            if held > self.room or sum(one.bytes for one in found) > MERGED:
                raise NotDoneError("slices have found too many groups for one task")
        return Part(self.merge, tuple(relations), "part-00000.parquet"), done


def _read(pieces: Sequence[Sequence[Piece]]) -> set[str]:
    """Return the names of the relations of others that the tasks of some waves read."""
    texts = {one.made.first for wave in pieces for piece in wave for one in piece.slices}
    return {name for text in texts for name in _RELATION.findall(text)}


def waves(
    made: Program,
    scans: Mapping[int, Relation],
    memory: int,
    least: int,
    divided: Callable[[Program], list[Slice]],
) -> Waves | None:
    """Return the waves of a statement; ``None``: nothing in it can be divided.

    Args:
        made: of the whole statement.
        scans: all of them.
        memory: bytes that a task can hold.
        least: bytes of tables from which on an operator is divided.
        divided: returns the slices of a program, or raises ``NotNativeError``: the operator is left whole.

    Raises ``TableError``.
    """
    if made.exchanger is None:
        return None
    exchanger = made.exchanger
    found = _Dividing(made, exchanger.writer.anew(frozenset()), least, divided)
    try:
        found.share(exchanger.plan)
        found.visit(exchanger.plan)
        merge = found.writer.complete(result(found.writer.query(exchanger.plan), made.columns))
    except (NotNativeError, RecursionError):  # of the whole more may be known
        return None
    pieces, texts = list[tuple[Piece, ...]](), [merge]
    for wave in reversed(found.pieces):  # a common table expression may be read by nothing
        read = {name for text in texts for name in _RELATION.findall(text)}
        pieces.insert(0, tuple(piece for piece in wave if piece.name in read))
        texts += [one.made.first for piece in pieces[0] for one in piece.slices]
    left = {number: scans[number] for number in found.scans_of(merge)}
    sizes = scan_sizes(left, exchanger.used(merge), memory)
    sliced = frozenset(found.read.union(*map(found.scans_of, texts[1:])))
    return Waves(tuple(filter(None, pieces)), merge, sliced, sizes, memory) if any(pieces) else None


@dataclass
class _Dividing:
    """Walks a plan from the bottom up; what of it is divided is read as relations by what is written later."""

    made: Program
    writer: Writer
    least: int
    divided: Callable[[Program], list[Slice]]
    pieces: list[list[Piece]] = field(default_factory=list)  # by wave
    read: set[int] = field(default_factory=set)  # of scans that share a slice, one for each test

    def share(self, plan: Node) -> None:
        """Have each task compute all aggregates of rows of its slice of a table that pass tests, as those of
        subqueries are: those of equal tests together, as Spark's optimiser has it."""
        tables: dict[str, list[_Tested]] = {}
        for one in filter(None, map(_tested, _operators(plan))):
            if self._size(one.view) >= self.least:
                tables.setdefault(self._table(one.view), []).append(one)
        for alike in tables.values():
            with suppress(NotNativeError):  # each by itself may be divided still
                if len(alike) > 1:
                    self._share(alike)

    def _share(self, alike: Sequence["_Tested"]) -> None:
        view, exchanger = alike[0].view, self.made.exchanger
        scan, found = self.writer.scan(view), dict[str, list[tuple[_Tested, Above, Groups]]]()
        stored = {column.name: column.column for column in scan.columns}
        for one in alike:
            names = {c.column: Typed(stored[c.name], c.type) for c in columns(one.view) if c.name in stored}
            tests = " AND ".join(self.writer.condition(test, names) for test in one.tests)
            same = found.setdefault(tests or "true", [])
            parts = same[0][-1].calls.parts if same else None
            same.append((one, *self.writer.grouped(one.node, names, parts)))
        # one row of each, whose columns need other names beside each other
        sources, above, below = list[str](), list[str](), list[str]()
        for n, (tests, same) in enumerate(found.items()):
            groups = same[-1][-1]
            listed = [f"a{i}" for i in range(len(groups.calls.parts))] or ["one"]
            sources.append(f"{groups.sliced(f'(SELECT * FROM {scan.source} WHERE {tests})')} AS t{n}")
            below += [f"t{n}.{name} AS t{n}{name}" for name in listed]
            above.append(", ".join(f"t{n}{name} AS {name}" for name in listed))
        sql = f"SELECT {', '.join(below)} FROM {' CROSS JOIN '.join(sources)}"
        assert exchanger is not None
        number = self.writer.number_of(view)
        used = exchanger.used(scan.source + sql.replace(scan.source, ""))  # where all columns are listed
        made = Program({number: self._table(view)}, number, sql, "", sql, (), used=used)
        name = self._add(tuple(self.divided(made)), 0)
        for same, renamed in zip(found.values(), above, strict=True):
            held = self.writer.held(same[-1][-1].merged(f"(SELECT {renamed} FROM {name})"))
            self.read.add(self.writer.number_of(same[0][0].view))
            for one, each, _ in same:
                self.writer.stored[id(one.node)] = each.over(held)

    def _add(self, slices: tuple[Slice, ...], wave: int) -> str:
        """Have tasks compute slices in a wave; return the relation that they write."""
        name = f"{PARTS}{sum(map(len, self.pieces))}"
        self.pieces += [[] for _ in range(wave + 1 - len(self.pieces))]
        self.pieces[wave].append(Piece(name, slices))
        return name

    def visit(self, node: Node) -> None:
        """Divide what can be of an operator and those below it."""
        if node.scans or id(node) in self.writer.stored:
            return
        for plan in _apart(node):
            self.visit(plan)
        for child in node.children:
            self.visit(child)
            if child.kind == "CTERelationDef":
                self.writer.define(child)
        if node.kind == "Aggregate":
            self._divide(node, node.children[0])
        elif node.kind == "Distinct":
            self._divide(node.children[0], node.children[0])
        elif node.kind in ("Intersect", "Except") and not node.fields.get("isAll"):
            for child in node.children:  # each row counts once
                self._divide(child, child)

    def scans_of(self, sql: str) -> tuple[int, ...]:
        """Return the scans that a statement reads."""
        return tuple(sorted(scans_in(sql) & self.made.scans.keys()))

    def _divide(self, node: Node, below: Node) -> None:
        """Have slices of ``below`` compute what ``node`` is of: an aggregate, or an operator whose distinct rows
        count."""
        source = max(sources(below), key=self._size, default=None)
        if source is None or self._size(source) < self.least:
            return
        parts = arms(source) if source.kind == "Union" else [(source, frozenset[int]())]
        try:
            programs = [self._program(node, below, *part) for part in parts]
            slices = tuple(one for each in programs for one in self.divided(each))
        except (NotNativeError, RecursionError):
            return
        name = self._add(slices, max((self._wave(each.first) for each in programs), default=0))
        if node.kind == "Aggregate":
            above, groups = self.writer.grouped(node)
            self.writer.stored[id(node)] = above.over(groups.merged(name))
        else:
            columns = self.writer.query(node).columns
            self.writer.stored[id(node)] = Query(f"SELECT * FROM {name}", columns)

    def _wave(self, sql: str) -> int:
        """Return the first wave in which a statement can run."""
        read = set(_RELATION.findall(sql))
        waves = (n for n, wave in enumerate(self.pieces) if any(piece.name in read for piece in wave))
        return max(waves, default=-1) + 1

    def _program(self, node: Node, below: Node, source: Node, others: frozenset[int]) -> Program:
        """Return what runs on slices of ``source``, a scan or a part of a union. Raises ``NotNativeError``."""
        exchanger = self.made.exchanger
        assert exchanger is not None
        own, gathers = self.writer.anew(others, keeps=True), False
        if node.kind == "Aggregate":
            _, groups = own.grouped(node)
            if groups.calls.whole:
                raise NotNativeError("it cannot be merged")
            first, gathers = own.sliced(node, groups)[1:-1], bool(groups.calls.values)
        else:
            rows = own.query(below)
            first = f"SELECT DISTINCT {', '.join(c.column for c in rows.columns)} FROM {rows.source}"
        if own.numbered | self.writer.numbered:
            raise NotNativeError("tasks might choose among equal rows unlike each other")
        first = own.complete(first)
        view = max(divisible(source), key=self._size, default=None)
        sliced = None if view is None else own.number_of(view)
        root = source if others else below  # columns above a union have the names of its first part's
        cut = {} if view is None else cut_of(own, exchanger.plan, root, view)
        scans = {number: self.made.scans[number] for number in self.scans_of(first)}
        cut["narrowings"] = tuple(
            one._replace(others=tuple(pair for pair in one.others if pair[0] in scans))
            for one in cut.get("narrowings", ())
        )
        used = exchanger.used(first)
        return Program(scans, sliced, first, "", first, (), **cut, gathers=gathers, used=used)

    def _table(self, view: Node) -> str:
        return self.made.scans[self.writer.number_of(view)]

    def _size(self, node: Node) -> int:
        """Return the bytes of what is read in slices of a scan, or of a union's parts."""
        if node.scans:
            return self.writer.tables[self._table(node)]
        return sum(max(map(self._size, sources(child)), default=0) for child in node.children)


class _Tested(NamedTuple):
    """An aggregate of all rows of a table that pass tests."""

    node: Node
    view: Node
    tests: tuple[Node, ...]


def _tested(node: Node) -> _Tested | None:
    """Return what an aggregate is of; ``None``: it has keys, counts distinct values, or reads something else."""
    if node.kind != "Aggregate" or node.fields.get("groupingExpressions"):
        return None
    view, tests = node.children[0], list[Node]()
    while view.kind in ("Filter", *PASSED) and not view.scans:
        tests += view.expression("condition").conjuncts() if view.kind == "Filter" else []
        view = view.children[0]
    parts = [one for each in (*tests, *node.expressions("aggregateExpressions")) for one in each.walk()]
    asks = any(one.kind in (*_SUBQUERIES, "OuterReference") or one.fields.get("isDistinct") for one in parts)
    return _Tested(node, view, tuple(tests)) if view.scans and not asks else None


def _operators(node: Node) -> Iterator[Node]:
    """Iterate over an operator, those below it, and those of subqueries that ask nothing of its rows."""
    yield node
    if not node.scans:
        for below in (*_apart(node), *node.children):
            yield from _operators(below)


def _apart(node: Node) -> Iterator[Node]:
    """Iterate over the plans of subqueries in an operator's expressions that ask nothing of its rows."""
    for name in ("condition", *_EXPRESSIONS):
        listed: Sequence[Node] = ()
        if node.fields.get(name):
            listed = [node.expression(name)] if name == "condition" else node.expressions(name)
        for expression in listed:
            for one in expression.walk():
                if one.kind in _SUBQUERIES and one.fields.get("plan") and not one.fields.get("outerAttrs"):
                    yield one.expression("plan")
