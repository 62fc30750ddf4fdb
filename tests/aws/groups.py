"""Auto Scaling groups and fleets that behave as AWS documents it where moto is simpler.

Nodes are spot or on-demand as the group's distribution says, of several types and in several zones; there may be
fewer than were asked for; they start and leave with a delay; a terminating hook holds them; a call outside a group's
bounds is refused. ``install`` puts this into moto's own classes.
"""

import copy
import math
from typing import Any

from tests.aws.world import ALIVE, ON_DEMAND, SPOT, World, moto_time

PENDING, SERVING, WAITING = "Pending", "InService", "Terminating:Wait"
TERMINATING = "autoscaling:EC2_INSTANCE_TERMINATING"
_BACK_OFF = 20.0  # seconds between a group's failed attempts that are told
_NO_SPOT = (
    "Could not launch Spot Instances. UnfulfillableCapacity - Unable to fulfill capacity due to your request "
    "configuration. Launching EC2 instance failed."
)
_NO_ON_DEMAND = (
    "Could not launch On-Demand Instances. InsufficientInstanceCapacity - We currently do not have sufficient "
    "capacity in the Availability Zone you requested. Launching EC2 instance failed."
)


class Groups:
    """Keeps groups at their size."""

    def __init__(self, world: World) -> None:
        self.world = world

    def step(self) -> None:
        """Try again what was refused before."""
        from moto.autoscaling.models import autoscaling_backends

        for by_region in list(autoscaling_backends.values()):
            for backend in list(by_region.values()):
                for group in list(backend.autoscaling_groups.values()):
                    with self.world.noting():
                        self.settle(group)

    def settle(self, group: Any) -> None:
        """Start what is missing and end what is too much."""
        alive = [s for s in group.instance_states if s.lifecycle_state in (PENDING, SERVING)]
        missing = (group.desired_capacity or 0) - len(alive)
        suspended = {process["ProcessName"] for process in group.suspended_processes}
        if missing > 0 and "Launch" not in suspended:
            self._grow(group, alive, missing)
        elif missing < 0 and "Terminate" not in suspended:
            free = [s for s in alive if not s.protected_from_scale_in]
            self.world.account(group.account_id).rng.shuffle(free)
            with self.world.because(f"scale-in of {group.name}"):
                for state in free[:-missing]:
                    self.leave(group, state)

    def _grow(self, group: Any, alive: list[Any], missing: int) -> None:
        has = sum(s.instance.lifecycle != SPOT for s in alive)
        on_demand = min(missing, max(0, _on_demand(group) - has))
        for market, count in ((ON_DEMAND, on_demand), (SPOT, missing - on_demand)):
            possible = min(count, self.world.room(group.account_id, group.region, market))
            for _ in range(possible):
                self._launch(group, market)
            if possible < count:
                self._refused(group, market)

    def _launch(self, group: Any, market: str) -> None:
        from moto.autoscaling.models import ASG_NAME_TAG, InstanceState

        account = self.world.account(group.account_id)
        policy = group.mixed_instances_policy or {}
        types = [o["InstanceType"] for o in policy.get("LaunchTemplate", {}).get("Overrides", [])]
        subnets = group.vpc_zone_identifier.split(",") if group.vpc_zone_identifier else [None]
        tags = group.get_propagated_tags() | {ASG_NAME_TAG: group.name} | group.instance_tags
        with self.world.because(f"group {group.name}"):
            (instance,) = group.ec2_backend.run_instances(
                group.image_id,
                1,
                group.user_data,
                [],
                instance_type=account.rng.choice(types) if types else group.instance_type,
                is_instance_type_default=False,
                tags={"instance": tags},
                launch_template={"LaunchTemplateId": group.ec2_launch_template.id},
                subnet_id=account.rng.choice(subnets),
                associate_public_ip=False,
                lifecycle=SPOT if market == SPOT else None,
            ).instances
        instance.autoscaling_group = group
        state = InstanceState(
            instance, PENDING, protected_from_scale_in=group.new_instances_protected_from_scale_in
        )
        group.instance_states.append(state)
        if instance.state == "running":
            state.lifecycle_state = SERVING

    def started(self, instance: Any) -> None:
        """Let a group know that its instance runs."""
        group = getattr(instance, "autoscaling_group", None)
        for state in group.instance_states if group is not None else ():
            if state.instance is instance and state.lifecycle_state == PENDING:
                state.lifecycle_state = SERVING

    def _refused(self, group: Any, market: str) -> None:
        account, now = self.world.account(group.account_id), self.world.clock.now()
        activities = account.activities.setdefault(group.name, [])
        if activities and now - activities[0]["at"] < _BACK_OFF:
            return
        why = _NO_SPOT if market == SPOT else _NO_ON_DEMAND
        when = moto_time(self.world.clock)
        activities.insert(
            0,
            {
                "at": now,
                "ActivityId": f"{account.rng.getrandbits(64):016x}",
                "AutoScalingGroupName": group.name,
                "Description": f"Launching a new EC2 instance.  Status Reason: {why}",
                "Cause": "an instance was started in response to a difference between desired and actual capacity",
                "StartTime": when,
                "EndTime": when,
                "StatusCode": "Failed",
                "StatusMessage": why,
                "Progress": 100,
            },
        )
        self.world.event(
            group.account_id,
            group.region,
            "aws.autoscaling",
            "EC2 Instance Launch Unsuccessful",
            {
                "AutoScalingGroupName": group.name,
                "ActivityId": activities[0]["ActivityId"],
                "StatusCode": "Failed",
                "StatusMessage": why,
                "EC2InstanceId": "",
            },
            [group.arn],
        )

    def leave(self, group: Any, state: Any) -> None:
        """End one instance of a group; a hook lets it wait until it is drained."""
        hooks = [
            h
            for h in group.autoscaling_backend.describe_lifecycle_hooks(group.name)
            if h.lifecycle_transition == TERMINATING
        ]
        account = self.world.account(group.account_id)
        if not hooks or account.drain_seconds <= 0:
            self.gone(group, state)
            return
        state.lifecycle_state = WAITING
        self.world.note(group.account_id, "waits", instance=state.instance.id, group=group.name)
        self.world.event(
            group.account_id,
            group.region,
            "aws.autoscaling",
            "EC2 Instance-terminate Lifecycle Action",
            {
                "LifecycleActionToken": f"{account.rng.getrandbits(64):016x}",
                "AutoScalingGroupName": group.name,
                "LifecycleHookName": hooks[0].name,
                "EC2InstanceId": state.instance.id,
                "LifecycleTransition": TERMINATING,
            },
            [group.arn],
        )
        seconds = min(account.drain_seconds, float(hooks[0].heartbeat_timeout))
        self.world.later(seconds, lambda: self.drained(group, state))

    def drained(self, group: Any, state: Any) -> None:
        """Let a waiting instance go."""
        if state in group.instance_states:
            with self.world.because(f"drained in {group.name}"):
                self.gone(group, state)

    def gone(self, group: Any, state: Any) -> None:
        group.instance_states = [s for s in group.instance_states if s is not state]
        state.instance.terminate()


def _on_demand(group: Any) -> int:
    """Return how many of the wanted nodes must be on-demand."""
    wanted = group.desired_capacity or 0
    if not group.mixed_instances_policy:
        return wanted
    distribution = group.mixed_instances_policy.get("InstancesDistribution", {})
    base = min(wanted, int(distribution.get("OnDemandBaseCapacity") or 0))
    above = distribution.get("OnDemandPercentageAboveBaseCapacity")
    return base + math.ceil((wanted - base) * (100 if above is None else int(above)) / 100)


def install(groups: Groups) -> None:
    """Put the behaviour into moto's classes; once per process."""
    _instances(groups)
    _groups(groups)
    _actions(groups)
    _fleets(groups.world)


def _instances(groups: Groups) -> None:
    from moto.ec2.exceptions import EC2ClientError
    from moto.ec2.models.instances import Instance, InstanceBackend

    world = groups.world
    run, terminate = InstanceBackend.run_instances, Instance.terminate

    def run_instances(self: Any, image_id: str, count: int, *args: Any, **kwargs: Any) -> Any:
        market = SPOT if kwargs.get("lifecycle") or kwargs.get("instance_market_options") else ON_DEMAND
        if world.room(self.account_id, self.region_name, market) < count:
            raise EC2ClientError(
                "InsufficientInstanceCapacity",
                "We currently do not have sufficient capacity in the Availability Zone you requested.",
            )
        made = run(self, image_id, count, *args, **kwargs)
        for instance in made.instances:
            _starting(instance)
        return made

    def _starting(instance: Any) -> None:
        account = world.account(instance.owner_id)
        instance.launch_time = moto_time(world.clock)
        world.note(
            instance.owner_id,
            "launched",
            instance=instance.id,
            tags={tag["key"]: tag["value"] for tag in instance.get_tags()},
        )

        def running() -> None:
            if instance.state in ("pending", "running"):
                instance._state.name, instance._state.code = "running", 16
                groups.started(instance)
                _told(instance, "running")

        if account.launch_seconds > 0:
            instance._state.name, instance._state.code = "pending", 0
            world.later(account.launch_seconds * (0.5 + account.rng.random()), running)
        else:
            _told(instance, "running")

    def end(self: Any) -> Any:
        if self.state not in ALIVE:
            return self._state
        world.note(self.owner_id, "ended", instance=self.id)
        before = terminate(self)
        _told(self, "terminated")
        return before

    def _told(instance: Any, state: str) -> None:
        world.instance_event(
            instance.owner_id,
            instance.ec2_backend.region_name,
            instance.id,
            "EC2 Instance State-change Notification",
            {"state": state},
        )

    InstanceBackend.run_instances = run_instances
    Instance.terminate = end


def _groups(groups: Groups) -> None:
    from moto.autoscaling.exceptions import ValidationError
    from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup, TerminateInstanceActivity

    update = FakeAutoScalingGroup.update

    def set_size(self: Any, wanted: int | None) -> None:
        self.desired_capacity = self.min_size if wanted is None else wanted
        groups.settle(self)

    def updated(self: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("mixed_instances_policy") and self.mixed_instances_policy:  # moto forgets it
            kept = copy.deepcopy(self.mixed_instances_policy)
            kept["LaunchTemplate"]["LaunchTemplateSpecification"].pop("LaunchTemplateName", None)
            kwargs["mixed_instances_policy"] = kept
        wanted = kwargs.get("desired_capacity")
        least = self.min_size if kwargs.get("min_size") is None else kwargs["min_size"]
        most = self.max_size if kwargs.get("max_size") is None else kwargs["max_size"]
        _check(self.name, wanted, least, most)
        update(self, *args, **kwargs)
        groups.settle(self)

    def set_desired_capacity(self: Any, group_name: str, wanted: int) -> None:
        group = _found(self, group_name)
        _check(group_name, wanted, group.min_size, group.max_size)
        group.set_desired_capacity(wanted)

    def terminate_instance(self: Any, instance_id: str, should_decrement: bool) -> Any:
        for group in self.autoscaling_groups.values():
            for state in group.instance_states:
                if state.instance.id == instance_id:
                    return _end(group, state, should_decrement)
        raise ValidationError(
            f"Instance Id not found - No managed instance found for instance ID {instance_id}"
        )

    def _end(group: Any, state: Any, should_decrement: bool) -> Any:
        before = group.desired_capacity
        if state.lifecycle_state in (PENDING, SERVING):
            if should_decrement:
                if before - 1 < group.min_size:
                    raise ValidationError(
                        f"Currently, desiredSize equals minSize ({group.min_size}). Terminating instance without "
                        "replacement will violate group's min size constraint."
                    )
                group.desired_capacity = before - 1
            groups.leave(group, state)
        groups.settle(group)
        return TerminateInstanceActivity(state.instance, before)

    def notify_terminate_instances(self: Any, instance_ids: list[str]) -> None:
        for group in self.autoscaling_groups.values():
            left = [s for s in group.instance_states if s.instance.id not in instance_ids]
            if len(left) < len(group.instance_states):
                group.instance_states = left
                groups.settle(group)

    def _found(backend: Any, name: str) -> Any:
        if name not in backend.autoscaling_groups:
            raise ValidationError(f"AutoScalingGroup name not found - AutoScalingGroup '{name}' not found")
        return backend.autoscaling_groups[name]

    def _check(name: str, wanted: int | None, least: int, most: int) -> None:
        if wanted is not None and wanted > most:
            raise ValidationError(
                f"New SetDesiredCapacity value {wanted} is above max value {most} for the AutoScalingGroup."
            )
        if wanted is not None and wanted < least:
            raise ValidationError(
                f"New SetDesiredCapacity value {wanted} is below min value {least} for the AutoScalingGroup."
            )

    FakeAutoScalingGroup.set_desired_capacity = set_size
    FakeAutoScalingGroup.update = updated
    AutoScalingBackend.set_desired_capacity = set_desired_capacity
    AutoScalingBackend.terminate_instance = terminate_instance
    AutoScalingBackend.notify_terminate_instances = notify_terminate_instances


def _actions(groups: Groups) -> None:
    from moto.autoscaling.responses import AutoScalingResponse
    from moto.core.responses import ActionResult

    def complete_lifecycle_action(self: Any) -> Any:
        group = self.autoscaling_backend.autoscaling_groups[self._get_param("AutoScalingGroupName")]
        for state in list(group.instance_states):
            if state.instance.id == self._get_param("InstanceId") and state.lifecycle_state == WAITING:
                groups.drained(group, state)
        return ActionResult({})

    def describe_scaling_activities(self: Any) -> Any:
        account = groups.world.account(self.current_account)
        name = self._get_param("AutoScalingGroupName")
        found = [a for group, list_ in account.activities.items() if name in (None, group) for a in list_]
        found.sort(key=lambda activity: -activity["at"])
        most = self._get_int_param("MaxRecords") or 100
        return ActionResult({"Activities": [{k: v for k, v in a.items() if k != "at"} for a in found[:most]]})

    AutoScalingResponse.complete_lifecycle_action = complete_lifecycle_action
    AutoScalingResponse.describe_scaling_activities = describe_scaling_activities


def _fleets(world: World) -> None:
    from moto.ec2.models.fleets import Fleet
    from moto.ec2.responses.fleets import Fleets

    spot, on_demand, create = Fleet.create_spot_requests, Fleet.create_on_demand_requests, Fleets.create_fleet
    fleets: list[Any] = []

    def limited(market: str, start: Any) -> Any:
        def create_requests(self: Any, weight: float) -> Any:
            if not hasattr(self, "refused"):
                self.refused = {}
                fleets.append(self)
            backend = self.ec2_backend
            possible = min(int(weight), world.room(backend.account_id, backend.region_name, market))
            if possible < int(weight):
                spec = self.launch_specs[0]
                self.refused[market] = {
                    "LaunchTemplateAndOverrides": {
                        "LaunchTemplateSpecification": spec.launch_template_spec,
                        **({"Overrides": spec.overrides} if spec.overrides else {}),
                    },
                    "Lifecycle": market,
                    "ErrorCode": "InsufficientInstanceCapacity",
                    "ErrorMessage": "There is no capacity available that matches your request.",
                }
            return start(self, possible) if possible else None

        return create_requests

    def create_fleet(self: Any) -> Any:
        fleets.clear()
        result = create(self)
        if not fleets:
            return result
        (fleet,) = fleets
        made = result.result.get("Instances") or []
        options = {SPOT: fleet.spot_options or {}, ON_DEMAND: fleet.on_demand_options or {}}
        for market, few in options.items():
            ids = [i for group in made if group["Lifecycle"] == market for i in group["InstanceIds"]]
            if ids and len(ids) < int(few.get("MinTargetCapacity") or 0):
                # AWS would not have started them
                with world.because("below MinTargetCapacity"):
                    fleet.ec2_backend.terminate_instances(ids)
                made = [group for group in made if group["Lifecycle"] != market]
        if fleet.fleet_type == "instant":
            result.result.update(Instances=made, Errors=list(fleet.refused.values()))
        return result

    Fleet.create_spot_requests = limited(SPOT, spot)
    Fleet.create_on_demand_requests = limited(ON_DEMAND, on_demand)
    Fleets.create_fleet = create_fleet
