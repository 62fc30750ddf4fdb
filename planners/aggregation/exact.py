"""The best assignment of few tasks by trying all: what the heuristic is measured against (AutoPS, IV.1 and IV.2)."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product

from ebbflow.planners.aggregation.cyclic_schedule import performance_loss
from ebbflow.planners.aggregation.model import AggregationTask, AggregatorPool
from ebbflow.planners.errors import OptionError

MAX_TASKS = 10
MAX_AGGREGATORS = 4


def execution_need(
    tasks: Sequence[tuple[AggregationTask, int]],
    iterations_us: Mapping[str, int],
    *,
    literal: bool = False,
) -> dict[int, int]:
    """Return the execution time that each aggregator needs per cycle, microseconds.

    Args:
        tasks: with their aggregators.
        iterations_us: standalone iteration of each training, microseconds.
        literal: divide cycles by stretched durations, as the source writes; an aggregator whose training is stretched
            elsewhere then seems to need nothing.
    """
    cycles: dict[int, int] = {}
    for task, where in tasks:
        cycles[where] = max(cycles.get(where, 0), iterations_us[task.job_id])
    stretched = {job: Fraction(own) for job, own in iterations_us.items()}
    if literal:
        for task, where in tasks:
            own = iterations_us[task.job_id]
            duration = Fraction(cycles[where], cycles[where] // own)
            stretched[task.job_id] = max(stretched[task.job_id], duration)
    needs = dict.fromkeys(cycles, 0)
    for task, where in tasks:
        needs[where] += task.execution_us * int(cycles[where] // stretched[task.job_id])
    return needs


def max_loss(pool: AggregatorPool) -> Fraction:
    """Return the largest loss of a training on any aggregator of a pool, a share of its speed."""
    return max(
        (
            performance_loss(pool.cycle_us(one), own)
            for one in pool.aggregators
            for own in pool.iterations(one).values()
        ),
        default=Fraction(0),
    )


def least_max_loss(
    tasks: Sequence[AggregationTask], iterations_us: Mapping[str, int], aggregators: int
) -> Fraction | None:
    """Return the least possible largest loss on at most so many aggregators, or nothing where none fits.

    Args:
        tasks: at most ``MAX_TASKS``.
        iterations_us: standalone iteration of each training, microseconds.
        aggregators: at most ``MAX_AGGREGATORS``.

    Raises ``OptionError`` for more tasks or aggregators: the work grows exponentially.
    """
    if len(tasks) > MAX_TASKS or aggregators > MAX_AGGREGATORS:
        raise OptionError(
            f"an exact assignment must have at most {MAX_TASKS} tasks and {MAX_AGGREGATORS} aggregators, not"
            f" {len(tasks)} and {aggregators}"
        )
    best: Fraction | None = None
    for where in product(range(aggregators), repeat=len(tasks)):
        placed = list(zip(tasks, where, strict=True))
        cycles: dict[int, int] = {}
        for task, one in placed:
            cycles[one] = max(cycles.get(one, 0), iterations_us[task.job_id])
        loss = max(
            (performance_loss(cycles[one], iterations_us[task.job_id]) for task, one in placed),
            default=Fraction(0),
        )
        if best is not None and loss >= best:
            continue
        if all(need <= cycles[one] for one, need in execution_need(placed, iterations_us).items()):
            best = loss
    return best
