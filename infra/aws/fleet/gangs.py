"""Gangs: nodes that are needed all at once, for one run, through an EC2 Fleet of type instant.

A gang is whole or it is returned. What is asked for is recorded first, with the token that makes a repeated request
the same request, and every node carries the gang's name and size: whatever a crash leaves is found again by its tags.

The call that asks EC2 for a gang, and what too few nodes mean. Nothing is asked here.
"""

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_DOWN, Decimal
from typing import Any

from ebbflow.infra.aws.clients import PRICE_CODES, Clients, calling, of_code, scrubbed
from ebbflow.infra.aws.fleet.instances import Instance, Instances
from ebbflow.infra.aws.fleet.state import SETTLING, FleetState, FleetStore, GangPlan
from ebbflow.infra.aws.naming import MANAGED_BY_LOOP, TAG_GANG, TAG_GANG_SIZE, Names, Role
from ebbflow.infra.aws.settings import Pool, Settings
from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import (
    AwsError,
    AwsUnavailableError,
    CredentialsError,
    InsufficientCapacityError,
    NotOursError,
    SpotPriceTooHighError,
)
from ebbflow.infra.protocols import Gang, ProviderCall, Refusal
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Market
from ebbflow.planners.model.gangs import GangRequest, GangTarget

_ROLES: Mapping[str, Role] = {"spark": "spark-worker", "gpu": "gpu-trainer", "cpu": "aggregator"}


_TAGGED = ("fleet", "instance", "volume", "network-interface")


def call(request: GangRequest, pool: Pool, names: Names, token: str) -> ProviderCall:
    """Return the request for a fleet of type instant; ``token`` makes a repetition the same request."""
    price = {} if request.max_price is None else {"MaxPrice": _price(request.max_price)}
    options: dict[str, Any] = {
        "SingleInstanceType": request.one_type,
        "SingleAvailabilityZone": request.one_zone,
        "MinTargetCapacity": request.size,
    }
    how = (
        {"SpotOptions": {"AllocationStrategy": "price-capacity-optimized", **options}}
        if request.market == "spot"
        else {"OnDemandOptions": {"AllocationStrategy": "lowest-price", **options}}
    )
    parameters: dict[str, Any] = {
        "Type": "instant",
        "ClientToken": token,
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateId": pool.launch_template,
                    "Version": "$Default",
                },
                "Overrides": [
                    {"InstanceType": kind, "SubnetId": subnet, **price}
                    for kind in pool.instance_types
                    for subnet in pool.subnet_ids
                ],
            }
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": request.size,
            "DefaultTargetCapacityType": request.market,
        },
        "TagSpecifications": _tags(request, pool, names),
        **how,
    }
    return ProviderCall("gang", request.name, request.size, "ec2:CreateFleet", parameters)


def shortage(what: str, size: int, came: int, errors: Sequence[Mapping[str, Any]]) -> AwsError:
    """Return the error for an answer with ``came`` of ``size`` nodes, which are returned, and EC2's ``errors``."""
    told = [(str(error.get("ErrorCode", "")), str(error.get("ErrorMessage", ""))) for error in errors]
    said = "; ".join(sorted({f"{code}: {scrubbed(message)}" for code, message in told})) or "AWS says no more"
    text = f"cannot {what}: {came} of {size} nodes were launched and are terminated (insufficient capacity: {said})"
    codes = [code for code, _ in told]
    for found in (of_code(what, *each) for each in told):
        if not isinstance(found, InsufficientCapacityError):
            return type(found)(f"{found}; the {came} launched nodes are terminated", found.code)
    if codes and all(code in PRICE_CODES for code in codes):
        return SpotPriceTooHighError(f"{text}; raise max_price, or leave it out", codes[0])
    return InsufficientCapacityError(text, codes[0] if codes else "")


def _price(dollars: float) -> str:
    """Return a limit as EC2 takes it, rounded down: what is asked for is never above what was allowed."""
    return str(Decimal(repr(dollars)).quantize(Decimal("0.0001"), ROUND_DOWN))


def _tags(request: GangRequest, pool: Pool, names: Names) -> list[dict[str, Any]]:
    tags = {
        **names.tags(MANAGED_BY_LOOP, role=_ROLES[pool.kind], pool=pool.name),
        TAG_GANG: request.name,
        TAG_GANG_SIZE: str(request.size),
    }
    pairs = [{"Key": key, "Value": value} for key, value in tags.items()]
    return [{"ResourceType": kind, "Tags": pairs} for kind in _TAGGED]


_ENDED_A_CALL = 100
_DELETED = ("fleetIdDoesNotExist", "fleetNotInDeletableState")
_MISMATCH = "IdempotentParameterMismatch"  # an earlier request with this token was taken

log = logging.getLogger(__name__)


class Gangs:
    """A ``GangControl`` on AWS: starts and returns gangs of one cluster. Safe for several threads."""

    def __init__(
        self, settings: Settings, clients: Clients, store: FleetStore, instances: Instances, clock: Clock
    ) -> None:
        self._settings = settings
        self._names = settings.names
        self._clients = clients
        self._store = store
        self._instances = instances
        self._now = clock.now

    def held(self, request: GangRequest) -> bool:
        """See ``GangControl``. Asks nothing of AWS."""
        known = self._store.read().gangs.get(request.name)
        if known is not None:
            _same(request, known)
        return known is not None and known.phase == "held"

    def start(self, target: GangTarget, *, dry_run: bool = False) -> Gang:
        """See ``GangControl``. Raises also ``SpotPriceTooHighError`` and ``OptionError``.

        Where it is not known what became of the request, call again with the same one, or let ``repair`` settle it.
        """
        request = target.request
        pool = self._settings.pools.get(request.pool)
        if pool is None:
            raise OptionError(f"pool must be one of {', '.join(self._settings.pools)}; got {request.pool!r}")
        new = GangPlan(request.pool, request.size, request.market, uuid.uuid4().hex, "asked", self._now())
        stale = ""

        def record(state: FleetState) -> FleetState:
            nonlocal stale
            stale = ""
            known = state.gangs.get(request.name)
            if known is not None:
                _same(request, known)
                if known.phase == "held":
                    return state
            if stale := _stale(target, state):
                return state
            if known is not None:
                again = replace(known, since=new.since)
                return replace(state, gangs={**state.gangs, request.name: again})
            # whatever else was decided without this gang must not pass any more
            return replace(state, revision=state.revision + 1, gangs={**state.gangs, request.name: new})

        state = record(self._store.read()) if dry_run else self._store.change(record)
        if stale:
            return Gang(request.name, request.pool, (), refused=stale)
        plan = state.gangs[request.name]
        if plan.phase == "held":
            return Gang(request.name, request.pool, plan.nodes)
        ask = call(request, pool, self._names, plan.token)
        return Gang(request.name, request.pool, (), ask) if dry_run else self._asked(request, plan, ask)

    def end(self, name: str, *, dry_run: bool = False) -> tuple[ProviderCall, ...]:
        """Return a gang's nodes to AWS; return what was asked. Unknown and ended gangs ask for nothing.

        Raises ``NotOursError`` with nothing done, and ``AwsError``, after which ``repair`` continues.
        """
        plan = self._store.read().gangs.get(name)
        alive = [i.id for i in self._instances.ours() if i.gang == name and not i.gone]
        asks = _ends(alive)
        if not dry_run:
            self._return(name, alive, plan)
        return asks

    def repair(
        self, instances: Sequence[Instance], *, dry_run: bool = False
    ) -> tuple[list[ProviderCall], list[Refusal]]:
        """Settle what a crash left: whole gangs are adopted, parts and what was to end are ended.

        ``instances`` are the cluster's. Raises ``AwsError``.
        """
        alive: dict[str, list[Instance]] = {}
        for instance in instances:
            if instance.gang and not instance.gone:
                alive.setdefault(instance.gang, []).append(instance)
        plans = self._store.read().gangs
        asks: list[ProviderCall] = []
        refused: list[Refusal] = []
        for name in sorted({*plans, *alive}):
            there = sorted(alive.get(name, []), key=lambda i: i.id)
            plan = plans.get(name) or _of_tags(there)
            whole = plan is not None and len(there) >= plan.size
            since = plan.since if plan is not None else max(i.launched for i in there)
            unsettled = self._now() - since < SETTLING
            if plan is not None and (plan.phase == "held" or (plan.phase == "asked" and whole)):
                found = self._held(name, plan, [i.id for i in there], unsettled, dry_run)
            elif unsettled and not (plan is not None and plan.phase == "ending" and (there or plan.fleet)):
                refused.append(Refusal(name, "its nodes may not be listed yet; retry in a minute"))
                continue
            else:
                found = _ends([i.id for i in there])
                if not dry_run:
                    self._return(name, [i.id for i in there], plan)
            asks += found
        return asks, refused

    def _held(
        self, name: str, plan: GangPlan, there: list[str], unsettled: bool, dry_run: bool
    ) -> tuple[ProviderCall, ...]:
        """Adopt a whole gang, end what it has too many of, forget one that is gone; return what is asked."""
        if plan.phase == "asked":
            plan = replace(plan, phase="held", nodes=tuple(there[: plan.size]))
            if not dry_run:
                self._keep(name, plan)
        if not there and not unsettled:
            if not dry_run:
                self._store.change(_without(name))
            return ()
        surplus = [one for one in there if one not in plan.nodes]
        if surplus and not dry_run:
            self._terminate(surplus)
        return _ends(surplus)

    def _asked(self, request: GangRequest, plan: GangPlan, ask: ProviderCall) -> Gang:
        what = f"start the gang {request.name}"
        try:
            with calling(what):
                answer = self._clients.client("ec2").create_fleet(**ask.parameters)
        except AwsUnavailableError:
            raise  # it may have been carried out: the record stays
        except AwsError as error:
            if error.code and error.code != _MISMATCH:  # refused, so there is nothing to look for
                self._store.change(_without(request.name))
            raise
        nodes = tuple(sorted(i for one in answer.get("Instances", ()) for i in one["InstanceIds"]))
        plan = replace(plan, fleet=answer["FleetId"], nodes=nodes)
        if len(nodes) >= request.size:
            self._keep(request.name, replace(plan, phase="held"))
            return Gang(request.name, request.pool, nodes, ask)
        why = shortage(what, request.size, len(nodes), answer.get("Errors", ()))
        try:
            self._return(request.name, nodes, plan)
        except AwsError as failed:
            log.error("gang %s is not terminated yet, repair continues: %s", request.name, failed)
        raise why

    def _return(self, name: str, ids: Sequence[str], plan: GangPlan | None) -> None:
        """End the gang's nodes, and forget it when none can turn up any more."""
        if plan is not None:
            self._keep(name, replace(plan, phase="ending"))
        if plan is not None and plan.fleet:
            self._delete(name, plan.fleet)
        self._terminate(ids)
        if plan is not None and (plan.fleet or self._now() - plan.since >= SETTLING):
            self._store.change(_without(name))

    def _delete(self, name: str, fleet: str) -> None:
        """Delete a fleet, which ends its nodes, also those that are not listed yet."""
        what = f"delete the fleet of the gang {name}"
        try:
            with calling(what):
                answer = self._clients.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=True)
        except (AwsUnavailableError, CredentialsError):
            raise
        except AwsError as error:
            log.info("%s; its nodes are terminated one by one", error)
            return
        for failed in answer.get("UnsuccessfulFleetDeletions", ()):
            code = failed.get("Error", {}).get("Code", "")
            if code not in _DELETED:
                raise AwsUnavailableError(f"cannot {what}: {code}; repair retries", code)

    def _terminate(self, ids: Sequence[str]) -> None:
        found = self._instances.named(ids)
        if foreign := [one.id for one in found.values() if not self._names.owns(one.tags)]:
            raise NotOursError(
                f"{', '.join(foreign)} do not carry the tags of the cluster {self._names.cluster!r}; nothing was done"
            )
        left = [one.id for one in found.values() if not one.gone]
        for ask in _ends(left):
            with calling(f"end {len(left)} nodes of a gang"):
                self._clients.client("ec2").terminate_instances(**ask.parameters)

    def _keep(self, name: str, plan: GangPlan) -> None:
        self._store.change(lambda state: replace(state, gangs={**state.gangs, name: plan}))


def _stale(target: GangTarget, state: FleetState) -> str:
    """Return why a target was decided for another fleet than there is; empty where it was not."""
    if target.revision != state.revision:
        return f"decided for revision {target.revision}; the fleet is at revision {state.revision}"
    beside = dict(target.beside)
    grown = sorted(pool for pool, plan in state.plans.items() if plan.nodes > beside.get(pool, 0))
    return f"{', '.join(grown)} may have more nodes than when it was decided" if grown else ""


def _without(name: str) -> Callable[[FleetState], FleetState]:
    return lambda state: replace(state, gangs={n: plan for n, plan in state.gangs.items() if n != name})


def _same(request: GangRequest, plan: GangPlan) -> None:
    wanted, has = (request.pool, request.size, request.market), (plan.pool, plan.size, plan.market)
    if wanted != has:
        raise OptionError(
            f"the gang {request.name!r} exists with pool, size, market {has}; got {wanted}: end it first, or use "
            "another name"
        )
    if plan.phase == "ending":
        raise OptionError(
            f"the gang {request.name!r} is being terminated; use another name, or check in a minute: "
            f"ebbflow fleet end {request.name}"
        )


def _of_tags(instances: Sequence[Instance]) -> GangPlan | None:
    """Return the plan that the nodes' tags tell of, for a record that was lost; None where they tell none."""
    first = instances[0]
    size = first.tags.get(TAG_GANG_SIZE, "")
    if not size.isdecimal() or int(size) < 1:
        return None
    market: Market = "spot" if first.spot else "on-demand"
    since = max(instance.launched for instance in instances)
    return GangPlan(first.pool, int(size), market, uuid.uuid4().hex, "asked", since)


def _ends(ids: Iterable[str]) -> tuple[ProviderCall, ...]:
    """Return requests that end nodes, each naming a bounded number of them."""
    all_ids = sorted(ids)
    parts = [all_ids[at : at + _ENDED_A_CALL] for at in range(0, len(all_ids), _ENDED_A_CALL)]
    return tuple(
        ProviderCall("end", ", ".join(part), 0, "ec2:TerminateInstances", {"InstanceIds": part})
        for part in parts
    )
