"""When to save a checkpoint, and when to restart with more nodes.

The interval between checkpoints balances the time they take against the work that a loss destroys: Young, "A first
order approximation to the optimum checkpoint interval", CACM 1974; Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", FGCS 2006, equation 37. What destroys work is the loss of state, which is not
each loss of a node: see ``state_losses``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, inf, log1p, sqrt

from ebbflow.planners.errors import OptionError
from ebbflow.planners.hazard import PRIOR_LOSSES, PRIOR_NODE_HOURS, hazard
from ebbflow.planners.model.recovery import RecoveryInput

UNKNOWN_HAZARD_EVERY = 600.0  # seconds between checkpoints where no loss was ever seen
LEAST_EVERY = 5.0  # seconds
STALL_SHARE = 0.01  # of the time, at most, that training may wait for checkpoints
WRITE_SHARE = 0.5  # of the time, at most, that a checkpoint is being written
COMMON_CAUSE = 0.1  # of a node's losses: those that take all nodes
WHOLE_RUN = 1 / 86400  # losses per second of all processes that have nothing to do with nodes


def young_interval(checkpoint: float, between_losses: float) -> float:
    """Return √(2·C·M): seconds of work between checkpoints of ``checkpoint`` s, a loss every ``between_losses`` s."""
    _check(checkpoint, between_losses)
    return sqrt(2 * checkpoint * between_losses)


def daly_interval(checkpoint: float, between_losses: float) -> float:
    """Return the seconds of work between checkpoints, accurate also where losses are as close as checkpoints.

    With C the time of a checkpoint and M that between losses:
    √(2CM)·(1 + √(C/2M)/3 + (C/2M)/9) − C for C < 2M, else M. A free checkpoint gives 0.
    """
    _check(checkpoint, between_losses)
    if between_losses == inf:
        return inf if checkpoint else 0.0
    if checkpoint >= 2 * between_losses:
        return between_losses
    ratio = checkpoint / (2 * between_losses)
    return sqrt(2 * checkpoint * between_losses) * (1 + sqrt(ratio) / 3 + ratio / 9) - checkpoint


def save_interval(stall: float, write: float, rate: float) -> float:
    """Return the seconds between checkpoints that are written in the background.

    Daly's interval for the time that training waits, but not so often that it waits for more than ``STALL_SHARE`` of
    the time, or that writing takes more than ``WRITE_SHARE`` of it.

    Args:
        stall: seconds that training waits for one.
        write: seconds until one is durable.
        rate: losses of state per second; 0: none was ever seen.
    """
    wanted = daly_interval(stall, 1 / rate) if rate > 0 else UNKNOWN_HAZARD_EVERY
    least = max(LEAST_EVERY, stall / STALL_SHARE, write / WRITE_SHARE)
    return max(least, wanted) if wanted < inf else UNKNOWN_HAZARD_EVERY


@dataclass(frozen=True, slots=True)
class StateLosses:
    """How often a run is expected to lose state that only its processes have."""

    rate: float  # per second
    counted: str  # what counts as such a loss, in words


def state_losses(
    node_rate: float,
    nodes: int,
    replicas: int,
    window: float,
    common: float = COMMON_CAUSE,
    whole_run: float = WHOLE_RUN,
) -> StateLosses:
    """Return how often state is lost, each part of which ``replicas`` nodes have.

    With one, each lost node is a loss of state: N·λ. With R, in S = N/R parts, survivors save what they have, or
    train on. State is lost where the other R - 1 nodes with some part are lost within the window w after the first,
    S·R·(1-β)λ·(1 - exp(-(1-β)λw))^(R-1), with all nodes by one cause, βλ, and with the whole run, ω. It is never
    more than N·λ. Fewer replicas after a loss are another R: their rate holds from then on.

    β is the beta factor of common-cause failures (Fleming 1975; IEC 61508-6, annex D, has 0.5 to 10 %): reclaimed
    capacity, a zone's outage. In the public spot trace of 24 nodes that the benchmarks replay, 17 of 48 moments of
    loss took several nodes, a third of them at most. ω is a floor for what ends all processes: an error of the
    script, the launcher's machine, an operator. Meta counted 54 interruptions by software in 54 days ("The Llama 3
    herd of models", 2024, table 5), on far more GPUs than most runs have.

    Args:
        node_rate: λ, losses per second of a node.
        nodes: N, that the run has.
        replicas: R, nodes that have each part of the state.
        window: w, seconds from a loss until survivors have noticed it and saved, or are consistent again.
        common: β, share of a node's losses that take all nodes.
        whole_run: ω, losses per second of the whole run.

    Raises ``OptionError``.
    """
    for name, value, least in (
        ("node_rate", node_rate, 0),
        ("window", window, 0),
        ("whole_run", whole_run, 0),
    ):
        if not least <= value < inf:
            raise OptionError(f"{name} must be >= 0 and finite; got {value}")
    if not 0 <= common <= 1:
        raise OptionError(f"common must be between 0 and 1; got {common}")
    if not 1 <= replicas <= nodes:
        raise OptionError(f"replicas must be between 1 and the nodes, {nodes}; got {replicas}")
    each = nodes * node_rate
    if replicas == 1:
        return StateLosses(each, "each lost node loses state")
    alone = (1 - common) * node_rate
    together = nodes * alone * (-expm1(-alone * window)) ** (replicas - 1)
    rate = together + common * node_rate + whole_run
    if rate >= each:
        return StateLosses(each, "each lost node is counted: the floor for whole runs is above that")
    return StateLosses(rate, f"only the loss of all {replicas} nodes that have a part of it loses state")


def _check(checkpoint: float, between_losses: float) -> None:
    if not checkpoint >= 0:
        raise OptionError(f"checkpoint must be >= 0 s; got {checkpoint}")
    if not between_losses > 0:
        raise OptionError(f"between_losses must be > 0 s; got {between_losses}")


def chance_of_loss(
    gaps: Sequence[float], age: float, start: float, end: float, rate: float, weight: float = 1.0
) -> float:
    """Return the chance of a loss between ``start`` and ``end`` s from now, ``age`` s after the last one.

    A life table over the ``gaps`` seen between losses, smoothed by a memoryless ``rate`` per second that counts like
    ``weight`` gaps: where losses come at regular times this says when, where they don't it is close to the rate.
    """
    reached = sum(gap >= age + start for gap in gaps)
    ended = sum(age + start <= gap < age + end for gap in gaps)
    return (weight * -expm1(-rate * (end - start)) + ended) / (weight + reached)


@dataclass(frozen=True, slots=True)
class HazardAware:
    """Saves as often as the observed hazard asks for, and just before a loss that is expected; grows when it pays.

    ``prior_losses`` in ``prior_node_hours`` is what is believed of a pool before anything was seen of it.
    """

    prior_losses: float = PRIOR_LOSSES
    prior_node_hours: float = PRIOR_NODE_HOURS
    name: str = "hazard-aware"

    def rate(self, seen: RecoveryInput) -> float:
        """Return the expected losses per second of the whole job. Nodes lost at once count once."""
        per_node = hazard(len(seen.gaps), seen.node_seconds, self.prior_losses, self.prior_node_hours)
        return per_node * max(seen.nodes, 1) / 3600

    def save(self, seen: RecoveryInput) -> bool:
        """Save when Daly's interval is reached, or when it would be too late after one more step."""
        if seen.unsaved <= 0:
            return False
        end, late = seen.checkpoint, seen.checkpoint + seen.step
        if seen.now + late >= seen.notice:
            return seen.now + end < seen.notice
        rate = self.rate(seen)
        chance = chance_of_loss(seen.gaps, seen.age, end, late, rate)
        # If the loss comes, the time that saving takes would have been lost too.
        if chance * seen.unsaved > (1 - chance) * seen.checkpoint:
            return True
        window = daly_interval(seen.checkpoint, 1 / rate) if rate > 0 else inf
        if window < inf:
            chance = min(chance_of_loss(seen.gaps, seen.age, 0.0, window, rate), 1 - 1e-9)
            window = daly_interval(seen.checkpoint, window / -log1p(-chance))
        # Steps are whole: half a step early is as good as half a step late.
        return seen.unsaved + seen.step / 2 >= window

    def grow(self, seen: RecoveryInput) -> bool:
        """Grow when the faster steps until the next loss outweigh saving and restarting.

        The next loss restarts everything anyway and takes the spare nodes in. While nodes are being set up, wait for
        them: one restart serves them all.
        """
        if not seen.spare or seen.joining or seen.notice < inf:
            return False
        cost = seen.restart + (seen.checkpoint if seen.unsaved > 0 else 0.0)
        rate = self.rate(seen)
        left = 1 / rate if rate > 0 else inf
        slow, fast = seen.speed(seen.nodes), seen.speed(seen.nodes + seen.spare)
        return fast > slow and (fast - slow) * max(left - cost, 0.0) > slow * cost
