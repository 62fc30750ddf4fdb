"""The documentation: its pages are all in the navigation, and those that are made from the code are current."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = _script("site_pages")
REFERENCE = _script("reference_pages")


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """Return the pages that are made from the code."""
    pages: dict[str, str] = REFERENCE.pages()
    return pages


def test_pages_that_are_made_from_the_code_are_current(made: dict[str, str]) -> None:
    for address, text in made.items():
        assert (ROOT / "docs" / address).read_text(encoding="utf-8") == text, (
            "run python scripts/reference_pages.py"
        )


def _pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, dict):
        return [page for value in entry.values() for page in _pages(value)]
    return [page for one in entry for page in _pages(one)]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = _pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")} | set(SITE.MOVED)
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
    schema = json.loads((ROOT / "tasks" / "pipeline" / "file" / "schema.json").read_text(encoding="utf-8"))

    def look(part: Any) -> int:
        if isinstance(part, list):
            return sum(map(look, part))
        if not isinstance(part, dict):
            return 0
        properties = part.get("properties", {})
        for key in properties:
            assert f"| `{key}` |" in made["configuration.md"]
        return len(properties) + sum(map(look, part.values()))

    assert look(schema) > 50


def test_every_key_of_the_configuration_file_has_a_description() -> None:
    for section, (_, keys) in REFERENCE.TOML.items():
        assert REFERENCE.known_keys(section) == set(keys), section
        assert all(keys.values())


def test_pages_from_elsewhere_keep_no_link_into_the_repository() -> None:
    for text in SITE.pages().values():
        assert not re.search(r"\]\((?!https?:|#)", text)


def test_links_to_pages_from_elsewhere_lead_to_them() -> None:
    assert SITE.relinked("[a](../CHANGELOG.md) [b](../terraform/README.md)", "x.md") == (
        "[a](changes.md) [b](reference/terraform.md)"
    )
    assert SITE.relinked("[a](../../CHANGELOG.md)", "tasks/x.md") == "[a](../changes.md)"


def test_pages_load_nothing_from_elsewhere() -> None:
    """Search on pages opened from a folder needs a program that the theme else takes from another host."""
    content = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in content
    scripts = yaml.safe_load(content)["extra"]["polyfills"]
    assert scripts == ["javascripts/iframe-worker.js"]
    assert "MessageEvent" in (ROOT / "docs" / scripts[0]).read_text(encoding="utf-8")
