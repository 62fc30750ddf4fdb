"""Every system whose evaluation is made again, and how its page is put together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ebbflow.infra.storage.files import write_text
from ebbflow.planners.errors import OptionError
from tests.evaluation.experiments import Experiment, Found, Progress, run_experiments
from tests.evaluation.page import Pictures

SYSTEMS: Mapping[str, str] = {
    "tiresias": "Gu et al., NSDI 2019, and Gu's dissertation (Michigan 2021), chapter 3",
    "optimus": "Peng et al., EuroSys 2018",
    "pollux": "Qiao et al., OSDI 2021, and Qiao's thesis (CMU-CS-21-135), chapter 3",
    "themis": "Mahajan et al., NSDI 2020, and Mahajan's thesis (Wisconsin–Madison 2021), chapter 3",
}
"""Name: what its figures are from."""

FOLDER = "evaluation"  # of the pictures, beside the pages


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One system's experiments and page."""

    name: str
    experiments: Callable[[bool], list[Experiment]]
    page: Callable[[Found, str], tuple[str, Pictures]]
    title: str
    parameters: str


def evaluations(names: str) -> list[Evaluation]:
    """Return the evaluations of a comma-separated list of systems. Raises ``OptionError`` for an unknown one."""
    wanted = [name.strip().lower() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in SYSTEMS]
    if unknown or not wanted:
        raise OptionError(f"systems are {', '.join(SYSTEMS)}; got {names!r}")
    return [_load(name) for name in dict.fromkeys(wanted)]


def _load(name: str) -> Evaluation:
    folder = f"tests.evaluation.{name}"
    runs, page = import_module(f"{folder}.runs"), import_module(f"{folder}.page")
    return Evaluation(name, runs.experiments, page.page, page.TITLE, page.PARAMETERS)


def evaluate(
    chosen: Sequence[Evaluation],
    out: Path,
    documents: Path,
    *,
    quick: bool = False,
    progress: Progress = lambda *_: None,
) -> list[Path]:
    """Run what is not in ``out`` yet, write pages into ``documents`` and pictures beside; return the pages."""
    written = []
    for one in chosen:
        found = run_experiments(one.name, one.experiments(quick), out, progress)
        text, pictures = one.page(found, f"{FOLDER}/")
        for name, svg in pictures.items():
            write_text(documents / FOLDER / f"{name}.svg", svg)
        head = _head(one, found, quick)
        written.append(write_text(documents / f"{one.name}-evaluation.md", f"{head}\n{text.rstrip()}\n"))
    return written


def _head(one: Evaluation, found: Mapping[str, Any], quick: bool) -> str:
    command = f"python -m tests.evaluation {one.name} --document docs{' --quick' if quick else ''}"
    words = "Few jobs and seeds: a look at the page, not a measurement.\n\n" if quick else ""
    return (
        f"# {one.title}\n\n{words}Figures of {SYSTEMS[one.name]}, beside ours;"
        f" {len(found)} experiments, made by\n\n"
        f"    {command}\n\nThe ratio is ours over the published figure.\n\n{one.parameters.strip()}\n"
    )
