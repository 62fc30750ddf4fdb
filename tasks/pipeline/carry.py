"""Carries out a pipeline's steps as apps of its cluster.

What a step's processes find in their environment. Nothing here is ever written down.

Where a query finds its tables when they are in several directories, or are results of other queries.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import (
    AwsUnavailableError,
    ElasticError,
    LedgerUnavailableError,
    MicroTaskError,
    PipelineRunError,
    RunLockedError,
    StageCancelledError,
    StorageError,
)
from ebbflow.infra.logs.json_lines import log_ids
from ebbflow.infra.storage import checksums, private
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.parquet import discover
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.pipeline.coordinator import Attempt, AttemptResult
from ebbflow.tasks.pipeline.file.references import Reference, fill_in, references
from ebbflow.tasks.pipeline.file.requests import (
    Fill,
    elastic_request,
    places_of,
    query_request,
    resolved,
    team_weight,
    training_request,
    tuning_request,
    wanted_gpus,
)
from ebbflow.tasks.pipeline.file.spec import Pipeline, StepSpec
from ebbflow.tasks.pipeline.record import RunFolder
from ebbflow.tasks.pipeline.site import Site, from_environment
from ebbflow.tasks.query.app_requests import query_spec
from ebbflow.tasks.training.leased.spec import training_spec
from ebbflow.tasks.tuning.app_spec import tuning_spec


def tables_of(step: StepSpec, pipeline: Pipeline, folder: Path, fill: Fill) -> str | None:
    """Return the one directory that holds all tables of a query step; ``None`` for a catalogue's.

    Several directories of this machine are put together by links in the run's directory. Raises ``OptionError``,
    ``TableError``, ``StorageError``.
    """
    named = [resolved(fill(text), pipeline) for text in step.options.get("tables", ())]
    if len(named) <= 1:
        return named[0] if named else None
    places = [StorageLocation(one) for one in named]
    if remote := [place for place in places if not place.local]:
        raise OptionError(f"tables of several directories must be on this machine; got {remote[0]}")
    linked = folder / "tables" / step.name
    seen: dict[str, str] = {}
    try:
        private.make_folder(linked)
        for place in places:
            discover(place)  # says what is wrong with a directory that has no tables
            one = Path(place.root)
            entries = [one] if one.is_file() else sorted(one.iterdir())
            for entry in entries:
                if entry.name.startswith((".", "_")):
                    continue
                key = entry.name.lower()
                if key in seen and seen[key] != str(entry):
                    raise OptionError(
                        f"tables must have different names; {entry.name} is in {seen[key]} and {entry}"
                    )
                seen[key] = str(entry)
                link(linked / entry.name, entry)
    except OSError as error:
        raise StorageError(
            f"cannot put the tables together in {linked}: {error.strerror or error}"
        ) from error
    return str(linked)


def link(name: Path, target: Path) -> None:
    """Make ``name`` a link to ``target``, in place of an older one."""
    with suppress(FileNotFoundError):
        if os.readlink(name) == str(target):
            return
        name.unlink()
    name.symlink_to(target)


def environment_of(attempt: Attempt) -> Mapping[str, str]:
    """Return the environment that a step asks for, on top of its processes' own. Raises ``OptionError``."""

    def value(reference: Reference) -> str:
        return from_environment(reference) if reference.of == "env" else attempt.fill(str(reference))

    return {name: fill_in(text, value) for name, text in attempt.step.environment.items()}


def lineage_of(attempt: Attempt, run: str) -> dict[str, Any]:
    """Return where a step's data come from: each query whose result it names, with the tables' versions."""
    step, found = attempt.step, dict[str, Any]()
    texts = (*step.options.get("arguments", ()), *step.environment.values())
    for name in sorted({one.name for text in texts for one in references(text) if one.of == "queries"}):
        with suppress(OptionError, ValueError):  # a query that another version of Ebbflow has run
            said = {
                one: attempt.fill(f"${{queries.{name}.{one}}}") for one in ("file", "fingerprint", "tables")
            }
            found[f"lineage.queries.{name}"] = said | {"tables": json.loads(said["tables"])}
    return {"pipeline": run, "pipeline.step": step.name, **found}


Say = Callable[[str], None]
Told = Callable[[Attempt, str], None]


class Carrier:
    """Carries out attempts, each in the thread that calls it.

    Args:
        site: the cluster.
        pipeline: whose steps they are.
        folder: of the run.
        clock: the time.
        flow_run: of the orchestrator; empty: none.
        say: hears sentences for people.
        save: seconds that trainings get to save in when the run is stopped, where their grace is longer.
        restart: whether trainings begin again whose checkpoints are all damaged.
    """

    def __init__(
        self,
        site: Site,
        pipeline: Pipeline,
        folder: RunFolder,
        clock: Clock,
        flow_run: str = "",
        say: Say = lambda _: None,
        save: float | None = None,
        restart: bool = False,
        functions: tuple[str, ...] = (),
    ) -> None:
        self._restart, self._functions = restart, functions
        self._site, self._pipeline, self._folder = site, pipeline, folder
        self._clock, self._flow_run, self._say, self._save = clock, flow_run, say, save

    def __call__(self, attempt: Attempt) -> AttemptResult:
        """Carry one attempt out and return how it ended. Raises ``EbbflowError`` for what no other attempt mends."""
        carry = {
            "query": self._query,
            "training": self._training,
            "tuning": self._tuning,
            "elastic": self._elastic,
        }
        try:
            with log_ids(run=self._folder.id, app=attempt.app):
                return carry[attempt.step.kind](attempt)
        except (LedgerUnavailableError, AwsUnavailableError) as error:
            return AttemptResult("lost", str(error))
        except MicroTaskError:  # the application's own
            raise
        except ElasticError as error:  # its snapshots are there for another attempt
            return AttemptResult("lost", str(error))
        except RunLockedError as error:
            # an earlier self that the loop has taken for lost may still be on its way out
            return AttemptResult("lost", str(error))

    # --- kinds ------------------------------------------------------------------------------------------

    def _query(self, attempt: Attempt) -> AttemptResult:
        from ebbflow.tasks.query.app import run_query_app
        from ebbflow.tasks.report.delivery import deliver

        step = attempt.step
        places = places_of(self._pipeline, str(self._folder.path), self._site.master)
        request = query_request(
            step,
            self._pipeline,
            places,
            attempt.fill,
            tables_of(step, self._pipeline, Path(self._folder.path), attempt.fill),
            self._functions,
        )
        if Path(self._folder.path) in Path(places.result(step)[0]).parents:
            private.make_folder(
                places.result(step)[0]
            )  # a place that the file names follows the umask instead
        spec = query_spec(request, attempt.app, **self._fields(attempt))
        try:
            outcome = run_query_app(
                request, spec, self._site.ledger, clock=self._clock, stop=attempt.stop, deliver=deliver
            )
        except StageCancelledError as error:
            if not attempt.stop.is_set():
                raise
            return AttemptResult("stopped", str(error))
        folder, file = places.result(step)
        report = outcome.report
        details: dict[str, Any] = {"rows": report.rows}
        switches = len(report.switches)
        if switches:
            details["plan switches"] = switches
        if report.verified is not None:
            details["equal to DuckDB's result"] = report.verified
        results = {"path": folder, "file": file, "rows": str(report.rows)}
        results |= {"fingerprint": outcome.result.fingerprint, "tables": json.dumps(dict(outcome.tables))}
        if report.verified is False:
            return AttemptResult(
                "failed", f"its result differs from DuckDB's: {report.verification}", {}, details
            )
        return AttemptResult(
            "finished", "", results, details, {file: checksums.of_place(StorageLocation(file))}
        )

    def _training(self, attempt: Attempt) -> AttemptResult:
        from ebbflow.tasks.training.leased.app import run_training_app

        places = places_of(self._pipeline, str(self._folder.path))
        request = training_request(attempt.step, self._pipeline, places, attempt.fill, attempt.app)
        request = replace(request, restart=self._restart and request.launched)
        given = self._fields(attempt) | {"gpus": wanted_gpus(attempt.step)}
        variables = environment_of(attempt)
        shipped = (
            self._site.make is not None
        )  # a launcher of nodes elsewhere, which gives them to processes itself
        report = run_training_app(
            request,
            training_spec(request, **given),
            self._site.ledger,
            self._pool(attempt, request.termination_grace, {} if shipped else variables),
            clock=self._clock,
            stop=attempt.stop,
            save=self._save,
            rules=self._rules(),
            make=self._site.make,
            options={"ledger": self._site.address, **({"variables": variables} if shipped else {})},
            lineage=lineage_of(attempt, self._folder.id) if request.track else None,
        )
        metrics = {name: value for name, value in report.final_metrics.items() if value is not None}
        details = {"steps": report.steps, "lost steps": report.lost_steps, **finite(metrics)}
        results = {"directory": request.run_directory}
        results |= {f"metrics.{name}": repr(value) for name, value in metrics.items()}
        return AttemptResult(
            report.state, "" if report.state == "finished" else report.reason, results, details
        )

    def _tuning(self, attempt: Attempt) -> AttemptResult:
        from ebbflow.tasks.tuning.app import run_tuning_app

        places = places_of(self._pipeline, str(self._folder.path))
        request = tuning_request(attempt.step, self._pipeline, places, attempt.fill, attempt.app)
        request = replace(request, restart=self._restart)
        if self._save is not None:
            request = replace(request, termination_grace=min(request.termination_grace, self._save))
        variables = environment_of(attempt)
        shipped = self._site.make is not None
        report = run_tuning_app(
            request,
            tuning_spec(request, **self._fields(attempt)),
            self._site.ledger,
            self._pool(attempt, request.termination_grace, {} if shipped else variables),
            lambda text: self._say(f"{attempt.step.label}: {text}"),
            clock=self._clock,
            stop=attempt.stop,
            rules=self._rules(),
            make=self._site.make,
            options={"variables": variables} if shipped else None,
            lineage=lineage_of(attempt, self._folder.id) if request.track else None,
        )
        results = {"directory": request.run_directory}
        details: dict[str, Any] = {"trials": len(report.trials)}
        best = report.best
        if best is not None:
            results |= {"best": repr(best.value)} | {
                f"best.{name}": str(value) for name, value in best.parameters.items()
            }
            details |= finite({f"best {report.metric}": best.value})
        if report.state == "finished" and best is None:
            return AttemptResult("failed", "no trial has come to its end", results, details)
        return AttemptResult(
            report.state, "" if report.state == "finished" else report.reason, results, details
        )

    def _elastic(self, attempt: Attempt) -> AttemptResult:
        from ebbflow.tasks.elastic.app import PARAMETERS, run_elastic_app
        from ebbflow.tasks.elastic.app_spec import elastic_spec

        places = places_of(self._pipeline, str(self._folder.path))
        state_dir = str(Path(self._folder.path) / "elastic" / attempt.app)
        request = elastic_request(
            attempt.step, self._pipeline, places, attempt.fill, attempt.app, state_dir
        ).restarted(self._restart)
        report = run_elastic_app(
            request,
            elastic_spec(request, **self._fields(attempt)),
            self._site.ledger,
            self._pool(attempt, request.termination_grace, {}),
            lambda text: self._say(f"{attempt.step.label}: {text}"),
            clock=self._clock,
            stop=attempt.stop,
            save=self._save,
            rules=self._rules(),
            variables=self._site.variables,
        )
        if report.state != "finished":
            return AttemptResult(report.state, report.reason, {"directory": report.directory})
        file = f"{report.directory}/{PARAMETERS}"
        results = {"directory": report.directory, "file": file}
        details = {"iterations": report.iterations, "workers": report.workers, "lost workers": report.losses}
        if report.objective is not None:  # an application of the user's may have none
            results["objective"] = repr(report.objective)
            details |= finite({"objective": report.objective})
        files = {file: checksums.of_place(StorageLocation(file))}
        return AttemptResult("finished", "", results, details, files)

    # --- what they share --------------------------------------------------------------------------------

    def _fields(self, attempt: Attempt) -> dict[str, Any]:
        """Return what a step's app says of itself beside what its request says."""
        step = attempt.step
        return {
            "team": step.team,
            "title": step.label,
            "pipeline": self._folder.id,
            "weight": step.weight * team_weight(step, self._pipeline),
            "deadline": attempt.deadline,
            "budget": step.budget,
            "pipeline_budget": self._pipeline.budget,
            # a loop of this process dies with it: there is nobody who would mark the flow run
            "flow_run": self._flow_run if self._site.joined else "",
        }

    def _rules(self) -> Rules | None:
        """Return when leases count as over; ``None``: as the loop says itself."""
        return None if self._site.grace is None else Rules(grace=self._site.grace)

    def _pool(self, attempt: Attempt, grace: float, environment: Mapping[str, str]) -> Callable[[], Any]:
        """Return what makes pools of the cluster's nodes for one app. Raises ``EbbflowError``."""
        if self._site.pools is None:
            raise PipelineRunError(
                "trainings and elastic jobs need nodes: name the local fleet that they run on "
                "(cluster.existing.fleet), or use cluster.aws"
            )
        return self._site.pools(attempt.app, grace, environment)


def finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values that are numbers, for JSON."""
    return {name: float(value) for name, value in values.items() if value is not None and isfinite(value)}
