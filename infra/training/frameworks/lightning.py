"""Lightning's ``Trainer`` on nodes that come and go: it saves when it must leave, all processes after one step."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from ebbflow.infra.training.frameworks.stopping import StopAgreement


class StopCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Saves every ``every`` steps, and when the launcher or SIGTERM asks the script to leave, which it then does.

    Args:
        folder: for checkpoints, files ``step=STEP.ckpt``; all nodes reach it.
        every: steps between two.
        keep: how many are kept.
    """

    def __init__(self, folder: str, every: int, keep: int = 2) -> None:
        self._folder, self._every, self._keep = Path(folder), every, keep
        self._agreement: StopAgreement | None = None
        self._step = -1
        self._leaves = False  # saved, and to end before anything else is trained

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to listen."""
        self._agreement, self._step = StopAgreement(trainer.global_step), trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is time, or when a process has heard that it must leave; see ``_leave``."""
        assert self._agreement is not None
        if trainer.global_step == self._step:
            return  # a pass whose gradients are accumulated
        self._step = trainer.global_step
        stops = not trainer.fit_loop.done and self._agreement.after_step(self._step)
        if stops or self._step % self._every == 0:
            trainer.save_checkpoint(self._folder / f"step={self._step}.ckpt")
            self._remove_old()
        self._leaves = stops

    def _leave(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """End the script where it must leave: once the model's own hooks at the end of the step have run."""
        if self._leaves and self._agreement is not None:
            self._agreement.leave()

    on_train_batch_start = on_validation_start = on_train_epoch_end = _leave

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop listening."""
        if self._agreement is not None:
            self._agreement.close()

    def _remove_old(self) -> None:
        assert self._agreement is not None
        if self._agreement.is_first:
            found = sorted(
                self._folder.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2])
            )
            for path in found[: -self._keep]:
                path.unlink(missing_ok=True)
