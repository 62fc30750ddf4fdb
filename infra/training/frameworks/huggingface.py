"""Hugging Face's ``Trainer`` on nodes that come and go: it saves when it must leave, all processes after one step."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ebbflow.infra.training.frameworks.checkpoints import mark_complete
from ebbflow.infra.training.frameworks.stopping import StopAgreement


class StopCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves and ends the script when the launcher, or SIGTERM, asks it to leave; marks checkpoints that are whole."""

    def __init__(self) -> None:
        self._agreement: StopAgreement | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to listen."""
        self._agreement = StopAgreement(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after this step, saved, if a process has heard that it must leave."""
        assert self._agreement is not None
        if state.global_step < state.max_steps and self._agreement.after_step(state.global_step):
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the checkpoint count: each process has written its part."""
        assert self._agreement is not None
        self._agreement.barrier()  # each process has written its part
        if self._agreement.is_first:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            mark_complete(str(folder), state.global_step)
        self._agreement.barrier()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the script where it was asked to leave."""
        assert self._agreement is not None
        if self._agreement.stopped:
            self._agreement.leave()
        self._agreement.close()
