"""The process that passes a run's record on to one tracker, so that nothing of it is felt by the training.

``python -P -m ebbflow.infra.training.tracking.deliver``: JSON lines come in (first what is to be done, at last
``finish``) and go out (``id``, ``problem``, ``done``). It ends when its launcher does.
"""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ebbflow.infra.training.tracking.record import entry_of
from ebbflow.infra.training.tracking.targets import TrackTarget
from ebbflow.infra.training.tracking.trackers import Reached, Row, TrackedRun, Tracker

_LOOK = 1.0  # seconds between looks at the record
_FIRST, _LONGEST = 1.0, 60.0  # seconds of delay after an error, doubled with each
_ROWS = 500  # rows passed on at a time
_TIMEOUT = 10  # seconds of a request of MLflow, which is not repeated but by what is here
_SECRETS = re.compile(r"TOKEN|PASSWORD|SECRET|API_KEY|CREDENTIAL")

Tell = Callable[..., None]

log = logging.getLogger(__name__)


def tracker_of(target: TrackTarget) -> Tracker:
    """Return the tracker of a target; imports its package, which takes seconds."""
    if target.kind == "mlflow":
        from ebbflow.infra.training.tracking.mlflow_runs import MlflowTracker

        return MlflowTracker(target)
    from ebbflow.infra.training.tracking.wandb_runs import WandbTracker

    return WandbTracker(target)


@dataclass(slots=True)
class Reader:
    """What a record says, read as it grows."""

    path: Path
    offset: int = 0
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    described: bool = True  # whether the tracker has the params and tags

    def rows(self, most: int) -> list[Row]:
        """Return the next rows, at most so many."""
        found: list[Row] = []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            while len(found) < most and (line := file.readline()).endswith(b"\n"):
                self.offset += len(line)
                entry = entry_of(line) or {}
                if entry.get("kind") == "values":
                    found.append(Row(int(entry["step"]), float(entry["time"]), entry["values"]))
                elif entry.get("kind") == "text":
                    self.params = {**entry["params"], **self.params}
                    self.tags |= entry["tags"]
                    self.described = False
        return found


class Delivery:
    """Keeps one tracker at the end of the record.

    Args:
        tracker: of the run.
        run: as the tracker is to show it.
        path: of the record.
        tell: passes a message on to the launcher.
    """

    def __init__(self, tracker: Tracker, run: TrackedRun, path: Path, tell: Tell) -> None:
        self._tracker, self._run, self._path, self._tell = tracker, run, path, tell
        self._reader = Reader(path)
        self._reached: Reached | None = None
        self._carried: dict[str, float] = {}
        self._time = 0.0

    def step(self, *, ending: bool = False) -> None:
        """Pass on what is new. Raises whatever the tracker does, after which nothing counts as passed on."""
        try:
            if self._reached is None:
                self._open()
            while self._pass_on():
                pass
            if ending and self._carried:
                assert self._reached is not None
                self._tracker.log([Row(self._reached.rows + 1, self._time, self._carried)])
                self._carried = {}
        except Exception:
            self._reached = None
            raise

    def close(self, state: str) -> None:
        """End the run in the tracker."""
        self._tracker.close(state)

    def _open(self) -> None:
        id, self._reached = self._tracker.open(self._run)
        self._reader, self._carried = Reader(self._path), {}
        self._tell(do="id", id=id)

    def _pass_on(self) -> bool:
        """Pass the next rows on; return whether there were any."""
        reached, reader = self._reached, self._reader
        assert reached is not None
        found = reader.rows(_ROWS)
        if not reader.described:
            self._tracker.describe(reader.params, reader.tags)
            reader.described = True
        fresh = []
        for row in found:
            values = {**self._carried, **reached.missing(row)}
            if row.step <= reached.rows:  # its row is written already: the next one takes what it lacks
                self._carried, self._time = values, row.time
            elif values:
                fresh.append(Row(row.step, row.time, values))
                self._carried = {}
        if fresh:
            self._tracker.log(fresh)
            for row in fresh:
                reached.add(row)
        return bool(found)


def without_secrets(text: str) -> str:
    """Return a text without users and passwords of addresses, and without what the environment keeps secret."""
    text = re.sub(r"//\S*@", "//...@", text)
    for name, value in os.environ.items():
        hidden = (
            [value] if _SECRETS.search(name) else _passwords(value) if name == "MLFLOW_TRACKING_URI" else []
        )
        for one in hidden:
            if len(one) > 3:
                text = text.replace(one, "...")
    return text


def _passwords(address: str) -> list[str]:
    """Return the password in an address as it is written there and as it is meant."""
    try:
        password = urlsplit(address).password or ""
    except ValueError:
        return []
    return [password, unquote(password)]


def public(error: BaseException) -> str:
    """Return an error in a line, without secrets."""
    return without_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:300]


class PublicFormatter(logging.Formatter):
    """Formats what is logged without secrets, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        return without_secrets(super().format(record))


def run(work: Mapping[str, Any], tell: Tell, finish: "Finish") -> None:
    """Pass a record on until its launcher says that it has ended, and until all of it is passed on."""
    delivery: Delivery | None = None
    delay = _FIRST
    while True:
        ending = finish.asked.is_set()
        try:
            if delivery is None:
                tracker = tracker_of(TrackTarget.parse(work["target"]))
                delivery = Delivery(tracker, TrackedRun(**work["run"]), Path(work["record"]), tell)
            delivery.step(ending=ending)
            tell(do="well")
            if ending:
                delivery.close(finish.state)
                tell(do="done")
                return
            delay = _FIRST
        except Exception as error:
            tell(do="problem", text=public(error))
            log.warning("not passed on: %s", public(error), exc_info=delay == _FIRST)
            _wait(finish, ending, delay)
            delay = min(2 * delay, _LONGEST)
            continue
        finish.asked.wait(_LOOK)


def _wait(finish: "Finish", ending: bool, delay: float) -> None:
    """Wait after an error; the word that the run has ended is heard at once."""
    if ending:
        time.sleep(min(delay, 2.0))
    else:
        finish.asked.wait(delay)


@dataclass(slots=True)
class Finish:
    """Whether the run has ended, and how."""

    asked: threading.Event = field(default_factory=threading.Event)
    state: str = "stopped"


def _listen(finish: Finish) -> None:
    """Hear the launcher; without it this process ends at once: another may continue the run."""
    with contextlib.suppress(OSError, ValueError):
        for line in sys.stdin:
            said = json.loads(line)
            if said.get("do") == "finish":
                finish.state = str(said["state"])
                finish.asked.set()
    os._exit(3)


def main() -> None:
    """Do what the first line asks for."""
    handler = logging.StreamHandler()
    handler.setFormatter(PublicFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")  # what it logs comes through the handler above
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_TIMEOUT))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to W&B's own makers
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what packages print is no message
    lock = threading.Lock()

    def tell(**message: Any) -> None:
        with lock, contextlib.suppress(OSError):
            said.write(json.dumps(message) + "\n")
            said.flush()

    work = json.loads(sys.stdin.readline())
    finish = Finish()
    threading.Thread(target=_listen, args=(finish,), daemon=True).start()
    run(work, tell, finish)
    os._exit(0)


if __name__ == "__main__":
    main()
