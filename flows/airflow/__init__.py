"""Ebbflow in Airflow: operators that run queries and trainings, and one that waits for capacity.

    from ebbflow import EbbflowQueryOperator, EbbflowTrainingOperator, WaitForCapacityOperator

Nothing else of Ebbflow imports this package but the root, for whoever asks for one of them; and only its operators,
triggers and hook import Airflow.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.flows.airflow.hook import EbbflowHook
    from ebbflow.flows.airflow.operators import (
        EbbflowQueryOperator,
        EbbflowTrainingOperator,
        WaitForCapacityOperator,
    )
    from ebbflow.flows.airflow.triggers import WaitForCapacityTrigger

_PLACES = {
    "EbbflowHook": "hook",
    "EbbflowQueryOperator": "operators",
    "EbbflowTrainingOperator": "operators",
    "WaitForCapacityOperator": "operators",
    "WaitForCapacityTrigger": "triggers",
}

__all__ = [
    "EbbflowHook",
    "EbbflowQueryOperator",
    "EbbflowTrainingOperator",
    "WaitForCapacityOperator",
    "WaitForCapacityTrigger",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for: Airflow reads what the provider is without importing all of it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
