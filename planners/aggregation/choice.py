"""Where a training's gradients are to meet: in an all-reduce, or at aggregators, by what a preflight run measured."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from ebbflow.planners.errors import OptionError

_DETECTION_S = 0.5  # seconds in which those that are left over aggregators notice a loss
_REGROUP_S = 2.0  # seconds in which those that all-reduce in place form a new group
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class SyncCosts:
    """What is known of a training before gradients meet anywhere for long.

    Args:
        parameter_bytes: of all parameters, as float32.
        sum_s: seconds in which an aggregator adds one gradient of all parameters.
        update_s: seconds in which it updates all parameters.
        step_s: seconds of a step with all-reduce, synchronization included.
        sync_s: seconds of it that gradients took.
        measured_world: processes with which the last two were measured.
        world: processes of the training.
        nodes: that they are on.
        interruption_rate: losses expected per node and hour.
        restart_s: seconds from a loss to the next step where all processes start again.
        in_place: whether those that are left after a loss all-reduce on without a restart.
        aggregators: processes of the service.
        mirrors: further aggregators that hold each tensor.
        obstacle: why aggregators cannot train it; empty where they can.

    Raises ``OptionError`` for a number that is negative or not finite, or a count below 1.
    """

    parameter_bytes: int
    sum_s: float
    update_s: float
    step_s: float
    sync_s: float
    measured_world: int
    world: int
    nodes: int
    interruption_rate: float
    restart_s: float
    in_place: bool = False
    aggregators: int = 1
    mirrors: int = 0
    obstacle: str = ""

    def __post_init__(self) -> None:
        for name in ("sum_s", "update_s", "step_s", "sync_s", "interruption_rate", "restart_s"):
            value = getattr(self, name)
            if not isfinite(value) or value < 0:
                raise OptionError(f"{name} must be finite and at least 0, not {value}")
        for name in ("parameter_bytes", "measured_world", "world", "nodes", "aggregators"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class SyncDecision:
    """Where gradients meet, and why.

    Args:
        sync: the choice.
        reason: a sentence with the costs that it rests on.
        allreduce_s: seconds of a step with its share of losses; 0: not estimated.
        service_s: the same over aggregators.
    """

    sync: Literal["allreduce", "service"]
    reason: str
    allreduce_s: float = 0.0
    service_s: float = 0.0


def choose_sync(costs: SyncCosts) -> SyncDecision:
    """Return where gradients meet.

    A step with all-reduce moves 2 (n - 1) / n of the parameters' bytes over each link; the measured exchange gives
    the rate of a link. Over aggregators a worker sends its gradients to each copy and takes parameters from one, and
    all that passes the aggregators' links, too; sums and updates follow. Nothing of it is taken to overlap with
    backward, so aggregators win only where they win without that. A loss costs the step in flight and a recovery.
    Equal costs are an all-reduce.

    Args:
        costs: of the training.
    """
    if costs.obstacle:
        return SyncDecision("allreduce", f"all-reduce: {costs.obstacle}")
    if costs.world < 2:
        return SyncDecision("allreduce", "all-reduce: a single process has no other to lose")
    if costs.measured_world < 2 or costs.sync_s == 0:
        return SyncDecision("allreduce", "all-reduce: no exchange between processes was measured")
    size, world, copies = costs.parameter_bytes, costs.world, costs.mirrors + 1
    link = size * 2 * (costs.measured_world - 1) / costs.measured_world / costs.sync_s  # bytes a second
    compute = max(costs.step_s - costs.sync_s, 0.0)
    reduce_step = compute + 2 * (world - 1) / world * size / link
    worker = (copies + 1) * size / link
    servers = world * (copies + 1) * size / link / costs.aggregators
    work = copies * (world * costs.sum_s + costs.update_s) / costs.aggregators
    service_step = compute + max(worker, servers) + work
    losses = costs.interruption_rate * costs.nodes / _HOUR  # a second
    recovery = _REGROUP_S if costs.in_place else costs.restart_s
    reduce_s = reduce_step * (1 + losses * (recovery + reduce_step))
    service_s = service_step * (1 + losses * (_DETECTION_S + service_step))
    words = (
        f"a step takes {reduce_s:.3g} s in an all-reduce and {service_s:.3g} s over aggregators, with"
        f" {costs.interruption_rate:g} losses an hour on each of {costs.nodes} nodes at"
        f" {recovery + reduce_step:.3g} s and {_DETECTION_S + service_step:.3g} s each"
        f" ({size / 1e6:.3g} MB, {world} processes, {link / 1e6:.3g} MB/s a link, {work * 1e3:.3g} ms of sums and"
        " updates)"
    )
    if service_s < reduce_s:
        return SyncDecision("service", f"aggregators: {words}", reduce_s, service_s)
    return SyncDecision("allreduce", f"all-reduce: {words}", reduce_s, service_s)
