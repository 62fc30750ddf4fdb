"""What must hold after any run of a controller, from AWS's own record and from the controller's journal."""

from itertools import pairwise
from typing import Any

from ebbflow.infra.aws.naming import TAG_GANG
from ebbflow.infra.aws.notices.store import NoticeLog
from tests.aws.controller import MOST, POOL
from tests.aws.emulator import Cluster

TAKEN = 75.0
"""Seconds of the clock within which a warning is known if the queue is read; a message may have to come again."""


def violations(
    state: dict[str, Any], journal: list[dict[str, Any]], book: NoticeLog, cluster: Cluster, wanted: int
) -> list[str]:
    """Return what does not hold, in sentences.

    ``state`` is ``AccountAt.state``, ``book`` what the controller's notice file holds, ``wanted`` the nodes of the
    last order.
    """
    seen = [line for line in journal if line["kind"] == "seen"]
    if not seen:
        return ["the controller has seen nothing"]
    return [
        *(f"the emulator failed: {error}" for error in state["errors"]),
        *_leaks(state, seen, cluster, wanted),
        *_limits(state, seen, cluster),
        *_ended(state, journal, cluster),
        *_notices(state, journal, book, cluster),
        *_memory(seen),
        *_revisions(seen),
    ]


def _leaks(state: dict[str, Any], seen: list[dict[str, Any]], cluster: Cluster, wanted: int) -> list[str]:
    """Every node that is billed is known and planned."""
    alive = {i["id"] for i in state["instances"] if i["alive"] and cluster.names.owns(i["tags"])}
    known = set(seen[-1]["nodes"])
    found = []
    if unknown := sorted(alive - known):
        found.append(f"billed but unknown: {', '.join(unknown)}")
    if gone := sorted(known - alive):
        found.append(f"known but gone: {', '.join(gone)}")
    if len(alive) != wanted:
        found.append(f"{wanted} nodes are wanted, {len(alive)} are there")
    planned, requested, _, draining = seen[-1]["pools"][POOL]
    if (planned, requested, draining) != (wanted, wanted, []):
        found.append(f"{wanted} wanted; planned {planned}, requested {requested}, draining {draining}")
    return found


def _limits(state: dict[str, Any], seen: list[dict[str, Any]], cluster: Cluster) -> list[str]:
    """No gang is started beyond the limit of nodes: by AWS's own record, and by what the controller planned.

    Nodes that their group ends are not counted: it starts others for them, whatever is decided.
    """
    found = []
    for line in seen:
        planned = sum(pool[0] for pool in line["pools"].values())
        if planned > MOST:
            found.append(f"{planned} nodes planned at revision {line['revision']}, and {MOST} are allowed")
    there: set[str] = set()
    for entry in state["log"]:
        if entry["kind"] == "launched" and cluster.names.owns(entry["tags"]):
            there.add(entry["instance"])
            if TAG_GANG in entry["tags"] and len(there) > MOST:
                found.append(f"{entry['instance']} of a gang is node {len(there)}, and {MOST} are allowed")
        elif entry["kind"] in ("ended", "waits"):
            there.discard(entry["instance"])
    return found


def _ended(state: dict[str, Any], journal: list[dict[str, Any]], cluster: Cluster) -> list[str]:
    """Only our own nodes are ended, by name, and those of the pool only when they were drained."""
    tags = {i["id"]: i["tags"] for i in state["instances"]}
    drained = {id_ for line in journal if line.get("what") == "end" for id_ in line["content"]}
    found = []
    for entry in state["log"]:
        if entry["kind"] not in ("ended", "waits") or entry["cause"] == "AWS":
            continue
        id_, cause = entry["instance"], entry["cause"]
        if not cluster.names.owns(tags[id_]):
            found.append(f"{id_} is not ours and was ended by {cause}")
        elif cause.startswith("scale-in"):
            found.append(f"{id_} was chosen by its group")
        elif TAG_GANG not in tags[id_] and id_ not in drained:
            found.append(f"{id_} was ended without being drained, by {cause}")
    return found


def _notices(
    state: dict[str, Any], journal: list[dict[str, Any]], book: NoticeLog, cluster: Cluster
) -> list[str]:
    """Every warning is in the notice file, and those of nodes that we observed are in a revision.

    A node may be gone before anybody could know: while no controller ran, or because we ended it ourselves.
    """
    seen = [line for line in journal if line["kind"] == "seen"]
    heard = [line["last"] for line in journal if line["kind"] == "heard"]
    ours = {i["id"] for i in state["instances"] if cluster.names.owns(i["tags"])}
    observed = {id_ for line in seen for id_ in line["nodes"]}
    noticed = {id_ for line in seen for id_, kind in line["notices"].items() if kind == "interruption"}
    ended = {e["instance"]: e["at"] for e in state["log"] if e["kind"] == "ended"}
    found = []
    for entry in state["log"]:
        if entry["kind"] != "warned":
            continue
        id_, at = entry["instance"], entry["at"]
        if id_ not in book.leaving:
            found.append(f"the warning of {id_} was lost")
        known = any(at + TAKEN < last < ended.get(id_, state["now"]) for last in heard)
        if known and id_ in ours & observed and id_ not in noticed:
            found.append(f"the warning of {id_} is in no revision")
    return found


def _memory(seen: list[dict[str, Any]]) -> list[str]:
    """A controller that follows a killed one knows its notices."""
    found = []
    for before, after in pairwise(seen):
        if before["pid"] != after["pid"]:
            firm = {id_ for id_, kind in before["notices"].items() if kind == "interruption"}
            for id_ in sorted(firm & set(after["nodes"]) - set(after["notices"])):
                found.append(f"the notice of {id_} was forgotten by the next controller")
    return found


def _revisions(seen: list[dict[str, Any]]) -> list[str]:
    """Revisions never go back, and one revision means the same nodes and notices."""
    found = []
    for before, after in pairwise(seen):
        same = (before["nodes"], before["notices"]) == (after["nodes"], after["notices"])
        if after["revision"] < before["revision"]:
            found.append(f"revision {after['revision']} follows {before['revision']}")
        if after["revision"] == before["revision"] and not same:
            found.append(f"revision {after['revision']} has two meanings")
    return found
