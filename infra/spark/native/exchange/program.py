"""What a stage's tasks run, and which slices of its relations."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.catalyst import Node, NotNativeError
from ebbflow.infra.spark.native.exchange.costs import Exchanged, Statements, Ways
from ebbflow.infra.spark.native.exchange.within import Learnable, Within
from ebbflow.infra.spark.native.narrowing import Narrowing
from ebbflow.infra.spark.native.slices import Cut
from ebbflow.infra.spark.native.statements import Writer
from ebbflow.infra.spark.native.worker import KeyRange, Part

_SCAN = re.compile(r"\bs(\d+)\b")


def scans_in(sql: str) -> frozenset[int]:
    """Return the numbers of the scans that a statement may read.

    >>> sorted(scans_in("SELECT c1 FROM s2 JOIN s13 USING (c1)"))
    [2, 13]
    """
    return frozenset(int(number) for number in _SCAN.findall(sql))


class Exchanging(Protocol):
    """Writes what exchanges scans of a statement, and the statement over that; see ``programs.Exchanger``."""

    @property
    def plan(self) -> Node:
        """Return the statement's plan."""
        ...

    @property
    def writer(self) -> Writer:
        """Return what has written the statement."""
        ...

    def can(self, number: int, column: str, kind: str) -> bool:
        """Tell whether a scan can be exchanged by a column, together with a key of type ``kind``."""
        ...

    def used(self, first: str) -> dict[int, tuple[str, ...]]:
        """Return by scan the columns that a statement names not only where it reads the scan."""
        ...

    def of(self, keys: Mapping[int, str]) -> Exchanged:
        """Return what exchanges the scans of ``keys`` by a column each."""
        ...

    def early(self, keys: Mapping[int, str], number: int) -> Exchanged | None:
        """Return ``of`` with groups of a scan; ``None``: something needs each of its rows."""
        ...


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
    within: tuple[Within, ...] = ()  # what rows of ``sliced`` have that ``first`` does not drop
    learnable: Callable[[], Sequence[Learnable]] = list  # returns by what more may be known of these rows
    exchanger: Exchanging | None = None
    gathers: bool = False  # ``merge`` gets rows of ``sliced`` or their distinct values, not only groups
    numbered: bool = False  # ``first`` chooses among equal rows of other scans, each slice for itself
    full: tuple[tuple[int, str], ...] = ()  # scans of a full join, and their columns that it makes equal
    used: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # by scan: columns that ``first`` needs
    parted: "Callable[[], tuple[Program, ...]]" = tuple  # returns ``arms``

    @cached_property
    def arms(self) -> "tuple[Program, ...]":
        """Return those of the parts of a union, in which each row comes from one of them; none: there is no union, or
        it cannot be taken apart."""
        try:
            return self.parted()
        except (NotNativeError, RecursionError):  # of the whole more may be known
            return ()

    @property
    def ways(self) -> Ways | None:
        """Return the ways to exchange, if there are any."""
        if self.sliced is None or self.exchanger is None:
            return None
        if self.full:
            return Ways([dict(self.full)], self.exchanger.of, True, self.exchanger.early)
        found, can = list[dict[int, str]](), self.exchanger.can
        for one in self.narrowings:
            pairs = (*one.others, (self.sliced, one.column))
            equal = {number: column for number, column in pairs if can(number, column, one.type)}
            if self.sliced in equal and len(equal) > 1:
                found.append(equal)
        return Ways(found, self.exchanger.of, early=self.exchanger.early)

    @property
    def split(self) -> Statements:
        """Return ``first`` and ``merge``."""
        return Statements(self.first, self.merge)


class Slice(NamedTuple):
    """What one task reads of a stage."""

    cut: Cut
    ranges: tuple[KeyRange, ...]  # of what it reads of other relations
    read: float  # bytes of other relations
    made: Program  # whose relation it is of

    def part(self, scans: Sequence[Relation], file: str) -> Part:
        """Return what the task runs, which writes ``file``; ``scans`` are all that there are."""
        name = f"s{self.made.sliced}"
        own = tuple(replace(r, files=self.cut.files) if r.name == name else r for r in scans)
        return Part(self.made.first, own, file, name, self.cut.rows, self.ranges)
