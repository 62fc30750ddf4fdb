"""Stands for a launcher's node process in tests: it is there, has a child, and notes down what it is told."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

folder = Path(json.loads(os.environ["EBBFLOW_NODE_ENTRY"])["folder"])


def told(_signal, _frame):
    (folder / "told").write_text((folder / "notice").read_text())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, told)
    # a child in a session of its own, as the ranks of a training are
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    names = ("EBBFLOW_SLOTS", "CUDA_VISIBLE_DEVICES")
    said = {name: os.environ.get(name) for name in names}
    (folder / "said.tmp").write_text(json.dumps({**said, "pids": [os.getpid(), child.pid]}))
    (folder / "said.tmp").rename(folder / "said.json")
    while True:
        time.sleep(600)
