"""Counts the walk of a small query or training through the house: ``python -m tests.scripts.walks query``.

One command runs in a process of its own and every call in its main thread into a module of ours is noted. A *stay*
is a run of calls into one module, a *room* a folder, a *climb* a step from a module to one of a higher layer that
is no plain return: the higher one does not go on where it was left, but is called, by somebody above both or from
below; the latter are the *callbacks*. A step from one module to another counts once, however often it is taken.
Where threads and processes are waited for, the stays vary by one or two. ``--root`` measures another checkout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
LAYERS = ("flows", "tasks", "infra", "planners")
LIMIT = 240.0  # seconds that a command may take

QUERY = """
    SELECT region, sum(amount) AS amount
    FROM sales JOIN shops ON sales.shop = shops.id JOIN towns ON shops.town = towns.id
    WHERE amount > 1 GROUP BY region ORDER BY region
"""
SCRIPT = """
import torch
from ebbflow.infra.training import ElasticRun

data = (torch.ones(80, 2), torch.ones(80, 1))
with ElasticRun.start(seed=1) as run:
    model, _ = run.prepare(
        torch.nn.Linear(2, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch_size=8
    )
    for _ in run.epochs(1):
        for inputs, wanted in run.batches(data):
            run.backward(((model(inputs) - wanted) ** 2).mean())
            run.step()
"""


@dataclass(frozen=True)
class Call:
    """A call into ``module`` by ``caller``, the nearest module of ours on the stack; empty when there is none."""

    caller: str
    module: str


@dataclass(frozen=True)
class Step:
    """A way from one module to the next, and whether it was a climb, or a callback, at least once."""

    before: str
    after: str
    climb: bool = False
    callback: bool = False


@dataclass(frozen=True)
class Walk:
    """The steps of a walk, each once, in the order in which they were first taken."""

    steps: tuple[Step, ...]

    @classmethod
    def of(cls, calls: Iterable[Call]) -> "Walk":
        """Return the walk that ``calls`` make, in their order."""
        steps: dict[tuple[str, str], Step] = {}
        before = ""
        for call in calls:
            if call.module == before:
                continue
            known = steps.get((before, call.module), Step(before, call.module))
            climb = call.caller != call.module and _above(call.module, before)
            callback = climb and _above(call.module, call.caller)
            steps[before, call.module] = Step(
                before, call.module, known.climb or climb, known.callback or callback
            )
            before = call.module
        return cls(tuple(steps.values()))

    @property
    def stays(self) -> int:
        """The stays, one for each step: the walk comes in from outside by the first of them."""
        return len(self.steps)

    @property
    def modules(self) -> int:
        return len({step.after for step in self.steps})

    @property
    def rooms(self) -> int:
        return len({step.after.rpartition(".")[0] for step in self.steps})

    @property
    def climbs(self) -> int:
        return sum(step.climb for step in self.steps)

    @property
    def callbacks(self) -> int:
        return sum(step.callback for step in self.steps)

    def table(self) -> str:
        """Return the counts, a line each."""
        names = ("stays", "modules", "rooms", "climbs", "callbacks")
        return "\n".join(f"{name:10}{getattr(self, name):5}" for name in names)

    def sequence(self) -> str:
        """Return a line for each step: its number, ``^`` for a climb, ``!`` for a callback, where it leads to."""
        lines = []
        for number, step in enumerate(self.steps, 1):
            mark, before = " ", ""
            if step.climb:
                mark, before = "!" if step.callback else "^", f"  (from {step.before})"
            lines.append(f"{number:4} {mark} {step.after}{before}")
        return "\n".join(lines)


def _above(module: str, other: str) -> bool:
    """Tell whether ``module`` is of a higher layer than ``other``; nothing is above what lies outside ("")."""
    return bool(other) and _layer(module) < _layer(other)


def _layer(module: str) -> int:
    return LAYERS.index(module.partition(".")[0])


class Recorder:
    """Notes the calls into modules below ``root`` while it is the profiler of a thread.

    What happens while a module is imported is left out, as is a package's face handing a name on.
    """

    def __init__(self, root: Path) -> None:
        self.calls: list[Call] = []
        self._root = f"{root}{os.sep}"
        self._stack: list[tuple[str, bool]] = []  # the nearest module of ours, whether something is imported
        self._modules: dict[str, str] = {}  # of files, empty for those of others

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        if event != "call":
            return
        caller, importing = self._stack[-1] if self._stack else ("", False)
        module = self._module(frame.f_code.co_filename)
        importing = importing or frame.f_code.co_name in {"<module>", "__getattr__"}
        if module and not importing:
            if not self.calls or self.calls[-1].module != module:
                self.calls.append(Call(caller, module))
            caller = module
        self._stack.append((caller, importing))

    def _module(self, file: str) -> str:
        if file not in self._modules:
            inside = file.removeprefix(self._root) if file.startswith(self._root) else ""
            name = inside.removesuffix(".py").removesuffix(f"{os.sep}__init__").replace(os.sep, ".")
            self._modules[file] = name if name.partition(".")[0] in LAYERS else ""
        return self._modules[file]


def query_command(folder: Path) -> list[str]:
    """Write three small tables below ``folder`` and return the command that joins them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = {
        "sales": {"shop": [n % 20 for n in range(1000)], "amount": [float(n % 7) for n in range(1000)]},
        "shops": {"id": list(range(20)), "town": [n % 5 for n in range(20)]},
        "towns": {"id": list(range(5)), "region": ["north", "south", "north", "east", "west"]},
    }
    data = folder / "data"
    data.mkdir()
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), data / f"{name}.parquet")
    return [
        *("query", QUERY, "--tables", str(data), "--store", str(folder / "store"), "--engine", "duckdb"),
        *("--materialize", "every-join", "--runner", "plain"),
    ]


def training_command(folder: Path) -> list[str]:
    """Write a script of ten steps below ``folder`` and return the command that trains it on one process."""
    script = folder / "ten_steps.py"
    script.write_text(SCRIPT)
    return [
        *("train", str(script), "--folder", str(folder / "runs"), "--nodes", "local:1x1", "--no-adaptive"),
        *("--runner", "plain"),
    ]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {"query": query_command, "training": training_command}


def walk(kind: str, root: Path) -> Walk:
    """Run the command of ``kind`` with the code of the checkout ``root``, an absolute path, and return its walk.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="ebbflow-walk-") as name:
        folder = Path(name)
        package = folder / "path" / "ebbflow"
        package.mkdir(parents=True)
        package.joinpath("__init__.py").write_text(f"__path__ = [{str(root)!r}]\n")
        out = folder / "calls.json"
        environment = {
            **os.environ,
            "PYTHONPATH": str(package.parent),  # found before what is installed, by child processes as well
            "EBBFLOW_HOME": str(folder / "home"),
        }
        subprocess.run(
            [sys.executable, "-P", __file__, "--record", str(out), "--root", str(root), kind],
            env=environment,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=LIMIT,
        )
        return Walk.of(Call(*one) for one in json.loads(out.read_text()))


def record(kind: str, root: Path, out: Path) -> None:
    """Run the command of ``kind`` in this process, and write the calls to the file ``out``. Never returns."""
    arguments = COMMANDS[kind](out.parent)
    from ebbflow.flows import cli

    sys.argv = ["ebbflow", *arguments]
    recorder = Recorder(root)
    sys.setprofile(recorder)
    try:
        cli.main()
    finally:
        sys.setprofile(None)
        out.write_text(json.dumps([(call.caller, call.module) for call in recorder.calls]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the walk that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.walks", description=__doc__)
    parser.add_argument("kind", choices=sorted(COMMANDS))
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--steps", action="store_true", help="print the sequence of modules, too")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.record:
        record(asked.kind, asked.root, asked.record)
        return
    found = walk(asked.kind, asked.root.resolve())
    if asked.steps:
        print(found.sequence())
    print(found.table())


if __name__ == "__main__":
    main()
