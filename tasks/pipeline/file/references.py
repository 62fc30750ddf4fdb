"""What a step may say of others' results: ``${queries.features.path}`` and its like, found, checked and filled in.

========================================  ======================================================================
``${queries.NAME.path}``                  the directory of the query's result, with one file ``NAME.parquet``
``${queries.NAME.file}``                  that file
``${queries.NAME.rows}``                  how many rows it has
``${queries.NAME.fingerprint}``           of what it asks of which versions of tables
``${queries.NAME.tables}``                the versions of the tables that it has read, a JSON object by name
``${trainings.NAME.directory}``           the training's own directory, with its checkpoints
``${trainings.NAME.metrics.METRIC}``      the last value of what its script has reported
``${tunings.NAME.directory}``            the tuning run's own directory
``${tunings.NAME.best}``                 the best value of its metric
``${tunings.NAME.best.PARAMETER}``       the parameter's value in the best trial
``${elastic_jobs.NAME.directory}``       the job's own directory
``${elastic_jobs.NAME.file}``            its result, an ``.npz`` file
``${elastic_jobs.NAME.objective}``       the objective of the result
``${run.id}``, ``${run.name}``, ``${run.directory}`` of the pipeline's run
``${env:NAME}``                           a variable of the environment, only where it stays secret
``${parameters.NAME}``                    of the file, or what the command line set; anywhere, filled in at once
========================================  ======================================================================

``$${`` stands for ``${`` itself.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.pipeline.file.kinds import nearest

Of = Literal["queries", "trainings", "tunings", "elastic_jobs", "run", "env"]

FIELDS: Mapping[str, tuple[str, ...]] = {
    "queries": ("path", "file", "rows", "fingerprint", "tables"),
    "trainings": ("directory", "metrics.METRIC"),
    "tunings": ("directory", "best", "best.PARAMETER"),
    "elastic_jobs": ("directory", "file", "objective"),
    "run": ("id", "name", "directory"),
}
_TOKEN = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_FORM = "a reference looks like ${queries.NAME.path}, ${trainings.NAME.directory}, ${tunings.NAME.best.lr}, ${run.id}"


@dataclass(frozen=True, slots=True)
class Reference:
    """One ``${...}``."""

    of: Of
    name: str  # of the step, or of the environment's variable; empty for the run
    field: str = ""

    def __str__(self) -> str:
        if self.of == "env":
            return f"${{env:{self.name}}}"
        return "${" + ".".join(part for part in (self.of, self.name, self.field) if part) + "}"


def references(text: str) -> tuple[Reference, ...]:
    """Return the references in ``text``, in order. Raises ``OptionError`` for one that has another form."""
    return tuple(_parse(found) for found in _TOKEN.finditer(text) if found[0] != "$${")


def fill_in(text: str, value: Callable[[Reference], str]) -> str:
    """Return ``text`` with each reference replaced by what ``value`` says. Raises what ``value`` raises."""
    return _TOKEN.sub(lambda found: "${" if found[0] == "$${" else value(_parse(found)), text)


def _parse(found: re.Match[str]) -> Reference:
    inside = found[1]
    if inside is None:
        raise OptionError(f"{_FORM}; got one without an end (write $${{ for the characters themselves)")
    shown = f"got ${{{inside}}}" if len(inside) < 80 else f"got ${{{inside[:70]}...}}"
    kind, colon, variable = inside.partition(":")
    if kind == "env" and colon:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise OptionError(f"${{env:NAME}} names a variable of the environment; {shown}")
        return Reference("env", variable)
    of, _, rest = inside.partition(".")
    if of == "run":
        if rest not in FIELDS["run"]:
            raise OptionError(f"of the run there are {', '.join(FIELDS['run'])}; {shown}")
        return Reference("run", "", rest)
    name, dot, field = rest.partition(".")
    if of not in FIELDS or not name or not dot:
        raise OptionError(f"{_FORM}; {shown}{nearest(of, list(FIELDS)) if of not in FIELDS else ''}")
    head, further, tail = field.partition(".")
    known = FIELDS[of]
    right = field in known or (further and tail and any(one.startswith(f"{head}.") for one in known))
    if not right or "METRIC" in field or "PARAMETER" in field:
        raise OptionError(f"of {of} there are {', '.join(known)}; {shown}")
    return Reference(of, name, field)  # type: ignore[arg-type]
