"""The diagrams of docs/concepts.md are what scripts/diagrams.py draws, and readable in light and dark."""

import importlib.util
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    """Return ``scripts/diagrams.py`` as a module."""
    spec = importlib.util.spec_from_file_location("diagrams", ROOT / "scripts" / "diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["diagrams"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


DIAGRAMS = load()


@pytest.mark.parametrize("name", DIAGRAMS.DIAGRAMS)
def test_a_diagram_is_drawn_as_it_is_kept_and_shown_with_words_for_it(name: str) -> None:
    kept = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == DIAGRAMS.DIAGRAMS[name]().svg(), "run python scripts/diagrams.py"
    assert re.search(rf"!\[.+\]\(images/{name}\.svg\)", (ROOT / "docs" / "concepts.md").read_text())


@pytest.mark.parametrize("name", DIAGRAMS.DIAGRAMS)
def test_a_diagram_has_a_title_a_description_and_both_schemes(name: str) -> None:
    text = DIAGRAMS.DIAGRAMS[name]().svg()
    root = ET.fromstring(text)
    of = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{of}title")
    assert root.findtext(f"{of}desc")
    style = root.findtext(f"{of}style") or ""
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    assert set(re.findall(r"--\w+(?=:)", light)) == set(re.findall(r"--\w+(?=:)", dark))
    assert set(re.findall(r"var\((--\w+)\)", text)) <= set(re.findall(r"--\w+(?=:)", light))


def test_text_that_does_not_fit_into_its_box_is_refused() -> None:
    diagram = DIAGRAMS.Diagram("A", "B", 300, 200)
    with pytest.raises(ValueError, match="does not fit into 50 pixels"):
        diagram.box(0, 0, 50, "far too long a name")
    with pytest.raises(ValueError, match="is outside"):
        diagram.box(250, 0, 100, "A box")
