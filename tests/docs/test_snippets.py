"""Every fenced block of the documentation: run for real where that is quick, else checked as far as can be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import task_pages
from tests.docs.givens import GIVEN
from tests.docs.plan import PLANS, Plan, plan_of
from tests.docs.snippets import ROOT, Snippet, ebbflow_problems, problems, snippets

TIMEOUT = 300.0  # seconds; what has not ended then never will


_MARKS = {"query-losing-a-worker.md": [pytest.mark.spark], "prefect-resume.md": [pytest.mark.prefect]}


def _planned(how: str) -> list[Snippet]:
    return [s for s in snippets() if (plan := plan_of(s)) and plan.how == how]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder to run in, with a home and programs of its own."""
    place, home = tmp_path / "work", tmp_path / "home"
    (place / "bin").mkdir(parents=True)
    home.mkdir()
    program = place / "bin" / "ebbflow"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ebbflow.flows.cli "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    for name in (
        "EBBFLOW_HOME",
        "EBBFLOW_LEDGER",
        "EBBFLOW_TERRAFORM_OUTPUT",
        "EBBFLOW_CONFIG",
        "PREFECT_API_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return place


@pytest.mark.parametrize("snippet", snippets(), ids=str)
def test_every_snippet_is_right_as_far_as_can_be_told_without_running_it(snippet: Snippet) -> None:
    assert problems(snippet) == []


@pytest.mark.parametrize("snippet", snippets(), ids=str)
def test_of_every_snippet_it_is_said_whether_it_is_run_and_why_not(snippet: Snippet) -> None:
    plan = plan_of(snippet)
    assert plan is not None, f"{snippet} is in no plan: tests/docs/plan.py"
    assert bool(plan.why) == (plan.how == "check")


def test_no_plan_is_for_a_snippet_that_is_gone() -> None:
    used = {id(plan_of(snippet)) for snippet in snippets()}
    gone = [
        f"{page}: {plan.begins!r}" for page, plans in PLANS.items() for plan in plans if id(plan) not in used
    ]
    assert gone == []


@pytest.mark.parametrize("snippet", _planned("run"), ids=str)
def test_snippets_do_what_they_say(snippet: Snippet, folder: Path) -> None:
    run(snippet, folder)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("snippet", _planned("slow"), ids=str)
def test_snippets_that_take_longer_do_what_they_say(snippet: Snippet, folder: Path) -> None:
    run(snippet, folder)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=_MARKS.get(page.rpartition("/")[2], ())) for page in task_pages.task_pages()],
)
def test_the_commands_of_a_task_s_page_print_what_it_shows(page: str, tmp_path: Path) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    printed = task_pages.run(page, folder, home)
    wrong = []
    for block in task_pages.shown(page):
        status, output = printed.get(block.commands.line, (-1, ""))
        lines = task_pages.missing(block.output.text, output) if block.output is not None else []
        if status or lines:
            wrong.append(
                f"{block.commands}: exit status {status}, not printed as shown: {lines}\n"
                f"{block.commands.text}\n{output}"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", task_pages.task_pages())
def test_a_task_s_page_is_short_and_run_as_one(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= task_pages.WORDS
    assert all((plan := plan_of(s)) is not None and plan.how == "page" for s in snippets() if s.page == page)


def run(snippet: Snippet, folder: Path) -> None:
    """Run a snippet, and before it what its plan names."""
    plan = plan_of(snippet)
    assert plan is not None
    for begins in plan.after:
        run(next(s for s in snippets() if s.page == snippet.page and s.text.startswith(begins)), folder)
    for name in plan.given:
        GIVEN[name](folder, Path(os.environ["HOME"]), snippet)
    if plan.saved:
        (folder / plan.saved).write_text(snippet.text)
    elif snippet.language == "python":
        exec(compile(snippet.text, str(snippet), "exec"), {"__name__": "snippet"})
    elif snippet.language in ("sh", "bash"):
        _shell(snippet, plan, folder)


def _shell(snippet: Snippet, plan: Plan, folder: Path) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", plan.lines(snippet.text)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"{snippet}:\n{done.stdout}\n{done.stderr}"
    output = _output(snippet)
    if output is not None:
        printed = f"{done.stdout}\n{done.stderr}"
        assert task_pages.missing(output.text, printed) == [], f"{output}:\n{printed}"


def _output(snippet: Snippet) -> Snippet | None:
    """Return what a page shows of a snippet's output, if it does."""
    after = next((s for s in snippets() if s.page == snippet.page and s.line > snippet.line), None)
    plan = plan_of(after) if after is not None else None
    return after if plan is not None and plan.how == "output" else None


# --- the checks themselves ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        ("sh", "ebbflow qeury x", "No such command"),
        ("sh", "ebbflow query", "Missing argument"),
        ("sh", "ebbflow query x --tables t && ebbflow query y --nowhere z", "No such option: --nowhere"),
        ("sh", "X=1 ebbflow query x --weight heavy > out", "--weight"),
        ("sh", "make everything", "no make everything"),
        ("sh", "pip install 'prefect-ebbflow[sparc]'", "no extra sparc"),
        ("sh", "pip install 'ebbflow[spark]'", "somebody else's package"),
        ("sh", "ebflow query x", "nothing is known of the program 'ebflow'"),
        ("sh", "ebbflow query 'x", "no shell"),
        ("python", "from ebbflow import run_qeury", "no run_qeury"),
        ("python", "from ebbflow.flows.qeury import run_query", "no module"),
        ("python", "import nowhere.at.all", "no module"),
        (
            "python",
            "from ebbflow import run_query\nrun_query('x', table='t')",
            "no argument table",
        ),
        ("python", "from ebbflow import train\ntrain()", "needs script"),
        (
            "python",
            "from ebbflow import ElasticRun\nwith ElasticRun.start(sed=1) as run:\n    pass",
            "no argument sed",
        ),
        ("python", "def f(:", "no Python"),
        ("yaml", "a: [", "no YAML"),
        ("toml", "a = ", "no TOML"),
        ("json", "{", "no JSON"),
        ("sql", "SELECT FROM WHERE (", "no SQL"),
        ("cobol", "MOVE 1 TO X", "language 'cobol'"),
    ],
)
def test_what_is_wrong_in_a_snippet_is_found(language: str, text: str, said: str) -> None:
    found = problems(Snippet("page.md", 1, language, text + "\n"))
    assert any(said in one for one in found), found


def test_here_documents_comments_and_continuations_are_read_as_a_shell_does() -> None:
    text = "cat > x.sql <<'SQL'\nSELECT ' FROM t\nSQL\n# a comment's quote\nebbflow query \\\n  x.sql --tables t\n"
    assert problems(Snippet("page.md", 1, "sh", text)) == []
    assert problems(Snippet("page.md", 1, "sh", text.replace("--tables", "--tabels"))) != []


def test_the_command_line_that_checks_runs_nothing(tmp_path: Path) -> None:
    assert (
        ebbflow_problems(["query", "SELECT 1", "--tables", str(tmp_path), "--output", str(tmp_path / "out")])
        == []
    )
    assert list(tmp_path.iterdir()) == []


def test_output_is_compared_line_by_line_and_what_differs_from_run_to_run_by_its_form() -> None:
    output = "12:00:01 run fit-1124-163305-6618\n\nthree lines\n  in 2.5 s\nend of 7\n"
    assert (
        task_pages.missing("09:30:00 run fit-1201-000000-abcd\nthree  lines\nin 31 ms\n...\n", output) == []
    )
    assert task_pages.missing("...\nend of 7", output) == []
    assert task_pages.missing("three lines\nend of 7", output) == [
        "end of 7"
    ]  # what is between them is not shown
    assert task_pages.missing("...\nend of 8", output) == ["end of 8"]
    assert task_pages.missing("in 2.5 s\n...\nthree lines", output) == ["three lines"]  # in another order
