"""What an elastic job has found: arrays by name, and its objective."""

from typing import Any

import numpy as np

from ebbflow.infra.elastic import Application, Result
from ebbflow.infra.elastic.apps.kmeans import KMeans
from ebbflow.infra.elastic.apps.lda import Lda
from ebbflow.infra.elastic.apps.mlr import Mlr
from ebbflow.planners.errors import OptionError


def result_arrays(app: Application, result: Result) -> dict[str, Any]:
    """Return what a job has found, by name: weights (classes × features + 1) of mlr, centres (clusters × features)
    of kmeans, counts (words × topics) of lda; of another application what its ``arrays`` returns, or its parameters.

    Raises ``OptionError`` for values that are no arrays of numbers.
    """
    if isinstance(app, Mlr):
        return {"weights": app.weights(result.parameters)}
    if isinstance(app, KMeans):
        return {"centres": app.centres(result.parameters)}
    if isinstance(app, Lda):
        return {"counts": app.counts(result.parameters)}
    made = getattr(app, "arrays", None)
    found = made(result.parameters) if callable(made) else result.parameters
    arrays = {str(key): np.asarray(value) for key, value in found.items()}
    if wrong := [name for name, one in arrays.items() if one.dtype.kind not in "biufcSU"]:
        raise OptionError(
            f"result {wrong[0]} must be an array of numbers or text; got {arrays[wrong[0]].dtype}"
        )
    return arrays


def history_of(result: Result) -> list[float]:
    """Return the objective by iteration, as the driver has it; of a driver that keeps none, nothing."""
    return [float(value) for value in getattr(result.driver, "history", ())]


def objective_of(app: Application, result: Result) -> float | None:
    """Return the objective of a result: by the application's ``objective``, or the last one that its driver has."""
    own = getattr(app, "objective", None)
    if callable(own):
        return float(own(result.parameters))
    history = history_of(result)
    return history[-1] if history else None
