"""Which GPUs of this machine a process may use."""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from ebbflow.infra.errors import ClusterError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible(environment: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> tuple[str, ...]:
    """Return the GPUs as ``CUDA_VISIBLE_DEVICES`` names them, without touching any; empty where there is none."""
    if (named := environment.get(VISIBLE)) is not None:
        return tuple(device.strip() for device in named.split(",") if device.strip() not in ("", "-1"))
    try:
        return tuple(str(number) for number, _ in enumerate(driver.iterdir()))
    except OSError:
        return ()


def hold_to(numbers: Sequence[int], environment: MutableMapping[str, str] = os.environ) -> None:
    """Let this process, and what it starts, use only the GPUs with these numbers; none: all it may use already.

    To be called before anything touches a GPU. On a machine without GPUs there is nothing to do. Raises
    ``ClusterError`` for a number that the machine lacks.
    """
    there = visible(environment)
    if not numbers or not there:
        return
    if lacking := [number for number in numbers if not 0 <= number < len(there)]:
        raise ClusterError(f"GPU {lacking[0]} is asked for; this machine has {len(there)}, numbered from 0")
    environment[VISIBLE] = ",".join(there[number] for number in numbers)
