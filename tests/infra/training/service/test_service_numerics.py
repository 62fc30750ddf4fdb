"""Trainings over aggregators compute what one process does, whoever leaves and comes."""

import copy
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ebbflow.infra.training.prepared import Options
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.saving.data_order import DataOrder, shares
from tests.infra.training.service.team import PATIENCE, SEED, MakeOptimizer, Team, Worker, aggregators

pytestmark = pytest.mark.timeout(300)

SAMPLES, BATCH = 120, 12
BOUND = {"rtol": 2e-5, "atol": 2e-6}  # after 200 steps; torch rounds some sums of a rule once less
BOUND_16 = {
    "rtol": 2**-6,
    "atol": 2**-7,
}  # a few units in the last place: a difference flips the rounding to 16 bits
CLIP = 0.5
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, weight_decay=1e-3),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
}


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))


MODEL = _model()  # made once: workers are threads here, and share torch's random numbers


def make_model() -> torch.nn.Module:
    return copy.deepcopy(MODEL)


def make_bfloat16() -> torch.nn.Module:
    return make_model().bfloat16()


def make_data(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(2))
    return x.to(dtype), x[:, :2].sum(1, keepdim=True).sin().to(dtype)


@dataclass(frozen=True)
class OldMoments:
    """Before ``step`` the moments of ``names`` become those that they were before step ``mirrored``."""

    step: int
    mirrored: int
    names: frozenset[str]


def single_process(team: Team, worlds: list[int], old: OldMoments | None = None) -> list[torch.Tensor]:
    """Return parameters of a training in this process alone: gradients of the shares of each step, added up.

    ``worlds`` is the number of workers in each step. Parameters are float32, as master copies are.
    """
    model = team.make()
    master = copy.deepcopy(model).float()
    optimizer = team.make_optimizer(master)
    order, (x, y) = DataOrder(SAMPLES, SEED), team.data
    kept: dict[str, Any] = {}
    for step, world in enumerate(worlds):
        for name, parameter in master.named_parameters():
            if old is not None and step == old.mirrored and name in old.names:
                kept[name] = copy.deepcopy(optimizer.state[parameter])
            if old is not None and step == old.step and name in old.names:
                optimizer.state[parameter] = kept[name]
        turn, position = divmod(step * BATCH, SAMPLES)
        for parameter in master.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for (share,) in shares(position, BATCH, world, 1):
            rows = torch.from_numpy(order.indices(turn, share.start, share.stop).copy())
            loss = torch.nn.functional.mse_loss(model(x[rows]).float(), y[rows].float())
            (loss * share.weight / world).backward()
            for parameter, own in zip(master.parameters(), model.parameters(), strict=True):
                assert parameter.grad is not None
                assert own.grad is not None
                parameter.grad += own.grad.float()
                own.grad = None
        torch.nn.utils.clip_grad_norm_(master.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            for parameter, own in zip(master.parameters(), model.parameters(), strict=True):
                own.copy_(parameter)
    return [one.detach().float() for one in model.parameters()]


def check(team: Team, old: OldMoments | None = None) -> None:
    """Compare with one process, and see that each sample was used once a pass."""
    steps: dict[int, list[tuple[int, int]]] = {}
    worlds: dict[int, int] = {}
    for worker in team.workers:
        for step in worker.done:
            if step.share.weight > 0:
                steps.setdefault(step.number, []).append((step.share.start, step.share.stop))
            worlds[step.number] = step.world
    assert sorted(steps) == list(range(team.steps))
    for number, found in steps.items():
        begin = number * BATCH % SAMPLES
        used = [place for start, stop in sorted(found) for place in range(start, stop)]
        assert used == list(range(begin, begin + BATCH)), number
    expected = single_process(team, [worlds[number] for number in range(team.steps)], old)
    bound: dict[str, Any] = BOUND_16 if next(team.make().parameters()).dtype == torch.bfloat16 else BOUND
    last = [worker for worker in team.workers if worker.done and worker.done[-1].number == team.steps - 1]
    for worker in last:
        assert worker.prepared is not None
        for found, wanted in zip(worker.prepared.inner.parameters(), expected, strict=True):
            torch.testing.assert_close(
                found.detach().float(), wanted, msg=lambda text: f"{text}\nworkers by step: {worlds}", **bound
            )


def team_of(
    optimizer: str,
    *,
    steps: int,
    founders: int = 2,
    dtype: str = "float32",
    mirrors: int = 0,
    mirror_every: int = 1,
) -> Team:
    low = dtype == "bfloat16"
    return Team(
        make_bfloat16 if low else make_model,
        OPTIMIZERS[optimizer],
        make_data(getattr(torch, dtype)),
        steps,
        Options(BATCH, clip_norm=CLIP, learning_rate_rule="linear"),
        RunSettings(sync="service", adaptive=False, mirrors=mirrors, mirror_every=mirror_every),
        founders,
    )


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [("adamw", 60), *(pytest.param(one, 200, marks=pytest.mark.slow) for one in OPTIMIZERS)],
)
def test_workers_that_leave_and_come_train_as_one_process_does(
    optimizer: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is lost with a part of its gradients sent, one comes, one leaves when asked, an aggregator is lost."""
    with aggregators(monkeypatch, 2) as hosts:
        team = team_of(optimizer, steps=steps, founders=3, mirrors=1)

        def before_step(worker: Worker, step: int) -> None:
            if worker.member == 0 and step == steps * 0.4 and len(team.workers) == 3:
                team.add(Worker(team, 3, later=True))
            if worker.member == 0 and step == steps * 0.65:
                team.board.do(lambda membership: membership.retire(2))
            if worker.member == 0 and step == steps * 0.8:
                hosts[0].close()
                team.board.do(lambda membership: membership.lose_aggregator(hosts[0].name))

        team.before_step = before_step
        team.begin(w1=steps // 4)
        team.end()
    lost, comer = team.workers[1], team.workers[3]
    assert lost.done[-1].number == steps // 4 - 1
    assert comer.done[-1].number == team.steps - 1, "it trained with the others"
    assert team.workers[2].left == "this process was asked to leave the training"
    check(team)


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [("adamw", 40), *(pytest.param(one, 200, marks=pytest.mark.slow) for one in OPTIMIZERS)],
)
def test_bfloat16_gradients_update_float32_master_copies(
    optimizer: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with aggregators(monkeypatch, 1):
        team = team_of(optimizer, steps=steps, dtype="bfloat16")
        team.begin()
        team.end()
    check(team)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_moments_are_those_of_the_last_mirrored_round_after_the_loss_of_an_aggregator(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are those of the workers; of tensors on the lost aggregator the moments lack four gradients."""
    held: set[str] = set()
    with aggregators(monkeypatch, 2) as hosts:
        team = team_of(optimizer, steps=40, founders=2, mirrors=1, mirror_every=7)

        def before_step(worker: Worker, step: int) -> None:
            if worker.member != 0 or step != 25:
                return
            for one in team.workers:  # all have the parameters of the step
                service = one.prepared.service if one.prepared is not None else None
                assert service is not None
                end = time.monotonic() + PATIENCE
                while service.number < step:
                    assert time.monotonic() < end
                    time.sleep(0.01)
                service.settle()
                held.update(name for name, own in service.agent.table.items() if own[0] == hosts[0].name)
            hosts[0].close()
            team.board.do(lambda membership: membership.lose_aggregator(hosts[0].name))

        team.before_step = before_step
        team.begin()
        team.end()
    assert held
    assert held < set(dict(MODEL.named_parameters()))
    assert team.posted == [("moments", {"rounds": 4})]
    check(team, OldMoments(25, 21, frozenset(held)))


def test_checkpoints_hold_what_aggregators_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments of a state are those of torch's optimizer after the same steps."""
    with aggregators(monkeypatch, 1):
        team = team_of("adam", steps=20, founders=1)
        team.begin()
        team.end()
    prepared = team.workers[0].prepared
    assert prepared is not None
    model = team.make()
    optimizer = team.make_optimizer(model)
    order, (x, y) = DataOrder(SAMPLES, SEED), team.data
    for step in range(20):
        turn, position = divmod(step * BATCH, SAMPLES)
        rows = torch.from_numpy(order.indices(turn, position, position + BATCH).copy())
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    found, wanted = prepared.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    for index, state in wanted.items():
        assert int(found[index]["step"]) == 20
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found[index][name], state[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("make_optimizer", "said"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), "must be torch.optim.SGD, Adam or AdamW"),
        (lambda m: torch.optim.Adam(m.parameters(), amsgrad=True), "got Adam with amsgrad"),
        (
            lambda m: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]),
            "must train parameters of the model alone",
        ),
        (lambda m: torch.optim.SGD(m.double().parameters()), "'0.weight' is of torch.float64"),
    ],
)
def test_what_aggregators_cannot_train_is_refused(
    make_optimizer: MakeOptimizer, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with aggregators(monkeypatch, 1):
        team = team_of("sgd", steps=1, founders=1)
        team.make_optimizer = make_optimizer
        team.begin()
        with pytest.raises(OptionError, match=said):
            team.end()
