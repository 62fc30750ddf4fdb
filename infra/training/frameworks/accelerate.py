"""Hugging Face's Accelerate on nodes that come and go: a loop of one's own that saves when it must leave."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ebbflow.infra.storage.files import write_atomic
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
            ``use_seedable_sampler``. With ``use_stateful_dataloader`` loaders resume by their own state.
        output: directory that all nodes share.
        every: steps between two saves.

    Raises ``OptionError``.
    """

    def __init__(self, accelerator: Any, output: str, every: int) -> None:
        if every < 1:
            raise OptionError(f"every must be >= 1 steps; got {every}")
        _check_loaders(accelerator)
        self._accelerator, self._output, self._every = accelerator, Path(output), every
        self._stateful = bool(getattr(accelerator.dataloader_config, "use_stateful_dataloader", False))
        self._resumed = False  # whether loaders have their state of a checkpoint, and have not begun
        self._loader: Any = None  # of the pass under way
        self.step = 0  # steps that are done
        accelerator.register_for_checkpointing(self)
        if (newest := newest_checkpoint(output)) is not None:
            accelerator.load_state(newest)
            self._resumed = self._stateful
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

        Raises ``OptionError`` for a loader whose state would not lead to the same batches.
        """
        begun = self.step
        _check_loader(loader, stateful=self._stateful)
        while self.step < steps:
            turn, done = divmod(self.step, len(loader))
            loader.set_epoch(turn)
            for batch in self._rest(loader, done):
                yield batch
                self.step += 1
                self._stepped(self.step == steps)
                if self.step == steps:
                    break
        if self.step > begun or self.step >= steps:
            self._agreement.close()

    def _rest(self, loader: Any, done: int) -> Any:
        """Return a loader of what is left of a pass, of which so many batches are done."""
        if not self._stateful:
            return self._accelerator.skip_first_batches(loader, done) if done else loader
        resumed, self._resumed = self._resumed, False
        begins, self._loader = loader is not self._loader, loader
        if done and not resumed:
            loader.load_state_dict(loader.state_dict())  # it was left in the middle
        elif begins and not done:
            # not what it has read ahead when it was made, in an order before ours, nor after the end of a pass
            loader.base_dataloader.next_iter_state = None
            loader.load_state_dict({})
        return loader

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
            self._save_loaders(folder)
            mark_complete(str(folder), self.step)
            whole = sorted(
                (path for path in self._output.glob(f"{PREFIX}*") if (path / COMPLETE).is_file()),
                key=lambda path: int(path.name.removeprefix(PREFIX)),
            )
            for old in whole[:-_KEPT]:
                (old / COMPLETE).unlink()  # first: what is left of it then does not count
                shutil.rmtree(old)
        self._agreement.barrier()

    def _save_loaders(self, folder: Path) -> None:
        """Write the states of loaders again, which all processes have written into the same files at once."""
        for number, loader in enumerate(self._accelerator._dataloaders):
            if not getattr(loader, "use_stateful_dataloader", False):
                continue
            buffer = io.BytesIO()
            torch.save(loader.state_dict(), buffer)
            name = f"dl_state_dict_{number}.bin" if number else "dl_state_dict.bin"
            write_atomic(None, "file", str(folder / name), buffer.getvalue())


def _check_loader(loader: Any, *, stateful: bool) -> None:
    """Raise ``OptionError`` for a loader that counts what it has read by processes, and not by batches."""
    if stateful and hasattr(loader, "split_batches"):
        raise OptionError(
            "with use_stateful_dataloader each process must read for itself: DataLoaderConfiguration("
            "dispatch_batches=False); the state of a loader that reads in one process for all counts batches by "
            "processes, which may be others after a restart"
        )


def _check_loaders(accelerator: Any) -> None:
    """Raise ``OptionError`` where prepared loaders would not give the same batches again after a restart."""
    config = accelerator.dataloader_config
    rules = {
        "split_batches": (True, "a batch is the same whole on any number of processes"),
        "use_seedable_sampler": (True, "a pass has the same order after a restart"),
    }
    for name, (wanted, why) in rules.items():
        if bool(getattr(config, name, False)) is not wanted:
            raise OptionError(
                f"{name} must be {wanted}, so that {why}: Accelerator(dataloader_config=DataLoaderConfiguration("
                "split_batches=True, use_seedable_sampler=True))"
            )
