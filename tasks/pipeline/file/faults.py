"""Faults of a pipeline's local cluster: ``20s:kill:gpu``, ``features+3s:notice:sql:10s``."""

from ebbflow.tasks.faults import Fault, Grammar
from ebbflow.tasks.nodes import OF_POOLS, VERBS

FAULTS = Grammar("a pipeline", VERBS, example="fit+20s:kill:gpu-1", max_count=1000, pools=True, steps=True)

__all__ = ["FAULTS", "OF_POOLS", "parse_fault", "planned"]


def parse_fault(text: str) -> Fault:
    """Return the fault that ``text`` describes. Raises ``OptionError``."""
    return FAULTS.parse(text)


def planned(fault: Fault) -> str:
    """Return a sentence that says what is to happen, and when."""
    return f"{fault.after:g} s after {fault.step or 'the first step'} has started: {fault.describe()}"
