"""The console summary at 80 columns, and progress on terminals and in pipes."""

import io
from dataclasses import replace

import pyarrow as pa
import pytest
from rich.console import Console

from ebbflow.flows.query.bars import StageBars
from ebbflow.flows.query.summary import print_candidates, print_line, print_result, print_summary, sparkline
from ebbflow.planners.query.coverage import BlockCoverage
from ebbflow.tasks.drawing.wording import against, bytes_text, count_text, number_text, seconds_text, shorten
from tests.tasks.sample import bare_report, hostile_report, sample_plans, sample_report, single_stage_report


def console(*, terminal: bool = False, width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)


def printed(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


@pytest.mark.parametrize("make", [sample_report, hostile_report, bare_report, single_stage_report])
def test_a_summary_fits_80_columns(make):
    target = console()
    print_summary(replace(make(), result_path=""), target)
    assert max(map(len, printed(target).splitlines())) <= 80


def test_a_summary_says_what_happened_and_why():
    target = console()
    print_summary(sample_report(), target)
    text = " ".join(printed(target).split())
    for fact in (
        "5 rows in 44.8 s", "57 % slower than the 28.6 s expected", "verified", "2 to 4 cores",
        "5 completed, 4 reused, 2 cancelled, 1 failed; reuse saved 17.0 s", "2 switches", "p1 → p2",
        "left: worker-3, worker-4", "less than", "/data/results/q5.parquet",
    ):  # fmt: skip
        assert fact in text


def test_a_summary_of_hundreds_of_changes_stays_short():
    report = sample_report()
    many = replace(report, capacity=report.capacity * 50, decisions=report.decisions * 50)
    target = console()
    print_summary(replace(many, decisions=(*report.decisions, *[report.decisions[1]] * 200)), target)
    text = printed(target)
    assert "… and 234 more changes" in text
    assert "201 times the plan stayed" in " ".join(text.split())
    assert len(text.splitlines()) < 80


def test_a_summary_says_which_joins_were_planned_and_why_others_were_not():
    blocks = (BlockCoverage("v", 4, 4), BlockCoverage("Result", 3, 2, "behind a full join"))
    target = console()
    print_summary(replace(sample_report(), blocks=blocks), target)
    text = " ".join(printed(target).split())
    assert "Joins 2 of 2 inner-join blocks planned (4, 2 relations)" in text
    assert "Result: 1 of 3 inner-joined relations stay as written: behind a full join" in text


def test_a_result_that_differs_cannot_be_missed():
    target = console()
    print_summary(replace(sample_report(), verified=False, verification="row 3 differs"), target)
    assert "NOT verified: row 3 differs" in printed(target)


def test_square_brackets_and_escape_codes_are_shown_not_obeyed():
    target = console()
    report = replace(sample_report(), name="[bold]x[/bold] \x1b[31mred", problems=("[/] \x1b]0;t\x07",))
    print_summary(report, target)
    assert "[bold]x[/bold]" in printed(target)
    assert "\x1b" not in printed(target)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_candidates_are_listed_side_by_side(width):
    target = console(width=width)
    print_candidates(sample_plans(), target)
    text = printed(target)
    assert max(map(len, text.splitlines())) <= width
    for fact in ("p1", "p2", "p3", "fit", "#1"):
        assert fact in text


def test_a_line_says_rows_time_switches_and_where_the_result_is():
    target = console()
    print_line(sample_report(), target)
    assert printed(target) == "5 rows in 44.8 s, 2 switches, ✓ verified, result in /data/results/q5.parquet\n"


def test_a_result_is_shown_with_its_nulls_and_nothing_else():
    target = console()
    assert print_result(pa.table({"n": ["a", None], "x": [1.5, 2.5]}), target) == ""
    head, _, *rows = (line.split() for line in printed(target).splitlines())
    assert (head, rows) == (["n", "x"], [["a", "1.5"], ["NULL", "2.5"]])


def test_columns_that_do_not_fit_are_named():
    target = console()
    hidden = print_result(pa.table({f"column_{i}": ["x" * 20] for i in range(5)}), target)
    assert hidden == "2 more columns: column_3, column_4"
    assert max(map(len, printed(target).splitlines())) <= 80


def test_two_columns_of_one_name_are_both_shown():
    target = console()
    print_result(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), target)
    assert "1   2" in printed(target)


def test_an_empty_result_is_shown_with_its_columns():
    target = console()
    print_result(pa.table({"n": pa.array([], pa.string())}), target)
    assert printed(target).startswith("n")


def test_a_sparkline_shows_even_a_short_loss():
    line = sparkline([(0, 4), (5.01, 1), (5.02, 4)], 10, 10)
    assert len(line) == 10
    assert line[5] == "▂"
    assert set(line) == {"█", "▂"}


@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], [(0.0, 3.0)], [(-1.0, 2.0)]])
def test_a_sparkline_of_little_has_its_width(points):
    assert len(sparkline(points, 0.0, 12)) == 12


def test_progress_in_a_pipe_is_plain_lines():
    target = console()
    with StageBars(target) as bars:
        bars.opening("starting Spark")
        bars.started("f", "orders [x] ⋈ customer")
        bars.progress("f", 1, 2)
        bars.note("left: worker-1")
        bars.finished("f", "completed", "5 rows")
        bars.finished("g", "reused")
    assert printed(target).splitlines() == [
        "starting Spark",
        "▸ orders [x] ⋈ customer started",
        "left: worker-1",
        "✓ orders [x] ⋈ customer completed: 5 rows",
        "↺ g reused",
    ]


def test_progress_on_a_terminal_shows_a_bar_while_a_stage_runs():
    target = console(terminal=True)
    with StageBars(target) as bars:
        bars.opening("starting Spark")
        bars._drawing.refresh()  # the display thread's next tick, now
        assert "starting Spark" in printed(target)
        bars.started("f", "orders")
        assert len(bars._drawing.tasks) == 1, "it lasts until the first stage starts"
        bars.progress("f", 3, 8)
        bars.progress("unknown", 1, 2)
        bars.progress("f", 0, 0)
        bars._drawing.refresh()  # the display thread's next tick, now
        assert "3/8" in printed(target)
        bars.started("f", "orders")  # again, after a failure
        bars.finished("f", "failed", "out of memory")
        assert not bars._bars
    assert "✗ orders failed: out of memory" in printed(target)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00 s"), (9.996, "10.0 s"), (99.96, "100 s"), (750, "12 min 30 s"), (7260, "2 h 1 min"),
     (float("inf"), "never"), (None, "–")],
)  # fmt: skip
def test_seconds_read_well(value, text):
    assert seconds_text(value) == text


def test_counts_sizes_and_names_read_well():
    assert [count_text(n) for n in (9999, 15_400, 1_500_000, None)] == ["9,999", "15 k", "1.5 M", "–"]
    assert [bytes_text(n) for n in (0, 1023, 1536, 5 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert [number_text(n) for n in (0, 0.41666, 38.24, 1234, float("inf"))] == [
        "0",
        "0.417",
        "38.2",
        "1,234",
        "∞",
    ]
    assert shorten("a" * 50, 10) == "aaaaaa…aaa"
    assert shorten("a\n b", 10) == "a b"


def test_a_run_is_compared_with_its_expectation():
    assert against(8, 10) == "20 % faster than the 10.0 s expected"
    assert against(10, 10) == "as the 10.0 s expected"
    assert against(1, None) == against(1, float("inf")) == "no expectation at start"
