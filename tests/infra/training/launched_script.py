"""A training script for the launcher's tests: it speaks the channel's protocol, saves, rescues, and knows its step.

Arguments: the folder in which to save, the number of steps, and the seconds that each takes.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ebbflow.infra.training.process.channel import Channel, Report
from ebbflow.infra.training.process.leaving import PEER_LOST
from ebbflow.infra.training.process.world import peer_lost


class Script:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "step"
        self.step = json.loads(self.file.read_text()) if self.file.exists() else 0
        self.channel = Channel.connect()
        assert self.channel is not None

    def say(self, kind: str, **content: object) -> None:
        with contextlib.suppress(RuntimeError):  # the launcher may be gone
            self.channel.post(Report(kind, dist.get_rank(), time.time(), self.step, content))

    def save(self) -> None:
        beside = self.file.with_name(f".step-{os.getpid()}")
        beside.write_text(json.dumps(self.step))
        beside.replace(self.file)

    def asked_to_stop(self) -> bool:
        """Return what all processes agree on; a launcher that is gone is a reason too."""
        try:
            mine = self.channel.stop_request() is not None
        except RuntimeError:
            mine = True
        asked = torch.tensor(float(mine))
        dist.all_reduce(asked)
        return bool(asked)

    def run(self, steps: int, pause: float) -> None:
        if dist.get_rank() == 0:
            self.say("started", world=dist.get_world_size())
        while self.step < steps and not self.asked_to_stop():
            time.sleep(pause)
            self.step += 1
            if dist.get_rank() == 0:
                self.say("step")
        if dist.get_rank() == 0:
            self.save()
            self.say("finished" if self.step >= steps else "stopped", saved=True)


def main() -> None:
    # Once one process has failed, the node's agent ends the others; the grace that it leaves is for saving.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    script = Script(Path(sys.argv[1]))
    try:
        script.run(int(sys.argv[2]), float(sys.argv[3]))
    except RuntimeError as error:
        if not peer_lost(error):
            raise
        if script.channel.claim("rescue"):
            time.sleep(0.2)  # saving takes a while, and all others leave meanwhile
            script.save()
            script.say("checkpoint", reason="rescue")
        sys.exit(PEER_LOST)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
