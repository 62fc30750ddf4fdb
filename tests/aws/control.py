"""What tests may ask of the emulator itself."""

import json
from typing import Any

from tests.aws.faults import Answer, Faults
from tests.aws.world import ALIVE, ON_DEMAND, Kill, World


class Control:
    """What tests may ask of the emulator itself, as JSON objects: ``POST /ebbflow-api/<method>``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, name: str, content: dict[str, Any]) -> Answer:
        method = getattr(self, name, None)
        if method is None or name.startswith("_"):
            return "404 Not Found", [], b"{}"
        return "200 OK", [("Content-Type", "application/json")], json.dumps(method(**content) or {}).encode()

    def clock(self) -> dict[str, float]:
        clock = self._world.clock
        return {"speed": clock.speed, "epoch": clock.epoch, "start": clock.start}

    def configure(self, account: str, **changes: Any) -> None:
        """Set ``faults`` (all of them), ``most``, ``launch_seconds`` or ``drain_seconds``."""
        found = self._world.account(account)
        for name, value in changes.items():
            if name == "faults":
                found.faults = Faults(**value)
            elif name == "most":
                found.most |= value
            elif name in ("launch_seconds", "drain_seconds"):
                setattr(found, name, value)
            else:
                raise ValueError(name)

    def forget(self, account: str) -> None:
        """Keep an account's groups at their size no longer: nobody uses them any more."""
        from moto.autoscaling.models import autoscaling_backends

        autoscaling_backends.pop(account, None)

    def kill(self, account: str, pid: int, after: int, executed: bool, action: str) -> None:
        """SIGKILL the process ``pid`` at the account's ``after``-th next call, before it or when it is executed."""
        self._world.account(account).kill = Kill(pid, after, executed, action)

    def spare(self, account: str) -> None:
        self._world.account(account).kill = None

    def warn(self, account: str, region: str, ids: list[str], seconds: float, end: bool) -> None:
        self._world.warn(account, region, ids, seconds, end)

    def rebalance(self, account: str, region: str, ids: list[str]) -> None:
        for instance_id in ids:
            self._world.note(account, "advised", instance=instance_id)
            self._world.instance_event(
                account, region, instance_id, "EC2 Instance Rebalance Recommendation", {}
            )

    def take(self, account: str, region: str, ids: list[str]) -> None:
        for instance_id in ids:
            self._world.take(account, region, instance_id)

    def mark_spot(self, account: str, region: str, ids: list[str]) -> None:
        for instance in self._world.instances(account, region):
            if instance.id in ids:
                instance.lifecycle = "spot"

    def state(self, account: str, region: str) -> dict[str, Any]:
        """Return all instances, the record, and errors of the emulator itself."""
        return {
            "now": self._world.clock.now(),
            "instances": [
                {
                    "id": i.id,
                    "state": i.state,
                    "alive": i.state in ALIVE,
                    "market": i.lifecycle or ON_DEMAND,
                    "type": i.instance_type,
                    "zone": i.placement.zone,
                    "tags": {tag["key"]: tag["value"] for tag in i.get_tags()},
                }
                for i in self._world.instances(account, region)
            ],
            "log": self._world.account(account).log,
            "errors": [*self._world.errors, *self._world.account(account).errors],
        }
