"""Profiles of ranks make the training that is planned, measured tables are read again, and a search uses both."""

import json
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from ebbflow.planners.communication.costs import Choice, LinkModel, TableModel
from ebbflow.planners.communication.dag import CommOp, Dependency
from ebbflow.planners.communication.measured import MeasuredLinks, best_ranges, choice_of, fit_links, rising
from ebbflow.planners.communication.planning import choices_of, problem_of, search_plan
from ebbflow.planners.communication.recorded import (
    Block,
    Iteration,
    RankProfile,
    RecordedTraining,
    Submission,
    Wait,
    median_profile,
    merge_profiles,
)
from ebbflow.planners.errors import OptionError

MIB = float(2**20)


def iteration(scale: float = 1.0, buckets: int = 4, size: float = MIB) -> Iteration:
    names = [f"bucket/{k}" for k in range(buckets)]
    blocks = [Block("forward", 0.010 * scale), *(Block(f"before {name}", 0.005 * scale) for name in names)]
    blocks += [Block("agreement", 0.002 / scale, shared=True), Block("end", 0.003 * scale)]
    return Iteration(
        tuple(blocks),
        tuple(Submission(name, "all-reduce", size, f"before {name}") for name in names),
        tuple(Wait(name, "agreement") for name in names),
        0.05 * scale,
    )


def recorded(ranks: int = 4) -> RecordedTraining:
    return merge_profiles(RankProfile(rank, ranks, 5, iteration(1 + rank / 10)) for rank in range(ranks))


def links(ranks: int = 4, channels: int = 2, contention: float = 1.0) -> MeasuredLinks:
    model = LinkModel(alpha=50e-6, per_byte=1 / 0.2e9)
    rows = {}
    for choice in choices_of("all-reduce", ranks, channels, MIB):
        rows["all-reduce", ranks, choice.name] = tuple(
            (size, model.seconds(CommOp("x", "all-reduce", size, ranks), choice))
            for size in (1e4, MIB, 8 * MIB)
        )
    return MeasuredLinks(ranks, channels, TableModel(rows), contention)  # type: ignore[arg-type]


def test_a_profile_is_the_median_of_the_iterations_that_are_alike() -> None:
    some = [iteration(s) for s in (1.0, 3.0, 1.2, 1.1)] + [iteration(buckets=3)]
    found = median_profile(1, 2, some)
    assert found.iterations == 4
    assert found.iteration.blocks[0] == Block("forward", pytest.approx(0.0115))  # type: ignore[arg-type]
    assert RankProfile.from_json(found.to_json()) == found


def test_a_training_whose_iterations_differ_is_refused() -> None:
    with pytest.raises(OptionError, match="got none"):
        median_profile(0, 2, [])
    some = [iteration(buckets=k) for k in (1, 2, 3, 1, 2, 3)]
    with pytest.raises(OptionError, match="must submit the same collectives; got 2 alike of 6"):
        median_profile(0, 2, some)


def test_blocks_last_as_long_as_on_the_slowest_rank_and_agreements_as_on_the_last() -> None:
    found = recorded()
    seconds = {one.name: one.seconds for one in found.dag.compute}
    assert seconds["forward"] == pytest.approx(0.013)
    assert seconds["agreement"] == pytest.approx(0.002 / 1.3)
    assert Dependency("before bucket/1", "bucket/1") in found.dag.dependencies
    assert Dependency("bucket/3", "agreement") in found.dag.dependencies
    again = RecordedTraining.from_json(found.to_json())
    assert (again, again.fingerprint) == (found, found.fingerprint)


def test_what_is_submitted_as_an_iteration_begins_follows_the_one_before() -> None:
    one = iteration(buckets=1)
    one = replace(one, submissions=(*one.submissions, Submission("data", "all-to-all", 8.0, "")))
    found = merge_profiles([RankProfile(0, 1, 3, one)])
    assert Dependency("end", "data", 1) in found.dag.dependencies


def test_profiles_that_do_not_belong_together_are_refused() -> None:
    one = RankProfile(0, 2, 5, iteration())
    with pytest.raises(OptionError, match=r"of all ranks of one training, each once; got ranks \[0\]"):
        merge_profiles([one])
    with pytest.raises(OptionError, match=r"got ranks \[0, 0\]"):
        merge_profiles([one, one])
    with pytest.raises(
        OptionError, match=r"rank 1 submits other collectives .* it has .* of 3 bytes\) where rank 0"
    ):
        merge_profiles([one, RankProfile(1, 2, 5, iteration(size=3.0))])


@pytest.mark.parametrize("change", ["format", "fingerprint", "compute", "seconds", "text", "kind"])
def test_a_text_that_is_no_recorded_training_is_refused(change: str) -> None:
    said = json.loads(recorded().to_json())
    match change:
        case "format":
            said["format"] = 9
        case "fingerprint":
            said["comm"][0][2] = 17.0
        case "compute":
            said["compute"] = []
        case "seconds":
            said["seconds"] = -1
        case "kind":
            said["comm"][0][1] = "gossip"
    text = "{" if change == "text" else json.dumps(said)
    with pytest.raises(OptionError):
        RecordedTraining.from_json(text)
    with pytest.raises(OptionError):
        RankProfile.from_json(text)
    with pytest.raises(OptionError):
        MeasuredLinks.from_json(text)


def test_measured_links_are_read_again_and_say_which_channels_to_use() -> None:
    found = links()
    assert MeasuredLinks.from_json(found.to_json()) == found
    assert found.choices("all-reduce")[0] == Choice()
    assert {one.channel for one in found.choices("all-reduce")} == {0, 1}
    assert {one.channel for one in links(contention=1.9).choices("all-reduce")} == {0}
    with pytest.raises(OptionError, match="got none"):
        MeasuredLinks(2, 1, TableModel({}))
    with pytest.raises(OptionError, match="finite contention > 0; got 2, 0, 1"):
        MeasuredLinks(2, 0, found.table)


@pytest.mark.parametrize("name", ["ring", "ring/x@0", "ring/0@0", "ring/1@-1", ""])
def test_a_choice_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="a choice must"):
        choice_of(name)


def test_latency_and_bandwidth_are_fitted_from_rings() -> None:
    model = LinkModel(alpha=80e-6, per_byte=1 / 1e8)
    sizes = (1e3, 1e5, 1e6, 1e7)
    found = fit_links(4, [(size, model.ring(4, size)) for size in sizes])
    assert found.alpha == pytest.approx(model.alpha)
    assert found.per_byte == pytest.approx(model.per_byte)
    assert fit_links(2, [(1, 1e-3), (10, 0.9e-3)]).per_byte == 0
    steep = fit_links(2, [(1e6, 1e-3), (1e7, 2e-2)])
    assert steep.alpha == 0
    assert steep.per_byte > 0
    with pytest.raises(OptionError, match="2 ranks and 2 sizes or more; got 4 ranks and 1 points"):
        fit_links(4, [(1.0, 1.0)])
    with pytest.raises(OptionError, match="above 0 s"):
        fit_links(4, [(1.0, 0.0), (2.0, 1.0)])


def test_a_larger_collective_is_no_faster_than_a_smaller_one() -> None:
    assert rising([(1, 1.0), (2, 2.0), (4, 4.0)]) == ((1, 1.0), (2, 2.0), (4, 4.0))
    assert rising([(1, 1.0), (2, 8.0), (4, 3.0), (8, 4.0), (16, 9.0)]) == (
        (1, 1.0),
        (2, 5.0),
        (4, 5.0),
        (8, 5.0),
        (16, 9.0),
    )
    assert rising([]) == ()


def test_ranges_say_where_one_choice_takes_over_from_another() -> None:
    model = LinkModel(alpha=1e-3, per_byte=1 / 1e8, launch=0)
    sizes = np.geomspace(1e3, 1e7, 9)
    rows = {
        ("all-reduce", 8, f"{name}/1@0"): tuple((float(s), getattr(model, name)(8, s)) for s in sizes)
        for name in ("ring", "tree")
    }
    found = best_ranges(MeasuredLinks(8, 1, TableModel(rows)), "all-reduce")  # type: ignore[arg-type]
    assert [one.choice for one in found] == ["tree/1@0", "ring/1@0"]
    assert found[1].low == pytest.approx(model.crossover(8), rel=0.1)
    assert best_ranges(links(), "all-to-all") == ()


def test_a_search_uses_what_was_recorded_and_measured() -> None:
    problem = problem_of(
        recorded(), links(), rng=np.random.default_rng(0), clock=count().__next__, seconds=500
    )
    found = search_plan(problem, version=7)
    assert found.plan.version == 7
    assert set(found.plan.collectives) == {f"bucket/{k}" for k in range(4)}
    assert {one.choice.channel for one in found.plan.collectives.values()} == {0, 1}
    assert 0.05 < found.gain < 0.9  # two channels carry what one did
    assert found.plan.problem(4, {f"bucket/{k}": ("all-reduce", MIB) for k in range(4)}) == ""


def test_what_cannot_be_planned_is_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(OptionError, match="measured among 2 ranks, the training has 4"):
        problem_of(recorded(), links(2), rng=rng, clock=count().__next__)
    with pytest.raises(OptionError, match="must name collectives of the training; got 'x'"):
        problem_of(recorded(), links(), rng=rng, clock=count().__next__, hand_order=["x"])
    problem = problem_of(recorded(), links(), rng=rng, clock=count().__next__)
    with pytest.raises(OptionError, match=r"a system must be one of FIFO.*; got 'best'"):
        search_plan(problem, version=1, system="best")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="has nothing to plan"):
        search_plan(replace(problem, dag=replace(problem.dag, comm=(), dependencies=())), version=1)


def test_choices_of_a_kind() -> None:
    assert choices_of("all-reduce", 4, 1)[0] == Choice()
    assert {one.algorithm for one in choices_of("all-reduce", 2, 1)} == {"whole", "ring"}
    assert {one.pieces for one in choices_of("all-reduce", 4, 1, largest=130_000)} == {1}
    assert {one.pieces for one in choices_of("all-to-all", 8, 1)} == {1, 2, 4, 8}
    assert [one.pieces for one in choices_of("all-to-all", 3, 1)] == [1, 2]
    assert choices_of("broadcast", 4, 2) == (Choice(), Choice(channel=1))


@pytest.mark.parametrize(("faster", "chosen"), [(0.999, "whole/1@0"), (0.5, "ring/1@0")])
def test_what_no_prediction_tells_apart_takes_the_librarys_own_way(faster: float, chosen: str) -> None:
    sizes = (1e3, 1e7)
    seconds = [(size, 1e-4 + size / 1e7) for size in sizes]
    table: dict[tuple[str, int, str], tuple[tuple[float, float], ...]] = {
        ("all-reduce", 4, "whole/1@0"): tuple(seconds),
        ("all-reduce", 4, "ring/1@0"): tuple((size, faster * some) for size, some in seconds),
    }
    measured = MeasuredLinks(4, 1, TableModel(table))  # type: ignore[arg-type]
    problem = problem_of(recorded(), measured, rng=np.random.default_rng(0), clock=count().__next__)
    assert {one.name for one in problem.solve("Syndicate").plan.values()} == {"ring/1@0"}
    found = search_plan(problem, version=1)
    assert {one.choice.name for one in found.plan.collectives.values()} == {chosen}
    assert (found.gain == 0) == (chosen == "whole/1@0")
