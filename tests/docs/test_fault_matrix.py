"""The fault matrix of docs/reliability.md has every cell, and every test and benchmark that it names exists."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = [
    "kill", "stop and continue", "full disk", "read-only", "slow", "torn write", "flipped byte", "clock ±1 h",
    "lost network",
]  # fmt: skip
COMPONENTS = 22
NOT_APPLICABLE = "not applicable: "
_TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
_BENCHMARK = re.compile(r"`python -m ([\w.]+)`")


def rows(page: str) -> list[list[str]]:
    """Return the cells of the table's rows."""
    section = page.partition("## Fault matrix\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


@cache
def names_of(path: Path) -> frozenset[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)
    )


def wrong(page: str) -> list[str]:
    """Return what is wrong with the table of a page."""
    found, said = rows(page), []
    components = list(dict.fromkeys(row[0] for row in found))
    if [(row[0], row[1]) for row in found] != [(one, fault) for one in components for fault in FAULTS]:
        said.append("not every component has every fault, once and in order")
    if len(components) != COMPONENTS:
        said.append(f"{len(components)} components, not {COMPONENTS}")
    for component, fault, what, by in found:
        cell = f"{component} x {fault}"
        if not what:
            said.append(f"{cell} is empty")
        elif what.startswith(NOT_APPLICABLE):
            said += [f"{cell} has no reason"] if len(what) < len(NOT_APPLICABLE) + 10 else []
        elif not _TEST.search(by) and not _BENCHMARK.search(by):
            said.append(f"{cell} names no test")
        if rest := _BENCHMARK.sub("", _TEST.sub("", by)).strip(", -"):
            said.append(f"{cell} names {rest!r}, which is no test")
        for file, test in _TEST.findall(by):
            path = ROOT / "tests" / file
            if not path.is_file() or test not in names_of(path):
                said.append(f"{cell}: there is no {file}::{test}")
        for module in _BENCHMARK.findall(by):
            if importlib.util.find_spec(module) is None:
                said.append(f"{cell}: there is no {module}")
    return said


PAGE = (ROOT / "docs" / "reliability.md").read_text()


def test_every_cell_of_the_fault_matrix_names_a_test_that_exists() -> None:
    assert wrong(PAGE) == []


def test_a_cell_that_is_empty_or_names_what_is_not_there_is_found() -> None:
    first = rows(PAGE)[0]
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {first[0]} | {first[1]} |"))
    for changed, told in (
        (line.replace("::test_", "::test_no_"), "there is no"),
        (line.replace(first[2], ""), "is empty"),
        (line.replace(first[3], "-"), "names no test"),
        (line.replace(first[3], "somebody"), "which is no test"),
        (line.replace(first[2], "not applicable: so"), "has no reason"),
    ):
        assert any(told in said for said in wrong(PAGE.replace(line, changed))), told
    assert wrong(PAGE.replace(line + "\n", "")) == ["not every component has every fault, once and in order"]
