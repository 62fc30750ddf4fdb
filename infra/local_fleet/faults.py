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
            self.state.there(id_)
            advice = [Notice(id_, deadline, kind)]
            self._change(lambda state: changes.record_notices(state, advice))
            return deadline + by

        def change(state: LocalFleetState) -> LocalFleetState:
            state.there(id_)
            return state.noted(id_, deadline=deadline).short(self._clock.now())

        state = self._change(change)
        node = state.there(id_)
        self._provider(node).notify(state, node, deadline)
        return deadline + by

    def kill(self, id_: str) -> None:
        """Take a node away at once: SIGKILL to every process of every app on it. It is gone when this returns.

        Its pool starts another if it is planned. Raises ``ClusterError`` for a node that is not there.
        """

        def change(state: LocalFleetState) -> LocalFleetState:
            state.there(id_)
            return state.noted(id_, fate="killed without notice")

        state = self._change(change)
        if (node := state.node(id_)) is not None:
            finish(self._file, state, [node], self._providers, self._clock)

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
        found = known(self.state, pool)

        def change(state: LocalFleetState) -> LocalFleetState:
            plan = state.plans[pool]
            nodes = min(max(plan.nodes + count, found.min_nodes), found.max_nodes)
            later = state.planned(pool, nodes=nodes, reason="by hand", again=0.0)
            return changes.cancel(later, pool).short(self._clock.now())

        with self._acting:
            state = self._change(change)
            self._ensure_supervisor()
        return state.plans[pool].nodes

    def outage(self, pool: str, seconds: float) -> None:
        """Simulate a capacity outage: ``pool`` gets no node for ``seconds``; 0 ends it. Raises ``OptionError``."""
        if not 0 <= seconds < float("inf"):
            raise OptionError(f"seconds must be >= 0 and finite; got {seconds}")
        known(self.state, pool)
        self._change(lambda state: state.planned(pool, outage=self._clock.now() + seconds))

    def _hold(self, id_: str, still: bool) -> None:
        """Stop a node's processes or let them continue, and wait, bounded, until that shows."""
        state = self.state
        node = state.there(id_)
        provider = self._provider(node)
        provider.pause(state, node, still)
        end = self._clock.now() + _HELD
        while provider.paused(node) != still and self._clock.now() < end:
            self._clock.sleep(POLL)
