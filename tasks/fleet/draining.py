"""Nodes leave in order: they are told to finish, waited for within a bound, and only then ended."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ebbflow.infra.aws.remote import Outcome
from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import AwsError
from ebbflow.planners.fleet.scaling.scale_in import NodeUse, may_end
from ebbflow.planners.model.capacity import Node
from ebbflow.tasks.drawing.wording import plural

LOOK = 5.0  # seconds between questions to nodes whether they are idle
IDLE = "idle"
"""Last word of the document ``drain`` of a node on which nothing runs any more."""

Say = Callable[[str], None]


class Drainer(Protocol):
    """Tells nodes to finish; ``RemoteRunner`` is one."""

    def drain(self, nodes: Sequence[str], seconds: float, *, token: str = "") -> Mapping[str, Outcome]: ...


@dataclass(frozen=True, slots=True)
class Drained:
    """How far nodes came within the time they had."""

    idle: tuple[str, ...]
    busy: tuple[str, ...]  # or not known to be idle
    untold: Mapping[str, str]  # nodes that could not be told, with the reason; of ``busy``


def drain(drainer: Drainer, nodes: Sequence[Node], seconds: float, clock: Clock, say: Say) -> Drained:
    """Tell ``nodes`` to take no new work and be done within ``seconds``; return once they are idle or that is over.

    A node that cannot be told, or whose answer says nothing, counts as busy until the time is over. ``say`` hears of
    every change.
    """
    ids = [node.id for node in nodes]
    end = clock.now() + seconds
    idle: set[str] = set()
    untold: dict[str, str] = {}
    asked = False
    while True:
        waiting = [name for name in ids if name not in idle and name not in untold]
        left = max(0.0, end - clock.now())
        if not waiting or (asked and left <= 0):
            break
        try:
            answers = drainer.drain(waiting, left)
        except AwsError as error:
            untold |= dict.fromkeys(waiting, str(error))
            break
        if not asked:
            say(f"{plural(len(waiting), 'node')} draining, {left:.0f} s to finish")
        asked = True
        untold |= {
            name: str(found) for name, found in answers.items() if found.status in ("failed", "absent")
        }
        idle |= _idle(answers, nodes)
        left = max(0.0, end - clock.now())
        say(f"{len(idle)} of {len(ids)} idle" + (f", {left:.0f} s left" if len(idle) < len(ids) else ""))
        if len(idle) + len(untold) < len(ids):
            clock.sleep(min(LOOK, left))
    for name, why in untold.items():
        say(f"{name} was not drained ({why})")
    busy = tuple(name for name in ids if name not in idle)
    return Drained(tuple(name for name in ids if name in idle), busy, untold)


def _idle(answers: Mapping[str, Outcome], nodes: Sequence[Node]) -> set[str]:
    """Return which nodes may be ended now; one that is gone may."""
    uses = {}
    for name, outcome in answers.items():
        words = outcome.output.split()
        done = outcome.status == "gone" or (outcome.ok and words[-1:] == [IDLE])
        uses[name] = NodeUse(busy=0.0 if done else 1.0)
    return set(may_end(tuple(answers), nodes, uses))
