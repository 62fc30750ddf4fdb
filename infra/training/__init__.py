"""Elastic training: the library inside a training process, and the launcher for nodes that come and go."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.infra.training.metrics import RunStatistics
    from ebbflow.infra.training.process.leaving import RunStopped
    from ebbflow.infra.training.run import ElasticRun

__all__ = ["ElasticRun", "RunStatistics", "RunStopped"]

_PLACES = {"ElasticRun": "run", "RunStatistics": "metrics", "RunStopped": "process.leaving"}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: torch takes seconds, and a launcher's command line needs none of it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
