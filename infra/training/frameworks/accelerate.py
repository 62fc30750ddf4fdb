"""Hugging Face's Accelerate on nodes that come and go: a loop of one's own that saves when it must leave."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebbflow.infra.training.frameworks.checkpoints import COMPLETE, PREFIX, mark_complete, newest_checkpoint
from ebbflow.infra.training.frameworks.stopping import StopAgreement
from ebbflow.planners.errors import OptionError

_KEPT = 2  # whole checkpoints


class AccelerateSaves:
    """Saves a loop every so many steps and when it must leave, and continues from its newest whole checkpoint.

    Made by all processes after ``accelerator.prepare``: what the accelerator has prepared, and what is registered for
    its checkpoints, is restored.

    Args:
        accelerator: ``accelerate.Accelerator``, whose ``DataLoaderConfiguration`` has ``split_batches`` and
            ``use_seedable_sampler``.
        output: directory that all nodes share.
        every: steps between two saves.

    Raises ``OptionError``.
    """

    def __init__(self, accelerator: Any, output: str, every: int) -> None:
        if every < 1:
            raise OptionError(f"every must be >= 1 steps; got {every}")
        _check_loaders(accelerator)
        self._accelerator, self._output, self._every = accelerator, Path(output), every
        self.step = 0  # steps that are done
        accelerator.register_for_checkpointing(self)
        if (newest := newest_checkpoint(output)) is not None:
            accelerator.load_state(newest)
        self._agreement = StopAgreement(self.step)

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps of it."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take up what a checkpoint has kept."""
        self.step = int(state["step"])

    def batches(self, loader: Any, steps: int) -> Iterator[Any]:
        """Yield what is left of ``steps`` batches of a prepared loader, pass after pass, in the order of its epochs.

        The batch before the next one is asked for is a step: it is saved then where that is due, and the script ends
        where it was asked to leave. Batches are the same on any number of processes where each one's share makes up
        the same whole.
        """
        begun = self.step
        while self.step < steps:
            turn, done = divmod(self.step, len(loader))
            loader.set_epoch(turn)
            left = self._accelerator.skip_first_batches(loader, done) if done else loader
            for batch in left:
                yield batch
                self.step += 1
                self._stepped(self.step == steps)
                if self.step == steps:
                    break
        if self.step > begun or self.step >= steps:
            self._agreement.close()

    def _stepped(self, last: bool) -> None:
        stop = self._agreement.after_step(self.step) and not last
        if stop or last or self.step % self._every == 0:
            self._save()
        if stop:
            self._agreement.leave()

    def _save(self) -> None:
        folder = self._output / f"{PREFIX}{self.step}"
        self._accelerator.save_state(str(folder))
        self._agreement.barrier()  # each process has written its part
        if self._agreement.is_first:
            mark_complete(str(folder), self.step)
            whole = sorted(
                (path for path in self._output.glob(f"{PREFIX}*") if (path / COMPLETE).is_file()),
                key=lambda path: int(path.name.removeprefix(PREFIX)),
            )
            for old in whole[:-_KEPT]:
                (old / COMPLETE).unlink()  # first: what is left of it then does not count
                shutil.rmtree(old)
        self._agreement.barrier()


def _check_loaders(accelerator: Any) -> None:
    """Raise ``OptionError`` where prepared loaders would not give the same batches again after a restart."""
    config = accelerator.dataloader_config
    rules = {
        "split_batches": (True, "a batch is the same whole on any number of processes"),
        "use_seedable_sampler": (True, "a pass has the same order after a restart"),
        "use_stateful_dataloader": (False, "steps that are done are skipped once, by accelerate_saves"),
    }
    for name, (wanted, why) in rules.items():
        if bool(getattr(config, name, False)) is not wanted:
            raise OptionError(
                f"{name} must be {wanted}, so that {why}: Accelerator(dataloader_config=DataLoaderConfiguration("
                "split_batches=True, use_seedable_sampler=True))"
            )
