"""What may happen to the nodes of a local fleet, and what people may do to them."""

from ebbflow.infra.local_fleet.handle import POLL, Handle
from ebbflow.infra.local_fleet.provider.life import finish
from ebbflow.infra.local_fleet.state import changes
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState
from ebbflow.infra.local_fleet.view import known
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice, NoticeKind

_HELD = 5.0  # s for processes to stand still, which those in the midst of a system call do a moment later


class FaultInjector(Handle):
    """Notices, losses and machines that hang; more nodes and fewer by hand."""

    def notice(self, id_: str, seconds: float = 120.0, kind: NoticeKind = "interruption") -> float:
        """Give a node notice; an interrupted one is ended ``seconds`` from now, a rebalance advice is only said.

        What runs there is told at once. A later notice moves the deadline. Returns it, Unix time in s. Raises
        ``OptionError``, or ``ClusterError`` for a node that is not there.
        """
        if not 0 <= seconds < float("inf"):
            raise OptionError(f"seconds must be >= 0 and finite; got {seconds}")
        deadline, by = self._clock.now() + seconds, self._shift()
        if kind == "rebalance":
            self.book.there(id_)
            advice = [Notice(id_, deadline, kind)]
            self._change(lambda book: changes.hear(book, advice))
            return deadline + by

        def change(book: LocalFleetState) -> LocalFleetState:
            book.there(id_)
            return book.noted(id_, deadline=deadline).short(self._clock.now())

        book = self._change(change)
        node = book.there(id_)
        self._room(node).tell(book, node, deadline)
        return deadline + by

    def kill(self, id_: str) -> None:
        """Take a node away at once: SIGKILL to every process of every app on it. It is gone when this returns.

        Its pool starts another if it is planned. Raises ``ClusterError`` for a node that is not there.
        """

        def change(book: LocalFleetState) -> LocalFleetState:
            book.there(id_)
            return book.noted(id_, fate="killed without notice")

        book = self._change(change)
        if (node := book.node(id_)) is not None:
            finish(self._file, book, node, self._rooms, self._clock)

    def pause(self, id_: str) -> None:
        """Stop (SIGSTOP) all processes of a node, as when its machine hangs. Raises ``ClusterError``."""
        self._hold(id_, True)

    def resume(self, id_: str) -> None:
        """Resume (SIGCONT) a paused node. Raises ``ClusterError``."""
        self._hold(id_, False)

    def add(self, pool: str, count: int = 1) -> int:
        """Plan ``count`` nodes more in a pool, or fewer, within its limits; return how many are planned then.

        Fewer end no node: name those that are to leave to ``terminate``. Raises ``OptionError``.
        """
        found = known(self.book, pool)

        def change(book: LocalFleetState) -> LocalFleetState:
            plan = book.plans[pool]
            nodes = min(max(plan.nodes + count, found.min_nodes), found.max_nodes)
            later = book.planned(pool, nodes=nodes, reason="by hand", again=0.0)
            return changes.cancel(later, pool).short(self._clock.now())

        with self._acting:
            book = self._change(change)
            self._ensure_supervisor()
        return book.plans[pool].nodes

    def outage(self, pool: str, seconds: float) -> None:
        """Simulate a capacity outage: ``pool`` gets no node for ``seconds``; 0 ends it. Raises ``OptionError``."""
        if not 0 <= seconds < float("inf"):
            raise OptionError(f"seconds must be >= 0 and finite; got {seconds}")
        known(self.book, pool)
        self._change(lambda book: book.planned(pool, outage=self._clock.now() + seconds))

    def _hold(self, id_: str, still: bool) -> None:
        """Stop a node's processes or let them go on, and wait, bounded, until that shows."""
        book = self.book
        node = book.there(id_)
        room = self._room(node)
        room.pause(book, node, still)
        end = self._clock.now() + _HELD
        while room.paused(node) != still and self._clock.now() < end:
            self._clock.sleep(POLL)
