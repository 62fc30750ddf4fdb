"""Parts of an elastic run on their own: when it saves, what it hears, how its schedule moves."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from ebbflow.infra.training.checkpoints.folder import SavedCheckpoint
from ebbflow.infra.training.checkpoints.shards import Division
from ebbflow.infra.training.metrics import Rates, TokenCount
from ebbflow.infra.training.prepared import CPU_BUCKET, Options, prepare
from ebbflow.infra.training.process.channel import StopRequest
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.process.link import Link
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.progress import Progress
from ebbflow.infra.training.saver import Costs, Saver
from ebbflow.infra.training.schedule import ProgressSchedule, rule_for, scaled, script_hyperparameters
from ebbflow.infra.training.sharded.saver import ShardedSaver
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.saving.checkpointing import (
    LEAST_EVERY,
    UNKNOWN_HAZARD_EVERY,
    daly_interval,
    state_losses,
)
from ebbflow.planners.training.saving.data_order import DataPosition, Share
from ebbflow.planners.training.speed.goodput import GradientStatistics, gain


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def wait(self, event: threading.Event, timeout: float) -> bool:
        return event.wait(0.001)


class Folder:
    """A checkpoint folder whose saves take what a test says."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.busy = False
        self.done: SavedCheckpoint | None = None

    def save_async(self, state: Any, step: int, note: Any) -> bool:
        if self.busy:
            return False
        self.steps.append(step)
        self.busy = True
        return True

    def finish(self, seconds: float) -> None:
        self.busy, self.done = False, SavedCheckpoint(self.steps[-1], "there", 1, seconds, 0.0)

    def wait(self, timeout: float) -> SavedCheckpoint | None:
        done, self.done = self.done, None
        return done


def saver(settings: RunSettings, world: World | None = None) -> tuple[Saver, Folder, Now]:
    clock, folder = Now(), Folder()
    found: Any = folder
    link = Link(None, 0, 30.0, clock=clock)
    return Saver(found, Generation(world or World(), link, settings, clock=clock)), folder, clock


def test_the_interval_between_checkpoints_follows_costs_and_hazard() -> None:
    assert saver(RunSettings())[0].every == UNKNOWN_HAZARD_EVERY
    assert saver(RunSettings(checkpoint_interval=7.0))[0].every == 7.0
    aggregated, _, _ = saver(RunSettings(interruption_rate=0.5, sync="service"), World(nodes=4))
    aggregated.costs = Costs(stall=0.2, write=3.0)
    assert aggregated.every == pytest.approx(daly_interval(0.2, 1800.0))
    calm, _, _ = saver(RunSettings(interruption_rate=0.5), World(nodes=4))
    calm.costs = Costs(stall=0.2, write=3.0)
    losses = state_losses(0.5 / 3600, 4, 4, 63.0)
    assert (calm.losses, calm.every) == (losses, pytest.approx(daly_interval(0.2, 1 / losses.rate)))
    assert calm.every > 4 * aggregated.every, "a lost node takes no state with it while another one has it"
    last, _, _ = saver(RunSettings(interruption_rate=0.5), World(nodes=1))
    last.costs = calm.costs
    assert last.every == pytest.approx(daly_interval(0.2, 7200.0))
    calm.costs = Costs(stall=1e-6, write=0.1)
    assert calm.every == LEAST_EVERY, "a free checkpoint is not made at every step"
    aggregated.costs = Costs(stall=3.0, write=3.0)
    assert aggregated.every == 300.0, "training waits for one per cent of the time at most"


@pytest.mark.parametrize(("replicas", "nodes", "holders"), [(1, 4, 1), (2, 4, 2), (4, 2, 2)])
def test_a_part_of_a_sharded_state_is_on_as_many_nodes_as_have_replicas(
    replicas: int, nodes: int, holders: int
) -> None:
    sharding: Any = SimpleNamespace(division=Division(0, 2, 0, replicas))
    settings = RunSettings(interruption_rate=0.5)
    one = ShardedSaver(None, Generation(World(nodes=nodes), Link(None, 0, 30.0), settings), sharding)
    assert one.losses == state_losses(0.5 / 3600, nodes, holders, 60.0)


def test_one_save_at_a_time_and_only_by_the_first_process() -> None:
    one, folder, clock = saver(RunSettings(checkpoint_interval=10.0))
    for step in range(60):
        clock.time += 1.0
        if step == 24:
            folder.finish(4.0)
        one.maybe(dict, step)
    assert folder.steps == [9, 24]
    assert one.saved_step == 9
    assert one.costs.write == 4.0
    other, folder, clock = saver(RunSettings(checkpoint_interval=0.0), World(rank=1, size=2))
    clock.time += 100
    other.maybe(dict, 1)
    assert folder.steps == []


def test_rescue_leaves_what_is_saved_alone() -> None:
    one, _, _ = saver(RunSettings())
    one.saved_step = 5
    assert not one.rescue(dict, 5, "rescue", 1.0)
    assert not Saver(None, Generation(World(), Link(None, 0, 30.0), RunSettings())).rescue(
        dict, 5, "rescue", 1.0
    )


def test_the_last_moment_comes_once_and_in_time() -> None:
    clock = Now()
    link = Link(None, 0, 30.0, clock=clock)
    heard: list[float] = []
    came = threading.Event()

    def act(stop: StopRequest) -> None:
        heard.append(clock.time)
        came.set()

    link.open()
    try:
        link.before_deadline(3.0, act)
        link.stop = StopRequest("notice", deadline=1010.0)
        assert not came.wait(0.05)
        clock.time = 1007.5
        assert came.wait(150)
        clock.time = 1020.0
    finally:
        link.close()
    assert heard == [1007.5]


def test_a_schedule_follows_progress_and_not_steps() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = ProgressSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    optimizer.step()
    schedule.follow(0.9, 10.0)
    assert optimizer.param_groups[0]["lr"] == 1.0
    schedule.follow(3.2, 10.0)
    assert optimizer.param_groups[0]["lr"] == 0.125
    again = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    resumed = ProgressSchedule(torch.optim.lr_scheduler.ExponentialLR(again, 0.5))
    resumed.load_state_dict(schedule.state_dict())
    again.load_state_dict(optimizer.state_dict())
    again.step()
    resumed.follow(4.0, 10.0)
    assert again.param_groups[0]["lr"] == 0.0625


SCHEDULES: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)], [3]
    ),
    "lambdas": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)), lr_scheduler.LambdaLR(o, lambda n: 0.9**n)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(
        o, o.param_groups[0]["lr"], 10 * o.param_groups[0]["lr"], 4, cycle_momentum=False
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_of_the_script_goes_on_along_the_schedule_of_the_checkpoint(name: str) -> None:
    def made(rate: float) -> tuple[torch.optim.SGD, ProgressSchedule]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
        schedule = ProgressSchedule(SCHEDULES[name](optimizer))
        optimizer.step()
        return optimizer, schedule

    (peer, there), (own, here), (fresh, whole) = made(0.1), made(0.4), made(0.4)
    there.follow(2, 10.0)
    with script_hyperparameters(own, here, keep=True):
        own.load_state_dict(peer.state_dict())
        here.load_state_dict(there.state_dict())
    for iteration in range(2, 9):
        for schedule in (here, whole):
            schedule.follow(iteration, 10.0)
        assert own.param_groups[0]["lr"] == pytest.approx(fresh.param_groups[0]["lr"]), iteration


def test_a_rule_scales_the_learning_rate_within_a_step_only() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    sgd = torch.optim.SGD([{"params": [parameter], "lr": 0.1}])
    with scaled(sgd, 3.0):
        assert sgd.param_groups[0]["lr"] == pytest.approx(0.3)
    assert sgd.param_groups[0]["lr"] == 0.1
    statistics = GradientStatistics(1.0, 3.0)
    assert rule_for("auto", sgd)(4.0, statistics, 0.0) == pytest.approx(float(gain(statistics, 4.0)))
    assert rule_for("auto", torch.optim.AdamW([parameter]))(4.0, statistics, 0.0) == 2.0
    assert rule_for("linear", sgd)(4.0, statistics, 0.0) == 4.0
    assert rule_for("none", sgd)(4.0, statistics, 0.0) == 1.0


def test_legw_warms_up_longer_for_a_larger_batch() -> None:
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    rule, statistics = rule_for("legw", sgd, 10.0), GradientStatistics(1.0, 3.0)
    assert rule(1.0, statistics, 5.0) == pytest.approx(0.5)
    assert rule(4.0, statistics, 20.0) == pytest.approx(2.0 * 20 / 40)
    assert rule(4.0, statistics, 41.0) == 2.0
    with pytest.raises(OptionError, match='belongs to learning_rate_rule="legw"'):
        rule_for("linear", sgd, 10.0)
    with pytest.raises(OptionError, match="warm_up must be >= 0"):
        rule_for("legw", sgd, -1.0)


def test_progress_survives_saving() -> None:
    progress = Progress(10)
    progress.bind(95)
    progress.took(20, 1.7, DataPosition(0, 20))
    progress.left_out(10, DataPosition(0, 30))
    assert progress.epoch_end == pytest.approx(9.5 - 1.0), (
        "samples of a step that was left out are not trained again"
    )
    assert Progress.from_state(progress.state_dict(), 10) == progress


def test_what_is_left_of_the_epochs_is_told() -> None:
    progress = Progress(10)
    assert progress.forecast(3) == {}, "the data are not known yet"
    progress.bind(100)
    assert progress.forecast(3) == {"examples_left": 300.0, "examples_total": 300.0, "pace": "goodput"}
    progress.took(40, 2.5, DataPosition(0, 40))  # 40 examples that are worth 25
    assert progress.forecast(3) == {"examples_left": 275.0, "examples_total": 300.0, "pace": "goodput"}
    progress.took(60, 8.0, DataPosition(1, 0))
    progress.next_epoch()
    assert progress.forecast(3)["examples_left"] == pytest.approx(195.0)
    assert progress.forecast(1) == {}, "nothing is left"
    passes = Progress(10, unit="pass")
    passes.bind(100)
    passes.took(40, 2.5, DataPosition(0, 40))
    assert passes.forecast(2) == {"examples_left": 160.0, "examples_total": 200.0, "pace": "throughput"}


def test_rates_are_of_the_time_between_reports() -> None:
    clock = Now()
    rates = Rates(clock)
    clock.time += 100.0  # before the first step
    assert rates.add(32, 1.0, 0.25)
    assert rates.throughput == 128.0
    for _ in range(3):
        clock.time += 0.125
        assert not rates.add(10, 1.0, 0.125)
    clock.time += 0.125
    assert rates.add(10, 1.0, 0.125)
    assert (rates.throughput, rates.progress_rate) == (80.0, 8.0)


def test_rates_tell_the_tokens_of_an_example() -> None:
    clock = Now()
    rates = Rates(clock)
    assert rates.add(8, 1.0, 0.25, tokens=80.0)
    assert rates.tokens == 10.0
    for tokens in (30.0, 50.0):
        clock.time += 0.25
        reported = rates.add(4, 1.0, 0.25, tokens)
    assert reported
    assert rates.tokens == 10.0
    clock.time += 1.0
    assert rates.add(4, 1.0, 0.25)
    assert rates.tokens == 0.0


def test_tokens_of_a_step_are_those_of_its_own_samples() -> None:
    count = TokenCount().counting(sum)
    count.read([1, 2], Share(0, 2, 1.0), first=True)
    count.read([3, 4], Share(2, 4, 1.0), first=False)
    count.read([9, 9], Share(0, 2, 0.0), first=False)  # it only participates
    assert count.step == 10.0
    count.read([5], Share(4, 5, 1.0), first=True)
    assert count.step == 5.0
    count.counting(128).read(["x", "y"], Share(5, 7, 1.0), first=True)
    assert count.step == 256.0
    count.counting(None).read(["x"], Share(7, 8, 1.0), first=True)
    assert count.step == 0.0
    with pytest.raises(OptionError, match=r"tokens of a batch must be a number >= 0; got -1\.0"):
        count.counting(lambda _: -1).read([], Share(0, 1, 1.0), first=True)


# --- DDP --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(("asked", "size"), [({}, CPU_BUCKET), ({"bucket_cap_mb": 3}, 3)])
def test_gradients_are_reduced_in_small_buckets_on_processors_unless_asked_otherwise(
    asked: dict[str, Any], size: int
) -> None:
    options = Options(batch_size=8, ddp=asked)
    model = torch.nn.Linear(4, 1)
    made = prepare(
        World(size=2),
        model,
        lambda found: torch.optim.SGD(found, 0.1),
        options,
        RunSettings(),
        lambda _: None,
    )
    assert made.model.bucket_bytes_cap == size * 2**20
    assert made.model.gradient_as_bucket_view
