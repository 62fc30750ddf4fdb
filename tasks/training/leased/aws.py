"""Instances of a fleet on AWS that trainings run on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.protocols import Trainer
from ebbflow.infra.training.launcher.pool import NodePool
from ebbflow.planners.errors import OptionError

MakePools = Callable[[str, float, Mapping[str, str]], Callable[[], NodePool]]
"""From an app's id, its grace (s) and its environment to what makes pools of nodes for it."""


@dataclass(frozen=True)
class AwsProvider:
    """What trainings need of a fleet."""

    pools: MakePools  # of instances, under their own ids
    make: Callable[..., Trainer]  # the launcher on them
    listed: Callable[[], Mapping[str, float]]  # asks for on-demand prices, $/h, by instance type
    variables: Mapping[str, str]  # that programs on the instances need


@contextmanager
def opened_pools(names: Sequence[str], config: str, prices: str, clock: Clock) -> Iterator[AwsProvider]:
    """Open what trainings need of the pools ``names`` of a fleet.

    ``config`` is its file of settings, ``prices`` one of on-demand prices; empty: the environment's, and AWS's list.

    Raises ``SettingsError``, ``OptionError`` for a pool that the cluster does not have, ``AwsError``.
    """
    from ebbflow.infra.aws.train_nodes import FORM, LOGS, AwsNodes
    from ebbflow.tasks.fleet.request import FleetRequest
    from ebbflow.tasks.fleet.steps import opened
    from ebbflow.tasks.training.aws import ShippingTrainer, capacity_of

    asked = FleetRequest(terraform_output=config or None, prices=prices or None)
    with ExitStack() as stack:
        fleet = stack.enter_context(opened(asked, clock))
        capacity = stack.enter_context(capacity_of(fleet, names, clock))

        def pools(app: str, grace: float, environment: Mapping[str, str]) -> Callable[[], NodePool]:
            if environment:
                raise OptionError(
                    f"environment is for nodes of this machine; got {', '.join(environment)}: on AWS a node reads "
                    "its secrets by its own role"
                )
            return lambda: AwsNodes(fleet.runner(FORM), capacity, named=True, look=capacity.look, clock=clock)

        def make(pool: NodePool, **options: Any) -> Trainer:
            given = {"form": FORM, **options, "logs": Path(LOGS) / str(pool.uid)}
            return ShippingTrainer(pool, fleet.settings.region, **given)  # type: ignore[arg-type]

        def listed() -> Mapping[str, float]:
            types = {kind for pool in names for kind in fleet.settings.pools[pool].instance_types}
            found = {kind: fleet.prices.on_demand(kind) for kind in sorted(types)}
            return {kind: price for kind, price in found.items() if price is not None}

        yield AwsProvider(pools, make, listed, {"AWS_REGION": fleet.settings.region})
