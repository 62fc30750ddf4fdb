"""The capacity loop as a Prefect flow and as commands; what becomes of flow runs whose apps it stops."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.flows.capacity.flow import capacity_loop

__all__ = ["capacity_loop"]

_PLACES = {"capacity_loop": "flow"}


def __getattr__(name: str) -> Any:
    """Import a flow only when it is asked for: Prefect takes a second."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
