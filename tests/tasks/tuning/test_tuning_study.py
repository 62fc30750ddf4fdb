"""A search's journal on a disk that is full, or cut off by SIGKILL: it can be gone on with."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import StorageError
from ebbflow.tasks.tuning.request import Parameter, TuningRequest
from ebbflow.tasks.tuning.study import Study


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes: what goes over is cut, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def request_(tmp_path: Path) -> TuningRequest:
    (tmp_path / "fit.py").write_text("")
    space = (Parameter("lr", "float", 0.0, 1.0),)
    return TuningRequest(str(tmp_path / "fit.py"), space, "score", run_id="one", runs_dir=str(tmp_path))


def taken(study: Study) -> tuple[Any, bool]:
    """Return a trial that is free now, and whether it was begun before."""
    found = study.take()
    assert found is not None
    return found


def test_a_disk_that_is_full_in_the_middle_of_a_line_ends_no_search_for_good(request_: TuningRequest) -> None:
    study = Study(request_)
    first, begun = taken(study)
    assert not begun
    drawn = study.arguments(first)
    journal = Path(request_.run_directory) / "optuna.journal"
    before = journal.read_bytes()
    with (
        no_file_above(len(before) + 20),
        pytest.raises(StorageError, match=r"cannot write .*optuna\.journal"),
    ):
        study.take()
    assert journal.read_bytes() == before  # nothing half-written is left
    study.tell(first, 0.5, "complete")  # there is room again
    again = Study(request_)
    assert again.begun() == 1
    assert again.trials()[0].params == drawn
    assert again.best_value() == 0.5


def test_a_line_that_was_cut_off_by_a_kill_is_left_out(request_: TuningRequest) -> None:
    study = Study(request_)
    study.tell(taken(study)[0], 0.25, "complete")
    journal = Path(request_.run_directory) / "optuna.journal"
    journal.write_bytes(journal.read_bytes() + b'{"op_code":4,"worker_')
    again = Study(request_)
    again.tell(taken(again)[0], 0.75, "complete")
    assert [trial.value for trial in Study(request_).trials()] == [0.25, 0.75]
