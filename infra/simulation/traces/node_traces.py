"""Spot traces: nodes that are added and removed, and the notices they get, as changes of a cluster.

What changes a cluster's nodes (traces, failures, prices) works on presences: who is there from when to when.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.traces.cluster import CapacityChange, Cluster
from ebbflow.infra.simulation.traces.rows import count, not_negative, read_rows, read_spot_rows, text
from ebbflow.infra.storage import user_files
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice


@dataclass(frozen=True, slots=True)
class AvailabilityInterval:
    """A node that is there from ``start`` until just before ``end``, s; told at ``notice`` that it must leave."""

    node: Node
    start: float = 0.0
    end: float = inf
    notice: float = inf
    deadline: float = inf  # that the notice names


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One row of a spot trace."""

    at: float  # s
    kind: str  # add, remove or notice
    node: str
    deadline: float = inf  # s, of a notice
    gpus: int | None = None  # of an added node; None: those of the others


def read_node_trace(path: Path) -> list[NodeEvent]:
    """Read a spot trace in one of two formats, told apart by the first line.

    Without header, ``time_ms,add|remove,node`` (Oobleck, SOSP 2023, artefact). With header, ours:
    ``time_s,event,node`` and optional ``deadline_s,gpus``; ``event`` is add, remove or notice, a notice names its
    deadline. Rows must be in order of time.

    Raises:
        WorkloadError: malformed row, with line and reason; time going back; a node added while present, removed or
            noticed while absent; a notice for a node that the trace never removes.
    """
    header = user_files.first_line(path, error=WorkloadError)
    if "time_s" not in header:
        return [NodeEvent(row.at / 1000, row.kind, row.node) for row in read_spot_rows(path)]
    return _own(path)


def _event(field: str) -> str:
    kind = field.strip()
    if kind not in ("add", "remove", "notice"):
        raise ValueError(f"must be add, remove or notice; got {kind!r}")
    return kind


def _own(path: Path) -> list[NodeEvent]:
    columns = {"time_s": not_negative, "event": _event, "node": text}
    events: list[NodeEvent] = []
    told: dict[str, int] = {}  # node to the line of its notice
    gone: set[str] = set()
    for line, (at, kind, node, deadline, gpus) in read_rows(
        path, columns, {"deadline_s": not_negative, "gpus": count}
    ):
        where = f"{path}, line {line}"
        if events and at < events[-1].at:
            raise WorkloadError(f"{where}: time goes back from {events[-1].at:g} to {at:g} s")
        if (kind == "notice") != (deadline is not None):
            raise WorkloadError(f"{where}: a notice, and nothing else, needs deadline_s")
        if kind == "notice" and deadline < at:
            raise WorkloadError(f"{where}: the deadline {deadline:g} s is before the notice at {at:g} s")
        if gpus is not None and kind != "add":
            raise WorkloadError(f"{where}: only an added node has gpus")
        if kind == "notice" and node in gone:
            raise WorkloadError(f"{where}: node {node} gets a notice while absent")
        if kind == "notice":
            told[node] = line
        elif kind == "remove":
            told.pop(node, None)
            gone.add(node)
        else:
            gone.discard(node)
        events.append(NodeEvent(at, kind, node, inf if deadline is None else deadline, gpus))
    if not events:
        raise WorkloadError(f"{path}: has no events")
    if told:
        node, line = min(told.items(), key=lambda item: item[1])
        raise WorkloadError(f"{path}, line {line}: node {node} gets a notice but is never removed")
    return events


def presences(cluster: Cluster) -> list[AvailabilityInterval]:
    """Return who is there when, in order of appearance."""
    found: list[AvailabilityInterval] = []
    here: dict[str, int] = {}
    changes = [CapacityChange(0.0, cluster.nodes), *cluster.changes]
    for change in changes:
        for id_ in change.remove:
            number = here.pop(id_)
            found[number] = replace(found[number], end=change.at)
        for node in change.add:
            here[node.id] = len(found)
            found.append(AvailabilityInterval(node, change.at))
        for notice in change.notices:
            number = here[notice.node_id]
            found[number] = replace(found[number], notice=change.at, deadline=notice.deadline)
    return found


def cluster_of(found: Iterable[AvailabilityInterval]) -> Cluster:
    """Return the cluster of these presences; events of one moment are one change. Inverse of ``presences``."""
    nodes: list[Node] = []
    added: dict[float, list[Node]] = {}
    removed: dict[float, list[str]] = {}
    notices: dict[float, list[Notice]] = {}
    for one in found:
        if one.end <= one.start:
            continue
        if one.start <= 0:
            nodes.append(one.node)
        else:
            added.setdefault(one.start, []).append(one.node)
        if one.end < inf:
            removed.setdefault(one.end, []).append(one.node.id)
        if one.notice < one.end:
            notices.setdefault(max(one.notice, one.start), []).append(Notice(one.node.id, one.deadline))
    return Cluster(
        tuple(nodes),
        tuple(
            CapacityChange(
                at, tuple(added.get(at, ())), tuple(removed.get(at, ())), tuple(notices.get(at, ()))
            )
            for at in sorted({*added, *removed, *notices})
            if at > 0 or notices.get(at)
        ),
    )


def with_trace(
    cluster: Cluster, events: Sequence[NodeEvent], template: Node, *, notice: float = 0.0, source: str = ""
) -> Cluster:
    """Return ``cluster`` with its nodes coming and going by ``events``.

    The cluster's own nodes are there from the start, until an event of theirs removes them. An added node is like
    ``template`` under its own name. ``notice`` is how many seconds ahead removals without notice are announced.

    Raises:
        WorkloadError: a node is added while present, or removed or noticed while absent.
        OptionError: the cluster has changes already.
    """
    if cluster.changes:
        raise OptionError("a spot trace needs a cluster whose nodes do not come and go yet")
    if notice < 0:
        raise OptionError(f"notice must be >= 0 s; got {notice}")
    found = [AvailabilityInterval(node) for node in cluster.nodes]
    here = {node.id: number for number, node in enumerate(cluster.nodes)}
    for event in events:
        number = here.get(event.node)
        if (event.kind == "add") == (number is not None):
            state = "added while present" if event.kind == "add" else f"{event.kind}d while absent"
            raise WorkloadError(f"{source or 'spot trace'}: node {event.node} is {state} at {event.at:g} s")
        if number is None:
            here[event.node] = len(found)
            node = replace(template, id=event.node, gpus=event.gpus or template.gpus)
            found.append(AvailabilityInterval(node, event.at))
        elif event.kind == "notice":
            found[number] = replace(found[number], notice=event.at, deadline=event.deadline)
        else:
            del here[event.node]
            told = found[number].notice
            if notice > 0 and told == inf:
                told = max(found[number].start, event.at - notice)
                found[number] = replace(found[number], notice=told, deadline=event.at)
            found[number] = replace(found[number], end=event.at)
    return cluster_of(found)
