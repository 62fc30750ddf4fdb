"""Moves of executors and shards while the job runs.

How nodes come in and go out.
"""

from ebbflow.infra.elastic.master.job_state import JobState
from ebbflow.infra.elastic.master.placement import Kind, Node
from ebbflow.infra.elastic.wire.messages import (
    Address,
    Arrived,
    AwaitFarewells,
    Depart,
    Exit,
    MoveExecutor,
    MoveShard,
    Welcome,
)


class Membership:
    """Greets nodes that join, and lets those go that hold nothing any more."""

    def __init__(self, board: JobState) -> None:
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


class Moves:
    """Evens out what the members hold. ``wanted`` says that they have changed since it was last looked at."""

    def __init__(self, board: JobState, membership: Membership) -> None:
        self._board, self._membership = board, membership
        self.wanted = False
        self.under_way: set[tuple[Kind, int]] = set()
        self._bytes = 0
        self._since = 0.0

    def forget(self) -> None:
        """Drop the moves under way: their epoch is over."""
        self.under_way = set()

    def start(self) -> None:
        """Start the moves that the present members ask for, unless some are under way already."""
        board = self._board
        if board.phase != "running" or self.under_way:
            return
        members = [node.name for node in board.nodes.state("active", "leaving")]
        leaving = [node.name for node in board.nodes.state("leaving")]
        if self.wanted and len(members) > len(leaving):
            self.wanted = False
            board.send_tasks()  # what is on its way to an executor must reach it before the order to move
            self._since, self._bytes = board.now(), 0
            self._move_executors(members, leaving)
            self._move_shards(members, leaving)
        if not self.under_way:
            self._ended()

    def arrived(self, _: Address, message: Arrived) -> None:
        """Note an arrival; after the last one, go on."""
        kind: Kind = "executor" if message.kind == "executor" else "shard"
        self.under_way.discard((kind, message.item))
        self._board.held.sizes[kind, message.item] = message.size
        self._bytes += message.size
        if not self.under_way:
            board = self._board
            board.log("rebalanced", seconds=board.now() - self._since, bytes=self._bytes, holds=board.holds())
            self._ended()

    def _move_executors(self, members: list[str], leaving: list[str]) -> None:
        board, mode = self._board, self._board.settings.input_transfer
        for move in board.held.plan("executor", members, leaving):
            board.held.assign("executor", move)
            self.under_way.add(("executor", move.item))
            with_input = mode == "send" or (mode == "auto" and move.source not in leaving)
            order = MoveExecutor(move.item, board.nodes[move.target].worker, with_input)
            board.send(board.nodes[move.source].worker, order)

    def _move_shards(self, members: list[str], leaving: list[str]) -> None:
        board = self._board
        for move in board.held.plan("shard", members, leaving):
            board.held.assign("shard", move)
            self.under_way.add(("shard", move.item))
            order = MoveShard(move.item, board.held.places[move.item])
            board.send(board.nodes[move.source].server, order)

    def _ended(self) -> None:
        """Go on with moves that were asked for meanwhile; let nodes go that hold nothing any more."""
        if self.wanted and self._board.nodes.state("active"):
            self.start()
        if not self.under_way:
            self._membership.see_off()
