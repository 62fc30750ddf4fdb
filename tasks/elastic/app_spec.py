"""What an elastic job asks for as an app."""

from typing import Any

from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.apps.specs import app_spec
from ebbflow.tasks.elastic.request import ElasticAppRequest


def elastic_spec(request: ElasticAppRequest, **fields: Any) -> AppSpec:
    """Return what an elastic job asks for: a slot for each worker, from one on; see ``training_spec``.

    Its pipeline starts it again.
    """
    given: dict[str, Any] = {
        "id": request.run_id,
        "title": request.name,
        "gpus": request.workers,
        "min_gpus": 1,
        "max_gpus": request.max_workers,
    }
    return app_spec("elastic", given, fields)
