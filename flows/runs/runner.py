"""``--runner``: whether a command records what it does on a Prefect server."""

import os
from enum import StrEnum


class Runner(StrEnum):
    auto = "auto"
    prefect = "prefect"
    plain = "plain"


def wants_prefect(runner: Runner) -> bool:
    """Tell whether a run is to be recorded on a Prefect server; by ``auto`` where one is configured."""
    return runner is Runner.prefect or (runner is Runner.auto and bool(os.environ.get("PREFECT_API_URL")))
