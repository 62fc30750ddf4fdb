"""``SpotFleet``: the nodes of one cluster, through the Auto Scaling groups that Terraform has made.

*Planned* is what targets said, recorded in a ``FleetStore`` before anything is asked for. *Requested* is the desired
capacity of the groups. *Observed* are the instances that carry the cluster's tags. A crash can only leave the second
behind the first, and ``repair`` closes that gap; there is nothing else to undo.

Groups never choose whom to end: every instance is protected from scale-in, and nodes leave by name.
"""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ebbflow.infra.aws.clients import Clients, calling
from ebbflow.infra.aws.fleet import groups as asg
from ebbflow.infra.aws.fleet.gangs import Gangs
from ebbflow.infra.aws.fleet.groups import Group
from ebbflow.infra.aws.fleet.instances import Instance, Instances
from ebbflow.infra.aws.fleet.state import FleetState, FleetStore, Plan
from ebbflow.infra.aws.fleet.view import adopted, merged, observed, pools_of
from ebbflow.infra.aws.naming import DRAIN_HOOK
from ebbflow.infra.aws.settings import Settings
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import AwsError, AwsUnavailableError, CredentialsError, NotOursError
from ebbflow.infra.protocols import ApplyResult, ProviderCall, Refusal
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Fleet, Target

_REFUSED = (
    "ValidationError"  # Auto Scaling's code for an instance that is not, or no longer, in the right state
)
_LOOKS = 15.0  # seconds between looks for the reason of a shortage
_BEFORE = (
    60.0  # seconds by which a failure to start nodes may be older than the first look that found them missing
)

log = logging.getLogger(__name__)


class SpotFleet:
    """A ``FleetControl`` on AWS. ``gangs`` starts one-off gangs beside the groups. Safe for several threads.

    Raises ``AwsError`` without boto3, and whatever ``store`` raises.
    """

    def __init__(
        self, settings: Settings, clients: Clients, store: FleetStore, clock: Clock | None = None
    ) -> None:
        self._settings = settings
        self._names = settings.names
        self._clients = clients
        self._store = store
        self._clock = clock or SystemClock()
        self._instances = Instances(clients, self._names)
        self.gangs = Gangs(settings, clients, store, self._instances, self._clock)
        self._acting = threading.Lock()  # one change at a time, or two plans could be mixed in one group
        self._hooks: dict[str, float] = {}  # pool -> seconds for which its hook holds a node
        self._why: dict[str, tuple[float, str]] = {}  # pool -> when it was asked last, reason of the shortage

    def observe(self) -> Fleet:
        """See ``FleetControl``. Raises ``AwsError``, ``StorageError``."""
        # instances first: a group that is asked after that knows of all that were found
        instances = self._instances.ours()
        groups = self._groups(self._settings.pools)
        nodes = self._instances.nodes(i for i in instances if i.state == "running")
        now = self._clock.now()
        ending = self._ending(groups, now)
        bases = {name: pool.on_demand_base for name, pool in self._settings.pools.items()}

        def look(state: FleetState) -> FleetState:
            return observed(state, groups, instances, nodes, ending, now)

        state = self._store.change(look)
        why = {pool: self._reason(groups[pool], since, now) for pool, since in state.short.items()}
        serving = {name for name, pool in self._settings.pools.items() if pool.kind == "cpu"}
        pools = pools_of(state, groups, instances, nodes, bases, why, now, serving)
        return Fleet(state.revision, now, pools, state.pending_notices())

    def take_notices(self, notices: Sequence[Notice]) -> int:
        """See ``FleetControl``. Asks nothing of AWS. Raises ``StorageError``."""
        return self._store.change(
            lambda state: state.after(replace(state, notices=merged(state.notices, notices)))
        ).revision

    def apply(self, target: Target, *, dry_run: bool = False) -> ApplyResult:
        """See ``FleetControl``. Raises also ``StorageError`` and ``OptionError``."""
        if target.pool not in self._settings.pools:
            raise OptionError(f"pool must be one of {', '.join(self._settings.pools)}; got {target.pool!r}")
        if target.nodes < 0 or not 0 <= target.on_demand <= target.nodes:
            raise OptionError(
                f"a target must have nodes >= on_demand >= 0; got {target.nodes} nodes, {target.on_demand} on-demand"
            )
        with self._acting:
            group = self._groups([target.pool])[target.pool]
            asg.check_ours(self._names, group)
            refused: list[Refusal] = []
            stale = False

            def plan(state: FleetState) -> FleetState:
                nonlocal stale
                stale = target.revision != state.revision
                refused.clear()
                return state if stale else self._planned(state, target, group, refused)

            state = plan(self._store.read()) if dry_run else self._store.change(plan)
            if stale:
                why = f"decided for revision {target.revision}; the fleet is at revision {state.revision}"
                return ApplyResult(state.revision, (), (Refusal(target.pool, why),), dry_run)
            asks = asg.steps(group, state.plans[target.pool])
            if not dry_run:
                self._perform(asks)
            return ApplyResult(state.revision, asks, tuple(refused), dry_run)

    def terminate(self, ids: Sequence[str], *, dry_run: bool = False) -> ApplyResult:
        """See ``FleetControl``. Raises also ``StorageError``."""
        with self._acting:
            found, groups = self._found(ids)
            state = self._store.read()
            asked: list[ProviderCall] = []
            refused: list[Refusal] = []
            desired: dict[str, int] = {}
            for pool, group in groups.items():
                # places that are still empty go first, or ending a node would only start another
                first = asg.steps(group, state.plans.get(pool) or adopted(group))
                asked += self._perform(first, dry_run)
                desired[pool] = next((ask.value for ask in first if ask.kind == "size"), group.desired)
            for name in dict.fromkeys(ids):
                ask = self._end(name, found.get(name), groups, desired, state)
                if isinstance(ask, Refusal):
                    refused.append(ask)
                else:
                    asked += self._perform([ask], dry_run)
            return ApplyResult(state.revision, tuple(asked), tuple(refused), dry_run)

    def replace_leaving(self, notices: Sequence[Notice], *, dry_run: bool = False) -> ApplyResult:
        """See ``ReplacingFleetControl``: the group ends such a node once its hook has it drained, and starts one.

        Where the hook holds a node for less than its notice leaves, that waits until it does not. Raises
        ``NotOursError``, ``AwsError``, ``StorageError``.
        """
        now = self._clock.now()
        left = {n.node_id: n.deadline - now for n in notices if n.kind == "interruption"}
        with self._acting:
            found, groups = self._found(left)
            state = self._store.read()
            asked: list[ProviderCall] = []
            refused: list[Refusal] = []
            for name, seconds in left.items():
                instance = found.get(name)
                if instance is None or not self._in_group(instance):
                    continue
                group = groups[instance.pool]
                member = group.member(name)
                if member is None or not member.counts:
                    continue  # it is gone, or its group is terminating it already
                if group.desired > (state.plans.get(group.pool) or adopted(group)).nodes:
                    refused.append(Refusal(name, f"scale-in of pool {group.pool}"))
                elif (hold := self._hold(group.pool, group)) < seconds:
                    why = (
                        f"its Auto Scaling group would terminate it in {hold:.0f} s,"
                        f" {seconds - hold:.0f} s before its notice does"
                    )
                    refused.append(Refusal(name, why))
                else:
                    asked += self._perform([asg.end(group, name, replaced=True)], dry_run)
            return ApplyResult(state.revision, tuple(asked), tuple(refused), dry_run)

    def repair(self, *, dry_run: bool = False) -> ApplyResult:
        """See ``FleetControl``. A pool that cannot be repaired is refused with the reason, and the others continue.

        Raises ``AwsUnavailableError`` and ``CredentialsError``, which would meet all of them, and ``StorageError``.
        """
        with self._acting:
            groups = self._groups(self._settings.pools)

            def adopt(state: FleetState) -> FleetState:
                missing = {pool: adopted(group) for pool, group in groups.items() if pool not in state.plans}
                return replace(state, plans={**state.plans, **missing})

            state = adopt(self._store.read()) if dry_run else self._store.change(adopt)
            asked: list[ProviderCall] = []
            refused: list[Refusal] = []
            for pool, group in groups.items():
                try:
                    asg.check_ours(self._names, group)
                    asked += self._perform(asg.steps(group, state.plans[pool]), dry_run)
                except (AwsUnavailableError, CredentialsError):
                    raise
                except AwsError as error:
                    log.error("pool %s cannot be repaired: %s", pool, error)
                    refused.append(Refusal(pool, str(error)))
            ends, unsettled = self.gangs.repair(self._instances.ours(), dry_run=dry_run)
            return ApplyResult(state.revision, (*asked, *ends), (*refused, *unsettled), dry_run)

    def close(self) -> None:
        """See ``FleetControl``."""
        self._clients.close()

    def _groups(self, pools: Iterable[str]) -> dict[str, Group]:
        return asg.describe(self._clients, self._names, pools)

    def _found(self, ids: Iterable[str]) -> tuple[dict[str, Instance], dict[str, Group]]:
        """Return the instances with these ids and the groups of those that have one. Raises ``NotOursError``."""
        found = self._instances.named(list(dict.fromkeys(ids)))
        if foreign := [one.id for one in found.values() if not self._names.owns(one.tags)]:
            raise NotOursError(
                f"{', '.join(sorted(foreign))} do not carry the tags of the cluster {self._names.cluster!r}; "
                "nothing was done"
            )
        groups = self._groups(sorted({i.pool for i in found.values() if self._in_group(i)}))
        for group in groups.values():
            asg.check_ours(self._names, group)
        return found, groups

    def _planned(self, state: FleetState, target: Target, group: Group, refused: list[Refusal]) -> FleetState:
        """Return ``state`` with the plan of ``target``; why less was planned goes to ``refused``."""
        pool, old = target.pool, state.plans.get(target.pool) or adopted(group)
        nodes = min(max(target.nodes, group.min_nodes), group.max_nodes)
        if nodes != target.nodes:
            refused.append(
                Refusal(
                    pool,
                    f"desired {target.nodes} nodes, the group allows {group.min_nodes} to {group.max_nodes}: "
                    f"{nodes} are planned",
                )
            )
        on_demand = min(nodes, max(target.on_demand, self._settings.pools[pool].on_demand_base))
        members = {node.id for node in state.seen if node.pool == pool} | {m.id for m in group.members}
        refused += [
            Refusal(name, f"it is no node of the pool {pool}") for name in target.drain if name not in members
        ]
        drain = tuple(dict.fromkeys([*old.drain, *(name for name in target.drain if name in members)]))
        staying = sum(member.counts and member.id not in drain for member in group.members)
        if (unnamed := staying - nodes) > 0:
            refused.append(
                Refusal(
                    pool, f"{unnamed} nodes above {nodes} exist, and no target names the nodes to terminate"
                )
            )
        since = old.on_demand_since if on_demand == old.on_demand else self._clock.now()
        plan = Plan(nodes, on_demand, drain, target.reason, since)
        return replace(state, plans={**state.plans, pool: plan})

    def _end(
        self,
        name: str,
        instance: Instance | None,
        groups: Mapping[str, Group],
        desired: dict[str, int],
        state: FleetState,
    ) -> ProviderCall | Refusal:
        """Return how to end one node; ``desired`` is brought up to date with it."""
        if instance is None or instance.gone:
            return Refusal(name, "it is gone")
        group = groups.get(instance.pool) if self._in_group(instance) else None
        if instance.group and group is None:
            return Refusal(
                name, f"it belongs to the group {instance.group}, which is no pool of this cluster"
            )
        member = group.member(name) if group is not None else None
        if group is None or member is None:
            return ProviderCall("end", name, 0, "ec2:TerminateInstances", {"InstanceIds": [name]})
        if member.leaving:
            return Refusal(name, "its group is terminating it already")
        plan = state.plans.get(group.pool) or adopted(group)
        surplus = member.counts and desired[group.pool] > plan.nodes
        if surplus and desired[group.pool] <= group.min_nodes:
            return Refusal(name, f"min_nodes of its group is {group.min_nodes}")
        desired[group.pool] -= surplus
        return asg.end(group, name, replaced=not surplus)

    def _in_group(self, instance: Instance) -> bool:
        return (
            instance.pool in self._settings.pools
            and instance.group == self._settings.pools[instance.pool].group
        )

    def _perform(self, asks: Sequence[ProviderCall], dry_run: bool = False) -> Sequence[ProviderCall]:
        """Carry requests out, in order. Raises ``AwsError``."""
        for ask in () if dry_run else asks:
            try:
                asg.perform(self._clients, ask)
            except AwsError as error:
                # the node has moved on in its life: there is nothing to protect or to end any more
                if error.code != _REFUSED or not self._moved_on(ask):
                    raise
                log.info("%s: %s", ask, error)
            else:
                log.info("%s", ask)
        return asks

    def _moved_on(self, ask: ProviderCall) -> bool:
        if ask.kind == "protect":
            return "InstanceIds" in ask.parameters
        if ask.kind != "end":
            return False
        now = self._instances.named([ask.of]).get(ask.of)
        return now is None or now.gone

    def _ending(self, groups: Mapping[str, Group], now: float) -> list[Notice]:
        """Return notices of the nodes that their groups are ending."""
        found = []
        for pool, group in groups.items():
            for member in group.members:
                if member.leaving:
                    found.append(Notice(member.id, now + self._hold(pool, group)))
        return found

    def _hold(self, pool: str, group: Group) -> float:
        """Return for how many seconds the group's hook holds a node that is to drain."""
        if pool not in self._hooks:
            with calling(f"describe the lifecycle hooks of {group.name}"):
                answer = self._clients.client("autoscaling").describe_lifecycle_hooks(
                    AutoScalingGroupName=group.name, LifecycleHookNames=[DRAIN_HOOK]
                )
            waits = [float(hook.get("HeartbeatTimeout", 0)) for hook in answer["LifecycleHooks"]]
            self._hooks[pool] = max(waits, default=0.0)
        return self._hooks[pool]

    def _reason(self, group: Group, since: float, now: float) -> str:
        asked, why = self._why.get(group.pool, (0.0, ""))
        if now - asked < _LOOKS and asked >= since:
            return why
        try:
            why = asg.shortage(self._clients, group, since - _BEFORE)
        except AwsUnavailableError as error:  # the shortage itself is known, and that is what counts
            log.warning("%s", error)
        self._why[group.pool] = (now, why)
        return why
