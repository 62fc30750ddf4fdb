"""What flows ask Prefect of their own run."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect import runtime

from ebbflow.flows.runs import deployed

_FLOWS = Path(deployed.__file__).parent


def asked(path: Path) -> set[tuple[str, str]]:
    """Return (module, name) of what a file asks of the modules of ``prefect.runtime``."""
    tree = ast.parse(path.read_text())
    modules = {
        name.asname or name.name: name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "prefect.runtime"
        for name in node.names
    }
    return {
        (modules[node.value.id], node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    }


def test_only_what_prefect_knows_of_a_run_is_asked() -> None:
    """These modules make their attributes up as they are asked, so nothing else notices one that there is not."""
    found = {one for path in _FLOWS.rglob("*.py") for one in asked(path)}
    assert ("flow_run", "id") in found
    assert not {(module, name) for module, name in found if name not in getattr(runtime, module).__all__}


def test_only_a_deployments_own_run_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    id_ = uuid4()
    for known, said in (
        (None, ""),
        (SimpleNamespace(deployment_id=None), ""),
        (SimpleNamespace(deployment_id=id_), str(id_)),
    ):
        present = None if known is None else SimpleNamespace(flow_run=known)
        monkeypatch.setattr(deployed.FlowRunContext, "get", lambda present=present: present)
        assert deployed.deployment_id() == said


def test_a_run_of_a_deployment_imports_what_the_deployment_itself_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its parameters are chosen by whoever may begin runs, who may take away from them but not add to them."""
    own: dict[str, object] = {"allow_policies": ["mine:Policy", "mine:Other"]}
    asked: list[object] = []

    class Client:
        def read_deployment(self, id: object) -> SimpleNamespace:
            asked.append(id)
            return SimpleNamespace(parameters=own)

    @contextmanager
    def answering() -> Iterator[Client]:
        yield Client()

    id_ = uuid4()
    monkeypatch.setattr(deployed, "answering", answering)
    present = SimpleNamespace(flow_run=SimpleNamespace(deployment_id=id_))
    monkeypatch.setattr(deployed.FlowRunContext, "get", lambda: present)
    assert deployed.allowed("allow_policies", ["os:system", "mine:Policy"]) == ("mine:Policy",)
    assert asked == [id_]
    assert deployed.allowed("allow_policies", None) == ()
    own.clear()
    assert deployed.allowed("allow_policies", ["mine:Policy"]) == ()
    present.flow_run = SimpleNamespace(deployment_id=None)  # called from Python, by its own author
    assert deployed.allowed("allow_policies", ["mine:Policy"]) == ("mine:Policy",)
