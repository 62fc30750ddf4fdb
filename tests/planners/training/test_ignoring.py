"""Patterns leave out the files that git would leave out."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ebbflow.planners.training.ignoring import ALWAYS, IgnoreRules

PATHS = (
    "a.py",
    "a.log",
    "data/raw/a.bin",
    "data/b.log",
    "src/data/c.py",
    "src/a/b/a.log",
    "keep/[x].txt",
    "b c.txt",
)
PIECES = (
    "a",
    "b",
    "data",
    "raw",
    "*",
    "**",
    "?",
    "*.log",
    "a.*",
    "[ab]",
    "[!a]*",
    "src",
    "keep",
    "b c.txt",
    "c.py",
)
PATTERNS = st.builds(
    lambda no, root, parts, end: f"{no}{root}{'/'.join(parts)}{end}",
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "/"]),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=3),
    st.sampled_from(["", "/"]),
)


def kept(rules: IgnoreRules) -> set[str]:
    """Return the paths that a walk keeps, which enters no directory that is left out."""
    found = set()
    for path in PATHS:
        parts = path.split("/")
        above = ["/".join(parts[:n]) for n in range(1, len(parts))]
        if not any(rules.excludes(one, directory=True) for one in above) and not rules.excludes(path):
            found.add(path)
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True, timeout=60)
    for path in PATHS:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("")
    return folder


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(PATTERNS, max_size=4))
@example(lines=["a", "/**", "!data"])
def test_a_walk_keeps_what_git_keeps(repository: Path, lines: list[str]) -> None:
    rules = repository / ".git" / "rules"
    rules.write_text("\n".join(lines) + "\n")
    command = ["git", "-C", str(repository), "ls-files", "-z", "--others", f"--exclude-from={rules}"]
    listed = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout.decode()
    assert kept(IgnoreRules(lines)) == set(filter(None, listed.split("\0"))), lines


def test_what_is_made_again_is_left_out_unless_a_line_takes_it_back() -> None:
    rules = IgnoreRules([*ALWAYS, "# a comment", "", "!kept.pyc"])
    assert rules.excludes("a/__pycache__", directory=True)
    assert rules.excludes(".git", directory=True)
    assert rules.excludes("a.pyc")
    assert not rules.excludes("kept.pyc")
    assert not rules.excludes("a.py")
