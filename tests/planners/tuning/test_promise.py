"""GPUs of a tuning run to the trials that promise most: ranks, and the division itself."""

from dataclasses import replace
from math import inf, log, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.scheduling import App, View, gpus_of
from ebbflow.planners.tuning.promise import ByPromise, KnownGoodput, TrialRank, rank_trials

RULE = ByPromise()
RNG = np.random.default_rng(0)


def trial(number: int, weight: float = 1.0, held: int = 0, **fields: object) -> App:
    placement = (("a", held),) if held else ()
    return App(f"t{number}", number, weight=weight, held=placement, **{"max_gpus": 8, **fields})  # type: ignore[arg-type]


def divided(apps: list[App], *sizes: int, policy: ByPromise = RULE) -> dict[str, int]:
    nodes = tuple(Node(chr(97 + at), size, 0.0, gpus=size) for at, size in enumerate(sizes))
    decision = policy.decide(View(0.0, apps, Capacity(0, nodes)), None, RNG)
    return {app: gpus_of(grant.placement) for app, grant in decision.grants.items()}


def test_a_trial_counts_by_its_rung_then_by_its_rank() -> None:
    curves = {0: {1: 0.9, 3: 0.2}, 1: {1: 0.8, 3: 0.1}, 2: {1: 0.7}, 3: {1: nan}, 4: {}}
    ranks = rank_trials(curves, (1, 3), 3, maximize=False)
    assert ranks[1] == TrialRank(3 ** (1 + 2 / 3), 3, 1, 2)
    order = sorted(ranks, key=lambda number: -ranks[number].weight)
    assert order == [1, 0, 2, 4, 3]
    assert ranks[4] == TrialRank(3**0.5)
    assert rank_trials({0: {1: 0.5}}, (1,), 3, maximize=True)[0].weight == 3**0.5, "alone it says nothing"
    assert str(ranks[0]) == "ranked 2 of 2 after epoch 3"
    population = rank_trials(curves, (1, 3), 3, maximize=False, survivors=False)
    assert population[1].weight == 3 ** (2 / 3), "a population stops nobody"
    with pytest.raises(OptionError, match="factor"):
        rank_trials(curves, (1,), 1, maximize=True)


def test_what_was_not_measured_goes_by_promise_and_what_was_where_it_is_used() -> None:
    assert divided([trial(0), trial(1, 3.0), trial(2, 2.0)], 8) == {"t0": 1, "t1": 4, "t2": 3}
    flat = KnownGoodput((10.0, 15.0, 15.0))
    apps = [trial(0), trial(1, 3.0, goodput=flat), trial(2, 2.0, goodput=KnownGoodput((10.0, 19.0, 27.0)))]
    assert divided(apps, 8) == {"t0": 3, "t1": 2, "t2": 3}
    with pytest.raises(OptionError, match="hysteresis"):
        ByPromise(hysteresis=1.0)


def test_too_few_gpus_go_to_those_that_run_then_to_the_best() -> None:
    apps = [trial(0, 5.0, min_gpus=2), trial(1, 1.0, held=2, min_gpus=2), trial(2, 9.0, min_gpus=2)]
    assert divided(apps, 4) == {"t0": 0, "t1": 2, "t2": 2}


def test_gpus_come_from_few_nodes_and_the_reason_says_what_changed() -> None:
    apps = [trial(0, 1.0), trial(1, 3.0)]
    apps[0].held, apps[1].held = (("a", 1), ("b", 3)), (("a", 1),)
    nodes = (Node("a", 4, 0.0, gpus=4), Node("b", 4, 0.0, gpus=4))
    grants = ByPromise().decide(View(0.0, apps, Capacity(0, nodes)), None, RNG).grants
    assert grants["t0"].placement == (("b", 2),)
    assert grants["t1"].placement == (("a", 4), ("b", 2))
    assert grants["t1"].reason == "scale-up 1 → 6 GPUs: promise 3, 1 of 2 trials"
    assert grants["t0"].reason == "scale-down 4 → 2 GPUs: promise 1, 2 of 2 trials"


SPEEDS = st.lists(st.integers(0, 4), min_size=7, max_size=7).map(
    lambda gains: KnownGoodput(tuple(np.cumsum([5, *gains]).astype(float).tolist()))
)


@st.composite
def trials(draw: st.DrawFn) -> tuple[list[App], int]:
    """Return trials that run or wait, on the GPUs of one node."""
    apps = []
    for number in range(draw(st.integers(1, 5))):
        least = draw(st.integers(1, 2))
        held = draw(st.integers(least, 4)) if draw(st.booleans()) else 0
        goodput = draw(SPEEDS | st.none())
        weight = float(draw(st.integers(1, 30)))
        apps.append(trial(number, weight, held, min_gpus=least, goodput=goodput))
    return apps, sum(gpus_of(app.held) for app in apps) + draw(st.integers(0, 8))


def speedup(app: App, gpus: int) -> float:
    if app.goodput is None or not gpus:
        return gpus / app.min_gpus
    found = app.goodput.best(np.ones(2), np.array([gpus, app.min_gpus]))
    return float(found[0] / found[1])


@given(trials(), st.sampled_from([0.0, 0.05, 0.5]), st.integers(1, 20), st.data())
def test_what_holds_of_every_division(
    drawn: tuple[list[App], int], hysteresis: float, more: int, data: st.DataObject
) -> None:
    apps, total = drawn
    if not total:
        return
    policy = ByPromise(hysteresis=hysteresis)
    found = divided(apps, total, policy=policy)
    assert sum(found.values()) <= total
    for app in apps:
        assert found[app.id] == 0 or app.min_gpus <= found[app.id] <= app.max_gpus
        assert found[app.id] or not app.held, "a trial that runs keeps its minimum"
    # a change is worth more than the hysteresis
    changed = [app for app in apps if app.held and found[app.id] != gpus_of(app.held)]
    if changed and all(app.held for app in apps):
        gain = sum(
            app.weight * log(speedup(app, found[app.id]) / speedup(app, gpus_of(app.held))) for app in changed
        )
        assert gain >= sum(app.weight for app in changed) * -log(1 - hysteresis) - 1e-6
    # who promises more never gets fewer, unless that lets another trial begin
    one = data.draw(st.sampled_from(apps))
    raised = [replace(app, weight=app.weight + more) if app is one else app for app in apps]
    again = divided(raised, total, policy=policy)
    if {app for app, gpus in found.items() if gpus} == {app for app, gpus in again.items() if gpus}:
        assert again[one.id] >= found[one.id]
    # once it is so, it stays so
    settled = [replace(app, held=(("a", found[app.id]),) if found[app.id] else ()) for app in apps]
    if hysteresis:
        assert divided(settled, total, policy=policy) == found


def test_weights_may_be_huge() -> None:
    apps = [trial(0, 3.0**12, held=1), trial(1, held=1)]
    assert divided(apps, 4) == {"t0": 3, "t1": 1}
    assert rank_trials({0: {1: inf}, 1: {1: 0.1}}, (1,), 2, maximize=True)[0].rank == 2, "diverged"
