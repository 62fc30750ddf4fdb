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
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.catalogue import Kind, policy_entry
from ebbflow.tasks.simulation.inputs import Inputs
from ebbflow.tasks.simulation.records import FORMAT, Record
from ebbflow.tasks.simulation.request import SimulationRequest
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


def planned(inputs: Inputs) -> list[Run]:
    """Return all runs, with every input read and checked before the first begins.

    Raises:
        OptionError: a policy that cannot run on a workload, or options that do not go with it.
        WorkloadError: a file that breaks its format.
    """
    request = inputs.request
    sources, entries = request.sources, request.policies
    _check_used(request, {inputs.load(source, 0).kind for source in sources})
    for source in sources:
        loaded = inputs.load(source, 0)
        for entry in entries:
            if loaded.kind not in entry.kinds:
                needs = " or ".join(_NEEDS[kind] for kind in sorted(entry.kinds))
                raise OptionError(f"policy {entry.name} needs {needs}; {source.text} has none")
        _check(inputs, loaded)
    return [
        Run(source, entry.name, seed)
        for source in sources
        for entry in entries
        for seed in range(request.seeds)
    ]


def _check_used(request: SimulationRequest, kinds: Collection[str]) -> None:
    """Raise ``OptionError`` for a file that none of the workloads would have read."""
    if request.throughputs is not None and "rounds" not in kinds:
        raise OptionError(
            f"--throughputs is for traces in rounds (Gavel's, Shockwave's), of which --workload names none; got "
            f"{request.throughputs}"
        )
    if "profiles" not in kinds and (request.profiles is not None or request.nearest):
        given = request.profiles if request.profiles is not None else "--nearest-profile"
        raise OptionError(
            f"--profiles and --nearest-profile are for workloads of AdaptDL's format, of which --workload names "
            f"none; got {given}"
        )


def _check(inputs: Inputs, loaded: Loaded) -> None:
    request = inputs.request
    cluster, _ = inputs.cluster(0, 0.0)
    if loaded.kind != "rounds":
        assert loaded.workload is not None
        inputs.check_prices(max(job.arrival + (job.duration or 0.0) for job in loaded.workload.jobs))
        return
    refused = {
        "--interval": request.interval,
        "--restart-delay": request.restart_delay,
        "--interference": request.interference,
        "--spot-trace": request.spot_trace,
        "--prices": request.prices,
        "--failures": request.failures,
        "--stragglers": request.stragglers,
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
    inputs: Inputs,
    runs: Sequence[Run],
    *,
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
    store = JsonStore(StorageLocation(home() / "training-simulations"))
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
        _in_processes(inputs.request, runs, todo, processes)
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
    request: SimulationRequest, runs: Sequence[Run], todo: Sequence[int], processes: int
) -> Iterator[tuple[int, Record]]:
    with ProcessPoolExecutor(processes) as pool:
        waiting = {pool.submit(_work, request, runs[number]): number for number in todo}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@lru_cache(maxsize=1)
def _inputs(request: SimulationRequest) -> Inputs:
    return Inputs(request)


def _work(request: SimulationRequest, run: Run) -> Record:
    return run_one(_inputs(request), run)


def run_one(inputs: Inputs, run: Run, ended: Callable[[int, int], None] | None = None) -> Record:
    """Simulate one policy on one workload. ``ended`` hears of (jobs that ended, jobs)."""
    loaded, entry = inputs.load(run.source, run.seed), policy_entry(run.policy)
    return run_world(inputs, loaded, entry, run.seed, ended) | {"policy": entry.name}
