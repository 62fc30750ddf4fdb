"""One of several processes that run a tuning run together. Its trials train by formula, at most two at once.

``python tuning_node.py STUDY FOLDER NAME [STALL]``: the process ``first`` begins the tuning run, others take part in
it. After ``STALL`` trials have ended here, further ones train for ever. ``FOLDER/log`` gets a line for each begin and
end of a training.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.listening import TrainingListener
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.joining import join_tuning
from ebbflow.tasks.tuning.request import Parameter, TuningRequest
from ebbflow.tasks.tuning.run import run_tuning

ID = "together"
TRIALS = 40
EPOCHS = 4
SPACE = (
    Parameter("lr", "log", 0.001, 1.0),
    Parameter("layers", "int", 1, 8),
    Parameter("act", "choice", choices=("a", "b")),
)


def request_of(folder: Path, study: str, **options: Any) -> TuningRequest:
    """Return the tuning run that the processes share."""
    given = {"trials": TRIALS, "sampler": "random", "seed": 7, "pruner": "none", "heartbeat_timeout": 8.0}
    return TuningRequest(
        str(folder / "fit.py"), SPACE, "score", run_id=ID, runs_dir=str(folder / "runs"), study=study,
        nodes="local:1x2", epochs=EPOCHS, **(given | options),
    )  # fmt: skip


class Trainings:
    """Trains by formula, and says so in a log that all processes write."""

    def __init__(self, folder: Path, name: str, stall: int) -> None:
        self._log, self._name, self._stall = folder / "log", name, stall
        self._ended = 0
        self._lock = threading.Lock()

    def __call__(
        self, request: TrainingRequest, listener: TrainingListener, nodes: Nodes, resume: bool
    ) -> TrainingReport:
        with self._lock:
            stalls = self._ended >= self._stall
            self._ended += not stalls
        self._say(f"{'stalls' if stalls else 'begins'} {request.run_id}")
        rate = float(request.arguments[request.arguments.index("--lr") + 1])
        for epoch in range(EPOCHS):
            listener.metrics(epoch, epoch, {"score": rate * (epoch + 1)})
            while stalls and not nodes.stopped:
                threading.Event().wait(0.05)
            threading.Event().wait(0.05)
        state: Any = "stopped" if nodes.stopped else "finished"
        self._say(f"{state} {request.run_id}")
        return TrainingReport(
            request.run_id, request.script, request.run_directory, 0.0, 1.0, state, "", steps=EPOCHS,
            gpu_seconds=1.0,
        )  # fmt: skip

    def _say(self, text: str) -> None:
        line = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(line, f"{self._name} {text}\n".encode())
        os.close(line)


def main(study: str, folder: Path, name: str, stall: int = 10**6) -> None:
    if name == "first":
        request = request_of(folder, study)
    else:
        request = join_tuning(study, ID, {"runs_dir": str(folder / name)})
    report = run_tuning(request, train=Trainings(folder, name, stall), resume=name != "first")
    print(report.to_json())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
