"""Auto Scaling groups that behave as AWS documents it where moto is simpler.

Nodes are spot or on-demand as the group's distribution says, of several types and in several zones; there may be
fewer than were asked for; they start and leave with a delay; a terminating hook holds them.
"""

import math
from typing import Any

from tests.aws.world import ON_DEMAND, SPOT, World, moto_time

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
