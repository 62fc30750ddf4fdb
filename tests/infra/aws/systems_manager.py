"""Systems Manager over HTTP, as far as commands go: the emulated AWS carries none out and lists none.

Requests and answers are held against botocore's own model of the service.
"""

import itertools
import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import botocore.session
from botocore.validate import ParamValidator

from ebbflow.infra.aws.clients import Clients

_TARGET = "AmazonSSM."


class SystemsManager:
    """A service whose nodes and scripts a test sets.

    ``online`` are the nodes that have registered. ``script(node, parameters)`` returns exit status and output of a
    document on a node, or ``None`` for one that never ends. ``spoil`` is called before each request with its
    operation, and after it, and may return an error's code: before, nothing is done; after, everything was.
    """

    def __init__(self) -> None:
        self.online: set[str] = set()
        self.script: Callable[[str, dict[str, list[str]]], tuple[int, str] | None] = lambda *_: (0, "")
        self.spoil: Callable[[str, str], str] = lambda *_: ""
        self.lasts = 0.0  # seconds that a command takes
        self.sent: list[dict[str, Any]] = []  # requests of SendCommand that were carried out
        self.asked: list[str] = []  # operations, spoilt ones too
        self.problems: list[str] = []  # what was not as the service's model has it
        self._invocations: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)
        self._lock = Lock()
        self._model = botocore.session.get_session().get_service_model("ssm")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                status, answer = outer.answer(self.headers["X-Amz-Target"].removeprefix(_TARGET), body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-amz-json-1.1")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, operation: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.asked.append(operation)
            shapes = self._model.operation_model(operation)
            self._check(f"{operation}'s request", body, shapes.input_shape)
            if code := self.spoil(operation, "before"):
                return self._error(code)
            method = {
                "SendCommand": self._send,
                "ListCommandInvocations": self._list,
                "DescribeInstanceInformation": self._describe,
            }[operation]
            status, answer = method(body)
            if status == 200:
                self._check(f"{operation}'s answer", answer, shapes.output_shape)
            if code := self.spoil(operation, "after"):
                return self._error(code)
            return status, answer

    def _check(self, what: str, value: dict[str, Any], shape: Any) -> None:
        found = ParamValidator().validate(value, shape)
        if found.has_errors():
            self.problems.append(f"{what}: {found.generate_report()}")

    def _error(self, code: str) -> tuple[int, dict[str, Any]]:
        status = 500 if code == "InternalServerError" else 400
        return status, {"__type": code, "message": f"{code} was asked for"}

    def _send(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not set(body["InstanceIds"]) <= self.online or len(body["InstanceIds"]) > 50:
            return self._error("InvalidInstanceId")
        command = f"{next(self._numbers):08}-0000-4000-8000-000000000000"
        self.sent.append(body)
        for node in body["InstanceIds"]:
            self._invocations.append(
                {
                    "CommandId": command,
                    "InstanceId": node,
                    "Comment": body.get("Comment", ""),
                    "DocumentName": body["DocumentName"],
                    "RequestedDateTime": time.time(),
                    "ends": time.time() + self.lasts,
                    "came": self.script(node, body["Parameters"]),
                }
            )
        return 200, {
            "Command": {"CommandId": command, "DocumentName": body["DocumentName"], "Status": "Pending"}
        }

    def _list(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        filters = {one["key"]: one["value"] for one in body.get("Filters", [])}
        found = [
            one
            for one in reversed(self._invocations)
            if body.get("CommandId") in (None, one["CommandId"])
            and body.get("InstanceId") in (None, one["InstanceId"])
            and filters.get("DocumentName") in (None, one["DocumentName"])
        ]
        start = int(body.get("NextToken", "0"))
        page = found[start : start + 3]  # pages are small here, so that all of them must be asked for
        more = {"NextToken": str(start + 3)} if start + 3 < len(found) else {}
        return 200, {"CommandInvocations": [_shown(one) for one in page], **more}

    def _describe(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        (wanted,) = (one["Values"] for one in body["Filters"] if one["Key"] == "InstanceIds")
        known = [{"InstanceId": node, "PingStatus": "Online"} for node in wanted if node in self.online]
        lost = [
            {"InstanceId": node, "PingStatus": "ConnectionLost"} for node in wanted if node.endswith("lost")
        ]
        return 200, {"InstanceInformationList": known + lost}


def _shown(one: dict[str, Any]) -> dict[str, Any]:
    kept = ("CommandId", "InstanceId", "Comment", "DocumentName", "RequestedDateTime")
    shown = {name: one[name] for name in kept}
    if one["came"] is None or time.time() < one["ends"]:
        step = {"Name": "aws:runShellScript", "Status": "InProgress", "ResponseCode": -1, "Output": ""}
        return {**shown, "Status": "InProgress", "StatusDetails": "InProgress", "CommandPlugins": [step]}
    code, output = one["came"]
    status = "Success" if code == 0 else "Failed"
    step = {"Name": "aws:runShellScript", "Status": status, "ResponseCode": code, "Output": output[:2500]}
    return {**shown, "Status": status, "StatusDetails": status, "CommandPlugins": [step]}


class Split:
    """Clients of which those of Systems Manager go elsewhere."""

    def __init__(self, region: str, url: str, ssm_url: str) -> None:
        self._all, self._ssm = Clients(region, url), Clients(region, ssm_url)

    def client(self, service: str, region: str | None = None, *, attempts: int | None = None) -> Any:
        return (self._ssm if service == "ssm" else self._all).client(service, region, attempts=attempts)
