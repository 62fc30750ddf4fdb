"""Reads a pipeline's file, and refuses what cannot work before anything starts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbflow.infra.local_fleet.state.pools import LocalPool, check
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.limits import Limits
from ebbflow.tasks.pipeline.checking import ReportFinding
from ebbflow.tasks.pipeline.file.cross_checks import CrossChecks
from ebbflow.tasks.pipeline.file.document import Problems, read_document, read_text
from ebbflow.tasks.pipeline.file.faults import parse_fault
from ebbflow.tasks.pipeline.file.form import PIPELINE
from ebbflow.tasks.pipeline.file.kinds import MISSING, nearest
from ebbflow.tasks.pipeline.file.parameters import with_parameters
from ebbflow.tasks.pipeline.file.references import Reference, references
from ebbflow.tasks.pipeline.file.requests import (
    within,
)
from ebbflow.tasks.pipeline.file.sections import Values
from ebbflow.tasks.pipeline.file.spec import (
    TABLES,
    AwsSpec,
    ClusterSpec,
    ExistingSpec,
    LocalSpec,
    LoopSpec,
    Pipeline,
    StepKind,
    StepSpec,
    TeamSpec,
)

_KINDS: Mapping[str, StepKind] = {section: kind for kind, section in TABLES.items()}
_OWN = ("display_name", "team", "after", "deadline", "weight", "budget", "attempts", "environment")


Further = Callable[[Pipeline, ReportFinding], object]
"""Checks more than the file, with findings of its own."""


def read_pipeline(
    path: Path | str, parameters: Mapping[str, str] | None = None, further: Further | None = None
) -> Pipeline:
    """Return the pipeline in the file ``path``. Raises ``PipelineFileError`` that names all that is wrong with it."""
    place = Path(path).expanduser()
    return parse_pipeline(read_text(place), str(path), str(place.absolute().parent), parameters, further)


def parse_pipeline(
    text: str,
    source: str = "pipeline.yaml",
    folder: str = ".",
    parameters: Mapping[str, str] | None = None,
    further: Further | None = None,
) -> Pipeline:
    """Return the pipeline in ``text``, whose paths are relative to ``folder``.

    ``further`` adds its findings to those of the file. Raises ``PipelineFileError`` that names all of them.
    """
    root = read_document(text, source)
    problems = Problems(source)
    root = with_parameters(root, parameters or {}, problems)
    problems.check()
    values = PIPELINE.read(root, problems)
    problems.check()
    assert isinstance(values, Values)
    reader = _Reader(values, problems)
    pipeline = reader.pipeline(source, folder, text)
    if further is not None:
        further(pipeline, reader.say)
    problems.check()
    return pipeline


class _Reader:
    """Turns what the sections say into values."""

    def __init__(self, values: Values, problems: Problems) -> None:
        self._values = values
        self._problems = problems

    def pipeline(self, source: str, folder: str, text: str) -> Pipeline:
        values = self._values
        steps: dict[str, StepSpec] = {}
        for section, kind in _KINDS.items():
            for name, one in values[section].items():
                if name in steps:
                    self._say(
                        one,
                        "",
                        f"the name {name!r} is taken by {steps[name].path}; steps need names of their own",
                    )
                    continue
                steps[name] = self._step(kind, name, one)
        if not steps:
            self._say(values, "", "there is nothing to run: add queries, trainings, tunings or elastic_jobs")
        found = Pipeline(
            name=values["name"],
            display_name=values.get("display_name", ""),
            cluster=self._cluster(values["cluster"], folder),
            steps=self._linked(steps),
            teams={name: TeamSpec(**_named(one)) for name, one in values["teams"].items()},
            loop=self._loop(values.get("loop")),
            quotas=self._quotas(values.get("quotas")),
            budget=values.get("budget"),
            store=values.get("store", ""),
            source=source,
            folder=folder,
            text=text,
        )
        CrossChecks(values, self._problems).check(found)
        return found

    # --- steps ------------------------------------------------------------------------------------------

    def _step(self, kind: StepKind, name: str, one: Values) -> StepSpec:
        own = {key: one[key] for key in _OWN if key in one}
        return StepSpec(
            kind=kind,
            name=name,
            line=one.line(),
            options={key: value for key, value in one.items() if key not in _OWN},
            **own,
        )

    def _linked(self, steps: dict[str, StepSpec]) -> dict[str, StepSpec]:
        """Return the steps with all that each waits for."""
        linked = {}
        for name, step in steps.items():
            one = self._values[TABLES[step.kind]][name]
            needs = set()
            for other in step.after:
                if other not in steps:
                    self._say(one, "after", f"there is no step {other!r}{nearest(other, list(steps))}")
                else:
                    needs.add(other)
            for key, text in _texts(step):
                needs |= self._referred(one, key, text, steps)
            linked[name] = StepSpec(
                **{slot: getattr(step, slot) for slot in StepSpec.__slots__ if slot != "needs"},
                needs=frozenset(needs),
            )
        return linked

    def _referred(self, one: Values, key: str, text: str, steps: Mapping[str, StepSpec]) -> set[str]:
        """Return the steps whose results ``text`` refers to."""
        try:
            found = references(text)
        except OptionError as error:
            self._say(one, key, str(error))
            return set()
        needs = set()
        for reference in found:
            if reference.of == "env" and key != "environment":
                self._say(
                    one,
                    key,
                    f"{reference} may stand in environment only: what stands here is written into ledger and reports",
                )
            elif reference.of not in ("env", "run"):
                needs |= self._known(one, key, reference, steps)
        return needs

    def _known(self, one: Values, key: str, reference: Reference, steps: Mapping[str, StepSpec]) -> set[str]:
        known = [step.name for step in steps.values() if TABLES[step.kind] == reference.of]
        if reference.name not in known:
            said = f"{reference}: there is no {reference.name!r} in {reference.of}"
            self._say(one, key, said + nearest(reference.name, known))
            return set()
        head, _, parameter = reference.field.partition(".")
        if reference.of == "tunings" and head == "best" and parameter:
            space = list(steps[reference.name].options["space"])
            if parameter not in space:
                said = f"{reference}: {reference.name} does not tune {parameter!r}"
                self._say(one, key, said + nearest(parameter, space))
        return {reference.name}

    # --- the rest ---------------------------------------------------------------------------------------

    def _cluster(self, values: Values, folder: str) -> ClusterSpec:
        if "aws" in values:
            aws: Values = values["aws"]
            self._secret(aws, "ledger")
            found = AwsSpec(**_named(aws))
            files = {key: within(folder, aws[key]) for key in ("terraform_output", "prices") if aws.get(key)}
            for key, path in files.items():
                if not Path(path).is_file():
                    self._say(aws, key, f"there is no file {path}")
            return replace(found, **files)
        if "existing" in values:
            self._secret(values["existing"], "ledger")
            return ExistingSpec(**_named(values["existing"]))
        local: Values = values["local"]
        made = [self._pool(name, one) for name, one in local["pools"].items()]
        pools = tuple(pool for pool in made if pool is not None)
        if len(pools) == len(made):
            try:
                check(pools)
            except OptionError as error:
                self._say(local, "pools", str(error))
        faults = []
        for text in local["faults"]:
            try:
                faults.append(parse_fault(text))
            except OptionError as error:
                self._say(local, "faults", str(error))
        return LocalSpec(pools, local.get("interruption_rate"), tuple(faults))

    def _secret(self, one: Values, key: str) -> None:
        """Check a text that may refer to the environment and to nothing else."""
        try:
            for reference in references(one[key]):
                if reference.of != "env":
                    self._say(one, key, f"only ${{env:NAME}} may stand here; got {reference}")
        except OptionError as error:
            self._say(one, key, str(error))

    def _pool(self, name: str, one: Values) -> LocalPool | None:
        given = dict(one)
        min_nodes = given["min_nodes"]
        nodes = given.pop("nodes", max(min_nodes, given["base"]))
        max_nodes = given.pop("max_nodes", max(nodes, given["base"]))
        given.setdefault("instance_type", f"local-{name}")
        try:
            return LocalPool(name, initial=nodes, max_nodes=max_nodes, **given)
        except OptionError as error:
            self._say(one, "", str(error))
            return None

    def _loop(self, one: Values | None) -> LoopSpec:
        if one is None:
            return LoopSpec()
        found = _named(one)
        named = {key: found.pop(key) for key in ("policy", "options") if key in found}
        scaling = found.pop("scaling", None)
        return LoopSpec(settings=found, scaling=_named(scaling) if scaling else {}, **named)

    def _quotas(self, one: Values | None) -> Limits:
        if one is None:
            return Limits()
        content: dict[str, Any] = dict(one)
        for key in ("pools", "teams"):
            content[key] = {name: dict(of) for name, of in one[key].items()}
        try:
            return Limits.parse(content, "quotas")
        except OptionError as error:
            self._say(one, "", str(error))
            return Limits()

    def say(self, section: str, key: str, rule: str) -> None:
        """Write down that ``key`` of a section such as ``queries.orders`` breaks ``rule``."""
        one: Any = self._values
        for name in filter(None, section.split(".")):
            one = one[name]
        self._say(one, key, rule)

    def _say(self, one: Values, key: str, rule: str) -> None:
        self._problems.add(one.line(key), one.path(key), rule)


def _texts(step: StepSpec) -> list[tuple[str, str]]:
    """Return the texts of a step that may hold references, with the keys they stand at."""
    found = [("environment", text) for text in step.environment.values()]
    for key in ("arguments", "tables"):
        found += [(key, text) for text in step.options.get(key, ())]
    if step.kind == "elastic":
        found.append(("input", step.options["input"]))
    return found


def _named(one: Values) -> dict[str, Any]:
    return {key: value for key, value in one.items() if value is not MISSING}
