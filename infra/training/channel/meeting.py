"""``Meeting``: where the workers of one generation agree, over the launcher's channel."""

from dataclasses import dataclass, field

from ebbflow.infra.training.channel.messages import Answer, Question
from ebbflow.planners.aggregation.membership import Membership


@dataclass(slots=True)
class Meeting:
    """Membership of a generation, with the questions that wait for it. Used under the exchange's lock.

    Args:
        membership: of its workers.
        heard: when each was heard last, in seconds for which the launcher has listened.
        waiting: questions that cannot be answered yet, with their connections, by node and session.
    """

    membership: Membership
    heard: dict[int, float] = field(default_factory=dict)
    waiting: dict[tuple[str, str], tuple[bytes, Question]] = field(default_factory=dict)

    def hear(self, rank: int, now: float) -> None:
        """Take note of a sign of life."""
        if rank >= 0:
            self.heard[rank] = now

    def take(self, node: str, connection: bytes, ask: Question) -> list[tuple[bytes, Answer]]:
        """Take a question and return what can be answered, to it and to others."""
        if ask.do == "view":
            return [(connection, Answer(ask.number, view=self.membership.view))]
        if ask.do == "enter":
            self.membership.enter(ask.rank)
        else:
            self.membership.contribute(ask.rank, ask.view, ask.index, ask.value, boundary=ask.boundary)
        self.waiting[node, ask.session] = connection, ask
        return self.answers()

    def answers(self) -> list[tuple[bytes, Answer]]:
        """Return the answers that are due, with their connections; they wait no longer."""
        found = []
        for key, (connection, ask) in list(self.waiting.items()):
            if (answer := self._answer(ask)) is not None:
                found.append((connection, answer))
                del self.waiting[key]
        return found

    def _answer(self, ask: Question) -> Answer | None:
        view = self.membership.view
        if ask.do == "enter":
            return Answer(ask.number, view=view) if ask.rank in view.members else None
        made = self.membership.answer(ask.rank, ask.view, ask.index)
        return None if made is None else Answer(ask.number, view=made.view, values=made.values)
