"""What a tuning run asks for as an app."""

from typing import Any

from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.apps.specs import Resume, app_spec
from ebbflow.tasks.tuning.request import TuningRequest


def tuning_spec(request: TuningRequest, *, deployment: str = "", **fields: Any) -> AppSpec:
    """Return what a tuning run asks for: from one trial's GPUs to those of its nodes; see ``training_spec``."""
    together = min(sum(request.placement.values()), request.trials * request.most_gpus)
    given: dict[str, Any] = {
        "id": request.run_id,
        "gpus": together,
        "min_gpus": request.gpus_per_trial,
        "max_gpus": max(together, request.gpus_per_trial),
        "resume": Resume("tuning", request.runs_dir, request.run_id, deployment).to_dict(),
    }
    return app_spec("tuning", given, fields)
