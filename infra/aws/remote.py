"""``RemoteRunner``: what is started on nodes, through Systems Manager and the documents of Terraform's ``commands``.

No port is opened for it and no key is handed out. AWS offers no token for ``SendCommand``, so the comment of a
command carries one: before a command is sent again, the node's commands are looked through for it. The documents
themselves change nothing when what they start runs already, so that even a command that AWS carries out twice starts
nothing twice.
"""

import base64
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from ebbflow.infra.aws.clients import Clients, calling
from ebbflow.infra.aws.fleet.instances import Instances
from ebbflow.infra.aws.naming import Document, Names
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import AwsError, AwsUnavailableError, NotOursError
from ebbflow.planners.errors import OptionError

REGISTER = 300.0
"""Seconds for a new node to be known to Systems Manager: its agent starts with the machine."""
TIMEOUT = 150.0
"""Seconds for a command: Terraform's ``commands`` lets a script take 120."""

_TARGETS = 50  # nodes of one command, AWS's limit
_FILTERED = 50  # nodes that one look asks for
_POLL = 1.0  # seconds before the first look at a command, and more from look to look
_MOST_LOOK = 5.0
_AGAIN = 2.0  # seconds until a command that was sent is sure to be listed
_SENDS = 4  # attempts to send a command whose answer was lost
_WINDOW = 3600.0  # seconds back in which a command of the same token is looked for
_DELIVERY = 30  # seconds that AWS asks for at least to deliver a command
_TAIL = 2000  # characters of output
_TOKEN = 80  # characters; a comment takes 100
_UNDER_WAY = ("Pending", "InProgress", "Delayed", "Cancelling")

Status = Literal["done", "failed", "late", "absent", "gone"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command on one node."""

    node: str
    status: Status
    # failed: its exit status was not 0, or it was not delivered; late: it may still come to its end
    # absent: Systems Manager does not know the node; gone: the instance does not run
    detail: str = ""  # AWS's word for it, or ours
    code: int | None = None  # exit status
    output: str = ""  # the last of what it wrote
    command: str = ""  # AWS's id
    earlier: bool = False  # an earlier call had sent it

    @property
    def ok(self) -> bool:
        return self.status == "done"

    def __str__(self) -> str:
        said = f"{self.node}: {self.status}" + (f", {self.detail}" if self.detail else "")
        return f"{said}: {self.output.strip().splitlines()[-1]}" if self.output.strip() else said


class RemoteRunner:
    """Runs the cluster's documents on its nodes, and on no others. Safe for several threads.

    Args:
        clients: of the cluster's account and region.
        names: of the cluster, whose tags a node must carry.
        documents: names of the documents, by what they do; by default those of ``names``.
        register: seconds for which a node that Systems Manager does not know yet is waited for.
    """

    def __init__(
        self,
        clients: Clients,
        names: Names,
        documents: Mapping[str, str] | None = None,
        *,
        register: float = REGISTER,
        clock: Clock | None = None,
    ) -> None:
        self._ssm = clients.client("ssm")
        self._once = clients.client("ssm", attempts=1)
        self._instances = Instances(clients, names)
        self._names, self._documents = names, documents
        self._register = register
        self._clock = clock or SystemClock()

    # --- what nodes do ------------------------------------------------------------------------------------

    def start_spark(self, nodes: Sequence[str], *, token: str = "") -> dict[str, Outcome]:
        """Start the Spark worker of each node; see ``run``."""
        return self.run("spark-worker", nodes, {"action": "start"}, token=token)

    def stop_spark(self, nodes: Sequence[str], *, token: str = "") -> dict[str, Outcome]:
        """Stop the Spark worker of each node; see ``run``."""
        return self.run("spark-worker", nodes, {"action": "stop"}, token=token)

    def spark_status(self, nodes: Sequence[str]) -> dict[str, Outcome]:
        """Ask each node for its Spark worker; ``output`` holds systemd's word, such as ``active``."""
        return self.run("spark-worker", nodes, {"action": "status"})

    def drain(self, nodes: Sequence[str], seconds: float, *, token: str = "") -> dict[str, Outcome]:
        """Let the nodes finish and leave within ``seconds``; see ``run``. Raises ``OptionError``."""
        if not 0 <= seconds < 100_000:
            raise OptionError(f"seconds must be >= 0 and below 100,000; got {seconds}")
        return self.run("drain", nodes, {"seconds": str(int(seconds))}, token=token)

    def start_torch(self, node: str, name: str, entry: str, *, token: str = "") -> Outcome:
        """Start a training's node process; ``entry`` is the JSON of its ``EBBFLOW_NODE_ENTRY``. See ``run``.

        The entry is in the command, which AWS logs: it holds no secret. The outcome's ``output`` holds the public key
        of the pair that the node has made (``infra.training.channel.keys.announced``).
        """
        encoded = base64.b64encode(entry.encode()).decode()
        parameters = {"action": "start", "name": name, "entry": encoded}
        return self.run("torch-node", [node], parameters, token=token)[node]

    def stop_torch(self, node: str, name: str, *, token: str = "") -> Outcome:
        """Stop a training's node process; see ``run``."""
        return self.run("torch-node", [node], {"action": "stop", "name": name}, token=token)[node]

    def torch_status(self, node: str, name: str) -> Outcome:
        """Ask for a training's node process; ``output`` holds systemd's word, such as ``active``."""
        return self.run("torch-node", [node], {"action": "status", "name": name})[node]

    # --- how ----------------------------------------------------------------------------------------------

    def run(
        self,
        document: Document,
        nodes: Iterable[str],
        parameters: Mapping[str, str],
        *,
        token: str = "",
        timeout: float = TIMEOUT,
        register: float | None = None,
    ) -> dict[str, Outcome]:
        """Run one document on nodes and return what became of it, by node.

        Takes ``timeout`` seconds at most, and before that up to ``register``, by default the runner's, for nodes that
        are starting. With a ``token`` of the caller's a call that is made again, also by another process within the
        hour, waits for what the first one has sent and sends nothing itself, unless that has failed.

        Raises ``NotOursError`` before anything is sent if one of the nodes lacks the cluster's tags, ``OptionError``
        for a token too long, and ``AwsError`` when AWS refuses or does not answer.
        """
        if len(token) > _TOKEN:
            raise OptionError(f"token must have {_TOKEN} characters at most; got {len(token)}")
        call = _Call(
            self._documents[document] if self._documents else self._names.document(document),
            {name: [value] for name, value in parameters.items()},
            f"ebbflow {token or uuid.uuid4().hex}",
            timeout,
            repeated=bool(token),
        )
        found: dict[str, Outcome] = {}
        waiting = sorted(set(nodes))
        patience = self._register if register is None else register
        end = self._clock.now() + patience
        while waiting:
            found |= {node: Outcome(node, "gone", why) for node, why in self._checked(waiting).items()}
            waiting = [node for node in waiting if node not in found]
            # those that are ready wait for nobody
            found |= self._dispatch(call, self._registered(waiting))
            waiting = [node for node in waiting if node not in found]
            if waiting and self._clock.now() >= end:
                why = f"not known to Systems Manager within {patience:g} s"
                found |= {node: Outcome(node, "absent", why) for node in waiting}
                break
            if waiting:
                self._clock.sleep(min(_MOST_LOOK, max(0.0, end - self._clock.now())))
        return self._await_end(found, self._clock.now() + timeout)

    def _dispatch(self, call: "_Call", nodes: Iterable[str]) -> dict[str, Outcome]:
        """Send the command to ``nodes``, but to those that have got it already."""
        ready = sorted(nodes)
        found = self._earlier(call, ready) if call.repeated else {}
        missing = [node for node in ready if node not in found]
        for first in range(0, len(missing), _TARGETS):
            found |= self._send(call, missing[first : first + _TARGETS])
        return found

    def _checked(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return why some of ``nodes`` do not run. Raises ``NotOursError``."""
        known = self._instances.named(nodes) if nodes else {}
        foreign = [node for node, instance in known.items() if not self._names.owns(instance.tags)]
        if foreign:
            raise NotOursError(
                f"no command is sent: {', '.join(sorted(foreign))} lacks the tags of the cluster "
                f"{self._names.cluster}"
            )
        gone = {node: "there is no such instance" for node in nodes if node not in known}
        gone |= {n: f"it is {i.state}" for n, i in known.items() if i.state not in ("pending", "running")}
        return gone

    def _registered(self, nodes: Sequence[str]) -> set[str]:
        found: set[str] = set()
        pages = self._ssm.get_paginator("describe_instance_information")
        for first in range(0, len(nodes), _FILTERED):
            some = list(nodes[first : first + _FILTERED])
            with calling("ask Systems Manager for nodes"):
                for page in pages.paginate(Filters=[{"Key": "InstanceIds", "Values": some}]):
                    found |= {
                        one["InstanceId"]
                        for one in page["InstanceInformationList"]
                        if one.get("PingStatus") == "Online"
                    }
        return found

    def _earlier(self, call: "_Call", nodes: Iterable[str]) -> dict[str, Outcome]:
        """Return what is under way or done on ``nodes`` by commands of the same token."""
        since = datetime.fromtimestamp(self._clock.now() - _WINDOW, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        filters = [{"key": "InvokedAfter", "value": since}, {"key": "DocumentName", "value": call.name}]
        found: dict[str, Outcome] = {}
        pages = self._ssm.get_paginator("list_command_invocations")
        for node in nodes:
            with calling(f"list the commands of {node}"):
                for page in pages.paginate(InstanceId=node, Filters=filters, Details=True):
                    for one in page["CommandInvocations"]:
                        outcome = replace(_outcome(one), earlier=True)
                        if one.get("Comment") == call.comment and outcome.status != "failed":
                            found[node] = outcome
        return found

    def _send(self, call: "_Call", nodes: Sequence[str]) -> dict[str, Outcome]:
        """Send the command once, however often the answer is lost."""
        for attempt in range(1, _SENDS + 1):
            try:
                with calling(f"send {call.name} to {len(nodes)} nodes"):
                    sent = self._once.send_command(
                        InstanceIds=list(nodes),
                        DocumentName=call.name,
                        Parameters=dict(call.parameters),
                        Comment=call.comment,
                        TimeoutSeconds=max(_DELIVERY, round(call.timeout)),
                    )["Command"]["CommandId"]
                return {node: Outcome(node, "late", "sent", command=sent) for node in nodes}
            except AwsUnavailableError:
                # AWS may have taken it: a look tells, once what was taken is sure to be listed
                self._clock.sleep(_AGAIN * attempt)
                found = self._earlier(call, nodes)
                if found or attempt == _SENDS:
                    if not found:
                        raise
                    rest = [node for node in nodes if node not in found]
                    return {n: replace(o, earlier=False) for n, o in found.items()} | {
                        node: Outcome(node, "failed", "the command left it out") for node in rest
                    }
            except AwsError as error:
                if error.code != "InvalidInstanceId":
                    raise
                if len(nodes) == 1:
                    return {
                        nodes[0]: Outcome(nodes[0], "absent", "Systems Manager does not know it any longer")
                    }
                # one of them has gone since: it must not keep the others from it
                return {n: o for node in nodes for n, o in self._send(call, [node]).items()}
        raise AssertionError("every attempt returns or raises")

    def _await_end(self, found: dict[str, Outcome], end: float) -> dict[str, Outcome]:
        """Wait for commands that are under way, until ``end``."""
        pause = _POLL
        while True:
            waiting = {outcome.command for outcome in found.values() if outcome.status == "late"}
            if not waiting or self._clock.now() >= end:
                return {node: found[node] for node in sorted(found)}
            self._clock.sleep(min(pause, max(0.0, end - self._clock.now())))
            pause = min(1.5 * pause, _MOST_LOOK)
            for command in sorted(waiting):
                for outcome in self._invocations(command):
                    known = found.get(outcome.node)
                    if known is not None and known.command == command:
                        found[outcome.node] = replace(outcome, earlier=known.earlier)

    def _invocations(self, command: str) -> list[Outcome]:
        pages = self._ssm.get_paginator("list_command_invocations")
        try:
            with calling(f"poll the command {command}"):
                return [
                    _outcome(one)
                    for page in pages.paginate(CommandId=command, Details=True)
                    for one in page["CommandInvocations"]
                ]
        except AwsUnavailableError:
            return []  # looked at again until the call's end


@dataclass(frozen=True, slots=True)
class _Call:
    """One command, whatever nodes it goes to."""

    name: str  # of the document
    parameters: Mapping[str, list[str]]
    comment: str
    timeout: float  # seconds
    repeated: bool  # an earlier call may have sent it


def _outcome(one: Mapping[str, Any]) -> Outcome:
    """Return what an item of ``ListCommandInvocations`` says."""
    state = one["Status"]
    status: Status = "done" if state == "Success" else "late" if state in _UNDER_WAY else "failed"
    steps = one.get("CommandPlugins") or [{}]
    code = steps[-1].get("ResponseCode")
    return Outcome(
        one["InstanceId"],
        status,
        "" if status == "done" else one.get("StatusDetails") or state,
        int(code) if code is not None and status != "late" and code >= 0 else None,
        (steps[-1].get("Output") or "")[-_TAIL:],
        one["CommandId"],
    )
