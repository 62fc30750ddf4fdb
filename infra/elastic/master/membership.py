"""How nodes come in and go out."""

from ebbflow.infra.elastic.master.job_state import Board
from ebbflow.infra.elastic.master.placement import Node
from ebbflow.infra.elastic.wire.messages import Address, AwaitFarewells, Depart, Exit, Welcome


class Membership:
    """Greets nodes that join, and lets those go that hold nothing any more."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def greet(self) -> None:
        """Greet those who have joined; again, if their answer was of an older epoch or their places are no more."""
        board = self._board
        for node in board.nodes.state("joining"):
            node.greeted.clear()
            settings = {"flush_every": board.settings.flush_every}
            board.tell(node.actors, Welcome(board.application, dict(board.held.places), settings))

    def answered(self, node: Node, sender: Address) -> bool:
        """Note who has answered a greeting; tell whether the node is thereby active."""
        node.greeted.add(sender)
        if node.state != "joining" or len(node.greeted) < 2:
            return False
        node.state = "active"
        self._board.log("joined", node=node.name)
        return True

    def dismiss(self, node: Node) -> None:
        """Let a node end."""
        self._board.tell(node.actors, Exit())
        del self._board.nodes[node.name]
        self._board.log("left", node=node.name)

    def see_off(self) -> None:
        """Have leaving nodes depart that hold nothing any more."""
        board = self._board
        for node in board.nodes.state("leaving"):
            if board.holds()[node.name] == (0, 0):
                node.state = "departing"
                self.expect_farewells()
                depart = Depart(node.server, dict(board.held.places))
                board.tell(sorted(self._all_but(node)), depart)

    def expect_farewells(self) -> None:
        """Tell departing servers, which nobody may need any more, who has to confirm that.

        Nodes that were dismissed before have confirmed it; those that were lost while joining had nothing to send.
        """
        for node in self._board.nodes.state("departing"):
            self._board.send(node.server, AwaitFarewells(self._all_but(node)))

    def _all_but(self, node: Node) -> frozenset[Address]:
        return frozenset(self._board.nodes.actors()) - {node.server}
