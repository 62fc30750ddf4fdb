"""What a step asks of the parts that carry it out: requests, checked when the file is read and made again to run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.pipeline.file.option_keys import (
    QUERY_OPTIONS,
    TRAINING_OPTIONS,
    TRIAL_OPTIONS,
    TUNING_OPTIONS,
)
from ebbflow.tasks.pipeline.file.spec import AwsSpec, ExistingSpec, LocalSpec, Pipeline, StepSpec
from ebbflow.tasks.query.request import LOCAL, QueryRequest, default_store
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.request import Parameter, TuningRequest

Fill = Callable[[str], str]
"""Replaces the references of a text by what they stand for."""

_QUERY = (*QUERY_OPTIONS, "conf")
_TRAINING = (*TRIAL_OPTIONS, *TRAINING_OPTIONS)
_TUNING = ("max_gpus", *TRIAL_OPTIONS, *TUNING_OPTIONS)


@dataclass(frozen=True)
class RunDirectories:
    """Where a run of a pipeline keeps things."""

    folder: str  # of the run: results, trainings; local or s3://
    store: str  # of queries' checkpoints
    master: str = ""  # of Spark; empty: there is none

    def result(self, step: StepSpec) -> tuple[str, str]:
        """Return the directory and the file of a query's result."""
        folder = f"{self.folder.rstrip('/')}/results/{step.name}"
        return folder, f"{folder}/{step.options.get('output') or step.name}.parquet"

    @property
    def runs(self) -> str:
        """Return the directory of all trainings and tuning runs."""
        return f"{self.folder.rstrip('/')}/runs"


def query_request(
    step: StepSpec,
    pipeline: Pipeline,
    places: RunDirectories,
    fill: Fill,
    tables: str | None = None,
    functions: tuple[str, ...] = (),
) -> QueryRequest:
    """Return what a query step asks for; ``tables`` is where its tables are found, once that is settled.

    ``functions`` are those that whoever runs the pipeline allows; its file has no say in them. Raises
    ``OptionError``.
    """
    given = step.options
    engine = engine_of(step, pipeline)
    if tables is None and given.get("tables"):
        tables = fill(given["tables"][0])
    options: dict[str, Any] = {name: given[name] for name in _QUERY if given.get(name) is not None}
    if engine == "spark":
        options["master"] = places.master or LOCAL
    return QueryRequest.of(
        given.get("sql") or resolved(given["file"], pipeline),
        tables=tables,
        engine=engine,
        store=places.store,
        output=places.result(step)[1],
        name=step.label,
        weight=step.weight * team_weight(step, pipeline),
        allow_functions=functions,
        **options,
    )


def training_request(
    step: StepSpec, pipeline: Pipeline, places: RunDirectories, fill: Fill, run: str = ""
) -> TrainingRequest:
    """Return what a training step asks for; ``run`` is the id of its run. Raises ``OptionError``."""
    given = step.options
    options: dict[str, Any] = {name: given[name] for name in _TRAINING if given.get(name) is not None}
    least, most = gpu_bounds(step)
    options |= {"min_gpus": least, "max_gpus": most}
    for name in ("failure_rules", "requirements"):
        if given.get(name):
            options[name] = resolved(given[name], pipeline)
    script = resolved(given["script"], pipeline)
    if given.get("workdir"):
        script = given["script"]  # relative to the working directory
        options["workdir"] = code_source(given["workdir"], pipeline)
    return TrainingRequest(
        script,
        tuple(fill(one) for one in given.get("arguments", ())),
        run_id=run,
        name=step.label,
        runs_dir=places.runs,
        nodes=f"local:{most}x1",
        **options,
    )


def tuning_request(
    step: StepSpec, pipeline: Pipeline, places: RunDirectories, fill: Fill, run: str = ""
) -> TuningRequest:
    """Return the request of a tuning step; ``run`` is the ID of its tuning run. Raises ``OptionError``."""
    given = step.options
    options: dict[str, Any] = {name: given[name] for name in _TUNING if given.get(name) is not None}
    options["gpus_per_trial"] = wanted_gpus(step)
    space = tuple(Parameter.parse(name, entry) for name, entry in given["space"].items())
    return TuningRequest(
        resolved(given["script"], pipeline),
        space,
        arguments=tuple(fill(one) for one in given.get("arguments", ())),
        run_id=run,
        runs_dir=places.runs,
        nodes=f"local:{gpu_bounds(step)[1]}x1",
        **options,
    )


def gpu_bounds(step: StepSpec) -> tuple[int, int]:
    """Return the fewest and the most GPUs that a training or a tuning run can use. Raises ``OptionError``."""
    given = step.options
    wanted = int(given.get("gpus", 1))
    if step.kind == "tuning":
        each = max(wanted, int(given.get("max_gpus") or wanted))
        return wanted, each * int(given.get("parallel", 4))
    least = int(given.get("min_gpus") or 1)
    most = int(given.get("max_gpus") or max(wanted, least))
    if not least <= wanted <= most:
        raise OptionError(f"min_gpus <= gpus <= max_gpus must hold; got {least}, {wanted} and {most}")
    return least, most


def wanted_gpus(step: StepSpec) -> int:
    """Return the GPUs that a training asks for; a tuning run's request says so itself."""
    return int(step.options.get("gpus", 1))


def engine_of(step: StepSpec, pipeline: Pipeline) -> str:
    """Return the engine of a query: Spark where the cluster has some, unless the file says otherwise."""
    given = step.options.get("engine")
    if given and given != "auto":
        return str(given)
    cluster = pipeline.cluster
    has_spark = bool(cluster.of("spark")) if isinstance(cluster, LocalSpec) else bool(cluster.master)
    return "spark" if has_spark else "duckdb"


def team_weight(step: StepSpec, pipeline: Pipeline) -> float:
    """Return what the app of a step counts for its team's sake."""
    team = pipeline.teams.get(step.team)
    return team.weight if team else 1.0


def resolved(path: str, pipeline: Pipeline) -> str:
    """Return a path of the file, relative ones taken from the file's directory; addresses stay."""
    return within(pipeline.folder, path)


def code_source(source: str, pipeline: Pipeline) -> str:
    """Return the source of a working directory; a path in it is taken from the file's directory."""
    if source.startswith("git+"):
        return source
    path, at, ref = source.rpartition("@")
    if at and not Path(resolved(source, pipeline)).is_dir():
        return f"{resolved(path, pipeline)}@{ref}"
    return resolved(source, pipeline)


def within(folder: str, path: str) -> str:
    """Return ``path``, if it is relative within ``folder``; addresses stay."""
    if "://" in path:
        return path
    return str((Path(folder or ".") / Path(path).expanduser()).absolute())


def places_of(pipeline: Pipeline, folder: str, master: str = "") -> RunDirectories:
    """Return where a run in ``folder`` keeps things."""
    cluster = pipeline.cluster
    store = pipeline.store or default_store()
    if isinstance(cluster, AwsSpec | ExistingSpec):
        if cluster.directory:
            folder = f"{cluster.directory.rstrip('/')}/pipelines/{Path(folder).name}"
        store = pipeline.store or (f"{cluster.directory.rstrip('/')}/store" if cluster.directory else store)
        master = master or cluster.master
    return RunDirectories(folder, store if "://" in store else resolved(store, pipeline), master)
