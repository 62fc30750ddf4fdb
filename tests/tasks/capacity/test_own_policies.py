"""Which policies a name may bring in: code that somebody else names is not imported, and nothing is called unseen."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.capacity import own_policies
from ebbflow.tasks.capacity.own_policies import GROUP, check_policy, policy_of
from ebbflow.tasks.capacity.request import CapacityRequest, LoopRules
from ebbflow.tasks.pipeline.file.read import parse_pipeline
from ebbflow.tasks.pipeline.run import PipelineRequest, check_pipeline, run_steps

MODULE = """
from pathlib import Path
from ebbflow.planners.scheduling.gangs.ordered import Ordered
Path("imported").touch()
class Mine:
    name = "mine"
    def __init__(self, size=1):
        Path("called").touch()
        self.size = size
    def decide(self, view, memory, rng): ...
class Unnamed:
    def decide(self, view, memory, rng): ...
class Breaks(Mine):
    def __init__(self): raise RuntimeError("no luck")
class Harmless:
    def __init__(self, *given, **named): Path("called").touch()
def promised() -> Mine:
    return Mine(2)
def lied() -> Mine:
    return None
def unsaid(**given):
    Path("called").touch()
    return Mine()
def said_wrongly() -> int:
    Path("called").touch()
ready = type("Ready", (), {"name": "ready", "decide": lambda *_: None})()
"""
PIPELINE = """
name: shop
cluster: {local: {pools: {gpu: {kind: gpu, nodes: 0, max_nodes: 1}}}}
loop: {policy: "%s"}
queries: {one: {sql: SELECT 1, tables: tables}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the present folder, in which a module lies."""
    (tmp_path / "policy_of_mine.py").write_text(MODULE)
    (tmp_path / "tables").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "tables" / "one.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    yield tmp_path
    sys.modules.pop("policy_of_mine", None)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return what ``os.system`` is called with."""
    called: list[object] = []
    monkeypatch.setattr("os.system", lambda *given, **named: called.append((given, named)))
    return called


def offered(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    """Have an installed package offer policies."""
    from importlib.metadata import EntryPoint, EntryPoints

    found = EntryPoints(EntryPoint(name, value, GROUP) for name, value in points)
    monkeypatch.setattr(own_policies, "entry_points", found.select)


@pytest.mark.parametrize("name", ["os:system", "policy_of_mine:Mine", "subprocess:Popen"])
def test_what_a_file_names_is_not_imported_unless_it_is_allowed(
    name: str, here: Path, system: list[object]
) -> None:
    limits = here / "limits.toml"
    limits.write_text(f'[policy]\nname = "{name}"\noptions = {{ command = "id" }}\n')
    request = CapacityRequest(config="limits.toml")
    (here / "shop.yaml").write_text(PIPELINE % name)
    file = str(here / "shop.yaml")
    for attempt in (
        lambda: request.settings(request.rules()),
        lambda: check_pipeline(PipelineRequest(file)),
        lambda: run_steps(PipelineRequest(file, run_id="one")),
    ):
        with pytest.raises(OptionError, match=f"{name} is code .*--allow-policy {name}"):
            attempt()
    assert not system
    assert not (here / "imported").exists()
    assert not (here / "home").exists(), "a run was begun"


def test_a_check_imports_nothing_even_where_it_is_allowed(here: Path) -> None:
    (here / "shop.yaml").write_text(PIPELINE % "policy_of_mine:Mine")
    request = PipelineRequest(str(here / "shop.yaml"), allow_policies=("policy_of_mine:Mine",))
    assert check_pipeline(request).pipeline.loop.policy == "policy_of_mine:Mine"
    assert not (here / "imported").exists()


def test_what_is_allowed_is_imported_from_the_present_folder_at_a_run(here: Path) -> None:
    (here / "limits.toml").write_text('[policy]\nname = "policy_of_mine:Mine"\noptions = { size = 3 }\n')
    request = CapacityRequest(config="limits.toml", allow_policies=("policy_of_mine:Mine",))
    before = list(sys.path)
    made = request.settings(request.rules()).policy
    assert (made.name, made.size) == ("mine", 3)  # type: ignore[attr-defined]
    assert sys.path == before
    assert policy_of("policy_of_mine:promised", allowed=["policy_of_mine:promised"]).name == "mine"
    assert policy_of("policy_of_mine:ready", allowed=["policy_of_mine:ready"]).name == "ready"


def test_a_module_of_the_present_folder_hides_none_that_is_installed(here: Path) -> None:
    (here / "colorsys.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    sys.modules.pop("colorsys", None)
    with pytest.raises(OptionError):
        policy_of("colorsys:Mine", allowed=["colorsys:Mine"])
    assert not (here / "imported").exists()


@pytest.mark.parametrize("kind", ["Harmless", "unsaid", "said_wrongly", "MODULE", "Path"])
def test_what_is_no_policy_is_refused_before_it_is_called(kind: str, here: Path) -> None:
    name = f"policy_of_mine:{kind}"
    with pytest.raises(OptionError, match=r"is no policy and was not called|cannot be imported"):
        policy_of(name, {"command": "id"}, allowed=[name])
    assert not (here / "called").exists()


def test_a_callable_of_the_system_is_refused_before_it_is_called(system: list[object]) -> None:
    with pytest.raises(OptionError, match="os:system is no policy and was not called"):
        policy_of("os:system", {"command": "id"}, allowed=["os:system"])
    assert not system


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("policy_of_mine:Mine", {"sise": 1}, "cannot be made with .*sise"),
        ("policy_of_mine:Breaks", {}, "RuntimeError: no luck"),
        ("policy_of_mine:Unnamed", {}, "has made no policy but Unnamed"),
        ("policy_of_mine:lied", {}, "has made no policy but NoneType"),
        ("policy_of_mine:ready", {"size": 1}, "is a policy already and has no options"),
        ("policy_of_mine:Gone", {}, "cannot be imported: AttributeError"),
        ("broken:Mine", {}, "cannot be imported: SyntaxError"),
        ("leaves:Mine", {}, "cannot be imported: SystemExit"),
    ],
)
def test_what_goes_wrong_with_a_policy_is_an_error_of_ours(
    name: str, options: dict[str, object], said: str, here: Path
) -> None:
    (here / "broken.py").write_text("def")
    (here / "leaves.py").write_text("raise SystemExit(0)")
    with pytest.raises(OptionError, match=said):
        policy_of(name, options, allowed=[name])


def test_an_installed_package_offers_policies_by_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    offered(monkeypatch, ("heaviest", "policy_of_mine:Mine"), ("themis", "policy_of_mine:Harmless"))
    (here / "shop.yaml").write_text(PIPELINE % "heaviest")
    check_pipeline(PipelineRequest(str(here / "shop.yaml")))
    assert not (here / "imported").exists(), "a check imports nothing"
    assert policy_of("heaviest", {"size": 4}).size == 4  # type: ignore[attr-defined]
    assert type(policy_of("themis")).__name__ == "Themis", "none of ours is hidden"
    offered(monkeypatch, ("heaviest", "policy_of_mine:Mine"), ("heaviest", "policy_of_mine:promised"))
    with pytest.raises(OptionError, match="offered by several installed packages"):
        check_policy("heaviest")


@pytest.mark.parametrize(
    "name", ["thamis", ":", "os:", ":system", "os.:system", "os:system()", "a b:c", "os:1"]
)
def test_names_of_no_form_are_refused_by_a_check(name: str) -> None:
    with pytest.raises(OptionError):
        check_policy(name)
    with pytest.raises(OptionError):
        parse_pipeline(PIPELINE % name)


def test_files_of_the_present_folder_are_not_read_unasked(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "fleet.toml").write_text('[policy]\nname = "os:system"\n')
    (here / "ebbflow.toml").write_text("not toml at all")
    monkeypatch.delenv("EBBFLOW_CONFIG", raising=False)
    assert CapacityRequest().rules() == LoopRules()
    monkeypatch.setenv("EBBFLOW_CONFIG", "fleet.toml")
    assert CapacityRequest().rules().policy == "os:system"
