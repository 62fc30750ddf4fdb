"""The policy: what its decisions say, memory, and growth by doubling."""

from dataclasses import replace

import numpy as np
import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App, View, gpus_of
from ebbflow.planners.scheduling.goodput.genetic import Genetic, Population
from ebbflow.planners.scheduling.goodput.pollux import Pollux
from tests.planners.scheduling.goodput_rounds import cluster, concave

SMALL = Genetic(population=20, generations=10)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def apps() -> list[App]:
    return [
        App("a", 0, 0.0, max_gpus=16, most_gpus=4, held=(("n01", 2), ("n00", 2)), goodput=concave(0.7)),
        App("b", 1, 0.0, max_gpus=1, most_gpus=1, held=(("n02", 1),), goodput=concave(0.7)),
        App("c", 2, 500.0, max_gpus=16),
    ]


@pytest.mark.parametrize("policy", [Pollux(), Pollux(search="genetic", genetic=SMALL)])
def test_every_app_gets_an_answer_with_a_reason(policy):
    view = View(600.0, apps(), cluster(4, 4))
    decision = policy.decide(view, None, rng())
    assert set(decision.grants) == {"a", "b", "c"}
    assert all(grant.reason for grant in decision.grants.values())
    assert gpus_of(decision.grants["b"].placement) == 1
    assert gpus_of(decision.grants["c"].placement) == 1
    assert decision.notes["fitness"] > 0
    again = policy.decide(view, None, rng())
    assert again.grants == decision.grants


def test_a_kept_placement_keeps_the_order_of_its_nodes():
    app = App("a", max_gpus=4, most_gpus=4, held=(("n01", 2), ("n00", 2)), restarts=30, goodput=concave(0.1))
    grant = Pollux().decide(View(600.0, [app], cluster(4, 4)), None, rng()).grants["a"]
    assert grant.placement == app.held
    assert grant.reason == "keeps its 4 GPUs"


def test_a_lonely_app_doubles_until_it_has_the_cluster():
    app = App("a", max_gpus=64, goodput=concave(0.9, 1.0))
    for doubled in (1, 2, 4, 8, 16, 16):
        grant = Pollux().decide(View(1e6, [app], cluster(4, 4)), None, rng()).grants["a"]
        assert gpus_of(grant.placement) == doubled
        app = replace(
            app, held=grant.placement, most_gpus=max(app.most_gpus, doubled), restarts=app.restarts + 1
        )


def test_more_apps_than_gpus():
    waiting = [App(str(i), i, 0.0, max_gpus=4) for i in range(7)]
    grants = Pollux().decide(View(600.0, waiting, cluster(2, 2)), None, rng()).grants
    assert sorted(gpus_of(g.placement) for g in grants.values()) == [0, 0, 0, 1, 1, 1, 1]
    assert sum(g.reason.startswith("pending") for g in grants.values()) == 3


def test_weights_shift_gpus():
    pair = [App(n, i, 0.0, max_gpus=8, most_gpus=8, goodput=concave(0.9, 1.0)) for i, n in enumerate("ab")]
    pair[0].weight = 9.0
    grants = Pollux().decide(View(1e6, pair, cluster(2, 4)), None, rng()).grants
    assert gpus_of(grants["a"].placement) > gpus_of(grants["b"].placement) > 0


@pytest.mark.parametrize("policy", [Pollux(), Pollux(search="genetic", genetic=SMALL)])
def test_no_apps_and_no_nodes(policy):
    assert policy.decide(View(60.0, [], cluster(2, 4)), None, rng()).grants == {}
    grants = policy.decide(View(60.0, apps()[2:], cluster(0, 4)), None, rng()).grants
    assert grants["c"].placement == ()


def test_the_genetic_search_remembers_its_population():
    policy = Pollux(search="genetic", genetic=SMALL)
    first = policy.decide(View(600.0, apps(), cluster(4, 4)), None, rng())
    assert isinstance(first.memory, Population)
    second = policy.decide(View(660.0, apps()[1:], cluster(4, 4)), first.memory, rng())
    assert set(second.grants) == {"b", "c"}


def test_an_unknown_search_is_refused():
    with pytest.raises(OptionError, match="search must be one of local, genetic; got 'magic'"):
        Pollux(search="magic")
