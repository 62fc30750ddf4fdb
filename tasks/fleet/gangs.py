"""A gang in the same steps as a pool: observe, guard, act. Nothing else starts one.

>>> with opened(FleetRequest(terraform_output="ebbflow.json")) as fleet:  # doctest: +SKIP
...     seen = observe(fleet.control, fleet.prices)
...     verdict = guard_gang(seen, fleet.gangs, GangRequest("run-1", "gpu", 8), fleet.rules)
...     done = start_gang(fleet.gangs, verdict, dry_run=True)
"""

from dataclasses import dataclass

from ebbflow.infra.protocols import ApplyResult, Gang, GangControl, Refusal
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.guard import RunMoney, new_nodes
from ebbflow.planners.fleet.guard_gang import GangVerdict, check_gang
from ebbflow.planners.model.fleet import PoolState
from ebbflow.planners.model.gangs import GangRequest
from ebbflow.tasks.fleet.request import FleetRules
from ebbflow.tasks.fleet.steps import Observation


def guard_gang(
    seen: Observation,
    gangs: GangControl,
    request: GangRequest,
    rules: FleetRules,
    *,
    run: RunMoney | None = None,
    why: str = "asked for",
) -> GangVerdict:
    """Return whether the gang may be started, whole; ``run`` says what its run has cost and how long it continues.

    Raises ``OptionError`` for a gang of the same name that is another, and ``StorageError``.
    """
    return check_gang(
        request,
        seen.fleet,
        rules.limits,
        new=new_nodes(seen.offers),
        run=run,
        held=gangs.held(request),
        why=why,
    )


@dataclass(frozen=True)
class GangStartResult:
    """What became of a wish for a gang."""

    nodes: tuple[str, ...]  # empty where it was not started
    applied: ApplyResult


def start_gang(gangs: GangControl, verdict: GangVerdict, *, dry_run: bool = False) -> GangStartResult:
    """Start what the guard has let through; a dry run says what would be asked.

    Raises what ``GangControl.start`` raises.
    """
    if verdict.target is None:
        refused = tuple(Refusal("guard", why) for why in verdict.reasons)
        return GangStartResult((), ApplyResult(-1, refused=refused, dry_run=dry_run))
    found: Gang = gangs.start(verdict.target, dry_run=dry_run)
    refused = (Refusal(found.name, found.refused),) if found.refused else ()
    asked = (found.ask,) if found.ask is not None else ()
    return GangStartResult(found.nodes, ApplyResult(verdict.target.revision, asked, refused, dry_run))


def gang_of(seen: Observation, name: str) -> PoolState:
    """Return a gang as the fleet shows it. Raises ``OptionError`` for a name that there is not."""
    found = {pool.name.partition("/")[2]: pool for pool in seen.fleet.pools if pool.name != pool.family}
    if name not in found:
        raise OptionError(
            f"there is no gang {name!r} in this cluster; there are {', '.join(sorted(found)) or 'none'}"
        )
    return found[name]


def end_gang(gangs: GangControl, name: str, revision: int = -1, *, dry_run: bool = False) -> ApplyResult:
    """Return a gang's nodes to the provider; unknown and ended gangs ask for nothing. Raises ``AwsError``."""
    return ApplyResult(revision, tuple(gangs.end(name, dry_run=dry_run)), (), dry_run)
