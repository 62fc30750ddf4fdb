"""``ServiceWorld``: the processes of one generation, where they train over the aggregation service."""

from collections.abc import Sequence

from ebbflow.infra.training.process import agreeing
from ebbflow.infra.training.process.members import MemberWorld, summed
from ebbflow.infra.training.process.world import ViewChangedError


class ServiceWorld(MemberWorld):
    """One process's place among those that train over aggregators; see ``MemberWorld``."""

    __slots__ = ()

    def sum_step(self, values: Sequence[float]) -> list[float]:
        """Return the sums with which a step ends. Raises ``ViewChangedError``: then it has not ended."""
        found = self._once(agreeing.to_text(list(values)), boundary=True)
        if found is None:
            raise ViewChangedError
        return summed(found)
