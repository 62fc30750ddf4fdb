"""Observing a fleet and applying a target as Prefect task runs, with artifacts and events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from ebbflow.infra.protocols import Applied, FleetControl, PriceSource
from ebbflow.planners.guard import Verdict
from ebbflow.planners.model.fleet import Target
from ebbflow.tasks.fleet import Observation, act, decide, guard, observe
from ebbflow.tasks.fleet_report import Status, status
from ebbflow.tasks.fleet_request import FleetRules
from ebbflow.tasks.fleet_tables import applied_lines, target_text, verdict_lines

FLEET = "ebbflow-fleet"
DECISIONS = "ebbflow-fleet-decisions"
"""Keys of the artifacts; a cluster's name follows."""


@dataclass(frozen=True)
class Settled:
    """What became of a wish."""

    wanted: Target
    target: Target
    verdict: Verdict
    applied: Applied

    @property
    def changed(self) -> bool:
        """Tell whether anything was asked of the provider."""
        return bool(self.applied.asked) and not self.applied.dry_run


@task(
    name="observe-fleet", task_run_name="observe-fleet {cluster}", cache_policy=NO_CACHE, persist_result=False
)
def observe_fleet(cluster: str, region: str, control: FleetControl, prices: PriceSource) -> Observation:
    """Look at the fleet and the market; the pools become the table artifact ``ebbflow-fleet-CLUSTER``.

    Raises ``AwsError`` and ``StorageError``; retries are the caller's choice (``with_options``).
    """
    seen = observe(control, prices)
    found = status(seen, cluster, region, float("inf"))
    log = get_run_logger()
    log.info("epoch %s: %s", found.epoch, "; ".join(_said(found)) or "no pools")
    for problem in found.problems:
        log.warning(problem)
    create_table_artifact(key=f"{FLEET}-{cluster}", table=_pools(found), description=f"Pools of {cluster}")
    return seen


@task(
    name="apply-target",
    task_run_name="apply-target {cluster} {wanted.pool}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def apply_target(
    cluster: str,
    control: FleetControl,
    seen: Observation,
    wanted: Target,
    rules: FleetRules,
    *,
    dry_run: bool = False,
) -> Settled:
    """Bring a pool to ``wanted`` as far as the guard lets it; nodes to leave are planned, not ended.

    The decision becomes the table artifact ``ebbflow-fleet-decisions-CLUSTER``, and what was asked for the event
    ``ebbflow.fleet.changed``. A target for a fleet that has changed since is refused: observe again.
    Raises ``AwsError``.
    """
    target = decide(seen, wanted, rules)
    verdict = guard(seen, target, rules)
    applied = act(control, verdict, dry_run=dry_run)
    settled = Settled(wanted, target, verdict, applied)
    log = get_run_logger()
    for reason in verdict.reasons:
        log.info("guard, pool %s: %s", wanted.pool, reason)
    for line in applied_lines(applied):
        log.info(line)
    create_table_artifact(
        key=f"{DECISIONS}-{cluster}", table=[_row(settled)], description=f"The last decision about {cluster}"
    )
    if settled.changed:
        _emit(cluster, settled)
    return settled


def _said(found: Status) -> list[str]:
    return [f"{pool.name} {pool.observed} of {pool.planned}" for pool in found.pools]


def _pools(found: Status) -> Sequence[dict[str, Any]]:
    return [
        {
            "pool": pool.name,
            "planned": pool.planned,
            "requested": pool.requested,
            "observed": pool.observed,
            "spot": pool.spot,
            "on-demand": pool.on_demand,
            "noticed": pool.leaving,
            "draining": pool.draining,
            "short": pool.short_why or ("yes" if pool.short_since is not None else ""),
            "$/h": pool.dollars_per_hour,
        }
        for pool in found.pools
    ] or [{"pool": "none"}]


def _row(settled: Settled) -> dict[str, Any]:
    target, applied = settled.verdict.target, settled.applied
    return {
        "pool": settled.wanted.pool,
        "epoch": settled.wanted.epoch,
        "wanted": settled.wanted.reason,
        "target": "none" if target is None else target_text(target.nodes, target.on_demand, target.drain),
        "guard": "; ".join(verdict_lines(settled.verdict)),
        "asked": "; ".join(applied_lines(applied)),
        "dry run": applied.dry_run,
    }


def _emit(cluster: str, settled: Settled) -> None:
    payload: Mapping[str, Any] = _row(settled)
    related = []
    if flow_run.id:
        related = [
            {
                "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
                "prefect.resource.role": "flow-run",
            }
        ]
    emit_event(
        event="ebbflow.fleet.changed",
        resource={"prefect.resource.id": f"ebbflow.fleet.{cluster}"},
        related=related,
        payload=dict(payload),
    )
