"""Moves of executors and shards while the job runs.

How nodes come in and go out.
"""

from ebbflow.infra.elastic.master.job_state import JobState
from ebbflow.infra.elastic.master.placement import Kind, Node
from ebbflow.infra.elastic.wire.messages import (
    Address,
    AwaitFarewells,
    Depart,
    Exit,
    MoveAck,
    MoveExecutor,
    MoveShard,
    Welcome,
)


class Membership:
    """Greets nodes that join, and lets those go that hold nothing any more."""

    def __init__(self, job_state: JobState) -> None:
        self._job_state = job_state

    def welcome_joined(self) -> None:
        """Greet those who have joined; again, if their answer was of an older revision or their places are gone."""
        job_state = self._job_state
        for node in job_state.nodes.state("joining"):
            node.welcomed.clear()
            settings = {"flush_every": job_state.settings.flush_every}
            job_state.broadcast(
                node.actors, Welcome(job_state.application, dict(job_state.held.places), settings)
            )

    def answered(self, node: Node, sender: Address) -> bool:
        """Note who has answered a greeting; return whether the node is thereby active."""
        node.welcomed.add(sender)
        if node.state != "joining" or len(node.welcomed) < 2:
            return False
        node.state = "active"
        self._job_state.log("joined", node=node.name)
        return True

    def dismiss(self, node: Node) -> None:
        """Let a node end."""
        self._job_state.broadcast(node.actors, Exit())
        del self._job_state.nodes[node.name]
        self._job_state.log("left", node=node.name)

    def depart_empty(self) -> None:
        """Start the departure of leaving nodes that hold nothing."""
        job_state = self._job_state
        for node in job_state.nodes.state("leaving"):
            if job_state.holds()[node.name] == (0, 0):
                node.state = "departing"
                self.expect_farewells()
                depart = Depart(node.server, dict(job_state.held.places))
                job_state.broadcast(sorted(self._all_but(node)), depart)

    def expect_farewells(self) -> None:
        """Notify departing servers, which no actor may need any more, who has to confirm that.

        Nodes that were dismissed before have confirmed it; those that were lost while joining had nothing to send.
        """
        for node in self._job_state.nodes.state("departing"):
            self._job_state.send(node.server, AwaitFarewells(self._all_but(node)))

    def _all_but(self, node: Node) -> frozenset[Address]:
        return frozenset(self._job_state.nodes.actors()) - {node.server}


class Rebalancer:
    """Evens out what the members hold. ``wanted`` says that they have changed since it was last looked at."""

    def __init__(self, job_state: JobState, membership: Membership) -> None:
        self._job_state, self._membership = job_state, membership
        self.wanted = False
        self.under_way: set[tuple[Kind, int]] = set()
        self._bytes = 0
        self._since = 0.0

    def forget(self) -> None:
        """Drop the moves under way: their revision is over."""
        self.under_way = set()

    def start(self) -> None:
        """Start the moves that the present members ask for, unless some are under way already."""
        job_state = self._job_state
        if job_state.phase != "running" or self.under_way:
            return
        members = [node.name for node in job_state.nodes.state("active", "leaving")]
        leaving = [node.name for node in job_state.nodes.state("leaving")]
        if self.wanted and len(members) > len(leaving):
            self.wanted = False
            job_state.send_tasks()  # what is on its way to an executor must reach it before the order to move
            self._since, self._bytes = job_state.now(), 0
            self._move_executors(members, leaving)
            self._move_shards(members, leaving)
        if not self.under_way:
            self._ended()

    def arrived(self, _: Address, message: MoveAck) -> None:
        """Note an arrival; after the last one, continue."""
        kind: Kind = "executor" if message.kind == "executor" else "shard"
        self.under_way.discard((kind, message.item))
        self._job_state.held.sizes[kind, message.item] = message.size
        self._bytes += message.size
        if not self.under_way:
            job_state = self._job_state
            job_state.log(
                "rebalanced",
                seconds=job_state.now() - self._since,
                bytes=self._bytes,
                holds=job_state.holds(),
            )
            self._ended()

    def _move_executors(self, members: list[str], leaving: list[str]) -> None:
        job_state, mode = self._job_state, self._job_state.settings.input_transfer
        for move in job_state.held.plan("executor", members, leaving):
            job_state.held.assign("executor", move)
            self.under_way.add(("executor", move.item))
            with_input = mode == "send" or (mode == "auto" and move.source not in leaving)
            order = MoveExecutor(move.item, job_state.nodes[move.target].worker, with_input)
            job_state.send(job_state.nodes[move.source].worker, order)

    def _move_shards(self, members: list[str], leaving: list[str]) -> None:
        job_state = self._job_state
        for move in job_state.held.plan("shard", members, leaving):
            job_state.held.assign("shard", move)
            self.under_way.add(("shard", move.item))
            order = MoveShard(move.item, job_state.held.places[move.item])
            job_state.send(job_state.nodes[move.source].server, order)

    def _ended(self) -> None:
        """Continue with moves that were asked for meanwhile; let nodes go that hold nothing any more."""
        if self.wanted and self._job_state.nodes.state("active"):
            self.start()
        if not self.under_way:
            self._membership.depart_empty()
