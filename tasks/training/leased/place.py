"""The cluster that an app participates in: where its ledger is, and the nodes that it runs on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError

if TYPE_CHECKING:
    from ebbflow.infra.protocols import Trainer
    from ebbflow.tasks.training.leased.site import MakePool


@dataclass(frozen=True)
class ClusterPlace:
    """A cluster, as an app that enters it is told of it."""

    ledger: str | None = field(
        default=None, repr=False
    )  # default: $EBBFLOW_LEDGER, or ledger.db in our directory
    name: str = "local"  # in that ledger
    fleet: str = "local"  # that trainings run on: local[:NAME], or aws[:FILE]
    pools: tuple[str, ...] = ()  # of an AWS fleet; empty: all with GPUs

    def __post_init__(self) -> None:
        """Raise ``OptionError`` for a fleet that there is not."""
        if self.fleet.partition(":")[0] not in ("local", "aws"):
            raise OptionError(f"fleet must be local[:NAME] or aws[:FILE]; got {self.fleet!r}")

    @contextmanager
    def opened(self, clock: Clock | None = None) -> Iterator[Ledger]:
        """Open the ledger. Raises ``LedgerError``."""
        with Ledger.open(self.ledger, cluster=self.name, create=False, clock=clock) as ledger:
            yield ledger

    @contextmanager
    def nodes(
        self, app: str, grace: float, clock: Clock | None = None
    ) -> "Iterator[tuple[MakePool, Callable[..., Trainer] | None]]":
        """Open the nodes that ``app`` trains on: what makes pools of them, and the launcher where it is another.

        Raises ``EbbflowError``.
        """
        clock = clock or SystemClock()
        kind, _, named = self.fleet.partition(":")
        if kind == "aws":
            with self._aws(named, app, grace, clock) as found:
                yield found
            return
        from ebbflow.infra.local_fleet import LocalFleet

        with LocalFleet.attach(named or "local", clock=clock) as fleet:
            yield (lambda: fleet.nodes_for(app, grace=grace)), None

    @contextmanager
    def _aws(
        self, config: str, app: str, grace: float, clock: Clock
    ) -> "Iterator[tuple[MakePool, Callable[..., Trainer]]]":
        from ebbflow.tasks.fleet.request import FleetRequest
        from ebbflow.tasks.training.leased.aws import opened_pools

        settings = FleetRequest(terraform_output=config or None).settings()
        pools = self.pools or tuple(name for name, pool in settings.pools.items() if pool.kind == "gpu")
        with opened_pools(pools, config, "", clock) as room:
            yield room.pools(app, grace, {}), room.make
