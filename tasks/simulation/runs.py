"""Runs policies on workloads, each (workload, policy, seed) once: what is in the cache is not run again."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.places import Place
from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.catalogue import Entry, Kind, policy_entry
from ebbflow.tasks.simulation.inputs import Inputs, Options
from ebbflow.tasks.simulation.records import FORMAT, Record
from ebbflow.tasks.simulation.scenarios import run_world
from ebbflow.tasks.simulation.sources import Loaded, Source

Progress = Callable[[str, int, int], None]
"""What is running, and how many jobs of all runs have ended, of how many."""

_NEEDS: dict[Kind, str] = {
    "profiles": "measured profiles of its jobs' applications (AdaptDL's format)",
    "durations": "a workload with durations",
    "searches": "hyper-parameter searches",
    "rounds": "a trace with throughputs",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation to be run."""

    source: Source
    policy: str
    seed: int


def planned(inputs: Inputs, sources: Sequence[Source], entries: Sequence[Entry], seeds: int) -> list[Run]:
    """Return all runs, with every input read and checked before the first begins.

    Raises:
        OptionError: a policy that cannot run on a workload, options that do not go with it, or ``seeds`` < 1.
        WorkloadError: a file that breaks its format.
    """
    if seeds < 1:
        raise OptionError(f"--seeds must be >= 1; got {seeds}")
    _check_used(inputs.options, {inputs.load(source, 0).kind for source in sources})
    for source in sources:
        loaded = inputs.load(source, 0)
        for entry in entries:
            if loaded.kind not in entry.kinds:
                needs = " or ".join(_NEEDS[kind] for kind in sorted(entry.kinds))
                raise OptionError(f"policy {entry.name} needs {needs}; {source.text} has none")
        _check(inputs, loaded)
    return [Run(source, entry.name, seed) for source in sources for entry in entries for seed in range(seeds)]


def _check_used(options: Options, kinds: Collection[str]) -> None:
    """Raise ``OptionError`` for a file that none of the workloads would have read."""
    if options.throughputs is not None and "rounds" not in kinds:
        raise OptionError(
            f"--throughputs is for traces in rounds (Gavel's, Shockwave's), of which --workload names none; got "
            f"{options.throughputs}"
        )
    if "profiles" not in kinds and (options.profiles is not None or options.nearest):
        given = options.profiles if options.profiles is not None else "--nearest-profile"
        raise OptionError(
            f"--profiles and --nearest-profile are for workloads of AdaptDL's format, of which --workload names "
            f"none; got {given}"
        )


def _check(inputs: Inputs, loaded: Loaded) -> None:
    options = inputs.options
    cluster, _ = inputs.cluster(0, 0.0)
    if loaded.kind != "rounds":
        assert loaded.workload is not None
        inputs.check_prices(max(job.arrival + (job.duration or 0.0) for job in loaded.workload.jobs))
        return
    refused = {
        "--interval": options.interval,
        "--restart-delay": options.restart_delay,
        "--interference": options.interference,
        "--spot-trace": options.spot_trace,
        "--prices": options.prices,
        "--failures": options.failures,
        "--stragglers": options.stragglers,
    }
    for name, value in refused.items():
        if value is not None and value != 0.0:
            raise OptionError(
                f"{loaded.name} runs in rounds on a fixed cluster, by its simulator's rules; leave out {name}"
            )
    assert cluster.nodes


def key_of(inputs: Inputs, run: Run, loaded: Loaded) -> str:
    """Return what the result depends on, as text: contents, not paths or names."""
    what = {
        "format": FORMAT,
        "code": _code(),
        "workload": [loaded.kind, loaded.digest],
        "policy": run.policy,
        "seed": run.seed,
        **inputs.digest(),
    }
    return json.dumps(what, sort_keys=True)


@cache
def _code() -> str:
    """Return a hash of the code that decides and simulates, so that a changed policy is run again."""
    from ebbflow import infra, planners

    deciding = Path(planners.__path__[0])
    folders = [
        *(deciding / name for name in ("model", "scheduling", "training", "tuning")),
        Path(infra.__path__[0]) / "simulation",
        Path(__file__).parent,
    ]
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            total.update(path.relative_to(folder).as_posix().encode())
            total.update(path.read_bytes())
    return total.hexdigest()


def run_all(
    options: Options,
    runs: Sequence[Run],
    *,
    inputs: Inputs | None = None,
    fresh: bool = False,
    processes: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> list[Record]:
    """Return a record for each of ``runs``, in their order; with ``fresh`` the cache is only written.

    Raises:
        OptionError: ``processes`` < 1.
        SimulationError: a policy broke a rule. What was finished before stays in the cache.
    """
    if processes < 1:
        raise OptionError(f"--jobs must be >= 1; got {processes}")
    inputs = inputs or Inputs(options)
    store = JsonStore(Place(home() / "training-simulations"))
    sizes = [inputs.load(run.source, run.seed).jobs for run in runs]
    total, done = sum(sizes), 0
    records: dict[int, Record] = {}
    todo: list[int] = []
    keys = [key_of(inputs, run, inputs.load(run.source, run.seed)) for run in runs]
    for number in range(len(runs)):
        found = None if fresh else store.get(keys[number])
        if isinstance(found, dict) and found.get("format") == FORMAT:
            records[number] = found | {"workload": runs[number].source.name, "cached": True}
            done += sizes[number]
        else:
            todo.append(number)
    progress("cached" if records else "", done, total)
    made = (
        _in_processes(options, runs, todo, processes)
        if processes > 1
        else _here(inputs, runs, todo, progress, done, total)
    )
    for number, record in made:
        store.put(keys[number], record)
        records[number] = record | {"workload": runs[number].source.name, "cached": False}
        done += sizes[number]
        progress(_words(runs[number]), done, total)
    return [records[number] for number in range(len(runs))]


def _words(run: Run) -> str:
    return f"{run.source.name}, {run.policy}, seed {run.seed}"


def _here(
    inputs: Inputs, runs: Sequence[Run], todo: Iterable[int], progress: Progress, done: int, total: int
) -> Iterator[tuple[int, Record]]:
    for number in todo:
        run, before = runs[number], done
        size = inputs.load(run.source, run.seed).jobs

        def ended(count: int, of: int, run: Run = run, before: int = before, size: int = size) -> None:
            progress(_words(run), before + min(count, size), total)

        yield number, run_one(inputs, run, ended)
        done += size


def _in_processes(
    options: Options, runs: Sequence[Run], todo: Sequence[int], processes: int
) -> Iterator[tuple[int, Record]]:
    with ProcessPoolExecutor(processes) as pool:
        waiting = {pool.submit(_work, options, runs[number]): number for number in todo}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@lru_cache(maxsize=1)
def _inputs(options: Options) -> Inputs:
    return Inputs(options)


def _work(options: Options, run: Run) -> Record:
    return run_one(_inputs(options), run)


def run_one(inputs: Inputs, run: Run, ended: Callable[[int, int], None] | None = None) -> Record:
    """Simulate one policy on one workload. ``ended`` hears of (jobs that ended, jobs)."""
    loaded, entry = inputs.load(run.source, run.seed), policy_entry(run.policy)
    return run_world(inputs, loaded, entry, run.seed, ended) | {"policy": entry.name}
