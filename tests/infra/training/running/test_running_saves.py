"""Which of a run's checkpoints is taken up, the full one or the running one, when nodes' memory changes meanwhile."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ebbflow.infra.errors import StorageError
from ebbflow.infra.protocols.trainings import NODES_MEMORY
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.running.folder import RunningFolder, read_whole
from ebbflow.infra.training.running.store import DamagedError
from ebbflow.infra.training.running_saves import RunningSaves
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.memory_nodes import Gate, Nodes

pytestmark = pytest.mark.usefixtures("no_sync")
SETTINGS = RunSettings(
    partial_checkpoint_interval=1, partial_checkpoint_fraction=1.0, partial_checkpoint_memory=True
)


class TwoWorld:
    """A process whose peer has read another save from nodes' memory, once."""

    rank, size, different = 0, 2, True

    def from_all(self, value: Any) -> list[Any]:
        if not self.different or value is None:
            return [value, value]
        self.different = False
        return [value, (value[0] - 1, 0)]


class Training:
    """As much of a ``PreparedTraining`` as running checkpoints need; all parameters are the step."""

    sharding = None

    def __init__(self, step: int) -> None:
        self.inner = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1)
        self.progress = SimpleNamespace(step=step)
        self.move(step)

    def move(self, step: int) -> None:
        self.progress.step = step
        with torch.no_grad():
            for parameter in self.inner.parameters():
                parameter.fill_(float(step))

    def run_state(self) -> dict[str, Any]:
        return {"step": self.progress.step}

    def extra_state(self) -> dict[str, Any]:
        return {}

    def load_run(self, run: dict[str, Any]) -> None:
        self.progress.step = run["step"]

    def load_extra(self, extra: dict[str, Any]) -> None: ...

    @property
    def steps(self) -> set[float]:
        return {value for one in self.inner.parameters() for value in one.flatten().tolist()}


def saves(
    place: Path, nodes: Nodes, world: Any = None, claim: Callable[[str], bool] = lambda name: True
) -> RunningSaves:
    generation = SimpleNamespace(
        place=StorageLocation(place), settings=SETTINGS, trial=False, world=world or World(),
        link=SimpleNamespace(claim=claim),
    )  # fmt: skip
    made = RunningSaves(cast(Any, generation))
    made._memory = nodes.memory()
    return made


@pytest.fixture(name="gate")
def _gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def killed(place: Path, nodes: Nodes, gate: Gate) -> None:
    """Leave a run of whose running checkpoint the directory has step 0, and nodes' memory step 3."""
    made, training = saves(place, nodes), cast(Any, Training(0))
    made.begin(training, None)
    assert made._running is not None
    assert made._running._store is not None
    gate.killed.add(id(made._running._store._store))
    for step in (1, 2, 3):
        training.move(step)
        made.step(training)
        made._running._finish(150)


@pytest.mark.parametrize(("full", "gone"), [(2, True), (2, False), (-1, True), (-1, False), (0, True)])
@pytest.mark.parametrize("different", [False, True])
def test_a_running_checkpoint_that_is_older_than_the_full_one_is_never_taken_up(
    tmp_path: Path, gate: Gate, full: int, gone: bool, different: bool
) -> None:
    nodes = Nodes()
    killed(tmp_path / "running-of", nodes, gate)
    made = saves(tmp_path / "running-of", nodes, TwoWorld() if different else None)
    assert made.newest(full) == 3
    if gone:
        nodes.kept.clear()
    training = Training(max(full, 0))
    made.begin(cast(Any, training), 3, full)
    expected = max(full, 0) if gone or different else 3
    assert (training.progress.step, training.steps) == (expected, {float(expected)})
    taken = expected != full
    assert (made.recovered is not None) == taken
    if not taken:
        folder = RunningFolder(StorageLocation(tmp_path / "running-of").under("running"))
        assert read_whole(folder)[1] == full, "it begins anew at the full one"
        assert not nodes.kept
    made.close()


@pytest.mark.parametrize("denied", [False, True])
def test_what_seems_damaged_and_cannot_be_set_aside_is_passed_over_only_where_a_right_is_missing(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, denied: bool
) -> None:
    nodes = Nodes()
    killed(tmp_path, nodes, gate)

    def damaged(*_: Any) -> Any:
        raise DamagedError("it lacks segment-0000000001.seg")

    def gone(*_: Any) -> str:
        raise StorageError("it does not exist") from (PermissionError() if denied else FileNotFoundError())

    monkeypatch.setattr(RunningFolder, "records", damaged)
    monkeypatch.setattr(RunningFolder, "set_aside", gone)
    made = saves(tmp_path, nodes)
    with nullcontext() if denied else pytest.raises(StorageError, match="does not exist"):
        assert made.newest(0) is None
    assert bool(made.problems) is denied
    made.close()


def test_that_memory_cannot_be_used_is_reported_once_and_is_no_failure(tmp_path: Path, gate: Gate) -> None:
    nodes = Nodes()
    nodes.peers = ()
    made, training = saves(tmp_path, nodes), cast(Any, Training(0))
    made.begin(training, None)
    said = []
    for step in (1, 2, 3):
        training.move(step)
        said += made.step(training)
        assert made._running is not None
        made._running._finish(150)
    assert [one["reason"] for one in said] == [NODES_MEMORY]
    assert "ebbflow memory lend" in said[0]["error"]
    gate.refuses = True
    for step in (4, 5):
        training.move(step)
        said += made.step(training)
        made._running._writer.join(150)
    assert {"reason": "running checkpoint", "error": "the disk is full"} in said
    gate.refuses = False
    made.close()


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_to_find_memory_full_reports_it_whichever_it_is(
    tmp_path: Path, gate: Gate, first: bool
) -> None:
    nodes, claimed = Nodes(), []
    nodes.room = 0

    def claim(name: str) -> bool:
        claimed.append(name)
        return first

    made, training = saves(tmp_path, nodes, claim=claim), cast(Any, Training(0))
    made.begin(training, None)
    cast(Any, made)._world = SimpleNamespace(rank=3)  # which holds shards that others do not
    said = []
    for step in (1, 2, 3):
        training.move(step)
        said += made.step(training)
        assert made._running is not None
        made._running._finish(150)
    assert claimed == ["nodes-memory-full"]
    assert [one["reason"] for one in said] == [NODES_MEMORY] * first
    made.close()


def test_the_end_of_a_run_leaves_nothing_in_memory_though_its_directory_is_slow(
    tmp_path: Path, gate: Gate
) -> None:
    nodes = Nodes()
    for needed in (True, False):
        made, training = saves(tmp_path / str(needed), nodes), cast(Any, Training(0))
        made.begin(training, None)
        gate.open.clear()
        training.move(1)
        made.step(training)
        assert made._running is not None
        made._running._finish(150)
        assert nodes.kept
        made.needed = needed
        made.close(0.01)
        assert bool(nodes.kept) == needed
        nodes.kept.clear()
        gate.open.set()
