"""Steps read from what scripts print."""

from pathlib import Path

import pytest

from ebbflow.infra.training.process.printed_steps import PrintedSteps


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 12/100 loss 0.5", 12),
        ("iter 250: loss 3.1021, time 12.5ms", 250),
        ("[titan] 2026-11-01 10:00:00,000 - root - INFO - step:  10  loss:  8.1", 10),
        ("{'loss': 0.1, 'step': 70}", 70),
        ("global_step=1200 lr=1e-4", 1200),
        ("Iteration [30/600]", 30),
        (" 12%|#2        | 12/100 [00:01<00:08, 10.1it/s]", 12),
        ("Epoch 2:  20%|##        | 12/60 [00:00<00:01, 40.9it/s, v_num=0]", 132),
        ("100 examples, no word of progress", -1),
        ("time per step: 0.25 s", -1),
        ("stepping stones 4", -1),
    ],
)
def test_a_line(line: str, step: int, tmp_path: Path) -> None:
    (tmp_path / "out").write_text(f"{line}\n")
    steps = PrintedSteps((tmp_path / "out", tmp_path / "err"))
    steps.look()
    assert steps.last == step


def test_output_is_followed_as_it_grows(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    steps = PrintedSteps((out, err))
    steps.look()
    assert (steps.first, steps.last) == (-1, -1)
    out.write_text("step 5\nste")
    steps.look()
    with out.open("a") as file:
        file.write("p 17\nstep 9")
    err.write_text(" 1%|#    | 19/500 [00:01<00:08, 10it/s]\r 1%|#    | 20/500 [00:01<00:08, 10it/s]\r")
    steps.look()
    assert (steps.first, steps.last) == (5, 20)
    with err.open("ab") as file:
        file.write(b"\xff\xfe" * (1 << 20) + b"\nstep 33\n")
    steps.look()
    assert steps.last == 33


def test_an_empty_bar_says_nothing_of_where_a_script_begins(tmp_path: Path) -> None:
    bars = "  0%|          | 0/120 [00:00<?, ?it/s]\r 92%|#########| 110/120 [00:00<00:00]\r"
    (tmp_path / "err").write_text(bars)
    steps = PrintedSteps((tmp_path / "err",))
    steps.look()
    assert (steps.first, steps.last) == (110, 110)


def test_a_pattern_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("step 5\nround 7 of 9\nround x\n")
    steps = PrintedSteps((tmp_path / "out",), r"round (\d+)")
    steps.look()
    assert (steps.first, steps.last) == (7, 7)
