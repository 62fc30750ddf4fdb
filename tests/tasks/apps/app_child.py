"""A training app in a process of its own, to be killed: LEDGER, SCRIPT, FOLDER, then the script's arguments."""

import sys
from pathlib import Path

from ebbflow.infra.ledger import Ledger
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.apps.agent import AgentIntervals
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.training.leased.app import run_training_app
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest

PRELOAD = ("torch.distributed", "ebbflow.infra.training.process.world")
PACE = AgentIntervals(look=0.05, report=0.2, entry=60.0, parting=10.0)


def run(ledger: Ledger, script: str, folder: Path, *arguments: str, **options: object) -> TrainingReport:
    """Run the app ``t``: from one GPU to two."""
    request = TrainingRequest(
        script,
        arguments,
        run_id="t",
        runs_dir=str(folder / "runs"),
        nodes="local:2x1",
        termination_grace=20.0,
        preflight="never",
        recovery="restart",
    )
    spec = AppSpec("t", "training", gpus=1, min_gpus=1, max_gpus=2)
    return run_training_app(
        request,
        spec,
        ledger,
        lambda: LocalNodes(folder / "nodes", grace=20.0),
        pace=PACE,
        rules=Rules(fence=60.0),  # a busy machine stands still for a while
        options={"preload": PRELOAD},
        **options,  # type: ignore[arg-type]
    )


if __name__ == "__main__":
    with Ledger.open(sys.argv[1]) as ledger:
        run(ledger, sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
