"""Trainers of other frameworks on nodes that come and go: they stop at one step of all processes, saved."""

from typing import Any

from ebbflow.infra.packages import require
from ebbflow.planners.errors import OptionError


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
