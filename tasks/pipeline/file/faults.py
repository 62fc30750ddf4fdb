"""Faults on purpose, for demonstrations and tests: ``20s:kill:gpu``, ``features+3s:notice:sql:10s``."""

import re
from dataclasses import replace

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.faults import Fault, Grammar

_FORM = (
    "a fault looks like 20s:kill:gpu-1, 35s:notice:gpu:10s or STEP+3s:kill:sql (3 s after that step has begun); a "
    "pool instead of a node means one of its nodes that is in use"
)
_GRAMMAR = Grammar(_FORM, {"kill": "WHOM", "notice": "WHOM:SECONDS"})
_STEP = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)\+")


def parse_fault(text: str) -> Fault:
    """Return the fault that ``text`` describes. Raises ``OptionError``."""
    named = _STEP.match(text.strip())
    try:
        fault = _GRAMMAR.parse(text.strip()[named.end() :] if named else text)
    except OptionError as error:
        raise OptionError(f"{_FORM}; got {text!r:.80}") from error
    return replace(fault, step=named[1] if named else "")


def planned(fault: Fault) -> str:
    """Return in words what is to happen, and when."""
    what = f"{fault.of} is killed" if fault.kind == "kill" else f"notice to {fault.of}: {fault.seconds:g} s"
    return f"{fault.after:g} s after {fault.step or 'the first step'} has begun: {what}"
