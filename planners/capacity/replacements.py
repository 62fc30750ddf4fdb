"""Nodes in place of those that have a firm notice, asked for while these are still there.

A group of machines that a cloud keeps at its size starts another one only when one is gone: two minutes that work
need not wait for. What a pool is planned to have does not change; for as long as both are there it has more, and that
must be within its most and the limits of money, too.
"""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import inf

from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import PoolState
from ebbflow.planners.model.ledger import Change, Decided

AGAIN = 10.0  # s after which a node is asked for again whose predecessor is still there: the request may have failed

Passed = Callable[[PoolState, int], tuple[int, Sequence[str]]]
"""From a pool and how many nodes must stay in it to how many the guard lets through, with its reasons."""


@dataclass(frozen=True, slots=True)
class Replacements:
    """What is asked for."""

    now: tuple[Notice, ...] = ()  # of nodes that others are to be started for, the first to leave first
    asked: Mapping[str, float] = field(
        default_factory=dict
    )  # those that it was asked for already -> when last
    changes: tuple[Change, ...] = ()
    wake: float = inf  # when it is asked again


def successors(
    pools: Sequence[PoolState],
    notices: Collection[Notice],
    sizes: Mapping[str, int],
    drains: Collection[str],
    before: Mapping[str, float],
    now: float,
    revision: int,
    last_logged: MutableMapping[str, str],
    passed: Passed,
) -> Replacements:
    """Return which nodes with a firm notice need a successor now.

    Args:
        pools: of one fleet.
        notices: of its nodes; of several for one node the earliest firm one counts.
        sizes: nodes that each pool is to have.
        drains: nodes that leave because they are not needed.
        before: what the last call has asked for.
        now: s since the Unix epoch.
        revision: of the ledger, for what is written down.
        last_logged: what was logged of each thing, not to log it twice; kept up to date.
        passed: the guard. What leaves by itself is billed until it is gone, and is none of those that stay.
    """
    leaving: dict[str, float] = {}
    for notice in notices:
        if notice.kind == "interruption":
            known = leaving.get(notice.node_id, inf)
            leaving[notice.node_id] = min(notice.deadline, known)
    asked: dict[str, float] = {}
    due: list[str] = []
    changes: list[Change] = []
    for pool in pools:
        gone = {*pool.draining, *drains}
        there = [node.id for node in pool.nodes if node.id not in gone]
        noticed = sorted((id_ for id_ in there if id_ in leaving), key=lambda id_: (leaving[id_], id_))
        missing = max(sizes[pool.name] - (len(there) - len(noticed)), 0)
        wanted = noticed[:missing]
        old = [id_ for id_ in wanted if id_ in before]
        new = [id_ for id_ in wanted if id_ not in before]
        # nodes that stay, or are on their way
        others = max(len(there), sizes[pool.name]) - len(noticed)
        may, why = _room(pool, others, len(wanted), passed) if new else (0, ())
        granted = new[: max(may - len(old), 0)]
        asked |= {id_: before[id_] for id_ in old}
        for id_ in granted:
            changes.append(_event(pool, id_, leaving[id_] - now, revision))
        _refused(pool, new[len(granted) :], why, revision, last_logged, changes)
        again = [id_ for id_ in old if not 0 <= now - before[id_] < AGAIN]
        due += [*again, *granted]
        asked |= dict.fromkeys([*again, *granted], now)
    return Replacements(
        tuple(Notice(id_, leaving[id_]) for id_ in due),
        asked,
        tuple(changes),
        min((at + AGAIN for at in asked.values()), default=inf),
    )


def _room(pool: PoolState, others: int, wanted: int, passed: Passed) -> tuple[int, Sequence[str]]:
    """Return how many nodes with a notice may have successors beside them, and why no more."""
    room = pool.max_nodes - max(pool.planned, len(pool.nodes))
    if room < wanted:
        return room, (f"max_nodes of the pool is {pool.max_nodes}",)
    nodes, reasons = passed(pool, others + wanted)
    return nodes - others, reasons


def _event(pool: PoolState, node: str, left: float, revision: int) -> Decided:
    return Decided(
        "scaling",
        f"{pool.name} launches a replacement node for {node}, which terminates in {max(left, 0.0):.0f} s",
        revision=revision,
        inputs={"pool": pool.name, "planned": pool.planned, "node": node},
        outcome={"replaced": node},
    )


def _refused(
    pool: PoolState,
    nodes: Sequence[str],
    why: Sequence[str],
    revision: int,
    last_logged: MutableMapping[str, str],
    changes: list[Change],
) -> None:
    """Write down once that nodes are not replaced before they are gone."""
    key, says = f"replace {pool.name}", " ".join(nodes)
    if not nodes:
        last_logged.pop(key, None)
    elif last_logged.get(key) != says:
        last_logged[key] = says
        reasons = "; ".join(why) or "the limits"
        changes.append(
            Decided(
                "guard",
                f"{', '.join(nodes)} of {pool.name} is not replaced before termination: {reasons}",
                revision=revision,
                inputs={"pool": pool.name, "planned": pool.planned},
                outcome={"nodes": pool.planned},
            )
        )
