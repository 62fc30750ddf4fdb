"""How the capacity loop of a pipeline decides: from the file to the loop's own settings."""

from collections.abc import Collection
from typing import Any

from ebbflow.planners.capacity.values import LOOP_KEYS, SCALING_KEYS, Scaling, Settings, teams_of
from ebbflow.planners.model.scheduling import Policy
from ebbflow.planners.scheduling.live import live_policy
from ebbflow.tasks.capacity.own_policies import check_policy, policy_of
from ebbflow.tasks.pipeline.file.spec import LocalSpec, LoopSpec, Pipeline


def settings_of(pipeline: Pipeline, allowed: Collection[str] = ()) -> Settings:
    """Return the loop's settings; a policy of one's own is imported where ``allowed`` has it.

    Raises ``OptionError`` for a policy, option or time that cannot be.
    """
    loop = pipeline.loop
    return _settings(
        pipeline,
        policy_of(loop.policy, loop.options, lease_s=loop.settings.get("lease_duration"), allowed=allowed),
    )


def check_loop(pipeline: Pipeline) -> None:
    """Check all that ``settings_of`` would, as far as nothing is imported for it. Raises ``OptionError``."""
    check_policy(pipeline.loop.policy, pipeline.loop.options)
    _settings(pipeline, live_policy())


def _settings(pipeline: Pipeline, policy: Policy) -> Settings:
    loop = pipeline.loop
    given: dict[str, Any] = {LOOP_KEYS[key]: value for key, value in loop.settings.items()}
    return Settings(
        policy=policy,
        limits=pipeline.quotas,
        teams=teams_of({name: one.weight for name, one in pipeline.teams.items()}, pipeline.quotas),
        scaling=_scaling(loop, pipeline),
        **given,
    )


def _scaling(loop: LoopSpec, pipeline: Pipeline) -> Scaling:
    given: dict[str, Any] = {SCALING_KEYS[key]: value for key, value in loop.scaling.items()}
    cluster = pipeline.cluster
    if not isinstance(cluster, LocalSpec):
        return Scaling(**given)
    whats = {"gpu": "gpus", "spark": "cores", "cpu": "aggregators"}
    pools = {pool.name: whats[pool.kind] for pool in cluster.pools}
    # nodes of this machine come as fast as they boot, not in the minutes that a cloud takes
    given.setdefault(
        "provision_time_s", 5.0 + max((pool.provision_time for pool in cluster.pools), default=0.0)
    )
    return Scaling(pools=pools, **given)
