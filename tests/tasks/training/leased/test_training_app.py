"""Trainings that follow their leases, on toy nodes: every GPU's use is compared with the leases in the ledger."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import RunLockedError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.capacity.estimates import belief
from ebbflow.planners.communication.dag import CommOp, ComputeOp, Dependency, TrainingDag
from ebbflow.planners.communication.placement import CommunicationProfile
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppSpec, Decided, Ended, Granted
from ebbflow.planners.scheduling.locality import Level
from ebbflow.planners.scheduling.placement_cost import ClusterLinks
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit
from ebbflow.planners.training.speed.goodput import GradientStatistics
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import ThroughputParameters
from ebbflow.tasks.apps.agent import AgentIntervals
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.training.leased.app import run_training_app
from ebbflow.tasks.training.leased.spec import training_spec
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from tests.tasks.apps.app_loops import Outage, ScriptedLoop, begin, until
from tests.tasks.apps.toy_trainings import Machines, Script

PACE = AgentIntervals(look=0.02, report=0.1, entry=150.0, parting=150.0)
RULES = Rules(grace=30.0, leave=2.0, fence=60.0)


class World:
    """A ledger, a loop, machines, and trainings that run as apps in threads."""

    def __init__(self, folder: Path, nodes: dict[str, int], linger: float = 0.0, **loop: Any) -> None:
        self.folder = folder
        self.save: float | None = None
        (folder / "train.py").write_text("")
        self.loop = ScriptedLoop(folder / "ledger.db", nodes, **loop)
        self.ledger = Ledger.open(str(folder / "ledger.db"))
        self.machines = Machines(linger)
        self.runs: list[Future[TrainingReport]] = []
        self.stops: list[threading.Event] = []
        self.scripts: list[Script] = []
        self.delivered: list[TrainingReport] = []

    def request(self, id: str, **options: Any) -> TrainingRequest:
        options = {"preflight": "never", "nodes": "local:4x1", "termination_grace": 5.0, **options}
        script = str(self.folder / "train.py")
        return TrainingRequest(script, run_id=id, runs_dir=str(self.folder / "runs"), **options)

    def begin(
        self, id: str, script: Script, ledger: Any = None, spec: dict[str, Any] | None = None, **options: Any
    ) -> Future[TrainingReport]:
        request, stop = self.request(id, **options), threading.Event()
        run = begin(
            run_training_app,
            request,
            training_spec(request, **(spec or {})),
            ledger or self.ledger,
            self.machines.pool,
            stop=stop,
            save=self.save,
            rules=RULES,
            pace=PACE,
            make=script.trainer,
            deliver=lambda report, _: self.delivered.append(report),
        )
        self.runs.append(run)
        self.stops.append(stop)
        self.scripts.append(script)
        until(lambda: run.done() or self.loop.phase(id), f"entry of {id}")
        return run

    def close(self) -> None:
        for stop in self.stops:
            stop.set()
        for run in self.runs:
            run.exception(150)
        self.ledger.close()
        self.loop.close()

    def check(self) -> None:
        """Compare every use of a GPU with the leases: it lies within one lease of the app that used it."""
        assert not self.machines.busy
        assert not self.ledger.verify()
        leased: dict[tuple[str, int], list[tuple[float, float]]] = {}
        ends = {
            number: event.at
            for event in self.ledger.events(kinds=[Ended], limit=10**6)
            for number in event.change.leases  # type: ignore[union-attr]
        }
        for event in self.ledger.events(kinds=[Granted], limit=10**6):
            for lease in event.change.leases:  # type: ignore[union-attr]
                span = (lease.since, ends.get(lease.number, time.time()))
                leased.setdefault((lease.node, lease.slot), []).append(span)
        assert self.machines.used
        for node, slot, begun, ended in self.machines.used:
            spans = leased[node, slot]
            assert any(a <= begun and ended <= b for a, b in spans), (node, slot, begun, ended, spans)
        for slot_of in {(node, slot) for node, slot, _, _ in self.machines.used}:
            uses = sorted((a, b) for node, slot, a, b in self.machines.used if (node, slot) == slot_of)
            assert all(earlier[1] <= later[0] for earlier, later in pairwise(uses))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, {"a": 2, "b": 2})
    try:
        yield world
    finally:
        world.close()


Wait = Callable[[], Any]


def training_on(world: World, *slots: tuple[str, int]) -> None:
    until(lambda: world.machines.busy == set(slots), f"training on {slots}; on {world.machines.busy}")


def test_an_app_waits_trains_and_finishes(world: World) -> None:
    run = world.begin("t", Script(steps=30))
    until(lambda: "waits for 1 GPU since" in world.loop.report("t").message, "word of why it waits")
    assert world.loop.phase("t") == "waiting"
    leases = world.loop.grant("t", ("a", 1), ("b", 0))
    report = run.result(150)
    assert (report.state, report.steps) == ("finished", 30)
    assert [g.gpus for g in report.generations] == [2]
    assert {g.node for g in report.generations[0].placement} == {"a", "b"}, "the ledger's names"
    until(lambda: world.loop.ended(*leases), "end of the leases")
    record = world.ledger.state().apps["t"]
    assert (record.phase, record.reason) == ("finished", "the script finished")
    assert record.checkpoint.endswith("step-30")
    assert record.spec.resume == {
        "kind": "training", "folder": str(world.folder / "runs"), "id": "t", "deployment": "",
    }  # fmt: skip
    world.check()


@pytest.mark.parametrize("save", [2.0, 600.0])
def test_it_saves_within_what_whoever_stops_it_has(world: World, save: float) -> None:
    world.save = save
    run = world.begin("t", Script())
    world.loop.grant("t", ("a", 0))
    training_on(world, ("a", 0))
    world.stops[0].set()
    assert run.result(150).state == "stopped"
    assert [len(so_far.generations) for so_far in world.delivered] == [1], "whoever looks meanwhile finds it"
    (by,) = world.scripts[0].made[0].stops
    if save < 5.0:  # the request's grace
        assert by is not None
        assert by < time.time() + save
    else:
        assert by is None
    world.check()


def test_it_grows_shrinks_and_moves_with_its_leases(world: World) -> None:
    run = world.begin("t", Script())
    (first,) = world.loop.grant("t", ("a", 0))
    training_on(world, ("a", 0))
    world.loop.grant("t", ("b", 0))
    training_on(world, ("a", 0), ("b", 0))
    world.loop.recall(first)
    training_on(world, ("b", 0))
    until(lambda: world.loop.ended(first), "end of the lease")
    (last,) = world.loop.grant("t", ("b", 1))
    training_on(world, ("b", 0), ("b", 1))
    world.loop.recall(last)
    training_on(world, ("b", 0))
    world.stops[0].set()
    report = run.result(150)
    assert report.state == "stopped"
    assert [g.gpus for g in report.generations] == [1, 2, 1, 2, 1]
    assert all(
        b.first_step == a.last_step for a, b in zip(report.generations, report.generations[1:], strict=False)
    )
    deadlines = [by for _, by in world.scripts[0].made[0].resizes]
    assert [by is not None for by in deadlines] == [False, True, False, True], "who waits says by when"
    assert world.loop.phase("t") == "stopped"
    world.check()


def test_another_gpu_of_the_same_node_is_another_gpu(world: World) -> None:
    run = world.begin("t", Script())
    (first,) = world.loop.grant("t", ("a", 0))
    training_on(world, ("a", 0))
    world.loop.grant("t", ("a", 1))
    world.loop.recall(first)
    training_on(world, ("a", 1))
    world.stops[0].set()
    assert run.result(150).state == "stopped"
    world.check()


def test_without_leases_it_waits_saved_and_goes_on(world: World) -> None:
    run = world.begin("t", Script(), min_gpus=2)
    leases = world.loop.grant("t", ("a", 0), ("a", 1))
    training_on(world, ("a", 0), ("a", 1))
    until(lambda: world.loop.report("t").step > 3, "steps")
    world.loop.recall(leases[0], seconds=10.0)
    until(lambda: world.loop.phase("t") == "waiting", "the wait")
    until(lambda: world.loop.ended(leases[0]), "end of the lease")
    assert not world.machines.busy, "too few GPUs are none"
    assert leases[1] in world.ledger.state().leases, "it keeps what nobody wants back"
    assert [len(so_far.generations) for so_far in world.delivered] == [1], "whoever looks meanwhile finds it"
    (by,) = world.scripts[0].made[0].stops
    assert by is not None
    assert by < time.time() + 7.0, "before the deadline"
    until(
        lambda: "1 GPU" in world.loop.report("t").message and "2" in world.loop.report("t").message,
        "the reason, with the next report",
    )
    saved = json.loads((world.folder / "runs" / "t" / "step").read_text())
    assert saved > 0
    assert world.ledger.state().apps["t"].checkpoint.endswith(f"step-{saved}")
    world.loop.grant("t", ("b", 1))
    training_on(world, ("a", 1), ("b", 1))
    until(lambda: world.loop.phase("t") == "running", "running again")
    world.stops[0].set()
    report = run.result(150)
    assert report.state == "stopped"
    assert [g.gpus for g in report.generations] == [2, 2]
    assert report.generations[1].first_step == saved
    assert report.lost_steps == 0
    assert report.generations[1].started > report.generations[0].ended, "one clock for all stretches"
    kinds = [p.used for p in report.capacity]
    assert 0 in kinds, "the wait is in the account"
    assert world.delivered[-1] == report
    world.check()


def test_a_training_that_does_not_leave_is_ended_before_the_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbflow.tasks.training.leased.enforcer.SPARE", 60.0)  # enough on a busy machine
    world.begin("t", Script(stubborn=True))
    first, second = world.loop.grant("t", ("a", 0), ("b", 0))
    training_on(world, ("a", 0), ("b", 0))
    world.loop.recall(first, seconds=61.0)
    deadline = world.ledger.state().leases[first].recalled
    until(lambda: world.loop.ended(first), "end of the lease")
    assert deadline is not None
    ((_, _, _, ended),) = [use for use in world.machines.used if use[0] == "a"]
    assert ended < deadline
    training_on(world, ("b", 0))
    assert second in world.ledger.state().leases
    world.scripts[0].stubborn = False
    world.close()
    world.check()


def test_a_gpu_is_released_only_when_its_processes_are_gone(tmp_path: Path) -> None:
    world = World(tmp_path, {"a": 1, "b": 1}, linger=0.6)
    try:
        world.begin("t", Script())
        first, _ = world.loop.grant("t", ("a", 0), ("b", 0))
        training_on(world, ("a", 0), ("b", 0))
        world.loop.recall(first)
        until(lambda: world.loop.ended(first), "end of the lease")
        ((_, _, _, gone),) = [use for use in world.machines.used if use[0] == "a"]
        assert world.loop.let_go[first] >= gone
    finally:
        world.close()
    world.check()


def test_a_killed_node_is_told_and_trained_without(world: World) -> None:
    run = world.begin("t", Script())
    world.loop.grant("t", ("a", 0), ("b", 0))
    training_on(world, ("a", 0), ("b", 0))
    world.machines.kill("a")
    training_on(world, ("b", 0))
    lost = until(
        lambda: [
            e.change
            for e in world.ledger.events(kinds=[Decided], app="t")
            if isinstance(e.change, Decided) and e.change.outcome.get("lost") == "a"
        ],
        "word of the loss",
    )
    assert lost[0].kind == "recovery"
    assert "a was lost: killed" in lost[0].reason
    world.loop.lose("a")
    world.stops[0].set()
    report = run.result(150)
    assert report.generations[0].kind == "lost"
    assert report.state == "stopped"
    world.check()


def test_the_last_node_killed_is_a_wait_for_another(world: World) -> None:
    run = world.begin("t", Script(steps=200))
    world.loop.grant("t", ("a", 0))
    training_on(world, ("a", 0))
    world.machines.kill("a")
    until(lambda: world.loop.phase("t") == "waiting", "the wait")
    world.loop.lose("a")
    world.loop.grant("t", ("b", 0))
    report = run.result(150)
    assert (report.state, report.steps) == ("finished", 200)
    world.check()


def test_a_trial_comes_first(world: World) -> None:
    run = world.begin("t", Script(steps=30), preflight="always", preflight_steps=5)
    world.loop.grant("t", ("a", 0), ("a", 1), ("b", 0))
    report = run.result(150)
    assert report.state == "finished"
    assert [(g.preflight, g.kind, g.gpus) for g in report.generations] == [
        (True, "preflight", 2),
        (False, "finished", 3),
    ]
    world.check()


def test_a_trial_whose_lease_is_called_back_is_cut_short(world: World) -> None:
    run = world.begin("t", Script(), preflight="always", preflight_steps=10**6)
    _, _, third = world.loop.grant("t", ("a", 0), ("a", 1), ("b", 0))
    training_on(world, ("a", 0), ("b", 0))
    world.loop.recall(third)
    training_on(world, ("a", 0), ("a", 1))
    until(lambda: world.loop.ended(third), "end of the lease")
    world.stops[0].set()
    report = run.result(150)
    assert [(g.preflight, g.gpus) for g in report.generations] == [(True, 2), (False, 2)]
    world.check()


def test_what_a_training_says_is_what_shares_gpus_out(world: World) -> None:
    speed = ThroughputParameters(0.01, 1e-3, 0.05, 0.0, 0.02, 0.0, 1.5)
    job = JobReport(BatchLimits(64, 64), GradientStatistics(1.0, 9.0), speed, 1, 1, BatchSplit(64, 0), 2)
    content = {"examples_left": 6400.0, "examples_total": 12800.0, "pace": "goodput", "job": job.to_dict()}
    world.begin("t", Script(content=content))
    world.loop.grant("t", ("a", 0))
    report = until(lambda: (r := world.loop.report("t")).work_left and r, "figures")
    assert report.progress == pytest.approx(0.5)
    assert report.seconds_left == pytest.approx(6400 / 80)
    assert report.work_left == pytest.approx(6400 / 80), "GPU-seconds on one GPU"
    assert report.work_total == pytest.approx(12800 / 80)
    assert JobReport.from_dict(report.job) == job
    assert report.pools == (world.machines.pools[-1].uid,)


def test_a_training_bids_by_the_communication_that_it_recorded(world: World) -> None:
    speed = ThroughputParameters(0.1, 1e-8, 0.011, 1e-8, 0.01, 1e-8, 1.0)
    job = JobReport(BatchLimits(64, 64), GradientStatistics(1.0, 9.0), speed, 1, 2, BatchSplit(32, 0), 2, 1)
    dag = TrainingDag(
        (ComputeOp("backward", 0.1), ComputeOp("update", 0.0)),
        (CommOp("bucket/0", "all-reduce", 1e8, 2),),
        (Dependency("backward", "bucket/0"), Dependency("bucket/0", "update")),
    )
    recorded = CommunicationProfile(RecordedTraining(dag, 2, 0.2, 10))
    content = {"examples_left": 6400.0, "examples_total": 12800.0, "pace": "goodput", "job": job.to_dict()}
    world.begin("t", Script(content=content, profile=recorded.to_dict()))
    world.loop.grant("t", ("a", 0), ("a", 1))
    said = until(
        lambda: (r := world.loop.report("t")) and "limits" in r.job and "communication" in r.job and r, "it"
    )
    links = ClusterLinks(intra_node=10e9, intra_rack=1e9)
    known = belief(said, 2, 2, 0.0, False, links)
    assert known.spread_by == "communication profile"
    assert known.cost is not None
    assert known.cost.slowdown(2, Level.RACK) == pytest.approx(0.2 / 0.11, rel=1e-3)
    assert belief(said, 2, 2, 0.0, False).spread_by == "goodput model", "no rate of a link is known"


def test_a_ledger_that_is_away_stops_nothing(world: World) -> None:
    outage = Outage(world.ledger)
    run = world.begin("t", Script(steps=400), ledger=outage)
    world.loop.grant("t", ("a", 0))
    training_on(world, ("a", 0))
    outage.away = True
    step = world.scripts[0].made[0].status().step
    until(lambda: world.scripts[0].made[0]._step > step + 50, "steps meanwhile")
    outage.away = False
    assert run.result(150).state == "finished"
    assert [g.kind for g in run.result().generations] == ["finished"]
    world.check()


def test_a_finished_training_is_not_trained_again(world: World) -> None:
    world.begin("t", Script(steps=5))
    world.loop.grant("t", ("a", 0))
    first = world.runs[0].result(150)
    again = world.begin("t", Script())
    assert again.result(150).steps == first.steps
    assert not world.scripts[1].made
    assert world.loop.phase("t") == "finished"


def test_an_app_runs_in_one_process_only(world: World) -> None:
    world.begin("t", Script())
    world.loop.grant("t", ("a", 0))
    training_on(world, ("a", 0))
    with pytest.raises(RunLockedError):
        world.begin("t", Script()).result(150)
    assert world.loop.phase("t") == "running"


def test_leases_do_not_take_scripted_faults(world: World) -> None:
    with pytest.raises(OptionError, match="scripted faults"):
        world.begin("t", Script(), fault=("1s:kill:a",)).result(150)
    with pytest.raises(OptionError, match="needs an id"):
        training_spec(world.request(""))
    spec = training_spec(world.request("t", nodes="local:2x2", min_gpus=2), team="x", deadline=5.0)
    assert spec == AppSpec(
        "t", "training", "x", gpus=4, min_gpus=2, max_gpus=4, deadline=5.0,
        resume={"kind": "training", "folder": str(world.folder / "runs"), "id": "t", "deployment": ""},
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_two_apps_never_meet_on_a_gpu(tmp_path: Path, seed: int) -> None:
    """Grants, recalls, short leases, kills and outages of the ledger in any order."""
    rng = random.Random(seed)
    world = World(tmp_path, {"a": 2, "b": 2, "c": 1}, linger=0.05)
    outage = Outage(world.ledger)
    slots = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0)]
    try:
        world.begin("x", Script(saving=0.02))
        world.begin("y", Script(), ledger=outage, min_gpus=2)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            state = world.ledger.state()
            free = [s for s in slots if s not in set(state.booked)]
            held = [n for n, lease in state.leases.items() if lease.recalled is None]
            match rng.choice("gggrrea"):
                case "g" if free:
                    chosen = rng.sample(free, rng.randint(1, len(free)))
                    world.loop.grant(rng.choice("xy"), *chosen, seconds=rng.choice([1.5, 60.0]))
                case "r" if held:
                    with suppress(OptionError):  # it has ended meanwhile
                        world.loop.recall(rng.choice(held), seconds=rng.choice([0.6, 5.0]))
                case "e" if held:
                    with suppress(OptionError):
                        world.loop.extend(rng.choice(held), seconds=rng.choice([0.5, 30.0]))
                case "a":
                    outage.away = not outage.away and rng.random() < 0.3
            time.sleep(rng.uniform(0.0, 0.15))
    finally:
        outage.away = False
        world.close()
    world.check()
    assert all(run.result().state == "stopped" for run in world.runs)
