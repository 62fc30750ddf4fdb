"""The lock: what the check finds, and that it finds nothing in ours."""

import importlib.util
import sys
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
HASH = f"--hash=sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    """Return ``scripts/check_lock.py`` as a module."""
    spec = importlib.util.spec_from_file_location("check_lock", ROOT / "scripts" / "check_lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_lock"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def said(findings: list[object]) -> list[str]:
    """Return findings as texts."""
    return [str(finding) for finding in findings]


def test_our_lock_holds_exact_pins_only_and_everything_that_the_project_asks_for(lock: ModuleType) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked, wrong = lock.read(ROOT, *lock.LOCKS)
    assert said(wrong) == []
    assert len(locked) > 100
    assert said(lock.unmet(lock.wanted(project), locked, "pyproject.toml")) == []


def test_the_lock_of_airflows_environment_holds_exact_pins_and_what_it_is_made_from(lock: ModuleType) -> None:
    assert said(lock.environment("airflow")) == []
    pinned, _ = lock.read(ROOT, "requirements-airflow.lock")
    assert "apache-airflow" in pinned
    assert "prefect" not in pinned  # they exclude each other


def test_the_lock_for_other_frameworks_has_what_ebbflow_has_in_the_same_versions(lock: ModuleType) -> None:
    assert said(lock.environment("frameworks")) == []
    pinned, _ = lock.read(ROOT, "requirements-frameworks.lock")
    own, _ = lock.read(ROOT, "requirements.lock")
    assert {"accelerate", "lightning", "transformers"} <= set(pinned) - set(own)
    shared = set(pinned) & set(own)
    assert [name for name in shared if pinned[name] != own[name]] == []


def test_the_lock_for_spark_connect_differs_from_ours_in_protobuf_alone(lock: ModuleType) -> None:
    assert said(lock.environment("connect")) == []
    pinned, _ = lock.read(ROOT, "requirements-connect.lock")
    own, _ = lock.read(ROOT, "requirements.lock")
    assert {"grpcio-status", "pandas", "pyspark"} <= set(pinned)
    assert [name for name in set(pinned) & set(own) if pinned[name] != own[name]] == ["protobuf"]


def test_licences_of_what_is_installed_are_allowed(lock: ModuleType) -> None:
    locked, _ = lock.read(ROOT, *lock.LOCKS)
    assert said(lock.licences(locked)) == []


@pytest.mark.parametrize(
    "line",
    [
        "numpy>=2.4",
        "numpy",
        "numpy==2.*",
        "--index-url https://packages.example/simple",
        "-e .",
        "numpy @ https://packages.example/numpy.whl",
        "numpy==2.4.6",
        "numpy==2.4.6 --hash=sha256:00",
        f"numpy==2.4.6 --hash=md5:{'0' * 64}",
        f"numpy>=2.4.6 {HASH}",
        f"numpy==2.4.6 {HASH} --index-url https://packages.example/simple",
        "git+https://code.example/numpy",
        "",
    ],
)
def test_what_is_no_exact_pin_is_found(lock: ModuleType, line: str) -> None:
    _, wrong = lock.pins([f"attrs==26.1.0 {HASH}", line])
    assert [f.package for f in wrong] == ["line 2"]


def test_an_entry_goes_on_over_lines_and_may_hold_for_some_systems_only(lock: ModuleType) -> None:
    marked = [
        "triton==3.7.1 ; sys_platform == 'linux' \\",
        f"    {HASH} \\",
        f"    {HASH}",
        "attrs==26.1.0 \\",
    ]
    locked, wrong = lock.pins(marked)
    assert locked == {"triton": Version("3.7.1")}
    assert [f.package for f in wrong] == ["line 4"]  # its hashes are missing


def test_both_builds_of_pytorch_are_pinned_to_one_version(lock: ModuleType, tmp_path: Path) -> None:
    assert said(lock.builds()) == []
    (tmp_path / "requirements-torch.lock").write_text(f"torch==2.13.0 {HASH}\n")
    for other in ("torch==2.12.0+cpu", "torch==2.13.0", "torch==2.13.0+cu130"):
        (tmp_path / lock.CPU_LOCK).write_text(f"{other} {HASH}\n")
        assert [f.package for f in lock.builds(tmp_path)] == ["torch"]


def test_it_is_known_who_asks_for_each_package(lock: ModuleType) -> None:
    found = lock.why()
    assert found["prefect"] == ["pyproject.toml"]
    assert "prefect" in found["httpx"]
    assert [name for name, who in found.items() if not who] == []


def test_what_each_direct_dependency_is_for_is_written_down(lock: ModuleType) -> None:
    import tomllib

    text = (ROOT / "docs" / "security.md").read_text().split("What each direct dependency is for")[1]
    listed = [
        name.strip().strip("`")
        for row in text.splitlines()
        if row.startswith("| `")
        for name in row.split("|")[1].split(",")
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(listed) == sorted({one.name for one in lock.wanted(project)})


def test_a_package_that_is_pinned_twice_is_found_however_it_is_written(lock: ModuleType) -> None:
    _, wrong = lock.pins([f"ruamel-yaml==0.19.1 {HASH}", f"ruamel.yaml==0.19.0 {HASH}"])
    assert said(wrong) == ["ruamel-yaml: is pinned twice"]


def test_a_dependency_that_the_lock_lacks_or_contradicts_is_found(lock: ModuleType) -> None:
    asked = [Requirement("numpy>=2.4,<3"), Requirement("scipy>=1.17"), Requirement("rich>=15")]
    wrong = said(lock.unmet(asked, {"numpy": Version("3.0"), "rich": Version("15.1")}, "pyproject.toml"))
    assert wrong == [
        "numpy: is 3.0 in the lock, and pyproject.toml asks for numpy<3,>=2.4",
        "scipy: is asked for by pyproject.toml (scipy>=1.17) and not in the lock",
    ]


def test_extras_that_name_the_project_itself_are_followed_and_misspelt_ones_refused(lock: ModuleType) -> None:
    project = {
        "name": "prefect-ebbflow",
        "dependencies": ["numpy>=2"],
        "optional-dependencies": {"train": ["torch>=2"], "dev": ["prefect-ebbflow[train]", "pytest"]},
    }
    assert [one.name for one in lock.wanted(project)] == ["numpy", "torch", "pytest"]
    project["optional-dependencies"] = {"dev": ["prefect-ebbflow[trian]"]}
    with pytest.raises(ValueError, match="trian"):
        lock.wanted(project)


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("MIT AND MPL-2.0", True),
        ("Apache-2.0 WITH LLVM-exception AND (BSD-2-Clause OR GPL-2.0-only)", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-or-later", False),
        ("MIT AND AGPL-3.0-only", False),
        ("Proprietary", False),
        ("", False),
    ],
)
def test_licence_expressions(lock: ModuleType, expression: str, allowed: bool) -> None:
    assert lock.permitted(expression) is allowed


class _Package(Distribution):
    """A package with these metadata."""

    def __init__(self, metadata: str) -> None:
        self._text = metadata

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


@pytest.mark.parametrize(
    ("lines", "spdx"),
    [
        ("License-Expression: MIT", "MIT"),
        ("Classifier: License :: OSI Approved :: BSD License", "BSD-3-Clause"),
        (
            "Classifier: License :: OSI Approved\nClassifier: License :: OSI Approved :: Apache Software License",
            "Apache-2.0",
        ),
        ("License: Apache License, Version 2.0", "Apache-2.0"),
        ("License: GPL v3", "GPL v3"),
        ("Summary: nothing said", ""),
    ],
)
def test_licences_are_read_from_whatever_a_package_says(lock: ModuleType, lines: str, spdx: str) -> None:
    assert lock.licence(_Package(f"Metadata-Version: 2.4\nName: one\nVersion: 1\n{lines}\n")) == spdx


def test_an_exception_that_nobody_needs_is_found(lock: ModuleType) -> None:
    assert said(lock.licences(["numpy"], {"numpy": "no reason"})) == ["numpy: needs no exception any more"]


def test_what_only_one_of_the_pythons_needs_is_asked_for_on_all_of_them(lock: ModuleType) -> None:
    package = _Package(
        "Metadata-Version: 2.4\nName: one\nVersion: 1\n"
        'Requires-Dist: early; python_full_version < "3.11.3"\n'
        'Requires-Dist: late; python_version >= "3.14"\n'
        'Requires-Dist: gone; python_version < "3.11"\n'
        'Requires-Dist: more; extra == "more" and python_version == "3.12"\n'
        'Requires-Dist: elsewhere; sys_platform == "win32"\n'
    )
    assert [one.name for one in lock.requirements_of(package, ())] == ["early", "late"]
    assert [one.name for one in lock.requirements_of(package, ("more",))] == ["early", "late", "more"]


def test_a_pin_that_its_marker_leaves_out_here_need_not_be_installed(
    lock: ModuleType, tmp_path: Path
) -> None:
    text = f"never-here==1.0 ; python_version < '3' \\\n    {HASH} \\\n    {HASH}\nalways-here==1.0 {HASH}\n"
    (tmp_path / "some.lock").write_text(text)
    assert lock.elsewhere(tmp_path, "some.lock") == {"never-here"}
    locked, wrong = lock.read(tmp_path, "some.lock")
    assert wrong == []
    project = {"name": "prefect-ebbflow", "dependencies": ["never-here", "always-here"]}
    assert said(lock.closure(project, locked, {"never-here"})) == [
        "always-here: is in the lock and not installed: run make test once"
    ]


def test_what_has_extras_may_stand_once_more_without_them(lock: ModuleType) -> None:
    whole = [f"fastapi==0.136.3 {HASH}", f"fastapi[standard]==0.136.3 {HASH}"]
    assert lock.pins(whole)[1] == []
    for wrong in ([*whole, whole[1]], whole[::-1], [whole[0], whole[1].replace("0.136.3", "0.136.2")]):
        assert said(lock.pins(wrong)[1]) == ["fastapi: is pinned twice"]
