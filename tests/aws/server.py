"""moto's server with what it lacks (``groups``, ``moto_patches``) and a layer of faults in front of it.

    python -m tests.aws.server --port PORT [--speed N] [--seed N]

Every access key of the form ``AKIA<account>EBBF`` is an account of its own, so that tests share a server and nothing
else. ``/ebbflow-api/`` is for tests: see ``control``.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

os.environ.setdefault(
    "MOTO_EC2_LOAD_DEFAULT_AMIS", "false"
)  # four seconds per account, and no test needs them

from tests.aws import faults
from tests.aws.clock import ScaledClock
from tests.aws.control import Control
from tests.aws.faults import Answer
from tests.aws.groups import Groups
from tests.aws.moto_patches import install
from tests.aws.world import Account, Kill, World, moto_time

CONTROL = "/ebbflow-api/"
FAULTY = ("ec2", "autoscaling", "sqs", "events", "ssm")  # services whose calls may go wrong
WITH_TOKENS = ("CreateFleet", "RunInstances")  # calls that a client token makes idempotent
_CREDENTIAL = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/")
_KEY = re.compile(r"AKIA(\d{12})EBBF")
_STEP = 0.01  # seconds of the wall between looks for messages
_SETTLE = 0.1  # ... between attempts to grow groups that are too small


class Broken(ConnectionAbortedError):
    """Ends a request without an answer."""


class Front:
    """The WSGI application: faults, accounts and tokens, then moto."""

    def __init__(self, inner: Callable[..., Iterable[bytes]], world: World) -> None:
        self._inner = inner
        self._world = world
        self._control = Control(world)
        self._objects = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path.startswith(CONTROL):
            with self._world.lock:
                answer = self._control(path.removeprefix(CONTROL), json.loads(_body(environ) or b"{}"))
            return _send((*answer[:2], answer[2]), start)
        found = _CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
        service = found.group(3) if found else ""
        if found and (key := _KEY.fullmatch(found.group(1))):
            environ["HTTP_X_MOTO_ACCOUNT_ID"] = key.group(1)
        if service not in FAULTY:
            if path == "/moto-api/reset":
                with (
                    self._world.lock
                ):  # moto's backends lose their attributes for a moment, which a step would miss
                    self._world.reset()
                    return list(self._inner(environ, start))
            if service == "s3" and environ.get("CONTENT_LENGTH"):
                environ["wsgi.input"] = io.BytesIO(_body(environ))
            if service == "s3":  # moto compares a condition and replaces an object in more than one step
                with self._objects:
                    return list(self._inner(environ, start))
            return self._inner(environ, start)
        assert found is not None
        try:
            call = _Call(service, found.group(2), _account(environ, found.group(1)), _body(environ), environ)
            return _send(self._answer(call), start)
        except Broken:
            _break(environ)
            raise

    def _answer(self, call: "_Call") -> Answer:
        with self._world.lock:
            account = self._world.account(call.account)
            fault = account.faults.draw(account.rng)
            delay = account.rng.random() * account.faults.delay
            kill = self._kill(account, call.action)
            account.log.append(
                {"at": self._world.clock.now(), "kind": "call", "call": call.action, "fault": fault}
            )
        if kill is not None and not kill.executed:
            _end(kill)
        if fault == "delayed":
            time.sleep(delay)
        elif fault == "throttled":
            return faults.throttled(call.service)
        elif fault == "failed":
            return faults.failed(call.service)
        elif fault == "dropped-before":
            raise Broken
        answer = self._receive(call) if call.action == "ReceiveMessage" else self._execute(call)
        if kill is not None:
            _end(kill)
        if fault == "dropped-after":
            raise Broken
        return answer

    def _kill(self, account: Account, action: str) -> Kill | None:
        if account.kill is None or not action.startswith(account.kill.action):
            return None
        account.kill.after -= 1
        if account.kill.after > 0:
            return None
        kill, account.kill = account.kill, None
        return kill

    def _execute(self, call: "_Call") -> Answer:
        with self._world.lock, self._world.because(call.action):
            token = call.form.get("ClientToken", [""])[0] if call.action in WITH_TOKENS else ""
            if not token:
                return self._moto(call, call.body)
            done = self._world.account(call.account).tokens
            asked = {k: v for k, v in call.form.items() if k != "ClientToken"}
            if (known := done.get((call.action, token))) is not None:
                if json.loads(known[0]) != asked:
                    return faults.error(
                        call.service,
                        "IdempotentParameterMismatch",
                        "The token was used with other parameters",
                    )
                return known[1]
            answer = self._moto(call, call.body)
            if answer[0].startswith("200"):
                done[call.action, token] = (json.dumps(asked), answer)
            return answer

    def _receive(self, call: "_Call") -> Answer:
        """Long polling as the clock counts it; a client that is gone takes no message."""
        from moto.sqs.models import sqs_backends

        asked = json.loads(call.body)
        name = asked.get("QueueUrl", "").rsplit("/", 1)[-1]
        with self._world.lock:
            queue = sqs_backends[call.account][call.region].queues.get(name)
        wait = asked.get("WaitTimeSeconds")
        if wait is None and queue is not None:
            wait = queue.receive_message_wait_time_seconds
        until = self._world.clock.now() + float(wait or 0)
        asked["WaitTimeSeconds"] = 0
        while True:
            with self._world.lock:
                if queue is None or queue.messages or self._world.clock.now() >= until:
                    if _gone(call.environ):
                        raise Broken
                    return self._disturbed(call, queue, self._moto(call, json.dumps(asked).encode()))
            time.sleep(_STEP)
            if _gone(call.environ):
                raise Broken

    def _disturbed(self, call: "_Call", queue: Any, answer: Answer) -> Answer:
        """Return messages in another order, and let some be delivered again at once."""
        account = self._world.account(call.account)
        status, headers, body = answer
        if queue is None or not status.startswith("200"):
            return answer
        content = json.loads(body)
        messages = content.get("Messages", [])
        for message in messages:
            if account.rng.random() < account.faults.again:
                for kept in queue._messages:
                    if kept.id == message["MessageId"]:
                        kept.visible_at = 0.0
        if account.faults.shuffled:
            account.rng.shuffle(messages)
        return status, headers, json.dumps(content).encode()

    def _moto(self, call: "_Call", body: bytes) -> Answer:
        caught: list[Any] = []

        def start(
            status: str, headers: list[tuple[str, str]], exc_info: Any = None
        ) -> Callable[[bytes], None]:
            caught[:] = [status, headers]
            return lambda _: None

        environ = call.environ | {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        content = self._inner(environ, start)
        try:
            text = b"".join(content)
        finally:
            if hasattr(content, "close"):
                content.close()
        status, headers = caught
        if not status.startswith(("2", "4")):
            errors = self._world.account(call.account).errors
            errors.append(f"{call.action}: {status}: {text[-2000:].decode(errors='replace')}")
        return status, headers, text


class _Call:
    """One call of a service's API."""

    def __init__(self, service: str, region: str, account: str, body: bytes, environ: dict[str, Any]) -> None:
        self.service = service
        self.region = region
        self.account = account
        self.body = body
        self.environ = environ
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        self.form = {} if target else parse_qs(body.decode(errors="replace"))
        self.action = target.rsplit(".", 1)[-1] or self.form.get("Action", [""])[0]


def _body(environ: dict[str, Any]) -> bytes:
    length = environ.get("CONTENT_LENGTH")
    body: bytes = environ["wsgi.input"].read(int(length)) if length else environ["wsgi.input"].read()
    return body


def _account(environ: dict[str, Any], key: str) -> str:
    if "HTTP_X_MOTO_ACCOUNT_ID" in environ:
        return str(environ["HTTP_X_MOTO_ACCOUNT_ID"])
    from moto.iam.models import get_account_id_from

    return str(get_account_id_from(key))


def _send(answer: Answer, start: Callable[..., Any]) -> Iterable[bytes]:
    status, headers, body = answer
    kept = [(k, v) for k, v in headers if k.lower() not in ("content-length", "transfer-encoding")]
    start(status, [*kept, ("Content-Length", str(len(body)))])
    return [body]


def _gone(environ: dict[str, Any]) -> bool:
    """Tell whether the client has closed its connection."""
    connection = environ["werkzeug.socket"]
    try:
        readable, _, _ = select.select([connection], [], [], 0)
        return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


def _break(environ: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def _end(kill: Kill) -> None:
    try:
        os.kill(kill.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    raise Broken


def _patch_time(clock: ScaledClock) -> None:
    import moto.autoscaling.models
    import moto.ec2.models.fleets
    import moto.ec2.models.instances
    import moto.events.models
    import moto.sqs.models

    def seconds(when: Any = None) -> float:
        return clock.now()

    def milliseconds(when: Any = None) -> float:
        return clock.now() * 1000

    moto.sqs.models.unix_time = seconds
    moto.sqs.models.unix_time_millis = milliseconds
    moto.events.models.unix_time = seconds
    for module in (moto.ec2.models.instances, moto.ec2.models.fleets, moto.autoscaling.models):
        module.utcnow = lambda: moto_time(clock)  # type: ignore[attr-defined]


def _live(world: World, groups: Groups) -> None:
    settled, parent = 0.0, os.getppid()
    with world.lock:
        while True:
            world.changed.wait(min(_SETTLE, max(0.0, world.idle())))
            if os.getppid() != parent:
                os._exit(1)  # whoever wanted the server is gone
            world.step()
            if time.monotonic() - settled > _SETTLE:
                groups.step()
                settled = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ["MOTO_PORT"] = str(given.port)

    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import run_simple

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    world = World(ScaledClock(given.speed), given.seed)
    groups = Groups(world)
    install(groups)
    _patch_time(world.clock)
    threading.Thread(target=_live, args=(world, groups), daemon=True).start()
    inner = DomainDispatcherApplication(create_backend_app)
    run_simple(
        "127.0.0.1", given.port, Front(inner, world), threaded=True, request_handler=MotoRequestHandler
    )


if __name__ == "__main__":
    main()
