"""Workloads by file or by name: which format a file has, and which generators there are."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import numpy as np

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.jobs.profiles import Profiles
from ebbflow.infra.simulation.jobs.tuning import Tuning
from ebbflow.infra.simulation.jobs.tuning_workloads import tuning_apps
from ebbflow.infra.simulation.rounds.setting import GAVEL, SHOCKWAVE, Rules
from ebbflow.infra.simulation.rounds.trace import Throughputs, TraceJob, read_throughputs, read_trace
from ebbflow.infra.simulation.traces.generators import philly_like, tiresias_testbed
from ebbflow.infra.simulation.traces.workloads import Workload, read_adaptdl, read_jobs, read_tiresias
from ebbflow.infra.storage import user_files
from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.catalogue import Kind

DATA = Path(__file__).parent / "data"
PROFILES = DATA / "adaptdl" / "traces"
SHIPPED = {
    f"pollux-{number}": DATA / "adaptdl" / "workloads" / f"workload-{number}.csv" for number in range(1, 5)
}
"""The four workloads of 160 jobs of Pollux' evaluation (OSDI 2021), for 16 nodes of 4 GPUs."""

_FORMATS = {
    "AdaptDL": "name,time,application,num_replicas,batch_size",
    "Tiresias": "job_id,num_gpu,submit_time,iterations,model_name,duration,interval",
    "ours": "id,arrival_s,gpus,duration_s",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A workload ready to run, of the kind that its format implies."""

    name: str
    kind: Kind
    digest: str  # of all that was read or generated for it
    workload: Workload | None = None
    profiles: Profiles | None = None
    trace: tuple[TraceJob, ...] = ()
    table: Throughputs | None = None
    rules: Rules | None = None
    tunings: Mapping[str, Tuning] = field(default_factory=dict)  # by app

    @property
    def jobs(self) -> int:
        """Return how many jobs were submitted."""
        return len(self.workload.jobs) if self.workload else len(self.trace)


def philly(rng: np.random.Generator, jobs: int = 10_000) -> Workload:
    """Return a Philly-like trace; fewer jobs come in proportionally less time."""
    return philly_like(rng, jobs, span=10 * 7 * 86_400.0 * jobs / 10_000)


def plain(make: Callable[..., Workload]) -> "Generator":
    """Return a generator of jobs with durations as one that could make searches."""

    def made(rng: np.random.Generator, *numbers: int) -> tuple[Workload, Mapping[str, Tuning]]:
        return make(rng, *numbers), {}

    return made


def _themis(rng: np.random.Generator, *, halving: bool) -> tuple[Workload, Mapping[str, Tuning]]:
    made = tuning_apps(rng, halving=halving)
    return made.workload, made.tunings


Generator = Callable[..., tuple[Workload, Mapping[str, Tuning]]]
GENERATORS: dict[str, tuple[Generator, int, str]] = {
    "philly": (plain(philly), 1, "philly:JOBS[:SEED], Microsoft's trace in distribution"),
    "tiresias-testbed": (plain(tiresias_testbed), 0, "tiresias-testbed[:SEED], 480 jobs for 60 GPUs"),
    "themis-w1": (partial(_themis, halving=False), 0, "themis-w1[:SEED], 50 hyper-parameter searches"),
    "themis-w2": (partial(_themis, halving=True), 0, "themis-w2[:SEED], the same with halving"),
}
"""Name: what makes it, whole numbers before the seed, and a line for people."""


@dataclass(frozen=True, slots=True)
class Source:
    """A workload as the user names it; ``load`` reads or generates it."""

    text: str

    @property
    def name(self) -> str:
        """Return the name in results."""
        return Path(self.text).stem if self.is_file else self.text

    @property
    def is_file(self) -> bool:
        """Tell whether it is a path rather than a known name."""
        return self.text not in SHIPPED and self.text.split(":")[0] not in GENERATORS

    def load(
        self,
        seed: int,
        *,
        profiles: Path | None = None,
        throughputs: Path | None = None,
        nearest: bool = False,
    ) -> Loaded:
        """Return the jobs. A generator without a seed in its name draws from ``seed``.

        Raises:
            WorkloadError: an unreadable or malformed file, or one whose format is none that is known.
            OptionError: an unknown name, or numbers that its generator does not take.
        """
        if not self.is_file and self.text not in SHIPPED:
            made, tunings = _generated(self.text, seed)
            digest = hashlib.sha256(repr((made.jobs, tunings)).encode()).hexdigest()
            kind: Kind = "searches" if tunings else "durations"
            return Loaded(self.text, kind, digest, replace(made, name=self.text), tunings=tunings)
        path = SHIPPED.get(self.text, Path(self.text))
        return _read(self.name, path, profiles or PROFILES, throughputs, nearest)


def sources(text: str) -> list[Source]:
    """Return the workloads of a comma-separated list. Raises ``OptionError`` for an empty list and equal names."""
    found = [Source(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise OptionError("--workload needs a file or a name; --help lists the names")
    names = [source.name for source in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise OptionError(f"two workloads are called {twice[0]!r}; results go by name")
    return found


def _generated(text: str, seed: int) -> tuple[Workload, Mapping[str, Tuning]]:
    name, *numbers = text.split(":")
    make, takes, shape = GENERATORS[name]
    if len(numbers) > takes + 1 or not all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers):
        raise OptionError(f"a generated workload is written {shape}; got {text!r}")
    values = [int(number) for number in numbers]
    drawn = values[takes] if len(values) > takes else seed
    return make(np.random.default_rng(drawn), *values[:takes])


def _read(name: str, path: Path, profiles: Path, throughputs: Path | None, nearest: bool) -> Loaded:
    format_ = _format(path)
    if format_ in ("Shockwave", "Gavel"):
        if throughputs is None:
            raise OptionError(
                f"{path} is a {format_} trace; give its table of throughputs with --throughputs"
            )
        trace, table = tuple(read_trace(path)), read_throughputs(throughputs)
        digest = _digest([path, throughputs])
        rules = SHOCKWAVE if format_ == "Shockwave" else GAVEL
        return Loaded(name, "rounds", digest, trace=trace, table=table, rules=rules)
    if format_ == "AdaptDL":
        found = Profiles(profiles)

        def batches(application: str) -> tuple[int, int]:
            return found[application].first_batch, found[application].last_batch

        workload = read_adaptdl(path, found, use_nearest=nearest, batches=batches)
        digest = _digest([path], sorted(found.folder.glob("*/*.csv"))) + ("nearest" if nearest else "")
        return Loaded(name, "profiles", digest, replace(workload, name=name), profiles=found)
    workload = read_tiresias(path) if format_ == "Tiresias" else read_jobs(path)
    return Loaded(name, "durations", _digest([path]), replace(workload, name=name))


def _format(path: Path) -> str:
    """Return the format that the first line of a file shows."""
    if not path.exists() and not path.is_symlink():
        known = [*SHIPPED, *GENERATORS]
        close = get_close_matches(str(path), known, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else f"; known names are {', '.join(known)}"
        raise WorkloadError(f"{path}: no such workload file{hint}")
    first = user_files.first_line(path, error=WorkloadError)
    columns = {column.strip() for column in first.split(",")}
    for format_, header in _FORMATS.items():
        if {header.split(",")[0], header.split(",")[1]} <= columns:
            return format_
    if "\t" in first:
        return "Shockwave" if first.count("\t") >= 11 else "Gavel"
    shapes = "; ".join(f"{format_}: {header}" for format_, header in _FORMATS.items())
    raise WorkloadError(
        f"{path}, line 1: no workload format that is known; got {first[:80]!r}. Headers are {shapes};"
        " Shockwave's and Gavel's traces have 12 and 10 columns separated by tabs"
    )


def _digest(paths: Iterable[Path], named: Iterable[Path] = ()) -> str:
    """Return a hash of the contents of ``paths``, and of contents and names of ``named``."""
    total = hashlib.sha256()
    for path in paths:
        total.update(hashlib.sha256(path.read_bytes()).digest())
    for path in named:
        total.update(f"{path.parent.name}/{path.name}".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
