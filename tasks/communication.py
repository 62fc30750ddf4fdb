"""What commands do for planned communication: read and write its files, search, compare, draw."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ebbflow.infra.storage.user_files import read_text
from ebbflow.planners.communication.baselines import SYSTEMS, System
from ebbflow.planners.communication.measured import MeasuredLinks
from ebbflow.planners.communication.plan import CommunicationPlan
from ebbflow.planners.communication.planning import Bar, PlanSearch, bars_of, problem_of, search_plan
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.drawing.iterations import iterations_svg

MAX_FILE = 64 * 2**20  # bytes

T = TypeVar("T")


def read_training(path: str) -> RecordedTraining:
    """Return the recorded training of a file. Raises ``OptionError`` for a file that cannot be read or is none."""
    return _read(path, RecordedTraining.from_json)


def read_links(path: str) -> MeasuredLinks:
    """Return the measured links of a file. Raises ``OptionError`` for a file that cannot be read or is none."""
    return _read(path, MeasuredLinks.from_json)


def read_plan(path: str) -> CommunicationPlan:
    """Return the plan of a file. Raises ``OptionError`` for a file that cannot be read or is none."""
    return _read(path, CommunicationPlan.from_json)


def check_plan(plan: CommunicationPlan, recorded: RecordedTraining) -> None:
    """Raise ``OptionError`` where a training cannot run a plan: it is for another world size, or another model."""
    submitted = {op.name: (op.kind, op.bytes) for op in recorded.dag.comm}
    if problem := plan.problem(recorded.ranks, submitted):
        raise OptionError(f"the plan does not fit the training: {problem}")


def _read(path: str, parse: Callable[[str], T]) -> T:
    text = read_text(path, max_bytes=MAX_FILE)
    try:
        return parse(text)
    except (OptionError, RecursionError) as error:
        raise OptionError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class SystemResult:
    """What a system makes of a training.

    Args:
        system: its name.
        seconds: of an iteration in the steady state, simulated.
        idle: fraction of it in which the compute stream waits.
        options: collective -> how it is carried out.
        bars: what runs when.
    """

    system: System
    seconds: float
    idle: float
    options: dict[str, str]
    bars: tuple[Bar, ...]


def compare_systems(
    recorded: RecordedTraining,
    links: MeasuredLinks,
    *,
    systems: Sequence[System] = SYSTEMS,
    hand_order: Sequence[str] = (),
    search_seconds: float = 10.0,
    seed: int = 0,
) -> tuple[SystemResult, ...]:
    """Return what each system makes of a training, simulated on the same links.

    Args:
        recorded: the training.
        links: what its channels do.
        systems: names.
        hand_order: collectives, the most urgent first, for ``HO``.
        search_seconds: bound of each random walk.
        seed: of the walks.

    Raises ``OptionError`` for links of another gang, or an unknown system.
    """
    found = []
    for system in systems:
        problem = problem_of(
            recorded,
            links,
            rng=np.random.default_rng(seed),
            clock=time.monotonic,
            seconds=search_seconds,
            hand_order=hand_order,
        )
        one = problem.solve(system)
        options = {name: option.name for name, option in one.plan.items()}
        found.append(
            SystemResult(system, one.timeline.period, one.timeline.idle, options, bars_of(one, recorded.dag))
        )
    return tuple(found)


def plan_training(
    recorded: RecordedTraining,
    links: MeasuredLinks,
    *,
    system: System = "Syndicate",
    search_seconds: float = 10.0,
    seed: int = 0,
) -> PlanSearch:
    """Return the plan of a training. Raises ``OptionError`` for links of another gang, or nothing to plan."""
    problem = problem_of(
        recorded, links, rng=np.random.default_rng(seed), clock=time.monotonic, seconds=search_seconds
    )
    return search_plan(problem, version=1, system=system)


def picture_of_search(found: PlanSearch, recorded: RecordedTraining) -> str:
    """Return the timelines without and with a plan, as SVG."""
    return iterations_svg(
        "An iteration: what computes, and what each channel carries",
        {
            "without a plan (predicted)": bars_of(found.plain, recorded.dag),
            "with the plan (predicted)": bars_of(found.best, recorded.dag),
        },
    )


def picture_of_systems(results: Sequence[SystemResult]) -> str:
    """Return the timelines of systems over one another, as SVG."""
    return iterations_svg("An iteration of each system, simulated", {one.system: one.bars for one in results})
