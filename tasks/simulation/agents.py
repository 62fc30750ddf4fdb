"""What runs beside a simulated job and chooses its batch."""

from collections.abc import Mapping

from ebbflow.infra.simulation.jobs.profiles import Profile
from ebbflow.infra.simulation.traces.workloads import Job
from ebbflow.planners.training.speed.batch_agent import GoodputAgent
from ebbflow.planners.training.speed.batch_size import BatchLimits

FIXED_TOTALS: Mapping[str, int] = {"ncf": 32768}  # what the authors of Pollux set by hand, examples


def limits_of(profile: Profile) -> BatchLimits:
    """Return the batches that an application was measured with."""
    return BatchLimits(profile.first_batch, profile.last_batch, profile.local_min, profile.local_max)


def goodput_agent(job: Job, profile: Profile) -> GoodputAgent:
    """Return Pollux's agent for ``job``; the batch and the GPUs that its user asks for do not count."""
    return GoodputAgent(limits_of(profile), FIXED_TOTALS.get(profile.name), profile.most_gpus)
