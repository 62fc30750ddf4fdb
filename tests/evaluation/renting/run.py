"""Runs the experiments on renting and writes the page."""

from pathlib import Path

from ebbflow.infra.storage.files import write_text
from tests.evaluation.experiments import Progress, run_experiments
from tests.evaluation.renting.page import page
from tests.evaluation.renting.plan import experiments

FOLDER = "evaluation"  # of the pictures, beside the page


def evaluate(
    out: Path, documents: Path, *, quick: bool = False, progress: Progress = lambda *_: None
) -> Path:
    """Run what is not in ``out`` yet; write and return the page."""
    some = experiments(quick)
    found = run_experiments("fleet", some, out, progress)
    text, pictures = page(found, f"{FOLDER}/")
    for name, svg in pictures.items():
        write_text(documents / FOLDER / f"{name}.svg", svg)
    command = f"python -m tests.evaluation renting --document docs{' --quick' if quick else ''}"
    words = "Two short jobs, two beginnings: a look at the page, not a measurement.\n\n" if quick else ""
    head = f"# Renting, simulated\n\n{words}{len(found)} experiments, made by\n\n    {command}\n"
    return write_text(documents / "fleet-evaluation.md", f"{head}\n{text.rstrip()}\n")
