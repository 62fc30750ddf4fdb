"""Which nodes leave when a pool shrinks: drained first, ended after, and never the last copy of anything."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.fleet import PoolState, Target


@dataclass(frozen=True, slots=True)
class NodeUse:
    """What a node does and holds. A node of which nothing is known counts as idle and empty."""

    busy: float = 0.0  # seconds of running work that would be lost or waited for
    work: float = 0.0  # done an hour, in any unit that is the same for all nodes; 0: not known
    holds: frozenset[str] = frozenset()  # names of outputs, checkpoints or shards of which it has a copy


@dataclass(frozen=True, slots=True)
class ScaleInPlan:
    """The nodes that are to be drained, the first to go first, and why others were left out."""

    drain: tuple[str, ...]
    kept: Mapping[str, str]  # node -> the rule that kept it
    anyway: int = 0  # of the count, kept ones that an interruption takes nonetheless


def leaving(
    nodes: Sequence[Node],
    count: int,
    uses: Mapping[str, NodeUse],
    *,
    notices: Collection[Notice] = (),
    draining: Collection[str] = (),
    elsewhere: Collection[str] = (),
    on_demand: int = 0,
) -> ScaleInPlan:
    """Return up to ``count`` of ``nodes`` that are to leave, by these rules in their order.

    Those that leave anyway (an interruption notice, ``draining`` already, a rebalance advice), idle ones, the most
    expensive per work, the id. A node that holds something of which no other node that stays has a copy is kept,
    unless storage (``elsewhere``) has it; so are on-demand nodes of the first ``on_demand``. Fewer than ``count`` may
    be found.

    Raises ``OptionError`` for a negative count.
    """
    if count < 0 or on_demand < 0:
        raise OptionError(f"count and on_demand must be >= 0; got {count}, {on_demand}")
    reasons = _leave_reasons(notices, draining)
    safe = frozenset(elsewhere)
    copies: dict[str, int] = {}
    for node in nodes:
        if reasons.get(node.id) != "interruption":  # its copies go with it
            for name in uses.get(node.id, NodeUse()).holds:
                copies[name] = copies.get(name, 0) + 1
    base = sum(node.market == "on-demand" for node in nodes)
    chosen: list[str] = []
    kept: dict[str, str] = {}
    anyway = 0
    for node in sorted(nodes, key=lambda node: _order(node, uses, reasons)):
        if len(chosen) + anyway == count:
            break
        use = uses.get(node.id, NodeUse())
        if node.market == "on-demand" and base <= on_demand:
            kept[node.id] = f"one of the {on_demand} on-demand nodes that stay"
            continue
        # a node with a firm notice counts for nobody, so what only it holds has no other copy that stays
        firm = reasons.get(node.id) == "interruption"
        last = sorted(name for name in use.holds - safe if copies.get(name, 0) <= (0 if firm else 1))
        if last:
            more = f" and of {len(last) - 1} more" if len(last) > 1 else ""
            kept[node.id] = f"it holds the last copy of {last[0]}{more}"
            anyway += firm
            continue
        chosen.append(node.id)
        base -= node.market == "on-demand"
        if not firm:
            for name in use.holds:
                copies[name] -= 1
    return ScaleInPlan(tuple(chosen), kept, anyway)


def with_drains(
    target: Target,
    pool: PoolState,
    uses: Mapping[str, NodeUse],
    *,
    notices: Collection[Notice] = (),
    elsewhere: Collection[str] = (),
) -> Target:
    """Return ``target`` with the nodes to drain; it stays larger where not so many may leave.

    Raises ``OptionError`` for a target of another pool.
    """
    if target.pool != pool.name:
        raise OptionError(f"the target is of pool {target.pool}; the nodes are of pool {pool.name}")
    surplus = len(pool.nodes) - target.nodes
    if surplus <= 0:
        return target
    found = leaving(
        pool.nodes,
        surplus,
        uses,
        notices=notices,
        draining=pool.draining,
        elsewhere=elsewhere,
        on_demand=target.on_demand,
    )
    reason = target.reason
    short = surplus - len(found.drain) - found.anyway
    if found.kept:
        node, rule = next(iter(found.kept.items()))
        reason += f"; {node} is not drained: {rule}"
        if len(found.kept) > 1:
            reason += f", nor are {len(found.kept) - 1} more"
    return replace(target, nodes=target.nodes + short, drain=found.drain, reason=reason)


def may_end(
    draining: Collection[str],
    nodes: Sequence[Node],
    uses: Mapping[str, NodeUse],
    elsewhere: Collection[str] = (),
) -> tuple[str, ...]:
    """Return which of ``draining`` may be ended now, sorted: idle, and all that they hold is on nodes that stay.

    ``elsewhere`` is what storage holds. A draining node that is no longer there may be ended too: there is nothing
    to lose.
    """
    leaves = set(draining)
    safe = set(elsewhere)
    for node in nodes:
        if node.id not in leaves:
            safe |= uses.get(node.id, NodeUse()).holds
    done = (id_ for id_ in leaves if (use := uses.get(id_, NodeUse())).busy <= 0 and use.holds <= safe)
    return tuple(sorted(done))


def _leave_reasons(notices: Collection[Notice], draining: Collection[str]) -> dict[str, str]:
    """Return what is known of each node's leaving, the firmest."""
    reasons = {notice.node_id: "rebalance" for notice in notices}
    reasons.update(dict.fromkeys(draining, "draining"))
    reasons.update({notice.node_id: "interruption" for notice in notices if notice.kind == "interruption"})
    return reasons


def _order(
    node: Node, uses: Mapping[str, NodeUse], reasons: Mapping[str, str]
) -> tuple[int, bool, float, float, str]:
    use = uses.get(node.id, NodeUse())
    anyway = ("interruption", "draining", "rebalance", "").index(reasons.get(node.id, ""))
    per_work = node.price / use.work if use.work > 0 else node.price
    return anyway, use.busy > 0, -per_work, use.busy, node.id
