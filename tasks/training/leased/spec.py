"""What a training asks for as an app, and the request that its leases hold it to."""

from dataclasses import replace
from typing import Any

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.planners.training.replicas import least_whole
from ebbflow.tasks.apps.specs import Resume, app_spec
from ebbflow.tasks.training.request import TrainingRequest


def training_spec(request: TrainingRequest, *, deployment: str = "", **fields: Any) -> AppSpec:
    """Return what a training asks for: its GPUs between ``min_gpus`` and ``max_gpus``, as multiples of
    ``replica_gpus``. ``fields`` are others of ``AppSpec``. Raises ``OptionError`` for a request without an id."""
    replica = request.replica_gpus
    most = request.gpus if request.max_gpus is None else request.max_gpus
    wanted = min(request.gpus, most)
    given: dict[str, Any] = {
        "id": request.run_id,
        "title": request.name,
        "gpus": wanted - wanted % replica,
        "min_gpus": least_whole(request.min_gpus, replica),
        "max_gpus": most - most % replica,
        "aggregators": max(request.aggregators, request.mirrors + 1) if request.aggregation_cluster else 0,
        "resume": Resume("training", request.runs_dir, request.run_id, deployment).to_dict(),
    }
    return app_spec("training", given, fields)


def held_to(request: TrainingRequest, spec: AppSpec) -> TrainingRequest:
    """Return the training's request with the app's id and GPUs; where it runs, its leases determine.

    Raises ``OptionError`` for a request with scripted faults: nodes belong to the cluster.
    """
    if request.fault:
        raise OptionError(
            f"scripted faults (fault) are for a training on its own nodes; got {', '.join(request.fault)}"
        )
    least, most = max(spec.min_gpus or spec.gpus, 1), max(spec.gpus, spec.max_gpus, 1)
    return replace(
        request,
        run_id=request.run_id or spec.id,
        name=request.name or spec.title,
        nodes=f"local:{most}x1",
        min_gpus=least,
        max_gpus=most,
        cpus_per_slot=None,
    )
