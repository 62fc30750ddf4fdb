"""What a run begins with while storage is away: how long it is waited for, for what not, and what ends the wait."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from ebbflow.infra.errors import StorageError, UnusableCheckpointError
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training import RunStopped, retrying
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder, VerifiedCheckpoint
from ebbflow.infra.training.process.channel import StopRequest
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.process.link import Link
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.resuming import Choice, PatientReader, choose, load
from ebbflow.infra.training.retrying import may_pass
from ebbflow.infra.training.running_saves import RunningSaves
from ebbflow.infra.training.spill import Spill
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.conftest import ManualClock

AWS = "When listing objects under key 'a' in bucket 'b': AWS Error {} during ListObjectsV2 operation: no"


class Clock(ManualClock):
    """One that does not wait, and tells of what has happened."""

    def wait(self, event: Any, timeout: float) -> bool:
        super().wait(event, timeout)
        return bool(event.is_set())


class Folder:
    """A directory of checkpoints that cannot be read, as often as is asked for."""

    def __init__(
        self, layout: str = "replicated", times: int = 1000, wait: Callable[[], None] = bool
    ) -> None:
        self.found = cast(VerifiedCheckpoint, self)
        self.layout, self.times, self.wait, self.tried = layout, times, wait, 0
        self.check_model = bool

    def load(self, found: VerifiedCheckpoint, cut: Any = None) -> dict[str, Any]:
        self.tried += 1
        if self.tried <= self.times:
            raise StorageError("away")
        self.wait()
        return {"model": {}}

    def latest(self) -> VerifiedCheckpoint:
        self.load(self.found)
        return self.found


@dataclass(frozen=True, slots=True)
class Two(World):
    """Two processes, of which the other one has met an error."""

    size: int = 2
    error: Exception | None = None

    def sum(self, values: Any) -> list[float]:
        return list(values)

    def from_all(self, value: object) -> list[Any]:
        return [value, self.error]


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    said: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(Link, "post", lambda self, kind, step, content: said.append((kind, content)))
    return said


def made() -> Generation:
    return replace(Generation.join(None, None, None, restart=False), clock=Clock(1e9))


def read(world: World, folder: Folder, generation: Generation) -> Any:
    chosen = Choice(found=folder.found)
    reader = PatientReader(generation)
    return load(world, chosen, lambda: chosen, cast(CheckpointFolder, folder), None, reader)


def test_a_read_that_hangs_after_a_failed_try_is_not_shown_alive_for_ever(
    posted: list[tuple[str, dict[str, Any]]],
) -> None:
    def hang() -> None:
        end = time.monotonic() + 150
        while any(one.name == "ebbflow-saving" for one in threading.enumerate()):
            assert len(posted) < 300, "signs of life go on"
            assert time.monotonic() < end
            time.sleep(0.001)

    assert read(World(), Folder(times=1, wait=hang), made()) == {"model": {}}
    assert len(posted) > 10


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_what_one_process_cannot_read_is_an_error_of_all(layout: str) -> None:
    with pytest.raises(StorageError, match="the other"):
        read(Two(error=StorageError("the other")), Folder(layout, times=0), made())
    assert read(Two(), Folder(layout, times=0), made()) == {"model": {}}


@pytest.mark.parametrize("collective", [False, True])
def test_a_request_to_stop_ends_the_wait(
    posted: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, collective: bool
) -> None:
    generation, folder = made(), Folder()
    post = Link.post

    def stopped(self: Link, kind: Any, step: int, content: dict[str, Any]) -> None:
        post(self, kind, step, content)
        if len(posted) == 3:
            self.stop = StopRequest("interrupted")

    monkeypatch.setattr(Link, "post", stopped)

    def begin() -> Any:
        if collective:
            return read(Two(error=StorageError("away")), folder, generation)
        reader, there = PatientReader(generation), cast(CheckpointFolder, folder)
        return choose(World(), there, None, cast(RunningSaves, None), reader)

    with pytest.raises(RunStopped, match="interrupted") as caught:
        begin()
    assert caught.value.code == 0
    assert folder.tried <= 4
    assert posted[-1][0] == "stopped"
    assert posted[-1][1]["saved"] is False


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(AWS.format("NETWORK_CONNECTION")), True),
        (OSError(AWS.format("SLOW_DOWN")), True),
        (OSError("Stale file handle"), True),
        (OSError(AWS.format("ACCESS_DENIED")), False),
        (OSError(AWS.format("UNKNOWN (HTTP status 403)")), False),
        (OSError(AWS.format("EXPIRED_TOKEN")), False),
        (PermissionError(13, "Permission denied"), False),
    ],
    ids=str,
)
def test_missing_rights_and_verdicts_are_not_waited_for(error: OSError, passes: bool) -> None:
    with pytest.raises(StorageError) as caught, translated("list s3://b/a"):
        raise error
    assert may_pass(caught.value) is passes
    around = StorageError(f"the run's last steps may be there: {caught.value}")
    around.__cause__ = caught.value
    assert may_pass(around) is passes
    assert not may_pass(UnusableCheckpointError("of another version"))


@pytest.mark.parametrize("back", [True, False])
def test_a_process_that_joins_while_the_directory_is_away_waits_for_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    run, said = tmp_path / "run", list[str]()
    mark, joins = Spill(StorageLocation(run)).take_mark(), Spill(StorageLocation(run))
    run.rename(tmp_path / "away")
    run.mkdir()

    def post(self: Link, kind: str, step: int, content: dict[str, Any]) -> None:
        if "error" in content:
            said.append(content["error"])
            if len(said) == 2:
                run.rmdir()
                (tmp_path / "away").rename(run)

    monkeypatch.setattr(Link, "post", post)
    monkeypatch.setattr(retrying, "FIRST_PAUSE", 0.01)
    settings = RunSettings(final_save_timeout=150.0 if back else 0.0)
    reader = PatientReader(Generation.join(None, None, settings, restart=False))
    if back:
        assert choose(World(), None, joins, cast(RunningSaves, None), reader).found is None
        assert joins.mark == mark
        assert len(said) == 2
        assert all("the run's mark is not in" in one and "is it mounted?" in one for one in said)
        return
    with pytest.raises(StorageError, match=r"retried for 0 s.*the run's mark is not in"):
        choose(World(), None, joins, cast(RunningSaves, None), reader)
