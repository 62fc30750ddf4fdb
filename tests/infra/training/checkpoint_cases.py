"""What the tests of full checkpoints share."""

from typing import Any

import torch

from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder


def state(step: int, size: int = 64) -> dict[str, Any]:
    return {"model": {"w": torch.full((size,), float(step))}, "run": {"step": step}}


def names(folder: CheckpointFolder, start: str = "step-") -> list[str]:
    from pyarrow.fs import FileSelector

    fs, path = resolve(folder.uri)
    found = fs.get_file_info(FileSelector(path, allow_not_found=True))
    return sorted(info.base_name for info in found if info.base_name.startswith(start))
