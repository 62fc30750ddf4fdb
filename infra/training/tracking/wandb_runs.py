"""A training as one run of Weights & Biases, offline where no key is there.

An offline run is a directory for each launcher, all with one run ID, in the run's own directory: ``wandb sync`` makes
one run of them. What they hold is read from their transaction logs, so a launcher that was killed leaves out nothing.
"""

import hashlib
import netrc
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb

from ebbflow.infra.storage import private
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.tracking import wandb_files
from ebbflow.infra.training.tracking.targets import TrackTarget
from ebbflow.infra.training.tracking.trackers import Reached, Row, TrackedRun

FOLDER = "wandb"
_ODD = re.compile(r"[^A-Za-z0-9_-]")
_INIT = 60.0  # seconds in which W&B's own process must have begun the run


class WandbTracker:
    """See ``Tracker``. A row that is written cannot be added to: W&B's steps only grow."""

    def __init__(self, target: TrackTarget) -> None:
        self._target = target
        entity, _, self._project = target.place.rpartition("/")
        self._entity = entity or None
        self._run: Any = None
        self._online = mode() == "online"
        self._kept, self._files = StorageLocation("."), Path()

    def open(self, run: TrackedRun) -> tuple[str, Reached]:
        """See ``Tracker``."""
        if self._run is not None:
            self._leave()
        self._kept = StorageLocation(run.place)
        own = hashlib.sha256(f"{run.key} {self._target}".encode()).hexdigest()[:8]  # run and project
        self._files = Path(self._kept.root) if self._kept.local else home() / "tracking" / f"{run.key}-{own}"
        private.make_folder(self._files)
        id = run.known or f"{_ODD.sub('-', run.run)[:80]}-{own}"
        reached = Reached() if self._online else self._reached(id)
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            id=id,
            name=run.name,
            group=run.parent or None,
            resume="allow",
            mode="online" if self._online else "offline",
            dir=str(self._files),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
                reinit="create_new",
                init_timeout=_INIT,
            ),
        )
        if self._online:  # what was logged here and never uploaded counts for nothing
            top = int(self._run.starting_step) - 1 if self._run.resumed else -1
            reached = Reached(rows=top, whole=True)
        return id, reached

    def _reached(self, id: str) -> Reached:
        """Return what the offline runs of earlier launchers have."""
        self._fetch(id)
        reached = Reached()
        for path in sorted(self._files.glob(f"{FOLDER}/*run-*/run-{id}.wandb")):
            for step, values in wandb_files.rows(path):
                reached.add(Row(step, 0.0, values))
                reached.rows = max(reached.rows, step)
        return reached

    def describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """See ``Tracker``."""
        self._run.config.update({**params, **tags}, allow_val_change=True)

    def log(self, rows: Sequence[Row]) -> None:
        """See ``Tracker``."""
        for row in rows:
            self._run.log({**row.values, "_timestamp": row.time}, step=row.step)

    def close(self, state: str) -> None:
        """See ``Tracker``."""
        try:
            if self._run is not None:
                self._run.summary["ebbflow/state"] = state
                self._leave(1 if state == "failed" else 0)
        finally:
            self._put()

    def _leave(self, status: int = 0) -> None:
        run, self._run = self._run, None
        run.finish(exit_code=status)

    def _logs(self) -> list[str]:
        """Return the names of transaction logs that the run's directory on S3 has."""
        found = self._kept.fs().get_file_info(_selector(self._kept.path(FOLDER)))
        return [one.path for one in found if one.path.endswith(".wandb")]

    def _fetch(self, id: str) -> None:
        """Bring the offline runs of other machines here."""
        if self._kept.local:
            return
        for path in self._logs():
            name = path.removeprefix(self._kept.root).lstrip("/")
            target = self._files / name
            if target.name == f"run-{id}.wandb" and ".." not in Path(name).parts and not target.exists():
                private.make_folder(target.parent)
                StorageLocation(str(self._files)).write(name, self._kept.read(name))

    def _put(self) -> None:
        """Write the offline runs to the run's directory on S3."""
        if self._kept.local:
            return
        for path in self._files.glob(f"{FOLDER}/*run-*/**/*"):
            if path.is_file() and not path.is_symlink():
                self._kept.write(str(path.relative_to(self._files)), path.read_bytes())


def _selector(folder: str) -> Any:
    from pyarrow.fs import FileSelector

    return FileSelector(folder, allow_not_found=True, recursive=True)


def mode() -> str:
    """Return ``online`` where W&B has a key, else ``offline``; ``WANDB_MODE`` overrides it."""
    if said := os.environ.get("WANDB_MODE"):
        return "online" if said in ("online", "run", "shared") else "offline"
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(os.environ.get("NETRC")).authenticators(host):
            return "online"
    return "offline"
