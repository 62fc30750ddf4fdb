"""Who is here, and who holds which executors and shards."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from ebbflow.infra.elastic.wire.messages import Address, Directory, Place
from ebbflow.planners.elastic.rebalance import Load, Move, plan_moves

Kind = Literal["executor", "shard"]
State = Literal["joining", "active", "leaving", "departing"]


def node_of(address: Address) -> str:
    """Return the name of the node that an actor is on."""
    return address.split("/")[0]


@dataclass(slots=True)
class Node:
    """One worker process with its two actors.

    A leaving node still holds something; a departing one only waits for messages that may pass through it.
    """

    name: str
    state: State = "joining"
    welcomed: set[Address] = field(default_factory=set)

    @property
    def worker(self) -> Address:
        return f"{self.name}/worker"

    @property
    def server(self) -> Address:
        return f"{self.name}/server"

    @property
    def actors(self) -> tuple[Address, Address]:
        return self.worker, self.server


class Members(dict[str, Node]):
    """The nodes of a job by name."""

    def state(self, *states: State) -> list[Node]:
        """Return the nodes in any of ``states``."""
        return [node for node in self.values() if node.state in states]

    def workers(self) -> list[Address]:
        """Return the workers that hold something."""
        return [node.worker for node in self.state("active", "leaving")]

    def servers(self) -> list[Address]:
        """Return the servers that hold something."""
        return [node.server for node in self.state("active", "leaving")]

    def actors(self) -> list[Address]:
        """Return all workers and servers."""
        return [address for node in self.values() for address in node.actors]


class PlacementTable:
    """Which node has which executor, which server which shard, and how large they are."""

    def __init__(self, executors: int, shards: int) -> None:
        self.owner: dict[int, str] = dict.fromkeys(range(executors), "")
        self.places: Directory = {shard: Place("", 0) for shard in range(shards)}
        self.sizes: dict[tuple[Kind, int], int] = {}  # bytes, as last seen

    def items(self, kind: Kind, node: str) -> list[int]:
        """Return what ``node`` holds."""
        return [load.item for load in self._loads(kind) if load.owner == node]

    def plan(
        self,
        kind: Kind,
        nodes: Collection[str],
        leaving: Collection[str] = (),
        only: Collection[int] | None = None,
    ) -> list[Move]:
        """Return the moves that even out ``kind`` over ``nodes``, of all items or ``only`` some."""
        return plan_moves([x for x in self._loads(kind) if only is None or x.item in only], nodes, leaving)

    def assign(self, kind: Kind, move: Move) -> None:
        """Note a move; the place of a shard gets a new number."""
        if kind == "executor":
            self.owner[move.item] = move.target
        else:
            self.places[move.item] = Place(f"{move.target}/server", self.places[move.item].moves + 1)

    def counts(self, nodes: Collection[str]) -> dict[str, tuple[int, int]]:
        """Return the number of executors and shards of each node."""
        return {n: (len(self.items("executor", n)), len(self.items("shard", n))) for n in sorted(nodes)}

    def _loads(self, kind: Kind) -> list[Load]:
        owners = self.owner if kind == "executor" else {q: node_of(p.server) for q, p in self.places.items()}
        return [Load(item, owner, self.sizes.get((kind, item), 0)) for item, owner in sorted(owners.items())]
