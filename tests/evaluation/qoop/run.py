"""Runs the parts of the evaluation, each into a JSON file of its own, and makes the document of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebbflow.infra.storage.files import write_text
from ebbflow.planners.errors import OptionError
from tests.evaluation.qoop.document import text_of
from tests.evaluation.qoop.micro import benchmark, sweeps
from tests.evaluation.qoop.motivation import run_motivation
from tests.evaluation.qoop.pictures import pictures
from tests.evaluation.qoop.ratios import run_competitive
from tests.evaluation.qoop.settings import Settings
from tests.evaluation.qoop.world import workload

PARTS = ("motivation", "competitive", "micro", "sweeps", "macro")
SWEEP_RUNS = 4  # at most: the sweeps have many settings

Progress = Callable[[str, int, int], None]


def run_part(
    part: str,
    settings: Settings,
    out: Path,
    *,
    instances: int = 100_000,
    progress: Progress = lambda what, done, total: None,
) -> Path:
    """Run one part and write its JSON file into ``out``; returns the file. Raises ``OptionError``."""
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "motivation": lambda: run_motivation(settings),
        "competitive": lambda: run_competitive(settings.seed, instances, progress),
        "micro": lambda: benchmark(settings, progress),
        "sweeps": lambda: sweeps(settings.with_runs(min(settings.runs, SWEEP_RUNS)), progress),
        "macro": lambda: _macro(settings, progress),
    }
    if part not in makers:
        raise OptionError(f"part must be one of {', '.join(PARTS)}; got {part!r}")
    return write_text(out / f"{part}.json", json.dumps(makers[part](), indent=1, allow_nan=False) + "\n")


def _macro(settings: Settings, progress: Progress) -> dict[str, Any]:
    from tests.evaluation.qoop.macro import run_macro

    return run_macro(
        workload("tpcds", settings), progress=lambda what, done=0, total=0: progress(what, done, total)
    )


def write_document(out: Path, target: Path) -> Path:
    """Make the document and its pictures of the parts found in ``out``."""
    found: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        path = out / f"{part}.json"
        if path.exists():
            found[part] = json.loads(path.read_text())
    drawn = pictures(found)
    for name, svg in drawn.items():
        write_text(out / f"{name}.svg", svg)
    folder = "" if target.parent == out else f"{out.name}/"
    return write_text(target, text_of(found, folder, sorted(drawn)))
