"""Puts what ``groups`` and ``world`` do into moto's own classes; once per process."""

import copy
from typing import Any

from tests.aws.groups import PENDING, SERVING, WAITING, Groups
from tests.aws.world import ALIVE, ON_DEMAND, SPOT, World, moto_time


def install(groups: Groups) -> None:
    """Change moto's classes so that ``groups`` decides."""
    _tags()
    _instances(groups)
    _groups(groups)
    _actions(groups)
    _fleets(groups.world)


def _tags() -> None:
    """Look up a resource's tags by its id, where moto matches every tag of the account by regular expressions."""
    from moto.ec2.models.core import TaggedEC2Resource

    def get_tags(self: Any) -> list[dict[str, str]]:
        return [
            {"resource_id": self.id, "key": key, "value": value, "resource_type": ""}
            for key, value in self.ec2_backend.tags.get(self.id, {}).items()
        ]

    TaggedEC2Resource.get_tags = get_tags


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
