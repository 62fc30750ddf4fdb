"""How the capacity loop of a pipeline decides: from the file to the loop's own settings."""

from collections.abc import Collection
from math import inf
from typing import Any

from ebbflow.planners.capacity.values import Scaling, Settings, Team
from ebbflow.planners.model.scheduling import Policy
from ebbflow.planners.scheduling.live import live_policy
from ebbflow.tasks.capacity.own_policies import check_policy, policy_of
from ebbflow.tasks.pipeline.file.spec import LocalSpec, LoopSpec, Pipeline, TeamSpec

_TIMES = ("lease", "interval", "leave", "grace", "silent")


def settings_of(pipeline: Pipeline, allowed: Collection[str] = ()) -> Settings:
    """Return the loop's settings; a policy of one's own is imported where ``allowed`` has it.

    Raises ``OptionError`` for a policy, option or time that cannot be.
    """
    loop = pipeline.loop
    return _settings(pipeline, policy_of(loop.policy, loop.options, lease_s=loop.lease, allowed=allowed))


def check_loop(pipeline: Pipeline) -> None:
    """Check all that ``settings_of`` would, as far as nothing is imported for it. Raises ``OptionError``."""
    check_policy(pipeline.loop.policy, pipeline.loop.options)
    _settings(pipeline, live_policy())


def _settings(pipeline: Pipeline, policy: Policy) -> Settings:
    loop = pipeline.loop
    times: dict[str, Any] = {
        f"{name}_s": value for name in _TIMES if (value := getattr(loop, name)) is not None
    }
    return Settings(
        policy=policy,
        limits=pipeline.limits,
        teams={name: team_of(one) for name, one in pipeline.teams.items()},
        scaling=_scaling(loop, pipeline),
        **times,
    )


def team_of(spec: TeamSpec) -> Team:
    """Return a team as the loop knows it."""
    return Team(
        spec.weight,
        inf if spec.gpus is None else float(spec.gpus),
        inf if spec.dollars_per_hour is None else spec.dollars_per_hour,
        inf if spec.budget is None else spec.budget,
    )


def _scaling(loop: LoopSpec, pipeline: Pipeline) -> Scaling:
    given: dict[str, Any] = {
        key if key == "reserve" else f"{key}_s": value for key, value in loop.scaling.items()
    }
    cluster = pipeline.cluster
    if not isinstance(cluster, LocalSpec):
        return Scaling(**given)
    pools = {pool.name: "gpus" if pool.kind == "gpu" else "cores" for pool in cluster.pools}
    # nodes of this machine come as fast as they boot, not in the minutes that a cloud takes
    given.setdefault("boot_s", 5.0 + max((pool.provision_time for pool in cluster.pools), default=0.0))
    return Scaling(pools=pools, **given)
