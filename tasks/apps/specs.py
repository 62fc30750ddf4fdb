"""What apps ask the ledger for, made from requests; and what starts one of them again."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.request import TuningRequest

_KINDS = ("query", "training", "tuning")


class Resume(NamedTuple):
    """What starts an app again. It stands in the ledger, so there is no secret in it."""

    kind: Literal["query", "training", "tuning"]
    folder: str  # of all runs, or of a query's store
    id: str  # of the run in it
    deployment: str = ""  # of the orchestrator, "flow/name"; empty: whoever started it

    def to_dict(self) -> dict[str, str]:
        """Return plain values, for ``AppSpec.resume``."""
        return dict(self._asdict())

    @classmethod
    def of(cls, spec: AppSpec) -> "Resume | None":
        """Return what starts the app of ``spec`` again; ``None`` where it does not say. Raises ``OptionError``."""
        if not spec.resume:
            return None
        said: Mapping[str, Any] = spec.resume
        values = {name: said.get(name, "") for name in cls._fields}
        wrong = [name for name, value in values.items() if not isinstance(value, str)]
        if wrong or values["kind"] not in _KINDS or not values["folder"] or not values["id"]:
            raise OptionError(
                f"resume must name a kind ({', '.join(_KINDS)}), a folder and an id; got {dict(said)!r:.200}"
            )
        return cls(**values)


def training_spec(request: TrainingRequest, *, deployment: str = "", **fields: Any) -> AppSpec:
    """Return what a training asks for: its GPUs between ``min_gpus`` and ``max_gpus``. ``fields`` are others of
    ``AppSpec``. Raises ``OptionError`` for a request without an id."""
    most = request.gpus if request.max_gpus is None else request.max_gpus
    given: dict[str, Any] = {
        "id": request.id,
        "title": request.title,
        "gpus": min(request.gpus, most),
        "min_gpus": request.min_gpus,
        "max_gpus": most,
        "resume": Resume("training", request.folder, request.id, deployment).to_dict(),
    }
    return _spec("training", given, fields)


def tuning_spec(request: TuningRequest, *, deployment: str = "", **fields: Any) -> AppSpec:
    """Return what a search asks for: from one trial's GPUs to those of its nodes; see ``training_spec``."""
    together = min(sum(request.placement.values()), request.trials * request.most_gpus)
    given: dict[str, Any] = {
        "id": request.id,
        "gpus": together,
        "min_gpus": request.gpus,
        "max_gpus": max(together, request.gpus),
        "resume": Resume("tuning", request.folder, request.id, deployment).to_dict(),
    }
    return _spec("tuning", given, fields)


def query_spec(request: QueryRequest, id: str, *, deployment: str = "", **fields: Any) -> AppSpec:
    """Return what a query asks for: no GPU, its weight among queries; see ``training_spec``."""
    given: dict[str, Any] = {
        "id": id,
        "title": request.title,
        "weight": request.weight,
        "resume": Resume("query", request.store, id, deployment).to_dict(),
    }
    return _spec("query", given, fields)


def _spec(
    kind: Literal["query", "training", "tuning"], given: dict[str, Any], fields: dict[str, Any]
) -> AppSpec:
    spec = AppSpec(kind=kind, **{**given, **fields})
    if not spec.id:
        raise OptionError("an app needs an id, by which it is found again; got none")
    return spec


def held_to(request: TrainingRequest, spec: AppSpec) -> TrainingRequest:
    """Return the training's request with the app's id and GPUs; where it runs, its leases say.

    Raises ``OptionError`` for a request with scripted faults: nodes belong to the cluster.
    """
    if request.at:
        raise OptionError(
            f"scripted faults (at) are for a training on its own nodes; got {', '.join(request.at)}"
        )
    least, most = max(spec.min_gpus or spec.gpus, 1), max(spec.gpus, spec.max_gpus, 1)
    return replace(
        request,
        id=request.id or spec.id,
        title=request.title or spec.title,
        nodes=f"local:{most}x1",
        min_gpus=least,
        max_gpus=most,
        cpus=None,
    )
