"""How the house is laid out: subjects, which may use which, how many modules are in a folder."""

import ast
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("flows", "tasks", "infra", "planners")  # each may use those behind it
CROWD = 15  # modules of a folder at most
LONG = 400  # lines of a module at most
FACE = "flows.face"  # laid as the package itself: what users import, and nothing of ours does

SUBJECTS = {
    "query", "training", "tuning", "fleet", "nodes", "capacity", "pipeline", "simulation", "elastic", "report",
    "communication", "aggregation", "memory",
}  # fmt: skip
OTHERS = {  # rooms that are of no subject
    "flows": {"airflow", "apps", "blocks", "cli", "command_list", "face", "ledger", "runs", "setup"},
    "tasks": {"apps", "drawing", "faults"},  # faults: scripted ones, of trainings, fleets, pipelines, benchmarks
    "infra": {
        "aws", "clock", "errors", "ledger", "local_fleet", "logs", "machine", "packages", "protocols", "spark",
        "storage", "tables",
    },
    "planners": {"errors", "hazard", "model", "scheduling", "sections"},
}  # fmt: skip

# from the top: a room uses rooms of lower floors, of its own floor only itself
FLOORS = {
    "flows": (
        "face",
        "cli",
        "command_list",
        "setup",
        "pipeline report apps",
        "capacity tuning ledger",
        "query training fleet simulation airflow",
        "nodes elastic communication aggregation memory",
        "runs",
        "blocks",
    ),
    "tasks": (
        "pipeline aggregation",
        "capacity simulation",
        "report",
        "tuning nodes elastic",
        "training",
        "fleet",
        "query",
        "apps communication memory",
        "drawing faults",
    ),
    "infra": (
        "local_fleet",
        "spark",
        "aws query",
        "training tables tuning",
        "aggregation protocols elastic communication memory",
        "ledger simulation machine logs",
        "storage packages",
        "clock errors",
    ),
    "planners": (
        "capacity",
        "fleet tuning",
        "query training scheduling",
        "aggregation communication elastic memory model sections hazard",
        "errors",
    ),
}


@cache
def modules() -> dict[str, Path]:
    """Return the installed modules, folders' faces too, by their names below ``ebbflow``."""
    found = {}
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if not {"demo_files", "init_files"} & set(parts):
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Return what a module imports of the project and of its tests, functions' own imports too."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{one.name}" for one in node.names}
    names = {name.removeprefix("ebbflow.") for name in found if name.split(".")[0] in ("ebbflow", "tests")}
    return frozenset(name if name in modules() else name.rpartition(".")[0] or FACE for name in names)


def room(module: str) -> tuple[str, str]:
    layer, _, rest = module.partition(".")
    return layer, rest.split(".")[0]


def test_nothing_that_is_installed_imports_tests() -> None:
    assert [m for m in modules() if any(i.split(".")[0] == "tests" for i in imports(m))] == []


def test_nothing_that_is_installed_imports_what_is_for_users() -> None:
    assert [m for m in modules() if FACE in imports(m)] == []


def test_layers_use_only_those_behind_them() -> None:
    wrong = [
        f"{m} imports {i}"
        for m in modules()
        for i in imports(m)
        if i.split(".")[0] in LAYERS and LAYERS.index(i.split(".")[0]) < LAYERS.index(m.split(".")[0])
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", LAYERS)
def test_every_room_is_a_subject_or_named_beside_them(layer: str) -> None:
    rooms = {room(m)[1] for m in modules() if m.startswith(f"{layer}.")}
    assert rooms <= SUBJECTS | OTHERS[layer], "a subject has one name in all four folders"
    floors = [name for floor in FLOORS[layer] for name in floor.split()]
    assert sorted(rooms) == sorted(floors)


@pytest.mark.parametrize("layer", LAYERS)
def test_rooms_use_rooms_of_lower_floors(layer: str) -> None:
    floor = {name: n for n, names in enumerate(FLOORS[layer]) for name in names.split()}
    wrong = set()
    for module in modules():
        here = room(module)
        for other in map(room, imports(module)):
            rooms = here[0] == other[0] == layer and other[1] and here[1] and here != other
            if rooms and floor[other[1]] <= floor[here[1]]:
                wrong.add((f"{layer}.{here[1]}", f"{layer}.{other[1]}"))
    assert wrong == set()


def test_no_file_imports_itself_in_a_circle() -> None:
    graph = {m: {i for i in imports(m) if i in modules() and i != m} for m in modules()}
    while leaves := {m for m, used in graph.items() if not used & graph.keys()}:
        graph = {m: used for m, used in graph.items() if m not in leaves}
    roots = set(graph)
    while tops := roots - {i for m in roots for i in graph[m]}:
        roots -= tops
    assert sorted(roots) == []


def test_no_folder_is_crowded() -> None:
    count = Counter(
        path.parent.relative_to(ROOT).as_posix() for path in modules().values() if path.stem != "__init__"
    )
    assert {folder: n for folder, n in count.items() if n > CROWD} == {}


def test_every_folder_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {p.parent.relative_to(ROOT) for p in modules().values()}
    packages = [".".join(("ebbflow", *folder.parts)) for folder in folders]
    assert sorted(listed) == sorted("ebbflow" if p == f"ebbflow.{FACE}" else p for p in packages)
    assert [f for f in folders if not (ROOT / f / "__init__.py").exists()] == []


def test_what_runs_as_a_process_is_defined_before_it_begins() -> None:
    early = []
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body[:-1] if "__main__" in text else ():
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                early.append(module)
    assert early == []


def test_every_file_of_tests_has_a_name_of_its_own() -> None:
    """Two of one name cannot be collected by one process."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_is_long() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*.py")
    }
    assert {path: count for path, count in lines.items() if count > LONG} == {}
