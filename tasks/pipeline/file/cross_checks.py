"""What the sections of a pipeline's file must be to each other, which none of them can see alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbflow.planners.errors import EbbflowError, OptionError
from ebbflow.tasks.pipeline.file.deciding import check_loop
from ebbflow.tasks.pipeline.file.document import Problems
from ebbflow.tasks.pipeline.file.faults import OF_POOLS
from ebbflow.tasks.pipeline.file.kinds import nearest
from ebbflow.tasks.pipeline.file.order import find_cycle
from ebbflow.tasks.pipeline.file.requests import (
    elastic_request,
    engine_of,
    gpu_bounds,
    has_spark,
    places_of,
    query_request,
    resolved,
    training_request,
    tuning_request,
    wanted_gpus,
)
from ebbflow.tasks.pipeline.file.sections import Values
from ebbflow.tasks.pipeline.file.spec import (
    TABLES,
    AwsSpec,
    ExistingSpec,
    LocalSpec,
    Pipeline,
    StepSpec,
)


class CrossChecks:
    """Adds to ``problems`` what is wrong with a pipeline as a whole; ``values`` are its sections."""

    def __init__(self, values: Values, problems: Problems) -> None:
        self._values = values
        self._problems = problems

    def check(self, pipeline: Pipeline) -> None:
        """Check everything."""
        self._check_loop(pipeline)
        self._check_needs(pipeline)
        for step in pipeline.steps.values():
            self._check_step(pipeline, step)
        self._check_spark(pipeline)
        self._check_faults(pipeline)
        self._check_quotas(pipeline)

    def _check_needs(self, pipeline: Pipeline) -> None:
        cycle = find_cycle(pipeline.needs)
        if cycle:
            step = pipeline.steps[cycle[0]]
            self._problems.add(step.line, step.path, f"steps wait for each other: {' -> '.join(cycle)}")

    def _check_step(self, pipeline: Pipeline, step: StepSpec) -> None:
        one: Values = self._values[TABLES[step.kind]][step.name]
        if step.team and step.team not in pipeline.teams:
            self._say(
                one,
                "team",
                f"there is no team {step.team!r} in teams{nearest(step.team, list(pipeline.teams))}",
            )
        if not step.team and pipeline.teams:
            self._say(one, "", f"team is missing: one of {', '.join(pipeline.teams)}")
        try:
            _request(pipeline, step)
        except EbbflowError as error:
            self._say(one, _key_of(str(error), one), str(error))
            return
        if step.kind == "query":
            self._check_query(pipeline, step, one)
            return
        if step.kind == "elastic":
            self._check_input(pipeline, step, one)
        self._check_gpus(pipeline, step, one)

    def _check_input(self, pipeline: Pipeline, step: StepSpec, one: Values) -> None:
        source = step.options.get("input") or ""
        if (
            source
            and "${" not in source
            and "://" not in source
            and not Path(resolved(source, pipeline)).exists()
        ):
            self._say(one, "input", f"there is no file or directory {source!r}")

    def _check_query(self, pipeline: Pipeline, step: StepSpec, one: Values) -> None:
        for text in step.options.get("tables", ()):
            if "${" not in text and "://" not in text and not Path(resolved(text, pipeline)).exists():
                self._say(one, "tables", f"there is no directory {text!r}")
        cluster = pipeline.cluster
        if engine_of(step, pipeline) == "spark" and not has_spark(pipeline):
            rules = {
                LocalSpec: "a pool of kind spark",
                AwsSpec: "spark_pools or the address of a Spark master",
            }
            rule = rules.get(type(cluster), "the address of a Spark master")
            self._say(one, "engine", f"engine spark needs {rule} in cluster; got none")

    def _check_spark(self, pipeline: Pipeline) -> None:
        """Queries of one process share a SparkContext, of which Spark allows one."""
        on_spark = [step for step in pipeline.of("query") if engine_of(step, pipeline) == "spark"]
        for step in on_spark[1:]:
            for key in ("conf", "executor_memory"):
                if step.options.get(key) != on_spark[0].options.get(key):
                    said = (
                        f"all queries on Spark share one application: it must be that of {on_spark[0].name}"
                    )
                    self._say(self._values["queries"][step.name], key, said)
        cluster = pipeline.cluster
        if (
            on_spark
            and isinstance(cluster, LocalSpec)
            and not any(pool.start for pool in cluster.of("spark"))
        ):
            local: Values = self._values["cluster"]["local"]
            self._say(
                local, "pools", "a pool of kind spark begins with a node at least: its master comes with it"
            )

    def _check_gpus(self, pipeline: Pipeline, step: StepSpec, one: Values) -> None:
        cluster = pipeline.cluster
        if isinstance(cluster, AwsSpec) and not cluster.pools:
            aws: Values = self._values["cluster"]["aws"]
            self._say(aws, "pools", f"pools is missing: names of the pools that {step.path} can run on")
        if not isinstance(cluster, LocalSpec):
            return
        least = max(gpu_bounds(step)[0], wanted_gpus(step))
        if cluster.gpus < least:
            rule = f"needs {least} GPUs; the pools of kind gpu have {cluster.gpus} at most"
            self._say(one, "workers" if step.kind == "elastic" else "gpus", rule)

    def _check_loop(self, pipeline: Pipeline) -> None:
        one: Values = self._values.get("loop") or self._values
        try:
            check_loop(pipeline)
        except OptionError as error:
            self._say(one, _key_of(str(error), one), str(error))

    def _check_quotas(self, pipeline: Pipeline) -> None:
        """A quota of a pool or team that does not exist would bound nothing."""
        for name in pipeline.quotas.teams:
            if name not in pipeline.teams:
                known = list(pipeline.teams)
                said = (
                    f"there is no team {name!r}; teams are {', '.join(known) or 'none'}{nearest(name, known)}"
                )
                self._say(self._values["quotas"], "teams", said)
        cluster = pipeline.cluster
        if isinstance(cluster, ExistingSpec):
            return
        pools = (
            [pool.name for pool in cluster.pools]
            if isinstance(cluster, LocalSpec)
            else [*cluster.pools, *cluster.spark_pools]
        )
        for name in pipeline.quotas.pools:
            if name not in pools:
                said = f"there is no pool {name!r}; pools are {', '.join(pools)}{nearest(name, pools)}"
                self._say(self._values["quotas"], "pools", said)

    def _check_faults(self, pipeline: Pipeline) -> None:
        if not isinstance(pipeline.cluster, LocalSpec):
            return
        local: Values = self._values["cluster"]["local"]
        pools = [pool.name for pool in pipeline.cluster.pools]
        for fault in pipeline.cluster.faults:
            if fault.step and fault.step not in pipeline.steps:
                said = f"there is no step {fault.step!r}{nearest(fault.step, list(pipeline.steps))}"
                self._say(local, "faults", said)
            pool = fault.target.rpartition("-")[0] or fault.target
            if fault.target not in pools and (fault.verb in OF_POOLS or pool not in pools):
                self._say(
                    local,
                    "faults",
                    f"there is no pool or node {fault.target!r}; nodes are called POOL-NUMBER, pools "
                    f"{', '.join(pools)}{nearest(fault.target, pools)}",
                )

    def _say(self, one: Values, key: str, rule: str) -> None:
        self._problems.add(one.line(key), one.path(key), rule)


def _request(pipeline: Pipeline, step: StepSpec) -> object:
    """Make a step's request with its references left as they are, to see whether it can be made."""
    places = places_of(pipeline, "/nowhere/run", "spark://nowhere:7077")

    def keep(text: str) -> str:
        return text

    if step.kind == "query":
        return query_request(step, pipeline, places, keep)
    if step.kind == "training":
        return training_request(step, pipeline, places, keep, "probe")
    if step.kind == "elastic":
        return elastic_request(step, pipeline, places, keep, "probe", "/nowhere/run")
    return tuning_request(step, pipeline, places, keep, "probe")


def _given(one: Values) -> Mapping[str, Any]:
    table = one.entry.value
    return table if isinstance(table, dict) else {}


def _key_of(message: str, one: Values) -> str:
    """Return the key that a request's error is about: its messages begin with it."""
    word = message.split(" ", 1)[0].rstrip(":")
    return word if word in _given(one) else ""
