"""All processes of a script stop after the same step, once one of them has heard that it must leave."""

import os
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ebbflow.infra.protocols.trainings import launcher_settings
from ebbflow.infra.training.process.channel import Channel
from ebbflow.infra.training.process.link import Link

_REPORT = 0.25  # seconds between two reports of steps
_SIZE = {"gpus": "WORLD_SIZE", "nodes": "GROUP_WORLD_SIZE"}  # what torchrun's protocol says of it
TERMINATED = 143
"""Exit status of a script that left at SIGTERM without a launcher, as a shell has it: 128 + SIGTERM."""


class StopAgreement:
    """Hears of stops from the launcher and by SIGTERM, and has all processes agree on the step to stop after.

    A flag of each process is summed (all-reduce over gloo) while the next step runs: no step waits for it, and each
    process sees the same sum at the same step. Made after the process group, by all processes; used by one thread.

    The launcher is told how far the script is, whatever that prints.

    Args:
        step: steps that are done already, of all of the script's runs.
        environment: tells whether a launcher is there.
    """

    def __init__(self, step: int, environment: Mapping[str, str] = os.environ) -> None:
        self._link = Link(
            Channel.connect(environment),
            int(environment.get("RANK", "0")),
            launcher_settings(environment).termination_grace,
        )
        self._link.open()
        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        self._flag = torch.zeros(1, dtype=torch.int64)
        self._work: Any = None
        self.stopped = False
        self._size = {name: int(environment.get(key, "1")) for name, key in _SIZE.items()}
        self._step, self._reported = step, time.monotonic()
        if self.is_first:
            self._link.post("started", step + 1, {})

    @property
    def is_first(self) -> bool:
        """Return whether this process speaks for all."""
        return self._group is None or dist.get_rank() == 0

    def after_step(self, step: int) -> bool:
        """Return whether to save and stop after this step; called by all processes after each."""
        self._step = step
        if time.monotonic() - self._reported > _REPORT:
            self._report()
        heard = self._link.stop is not None
        if self._group is None:
            self.stopped = heard
            return heard
        if self._work is not None:
            self._work.wait()
            self.stopped = bool(self._flag.item())
        if not self.stopped:
            self._flag = torch.tensor([int(heard)])
            self._work = dist.all_reduce(self._flag, group=self._group, async_op=True)
        return self.stopped

    def barrier(self) -> None:
        """Return once all processes are here."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def close(self) -> None:
        """Stop listening, once the last step is told. May be called twice."""
        self._report()
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._link.close()

    def _report(self) -> None:
        self._reported = time.monotonic()
        if self.is_first:
            self._link.post("step", self._step, self._size)

    def leave(self) -> NoReturn:
        """End the script: it was asked to leave, and what follows its training is for one that is done."""
        launched = self._link.launched
        self.close()
        raise SystemExit(0 if launched else TERMINATED)
