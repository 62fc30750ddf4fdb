"""The agent on a node that can be taken away: it looks for notices and drains the node.

    python -m ebbflow.infra.aws.node_agent [--rebalance note|drain] [--seconds N]
    python -m ebbflow.infra.aws.node_agent --drain SECONDS   (and says whether the node is idle)

A systemd unit runs the first form as root. It asks the instance's metadata service (version 2) every second:

- *spot/instance-action*: AWS takes the node away at a stated time, two minutes ahead.
- *target-lifecycle-state* ``Terminated``: its Auto Scaling group ends the node. The group waits until the agent tells
  it that the node is drained, or for ``--seconds``.
- *recommendations/rebalance*: an interruption is likelier than usual. Few of them become one, so the agent takes note
  and drains only with ``--rebalance drain``.

Draining decommissions the Spark worker (SIGPWR: it takes no new tasks and hands its blocks over), has clients leave
memory that the node lends, and tensors its aggregator (SIGTERM), and tells node processes of trainings (the deadline
in a file, then SIGTERM) that they will be gone. Then the agent says on the event bus that the node leaves: no warning
of AWS is sure to arrive there, and the capacity loop must hear of it.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

import httpx
import psutil

from ebbflow.infra.aws.agent_metrics import AgentMetrics, serving_agent
from ebbflow.infra.aws.naming import DRAIN_HOOK, NODE_LEAVING, Names
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.storage.files import write_atomic

METADATA = "http://169.254.169.254"
DRAINING = Path("/run/ebbflow/draining")
"""Exists from the first notice on; holds the deadline, seconds since the Unix epoch. Nothing is started after it."""
METRICS = "EBBFLOW_AGENT_METRICS"  # HOST:PORT of /metrics and /healthz; without it they are not served
_SPARK = "ebbflow-spark-worker.service"
_LENT = ("ebbflow-memory.service", "ebbflow-aggregator.service")  # they end once others have what they hold
_TORCH = "ebbflow-torch-node@*.service"
_ENTRY = "EBBFLOW_NODE_ENTRY"  # as infra/training/channel/wire.py, which needs torch, has it
_POLL = 1.0  # seconds between looks
_TOKEN = 21600  # seconds for which a token of the metadata service is asked
_TRIES = 4  # of asking which instance this is
_TIMEOUT = 30.0  # seconds for one systemctl
_AHEAD = 5.0  # seconds by which a deadline must move for work to be told again

log = logging.getLogger("ebbflow.agent")


@dataclass(frozen=True, slots=True)
class NodeDeparture:
    """The node will be gone at ``deadline``, seconds since the Unix epoch."""

    deadline: float
    why: str
    group_waits: bool = False  # its group waits until it is told


class Node(Protocol):
    """What the agent does to its node."""

    def drain(self, leaving: NodeDeparture) -> None:
        """Tell everything that runs here."""
        ...

    def report(self, leaving: NodeDeparture) -> bool:
        """Tell the capacity loop; False where that must be tried again."""
        ...

    def idle(self) -> bool:
        """Tell whether nothing is left that work would be lost with."""
        ...

    def notify_group(self) -> None:
        """Let the Auto Scaling group continue."""
        ...


class Metadata:
    """The instance metadata service, version 2."""

    def __init__(self, client: httpx.Client | None = None) -> None:
        self._client = client or httpx.Client(base_url=METADATA, timeout=2.0)
        self._token = ""

    def get(self, path: str) -> str | None:
        """Return what ``path`` holds; None where there is no such thing, or the service does not answer."""
        try:
            for _ in range(2):
                self._token = self._token or self._new_token()
                answer = self._client.get(
                    f"/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": self._token}
                )
                if answer.status_code != httpx.codes.UNAUTHORIZED:
                    break
                self._token = ""  # it has run out
            if answer.status_code == httpx.codes.OK:
                return answer.text
            if answer.status_code != httpx.codes.NOT_FOUND:
                log.warning("the metadata service answers %s to %s", answer.status_code, path)
        except httpx.HTTPError as error:
            log.warning("the metadata service does not answer to %s: %s", path, error)
        return None

    def _new_token(self) -> str:
        answer = self._client.put(
            "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN)}
        )
        return answer.raise_for_status().text


def instance_arn(metadata: Metadata, region: str) -> str:
    """Return the ARN of this instance, which is what its role lets it speak for; empty where it cannot be told."""
    instance, role = metadata.get("instance-id"), metadata.get("iam/info")
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        _, partition, _, _, account, *_ = json.loads(role or "")["InstanceProfileArn"].split(":")
        if instance:
            return f"arn:{partition}:ec2:{region}:{account}:instance/{instance}"
    log.warning("the metadata service does not tell which instance this is: %r of %r", instance, role)
    return ""


def look(metadata: Metadata, now: float, rebalance: str, seconds: float) -> NodeDeparture | None:
    """Return why and when this node will be gone, or None; the firmest reason first.

    ``now`` is in seconds since the Unix epoch; ``seconds`` is what a group or a recommendation leaves.
    """
    if (action := metadata.get("spot/instance-action")) is not None:
        return NodeDeparture(_deadline(action, "time", now), "spot interruption")
    if metadata.get("autoscaling/target-lifecycle-state") == "Terminated":
        return NodeDeparture(now + seconds, "its group terminates it", group_waits=True)
    if (advice := metadata.get("events/recommendations/rebalance")) is not None:
        if rebalance == "drain":
            return NodeDeparture(_deadline(advice, "noticeTime", now) + seconds, "rebalance recommendation")
        log.info("rebalance recommendation: %s", advice)
    return None


def _deadline(text: str, key: str, now: float) -> float:
    """Return the time that a notice states, or ``now`` where none can be read: better too early than too late."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        return datetime.fromisoformat(json.loads(text)[key]).timestamp()
    log.warning("a notice without a time: %r", text)
    return now


class Agent:
    """Looks and drains until the node is gone."""

    def __init__(
        self,
        metadata: Metadata,
        node: Node,
        rebalance: str = "note",
        seconds: float = 120.0,
        clock: Clock | None = None,
    ) -> None:
        self._metadata = metadata
        self._node = node
        self._rebalance = rebalance
        self._seconds = seconds
        self._now = (clock or SystemClock()).now
        self.leaving: NodeDeparture | None = None
        self._reported = False
        self._group_notified = False

    def step(self) -> None:
        """Look once, and do what follows from it."""
        now = self._now()
        found = look(self._metadata, now, self._rebalance, self._seconds)
        if found is not None:
            self._take(found)
        leaving = self.leaving
        if leaving is None:
            return
        if not self._reported and now < leaving.deadline:
            self._reported = self._node.report(leaving)
        if not leaving.group_waits or self._group_notified:
            return
        if self._node.idle() or now >= leaving.deadline:
            self._node.notify_group()
            self._group_notified = True

    def _take(self, found: NodeDeparture) -> None:
        old = self.leaving
        if old is not None:
            # the group's deadline is counted from its first sight on
            waits = old.group_waits or found.group_waits
            if found.deadline > old.deadline - _AHEAD:
                self.leaving = NodeDeparture(old.deadline, old.why, waits)
                return
            found = NodeDeparture(found.deadline, found.why, waits)
        self.leaving, self._reported = found, False
        log.warning("%s: termination in %.0f s; draining", found.why, found.deadline - self._now())
        self._node.drain(found)


class SystemdNode:
    """The node as systemd runs it.

    ``group`` is its Auto Scaling group, ``cluster`` the cluster whose loop hears of it, each empty for none;
    ``arn`` is the instance's, ``endpoint_url`` is for an emulator.
    """

    def __init__(
        self,
        group: str = "",
        region: str = "",
        arn: str = "",
        draining: Path = DRAINING,
        cluster: str = "",
        endpoint_url: str | None = None,
    ) -> None:
        self._group, self._region, self._arn = group, region, arn
        self._instance = arn.rpartition("/")[2]
        self._cluster = cluster
        self._endpoint_url = endpoint_url
        self._draining = draining
        self._spark_notified = False

    def drain(self, leaving: NodeDeparture) -> None:
        """See ``Node``. What cannot be told is logged, so that it keeps nothing else from being told."""
        try:
            self._draining.parent.mkdir(parents=True, exist_ok=True)
            # scripts of another user than root look at it
            write_atomic(None, "file", str(self._draining), repr(leaving.deadline).encode(), public=True)
        except OSError as error:
            log.error("%s cannot be written: %s", self._draining, error)
        if not self._spark_notified and (pid := self._main_pid(_SPARK)):
            self._spark_notified = self._signal(pid, signal.SIGPWR)  # a second one would only be logged
        for pid in filter(None, map(self._main_pid, _LENT)):
            self._signal(pid, signal.SIGTERM)
        for unit in self._units(_TORCH):
            if not (pid := self._main_pid(unit)):
                continue
            try:
                folder = Path(_entry_folder(pid))
                # the node process reads it, as another user than root
                write_atomic(
                    None, "file", str(folder / "notice"), repr(leaving.deadline).encode(), public=True
                )
            except (OSError, ValueError, KeyError) as error:
                log.error("the deadline cannot be sent to %s: %s", unit, error)
            self._signal(pid, signal.SIGTERM)

    def is_draining(self, deadline: float) -> bool:
        """Tell whether it drains already, for a deadline that is not much later than this one."""
        try:
            return float(self._draining.read_text()) <= deadline + _AHEAD
        except (OSError, ValueError):
            return False

    def report(self, leaving: NodeDeparture) -> bool:
        """See ``Node``. One short attempt: the agent looks again a second later."""
        if not (self._cluster and self._arn):
            return True
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        limits = Config(connect_timeout=2, read_timeout=3, retries={"total_max_attempts": 1})
        detail = {"instance-id": self._instance, "deadline": leaving.deadline, "reason": leaving.why}
        event = {
            "Source": Names(self._cluster).event_source(self._arn),
            "DetailType": NODE_LEAVING,
            "Detail": json.dumps(detail),
        }
        try:
            # a session of its own: the one that boto3 shares keeps the first credentials that it ever found
            bus = boto3.session.Session().client(
                "events", region_name=self._region, endpoint_url=self._endpoint_url, config=limits
            )
            refused = bus.put_events(Entries=[event])["FailedEntryCount"]
        except (BotoCoreError, ClientError) as error:
            log.error("notifying the capacity loop failed: %s", error)
            return False
        if refused:
            log.error("notifying the capacity loop failed: the event bus rejected the event")
        return not refused

    def idle(self) -> bool:
        """See ``Node``: no executor below the Spark worker, no training's process, nothing that others have left."""
        pid = self._main_pid(_SPARK)
        with contextlib.suppress(psutil.Error):
            if pid and psutil.Process(pid).children():
                return False
        return not self._units(_TORCH) and not any(map(self._main_pid, _LENT))

    def notify_group(self) -> None:
        """See ``Node``. A failure is logged: the group continues by itself when its deadline has passed."""
        if not self._group:
            return
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        limits = Config(connect_timeout=5, read_timeout=10, retries={"mode": "standard", "max_attempts": 4})
        try:
            group = boto3.session.Session().client("autoscaling", region_name=self._region, config=limits)
            group.complete_lifecycle_action(
                LifecycleHookName=DRAIN_HOOK,
                AutoScalingGroupName=self._group,
                LifecycleActionResult="CONTINUE",
                InstanceId=self._instance,
            )
        except (BotoCoreError, ClientError) as error:
            log.error("notifying the group %s failed: %s", self._group, error)

    def _units(self, pattern: str) -> list[str]:
        text = _systemctl(
            "list-units", "--plain", "--no-legend", "--state=active,activating,deactivating", pattern
        )
        return [line.split()[0] for line in text.splitlines() if line.split()]

    def _main_pid(self, unit: str) -> int:
        text = _systemctl("show", "--property=MainPID", "--value", unit).strip()
        return int(text) if text.isdigit() else 0

    def _signal(self, pid: int, number: signal.Signals) -> bool:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        log.info("%s to process %s", number.name, pid)
        return True


def _systemctl(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["systemctl", *arguments], capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("systemctl %s: %s", arguments[0], error)
        return ""
    return done.stdout


def _entry_folder(pid: int) -> str:
    """Return the scratch directory of a training's node process. Raises ``OSError``, ``ValueError``, ``KeyError``."""
    for field in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = field.partition(b"=")
        if name.decode() == _ENTRY:
            return str(json.loads(value)["folder"])
    raise KeyError(_ENTRY)


def drain_now(node: SystemdNode, deadline: float) -> None:
    """Drain unless that was done already, and print ``idle`` or ``busy``: asked again, it only looks."""
    if not node.is_draining(deadline):
        node.drain(NodeDeparture(deadline, "asked for"))
    print("idle" if node.idle() else "busy")


def main(arguments: Sequence[str] | None = None, clock: Clock | None = None) -> None:
    """Run the agent, or drain at once."""
    parser = argparse.ArgumentParser(prog="ebbflow-agent", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rebalance", choices=("note", "drain"), default="note")
    parser.add_argument("--seconds", type=float, default=120.0, help="for which the group waits")
    parser.add_argument("--metrics", default=os.environ.get(METRICS, ""), help="HOST:PORT of /metrics")
    parser.add_argument("--drain", type=float, metavar="SECONDS", help="drain now, to be gone within SECONDS")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every look
    clock = clock or SystemClock()
    if options.drain is not None:
        drain_now(SystemdNode(), clock.now() + options.drain)
        return
    metadata, arn, region = Metadata(), "", os.environ.get("EBBFLOW_REGION", "")
    for attempt in range(_TRIES):  # it may not answer yet while the machine comes up
        if arn := instance_arn(metadata, region):
            break
        clock.sleep(_POLL * attempt)
    node = SystemdNode(
        group=os.environ.get("EBBFLOW_GROUP", ""),
        region=region,
        arn=arn,
        cluster=os.environ.get("EBBFLOW_CLUSTER", ""),
    )
    agent = AgentMetrics(Agent(metadata, node, options.rebalance, options.seconds, clock), clock)
    with serving_agent(agent, options.metrics):
        while True:
            try:
                agent.step()
            except Exception:  # the next look may do better, and nobody else looks
                log.exception("polling failed")
            clock.sleep(_POLL)


if __name__ == "__main__":
    main()
