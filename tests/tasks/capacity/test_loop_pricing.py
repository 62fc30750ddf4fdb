"""Nodes of a source that knows no prices get those of the market: leases and budgets count by them."""

from dataclasses import replace
from pathlib import Path

from loopcases import FakeSource, World, node, settings

from ebbflow.infra.errors import AwsUnavailableError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.fleet import Offer
from ebbflow.tasks.capacity.node_sources import PricedSource


def offer(price: float, market: str = "spot", zone: str = "a") -> Offer:
    return Offer("g5.xlarge", zone, market, price, 4, 16.0, 2)  # type: ignore[arg-type]


def free(name: str, market: str = "spot", zone: str = "a", kind: str = "g5.xlarge") -> Node:
    return replace(node(name), price=0.0, instance_type=kind, market=market, zone=zone)  # type: ignore[arg-type]


def prices(source: PricedSource) -> dict[str, float]:
    return {one.id: one.price for one in source.capacity().nodes}


def test_nodes_cost_what_their_type_zone_and_market_cost() -> None:
    there = FakeSource(free("s"), free("d", "on-demand"), free("z", zone="b"), free("x", kind="m5.large"))
    source = PricedSource(there, lambda: {"gpu": (offer(0.4), offer(1.0, "on-demand"), offer(0.5, zone="b"))})
    assert prices(source) == {"s": 0.4, "d": 1.0, "z": 0.5, "x": 0.0}
    source.learn({"gpu": (offer(0.6),)})
    assert prices(source) == {"s": 0.6, "d": 1.0, "z": 0.5, "x": 0.0}, (
        "what is offered no more keeps its price"
    )


def test_a_market_that_does_not_answer_delays_nothing_and_is_asked_once() -> None:
    asked = []

    def away() -> dict[str, tuple[Offer, ...]]:
        asked.append(1)
        raise AwsUnavailableError("no answer")

    source = PricedSource(FakeSource(free("s")), away)
    assert prices(source) == {"s": 0.0}
    assert prices(source) == {"s": 0.0}
    assert len(asked) == 1
    source.learn({"gpu": (offer(0.4),)})
    assert prices(source) == {"s": 0.4}


def test_the_market_is_not_asked_while_there_is_no_node() -> None:
    asked: list[int] = []
    there = FakeSource()
    source = PricedSource(there, lambda: asked.append(1) or {"gpu": (offer(0.4),)})  # type: ignore[func-returns-value]
    assert prices(source) == {}
    assert not asked
    there.add(free("s"))
    assert prices(source) == {"s": 0.4}


def test_leases_on_such_nodes_cost_money(tmp_path: Path) -> None:
    with World(tmp_path, ()) as world:
        there = FakeSource(free("s"), clock=world.clock)
        source = PricedSource(there, lambda: {"gpu": (offer(0.4),)})
        world.begin(source=source, settings=settings())
        world.app("a", 1)
        world.steps(3)
        (lease,) = world.ledger.state().held("a")
        assert lease.price == 0.2
