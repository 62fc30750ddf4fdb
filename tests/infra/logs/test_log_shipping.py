"""Logs in object storage: what was written is read as it grows, and a node that is lost has lost seconds of it."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbflow.infra.errors import StorageError
from ebbflow.infra.logs import reading, shipping
from ebbflow.infra.logs.reading import LogFile, find_logs
from ebbflow.infra.logs.shipping import LogShipper
from ebbflow.infra.protocols import TrainingJob
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.planners.model.trainings import RunSettings

pytestmark = pytest.mark.processes

PRINTS = """
import os, sys, time
for number in range(100_000):
    print(f"{number} {time.time()}", flush=True)
    time.sleep(0.01)
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (shipping, reading):
        monkeypatch.setattr(module, "SEGMENT", 100)
    return 100


def test_what_grows_in_any_steps_is_read_from_any_offset(
    s3: Callable[[], str], tmp_path: Path, small: int
) -> None:
    run, rng = StorageLocation(f"{s3()}/run"), random.Random(0)
    log = tmp_path / "generation-3" / "n" / "rank-0.out"
    log.parent.mkdir(parents=True)
    (tmp_path / "generation-3" / "other").mkdir()
    (tmp_path / "generation-3" / "other" / "rank-1.out").write_text("of another node")
    shipper, whole = LogShipper(tmp_path, "n", run.under("logs")), b""
    for _ in range(12):
        more = rng.randbytes(rng.choice([0, 1, 37, 99, 100, 101, 350]))
        whole += more
        with log.open("ab") as file:
            file.write(more)
        shipper.ship()
        (found,) = find_logs(run)
        assert (found.name, found.generation, found.rank, found.shipped) == (
            "generation-3/n/rank-0.out", 3, 0, True,
        )  # fmt: skip
        assert found.size() == len(whole)
        at = rng.randrange(len(whole) + 1)
        assert found.read(at) == whole[at:]
    assert len(run.entries("logs/generation-3/n/rank-0.out")) == -(-len(whole) // small)
    run.remove(f"logs/{found.name}/{shipping.segment_name(small)}")
    with pytest.raises(StorageError, match="lacks its segment 00000000000000000100"):
        found.read(0)


def test_the_tail_of_a_long_log_begins_with_a_whole_line(tmp_path: Path, small: int) -> None:
    log = tmp_path / "logs" / "generation-1" / "n" / "rank-0.err"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(50)))
    (found,) = find_logs(StorageLocation(tmp_path))
    lines, end = found.tail(3)
    assert (lines, end) == ([b"line 47", b"line 48", b"line 49"], log.stat().st_size)
    assert found.tail(1000)[0][0] == b"line 38", "the last 100 bytes hold so many whole lines"
    assert found.tail(0)[0] == []


def test_lines_of_a_killed_node_are_read_afterwards(s3: Callable[[], str], tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    run = StorageLocation(f"{s3()}/runs/r")
    job = TrainingJob(
        "r", str(script), (), str(run), RunSettings(own_checkpoints=True, termination_grace=5.0)
    )
    nodes = LocalNodes(tmp_path / "nodes")
    with TorchTrainer(nodes, logs=tmp_path / "logs", preload=(), replace=False) as trainer:
        trainer.launch(job, {"node-1": 1, "node-2": 1})
        until(lambda: len(of(run)) == 2 and all(one.size() > 2000 for one in of(run)))
        (one, two) = of(run)
        before = time.time()
        until(lambda: last(one) > before and last(two) > before)  # lines are there while they are written
        nodes.kill("node-2")
        until(lambda: trainer.status().generation > 1)
        assert before < last(two) <= time.time()
        numbers = [int(line.split()[0]) for line in two.read(0).splitlines()[:-1]]
        assert numbers == list(range(len(numbers)))
        until(lambda: len(of(run)) == 3)
        trainer.stop()
        until(lambda: trainer.status().state == "stopped")
    (final,) = (log for log in find_logs(run) if log.generation == 2 and log.name.endswith(".out"))
    written = next(tmp_path.glob("logs/generation-2/*/rank-0.out")).read_bytes()
    assert final.read(0) == written, "what a generation wrote is there when it has ended"


def of(run: StorageLocation) -> list[LogFile]:
    return [log for log in find_logs(run) if log.name.endswith(".out")]


def last(log: LogFile) -> float:
    """Return the time in the last whole line."""
    return float(log.read(0).rpartition(b"\n")[0].splitlines()[-1].split()[1])


def until(reached: Callable[[], object], seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.1)
