"""Workers that come and go, as a launcher sees them, without processes."""

from collections.abc import Callable
from typing import Any

from ebbflow.infra.training.channel.meeting import Meeting
from ebbflow.infra.training.channel.wire import Heartbeat, RankState
from ebbflow.infra.training.launcher.service import Workforce


class Channel:
    """The launcher's channel to workers that are told at once."""

    listened = 0.0  # seconds

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def open(self, number: int, ranks: object, port: int, meeting: Meeting) -> "Channel":
        return Channel(meeting)

    def extend(self, node: str, ranks: range) -> None: ...

    def public_of(self, node: str) -> str:
        return f"public-{node}"

    def meet(self, act: Callable[[Meeting], None]) -> None:
        act(self._meeting)


class Aggregators:
    """Aggregators that admit whoever comes and are there to stay."""

    def admit(self, job_id: str, peers: object) -> None: ...

    def ended(self) -> list[str]:
        return []


def make_workforce(*nodes: str, number: int = 1, service: bool = False) -> Workforce:
    """Return nodes with a worker each, which have begun, and all-reduce gradients or train over a ``service``."""
    exchange: Any = Channel(Meeting.__new__(Meeting))
    aggregators: Any = Aggregators() if service else None
    made = Workforce(aggregators, exchange, number, silence=10.0)
    ranks = {name: range(place, place + 1) for place, name in enumerate(nodes)}
    made.open(ranks, ranks, 0)
    for own in ranks.values():
        made.meeting.membership.enter(own.start)
    made.begun = True
    return made


def shown(state: str, rank: int, number: int = 1) -> Heartbeat:
    """Return a sign of life of a node, by which its worker is in this state of the kernel's."""
    return Heartbeat(1, number, (RankState(rank, 100, state, 1.0, 0.0),))
