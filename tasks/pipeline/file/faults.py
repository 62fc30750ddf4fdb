"""Faults on purpose, for demonstrations and tests: ``20s:kill:gpu``, ``features+3s:notice:sql:10s``."""

import re

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.pipeline.file.spec import FaultSpec
from ebbflow.tasks.pipeline.file.units import parse_duration

_FORM = (
    "a fault looks like 20s:kill:gpu-1, 35s:notice:gpu:10s or STEP+3s:kill:sql (3 s after that step has begun); a "
    "pool in place of a node means one of its nodes that is in use"
)
_STEP = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)\+(.*)")


def parse_fault(text: str) -> FaultSpec:
    """Return the fault that ``text`` describes. Raises ``OptionError``."""
    parts = text.strip().split(":")
    if len(parts) < 3 or not parts[2]:
        raise OptionError(f"{_FORM}; got {text!r:.80}")
    named = _STEP.fullmatch(parts[0])
    step, when = (named[1], named[2]) if named else ("", parts[0])
    try:
        after = parse_duration(when)
        if parts[1] == "kill" and len(parts) == 3:
            return FaultSpec(after, "kill", parts[2], step=step)
        if parts[1] == "notice" and len(parts) == 4:
            return FaultSpec(after, "notice", parts[2], parse_duration(parts[3]), step)
    except OptionError as error:
        raise OptionError(f"{_FORM}; got {text!r:.80}") from error
    raise OptionError(f"{_FORM}; got {text!r:.80}")
