"""Tuning runs as a Prefect flow and as a command, and how they look on a terminal."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.flows.tuning.flow import tune

__all__ = ["tune"]

_PLACES = {"tune": "flow"}


def __getattr__(name: str) -> Any:
    """Import a flow only when it is asked for: Prefect takes a second."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
