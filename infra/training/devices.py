"""Which GPUs of this machine a process may use."""

import os
from collections.abc import Mapping
from pathlib import Path

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
