"""Bad inputs for every option of every command, found by walking the command tree itself.

An option that is new gets its cases by its type and its metavar. A command that is new needs a line in ``BASES``,
which a test asks for.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from ebbflow.flows.cli import app

Place = Callable[[Path], None]
"""Makes a bad file at a path."""

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


# --- values -------------------------------------------------------------------------------------------------

NOT_NUMBERS = ("nan", "inf", "-inf", "1e309", "", " ", "abc", "0x10", "1,5", "NaN", "1e400", "--")
HUGE = "1" + "0" * 40
DOUBTFUL = ("-1", "0", "1_0", "١٢", "+1", "-0.0", "1e-320", "1e300")
NOT_WHOLE = ("1.5", HUGE, f"-{HUGE}", "1e3")
CONTROL = ("a\x00b", "a\x1b[31mb", "a\nb", "\udcff", "a\x7fb")
LONG = "x" * 5000
NAMES = ("a b/../c", "../up", ".", "..", "/etc", "a/b", "-x", "\N{PILE OF POO}", " ", "a" * 300, "a;b", "*")

_META: dict[str, tuple[str, ...]] = {
    "SECONDS": (),
    "LIST": (
        "cores=1e309",
        "cores=nan",
        "cores=-1",
        "memory=1e309GiB",
        "memory=infGiB",
        "hazard=inf",
        "nodes=1e30",
        "x=1",
    ),
    "NODES": (
        "local:0x1",
        "local:99999x1",
        "local:1x-1",
        "local:nanx1",
        "here",
        "aws:",
        "local:١x1",
        "local:1e3x1",
    ),
    "FAULT": (
        "20s",
        "nan:kill:x",
        "1e309s:kill:gpu",
        "-1s:kill:gpu",
        "20s:burn:gpu",
        "20s:notice:gpu:infs",
        "s:kill:gpu",
        "3s:resize:0",
        "3s:resize:99999999999999999999",
        "3s:add:99999999999999999999",
    ),
    "NAME=VALUE": ("x", "=1", " =1"),
    "MODULE:NAME": ("x", ":", "os:", ":system", "a b:c", "os.path"),
    "RATE[,REPAIR]": ("nan", "inf", "-1", "1e309", "1,2,3", "a", "0.1,-1", "0.1,inf"),
    "SHARE[,FACTOR]": ("nan", "2", "-1", "1e309", "a", "0.1,-1", "0.1,inf"),
    "WHEN": ("nand", "infd", "-1d", "1e309d", "yesterday", "2026-99-99", "٣d"),
    "MOMENT": ("nan", "25:00", "-1h", "yesterday", "2026-99-99", "99999999999999999999d"),
    "SIZE|FILE": ("0x1", "1x0", "nanx4", "here.yaml", "x", "999999999x1", "-1x2"),
    "FILE|NAME,...": ("", ",", "philly:nan", "philly:-1", "nothing.csv", "pollux-9"),
    "NAME,...": (",", "no-such-policy"),
    "URL": ("mysql://x/y", "postgresql://", "sqlite://", "://", "ftp://x"),
    "WHERE": ("moon", "aws:nothing.json", "spark://", "local:a b", "spark://x:nan"),
    "PORT": ("-1", "65536", "nan", "0x50"),
}
"""What is bad of texts with a shape of their own, by metavar."""


def values_of(parameter: Any, kind: object) -> Iterator[tuple[str, str, bool]]:
    """Yield bad values for a parameter: the value, what it is, and whether it is bad whatever the parameter means."""
    if kind in (int, float):
        for text in NOT_NUMBERS:
            yield text, "not a number", True
        for text in NOT_WHOLE if kind is int else ():
            yield text, "not a whole number", True
        for text in DOUBTFUL:
            yield text, "a doubtful number", False
        return
    if isinstance(kind, type) and issubclass(kind, Enum):
        for text in ("", "no-such-word", "1e309", *CONTROL[:2]):
            yield text, "no such word", True
        return
    for text in CONTROL:
        yield text, "a control character", True
    for text in ("", "  "):
        yield text, "an empty text", True
    yield LONG, "a long text", parameter.metavar not in ("SQL|FILE", "ARGS")
    for text in _META.get(parameter.metavar or "", ()):
        yield text, "a text of another shape", False
    if parameter.metavar in (None, "NAME", "ID", "NODE", "POOL", "APP"):
        for text in NAMES:
            yield text, "a strange name", False


# --- files --------------------------------------------------------------------------------------------------


def _writes(content: bytes) -> Place:
    return lambda path: path.write_bytes(content)  # type: ignore[return-value]


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**31)  # sparse


def _bomb() -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines).encode()


RANDOM = random.Random(5).randbytes(3000)
BROKEN: dict[str, Place] = {
    "missing": lambda path: None,
    "a directory": lambda path: path.mkdir(),
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop of links": _loop,
    "random bytes": _writes(RANDOM),
    "0xff": _writes(b"\xff\xff\xff"),
    "too large": _large,
    "a NUL": _writes(b"\0"),
}
"""Files that are bad whatever they are for."""
ODD: dict[str, Place] = {
    "empty": _writes(b""),
    "deep lists": _writes(b"[" * 100_000),
    "deep tables": _writes(b'{"a":' * 100_000),
    "deep TOML": _writes(b"a = " + b"[" * 50_000),
    "many aliases": _writes(_bomb()),
    "an alias of itself": _writes(b"a: &a [*a]\n"),
    "a key twice": _writes(b"a: 1\na: 2\n"),
    "a JSON key twice": _writes(b'{"a": 1, "a": 2}'),
    "NaN": _writes(b'{"a": NaN}'),
    "a huge number": _writes(b'{"a": 1e999, "b": ' + b"9" * 5000 + b"}"),
    "a list": _writes(b"[1, 2]\n"),
    "a text": _writes(b"hello\n"),
    "a tag": _writes(b"a: !!python/object/apply:os.system [id]\n"),
    "TOML of nan": _writes(b"[quotas]\ndollars_per_hour = nan\n"),
}
"""Files that are bad for nearly everything."""

Mutate = Callable[[random.Random, bytes], bytes]


def _half(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _flip(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _without_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def _line_twice(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return b"".join([*lines[: at + 1], lines[at], *lines[at + 1 :]])


def _swap(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def _other_value(rng: random.Random, data: bytes) -> bytes:
    """Put something else in place of a word or number."""
    import re

    found = list(re.finditer(rb"[A-Za-z0-9_.]+", data))
    if not found:
        return data + b"?"
    word = rng.choice(found)
    new = rng.choice(
        [b"-1", b"nan", b"1e309", b"[]", b"{}", b"null", b'""', b"true", b"\xff", b"9" * 400, b"'"]
    )
    return data[: word.start()] + new + data[word.end() :]


MUTATIONS: dict[str, Mutate] = {
    "cut": _half,
    "a flipped bit": _flip,
    "a line less": _without_line,
    "a line twice": _line_twice,
    "lines swapped": _swap,
    "another value": _other_value,
}

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
    ("train", ("script.py", "--report", "same"), "same"),
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
        for what, place in (("a directory", BROKEN["a directory"]), ("a loop of links", _loop)):
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
    return (chosen + rest)[:count]
