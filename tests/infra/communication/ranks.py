"""What one rank of a gloo world does in the tests of planned communication; run as a module with the world's size."""

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.infra.communication.all_to_all import Exchange, Submit
from ebbflow.infra.communication.channels import Channels, OrderError
from ebbflow.infra.communication.control import PlanningSettings
from ebbflow.infra.communication.ddp_hook import PlannedReduction, register
from ebbflow.infra.communication.enforcer import Enforcer
from ebbflow.infra.communication.measuring import Sweep, measure
from ebbflow.infra.communication.payloads import Exchanged, Payload, Summed
from ebbflow.infra.communication.plain import PlainCollectives
from ebbflow.infra.communication.planned import PlannedCommunication
from ebbflow.infra.errors import TrainingError
from ebbflow.planners.communication.costs import Choice
from ebbflow.planners.communication.measured import MeasuredLinks, fit_links
from ebbflow.planners.communication.order import LaunchOrder
from ebbflow.planners.communication.plan import CommunicationPlan, PlannedCollective, pieces_of
from ebbflow.planners.communication.planning import choices_of
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.errors import OptionError
from tests.infra.training.worlds import fork_world

SIZES = (0, 1, 7, 129)
TYPES = (torch.int64, torch.float32, torch.bfloat16)


def plan_of(
    ranks: int,
    collectives: dict[str, PlannedCollective],
    order: Sequence[tuple[str, int]] | None = None,
    version: int = 1,
    ahead: Sequence[str] = (),
) -> CommunicationPlan:
    pieces = {name: len(pieces_of(one.kind, ranks, one.choice)) for name, one in collectives.items()}
    listed = list(order or [(name, k) for name, count in pieces.items() for k in range(count)])
    made = LaunchOrder.in_order((name, k, collectives[name].choice.channel) for name, k in listed)
    return CommunicationPlan(
        version, ranks, collectives, LaunchOrder(made.numbers, made.channels, frozenset(ahead)), 1.0, 1.0
    )


def choices(kind: str, ranks: int) -> list[Choice]:
    """Return every way to carry out a collective among so many ranks."""
    found = []
    for algorithm in ("whole", "ring", "tree", "hierarchical", "spline"):
        for pieces in (1, 3, ranks):
            try:
                pieces_of(kind, ranks, Choice(algorithm, pieces))  # type: ignore[arg-type]
            except OptionError:
                continue
            found.append(Choice(algorithm, pieces))
    return list(dict.fromkeys(found))


def every_option(rank: int) -> None:
    """Compare each option, size and type with the plain collective."""
    ranks, channels = dist.get_world_size(), Channels(2)
    for choice in choices("all-reduce", ranks):
        for per_node in (
            {n for n in (1, 2, ranks) if ranks % n == 0} if choice.algorithm == "hierarchical" else {1}
        ):
            pieces = pieces_of("all-reduce", ranks, choice, per_node=per_node)
            for size in SIZES if ranks < 8 else SIZES[-1:]:
                for kind in TYPES if ranks < 8 else TYPES[:1]:
                    own = torch.arange(size).mul(rank + 1).remainder(13).to(kind)
                    plain = own.clone()
                    dist.all_reduce(plain)
                    mine = own.clone()
                    for k, piece in enumerate(pieces):
                        channels.run(k % 2, piece, Summed(mine))
                    assert torch.equal(mine, plain), (choice, size, kind, mine, plain)
    for choice in choices("all-to-all", ranks):
        pieces = pieces_of("all-to-all", ranks, choice)
        for width in (0, 1, 5):
            rows = [[(width * (a + 2 * b + 1)) % 23 for b in range(ranks)] for a in range(ranks)]
            sent_rows, received_rows = rows[rank], [rows[a][rank] for a in range(ranks)]
            sent = torch.arange(sum(sent_rows)) + 1000 * rank
            plain = torch.empty(sum(received_rows), dtype=sent.dtype)
            dist.all_to_all_single(plain, sent, received_rows, sent_rows)
            mine = torch.full_like(plain, -1)
            for k, piece in enumerate(pieces):
                channels.run(k % 2, piece, Exchanged(sent, mine, sent_rows, received_rows))
            assert torch.equal(mine, plain), (choice, width, mine, plain)
    channels.close()


def any_order(rank: int) -> None:
    """Submit in another order and at another pace on every rank; all sums are right."""
    ranks = dist.get_world_size()
    plan = plan_of(
        ranks,
        {
            "a": PlannedCollective("all-reduce", 1.0, Choice("ring", 2)),
            "b": PlannedCollective("all-reduce", 1.0, Choice("whole", 1, 1)),
            "c": PlannedCollective("all-reduce", 1.0, Choice("tree", 3)),
        },
        [("c", 0), ("a", 1), ("b", 0), ("c", 2), ("a", 0), ("c", 1)],
    )
    channels = Channels(2)
    enforcer = Enforcer(plan, channels, verify=True)
    drawn = random.Random(rank)
    for iteration in range(4):
        futures = []
        for op in drawn.sample("abc", 3):
            time.sleep(drawn.random() * 0.01)
            tensor = torch.full((37,), (rank + 1) * (iteration + 1) * (1 + "abc".index(op)))
            futures.append((op, enforcer.submit(op, Summed(tensor))))
        for op, future in futures:
            found = future.wait()
            want = sum(range(1, ranks + 1)) * (iteration + 1) * (1 + "abc".index(op))
            assert isinstance(found, Summed)
            assert torch.equal(found.tensor, torch.full((37,), want)), (op, found.tensor)
    assert enforcer.waited() >= 0
    enforcer.close()
    channels.close()


def wrong_order(rank: int) -> None:
    """Give one rank another order: what differs is found, and no sum is wrong."""
    ranks = dist.get_world_size()
    collectives = {name: PlannedCollective("all-reduce", 1.0, Choice("whole")) for name in ("a", "b")}
    order = [("a", 0), ("b", 0)] if rank else [("b", 0), ("a", 0)]
    channels = Channels(1)
    enforcer = Enforcer(plan_of(ranks, collectives, order), channels, verify=True)
    a, b = torch.ones(3), torch.ones(3)
    futures = [enforcer.submit("a", Summed(a)), enforcer.submit("b", Summed(b))]
    for future in futures:
        with pytest.raises(Exception, match="ranks launch different pieces on channel 0"):
            future.wait()
    assert torch.equal(a, torch.ones(3))
    assert torch.equal(b, torch.ones(3))
    with pytest.raises(TrainingError, match="communication has failed") as failed:
        enforcer.submit("a", Summed(a))
    assert isinstance(failed.value.__cause__, OrderError)
    enforcer.close()
    channels.close()


def network() -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 17), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(17, 3))


def trained(rank: int, planned: bool, steps: int = 50) -> list[Tensor]:
    """Train a DDP model, by DDP alone or by plans that change, and return losses, gradients and parameters."""
    ranks = dist.get_world_size()
    channels, plain, enforcers = Channels(2), PlainCollectives(), []
    model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001)  # type: ignore[no-untyped-call]
    noted = _Noted(plain.submit)
    reduction = PlannedReduction(noted, ranks)
    if planned:
        register(model, reduction)
    for _ in range(3):  # DDP builds its buckets anew after the first pass
        model(torch.ones(2, 9)).sum().backward()
    reduction.submit = plain.submit
    for version, (algorithm, pieces) in enumerate((("ring", 2), ("tree", 1)) if planned else (), start=1):
        collectives = {
            name: PlannedCollective("all-reduce", size, Choice(algorithm, pieces, k % 2))
            for k, (name, size) in enumerate(sorted(noted.sizes.items()))
        }
        backwards = [(name, k) for name in reversed(collectives) for k in range(pieces)]
        enforcers.append(Enforcer(plan_of(ranks, collectives, backwards, version), channels))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    drawn = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(steps):
        if planned and step in (steps // 5, steps // 2):  # from plain to a plan, and to another one
            reduction.submit = enforcers[step == steps // 2].submit
        x = torch.randn(8, 9, generator=drawn)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    for one in enforcers:
        one.close()
    channels.close()
    parameters = list(model.parameters())
    return [torch.stack(losses), *(p.grad.clone() for p in parameters), *(p.detach() for p in parameters)]


class _Noted:
    """Takes note of collectives and their bytes as they are submitted; a bucket's last size counts."""

    def __init__(self, submit: Submit) -> None:
        self._submit, self.sizes = submit, dict[str, float]()

    def __call__(self, op: str, payload: Payload) -> "torch.futures.Future[Payload]":
        assert isinstance(payload, Summed)
        self.sizes[op] = float(payload.tensor.nbytes)
        return self._submit(op, payload)


def same_training(rank: int) -> None:
    plain, planned = trained(rank, planned=False), trained(rank, planned=True)
    for one, other in zip(plain, planned, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def exchanged_gradients(rank: int) -> None:
    """Compare values and gradients of the all-to-all pair with those of one process that has all rows."""
    ranks = dist.get_world_size()
    rows = [[1 + (a + 2 * b) % 3 for b in range(ranks)] for a in range(ranks)]
    collectives = {
        "emb-fwd": PlannedCollective("all-to-all", 8.0, Choice("spline", ranks)),
        "emb-bwd": PlannedCollective("all-to-all", 8.0, Choice("whole", 2, 1)),
    }
    channels = Channels(2)
    enforcer = Enforcer(plan_of(ranks, collectives), channels)
    tensors = [
        torch.arange(sum(rows[a]), dtype=torch.float64).add(10 * a).requires_grad_() for a in range(ranks)
    ]
    for _ in range(2):
        own = tensors[rank].detach().clone().requires_grad_()
        exchange = Exchange(enforcer.submit, "emb-fwd", "emb-bwd")
        token = exchange.request(own * 2, rows[rank], [rows[a][rank] for a in range(ranks)])
        between = torch.ones(3).sum()  # compute while it is on its way
        got = exchange.wait(token)
        (got.pow(3).sum() * (rank + 1) + between).backward()
        whole = [one.detach().clone().requires_grad_() for one in tensors]
        cut = [(one * 2).split(rows[a]) for a, one in enumerate(whole)]
        outs = [torch.cat([cut[a][b] for a in range(ranks)]) for b in range(ranks)]
        sum((one.pow(3).sum() * (b + 1) for b, one in enumerate(outs)), torch.zeros(())).backward()
        assert torch.equal(got.detach(), outs[rank].detach())
        assert own.grad is not None
        assert whole[rank].grad is not None
        torch.testing.assert_close(own.grad, whole[rank].grad)
    enforcer.close()
    channels.close()


def measured_links(rank: int) -> None:
    """Sweep over sizes and options: all ranks find the same, each option is there or was left out whole."""
    ranks, channels = dist.get_world_size(), Channels(2)
    choices = {
        "all-reduce": choices_of("all-reduce", ranks, 2, 2**18),
        "all-to-all": choices_of("all-to-all", ranks, 1),
    }
    sizes = {"all-reduce": (4, 4096, 2**18), "all-to-all": (64, 4096)}
    found = measure(channels, Sweep(sizes, choices, seconds=30.0, repeats=2))  # type: ignore[arg-type]
    told: list[object] = [None] * ranks
    dist.all_gather_object(told, found.to_json())
    assert len(set(told)) == 1, told
    assert MeasuredLinks.from_json(found.to_json()) == found
    assert {name for kind, _, name in found.table.rows if kind == "all-reduce"} == {
        one.name for one in choices["all-reduce"]
    }
    assert all(seconds > 0 for points in found.table.rows.values() for _, seconds in points)
    assert found.contention > 0.2
    assert fit_links(ranks, found.table.rows["all-reduce", ranks, "whole/1@0"]).per_byte >= 0
    short = measure(channels, Sweep(sizes, choices, seconds=1e-9))  # type: ignore[arg-type]
    assert {name for _, _, name in short.table.rows} == {"whole/1@0"}
    channels.close()


def elastic(
    rank: int,
    planned: bool,
    settings: PlanningSettings,
    *,
    until: Callable[[list[dict[str, object]], PlannedCommunication], bool],
    meddle: Callable[[int, PlannedCommunication], None] = lambda step, one: None,
    steps: int = 50,
    name: str = "",
) -> tuple[list[Tensor], list[dict[str, object]]]:
    """Train by DDP or by what is planned meanwhile; the planned one continues until ``until``, ``steps`` at least."""
    ranks, told = dist.get_world_size(), list[dict[str, object]]()
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    one = PlannedCommunication.start(settings, told.append, timeout=6.0, store=store) if planned else None
    model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001)  # type: ignore[no-untyped-call]
    if one is not None:
        register(model, PlannedReduction(one.submit, ranks))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    drawn = torch.Generator().manual_seed(rank)
    losses: list[Tensor] = []
    seen: list[Tensor] = []  # gradients of each step
    step, ended = 0, time.monotonic() + 150
    while True:
        if one is not None:
            one.begin()
        loss = model(torch.randn(8, 9, generator=drawn)).square().mean()
        optimizer.zero_grad()
        if one is not None:
            one.forward_done()
        loss.backward()
        if one is not None:
            one.reduced()
            meddle(step, one)
        enough = one is None or until(told, one) if rank == 0 else False
        gradients = [p.grad for p in model.parameters()]
        finite = all(bool(g.isfinite().all()) for g in gradients if g is not None)
        said = [*(one.votes() if one else []), float(enough), float(not finite)]
        summed = torch.tensor(said, dtype=torch.float64)
        dist.all_reduce(summed)
        if one is not None:
            one.settle(summed[: one.width].tolist())
        if summed[-1] == 0:
            optimizer.step()
        step += 1
        losses.append(loss.detach())
        seen.append(torch.cat([g.flatten() for g in gradients if g is not None]))
        if step >= steps and summed[-2] > 0:
            break
        assert time.monotonic() < ended, (told, one.switch.version if one else None)
        if one is not None:
            time.sleep(0.005)
    if one is not None:
        one.close()
    return [torch.stack(losses), torch.stack(seen), *(p.detach() for p in model.parameters())], told


ANY_PLAN = PlanningSettings(measure_seconds=0.5, search_seconds=0.2, min_gain=-1e9, max_slowdown=1e9)


def committed_training(rank: int) -> None:
    """A plan is found, committed and run by all ranks at once; loss, gradients and parameters are plain DDP's."""
    changed: list[int] = []

    def note(step: int, one: PlannedCommunication) -> None:
        if one.switch.version == 1:
            changed.append(step)

    got, told = elastic(rank, True, ANY_PLAN, until=lambda *_: len(changed) >= 50, meddle=note, name="a")
    plain, _ = elastic(rank, False, ANY_PLAN, until=lambda *_: True, steps=len(got[0]))
    everywhere: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, changed[0])
    assert len(set(everywhere)) == 1, everywhere
    for one, other in zip(plain, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    if rank == 0:
        assert [said["state"] for said in told] == ["profiled", "committed", "plan"], told
        assert RecordedTraining.from_json(str(told[0]["training"])).ranks == dist.get_world_size()
        assert MeasuredLinks.from_json(str(told[0]["links"])).ranks == dist.get_world_size()
        assert told[1]["bars"]
        assert set(told[1]["choices"]) == {"bucket/0", "bucket/1"}  # type: ignore[call-overload]
    else:
        assert told == []


def worthless_plan(rank: int) -> None:
    """No plan saves as much as is asked for: plain collectives stay, with the reason."""
    settings = replace(ANY_PLAN, min_gain=0.999)
    _, told = elastic(rank, True, settings, until=lambda told, one: len(told) > 1, name="b")
    if rank == 0:
        assert [said["state"] for said in told] == ["profiled", "ddp"]
        assert "less than 99.9%" in str(told[1]["reason"])


def slower_plan(rank: int) -> None:
    """A plan whose iterations turn out longer than plain ones is dropped on all ranks."""

    def slow(step: int, one: PlannedCommunication) -> None:
        time.sleep(0.02 if one.switch.version else 0.0)

    settings = replace(ANY_PLAN, max_slowdown=0.05)
    _, told = elastic(
        rank, True, settings, until=lambda told, one: one.switch.returned, meddle=slow, name="c"
    )
    if rank == 0:
        assert [said["state"] for said in told] == ["profiled", "committed", "plan", "ddp"]
        assert "ms with the plan" in str(told[-1]["reason"])


def broken_channel(rank: int) -> None:
    """A channel breaks on one rank in the middle of a plan: that step is dropped, and all go on without the plan."""
    broken: list[int] = []

    def breaking(step: int, one: PlannedCommunication) -> None:
        if one.switch.version == 1 and rank == 1 and not broken:
            broken.append(step)

            def run(*given: object) -> None:
                raise RuntimeError("the cable was pulled")

            one._channels.run = run  # type: ignore[method-assign]

    _, told = elastic(
        rank,
        True,
        ANY_PLAN,
        until=lambda told, one: one.switch.returned and told[-1]["state"] == "ddp",
        meddle=breaking,
        name="d",
    )
    if rank == 0:
        assert [said["state"] for said in told] == ["profiled", "committed", "plan", "ddp"]
        assert "the cable was pulled" in str(told[-1]["reason"]) or "imed out" in str(told[-1]["reason"]), (
            told
        )


def changing_collectives(rank: int) -> None:
    """Iterations that submit now this, now that cannot be planned: plain collectives stay, with the reason."""

    def extra(step: int, one: PlannedCommunication) -> None:
        one.submit(f"extra/{step % 5}", Summed(torch.ones(step % 7 + 1))).wait()

    _, told = elastic(rank, True, ANY_PLAN, until=lambda told, one: bool(told), meddle=extra, name="e")
    if rank == 0:
        assert "must submit the same collectives" in str(told[-1]["reason"])


PARTS = {
    one.__name__: one
    for one in (every_option, any_order, wrong_order, same_training, exchanged_gradients, measured_links)
}
CONTROLLED = {
    one.__name__: one
    for one in (committed_training, worthless_plan, slower_plan, broken_channel, changing_collectives)
}

if __name__ == "__main__":
    torch.set_num_threads(1)

    def _all(rank: int) -> None:
        for name in sys.argv[2:]:
            (PARTS | CONTROLLED)[name](rank)

    fork_world(_all, int(sys.argv[1]))
    print("done")
