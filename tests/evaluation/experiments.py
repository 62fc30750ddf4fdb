"""Runs experiments once: each keeps its result, a JSON value, in a file of its own."""

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ebbflow.infra.storage.files import write_text

Progress = Callable[[str, int, int], None]
"""What runs, and how much of all is done, of how much."""

Found = dict[str, Any]
"""Results by the name of the experiment."""

ROOTS = (
    "ebbflow.planners",
    "ebbflow.infra",
    "ebbflow.tasks.simulation",
    "tests.evaluation",
)


@dataclass(frozen=True, slots=True)
class Experiment:
    """One measurement. ``parameters`` are all that it depends on besides its code."""

    name: str
    run: Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0  # expected cost, in any unit


def run_experiments(
    system: str, experiments: Sequence[Experiment], out: Path, progress: Progress = lambda *_: None
) -> Found:
    """Return every result; what ``out``/``system`` holds from the same code and parameters is not run again."""
    total = max(1, round(sum(e.weight for e in experiments)))
    done, found = 0.0, {}
    for experiment in experiments:
        progress(f"{system}: {experiment.name}", round(done), total)
        path = out / system / f"{experiment.name}.json"
        key = key_of(experiment)
        found[experiment.name] = _kept(path, key)
        if found[experiment.name] is None:
            result = json.loads(json.dumps(experiment.run(**experiment.parameters), allow_nan=False))
            parameters = dict(experiment.parameters)
            write_text(path, json.dumps({"key": key, "parameters": parameters, "result": result}) + "\n")
            found[experiment.name] = result
        done += experiment.weight
    progress(f"{system}: done", total, total)
    return found


def _kept(path: Path, key: str) -> Any | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content.get("result") if isinstance(content, dict) and content.get("key") == key else None


def key_of(experiment: Experiment) -> str:
    """Return a hash of the parameters and of all modules of ours that the experiment's module imports."""
    what = [
        experiment.run.__module__,
        experiment.run.__qualname__,
        dict(experiment.parameters),
        code_of(experiment.run.__module__),
    ]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


@cache
def code_of(module: str) -> str:
    """Return a hash of the sources of ``module`` and of what it imports of planners, simulator and experiments."""
    seen: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen or not name.startswith(ROOTS):
            continue
        spec = find_spec(name)
        if spec is None or not spec.origin:
            continue
        source = Path(spec.origin).read_bytes()
        seen[name] = source
        waiting += _imported(ast.parse(source))
    total = hashlib.sha256()
    for name in sorted(seen):
        total.update(name.encode())
        total.update(seen[name])
    return total.hexdigest()


def _imported(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            if node.module.startswith(ROOTS):
                yield from (
                    f"{node.module}.{alias.name}"
                    for alias in node.names
                    if _is_module(node.module, alias.name)
                )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _is_module(package: str, name: str) -> bool:
    spec = find_spec(package)
    return bool(
        spec
        and spec.submodule_search_locations
        and any((Path(folder) / f"{name}.py").exists() for folder in spec.submodule_search_locations)
    )
