"""What a node does before it imports anything for a training: unpack the code, build its environment, run its setup.

The node has connected already, so its launcher hears that it lives and what went wrong. What it needs of the user's
variables comes by the encrypted channel. When all is there, the node becomes (``exec``) an ordinary node of the
environment's interpreter, in the working directory.
"""

import gzip
import hashlib
import io
import os
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import psutil

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import LauncherLostError, TrainingError
from ebbflow.infra.protocols.trainings import PACKED
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.channel.client import MessageClient
from ebbflow.infra.training.channel.node_line import NodeLine
from ebbflow.infra.training.channel.wire import ENTRY, Entry, Heartbeat, Order, to_json
from ebbflow.infra.training.workspace import package
from ebbflow.infra.training.workspace.building import build_once, run_command
from ebbflow.infra.training.workspace.environment import environment_for, python_of
from ebbflow.planners.errors import EbbflowError

DIRECTORY = "EBBFLOW_WORKDIR"
"""In the environment of a node's processes: the directory that the user's code was unpacked into."""
_POLL = 0.1  # seconds
_FIRST = -(
    10**9
)  # number of the first sign of life: those of the node that this process becomes begin with 1
_LONGEST = 4_000  # characters of a problem that are told


@dataclass(frozen=True)
class Prepared:
    """What a node needs to run a training's code."""

    directory: Path | None  # of the code; ``None``: there is no working directory
    environment: Path | None  # of Python; ``None``: the node's own


def prepare(folder: str, run: str, cache: Path, clock: Clock, secrets: Sequence[str] = ()) -> Prepared:
    """Return the code and the environment of a run, made unless they are there.

    Args:
        folder: the ``code`` directory of the run, or of the tuning run that it is a trial of, a path or URI.
        run: its ID: two runs of the same code do not share a directory, in which they may write.
        cache: directory of this machine for all of it.
        clock: the time.
        secrets: values that must not be shown.

    Raises ``TrainingError`` with the last lines of what failed, or ``StorageError``.
    """
    found = package.get(folder)
    # the setup command may write into the directory, by means of the environment
    parts = "\0".join((folder, found.digest, found.requirements, found.setup, sys.prefix))
    key = hashlib.sha256(parts.encode()).hexdigest()[:32]
    environments: list[Path] = []

    def environment(directory: Path) -> Path | None:
        if found.requirements and not environments:
            environments.append(
                environment_for(
                    found.requirements,
                    directory,
                    found.digest,
                    cache / "environments",
                    clock,
                    file=found.requirements_file,
                    secrets=secrets,
                )
            )
        return environments[0] if environments else None

    def build(target: Path) -> None:
        if found.digest:
            _unpack(folder, found, target)
        python = environment(target)
        if found.setup:
            run_command(
                ["/bin/sh", "-ec", found.setup], "the setup command", target, _within(python), secrets
            )

    directory = build_once(cache / "code" / run, key, build, clock)
    return Prepared(directory if found.digest else None, environment(directory))


def _unpack(folder: str, found: package.CodePackage, target: Path) -> None:
    place = StorageLocation(folder)
    with translated(f"read {place.under(found.archive)}"):
        packed = place.read(found.archive, fixed=True)
    try:
        data = gzip.decompress(packed)
    except (OSError, EOFError) as error:
        raise TrainingError(f"{place.under(found.archive)} is damaged: {error}") from error
    if hashlib.sha256(data).hexdigest() != found.digest:
        raise TrainingError(f"{place.under(found.archive)} is damaged: its SHA-256 is another")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(target, filter="data")


def _within(environment: Path | None) -> dict[str, str]:
    """Return the variables of a process that an environment is active for."""
    if environment is None:
        return dict(os.environ)
    path = f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": str(environment)}


def located(script: str, environment: Mapping[str, str]) -> str:
    """Return the path of a script, which may be one of the code that this node has unpacked."""
    if not script.startswith(PACKED):
        return script
    return str(Path(environment[DIRECTORY]) / script.removeprefix(PACKED))


# --- the node's part ----------------------------------------------------------------------------------------------


def become_prepared(entry: Entry, line: NodeLine, client: MessageClient, module: str) -> NoReturn:
    """Prepare what the launcher orders, then become ``module`` of the environment's interpreter; does not return.

    Where it fails the launcher is told, and ends this node.
    """
    order = _await_order(line)
    os.environ.update(order.environment)
    secrets = [order.environment[name] for name in order.secrets]
    made: list[Prepared] = []
    problems: list[str] = []

    def work() -> None:
        try:
            cache = Path(entry.cache) if entry.cache else home()
            made.append(prepare(order.code, entry.run, cache, SystemClock(), secrets))
        except EbbflowError as error:
            problems.append(str(error))
        except Exception as error:  # told, so that the run ends with it
            problems.append(f"{type(error).__name__}: {error}")

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        beats = _FIRST
        while worker.is_alive() or problems:
            beats += 1
            problem = "" if not problems else problems[0][-_LONGEST:]
            line.show(Heartbeat(beats, 0, preparing=True, problem=problem))
            end = time.monotonic() + entry.beat
            while time.monotonic() < end and (worker.is_alive() or problems):
                line.wait(_POLL)
    except LauncherLostError as error:
        for child in psutil.Process().children(recursive=True):
            child.kill()
        raise SystemExit(str(error)) from error
    read = line.read
    client.close()
    _become(entry, made[0], module, read)


def _await_order(line: NodeLine) -> Order:
    line.show(Heartbeat(_FIRST, 0, preparing=True))
    while (order := line.next_order()) is None or order.do != "prepare":
        line.wait(_POLL)
    return order


def _become(entry: Entry, made: Prepared, module: str, read: int) -> NoReturn:
    os.environ.update(_within(made.environment))
    os.environ[ENTRY] = to_json(replace(entry, prepare=False, read=read, devices=()))
    if made.directory is not None:
        os.environ[DIRECTORY] = str(made.directory)
        os.chdir(made.directory)
    python = str(python_of(made.environment)) if made.environment else sys.executable
    sys.stdout.flush()
    sys.stderr.flush()
    # no shell and nothing of the user's: the interpreter that was built, and our own module
    os.execv(python, [python, "-P", "-m", module])  # noqa: S606
