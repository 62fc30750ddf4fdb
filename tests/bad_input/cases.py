"""Bad inputs for every option of every command, found by walking the command tree itself.

An option that is new gets its cases by its type and its metavar. A command that is new needs a line in ``BASES``,
which a test asks for.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from ebbflow.flows.cli import app
from tests.bad_input.bad_values import BROKEN, MUTATIONS, ODD, Mutate, Place, values_of

BASES: dict[str, tuple[str, ...]] = {
    "query": ("q.sql", "--tables", "tables", "--engine", "duckdb", "--runner", "plain"),
    "explain": ("q.sql", "--tables", "tables", "--engine", "duckdb"),
    "calibrate": ("--engine", "duckdb"),
    "doctor": (),
    "demo": ("--runner", "plain"),
    "train": ("script.py", "--nodes", "local:1x1", "--runner", "plain"),
    "tune": ("script.py", "--space", "space.yaml"),
    "elastic": ("mlr", "--input", "data.npz", "--classes", "2"),
    "run": ("pipeline.yaml", "--runner", "plain"),
    "report": ("--ledger", "ledger.db"),
    "local up": ("--gpu", "1"),
    "local status": (),
    "local list": (),
    "local add": ("gpu",),
    "local notice": ("gpu-1",),
    "local kill": ("gpu-1",),
    "local pause": ("gpu-1",),
    "local resume": ("gpu-1",),
    "local evict": ("digits", "gpu-1"),
    "local inject": ("20s:kill:gpu",),
    "local down": (),
    "data tpch": ("--scale", "0.01"),
    "data tpcds": ("--scale", "0.01"),
    "data skewed": ("--scale", "0.01"),
    "aggregation serve": ("a1", "--ledger", "ledger.db"),
    "aggregation status": ("--ledger", "ledger.db"),
    "aggregation drain": ("a1", "--ledger", "ledger.db"),
    "simulate aggregation": ("--workload", "jobs.csv"),
    "simulate memory": ("--policy", "two-choices", "--machines", "4", "--containers", "6", "--seeds", "1"),
    "simulate training": ("--workload", "jobs.csv", "--cluster", "2x2", "--policy", "tiresias"),
    "fleet status": ("--terraform-output", "config.json"),
    "fleet prices": ("--terraform-output", "config.json"),
    "fleet cost": ("--terraform-output", "config.json"),
    "fleet plan": ("--terraform-output", "config.json"),
    "fleet grow": ("gpu", "1", "--terraform-output", "config.json", "--dry-run"),
    "fleet shrink": ("gpu", "1", "--terraform-output", "config.json", "--dry-run"),
    "fleet drain": ("i-0123456789abcdef0", "--terraform-output", "config.json", "--dry-run"),
    "fleet gang": ("g1", "--pool", "gpu", "--size", "1", "--terraform-output", "config.json", "--dry-run"),
    "fleet end": ("g1", "--terraform-output", "config.json", "--dry-run"),
    "fleet notices show": ("--terraform-output", "config.json"),
    "fleet notices redrive": ("--terraform-output", "config.json"),
    "fleet notices read": ("--terraform-output", "config.json"),
    "ledger status": ("--ledger", "ledger.db"),
    "ledger events": ("--ledger", "ledger.db"),
    "ledger verify": ("--ledger", "ledger.db"),
    "ledger migrate": ("--ledger", "ledger.db"),
    "ledger prune": ("--ledger", "ledger.db", "--before", "30d", "--dry-run"),
    "capacity start": ("--source", "aws:config.json", "--ledger", "ledger.db", "--runner", "plain"),
    "capacity status": ("--ledger", "ledger.db"),
    "capacity stop": ("--ledger", "ledger.db", "--yes"),
    "apps list": ("--ledger", "ledger.db"),
    "apps show": ("digits", "--ledger", "ledger.db"),
    "apps logs": ("digits", "--ledger", "ledger.db"),
    "apps cancel": ("digits", "--ledger", "ledger.db", "--yes"),
    "communication profile": ("--ranks", "2"),
    "communication plan": ("training.json", "--links", "links.json"),
    "communication explain": ("plan.json",),
    "communication compare": ("training.json", "--links", "links.json"),
    "memory gateway": ("--store", "store"),
    "memory lend": ("node-1",),
    "memory status": (),
    "memory stop": ("node-1",),
    "prefect init": (),
    "init": ("new", "--force"),
}
"""Arguments of each command that are right."""

WRITTEN = frozenset({"picture", "json", "report", "html", "csv", "out", "output", "document"})
"""Options whose files are written."""
ENDLESS = frozenset({"watch"})
"""Options that make a command go on until it is interrupted, where their value is right."""


@dataclass(frozen=True)
class Case:
    """One bad input."""

    command: str
    arguments: tuple[str, ...]  # after the command
    bad: str  # what a message must name: the value, or the file
    option: str  # or the option, which may be named instead
    what: str
    surely: bool = True  # whether it is bad whatever the option means
    place: Place | None = field(default=None, compare=False)  # makes the bad file, in the working directory
    statuses: tuple[int, ...] = (2,)
    replaces: bool = False  # whether the bad file is in place of one that was right

    @property
    def words(self) -> tuple[str, ...]:
        """Return the whole command line after ``ebbflow``."""
        return (*self.command.split(), *self.arguments)

    def __str__(self) -> str:
        return f"{self.what}: ebbflow {' '.join(repr(word[:80]) for word in self.words)}"


READ: dict[tuple[str, str], str] = {
    ("query", "sql"): "q.sql",
    ("explain", "sql"): "q.sql",
    ("fleet plan", "query"): "q.sql",
    ("train", "script"): "script.py",
    ("train", "failures"): "failures.toml",
    ("tune", "script"): "script.py",
    ("tune", "space"): "space.yaml",
    ("elastic", "input"): "data.npz",
    ("run", "file"): "pipeline.yaml",
    ("report", "prices"): "prices.toml",
    ("simulate aggregation", "workload"): "jobs.csv",
    ("simulate training", "workload"): "jobs.csv",
    ("simulate training", "cluster"): "cluster.yaml",
    ("simulate training", "throughputs"): "throughputs.json",
    ("simulate training", "spot_trace"): "spot.csv",
    ("simulate training", "prices"): "spot-prices.csv",
    ("capacity start", "config"): "limits.toml",
    ("capacity start", "prices"): "prices.toml",
    ("communication plan", "training"): "training.json",
    ("communication plan", "links"): "links.json",
    ("communication explain", "plan"): "plan.json",
    ("communication explain", "training"): "training.json",
    ("communication compare", "training"): "training.json",
    ("communication compare", "links"): "links.json",
}
"""Options that read a file, and a file that is right for them; those of ``ebbflow fleet`` are the same everywhere."""
_EVERYWHERE = {"terraform_output": "config.json", "config": "limits.toml", "prices": "prices.toml"}
LEDGERS = frozenset({"ledger", "url"})


def read_by(command: str, name: str) -> str | None:
    """Return a file that is right for an option that reads one, else ``None``."""
    if command.startswith("fleet "):
        return _EVERYWHERE.get(name) or READ.get((command, name))
    return "ledger.db" if name in LEDGERS else READ.get((command, name))


STATE: dict[str, tuple[str, tuple[str, ...]]] = {
    "runs/mine/run.json": ("run", ("--resume", "mine", "--runs-dir", "runs", "--runner", "plain")),
    "runs/mine/pipeline.yaml": ("run", ("--resume", "mine", "--runs-dir", "runs", "--check")),
    "trainings/mine/request.json": (
        "train",
        ("--resume", "mine", "--runs-dir", "trainings", "--runner", "plain"),
    ),
    "tunings/mine/tuning.json": ("tune", ("--resume", "mine", "--runs-dir", "tunings")),
    "tables/orders.parquet": ("query", BASES["query"]),
}
"""Files that commands keep or read in directories, and a command that reads each."""
OWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "fleets/local/fleet.json": ("local status", ()),
    "fleet/ebb.json": ("fleet status", BASES["fleet status"]),
    "fleet/ebb.stays.json": ("fleet cost", BASES["fleet cost"]),
    "fleet/ebb.notices.json": ("fleet notices show", BASES["fleet notices show"]),
    "ledger.db": ("ledger status", ()),
}
"""Files of Ebbflow's own directory, and a command that reads each."""
COMBINED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("run", ("pipeline.yaml", "--resume", "mine"), "--resume"),
    ("run", (), "--resume"),
    ("run", ("pipeline.yaml", "--restart"), "restart"),
    ("run", ("--resume", "mine", "--runs-dir", "runs", "--set", "a=b"), "--resume"),
    ("run", ("--resume", "mine", "--runs-dir", "runs", "--run-id", "other"), "--resume"),
    ("run", ("pipeline.yaml", "--report", "same.txt"), "same"),
    ("run", ("pipeline.yaml", "--set", "nothing=1"), "nothing"),
    ("train", ("script.py", "--resume", "mine"), "--resume"),
    ("train", ("script.py", "--restart"), "--restart"),
    ("train", ("--run-id", "one"), "script"),
    ("train", ("script.py", "--nodes", "local:1x1", "--min-gpus", "3"), "min_gpus"),
    ("train", ("script.py", "--min-gpus", "3", "--max-gpus", "2"), "max_gpus"),
    ("train", ("script.py", "--nodes", "local:2x2", "--replica-gpus", "5"), "replica_gpus"),
    ("train", ("script.py", "--nodes", "local:1x3", "--replica-gpus", "2", "--min-gpus", "3"), "min_gpus"),
    ("train", ("script.py", "--report", "same"), "same"),
    ("train", ("script.py", "--track", "comet:fits"), "track"),
    ("train", ("script.py", "--track", "wandb:a b"), "track"),
    ("train", ("script.py", "--track", "mlflow:http://ann:pw@host"), "MLFLOW_TRACKING_PASSWORD"),
    ("train", ("script.py", "--track", "wandb:a", "--track", "wandb:a"), "twice"),
    ("tune", ("script.py",), "--space"),
    ("tune", ("script.py", "--space", "space.yaml", "--resume", "mine"), "--resume"),
    ("tune", ("script.py", "--space", "space.yaml", "--pruner", "curve"), "--epochs"),
    ("tune", ("script.py", "--space", "space.yaml", "--gpus-per-trial", "2"), "GPUs"),
    ("query", ("q.sql", "--engine", "duckdb"), "--tables"),
    ("query", ("q.sql", "--tables", "tables", "--catalog"), "--catalog"),
    ("query", (*BASES["query"], "--output", "same.json", "--report", "same.json"), "same"),
    ("elastic", (*BASES["elastic"], "--restart"), "restart"),
    ("elastic", (*BASES["elastic"], "--resume"), "state-dir"),
    ("demo", ("--query", "5", "--set", "a=b"), "--set"),
    ("demo", ("--materialize", "cost"), "--materialize"),
    ("demo", ("--network", "200mbit"), "--network"),
    ("demo", ("--query", "7", "--network", "200mbit", "--materialize", "cost"), "--materialize"),
    ("demo", ("--query", "7", "--network", "fast"), "fast"),
    ("communication profile", ("--min-kib", "8", "--max-kib", "4"), "--min-kib"),
    ("communication plan", (*BASES["communication plan"], "--picture", "same.png"), "same"),
    ("communication compare", (*BASES["communication compare"], "--hand-order", "nobody"), "nobody"),
    ("communication plan", ("links.json", "--links", "links.json"), "links.json"),
    ("fleet plan", (*BASES["fleet plan"], "--nodes", "2"), "--nodes"),
    ("fleet plan", ("gpu", *BASES["fleet plan"], "--query", "q.sql"), "--within"),
    ("simulate training", (*BASES["simulate training"], "--notice", "5"), "--spot-trace"),
    (
        "simulate training",
        (*BASES["simulate training"], "--throughputs", "throughputs.json"),
        "--throughputs",
    ),
    ("simulate training", (*BASES["simulate training"], "--profiles", "tables"), "--profiles"),
    ("simulate training", (*BASES["simulate training"], "--communication", "tables"), "--links"),
    ("simulate training", (*BASES["simulate training"], "--links", "64gbit,10gbit"), "--communication"),
    ("report", (*BASES["report"], "8000"), "8000"),
    ("report", (*BASES["report"], "--since", "1h", "--until", "2h"), "--since"),
    ("local up", (), "--spark"),
    ("capacity start", ("--source", "local", "--on-demand-prices", "prices.toml"), "prices.toml"),
    ("capacity start", ("--cluster", "a b/../c", *BASES["capacity start"]), "a b/../c"),
)
"""Options each of which is right, and that do not go together; what a message must name."""

# --- all cases ----------------------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """Return all commands by their words."""
    found = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        below = getattr(command, "commands", None)
        if below is None:
            found[" ".join(words)] = command
            return
        for name, one in below.items():
            walk(one, (*words, name))

    walk(typer.main.get_command(app), ())
    return found


def kind_of(parameter: Any) -> object:
    """Return the type of a parameter's value, of a list's items."""
    kind = parameter.type_descriptor.annotation
    return get_args(kind)[0] if get_origin(kind) is list else kind


def with_value(command: Any, base: Sequence[str], parameter: Any, value: str) -> tuple[str, ...]:
    """Return ``base`` with ``value`` for ``parameter`` in place of what it has."""
    positional = [one for one in command.params if one.param_type_name == "argument"]
    given, options = [], []
    words = list(base)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            given.append(word)
            continue
        owner = next(one for one in command.params if word in one.opts)
        taken = [word] if owner.is_flag else [word, words.pop(0)]
        if owner is not parameter:
            options += taken
    if parameter.param_type_name == "option":
        long = max(parameter.opts, key=len)
        return (*given, *options, f"{long}={value}")
    at = positional.index(parameter)
    given[at : at + 1] = [value]
    return (*options, "--", *given)


def every_case(seed: int = 0) -> Iterator[Case]:
    """Yield all cases, in the order of commands and options."""
    rng = random.Random(seed)
    yield from _state_cases(rng)
    for words, arguments, named in COMBINED:
        yield Case(words, arguments, named, named, f"options that do not go together ({named})")
    for words, command in commands().items():
        base = BASES.get(words)
        if base is None:
            continue
        yield Case(
            words, (*base, "--no-such-option"), "--no-such-option", "--no-such-option", "no such option"
        )
        for parameter in command.params:
            kind = kind_of(parameter)
            name = parameter.name or ""
            if kind is bool or name in ("help", "install_completion", "show_completion"):
                continue
            option = (
                max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.metavar
            )
            for value, what, always in values_of(parameter, kind):
                surely = always and name != "arguments"
                if what == "an empty text" and name == "arguments":
                    continue
                arguments = with_value(command, base, parameter, value)
                yield Case(words, arguments, value, option, f"{option}: {what}", surely)
            if kind in (str, Path):
                yield from _file_cases(words, command, base, parameter, option, rng)


def _state_cases(rng: random.Random) -> Iterator[Case]:
    broken = ("a directory", "random bytes", "0xff", "a NUL", "a loop of links")
    odd = ("empty", "deep lists", "deep tables", "a list", "a huge number", "a JSON key twice")
    for own, files in ((False, STATE), (True, OWN)):
        for path, (words, arguments) in files.items():
            where = f"../home/.cache/ebbflow/{path}" if own else path
            # a table is named by its own name, a run by its id
            named = {"tables": "orders", "runs": "mine"}.get(path.split("/")[0], path)
            places = [
                (what, BROKEN[what], not words.startswith("fleet")) for what in broken
            ]  # it asks AWS first
            places += [(what, ODD[what], False) for what in odd]
            if not own:
                places += [
                    (what, _mutated(one, rng.getrandbits(32)), False) for what, one in MUTATIONS.items()
                ]
            for what, place, surely in places:
                instead, about = _instead(place), f"{path}: {what}"
                yield Case(words, arguments, where, named, about, surely, instead, (1, 2), replaces=True)


def _instead(place: Place) -> Place:
    """Return what makes a bad file in place of the right one."""

    def make(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        right = path.with_name(f".{path.name}.right")
        if path.is_file():
            path.rename(right)  # not written over: it is a link to the template's
        place(path)
        right.unlink(missing_ok=True)

    return make


def _mutated(mutate: Mutate, draw: int) -> Place:
    def place(path: Path) -> None:
        path.write_bytes(mutate(random.Random(draw), path.with_name(f".{path.name}.right").read_bytes()))

    return place


def _file_cases(
    words: str, command: Any, base: tuple[str, ...], parameter: Any, option: str, rng: random.Random
) -> Iterator[Case]:
    name = parameter.name or ""
    if parameter.metavar == "FILE" and name in WRITTEN:
        arguments = with_value(command, base, parameter, "bad-place")
        for what, place in (
            ("a directory", BROKEN["a directory"]),
            ("a loop of links", BROKEN["a loop of links"]),
        ):
            yield Case(words, arguments, "bad-place", option, f"{option}: {what}", True, place)
        for value in ("q.sql/below", "/proc/nothing/here", "/dev/full"):
            arguments = with_value(command, base, parameter, value)
            yield Case(words, arguments, value, option, f"{option}: nothing can be written there")
        return
    if parameter.metavar == "DIR":
        for value in ("q.sql", "q.sql/below", "/proc/nothing"):
            arguments = with_value(command, base, parameter, value)
            yield Case(words, arguments, value, option, f"{option}: no directory", name != "tables")
        arguments = with_value(command, base, parameter, "bad-place")
        for what in ("a named pipe", "a loop of links", "random bytes"):
            yield Case(words, arguments, "bad-place", option, f"{option}: {what}", True, BROKEN[what])
        return
    right = read_by(words, name)
    if right is None:
        return
    bad = f"bad{Path(right).suffix}"
    arguments = with_value(command, base, parameter, bad)
    statuses = (1, 2) if name in LEDGERS else (2,)  # a ledger that cannot be used is a failure, too
    for what, place in BROKEN.items():
        surely = not (what == "missing" and name in LEDGERS and words == "capacity start")
        yield Case(words, arguments, bad, option, f"{option}: {what}", surely, place, statuses)
    for what, place in ODD.items():
        yield Case(words, arguments, bad, option, f"{option}: {what}", False, place, statuses)
    rights = (right, "example.yaml") if right == "pipeline.yaml" else (right,)
    for source, (what, mutate) in product(rights, MUTATIONS.items()):
        for _ in range(8 if right in ("pipeline.yaml", "limits.toml", "config.json") else 1):
            draw = rng.getrandbits(32)

            def place(path: Path, mutate: Mutate = mutate, draw: int = draw, source: str = source) -> None:
                path.write_bytes(mutate(random.Random(draw), Path(source).read_bytes()))

            yield Case(words, arguments, bad, option, f"{option}: {what}", False, place, statuses)


def sample(count: int, seed: int) -> list[Case]:
    """Return ``count`` cases; of each option at least one."""
    rng = random.Random(seed)
    all_of: dict[tuple[str, str], list[Case]] = {}
    for case in every_case(seed):
        all_of.setdefault((case.command, case.option), []).append(case)
    for cases in all_of.values():
        rng.shuffle(cases)
    chosen = [cases.pop() for cases in all_of.values()]
    rest = [case for cases in all_of.values() for case in cases]
    rng.shuffle(rest)
    return (chosen + rest)[: max(count, len(chosen))]
