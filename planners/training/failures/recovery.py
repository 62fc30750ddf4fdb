"""The rule by which a training that has lost workers either continues with the others or begins a new generation."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """What is known when workers of a generation are lost.

    Args:
        service: whether gradients meet at aggregators.
        replicas: whether they are all-reduced in a process group that can be made anew for those that are left.
        obstacle: why it cannot, of what the script asks for; empty where it can.
        formed: whether all workers of the generation had met.
        left: slots of the generation that remain.
        minimum: slots that the training needs.
        stopping: whether the generation is to end anyway.
        script_failed: whether a worker left with an error of the script's own, which the others would meet, too.
    """

    service: bool
    formed: bool
    left: int
    minimum: int
    stopping: bool = False
    script_failed: bool = False
    replicas: bool = False
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a training recovers: in place, or by a new generation from what the survivors save."""

    in_place: bool
    reason: str


def recovery_of(loss: WorkerLoss) -> Recovery:
    """Return how a loss of workers is recovered from."""
    if not (loss.service or loss.replicas):
        return Recovery(False, "an all-reduce needs all of its processes")
    if loss.obstacle:
        return Recovery(False, loss.obstacle)
    if loss.stopping:
        return Recovery(False, "the generation was to end")
    if not loss.formed:
        return Recovery(False, "the workers had not met yet")
    if loss.script_failed:
        return Recovery(False, "the script itself failed")
    if loss.left < loss.minimum:
        return Recovery(False, f"{loss.left} slots are left, {loss.minimum} are needed")
    return Recovery(True, f"{loss.left} slots continue")
