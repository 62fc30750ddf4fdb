"""What a pipeline needs beyond its file: SQL that fits its tables, variables, directories, settings of its cluster.

Everything is looked at on this machine before anything is started; no network is asked. What cannot be known that way
is returned as sentences, for whoever asks.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from ebbflow.infra.aws.prices.listed import ListedPrices
from ebbflow.infra.ledger.address import parse as parse_address
from ebbflow.infra.packages import require
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.storage.user_files import output_problem
from ebbflow.infra.tables.parquet import discover
from ebbflow.planners.errors import EbbflowError, OptionError
from ebbflow.planners.model import Catalogue, Table
from ebbflow.planners.query.sql.parse import ParsedQuery, parse, parse_query
from ebbflow.tasks.pipeline.file.order import in_order
from ebbflow.tasks.pipeline.file.references import Reference, fill_in, references
from ebbflow.tasks.pipeline.file.requests import engine_of, resolved
from ebbflow.tasks.pipeline.file.spec import AwsSpec, ExistingSpec, LocalSpec, Pipeline, StepSpec
from ebbflow.tasks.query.request import check_master, read_sql
from ebbflow.tasks.training.checks import absolute_source

Columns = tuple[tuple[str, str], ...]


class ReportFinding(Protocol):
    """Writes a finding down: the section of the file (``queries.orders``), its key, and the rule with the value."""

    def __call__(self, section: str, key: str, rule: str) -> None: ...


def from_environment(reference: Reference) -> str:
    """Return the variable that ``${env:NAME}`` names. Raises ``OptionError`` where it is not set."""
    if reference.of != "env":
        raise OptionError(f"only ${{env:NAME}} may stand here; got {reference}")
    if reference.name not in os.environ:
        raise OptionError(
            f"{reference} is asked for, but the environment has no {reference.name}; set it first"
        )
    return os.environ[reference.name]


def check_surroundings(
    pipeline: Pipeline, say: ReportFinding, done: Collection[str] = (), functions: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Look at all that ``pipeline`` needs and that can be known here; return what has not been checked, and why.

    Args:
        pipeline: as its file says.
        say: hears of each finding.
        done: steps that have finished, of which nothing is needed any more.
        functions: of SQL that whoever runs the pipeline allows; its file has no say in them.
    """
    left = {name: step for name, step in pipeline.steps.items() if name not in done}
    check = _Check(pipeline, say, functions)
    for step in left.values():
        check.environment(step)
        check.packages(step)
        check.team(step)
        spill = str(step.options.get("spill_dir") or "")
        if spill and "://" not in spill:
            check.directory(step.path, "spill_dir", spill)
    check.queries(left)
    check.cluster()
    return tuple(check.unchecked)


def check_applications(
    pipeline: Pipeline, say: ReportFinding, done: Collection[str], allowed: Collection[str]
) -> None:
    """Say which elastic jobs have applications of their own that may not be imported.

    The driver of one runs in this process, with all that this may do. ``allowed`` are the absolute working
    directories that whoever runs the pipeline allows; its file has no say in them. See ``check_surroundings``.

    Raises ``OptionError`` for one that is none.
    """
    for source in allowed:
        if not (
            source.startswith("git+") or os.path.isdir(source) or os.path.isdir(source.rpartition("@")[0])
        ):
            raise OptionError(
                f"allow_workdirs (--allow-workdir) must be directories or REPO@REF; got {source!r}"
            )
    for step in pipeline.of("elastic"):
        if step.name in done or not step.options.get("workdir"):
            continue
        source = absolute_source(step.options["workdir"], pipeline.folder)
        if source not in allowed:
            say(
                step.path,
                "workdir",
                f"{source} is code that would be imported, only if the operator who starts the run allows it "
                f"(--allow-workdir {source}; allow_workdirs of the flow)",
            )


@dataclass
class _Check:
    pipeline: Pipeline
    say: ReportFinding
    functions: tuple[str, ...] = ()
    unchecked: list[str] = field(default_factory=list)
    results: dict[str, tuple[str, Columns | None]] = field(default_factory=dict)  # by query: table, columns

    def directory(self, section: str, key: str, path: str) -> None:
        if problem := output_problem(resolved(path, self.pipeline), directory=True):
            self.say(section, key, f"cannot write to {path!r}: {problem}")

    def environment(self, step: StepSpec) -> None:
        for text in step.environment.values():
            self._filled(step.path, "environment", text, _variables)

    def packages(self, step: StepSpec) -> None:
        try:
            if step.kind == "elastic":
                require("zmq", "an elastic job", "train")
            elif step.kind != "query":
                require("torch", "a training", "train")
            if step.kind == "tuning":
                require("optuna", "a tuning run", "tune")
            if step.kind == "query" and engine_of(step, self.pipeline) == "spark":
                require("pyspark", "a query on Spark", "spark")
        except EbbflowError as error:
            self.say(step.path, "", str(error))

    def team(self, step: StepSpec) -> None:
        quota = self.pipeline.quotas.teams.get(step.team)
        if step.kind == "query" or quota is None:
            return
        least = int(step.options.get("min_gpus") or 1)
        if step.kind == "tuning":
            least = int(step.options.get("gpus", 1))
        if least > quota.gpus:
            self.say(
                step.path,
                "workers" if step.kind == "elastic" else "gpus",
                f"needs {least} GPUs; the quota of team {step.team} is {quota.gpus:g}",
            )

    # --- queries ------------------------------------------------------------------------------------------

    def queries(self, left: Mapping[str, StepSpec]) -> None:
        for name in in_order(self.pipeline.needs):
            step = self.pipeline.steps[name]
            if step.kind == "query":
                columns = self._query(step, quiet=name not in left)
                self.results[name] = (str(step.options.get("output") or name), columns)
        if self.pipeline.store and "://" not in self.pipeline.store:
            self.directory("", "store", self.pipeline.store)

    def _query(self, step: StepSpec, *, quiet: bool) -> Columns | None:
        """Check the SQL of a step; return the columns of its result, ``None`` where they cannot be known."""
        key = "sql" if step.options.get("sql") else "file"
        dialect = str(step.options.get("dialect") or "spark")
        try:
            text = step.options.get("sql") or read_sql(resolved(step.options["file"], self.pipeline))
            parse(text, dialect, self.functions)
        except EbbflowError as error:
            self._unless(quiet, step, key, error)
            return None
        tables = self._tables(step, quiet=quiet)
        if tables is None:
            return None
        try:
            found = parse_query(
                text, Catalogue(tables), now=datetime.now(UTC), dialect=dialect, allowed=self.functions
            )
        except EbbflowError as error:
            self._unless(quiet, step, key, error)
            return None
        return _columns(found)

    def _unless(self, quiet: bool, step: StepSpec, key: str, error: EbbflowError) -> None:
        if not quiet:
            self.say(step.path, key, " ".join(str(error).split()))

    def _tables(self, step: StepSpec, *, quiet: bool) -> dict[str, Table] | None:
        """Return the tables of a step by lower-case name; ``None`` where not all can be known."""
        if step.options.get("catalog"):
            self._skip(step, "its tables are those of the Spark session's catalogue")
            return None
        found: dict[str, tuple[str, Columns]] = {}
        known = True
        for text in step.options.get("tables", ()):
            part = self._part(step, text, quiet=quiet)
            known = known and part is not None
            for name, columns in (part or {}).items():
                if name.lower() in found and not quiet:
                    self.say(
                        step.path,
                        "tables",
                        f"tables must have different names; {name} is in {found[name.lower()][0]} and {text}",
                    )
                found[name.lower()] = (text, columns)
        if not known:
            return None
        return {name: Table(name, columns, "") for name, (_, columns) in found.items()}

    def _part(self, step: StepSpec, text: str, *, quiet: bool) -> dict[str, Columns] | None:
        """Return the tables of one entry of ``tables``; ``None`` where they cannot be known."""
        named = [one for one in references(text) if one.of == "queries"]
        if len(named) == 1 and text.strip() == str(named[0]) and named[0].field in ("path", "file"):
            table, columns = self.results.get(named[0].name, ("", None))
            if columns is None:
                self._skip(step, f"the columns of {text} are known once that query has run")
                return None
            return {table: columns}
        if "${" in text:
            self._skip(step, f"{text} is known once other steps have run")
            return None
        if "://" in text and not StorageLocation(text).local:
            self._skip(step, f"{text} is not on this machine")
            return None
        try:
            return {one.name: one.columns for one in discover(StorageLocation(resolved(text, self.pipeline)))}
        except EbbflowError as error:
            self._unless(quiet or not Path(resolved(text, self.pipeline)).exists(), step, "tables", error)
            return None

    def _skip(self, step: StepSpec, why: str) -> None:
        self.unchecked.append(f"whether tables and columns of {step.path} are there: {why}")

    # --- the cluster --------------------------------------------------------------------------------------

    def cluster(self) -> None:
        cluster = self.pipeline.cluster
        if isinstance(cluster, LocalSpec):
            return
        section = "cluster.aws" if isinstance(cluster, AwsSpec) else "cluster.existing"
        self._filled(section, "ledger", cluster.ledger, self._ledger)
        if cluster.master:
            self._filled(section, "master", cluster.master, check_master)
            self.unchecked.append(f"whether the Spark master {cluster.master} answers: no network is asked")
        if isinstance(cluster, ExistingSpec):
            self._existing(cluster)
        else:
            self._aws(cluster)

    def _filled(self, section: str, key: str, text: str, check: Callable[[str], object]) -> None:
        try:
            check(text)
        except EbbflowError as error:
            self.say(section, key, str(error))

    def _ledger(self, written: str) -> None:
        address = parse_address(fill_in(written, from_environment))
        cluster = self.pipeline.cluster
        made = isinstance(cluster, AwsSpec) and cluster.loop  # by this process
        if address.kind != "sqlite":
            self.unchecked.append(f"whether the ledger {address} answers: no network is asked")
        elif not made and not address.path.is_file():
            raise OptionError(f"there is no ledger {address.path}: ebbflow capacity start creates one")

    def _existing(self, cluster: ExistingSpec) -> None:
        if cluster.fleet:
            from ebbflow.infra.local_fleet import LocalFleet

            self._filled(
                "cluster.existing", "fleet", cluster.fleet, lambda name: LocalFleet.attach(name).close()
            )
        elif steps := [step for step in self.pipeline.steps.values() if step.kind != "query"]:
            rule = (
                "trainings and elastic jobs need nodes: name the local fleet that they run on "
                "(cluster.existing.fleet)"
            )
            self.say(steps[0].path, "", rule)
        if cluster.directory and "://" not in cluster.directory:
            self.directory("cluster.existing", "directory", cluster.directory)

    def _aws(self, cluster: AwsSpec) -> None:
        from ebbflow.tasks.fleet.request import FleetRequest

        def settings(config: str) -> None:
            found = FleetRequest(terraform_output=config or None).settings()
            for key, pools, kind in (
                ("pools", cluster.pools, "gpu"),
                ("spark_pools", cluster.spark_pools, "spark"),
            ):
                for pool in pools:
                    if pool not in found.pools:
                        known = ", ".join(sorted(found.pools)) or "none"
                        self.say(
                            "cluster.aws", key, f"there is no pool {pool!r} in {config}; there are {known}"
                        )
                    elif found.pools[pool].kind != kind:
                        self.say("cluster.aws", key, f"the pool {pool!r} is of kind {found.pools[pool].kind}")
            if cluster.spark_pools and not (cluster.master or found.spark_master):
                rule = f"{config} names no Spark master; apply Terraform's module spark, and write the file again"
                self.say("cluster.aws", "spark_pools", rule)
            if cluster.prices and ListedPrices.read(cluster.prices).region != found.region:
                raise OptionError(
                    f"{cluster.prices} has prices of another region than the cluster's, {found.region}"
                )

        self._filled("cluster.aws", "terraform_output", cluster.terraform_output, settings)
        self.unchecked.append(
            f"credentials and capacity of AWS, and whether {cluster.directory} can be written: no network is asked"
        )


def _variables(text: str) -> None:
    for reference in references(text):
        if reference.of == "env":
            from_environment(reference)


def _columns(query: ParsedQuery) -> Columns | None:
    """Return the names of a result's columns; types are the engine's to say."""
    names = query.expression.named_selects if query.qualified else []
    return tuple((name, "string") for name in names) if names and "*" not in names else None
