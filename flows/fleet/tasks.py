"""Observing a fleet, applying a target, starting and returning a gang: Prefect task runs, artifacts and events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from ebbflow.flows.fleet.terminal import applied_lines, target_text, verdict_lines
from ebbflow.flows.runs import artifacts
from ebbflow.infra.protocols import ApplyResult, FleetControl, GangControl, PriceSource
from ebbflow.planners.fleet.guard import GuardResult, RunMoney
from ebbflow.planners.model.fleet import Target
from ebbflow.planners.model.gangs import GangRequest
from ebbflow.tasks.fleet import gangs as fleet_gangs
from ebbflow.tasks.fleet.gangs import GangStartResult
from ebbflow.tasks.fleet.report import Status, status
from ebbflow.tasks.fleet.request import FleetRules
from ebbflow.tasks.fleet.steps import Observation, act, decide, guard, observe

FLEET = "ebbflow-fleet"
DECISIONS = "ebbflow-fleet-decisions"
"""Keys of the artifacts; a cluster's name follows."""


@dataclass(frozen=True)
class ScaleResult:
    """What became of a wish."""

    wanted: Target
    target: Target
    verdict: GuardResult
    applied: ApplyResult

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
    log.info("revision %s: %s", found.revision, "; ".join(_said(found)) or "no pools")
    for problem in found.problems:
        log.warning(problem)
    artifacts.table(f"{FLEET}-{cluster}", _pools(found), f"Pools of {cluster}")
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
) -> ScaleResult:
    """Bring a pool to ``wanted`` as far as the guard lets it; nodes to leave are planned, not ended.

    The decision becomes the table artifact ``ebbflow-fleet-decisions-CLUSTER``, and what was asked for the event
    ``ebbflow.fleet.scaled``. A target for a fleet that has changed since is refused: observe again.
    Raises ``AwsError``.
    """
    target = decide(seen, wanted, rules)
    verdict = guard(seen, target, rules)
    applied = act(control, verdict, dry_run=dry_run)
    settled = ScaleResult(wanted, target, verdict, applied)
    log = get_run_logger()
    for reason in verdict.reasons:
        log.info("guard, pool %s: %s", wanted.pool, reason)
    _settle(cluster, _row(settled), applied)
    return settled


@task(
    name="start-gang",
    task_run_name="start-gang {cluster} {request.name}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def start_gang(
    cluster: str,
    gangs: GangControl,
    seen: Observation,
    request: GangRequest,
    rules: FleetRules,
    *,
    run: RunMoney | None = None,
    why: str = "a flow",
    dry_run: bool = False,
) -> GangStartResult:
    """Start a gang if the guard lets it through whole; ``nodes`` is empty where it was refused.

    ``run`` says what the gang's run has cost and how long it is expected to continue. Artifact and event are those of
    ``apply_target``. A task run that is tried again starts nothing twice. Raises what ``GangControl.start`` raises.
    """
    verdict = fleet_gangs.guard_gang(seen, gangs, request, rules, run=run, why=why)
    started = fleet_gangs.start_gang(gangs, verdict, dry_run=dry_run)
    target = f"{request.size} {request.market} nodes at once" if verdict.target is not None else "none"
    said = "; ".join(verdict.reasons) or "passes"
    _settle(
        cluster,
        _decision(request.shown, seen.fleet.revision, why, target, said, started.applied),
        started.applied,
    )
    return started


@task(name="end-gang", task_run_name="end-gang {cluster} {name}", cache_policy=NO_CACHE, persist_result=False)
def end_gang(
    cluster: str, gangs: GangControl, seen: Observation, name: str, *, dry_run: bool = False
) -> ApplyResult:
    """Return a gang; what runs on its nodes is not waited for. One that there is not asks for nothing.

    Raises ``AwsError``.
    """
    applied = fleet_gangs.end_gang(gangs, name, seen.fleet.revision, dry_run=dry_run)
    row = _decision(
        name, seen.fleet.revision, "the gang is terminated", "none", "not checked: it costs nothing", applied
    )
    _settle(cluster, row, applied)
    return applied


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


def _row(settled: ScaleResult) -> dict[str, Any]:
    wanted, target = settled.wanted, settled.verdict.target
    said = "none" if target is None else target_text(target.nodes, target.on_demand, target.drain)
    guarded = "; ".join(verdict_lines(settled.verdict))
    return _decision(wanted.pool, wanted.revision, wanted.reason, said, guarded, settled.applied)


def _decision(
    pool: str, revision: int, wanted: str, target: str, guard: str, applied: ApplyResult
) -> dict[str, Any]:
    return {
        "pool": pool,
        "revision": revision,
        "wanted": wanted,
        "target": target,
        "guard": guard,
        "asked": "; ".join(applied_lines(applied)),
        "dry run": applied.dry_run,
    }


def _settle(cluster: str, row: dict[str, Any], applied: ApplyResult) -> None:
    """Log what was asked, keep the decision as an artifact, and tell of it where anything was asked."""
    log = get_run_logger()
    for line in applied_lines(applied):
        log.info(line)
    artifacts.table(f"{DECISIONS}-{cluster}", [row], f"The last decision about {cluster}")
    if applied.asked and not applied.dry_run:
        _emit(cluster, row)


def _emit(cluster: str, row: dict[str, Any]) -> None:
    payload: Mapping[str, Any] = row
    related = []
    if flow_run.id:
        related = [
            {
                "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
                "prefect.resource.role": "flow-run",
            }
        ]
    emit_event(
        event="ebbflow.fleet.scaled",
        resource={"prefect.resource.id": f"ebbflow.fleet.{cluster}"},
        related=related,
        payload=dict(payload),
    )
