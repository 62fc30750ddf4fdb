"""An aggregator as a process: ``python -m ebbflow.infra.aggregation.process NAME [HOST [PORT [THREADS [LINGER]]]]``.

Its parent controls it over standard input and output, one JSON object a line, so that no other process can: it first
writes where it listens and its public key, then an answer to each command. It ends with its input, that is, with its
parent, or LINGER seconds later, in which workers can save what it has.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from ebbflow.infra.aggregation.aggregator import Aggregator
from ebbflow.infra.aggregation.frames import AggregatorAddress
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.machine.memory_segments import allow_open_segments

_MAX_LINE = 1 << 20  # bytes of a command
_END = '{"do": "end"}'


def run_command(aggregator: Aggregator, line: str) -> dict[str, Any]:
    """Carry out a command and return its answer: ``{"done": ...}`` or ``{"error": ...}``.

    Args:
        aggregator: that it is for.
        line: a JSON object with ``do``: ``admit`` (``job``, ``workers``: public key of each), ``dismiss`` (``job``,
            ``worker``), ``remove`` (``job``), ``status``, or ``held``.
    """
    try:
        command = json.loads(line)
        match command:
            case {"do": "admit", "job": str(job), "workers": dict(workers)} if all(
                isinstance(one, str) for one in workers.values()
            ):
                aggregator.admit(job, workers)
            case {"do": "dismiss", "job": str(job), "worker": str(worker)}:
                aggregator.dismiss(job, worker)
            case {"do": "remove", "job": str(job)}:
                aggregator.remove(job)
            case {"do": "status"}:
                return {"done": "status", **aggregator.status()}
            case {"do": "held"}:
                return {"done": "held", "record": _record(aggregator)}
            case _:
                return {"error": "a command must be admit, dismiss, remove, status or held with its fields"}
    except (ValueError, RecursionError):
        return {"error": "a command must be a JSON object on one line"}
    except AggregationError as exc:
        return {"error": str(exc)}
    return {"done": command["do"]}


def _numbered(line: str) -> dict[str, Any]:
    """Return the number of a command that has one: its answer has it, too, however late it is read."""
    with contextlib.suppress(ValueError, RecursionError):
        command = json.loads(line)
        if isinstance(command, dict) and "id" in command:
            return {"id": command["id"]}
    return {}


def _record(aggregator: Aggregator) -> dict[str, Any]:
    """Return the plain values of an aggregator's ``AggregatorRecord``."""
    summaries = aggregator.summaries()
    held = {job: {name: asdict(one) for name, one in own.items()} for job, own in summaries.items()}
    return {
        "address": aggregator.address, "public": aggregator.public, "peer": aggregator.peer, "held": held,
        "moved": aggregator.moved, "updates": aggregator.rounds, "ended": False,
    }  # fmt: skip


def serve(aggregator: Aggregator, commands: TextIO, answers: TextIO, linger_s: float = 0.0) -> None:
    """Announce an aggregator and carry out commands until there are no more; it is closed then.

    Args:
        aggregator: that listens.
        commands: one on each line.
        answers: where the announcement and each command's answer are written.
        linger_s: seconds that it stays once there are no more, unless the last one was ``end``.
    """
    try:
        _write(answers, {"address": aggregator.address, "public": aggregator.public})
        while line := commands.readline(_MAX_LINE):
            if line.strip() == _END:
                return
            _write(answers, {**run_command(aggregator, line), **_numbered(line)})
        SystemClock().sleep(linger_s)
    except BrokenPipeError:
        pass  # the parent has ended
    finally:
        aggregator.close()


def _write(answers: TextIO, values: Mapping[str, Any]) -> None:
    answers.write(json.dumps(dict(values)) + "\n")
    answers.flush()


class AggregatorProcess:
    """Starts an aggregator's process and controls it. Used by one thread.

    Args:
        name: of the aggregator.
        host: address of the interface to listen on.
        port: number; 0: any free one.
        threads: that update tensors.
        linger_s: seconds that it stays when this process is gone without having closed it.
        timeout_s: seconds in which it must start, and answer each command.

    Raises ``AggregationError`` where it does not start.
    """

    def __init__(
        self,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        threads: int = 1,
        linger_s: float = 0.0,
        timeout_s: float = 60.0,
    ) -> None:
        self._name, self._timeout = name, timeout_s
        self._rest = b""
        self._unsent = bytearray()  # of commands
        self._sent = 0  # commands
        arguments = [
            sys.executable,
            "-P",
            "-m",
            "ebbflow.infra.aggregation.process",
            name,
            host,
            str(port),
            str(threads),
            str(linger_s),
        ]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            begun = self._answer(None, time.monotonic() + timeout_s, timeout_s)
            self.where = AggregatorAddress(str(begun["address"]), str(begun["public"]))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Return its process ID."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Tell whether its process is gone."""
        return self._process.poll() is not None

    def command(self, timeout_s: float | None = None, /, **values: Any) -> dict[str, Any]:
        """Send a command and return its answer; those to earlier ones that came too late are passed over.

        Args:
            timeout_s: seconds in which it must have read the command and answer; ``None``: those of this process.
            values: of the command.

        Raises ``AggregationError`` where it is refused or the process does not answer in time.
        """
        self._sent += 1
        line = json.dumps({**values, "id": self._sent}).encode() + b"\n"
        if len(line) > _MAX_LINE:
            raise AggregationError(f"a command must be at most {_MAX_LINE} bytes; got {len(line)}")
        within = self._timeout if timeout_s is None else timeout_s
        end = time.monotonic() + within
        self._unsent += line
        self._send(end, within)
        answer = self._answer(self._sent, end, within)
        answer.pop("id")
        if "error" in answer:
            raise AggregationError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the process. May be called twice."""
        if self._process.stdin is not None:
            if self._unsent:  # it reads no more
                self._process.kill()
            with contextlib.suppress(OSError, ValueError):
                os.write(self._process.stdin.fileno(), f"{_END}\n".encode())
            self._process.stdin.close()
        try:
            self._process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _send(self, end: float, timeout_s: float) -> None:
        """Write what is unsent; what is left at the ``end`` goes before the next command."""
        assert self._process.stdin is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdin, selectors.EVENT_WRITE)
            while self._unsent:
                if not ready.select(max(end - time.monotonic(), 0)):
                    raise AggregationError(
                        f"aggregator {self._name} must read a command within {timeout_s:g} s, and did not"
                    )
                try:
                    del self._unsent[: os.write(self._process.stdin.fileno(), self._unsent)]
                except OSError as exc:
                    raise AggregationError(f"aggregator {self._name} has ended") from exc

    def _answer(self, number: int | None, end: float, timeout_s: float) -> dict[str, Any]:
        while (found := self._line(end, timeout_s)).get("id") != number:
            pass
        return found

    def _line(self, end: float, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not ready.select(max(end - time.monotonic(), 0)):
                    raise AggregationError(
                        f"aggregator {self._name} must answer within {timeout_s:g} s, and did not"
                    )
                got = os.read(self._process.stdout.fileno(), 1 << 16)
                if not got:
                    raise AggregationError(f"aggregator {self._name} has ended")
                self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


def main() -> None:
    """Run an aggregator until standard input ends."""
    if not 2 <= len(sys.argv) <= 6:
        said = "usage: python -m ebbflow.infra.aggregation.process NAME [HOST [PORT [THREADS [LINGER]]]]"
        raise SystemExit(said)
    name, host, port, threads, linger = [
        *sys.argv[1:],
        *("", "127.0.0.1", "0", "1", "0")[len(sys.argv) - 1 :],
    ]
    allow_open_segments()
    try:
        linger_s = float(linger)
        aggregator = Aggregator(name, host, int(port), threads=int(threads))
    except (AggregationError, ValueError) as exc:
        raise SystemExit(f"aggregator {name}: {exc}") from exc
    serve(aggregator, sys.stdin, sys.stdout, linger_s)


if __name__ == "__main__":
    main()
