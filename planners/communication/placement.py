"""How long an iteration would take on other processes and links than it was recorded on.

What a recorded training says of placements: its collectives among ``n`` processes over the slowest link of a path,
costed by latency and bandwidth, in the order in which DDP sends them (K. Mahajan, PhD thesis, 2021, sections 4.4.2
and 5.1.3).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Self

from ebbflow.planners.communication.costs import Choice, LinkModel, option_of
from ebbflow.planners.communication.dag import TrainingDag
from ebbflow.planners.communication.measured import MeasuredLinks, fit_links
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.communication.schedule import fifo, schedule
from ebbflow.planners.errors import OptionError

MAX_BYTES = 64 * 1024
"""Of a profile as text: it is a part of each report of its app."""
EXACT = 16
"""Processes up to which each number has a prediction of its own; beyond, each power of two has."""


@dataclass(frozen=True, slots=True)
class CommunicationProfile:
    """What a training tells the scheduler of its communication. Raises ``OptionError`` if it is none.

    Args:
        recorded: one iteration, as it ran without a plan.
        nodes: that its processes ran on.
        links: that fit its all-reduces among them; ``None``: not measured.
    """

    recorded: RecordedTraining
    nodes: int = 1
    links: LinkModel | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.recorded.ranks:
            raise OptionError(
                f"a profile of {self.recorded.ranks} processes must be of 1 to as many nodes; got {self.nodes}"
            )

    def seconds(self, ranks: int, links: LinkModel) -> float:
        """Return the predicted seconds of an iteration among ``ranks`` processes on ``links``, without a plan.

        Each process computes and sends what it did when it was recorded. Raises ``OptionError`` for collectives
        without a formula.
        """
        if ranks > EXACT:
            ranks = 1 << (ranks - 1).bit_length()
        return _seconds(self.recorded.dag, max(ranks, 1), links)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON carries."""
        return {
            "training": json.loads(self.recorded.to_json()),
            "nodes": self.nodes,
            "links": None if self.links is None else asdict(self.links),
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the profile that ``to_dict`` gave. Raises ``OptionError`` for what is none."""
        if not isinstance(data, Mapping):
            raise OptionError(f"a communication profile must be a table; got {data!r:.60}")
        try:
            links = data["links"]
            return cls(
                RecordedTraining.from_json(json.dumps(data["training"])),
                int(data["nodes"]),
                None if links is None else LinkModel(**{str(k): float(v) for k, v in links.items()}),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OptionError(f"not a communication profile: {error!r:.200}") from error


def profile_of(recorded: RecordedTraining, nodes: int, links: MeasuredLinks | None) -> CommunicationProfile:
    """Return the profile of a training from what it recorded and measured.

    Args:
        recorded: the training.
        nodes: that its processes ran on.
        links: what a sweep found on its channels, from which latency and bandwidth are fitted where it has two sizes
            or more of an all-reduce as the library does it.

    Raises ``OptionError`` for links of another gang, and for a training with so many collectives that reports cannot
    carry them.
    """
    fitted = None
    if links is not None:
        if links.ranks != recorded.ranks:
            raise OptionError(
                f"the links were measured among {links.ranks} ranks, the training has {recorded.ranks}"
            )
        points = [
            point
            for point in links.table.rows.get(("all-reduce", links.ranks, Choice().name), ())
            if point[1] > 0
        ]
        if links.ranks > 1 and len({size for size, _ in points}) > 1:
            fitted = fit_links(links.ranks, points)
    found = CommunicationProfile(recorded, nodes, fitted)
    size = len(json.dumps(found.to_dict()))
    if size > MAX_BYTES:
        raise OptionError(f"a communication profile must be {MAX_BYTES} bytes at most; it has {size}")
    return found


@lru_cache(maxsize=4096)
def _seconds(dag: TrainingDag, ranks: int, links: LinkModel) -> float:
    comm = tuple(replace(op, ranks=ranks) for op in dag.comm)
    plan = {op.name: option_of(op, Choice(), links) for op in comm}
    return schedule(replace(dag, comm=comm), plan, fifo).period
