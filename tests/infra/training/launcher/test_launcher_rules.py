"""The launcher's rules and files, without processes."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import StorageError, TrainingError
from ebbflow.infra.protocols import Continue, GenerationEnd, Halt, RankFailure, TrainingEvent, TrainingJob
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.channel.wire import AgentEnd, Failure, RankState
from ebbflow.infra.training.launcher import journal as journals
from ebbflow.infra.training.launcher.decide import Persist, describe, script_failed
from ebbflow.infra.training.launcher.generation import Generation
from ebbflow.infra.training.launcher.hang import HangRule, HangWatch, StragglerDetector
from ebbflow.infra.training.launcher.job import checked_placement, fresh_name
from ebbflow.infra.training.launcher.journal import Journal, Record
from ebbflow.infra.training.launcher.members import Loss, SlotTime
from ebbflow.infra.training.process.channel import Report
from ebbflow.infra.training.process.leaving import PEER_LOST
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings

RULE = HangRule(stopped=2.0, floor=30.0, factor=10.0, start=120.0, limit=1000.0, busy=0.02)


def state(rank: int, cpu: float, letter: str = "S") -> RankState:
    return RankState(rank, 100 + rank, letter, cpu, 0.0)


# --- what is held ---------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 8), st.floats(0, 50), st.floats(0, 50)), max_size=6),
    st.integers(0, 5),
)
def test_slots_count_while_their_nodes_are_of_a_generation(
    later: list[tuple[int, float, float]], founders: int
) -> None:
    held, there = SlotTime(100.0), {f"founder-{n}": 2 for n in range(founders)}
    expected = sum(there.values()) * 200.0
    for number, (slots, begun, length) in enumerate(later):
        name = f"node-{number}"
        held.enter(name, 100.0 + begun)
        if number % 2:
            held.leave(name, slots, 100.0 + begun + length)
        else:
            there[name] = slots
        expected += slots * (length if number % 2 else 200.0 - begun)
    if founders > 1:
        held.leave("founder-0", there.pop("founder-0"), 150.0)
        expected -= 2 * 150.0
    if founders > 2:
        for _ in range(2):
            held.leave("founder-1", 2, 250.0)  # it is lost, and still named
        expected -= 2 * 50.0
    assert held.total(there, 300.0) == pytest.approx(expected)


def test_slots_of_a_lost_node_do_not_count_while_the_others_save() -> None:
    class Clock(SystemClock):
        time = 100.0

        def now(self) -> float:
            return self.time

    class Members(dict[str, Any]):
        def usable(self, placement: Any, gone: Any) -> dict[str, int]:
            return {}

        def log(self, name: str) -> str:
            return ""

    clock, ends = Clock(), list[AgentEnd]()
    wire = SimpleNamespace(agent_end=lambda number: ends[0] if ends else None)
    members: Any = Members(b=SimpleNamespace(beat=None, wire=wire))
    exchange: Any = None
    generation = Generation(
        1, {"a": 2, "b": 1}, members, exchange, clock, lambda kind, **said: None, RULE, 60.0, 1.0
    )
    clock.time = 110.0
    assert not generation.look({"a": Loss("it is gone")})
    clock.time = 140.0
    ends.append(AgentEnd("succeeded"))
    assert generation.look({})
    assert generation.end().slot_seconds == 2 * 10.0 + 40.0


# --- what hangs -------------------------------------------------------------------------------------------


def test_a_stopped_process_is_to_blame_after_its_time_and_forgiven_when_it_goes_on() -> None:
    watch = HangWatch(RULE, begun=0.0)
    watch.look(1.0, [state(0, 1.0), state(1, 1.0, "T")])
    assert watch.verdict(2.9) is None
    verdict = watch.verdict(3.0)
    assert verdict is not None
    assert verdict.ranks == (1,)
    watch.look(3.1, [state(1, 1.1)])
    assert watch.verdict(10.0) is None


def test_nothing_hangs_while_a_process_computes_or_waits_for_a_disk() -> None:
    for letter, cpu in (("R", 0.1), ("D", 0.0)):
        watch = HangWatch(RULE, begun=0.0)
        for second in range(600):  # evaluation, say: no reports for ten minutes
            watch.look(float(second), [state(0, cpu * second, letter), state(1, 0.0)])
            assert watch.verdict(float(second)) is None


def test_silence_without_work_is_a_hang_and_the_bound_follows_the_pace_of_reports() -> None:
    for gap, bound in ((0.5, 30.0), (20.0, 200.0)):
        watch = HangWatch(RULE, begun=0.0)
        for number in range(10):
            watch.report(number * gap)
        last = 9 * gap
        watch.look(last, [state(0, 5.0), state(1, 5.0)])
        assert watch.bound == bound
        watch.look(last + bound - 1, [state(0, 5.0), state(1, 5.0)])
        assert watch.verdict(last + bound - 1) is None
        verdict = watch.verdict(last + bound)
        assert verdict is not None
        assert verdict.ranks == ()


def test_before_the_first_report_there_is_time_to_load_data() -> None:
    watch = HangWatch(RULE, begun=0.0)
    watch.look(0.0, [state(0, 1.0)])
    assert watch.verdict(119.0) is None
    assert watch.verdict(120.0) is not None


def test_those_that_may_wait_for_one_that_was_lost_get_the_time_of_a_collective() -> None:
    watch = HangWatch(replace(RULE, exchange=60.0), begun=0.0)
    for second in range(100):
        watch.report(float(second))
        watch.look(float(second), [state(0, 1.0), state(1, 1.0)])
    watch.forget(1, 115.0)
    assert watch.verdict(174.0) is None
    verdict = watch.verdict(175.0)
    assert verdict is not None
    assert verdict.ranks == ()
    watch.forget(2, 200.0)
    watch.look(210.0, [state(0, 1.0, "T")])
    verdict = watch.verdict(212.0)
    assert verdict is not None
    assert verdict.ranks == (0,), "what is stopped is known at once"


def test_even_busy_processes_must_report_within_the_limit() -> None:
    watch = HangWatch(RULE, begun=0.0)
    for second in range(1000):
        watch.look(float(second), [state(0, float(second), "R")])
    assert watch.verdict(999.0) is None
    assert watch.verdict(1000.0) is not None


# --- who is late ------------------------------------------------------------------------------------------


def test_a_rank_that_is_late_in_two_windows_in_a_row_is_replaced_once() -> None:
    lateness = StragglerDetector(window=5, pause=300.0)
    found = [lateness.look(float(n), [0.1, 0.1, 0.4, 0.1]) for n in range(40)]
    assert [rank for rank in found if rank is not None] == [2]


@pytest.mark.parametrize("ready", [None, [0.1], "ab"[:0], [0.1, 0.11, 0.09]])
def test_nobody_is_late_among_equals(ready: object) -> None:
    lateness = StragglerDetector(window=2)
    assert all(lateness.look(float(n), ready) is None for n in range(20))


# --- what follows -----------------------------------------------------------------------------------------


def ended(kind: Any, **fields: Any) -> GenerationEnd:
    usual: dict[str, Any] = {
        "generation": 1,
        "kind": kind,
        "reason": "because",
        "placement": {"node-1": 2, "node-2": 1},
        "left": {"node-1": 2},
        "failures": (),
        "suspects": (),
        "started": 0.0,
        "ended": 1.0,
        "first_step": 0,
        "last_step": 5,
        "saved_step": 5,
    }
    return GenerationEnd(**(usual | fields))


def failure(exit_code: int | None, signal: str = "", error: str = "") -> RankFailure:
    return RankFailure(0, "node-1", exit_code, signal, error, "", 0.0)


def persist(minimum: int = 1, replace: bool = True) -> Persist:
    return Persist(minimum, replace, lambda: {"node-1", "node-2"})


def test_a_lost_node_costs_only_itself_and_too_few_wait() -> None:
    assert persist()(ended("lost")) == Continue({"node-1": 2}, "because")
    halt = persist(minimum=3)(ended("lost"))
    assert isinstance(halt, Halt)
    assert halt.state == "waiting"
    assert "2 slots are left, 3 are needed" in halt.reason


def test_a_node_that_hung_and_was_left_behind_is_not_replaced_again() -> None:
    end = ended("hung", suspects=("node-2", "node-0"))
    assert persist(replace=True)(end) == persist(replace=True)(ended("hung", suspects=("node-2",)))


def test_a_node_that_hung_is_replaced_later_or_at_once_where_it_is_needed() -> None:
    end = ended("hung", suspects=("node-2",))
    both = {"node-1": 2, "node-3": 1}
    assert persist()(end) == Continue({"node-1": 2}, "because", then=both)
    assert persist(minimum=3)(end) == Continue(both, "because")
    assert persist(replace=False)(end) == Continue({"node-1": 2}, "because")


def test_an_error_of_the_script_ends_the_run_and_neither_a_killed_process_nor_storage_does() -> None:
    whole = {"node-1": 2, "node-2": 1}
    verdict = persist()(ended("failed", left=whole, failures=(failure(1, error="KeyError: 3"),)))
    assert verdict == Halt("failed", "because")
    away = "Traceback (most recent call last):\nebbflow.infra.errors.StorageError: cannot list: away\n"
    for first in (
        failure(-9, "SIGKILL"),
        failure(PEER_LOST),
        failure(1, error=away),
        failure(None, error=away),
    ):
        verdict = persist()(ended("failed", left=whole, failures=(first,)))
        assert isinstance(verdict, Continue)
        assert verdict.placement == whole
    denied = away.replace("away", "access denied; check the keys (AWS Error)")
    other = away.replace("StorageError", "UnusableCheckpointError")
    for error, own in (("KeyError: 3", True), (away, False), (denied, True), (other, True)):
        assert script_failed(AgentEnd("failed", (Failure(0, 1, "", error, "", 0.0),))) is own


@given(
    st.sampled_from(["lost", "hung", "failed", "unformed"]),
    st.integers(3, 10),
    st.sampled_from([failure(-9, "SIGKILL"), failure(1, error="ebbflow.infra.errors.StorageError: away")]),
)
def test_no_run_goes_on_for_ever_without_progress(kind: str, idle: int, first: RankFailure) -> None:
    verdict = persist()(ended(kind, idle=idle, failures=(first,)))
    assert isinstance(verdict, Halt)
    assert verdict.state == "failed"


def test_a_failure_is_described_in_a_line() -> None:
    error = "Traceback (most recent call last):\n  File ...\nValueError: no rows\n"
    assert describe(failure(1, error=error)) == "rank 0 on node-1 ended with status 1: ValueError: no rows"
    assert describe(failure(-9, "SIGKILL")) == "rank 0 on node-1 was ended by SIGKILL"


# --- placements and files ---------------------------------------------------------------------------------


def test_placements_are_checked_and_new_nodes_get_new_names() -> None:
    for bad in ({}, {"a/b": 1}, {"a": 0}, {"a": True}, {"a": 1.5}):
        with pytest.raises(OptionError):
            checked_placement(bad)
    assert fresh_name(["node-2", "other", "node-10"]) == "node-11"


def test_a_run_is_written_down_and_read_back(tmp_path: Path) -> None:
    journal = Journal(StorageLocation(tmp_path / "run"))
    job = TrainingJob(
        "r", "/s.py", ("1",), str(tmp_path / "run"), RunSettings(termination_grace=5.0), {"A": "b"}
    )
    journal.write_run(job, {"node-1": 2}, "running", 7, "abc")
    assert journal.read_run() == (job, {"node-1": 2}, "running", 7, "abc")
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(TrainingError, match="start a new run"):
        journal.read_run()
    with pytest.raises(TrainingError, match="no run in"):
        Journal(StorageLocation(tmp_path / "other")).read_run()


def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path: Path) -> None:
    journal = Journal(StorageLocation(tmp_path))
    events = [TrainingEvent(n, float(n), "step", 1, {"n": n}) for n in range(1, 5)]
    assert journal.events() == []
    for event in events[:3]:
        journal.append(event)
    file = tmp_path / "events.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    journal.append(events[3])
    assert journal.events() == [*events[:2], events[3]]
    assert all(json.loads(line) for line in file.read_text().splitlines() if line.endswith("}"))


def test_a_directory_that_is_away_holds_no_launcher_up_and_gets_its_events_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, job = StorageLocation(tmp_path / "run"), TrainingJob("r", "train.py", (), "", RunSettings())
    record, back, tried, write = Record(SystemClock()), threading.Event(), list[str](), journals._append

    def away(path: Path, text: str) -> None:
        assert back.wait(150)
        tried.append(text)
        if len(tried) == 1:
            raise OSError("Stale file handle")
        write(path, text)

    monkeypatch.setattr(journals, "_append", away)
    record.begin(Journal(place), job, "pool")
    nodes = ["node-1"]
    record.note("first", nodes=nodes)  # comes back at once
    nodes.append("node-2")
    back.set()
    record.flush(150)
    record.note("second")
    record.write(job, "pool", "finished")
    record.flush(150)
    found = Journal(place).events()
    assert [(event.number, event.kind, event.content) for event in found] == [
        (1, "first", {"nodes": ["node-1"]}),
        (2, "second", {}),
    ]
    assert Journal(place).read_run()[2] == "finished"


def test_where_no_thread_can_be_started_the_record_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, job = StorageLocation(tmp_path / "run"), TrainingJob("r", "train.py", (), "", RunSettings())
    record = Record(SystemClock())
    record.begin(Journal(place), job, "pool")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        record.note("ended")
        record.write(job, "pool", "finished")
        record.flush(150)
    assert Journal(place).read_run()[2] == "finished"
    record.note("more")
    record.flush(150)
    assert [event.kind for event in Journal(place).events()] == ["ended", "more"]


def test_how_a_run_has_ended_is_tried_again_until_the_directory_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, job = StorageLocation(tmp_path / "run"), TrainingJob("r", "train.py", (), "", RunSettings())
    record, refused, write = Record(SystemClock()), [True] * 1000, Journal.write_run
    record.begin(Journal(place), job, "pool")

    def refuse(journal: Journal, *said: Any) -> None:
        if refused and refused.pop():
            raise StorageError("no space left")
        write(journal, *said)

    monkeypatch.setattr(journals, "_AGAIN", 0.01)
    monkeypatch.setattr(Journal, "write_run", refuse)
    record.write(job, "pool", "finished")
    record.flush(0.0)  # once, and not for ever
    assert Journal(place).read_run()[2] == "running"
    del refused[2:]
    record.flush(150)
    assert refused == []
    assert Journal(place).read_run()[2] == "finished"


def test_no_flipped_byte_of_a_runs_own_files_is_believed(tmp_path: Path) -> None:
    journal = Journal(StorageLocation(tmp_path))
    job = TrainingJob("r", "/s.py", ("--lr", "0.1"), str(tmp_path), RunSettings(), {})
    journal.write_run(job, {"node-1": 2}, "running", 7, "abc")
    events = [TrainingEvent(n, float(n), "checkpoint", 1, {"saved_step": n}) for n in (1, 2)]
    for event in events:
        journal.append(event)
    run, told = tmp_path / "run.json", tmp_path / "events.jsonl"
    whole = run.read_bytes()
    for at in range(len(whole)):
        run.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(TrainingError, match="is damaged"):
            journal.read_run()
    whole = told.read_bytes()
    for at in range(len(whole)):
        told.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert set(map(str, journal.events())) <= set(map(str, events)), at


# --- what a run had reached -------------------------------------------------------------------------------------


def test_a_launcher_that_resumes_knows_what_was_reached_and_saved_but_for_trials(tmp_path: Path) -> None:
    def taken_up(*said: tuple[str, int, dict[str, Any]]) -> tuple[int, int]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        journal = Journal(StorageLocation(folder))
        for number, (kind, generation, content) in enumerate(said, 1):
            journal.append(TrainingEvent(number, float(number), kind, generation, content))
        record = Record(SystemClock())
        record.take_up(journal, 0)
        return record.best, record.reached

    assert taken_up() == (-1, -1)
    trial = [
        ("generation", 1, {"trial": True}),
        ("metrics", 1, {"step": 20}),
        ("generation-ended", 1, {"last_step": 20}),
    ]
    assert taken_up(*trial) == (-1, -1)
    trained = [("generation", 2, {"trial": False}), ("checkpoint", 2, {"step": 60, "saved_step": 60})]
    assert taken_up(*trial, *trained, ("metrics", 2, {"step": 75})) == (60, 75)
    again = ("damaged", 3, {"step": 0, "restarted": True})
    assert taken_up(*trained, again) == (-1, -1), "what was before is given up"
    assert taken_up(*trained, again, ("checkpoint", 3, {"step": 10, "saved_step": 10})) == (10, 10)
    named = ("damaged", 3, {"step": 0, "restarted": False})
    assert taken_up(*trained, named) == (60, 60)


def test_a_run_is_not_finished_before_its_end_is_saved() -> None:
    class Told:
        def __init__(self, *reports: Report) -> None:
            self._reports = list(reports)

        def reports(self) -> list[Report]:
            said, self._reports = self._reports, []
            return said

    class NoMembers(dict[str, Any]):
        def log(self, name: str) -> str:
            return ""

        def usable(self, placement: Any, gone: Any) -> dict[str, int]:
            return {}

    def ended(**content: Any) -> tuple[str, str]:
        report = Report("finished", 0, 0.0, 12, content)
        admit_none: Any = {}
        members: Any = NoMembers()
        generation = Generation(
            1,
            {},
            members,
            admit_none,
            SystemClock(),
            lambda kind, **said: None,
            RULE,
            1.0,
            1.0,
        )
        generation._channel = Told(report)  # type: ignore[assignment]
        assert generation.look({})
        end = generation.end()
        return end.kind, end.reason

    assert ended(saved=True)[0] == "finished"
    assert ended(saved=False) == ("failed", "the script ended, and step 12 is not saved")
    assert ended()[0] == "failed"
