"""Reading Gavel's and Shockwave's files, and the batch sizes of their jobs."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.rounds.batch import (
    CEILING,
    DOUBLINGS,
    batches,
    critical,
    epoch_steps,
    gns_batch,
    time_alone,
    up,
    wish,
)
from ebbflow.infra.simulation.rounds.trace import Throughputs, TraceJob, read_throughputs, read_trace

FOLDER = Path(__file__).parents[2] / "fixtures/training"
ROW = "LM (batch size 10)\tcmd\tdir\t--steps\t1\t134583\t1\tgns\t1\t-1.0\t1418\t0"


def test_both_formats_are_read() -> None:
    shockwave = read_trace(FOLDER / "shockwave/jobs-120.trace")
    assert len(shockwave) == 120
    assert shockwave[0] == TraceJob(0, "LM (batch size 10)", 134583, 1, 0.0, "gns", 1.0)
    assert [sum(j.mode == m for j in shockwave) for m in ("accordion", "gns", "static")] == [59, 57, 4]
    assert [sum(j.gpus == k for j in shockwave) for k in (1, 2, 4)] == [92, 20, 8]
    gavel = read_trace(FOLDER / "gavel/jobs-96.trace")
    assert len(gavel) == 96
    assert gavel[0] == TraceJob(0, "ResNet-18 (batch size 128)", 925982, 4, 0.0, "static", 1.0)
    assert sum(j.arrival == 0 for j in gavel) == 36


@pytest.mark.parametrize(
    ("cell", "value", "reason"),
    [
        (5, "-3", "total steps must be a whole number >= 1"),
        (5, "many", "total steps must be a number"),
        (6, "0", "GPUs must be a whole number >= 1"),
        (6, "1.5", "GPUs must be a whole number >= 1"),
        (7, "adaptive", "batch-size mode must be one of static, accordion, gns"),
        (8, "0", "priority weight must be > 0"),
        (11, "-1", "arrival must be >= 0"),
        (11, "nan", "arrival must be finite"),
        (0, "", "job type must not be empty"),
    ],
)
def test_a_bad_cell_names_file_line_and_reason(cell: int, value: str, reason: str, tmp_path: Path) -> None:
    cells = ROW.split("\t")
    cells[cell] = value
    path = tmp_path / "bad.trace"
    path.write_text(ROW + "\n" + "\t".join(cells) + "\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match=f"bad.trace, line 2: {reason}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ROW.replace("\t", ","), "line 1: must have 12 columns"),
        (ROW.removesuffix("0") + "50\n" + ROW, "line 2: arrives at 0, before the row above"),
        ("", "no jobs"),
    ],
)
def test_a_bad_file_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError, match=reason):
        read_trace(path)
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_trace(tmp_path / "missing.trace")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON: .* at line 1"),
        ("[]", "must be an object of GPU types"),
        ('{"v100": 3}', "v100: must be an object of job types"),
        ('{"v100": {"LM": {"null": 1}}}', "must be \\('job type', GPUs\\)"),
        (json.dumps({"v100": {"('LM', 1)": {"null": -1}}}), "steps per second >= 0; got -1"),
        (json.dumps({"v100": {"('LM', 1)": {}}}), "steps per second >= 0; got None"),
    ],
)
def test_bad_throughputs_are_refused(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(WorkloadError, match=f"table.json.*{reason}"):
        read_throughputs(path)


def test_throughputs_know_what_they_measured() -> None:
    table = read_throughputs(FOLDER / "gavel/simulation_throughputs.json")
    assert table.of("k80", "ResNet-50 (batch size 128)", 2) == 0.0
    assert table.knows("v100", "LM (batch size 80)", 4)
    assert not table.knows("v100", "LM (batch size 81)", 4)
    with pytest.raises(WorkloadError, match="nothing measured"):
        table.of("v100", "LM (batch size 81)", 4)


def test_patterns_of_the_probes() -> None:
    jobs = read_trace(FOLDER / "shockwave/jobs-120.trace")

    def counts(number: int) -> dict[int, int]:
        sizes = list(batches(jobs[number]))
        return {size: sizes.count(size) for size in dict.fromkeys(sizes)}

    assert counts(0) == {10: 12, 20: 10, 40: 1}
    assert list(batches(jobs[0]))[-1] == 10  # but the last epoch is small again
    assert counts(1) == {32: 28, 256: 64}
    assert counts(2) == {64: 27}
    assert counts(3) == {64: 38}
    assert counts(18) == {4096: 2089, 8192: 4871}
    assert counts(40) == {10: 82, 80: 191}


@given(st.sampled_from(sorted(DOUBLINGS)), st.integers(1, 900))
def test_gns_never_shrinks_before_the_last_epoch_nor_passes_the_ceiling(
    key: tuple[str, int, int], epochs: int
) -> None:
    model, first, gpus = key
    sizes = [gns_batch(model, first, gpus, epoch, epochs) for epoch in range(epochs)]
    assert sizes[:-1] == sorted(sizes[:-1])
    assert max(sizes) <= CEILING[model]
    assert all(size % first == 0 for size in sizes)


def test_critical_epochs() -> None:
    assert [e for e in range(40) if critical("ResNet-50", 32, e)] == [*range(10), *range(30, 40)]
    assert not critical("ResNet-50", 32, 600, alone=True)
    assert critical("ResNet-50", 32, 600)
    assert [critical("ResNet-18", b, 15) for b in (128, 256)] == [False, True]
    assert [critical("Recommendation", 512, 65, alone) for alone in (False, True)] == [False, True]
    assert not critical("Transformer", 16, 0)


@pytest.mark.parametrize(
    ("mode", "model", "first", "batch", "epoch", "asks"),
    [
        ("static", "LM", 10, 10, 50, ""),
        ("accordion", "LM", 10, 10, 5, ""),
        ("accordion", "LM", 10, 10, 10, "grow"),
        ("accordion", "LM", 80, 80, 10, ""),  # at the ceiling
        ("accordion", "ResNet-50", 32, 128, 30, "shrink"),
        ("accordion", "Transformer", 16, 16, 50, ""),
        ("gns", "LM", 10, 10, 9, ""),
        ("gns", "LM", 10, 10, 10, "grow"),  # one epoch ahead
        ("gns", "LM", 10, 20, 10, ""),
        ("gns", "Transformer", 16, 16, 500, ""),
    ],
)
def test_wishes(mode: str, model: str, first: int, batch: int, epoch: int, asks: str) -> None:
    assert wish(mode, model, first, 1, batch, epoch) == asks  # type: ignore[arg-type]


@given(st.integers(-1000, 1000), st.integers(1, 50))
def test_rounding_up_holds_for_negative_numbers(dividend: int, divisor: int) -> None:
    found = up(dividend, divisor)
    assert (found - 1) * divisor < dividend <= found * divisor


def test_epochs_of_an_unknown_model_are_refused() -> None:
    assert epoch_steps("LM", 10) == 5968
    with pytest.raises(WorkloadError, match="BERT"):
        epoch_steps("BERT", 10)


def test_time_alone_of_a_static_job_of_any_model() -> None:
    table = Throughputs({"v100": {("BERT (batch size 8)", 1): 4.0}})
    assert time_alone(TraceJob(0, "BERT (batch size 8)", 100, 1, 0.0), table, "v100") == 25.0
    with pytest.raises(WorkloadError, match="BERT"):
        time_alone(TraceJob(0, "BERT (batch size 8)", 100, 1, 0.0, "gns"), table, "v100")
