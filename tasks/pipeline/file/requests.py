"""What a step asks of the parts that carry it out: requests, checked when the file is read and made again to run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.elastic.request import ElasticAppRequest, ElasticRequest
from ebbflow.tasks.pipeline.file.option_keys import (
    ELASTIC_OPTIONS,
    QUERY_OPTIONS,
    TRAINING_OPTIONS,
    TRIAL_OPTIONS,
    TUNING_OPTIONS,
)
from ebbflow.tasks.pipeline.file.spec import AwsSpec, ExistingSpec, LocalSpec, Pipeline, StepSpec
from ebbflow.tasks.query.request import LOCAL, QueryRequest, default_store
from ebbflow.tasks.training.checks import absolute_source
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.request import LEDGER, Parameter, TuningRequest

Fill = Callable[[str], str]
"""Replaces the references of a text by what they stand for."""

_QUERY = (*QUERY_OPTIONS, "conf")
_TRAINING = (*TRIAL_OPTIONS, *TRAINING_OPTIONS)
_TUNING = ("max_gpus", "parallel", *TRIAL_OPTIONS, *TUNING_OPTIONS)


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
    options |= _code(given, pipeline)
    if given.get("failure_rules"):
        options["failure_rules"] = resolved(given["failure_rules"], pipeline)
    if given.get("track"):
        options["track"] = tuple(tracker(one, pipeline) for one in given["track"])
    return TrainingRequest(
        arguments=tuple(fill(one) for one in given.get("arguments", ())),
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
    options |= _code(given, pipeline) | {"gpus_per_trial": wanted_gpus(step)}
    if given.get("track"):
        options["track"] = tuple(tracker(one, pipeline) for one in given["track"])
    if "://" in places.runs:  # where no file can be the study
        options.setdefault("study", LEDGER)
    return TuningRequest(
        space=tuple(Parameter.parse(name, entry) for name, entry in given["space"].items()),
        arguments=tuple(fill(one) for one in given.get("arguments", ())),
        run_id=run,
        runs_dir=places.runs,
        nodes=f"local:{gpu_bounds(step)[1]}x1",
        **options,
    )


def elastic_request(
    step: StepSpec, pipeline: Pipeline, places: RunDirectories, fill: Fill, run: str, state_dir: str
) -> ElasticAppRequest:
    """Return the request of an elastic job; ``state_dir`` is where its snapshots are. Raises ``OptionError``."""
    given = step.options
    options: dict[str, Any] = {name: given[name] for name in ELASTIC_OPTIONS if given.get(name) is not None}
    if given.get("workdir"):
        options["workdir"] = absolute_source(given["workdir"], pipeline.folder)
    source = resolved(fill(given["input"]), pipeline) if given.get("input") else None
    return ElasticAppRequest(
        ElasticRequest(given["app"], source, parameters=given["parameters"], **options),
        run,
        places.runs,
        state_dir,
        name=step.label,
        label=given["label"],
        workers=wanted_gpus(step),
        max_workers=gpu_bounds(step)[1],
        termination_grace=given["termination_grace"],
    )


def gpu_bounds(step: StepSpec) -> tuple[int, int]:
    """Return the fewest and the most GPUs that a step other than a query can use. Raises ``OptionError``."""
    given = step.options
    wanted = wanted_gpus(step)
    if step.kind == "elastic":
        return 1, int(given.get("max_workers") or wanted)
    if step.kind == "tuning":
        each = max(wanted, int(given.get("max_gpus") or wanted))
        return wanted, each * int(given.get("parallel", 4))
    least = int(given.get("min_gpus") or 1)
    most = int(given.get("max_gpus") or max(wanted, least))
    if not least <= wanted <= most:
        raise OptionError(f"min_gpus <= gpus <= max_gpus must hold; got {least}, {wanted} and {most}")
    return least, most


def wanted_gpus(step: StepSpec) -> int:
    """Return the GPUs that a step asks for; of a tuning run, each trial."""
    return int(step.options.get("workers" if step.kind == "elastic" else "gpus", 1))


def engine_of(step: StepSpec, pipeline: Pipeline) -> str:
    """Return the engine of a query: Spark where the cluster has some, unless the file says otherwise."""
    given = step.options.get("engine")
    if given and given != "auto":
        return str(given)
    return "spark" if has_spark(pipeline) else "duckdb"


def has_spark(pipeline: Pipeline) -> bool:
    """Tell whether the cluster has Spark workers, or a master that is named."""
    cluster = pipeline.cluster
    if isinstance(cluster, LocalSpec):
        return bool(cluster.of("spark"))
    return bool(cluster.master or (isinstance(cluster, AwsSpec) and cluster.spark_pools))


def team_weight(step: StepSpec, pipeline: Pipeline) -> float:
    """Return what the app of a step counts for its team's sake."""
    team = pipeline.teams.get(step.team)
    return team.weight if team else 1.0


def resolved(path: str, pipeline: Pipeline) -> str:
    """Return a path of the file, relative ones taken from the file's directory; addresses stay."""
    return within(pipeline.folder, path)


def tracker(text: str, pipeline: Pipeline) -> str:
    """Return a tracker as the file names it; the directory of one is taken from the file's directory."""
    kind, _, place = text.partition(":")
    if kind != "mlflow" or not place or place == "databricks" or "://" in place or place.startswith("#"):
        return text
    return f"mlflow:{resolved(place, pipeline)}"


def _code(given: Mapping[str, Any], pipeline: Pipeline) -> dict[str, Any]:
    """Return script, working directory and requirements of a step; paths are taken from the file's directory."""
    found = {"script": resolved(given["script"], pipeline)}
    if given.get("requirements"):
        found["requirements"] = resolved(given["requirements"], pipeline)
    if given.get("workdir"):
        found |= {"script": given["script"], "workdir": absolute_source(given["workdir"], pipeline.folder)}
    return found


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
