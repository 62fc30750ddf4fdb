"""Small trainings for tests of aggregation."""

from hypothesis import strategies as st

from ebbflow.planners.aggregation.model import AggregationTask, AggregatorPool, JobProfile


def profile(job: str, iteration: int, executions: list[int], servers: int = 1, size: int = 0) -> JobProfile:
    tasks = (AggregationTask(job, f"{job}{i:02}", e, size) for i, e in enumerate(executions))
    return JobProfile(job, iteration, tuple(tasks), servers)


def placed(pool: AggregatorPool) -> list[tuple[int, int, int]]:
    """Return cycle, busy and free time of each aggregator."""
    return [(pool.cycle_us(one), pool.busy_us(one), pool.free_us(one)) for one in pool.aggregators]


@st.composite
def profiles(draw: st.DrawFn, max_jobs: int = 5, max_tasks: int = 5) -> list[JobProfile]:
    """Draw trainings whose every task is shorter than the iteration."""
    jobs = []
    for i in range(draw(st.integers(1, max_jobs))):
        iteration = draw(st.integers(5, 60))
        executions = draw(st.lists(st.integers(1, iteration), min_size=1, max_size=max_tasks))
        jobs.append(profile(f"j{i}", iteration, executions, draw(st.integers(1, 4))))
    return jobs
