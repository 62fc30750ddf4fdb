"""A plan as ranks get it: its pieces do what the collective does, and its text is read again."""

import json

import numpy as np
import pytest

from ebbflow.planners.communication.algebra import all_reduce, all_to_all, check_cover
from ebbflow.planners.communication.costs import Choice, LinkModel, option_of
from ebbflow.planners.communication.order import MotifQueue
from ebbflow.planners.communication.plan import CommunicationPlan, motifs_of, pieces_of, plan_of
from ebbflow.planners.communication.schedule import schedule
from ebbflow.planners.communication.search import metropolis_search
from ebbflow.planners.communication.workloads import A2, dlrm_dag
from ebbflow.planners.errors import OptionError


@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["whole", "ring", "tree", "hierarchical"])
def test_pieces_of_an_all_reduce_are_the_all_reduce(ranks: int, count: int, algorithm: str) -> None:
    for per_node in (n for n in range(1, ranks + 1) if ranks % n == 0):
        pieces = pieces_of("all-reduce", ranks, Choice(algorithm, count), per_node=per_node)
        assert len(pieces) == count
        assert check_cover(all_reduce(ranks, pieces[0].units), motifs_of(pieces)) == []


@pytest.mark.parametrize(
    ("algorithm", "count"), [("whole", 1), ("whole", 3), ("spline", 1), ("spline", 2), ("spline", 4)]
)
def test_pieces_of_an_all_to_all_are_the_all_to_all(algorithm: str, count: int) -> None:
    pieces = pieces_of("all-to-all", 8, Choice(algorithm, count))
    assert len(pieces) == count
    assert check_cover(all_to_all(8, pieces[0].units), motifs_of(pieces)) == []


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("all-to-all", Choice("ring")),
        ("all-reduce", Choice("spline", 2)),
        ("all-to-all", Choice("spline", 9)),
    ],
)
def test_what_cannot_be_carried_out_so_is_refused(kind: str, choice: Choice) -> None:
    with pytest.raises(OptionError, match=f"an {kind} among 8 ranks cannot be carried out as"):
        pieces_of(kind, 8, choice)  # type: ignore[arg-type]


def searched() -> CommunicationPlan:
    dag = dlrm_dag(A2, 4)
    models = {0: LinkModel(), 1: LinkModel(per_byte=1 / 6e9)}
    choices = {
        "all-reduce": [Choice(a, p, c) for a in ("ring", "tree") for p in (1, 2) for c in (0, 1)],
        "all-to-all": [Choice("spline", p, c) for p in (1, 2, 4) for c in (0, 1)],
    }
    by_name = {op.name: {one.name: one for one in choices[op.kind]} for op in dag.comm}
    options = {
        op.name: [option_of(op, one, models[one.channel]) for one in by_name[op.name].values()]
        for op in dag.comm
    }
    early = dag.prefetched()
    found = metropolis_search(
        options,
        lambda plan: schedule(early, plan).period,
        rng=np.random.default_rng(0),
        clock=iter(range(10**6)).__next__,
    )
    chosen = {name: by_name[name][option.name] for name, option in found.plan.items()}
    return plan_of(early, found.plan, chosen, schedule(early, found.plan), version=3, plain_seconds=1.0)


def test_a_searched_plan_is_read_again_and_launches_every_piece() -> None:
    plan = searched()
    again = CommunicationPlan.from_json(plan.to_json())
    assert (again, again.digest) == (plan, plan.digest)
    assert plan.order.ahead == {"data-prep"}
    queue, came = MotifQueue(plan.order), []
    came += queue.submit("data-prep")  # the first batch's, before the first iteration
    for _ in range(3):
        for op in plan.collectives:
            came += queue.submit(op)
    launched = [(one.op, one.motif) for one in came]
    for op, pieces in plan.pieces.items():
        times = 4 if op == "data-prep" else 3
        assert [launched.count((op, k)) for k in range(len(pieces))] == [times] * len(pieces)


def test_a_plan_of_another_training_is_refused() -> None:
    plan = searched()
    own = {name: (one.kind, one.bytes) for name, one in plan.collectives.items()}
    assert plan.problem(4, own) == ""
    assert plan.problem(8, own) == "the plan is for 4 ranks, not 8"
    assert "as ar-top, the training nothing" in plan.problem(
        4, {n: one for n, one in own.items() if n != "ar-top"}
    )
    assert "the plan has nothing as x, the training all-reduce of 8 bytes" in plan.problem(
        4, {**own, "x": ("all-reduce", 8.0)}
    )


@pytest.mark.parametrize(("ranks", "pieces"), [(10**9, 1), (4, 10**9)])
def test_a_plan_that_would_fill_the_memory_is_refused(ranks: int, pieces: int) -> None:
    said = json.loads(searched().to_json()) | {"ranks": ranks}
    said["collectives"][0][4] = pieces
    with pytest.raises(OptionError, match="ranks times pieces must be 1048576 at most"):
        CommunicationPlan.from_json(json.dumps(said))


@pytest.mark.parametrize("change", ["format", "order", "kind", "piece", "text"])
def test_a_text_that_is_no_plan_is_refused(change: str) -> None:
    said = json.loads(searched().to_json())
    match change:
        case "format":
            said["format"] = 9
        case "order":
            said["order"] = said["order"][1:]
        case "kind":
            said["collectives"][0][1] = "shout"
        case "piece":
            said["collectives"][0][4] = 77
        case "text":
            said = "plan"
    with pytest.raises(OptionError):
        CommunicationPlan.from_json(json.dumps(said))
