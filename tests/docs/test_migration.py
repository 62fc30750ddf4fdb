"""Each change that docs/migration.md shows leads from one whole program to the one that the page shows after it."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.snippets import Snippet, problems, snippets

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIRS = [
    (one, following)
    for one, following in zip(snippets(), snippets()[1:], strict=False)
    if one.page == "docs/migration.md" and one.language == "diff"
]


def side(diff: Snippet, left_out: str) -> str:
    """Return one side of a diff: without the lines that begin with ``left_out``."""
    lines = [line[1:] for line in diff.text.splitlines() if not line.startswith(left_out)]
    return "\n".join(lines) + "\n"


def test_there_are_three_changes() -> None:
    assert len(PAIRS) == 3


@pytest.mark.parametrize(("diff", "whole"), PAIRS, ids=str)
def test_a_change_leads_to_the_file_after_it(diff: Snippet, whole: Snippet) -> None:
    assert whole.language == "python"
    assert side(diff, "-") == whole.text


@pytest.mark.parametrize(("diff", "whole"), PAIRS, ids=str)
def test_a_change_begins_with_a_program_that_knows_nothing_of_us(diff: Snippet, whole: Snippet) -> None:
    before = side(diff, "+")
    ast.parse(before)
    assert "ebbflow" not in before
    assert len(whole.text.splitlines()) < len(before.splitlines())


@pytest.mark.parametrize("script", ["train_hf.py", "train_lightning.py", "train_accelerate.py"])
def test_at_most_five_lines_of_a_trainer_s_script_change_as_the_example_has_them(script: str) -> None:
    marked = [
        line.rpartition("#")[0]
        for line in re.sub(
            r"\(\n +(.*)\n\)  # (\d)", r"(\1)  # \2", (EXAMPLES / script).read_text()
        ).splitlines()
        if re.search(r"  # \d$", line)
    ]
    diffs = [one.text for one in snippets() if one.page == "docs/training.md" and one.language == "diff"]
    added = [[line[1:] for line in text.splitlines() if line.startswith("+")] for text in diffs]
    shown = next(lines for lines in added if lines[0].split() == marked[0].split())
    assert [line.strip() for line in shown] == [line.strip() for line in marked]
    assert len(shown) <= 5


def test_a_diff_that_leads_to_no_program_is_found() -> None:
    def said(text: str) -> list[str]:
        return problems(Snippet("docs/none.md", 1, "diff", text))

    assert said("-import os\n+import json\n") == []
    assert said("+from ebbflow import no_such_name\n") == ["ebbflow has no no_such_name"]
    assert any("is no Python" in one for one in said("+if True\n"))
    assert any("begins with none" in one for one in said("import os\n"))
