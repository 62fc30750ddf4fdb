"""Outcomes of a pipeline and of its steps."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

StepState = Literal[
    "waiting",  # for steps before it
    "running",
    "finished",
    "stopped",  # on request; continues with --resume
    "failed",
    "skipped",  # a step that it waits for has failed
]
ENDED: frozenset[str] = frozenset({"finished", "stopped", "failed", "skipped"})
FORMAT = 2  # of the JSON document; grows when a key changes its name or meaning
PipelineState = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How one step ended, or where it stands."""

    name: str
    kind: str
    display_name: str
    team: str
    state: StepState
    reason: str = ""
    app: str = ""  # its id in the ledger; empty: it never entered
    attempts: int = 0
    began: float | None = None  # s since the Unix epoch
    ended: float | None = None
    deadline: float | None = None  # s since the Unix epoch
    results: Mapping[str, str] = field(default_factory=dict)  # what references to it stand for
    details: Mapping[str, str | float | bool | None] = field(default_factory=dict)  # for reports

    @property
    def seconds(self) -> float | None:
        """Return how long it took."""
        return None if self.began is None or self.ended is None else self.ended - self.began

    @property
    def late(self) -> bool | None:
        """Tell whether it missed its deadline; ``None`` where it has none or has not finished."""
        if self.deadline is None or self.ended is None or self.state != "finished":
            return None
        return self.ended > self.deadline


@dataclass(frozen=True, slots=True)
class PipelineOutcome:
    """How a run of a pipeline ended."""

    id: str
    name: str
    display_name: str
    directory: str
    state: PipelineState
    reason: str
    began: float  # s since the Unix epoch, of its first start
    seconds: float  # of this process' part
    steps: tuple[StepOutcome, ...]
    ledger: str = ""  # address without a password; empty: it has none
    cluster: str = ""  # its name in the ledger
    report: str = ""  # the page

    def to_json(self) -> str:
        """Return the outcome as one JSON document, with the version of its format."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    def step(self, name: str) -> StepOutcome:
        """Return the outcome of a step."""
        return next(one for one in self.steps if one.name == name)


def overall(steps: tuple[StepOutcome, ...]) -> tuple[PipelineState, str]:
    """Return how a pipeline ended whose steps have ended so, and why in a sentence."""
    failed = [one for one in steps if one.state == "failed"]
    if failed:
        others = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        return "failed", f"{failed[0].display_name} failed: {failed[0].reason}{others}"
    left = [one.display_name for one in steps if one.state not in ("finished", "skipped")]
    if left:
        return "stopped", f"stopped before the end of {', '.join(left)}"
    late = [one.display_name for one in steps if one.late]
    return "finished", "all steps have finished" + (f"; late: {', '.join(late)}" if late else "")
