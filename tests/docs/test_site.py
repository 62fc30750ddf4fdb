"""The documentation site: its pages are all in the navigation, and what is made from the code is whole."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """Return ``scripts/site_pages.py`` as a module."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(site: ModuleType) -> dict[str, str]:
    """Return the pages that are made from the code."""
    pages: dict[str, str] = site.pages()
    return pages


def _pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, dict):
        return [page for value in entry.values() for page in _pages(value)]
    return [page for one in entry for page in _pages(one)]


def test_every_page_is_in_the_navigation_once(made: dict[str, str]) -> None:
    listed = _pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")} | set(made)
    assert sorted(listed) == sorted(there)


def test_every_command_and_option_is_in_the_reference(made: dict[str, str]) -> None:
    from typer.main import get_command

    from ebbflow.flows.cli import app

    page = made["reference/cli.md"]

    def look(path: str, command: Any) -> int:
        assert f"`{path}`\n" in page
        inner = getattr(command, "commands", {})
        for parameter in command.params if not inner else ():
            if not parameter.hidden and parameter.param_type_name == "option":
                assert f"`{parameter.opts[0]}`" in page, f"{path} {parameter.opts[0]}"
        return 1 + sum(look(f"{path} {name}", one) for name, one in inner.items() if not one.hidden)

    count = sum(look(f"ebbflow {name}", one) for name, one in get_command(app).commands.items())  # type: ignore[attr-defined]
    assert count > 30
    assert "[b]" not in page


def test_no_help_loses_a_word_in_brackets_on_the_terminal() -> None:
    from rich.text import Text
    from typer.main import get_command

    from ebbflow.flows.cli import app

    def look(path: str, command: Any) -> None:
        for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
            meant = re.sub(r"\[/?b\]", "", text or "").replace("\\[", "[")
            assert Text.from_markup(text or "").plain == meant, path
        for name, inner in getattr(command, "commands", {}).items():
            look(f"{path} {name}", inner)

    look("ebbflow", get_command(app))


def test_tables_that_are_made_have_as_many_cells_in_every_row(made: dict[str, str]) -> None:
    for address, text in made.items():
        inside = False
        cells = 0
        for line in text.splitlines():
            if not line.startswith("|"):
                inside = False
                continue
            row = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))
            assert not inside or row == cells, f"{address}: {line}"
            inside, cells = True, row


def test_every_key_of_a_pipelines_file_is_in_the_reference(made: dict[str, str]) -> None:
    from ebbflow.tasks.pipeline.file import form, steps

    for section in (
        form.PIPELINE,
        steps.QUERY,
        steps.TRAINING,
        steps.TUNING,
        form.POOL,
        form.LOOP,
        form.QUOTAS,
    ):
        for key in section.keys:
            assert f"| `{key.name}` |" in made["reference/pipeline.md"]


def test_pages_from_elsewhere_keep_no_link_into_the_repository(made: dict[str, str]) -> None:
    for address in ("changes.md", "reference/terraform.md"):
        assert not re.search(r"\]\((?!https?:|#)", made[address])
