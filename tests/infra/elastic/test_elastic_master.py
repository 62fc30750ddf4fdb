"""Whole jobs in one thread, with deliveries in any order, under any membership changes and losses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_samples import Broken, InProcessJob, Mixing, expected, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbflow.infra.elastic.application import (
    Application,
    Completion,
    Dispatcher,
    Driver,
    Executor,
    Key,
    TaskContext,
    Value,
)
from ebbflow.infra.elastic.settings import Settings, check
from ebbflow.infra.elastic.wire.messages import Install, Read
from ebbflow.infra.errors import ElasticError, MicroTaskError
from ebbflow.planners.errors import OptionError

QUICK = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "kill"]), st.integers(1, 120), st.integers(0, 9)), max_size=10
)


def run(job: InProcessJob, changes: list[tuple[str, int, int]]) -> dict[Key, Any]:
    """Go on for some steps before each change; a whole job's loss is made good by a new worker."""
    for kind, steps, which in changes:
        job.steps(steps)
        members = job.members
        if kind == "join":
            job.join()
        elif members and (kind == "kill" or len(members) > 1):
            name = members[which % len(members)]
            if kind == "leave":
                job.leave(name)
            else:
                job.kill(name)
                if not job.members:
                    job.join()
    return job.finish()


@QUICK
@given(
    changes=CHANGES,
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 3),
    snapshots=st.sampled_from([None, 0.1, 0.4]),
)
def test_elasticity_and_losses_change_no_bit(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[str, int, int]],
    seed: int,
    workers: int,
    snapshots: float | None,
) -> None:
    app = Mixing()
    job = InProcessJob(app, workers, tmp_path_factory.mktemp("job"), seed, Settings(snapshot_every=snapshots))
    assert same(run(job, changes), expected(app))
    # every task ran once, in order, as far as the state that counts is concerned
    assert job.master.states == {e: list(range(app.iterations)) for e in range(app.executors)}
    assert job.master.driver.history == [app.executors] * app.iterations  # type: ignore[attr-defined]
    holds = [sum(counts) for counts in zip(*job.holds_at_end, strict=True)]
    assert holds == [app.executors, app.shards]


class Marked(Application):
    """Every task adds 1 to its own parameter and reads all: what it sees says what it missed."""

    shards = 3

    def __init__(self, executors: int, iterations: int, staleness: int | None) -> None:
        self.executors = executors
        self.iterations = iterations
        self.staleness = staleness

    def driver(self) -> Driver:
        return MarkedDriver(self)

    def executor(self, index: int) -> Executor:
        return MarkedExecutor(self, index)

    def parameters(self) -> Mapping[Key, Value]:
        return dict.fromkeys(range(self.executors), 0)


class MarkedExecutor(Executor):
    def __init__(self, app: Marked, index: int) -> None:
        self._app = app
        self._index = index

    def load_input(self) -> None:
        pass

    async def run(self, context: TaskContext, args: Any) -> list[int]:
        seen = await context.get(*range(self._app.executors))
        context.update(self._index, 1)
        return list(seen)


class MarkedDriver(Driver):
    """Checks each completion against what had been told when its task was dispatched."""

    def __init__(self, app: Marked) -> None:
        from ebbflow.infra.elastic.apps.iterative import IterativeDriver

        self._app = app
        self._inner = IterativeDriver(app.executors, app.iterations, app.staleness)
        self._told = [0] * app.executors  # iterations of each executor that the driver was told of
        self._at_dispatch: dict[tuple[int, int], list[int]] = {}
        self.checked = 0

    @property
    def executors(self) -> int:
        return self._app.executors

    def dispatch(self, executor: int, args: Any) -> None:
        self._at_dispatch[executor, args] = list(self._told)
        self._job.dispatch(executor, args)

    def start(self, job: Dispatcher) -> None:
        self._job = job
        self._inner.start(self)

    def complete(self, job: Dispatcher, completion: Completion) -> None:
        self._job = job
        task = completion.task
        known = self._at_dispatch[task.executor, task.args]
        assert all(seen >= observed for seen, observed in zip(completion.result, known, strict=True))
        if self._app.staleness is not None:
            assert min(completion.result) >= task.args - self._app.staleness
        self.checked += 1
        self._told[task.executor] += 1
        self._inner.complete(self, Completion(task, 1, 0.0))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@QUICK
@given(
    changes=CHANGES.map(lambda changes: [change for change in changes if change[0] != "kill"]),
    seed=st.integers(0, 2**32),
    staleness=st.sampled_from([0, 1, 3, None]),
)
def test_a_task_sees_what_it_may_depend_on(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[str, int, int]],
    seed: int,
    staleness: int | None,
) -> None:
    app = Marked(executors=5, iterations=5, staleness=staleness)
    job = InProcessJob(app, 2, tmp_path_factory.mktemp("job"), seed)
    values = run(job, changes)
    assert values == dict.fromkeys(range(5), 5)
    assert job.master.driver.checked == 25  # type: ignore[attr-defined]


def test_tasks_of_one_version_fetch_once(tmp_path: Path) -> None:
    app = Mixing(executors=6, iterations=4, keys=5)
    job = InProcessJob(app, 1, tmp_path)
    asked: list[Any] = []
    handlers = job.network.actors["n1/server"]._handlers  # type: ignore[attr-defined]
    plain = handlers[Read]
    handlers[Read] = lambda sender, message: (asked.extend(message.keys), plain(sender, message))
    job.finish()
    assert len(asked) == app.keys * app.iterations


def test_a_damaged_running_copy_is_said_and_the_last_snapshot_has_what_it_held(tmp_path: Path) -> None:
    settings = Settings(recovery="partial", running_every=0.2, snapshot_every=0.5)
    app = Mixing(executors=6, iterations=30, keys=20, tolerant=True)
    job = InProcessJob(app, 3, tmp_path, 3, settings)
    while job.master.ledger.clock.version < 60 or not list(tmp_path.glob("snapshot-*/manifest.json")):
        job.network.step()
    while job.master.phase != "running" or job.master.moves.under_way:
        job.network.step()
    for copy in tmp_path.rglob("shard-*.bin"):
        if not copy.parent.name.startswith("snapshot-"):
            copy.write_bytes(b"damaged")
    sent: list[Install] = []
    plain = job.master.send
    job.master.send = lambda to, message: (  # type: ignore[method-assign]
        sent.append(message) if isinstance(message, Install) else None,
        plain(to, message),
    )
    job.kill("n2")
    job.finish()
    (said,) = [event for event in job.master.events if event.kind == "running-copy-lost"]
    assert said.details["taken_from"] == "the last snapshot"
    assert any("/snapshot-" in path for message in sent for path in message.files)


def test_partial_recovery_leaves_survivors_alone(tmp_path: Path) -> None:
    settings = Settings(recovery="partial", running_every=0.2, snapshot_every=0.5)
    app = Mixing(executors=6, iterations=30, keys=20, tolerant=True)
    job = InProcessJob(app, 3, tmp_path, 3, settings)
    while job.master.ledger.clock.version < 60:
        job.network.step()
    while job.master.phase != "running" or job.master.moves.under_way:
        job.network.step()
    before = job.master.ledger.clock.version
    job.kill("n2")
    job.finish()
    kinds = [event.kind for event in job.master.events]
    assert "patched" in kinds
    assert "restored" not in kinds
    assert job.master.ledger.clock.version == 6 * 30 > before  # nothing that was told is done again
    alive = {e for e, ran in job.master.states.items() if ran == list(range(30))}
    assert len(alive) >= 4  # the executors of the two survivors never went back


def test_a_job_goes_on_from_its_folder(tmp_path: Path) -> None:
    app = Mixing(iterations=8)
    job = InProcessJob(app, 2, tmp_path, 1, Settings(snapshot_every=0.05))
    while sum(event.kind == "snapshot" for event in job.master.events) < 3:
        job.network.step()
    done = job.master.ledger.clock.version
    assert 0 < done < 48
    newest = max(tmp_path.glob("snapshot-*/manifest.json")).parent
    (newest / "n1-worker.bin").write_bytes(b"damaged")
    again = InProcessJob(app, 3, tmp_path, 2, resume=True)
    assert same(again.finish(), expected(app))
    assert [event.kind for event in again.master.events if event.kind in {"started", "restored"}] == [
        "restored"
    ]
    other = InProcessJob(Mixing(executors=7), 1, tmp_path, 2, resume=True)
    with pytest.raises(ElasticError, match="the snapshot has 6 executors and 4 shards"):
        other.finish()


def test_a_job_all_of_whose_snapshots_are_damaged_begins_again_at_the_users_word_alone(
    tmp_path: Path,
) -> None:
    app = Mixing(iterations=8)
    job = InProcessJob(app, 2, tmp_path, 1, Settings(snapshot_every=0.05))
    while sum(event.kind == "snapshot" for event in job.master.events) < 3:
        job.network.step()
    files = sorted(tmp_path.glob("snapshot-*/n1-worker.bin"))
    (files[0].parent / "master.bin").unlink()
    files[1].write_bytes(b"damaged")
    for _ in range(2):
        with pytest.raises(ElasticError, match="none of the job's snapshots is usable") as lost:
            InProcessJob(app, 3, tmp_path, 2, resume=True)
        assert "lacks master.bin" in str(lost.value)
        assert "n1-worker.bin" in str(lost.value)
    again = InProcessJob(app, 3, tmp_path, 2, resume=True, restart=True)
    assert same(again.finish(), expected(app))
    assert sum(event.kind == "snapshot-damaged" for event in again.master.events) == 2
    assert len(list(tmp_path.glob("damaged-snapshot-*/n1-worker.bin"))) == 2, "nothing is deleted"


def test_a_job_whose_snapshots_are_damaged_while_it_runs_does_not_fall_back_to_its_beginning(
    tmp_path: Path,
) -> None:
    app = Mixing(iterations=8)
    job = InProcessJob(app, 2, tmp_path, 1, Settings(snapshot_every=0.05))
    while sum(event.kind == "snapshot" for event in job.master.events) < 3:
        job.network.step()
    for manifest in tmp_path.glob("snapshot-*/manifest.json"):
        manifest.write_bytes(b"{}")
    with pytest.raises(ElasticError, match="none of the job's snapshots is usable"):
        job.master._captures.reload()


def test_a_snapshot_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ebbflow.infra.elastic.wire.snapshot.write_atomic", full)
    app = Mixing()
    job = InProcessJob(app, 2, tmp_path, 1, Settings(snapshot_every=0.05))
    assert same(job.finish(), expected(app))
    reasons = [event.details["reason"] for event in job.master.events if event.kind == "snapshot failed"]
    assert reasons
    assert all("No space left on device" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "a mistake in the application"),
        ("read", "parameter 'nothing' was read, but"),
        ("update", "parameter 'nothing' was updated, but"),
    ],
)
def test_mistakes_of_an_application_are_told(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(MicroTaskError, match=message):
        InProcessJob(Broken(how), 2, tmp_path).finish()


def test_too_many_losses_end_a_job(tmp_path: Path) -> None:
    job = InProcessJob(Mixing(), 3, tmp_path, settings=Settings(max_losses=1))
    job.steps(60)
    job.kill("n1")
    job.steps(5)
    job.kill("n2")
    with pytest.raises(ElasticError, match="2 workers were lost; the last one: killed"):
        job.finish()


@pytest.mark.parametrize(
    ("workers", "settings", "message"),
    [
        (0, Settings(), "workers must be >= 1; got 0"),
        (1, Settings(recovery="partial"), "Mixing does not allow"),
    ],
)
def test_jobs_that_cannot_run(workers: int, settings: Settings, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check(Mixing(), workers, settings)


def test_settings_have_rules() -> None:
    with pytest.raises(OptionError, match="running_fraction is outside its rule; got 0"):
        Settings(running_fraction=0)


def test_equal_seeds_give_equal_runs(tmp_path: Path) -> None:
    logs = []
    for name in "ab":
        job = InProcessJob(Mixing(), 2, tmp_path / name, 7)
        run(job, [("join", 50, 0), ("leave", 40, 1), ("kill", 30, 0)])
        logs.append([(event.time, event.kind) for event in job.master.events])
    assert logs[0] == logs[1]
    assert np.isfinite(logs[0][-1][0])
