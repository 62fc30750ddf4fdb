"""Checkpoints that a framework has written: which is the newest that is whole."""

import json
import re
from pathlib import Path

from ebbflow.infra.storage.files import write_atomic

PREFIX = "checkpoint-"
COMPLETE = "ebbflow-complete.json"  # in a checkpoint's directory, written when all processes have saved
_STEP = re.compile(rf"(?:{PREFIX}|step=?)(\d+)(?:\.ckpt)?")


def newest_checkpoint(folder: str) -> str | None:
    """Return the path of the newest whole checkpoint in ``folder`` that an Ebbflow callback has saved.

    ``None`` where there is none: training then begins. For ``Trainer.train(resume_from_checkpoint=...)`` of Hugging
    Face, whose checkpoints are directories ``checkpoint-STEP`` and count once all processes have saved (those of
    ``accelerate_saves`` are the same), and for ``Trainer.fit(ckpt_path=...)`` of Lightning, whose checkpoints are
    files ``step=STEP.ckpt``, written at once.
    """
    found: list[tuple[int, str]] = []
    root = Path(folder)
    for path in root.iterdir() if root.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and (path.is_file() or (path / COMPLETE).is_file()):
            found.append((int(match[1]), str(path)))
    return max(found)[1] if found else None


def mark_complete(checkpoint: str, step: int) -> None:
    """Let a checkpoint's directory count: all of it is written."""
    write_atomic(None, "file", str(Path(checkpoint) / COMPLETE), json.dumps({"step": step}).encode())
