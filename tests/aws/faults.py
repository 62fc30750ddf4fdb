"""What can go wrong with a call, and how each service says so."""

import json
import random
from dataclasses import dataclass
from typing import Literal

Fault = Literal["throttled", "failed", "dropped-before", "dropped-after", "delayed"]


@dataclass(frozen=True)
class Faults:
    """Probabilities per call, message or event; all are independent of each other."""

    throttled: float = 0.0  # answered so without being executed
    failed: float = 0.0  # a 500, without being executed
    dropped_before: float = 0.0  # the connection breaks and nothing was executed
    dropped_after: float = 0.0  # the connection breaks although it was executed
    delayed: float = 0.0
    delay: float = 0.05  # seconds of the wall, at most
    twice: float = 0.0  # an event reaches the queue twice
    again: float = (
        0.0  # a received message is delivered again although its visibility timeout has not run out
    )
    shuffled: bool = False  # messages of one answer come in any order
    late: float = (
        0.0  # seconds by which an event reaches the queue at most too late, so that events change places
    )

    def draw(self, rng: random.Random) -> Fault | None:
        """Return what goes wrong with the next call."""
        kinds: list[tuple[Fault, float]] = [
            ("throttled", self.throttled),
            ("failed", self.failed),
            ("dropped-before", self.dropped_before),
            ("dropped-after", self.dropped_after),
            ("delayed", self.delayed),
        ]
        point = rng.random()
        for kind, share in kinds:
            if point < share:
                return kind
            point -= share
        return None


Answer = tuple[str, list[tuple[str, str]], bytes]

_THROTTLED = {"ec2": "RequestLimitExceeded", "autoscaling": "Throttling", "sqs": "RequestThrottled"}
_FAILED = {"ec2": "InternalError", "autoscaling": "InternalFailure"}


def throttled(service: str) -> Answer:
    """Return ``service``'s answer to a call that comes too soon after others."""
    code = _THROTTLED.get(service, "ThrottlingException")
    return error(
        service, code, "Rate exceeded", "503 Service Unavailable" if service == "ec2" else "400 Bad Request"
    )


def failed(service: str) -> Answer:
    """Return ``service``'s answer when it fails itself."""
    code = _FAILED.get(service, "InternalError")
    return error(service, code, "An internal error has occurred", "500 Internal Server Error")


def error(service: str, code: str, message: str, status: str = "400 Bad Request") -> Answer:
    """Return an error in the form that ``service`` gives it."""
    if service == "ec2":
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><Response><Errors><Error>'
            f"<Code>{code}</Code><Message>{message}</Message>"
            "</Error></Errors><RequestID>0</RequestID></Response>"
        )
        return status, [("Content-Type", "text/xml")], text.encode()
    if service in ("autoscaling", "iam", "sts"):
        text = (
            f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
            "<RequestId>0</RequestId></ErrorResponse>"
        )
        return status, [("Content-Type", "text/xml")], text.encode()
    headers = [("Content-Type", "application/x-amz-json-1.1")]
    if service == "sqs":
        headers.append(("x-amzn-query-error", f"{code};Sender"))
    return status, headers, json.dumps({"__type": code, "message": message}).encode()
