"""Jobs that change their batch size, as the public Shockwave simulator has them (NSDI 2023, section 2).

Accordion trains with a large batch outside critical epochs; gradient-noise-scale (gns) doubles it in steps that
were measured beforehand. Epochs count from 0, and an epoch is ⌈samples / batch⌉ steps whatever the gang.
"""

from collections.abc import Iterator
from typing import Literal

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.rounds.trace import Mode, Throughputs, TraceJob

SAMPLES = {
    "ResNet-18": 50_000,
    "ResNet-50": 100_000,
    "Transformer": 10_000,
    "LM": 59_675,
    "Recommendation": 117_907,
    "CycleGAN": 6_287,
    "A3C": 4,
}
CEILING = {"ResNet-18": 256, "ResNet-50": 128, "Transformer": 128, "LM": 80, "Recommendation": 8192}
FLOOR = {"ResNet-18": 16, "ResNet-50": 16, "Transformer": 16, "LM": 5, "Recommendation": 512}
TOP = {model: batch for model, batch in CEILING.items() if model != "Transformer"}

# (model, first batch, GPUs): the epochs from which the batch is 2, 4, 8 and 16 times the first
DOUBLINGS: dict[tuple[str, int, int], tuple[int, ...]] = {
    ("ResNet-18", 16, 1): (31, 41, 51, 71),
    ("ResNet-18", 16, 2): (21, 31, 91, 111),
    ("ResNet-18", 16, 4): (11, 21, 81, 91),
    ("ResNet-18", 32, 1): (21, 31, 51),
    ("ResNet-18", 32, 2): (11, 21, 41),
    ("ResNet-18", 32, 4): (21, 31, 61),
    ("ResNet-18", 64, 1): (11, 31),
    ("ResNet-18", 64, 2): (21, 41),
    ("ResNet-18", 64, 4): (11, 61),
    ("ResNet-18", 128, 1): (11,),
    ("ResNet-18", 128, 2): (41,),
    ("ResNet-18", 128, 4): (11,),
    ("ResNet-50", 32, 2): (101, 111),
    ("ResNet-50", 32, 4): (131, 221),
    ("ResNet-50", 64, 1): (101,),
    ("ResNet-50", 64, 2): (81,),
    ("ResNet-50", 64, 4): (191,),
    ("LM", 5, 1): (31, 41, 61, 71),
    ("LM", 5, 2): (31, 51, 61, 71),
    ("LM", 5, 4): (11, 31, 71, 91),
    ("LM", 10, 1): (11, 21, 41),
    ("LM", 10, 2): (11, 31, 41),
    ("LM", 10, 4): (11, 31, 61),
    ("LM", 20, 1): (11, 41),
    ("LM", 20, 2): (31, 41),
    ("LM", 20, 4): (11, 61),
    ("LM", 40, 1): (11,),
    ("LM", 40, 2): (11,),
    ("LM", 40, 4): (61,),
    ("Recommendation", 512, 1): (21, 41, 71, 91),
    ("Recommendation", 1024, 1): (21, 51, 91),
    ("Recommendation", 2048, 1): (21, 41),
    ("Recommendation", 4096, 1): (41,),
}
_CRITICAL_RECOMMENDATION = {512: 30, 1024: 30, 2048: 40, 4096: 10, 8192: 10}


def up(dividend: int, divisor: int) -> int:
    """Return ⌈dividend / divisor⌉ of whole numbers, negative ones too."""
    return -(-dividend // divisor)


def epoch_steps(model: str, batch: int) -> int:
    """Return the steps of one epoch. Raises ``WorkloadError`` for a model whose data set is not known."""
    if model not in SAMPLES:
        raise WorkloadError(f"the samples of an epoch of {model} are not known; known: {', '.join(SAMPLES)}")
    return up(SAMPLES[model], batch)


def job_type(model: str, batch: int) -> str:
    """Return the name of a job type in the throughput tables."""
    return f"{model} (batch size {batch})"


def gns_batch(model: str, first: int, gpus: int, epoch: int, epochs: int) -> int:
    """Return the batch size of ``epoch`` in a run of ``epochs`` under gradient-noise scaling.

    The last epoch stays at ``first`` unless the first doubling is all that happened by then.
    """
    doublings = DOUBLINGS.get((model, first, gpus))
    if doublings is None or epochs <= doublings[0]:
        return first
    passed = sum(epoch >= start for start in doublings)
    if epoch == epochs - 1 and passed > 1:
        return first
    return min(first << passed, CEILING[model])


def critical(model: str, first: int, epoch: int, alone: bool = False) -> bool:
    """Tell whether accordion keeps the first batch size in ``epoch``.

    ``alone`` takes the wider rule with which the artefact estimates run times.
    """
    match model:
        case "LM":
            return epoch < 10
        case "Recommendation":
            late = alone and (60 <= epoch < 70 or 80 <= epoch < 90)
            return late or epoch < _CRITICAL_RECOMMENDATION.get(first, 0)
        case "ResNet-50":
            return epoch % 30 < 10 and not (alone and epoch >= 600)
        case "ResNet-18":
            return epoch < (20 if first == 256 else 10) or 150 <= epoch < 160 or 250 <= epoch < 260
    return False


def wish(
    mode: Mode, model: str, first: int, gpus: int, batch: int, epoch: int
) -> Literal["", "grow", "shrink"]:
    """Return what the job asks for at ``epoch`` with its present ``batch``."""
    ceiling = CEILING.get(model, 0)
    if mode == "accordion" and model in TOP:
        if critical(model, first, epoch):
            return "shrink" if batch not in (first, FLOOR[model]) else ""
        return "grow" if batch == first and batch < ceiling else ""
    if mode == "gns" and batch < ceiling:
        epochs = max(760, epoch + 2)
        if any(gns_batch(model, first, gpus, e, epochs) > batch for e in (epoch, epoch + 1)):
            return "grow"
    return ""


def batches(job: TraceJob) -> Iterator[int]:
    """Yield the batch size of every epoch of a run that nothing disturbs."""
    epochs = up(job.steps, epoch_steps(job.model, job.batch))
    for epoch in range(epochs):
        if job.mode == "gns":
            yield gns_batch(job.model, job.batch, job.gpus, epoch, epochs)
        elif (
            job.mode == "accordion"
            and job.model in TOP
            and epoch > 0.3 * epochs
            and not critical(job.model, job.batch, epoch, alone=True)
        ):
            yield TOP[job.model]
        else:
            yield job.batch


def time_alone(job: TraceJob, table: Throughputs, gpu: str) -> float:
    """Return the seconds on a dedicated gang of type ``gpu``, without queueing or overhead.

    Epochs count as samples over batch, not rounded to steps; a static job of a model whose data set is not known
    counts steps. Raises ``WorkloadError`` for a job that cannot run there.
    """
    if job.model not in SAMPLES and job.mode == "static":
        return job.steps / _speed(job, table, gpu, job.batch)
    seconds: dict[int, float] = {}
    total = 0.0
    for batch in batches(job):
        if batch not in seconds:
            seconds[batch] = SAMPLES[job.model] / batch / _speed(job, table, gpu, batch)
        total += seconds[batch]
    return total


def _speed(job: TraceJob, table: Throughputs, gpu: str, batch: int) -> float:
    kind = job.type if batch == job.batch else job_type(job.model, batch)
    speed = table.of(gpu, kind, job.gpus)
    if not speed:
        raise WorkloadError(f"job {job.number}: {kind} cannot run on {job.gpus} × {gpu}")
    return speed
