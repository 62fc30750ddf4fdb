"""The record of a run's values: its steps increase whatever is done again, and nothing is twice."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.tracking import record
from ebbflow.infra.training.tracking.record import FILE, TrackingRecord, entry_of


def written(folder: Path) -> list[tuple[int, dict[str, float]]]:
    entries = [entry_of(line) or {} for line in (folder / FILE).read_bytes().splitlines(keepends=True)]
    return [(e["step"], e["values"]) for e in entries if e.get("kind") == "values"]


VALUES = st.dictionaries(st.sampled_from("abc"), st.floats(allow_nan=True), min_size=1)


@given(st.lists(st.tuples(st.integers(0, 12), VALUES, st.booleans()), max_size=30))
def test_steps_of_each_metric_increase_through_any_restarts(
    said: list[tuple[int, dict[str, float], bool]],
) -> None:
    with TemporaryDirectory() as name:
        kept = TrackingRecord(StorageLocation(name), "r")
        key = kept.said.key
        for step, values, again in said:
            if again:
                kept = TrackingRecord(StorageLocation(name), "r")
            kept.values(step, 0.0, values)
        assert kept.said.key == key
        steps: dict[str, list[int]] = {}
        for step, values in written(Path(name)):
            for metric in values:
                steps.setdefault(metric, []).append(step)
        for found in steps.values():
            assert found == sorted(set(found))
        rows = [step for step, _ in written(Path(name))]
        assert rows == sorted(rows)
        finite = [s for s, values, _ in said if any(abs(v) < float("inf") for v in values.values())]
        assert max(rows, default=-1) == max(finite, default=-1)


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    kept = TrackingRecord(StorageLocation(str(tmp_path)), "r")
    kept.values(1, 0.0, {"loss": 2.0})
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"kind": "values", "step": 2, "val')
    kept = TrackingRecord(StorageLocation(str(tmp_path)), "r")
    kept.values(2, 0.0, {"loss": 1.0})
    assert written(tmp_path) == [(1, {"loss": 2.0}), (2, {"loss": 1.0})]


def test_a_value_that_comes_late_joins_the_last_step_and_no_other(tmp_path: Path) -> None:
    kept = TrackingRecord(StorageLocation(str(tmp_path)), "r")
    kept.values(5, 0.0, {"loss": 2.0})
    assert kept.values(5, 0.0, {"loss": 3.0, "accuracy": 0.5})
    assert not kept.values(4, 0.0, {"accuracy": 0.4})
    assert written(tmp_path) == [(5, {"loss": 2.0}), (5, {"accuracy": 0.5})]


def test_on_storage_without_appending_another_machine_reads_all_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_PIECE", 1000)
    monkeypatch.setattr(StorageLocation, "local", property(lambda _: False))  # as S3 is
    place = StorageLocation(str(tmp_path / "bucket"))
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "one"))
    kept = TrackingRecord(place, "r")
    for step in range(50):
        kept.values(step, 1.0, {"loss": 1.0 / (step + 1)})
        if step % 7 == 0:
            kept.ship()
    kept.ship()
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "two"))
    again = TrackingRecord(place, "r")
    assert again.said == kept.said
    assert again.path.read_bytes() == kept.path.read_bytes()
    assert len(list((tmp_path / "bucket" / "tracking").iterdir())) > 5


def test_records_on_s3_of_one_id_in_two_places_are_two_files_that_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StorageLocation, "local", property(lambda _: False))
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    one, two = (TrackingRecord(StorageLocation(str(tmp_path / name)), "r") for name in ("a", "b"))
    one.values(1, 0.0, {"loss": 2.0})
    one.ship()
    assert b"loss" not in two.path.read_bytes()
    one.close()
    two.close()
    assert not list((tmp_path / "home" / "tracking").iterdir())
    assert TrackingRecord(StorageLocation(str(tmp_path / "a")), "r").said.step == 1


def test_a_full_disk_is_told_and_ends_nothing(tmp_path: Path) -> None:
    kept = TrackingRecord(StorageLocation(str(tmp_path)), "r")
    kept.path = Path("/dev/full")
    kept.values(1, 0.0, {"loss": 2.0})
    assert "No space left" in kept.problem
