"""What the docs say of other tools carries a version, a date, sources, and where they are better."""

import re

import pytest

from tests.docs.snippets import ROOT

_OURS = ("At a glance", "What is ahead of the tools on this page")
_DATE = re.compile(
    r"\b(January|February|March|April|May|June|July|August|September|October|November|December) 20\d\d"
)
_VERSION = re.compile(r"\bv?\d+\.\d+|\b[0-9a-f]{7}\b")


def sections() -> dict[str, str]:
    """Return the sections of the comparison that are of another tool, by their headings."""
    parts = re.split(r"^## (.+)$", (ROOT / "docs/comparison.md").read_text(encoding="utf-8"), flags=re.M)
    return {name: text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name not in _OURS}


def test_there_are_sections() -> None:
    assert len(sections()) >= 6


@pytest.mark.parametrize("name", sections())
def test_a_section_has_version_date_sources_and_what_is_better_there(name: str) -> None:
    text = sections()[name].strip()
    read = text.partition("\n\n")[0]
    assert read.startswith("*As of "), read
    assert _VERSION.search(read), f"no version: {read}"
    assert _DATE.search(read), f"no date: {read}"
    rows = [row for row in text.splitlines() if row.startswith("|")][2:]
    assert rows
    for row in rows:
        assert re.search(r"\]\((https://|benchmarks\.md)|\bthe same\b", row.split("|")[2]), (
            f"no source: {row}"
        )
    assert re.search(r"^\*\*Where .* (is|are) better", text, re.M)
    assert "**Ebbflow in addition:**" in text
