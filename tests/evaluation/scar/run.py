"""Runs SCAR's experiments and writes the page."""

from collections.abc import Sequence
from pathlib import Path

from ebbflow.infra.storage.files import write_text
from ebbflow.planners.errors import OptionError
from tests.evaluation.experiments import Experiment, Progress, run_experiments
from tests.evaluation.scar.page import page
from tests.evaluation.scar.plan import experiments

TITLE = "SCAR: rework after failures, made again"
FOLDER = "evaluation"  # of the pictures, beside the page


def chosen(only: str | None, quick: bool) -> list[Experiment]:
    """Return the experiments whose names begin with one of a comma-separated list; all without.

    Raises:
        OptionError: a beginning that no experiment has.
    """
    every = experiments(quick)
    if only is None:
        return every
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in wanted if not any(e.name.startswith(name) for e in every)]
    if unknown or not wanted:
        raise OptionError(f"experiments are {', '.join(e.name for e in every)}; got {only!r}")
    return [e for e in every if any(e.name.startswith(name) for name in wanted)]


def evaluate(
    some: Sequence[Experiment],
    out: Path,
    documents: Path,
    *,
    quick: bool = False,
    progress: Progress = lambda *_: None,
) -> Path | None:
    """Run what is not in ``out`` yet; write and return the page, or ``None`` while experiments are missing."""
    found = run_experiments("scar", some, out, progress)
    if len(some) < len(experiments(quick)):
        return None
    text, pictures = page(found, f"{FOLDER}/")
    for name, svg in pictures.items():
        write_text(documents / FOLDER / f"{name}.svg", svg)
    command = f"python -m tests.evaluation scar --document docs{' --quick' if quick else ''}"
    words = "Few trials: a look at the page, not a measurement.\n\n" if quick else ""
    head = (
        f"# {TITLE}\n\n{words}Figures of Qiao, Aragam, Zhang and Xing, ICML 2019, and Qiao's thesis (CMU-CS-21-135),"
        f" chapter 5, beside ours; {len(found)} experiments, made by\n\n    {command}\n"
    )
    return write_text(documents / "scar-evaluation.md", f"{head}\n{text.rstrip()}\n")
