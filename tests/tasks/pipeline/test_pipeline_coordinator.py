"""The order in which steps begin, what follows when they end in one way or another, and going on after that."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipelines import content, read

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import PipelineRunError, StorageError
from ebbflow.infra.storage import checksums
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.pipeline.coordinator import (
    Attempt,
    AttemptResult,
    Coordinator,
    NullPipelineListener,
    Threads,
)
from ebbflow.tasks.pipeline.outcome import StepOutcome, overall
from ebbflow.tasks.pipeline.record import RunFolder, known_runs

RESULTS = {
    "orders": {"path": "/results/orders", "file": "/results/orders/orders.parquet", "rows": "3"},
    "fit": {"directory": "/runs/fit", "metrics.r2": "0.5"},
    "tune": {"directory": "/runs/tune", "best.lr": "0.1"},
}


class World:
    """Carries steps out as a test says, and remembers what was asked."""

    def __init__(self, **ends: Callable[[Attempt], AttemptResult]) -> None:
        self.ends, self.asked, self.heard = ends, list[Attempt](), list[str]()
        self.running = threading.Event()

    def carry(self, attempt: Attempt) -> AttemptResult:
        self.asked.append(attempt)
        name = attempt.step.name
        return self.ends.get(name, lambda _: AttemptResult("finished", results=RESULTS[name]))(attempt)

    def until_stopped(self, attempt: Attempt) -> AttemptResult:
        self.running.set()
        assert attempt.stop.wait(150)
        return AttemptResult("stopped", "saved")

    @property
    def order(self) -> list[str]:
        return [attempt.step.name for attempt in self.asked]


class Listener(NullPipelineListener):
    def __init__(self, tick: Callable[[], object] = lambda: None) -> None:
        self.said: list[str] = []
        self.tick = tick  # type: ignore[method-assign]

    def began(self, outcome: StepOutcome) -> None:
        self.said.append(f"{outcome.name} begins")

    def ended(self, outcome: StepOutcome) -> None:
        self.said.append(f"{outcome.name} {outcome.state}")

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Coordinator]:
    def make(
        world: World, listener: NullPipelineListener | None = None, plain: dict[str, Any] | None = None
    ) -> Coordinator:
        pipeline = read(plain or content(tmp_path), tmp_path)
        folder = RunFolder(tmp_path / "runs", "one")
        record = folder.load()[0] if folder.exists else folder.begin(pipeline, {}, 1000.0)
        return Coordinator(
            pipeline,
            record,
            folder,
            world.carry,
            background=Threads(),
            listener=listener or NullPipelineListener(),
            clock=SystemClock(),
            timeout=60.0,
        )

    return make


def states(coordinator: Coordinator) -> dict[str, str]:
    return {one.name: one.state for one in coordinator.outcomes()}


def test_steps_begin_when_what_they_wait_for_has_finished(make: Callable[..., Coordinator]) -> None:
    world, listener = World(), Listener()
    coordinator = make(world, listener)
    coordinator.run()
    assert world.order == ["orders", "fit", "tune"]
    assert set(states(coordinator).values()) == {"finished"}
    assert overall(coordinator.outcomes()) == ("finished", "all steps have finished")
    fit = world.asked[1]
    assert fit.app == "one.fit"
    assert [fit.fill(text) for text in fit.step.options["arguments"]] == ["--data", "/results/orders"]
    assert fit.fill("${run.id} ${run.name} $${x}") == "one shop ${x}"
    with pytest.raises(
        OptionError, match=r"trainings\.fit has no 'metrics\.loss'; it has directory, metrics\.r2"
    ):
        world.asked[2].fill("${trainings.fit.metrics.loss}")
    assert listener.said == [
        "orders begins", "orders finished", "fit begins", "fit finished", "tune begins", "tune finished"
    ]  # fmt: skip


def test_independent_steps_run_at_the_same_time(make: Callable[..., Coordinator], tmp_path: Path) -> None:
    plain = content(tmp_path)
    del plain["tunings"]["tune"]["after"]
    meet = threading.Barrier(2, timeout=150.0)

    def together(attempt: Attempt) -> AttemptResult:
        meet.wait()
        return AttemptResult("finished", results=RESULTS[attempt.step.name])

    coordinator = make(World(orders=together, tune=together), plain=plain)
    coordinator.run()
    assert set(states(coordinator).values()) == {"finished"}


def test_what_waits_for_a_failed_step_is_skipped(make: Callable[..., Coordinator]) -> None:
    def fail(_: Attempt) -> AttemptResult:
        raise OptionError("no such table")

    world = World(orders=fail)
    coordinator = make(world)
    coordinator.run()
    assert world.order == ["orders"]
    assert states(coordinator) == {"orders": "failed", "fit": "skipped", "tune": "skipped"}
    assert overall(coordinator.outcomes()) == ("failed", "orders failed: no such table")
    assert "orders has failed" in coordinator.outcomes()[1].reason


def test_a_defect_is_a_failure_with_its_name(make: Callable[..., Coordinator]) -> None:
    coordinator = make(World(orders=lambda _: 1 / 0))  # type: ignore[arg-type,return-value]
    coordinator.run()
    assert coordinator.outcomes()[0].reason == "ZeroDivisionError: division by zero"


def test_a_lost_step_is_gone_on_with_within_bounds(
    make: Callable[..., Coordinator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbflow.tasks.pipeline.coordinator.AGAIN_AFTER", 0.0)
    plain = content(tmp_path)
    plain["trainings"]["fit"]["attempts"] = 2
    ends = {"orders": ["lost", "lost", "finished"], "fit": ["lost", "lost", "finished"]}

    def end(attempt: Attempt) -> AttemptResult:
        name = attempt.step.name
        return AttemptResult(ends[name][attempt.number - 1], "its node went", RESULTS[name])  # type: ignore[arg-type]

    world = World(orders=end, fit=end)
    coordinator = make(world, plain=plain)
    coordinator.run()
    assert [(one.step.name, one.number) for one in world.asked] == [
        ("orders", 1), ("orders", 2), ("orders", 3), ("fit", 1), ("fit", 2)
    ]  # fmt: skip
    assert states(coordinator) == {"orders": "finished", "fit": "failed", "tune": "skipped"}
    assert coordinator.outcomes()[1].reason == "lost 2 times, the last time: its node went"


def test_a_step_whose_thread_never_began_is_lost(
    make: Callable[..., Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbflow.tasks.pipeline.coordinator.AGAIN_AFTER", 0.0)
    refused = ["can't start new thread", "can't start new thread"]
    start = threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        if refused and thread.name == "ebbflow-step-orders":
            raise RuntimeError(refused.pop())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    world, listener = World(), Listener()
    coordinator = make(world, listener)
    coordinator.run()
    assert [attempt.number for attempt in world.asked] == [3, 1, 1]
    assert set(states(coordinator).values()) == {"finished"}
    assert "orders was lost (can't start new thread); next attempt in 0 s" in listener.said


def test_an_interrupt_lets_steps_save_and_the_same_run_goes_on(make: Callable[..., Coordinator]) -> None:
    world = World()
    world.ends["fit"] = world.until_stopped
    sent: list[bool] = []

    def interrupt() -> None:
        if world.running.is_set() and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)

    first = make(world, Listener(interrupt))
    first.run()
    assert states(first) == {"orders": "finished", "fit": "stopped", "tune": "stopped"}
    assert overall(first.outcomes())[0] == "stopped"

    again = World()
    second = make(again)
    second.run()
    assert again.order == ["fit", "tune"]
    assert again.asked[0].number == 2
    assert again.asked[0].fill("${queries.orders.path}") == "/results/orders"
    assert overall(second.outcomes())[0] == "finished"
    assert second.outcomes()[0].began == first.outcomes()[0].began


@pytest.mark.parametrize("damage", ["one bit", "gone", "none"])
def test_a_query_runs_again_whose_result_is_not_what_was_written_where_a_step_is_left_that_reads_it(
    make: Callable[..., Coordinator], tmp_path: Path, damage: str
) -> None:
    result = tmp_path / "orders.parquet"
    result.write_bytes(b"rows")
    carried = AttemptResult(
        "finished", results=RESULTS["orders"], files={str(result): checksums.of_bytes(b"rows")}
    )
    first = make(World(orders=lambda _: carried, fit=lambda _: AttemptResult("failed", "a bug")))
    first.run()
    assert states(first) == {"orders": "finished", "fit": "failed", "tune": "skipped"}
    if damage == "one bit":
        result.write_bytes(b"rowr")
    elif damage == "gone":
        result.unlink()

    world, listener = World(), Listener()
    make(world, listener).run()

    assert world.order == ([] if damage == "none" else ["orders"]) + ["fit", "tune"]
    told = [said for said in listener.said if "runs again" in said]
    assert len(told) == (damage != "none")
    assert all(f"its result {result} is not what was written" in said for said in told)

    result.write_bytes(b"whatever")  # nobody is left to read it
    world = World()
    make(world).run()
    assert world.order == []


def test_a_result_that_is_out_of_reach_is_not_taken_for_damaged(
    make: Callable[..., Coordinator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "orders.parquet"
    result.write_bytes(b"rows")
    carried = AttemptResult(
        "finished", results=RESULTS["orders"], files={str(result): checksums.of_bytes(b"rows")}
    )
    make(World(orders=lambda _: carried, fit=lambda _: AttemptResult("failed", "a bug"))).run()

    def unreachable(scheme: str, path: str) -> str:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    world, listener = World(), Listener()
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "of_file", unreachable)
        with pytest.raises(StorageError, match="timed out"):
            make(world, listener).run()
    assert world.order == []
    assert not any("runs again" in said for said in listener.said)
    make(world, listener).run()
    assert world.order == ["fit", "tune"]


@pytest.mark.parametrize("moment", ["began", "ended"])
def test_an_interrupt_between_two_lines_loses_nothing(make: Callable[..., Coordinator], moment: str) -> None:
    class Striking(Listener):
        """Interrupts while the coordinator takes note of something."""

        def strike(self, outcome: StepOutcome) -> None:
            if outcome.name == "orders":
                signal.raise_signal(signal.SIGINT)

    listener = Striking()
    setattr(listener, moment, listener.strike)
    coordinator = make(World(), listener)
    coordinator.run()
    assert states(coordinator) == {"orders": "finished", "fit": "stopped", "tune": "stopped"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_leaves_at_once(make: Callable[..., Coordinator]) -> None:
    world, hold = World(), threading.Event()
    world.ends["orders"] = lambda _: (
        AttemptResult("stopped") if world.running.set() or hold.wait(150) else AttemptResult("lost")
    )

    def interrupt() -> None:
        if world.running.is_set():
            signal.raise_signal(signal.SIGINT)

    coordinator = make(world, Listener(interrupt))
    with pytest.raises(KeyboardInterrupt):
        coordinator.run()
    hold.set()
    assert states(coordinator)["orders"] == "stopped"


def test_others_can_stop_it(make: Callable[..., Coordinator]) -> None:
    world = World()
    world.ends["orders"] = world.until_stopped
    coordinator = make(world)
    threading.Thread(target=lambda: world.running.wait(150) and coordinator.stop("cancelled")).start()
    coordinator.run()
    assert states(coordinator) == {"orders": "stopped", "fit": "stopped", "tune": "stopped"}
    assert coordinator.outcomes()[2].reason == "cancelled"


def test_a_process_that_was_killed_leaves_what_the_next_needs(
    make: Callable[..., Coordinator], tmp_path: Path
) -> None:
    def look(attempt: Attempt) -> AttemptResult:
        seen.append(RunFolder(tmp_path / "runs", "one").load()[0].steps["orders"].results)
        return AttemptResult("finished", results=RESULTS["fit"])

    seen: list[Any] = []
    make(World(fit=look)).run()
    assert seen == [RESULTS["orders"]]  # on disk before the next step began


def test_a_run_is_held_by_one_process(tmp_path: Path) -> None:
    clock = SystemClock()
    with (
        RunFolder(tmp_path, "one").held(clock),
        pytest.raises(
            PipelineRunError,
            match=rf"another process is running it: run 'one' is being run by process {os.getpid()} of ",
        ),
        RunFolder(tmp_path, "one").held(clock),
    ):
        pass


def test_a_run_that_is_not_there_or_damaged(tmp_path: Path) -> None:
    pipeline = read(content(tmp_path), tmp_path)
    folder = RunFolder(tmp_path, "shop-1")
    folder.begin(pipeline, {}, 0.0)
    with pytest.raises(PipelineRunError, match="there is a run 'shop-1' already"):
        folder.begin(pipeline, {}, 0.0)
    assert known_runs(tmp_path) == ["shop-1"]
    with pytest.raises(PipelineRunError, match=r"there is no run 'shop-2'.*did you mean shop-1"):
        RunFolder(tmp_path, "shop-2").load()
    for name in ("run.json", "pipeline.yaml"):
        whole = (folder.path / name).read_bytes()
        for at in range(0, len(whole), 7):
            (folder.path / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(PipelineRunError, match=r"is damaged|is not what was written"):
                folder.load()
        (folder.path / name).write_bytes(whole)
    folder.load()
    (folder.path / "run.json").write_text('{"format": 1, "steps": []}')
    with pytest.raises(PipelineRunError, match="is damaged"):
        folder.load()
    with pytest.raises(OptionError, match="a run's id begins with a letter"):
        RunFolder(tmp_path, "../x")


@pytest.mark.parametrize(
    ("cluster", "folder"),
    [
        ({}, "{runs}/one"),
        ({"existing": {"ledger": "x", "directory": "/srv/shared/"}}, "/srv/shared/pipelines/one"),
        ({"existing": {"ledger": "x", "directory": "s3://bucket/store"}}, "s3://bucket/store/pipelines/one"),
    ],
)
def test_the_runs_folder_that_steps_are_told_is_one_that_their_nodes_reach(
    cluster: dict[str, Any], folder: str, make: Callable[..., Coordinator], tmp_path: Path
) -> None:
    plain = content(tmp_path)
    del plain["tunings"]
    plain["cluster"] = cluster or plain["cluster"]
    plain["trainings"]["fit"]["arguments"] = ["--out", "${run.directory}/out"]
    world = World()
    make(world, plain=plain).run()
    told = {attempt.step.name: attempt.fill("${run.directory}") for attempt in world.asked}
    assert told["fit"] == folder.format(runs=tmp_path / "runs")


def test_threads_that_do_not_end_are_waited_for_together() -> None:
    background, held = Threads(), threading.Event()

    def work() -> AttemptResult:
        held.wait(150)
        return AttemptResult("finished")

    class Step:
        name = "stuck"

    for _ in range(300):
        background.submit(Step(), work, pytest.fail)  # type: ignore[arg-type]
    begun = time.monotonic()
    background.settle(0.5)
    took = time.monotonic() - begun
    held.set()
    background.settle(150.0)
    assert 0.5 <= took < 150.0, "half a second for all, not for each"
