"""Trainers of other frameworks on nodes that come and go: they stop at one step of all processes, saved."""

from typing import TYPE_CHECKING, Any

from ebbflow.infra.packages import require
from ebbflow.planners.errors import OptionError

if TYPE_CHECKING:
    from ebbflow.infra.training.frameworks.accelerate import AccelerateSaves


def hugging_face_callback() -> Any:
    """Return a callback for ``transformers.Trainer`` in a script that runs with own checkpoints.

    It saves and ends the script when the launcher, or SIGTERM, asks it to leave, all processes after the same step,
    and marks checkpoints that are whole (``newest_checkpoint``). Raises ``EngineUnavailableError`` without
    transformers.
    """
    require("transformers", "Hugging Face's Trainer")
    from ebbflow.infra.training.frameworks.huggingface import StopCallback

    return StopCallback()


def lightning_callback(folder: str, every: int, keep: int = 2) -> Any:
    """Return a callback for ``lightning.pytorch.Trainer`` in a script that runs with own checkpoints.

    It saves every ``every`` steps into ``folder``, of which it keeps ``keep`` checkpoints, and when the launcher, or
    SIGTERM, asks the script to leave: all processes after the same step. The script ends then. Raises
    ``EngineUnavailableError`` without lightning, ``OptionError`` for numbers below 1.
    """
    require("lightning", "Lightning's Trainer")
    for name, value in (("every", every), ("keep", keep)):
        if value < 1:
            raise OptionError(f"{name} must be >= 1; got {value}")
    from ebbflow.infra.training.frameworks.lightning import StopCallback

    return StopCallback(folder, every, keep)


def accelerate_saves(accelerator: Any, output: str, every: int) -> "AccelerateSaves":
    """Return what saves a loop of Accelerate in a script with own checkpoints, restored from its newest one.

    Called by all processes after ``accelerator.prepare``. Its ``batches(loader, steps)`` are what the loop goes over:
    each is a step, after every ``every``th all is saved into ``output``, which all nodes share, and when the
    launcher, or SIGTERM, asks the script to leave, it is saved after the same step of all processes and ended. Raises
    ``EngineUnavailableError`` without accelerate, ``OptionError`` for an ``every`` below 1.
    """
    require("accelerate", "Hugging Face's Accelerate")
    from ebbflow.infra.training.frameworks.accelerate import AccelerateSaves

    return AccelerateSaves(accelerator, output, every)
