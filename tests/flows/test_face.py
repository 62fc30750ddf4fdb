"""What users import: ``from ebbflow import ...``, and the paths that others hold."""

import ast
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import ebbflow
import ebbflow.infra.errors
import ebbflow.planners.errors
from tests.docs.sources import find

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "reference" not in p.parts),
]
AIRFLOW = "ebbflow.flows.airflow"  # has an environment of its own: make airflow

HELD = (  # by deployments on users' servers, by entry points, by the units of machines whose image may be older
    "ebbflow.flows.query.run_query",
    "ebbflow.flows.training.train",
    "ebbflow.flows.tuning.tune",
    "ebbflow.flows.pipeline.run_pipeline",
    "ebbflow.flows.capacity.capacity_loop",
    "ebbflow.flows.blocks.EbbflowCluster",
    "ebbflow.flows.cli.main",
    "ebbflow.flows.airflow.provider.get_provider_info",
    "ebbflow.infra.aws.node_agent.main",
    "ebbflow.infra.training.launcher.node.main",
    "ebbflow.infra.training.channel.keys.main",
    "ebbflow.infra.training.ElasticRun",
    "ebbflow.infra.elastic.ElasticJob",
    "ebbflow.infra.local_fleet.LocalFleet",
    "ebbflow.infra.ledger.Ledger",
)


def imported(code: str) -> set[str]:
    """Return the top-level packages that are imported once ``code`` has run in a process of its own."""
    said = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", f"{code}\n{said}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def for_checkers() -> dict[str, str]:
    """Return what type checkers see: the public names and the modules that they are imported from."""
    tree = ast.parse(Path(ebbflow.__file__).read_text(encoding="utf-8"))
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {
        one.asname or one.name: f"{node.module}.{one.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for one in node.names
    }


def test_checkers_see_what_is_public_and_nothing_else() -> None:
    assert list(ebbflow.__all__) == sorted(set(ebbflow.__all__))
    assert sorted(for_checkers()) == sorted(ebbflow.__all__)


@pytest.mark.parametrize("name", ebbflow.__all__)
def test_every_public_name_is_what_checkers_take_it_for(name: str) -> None:
    module, _, inner = for_checkers()[name].rpartition(".")
    assert find(ROOT, module, inner) is not None
    if module.startswith(AIRFLOW):
        return
    assert getattr(ebbflow, name) is getattr(import_module(module), inner)


def test_every_error_is_public() -> None:
    for module in (ebbflow.planners.errors, ebbflow.infra.errors):
        own = {n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
        assert own <= set(ebbflow.__all__)


def test_what_there_is_not_is_said_as_python_says_it() -> None:
    with pytest.raises(AttributeError, match="module 'ebbflow' has no attribute 'run_qeury'"):
        _ = ebbflow.run_qeury
    with pytest.raises(ImportError, match="cannot import name 'run_qeury'"):
        exec("from ebbflow import run_qeury")
    assert {*ebbflow.__all__, "__version__", "__doc__"} <= set(dir(ebbflow))


def test_the_version_is_the_installed_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(ebbflow), "__version__", raising=False)
    assert ebbflow.__version__ == version("prefect-ebbflow")

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.delitem(vars(ebbflow), "__version__")
    monkeypatch.setattr("importlib.metadata.version", missing)
    assert ebbflow.__version__ == "0+unknown"
    monkeypatch.delitem(vars(ebbflow), "__version__")


def test_a_name_brings_no_more_than_it_needs() -> None:
    heavy = {"prefect", "torch", "pyarrow", "numpy", "duckdb", "pyspark", "sqlglot", "typer"}
    assert not heavy & imported("import ebbflow; dir(ebbflow); ebbflow.__version__")
    assert not (heavy - {"numpy"}) & imported("from ebbflow import App, Ordered, Tiresias, EbbflowError")
    assert not {"prefect", "torch", "pyspark"} & imported(
        "from ebbflow import QueryRequest, Ledger, LocalFleet"
    )
    assert not {"prefect", "sqlglot", "duckdb"} & imported("from ebbflow import ElasticRun")


def test_the_package_is_found_before_a_folder_of_its_name(tmp_path: Path) -> None:
    """As where a wheel is installed; a package without ``__init__`` would give way to the folder."""
    (tmp_path / "mine" / "ebbflow").mkdir(parents=True)
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "ebbflow").symlink_to(Path(ebbflow.__file__).parent)
    path = [str(tmp_path / "mine"), str(tmp_path / "installed")]
    code = f"import sys; sys.path[:0] = {path!r}; from ebbflow import EbbflowError"
    assert "ebbflow" in imported(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_public_names_alone(page: Path) -> None:
    deep = []
    for line in page.read_text(encoding="utf-8").splitlines():
        words = line.replace(",", " ").split()
        if words[:1] in (["from"], ["import"]) and len(words) > 1 and words[1].split(".")[0] == "ebbflow":
            names = [w for w in words[3:] if w not in ("(", ")")]
            if words[:3] != ["from", "ebbflow", "import"] or not set(names) <= set(ebbflow.__all__):
                deep.append(line)
    assert deep == []


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_import_public_names_alone(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ebbflow":
            assert node.module == "ebbflow"
            assert {one.name for one in node.names} <= set(ebbflow.__all__)


@pytest.mark.parametrize("path", HELD)
def test_paths_that_others_hold_stay(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert callable(getattr(import_module(module), name))
