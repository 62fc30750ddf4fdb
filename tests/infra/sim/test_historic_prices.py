"""Real price history serves the planners of machines as AWS does, and tells nothing of the future."""

from pathlib import Path

import pytest

import ebbflow.tasks.fleet_sim as shipped
from ebbflow.infra.errors import PriceError
from ebbflow.infra.protocols import PriceSource
from ebbflow.infra.sim.historic_prices import HistoricPrices
from ebbflow.infra.sim.prices import PriceHistory, moment, read_prices
from ebbflow.planners.errors import OptionError
from ebbflow.planners.market import Interruption, Terms, by_gpus, choose, key
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.prices import Machine
from ebbflow.planners.spending import Stay, bill
from ebbflow.tasks.fleet_sim.jobs import MACHINES
from tests.infra.conftest import ManualClock

PATH = Path(next(iter(shipped.__path__))) / "data/spot/aws-2019-12-to-2020-03.csv.gz"
BEGIN = moment("2020-01-10T00:00:00Z")
DAY = 86400.0
POOL = (MACHINES["p3.2xlarge"], MACHINES["p3.8xlarge"])
ZONES = ("us-east-1b", "us-east-1c", "us-east-1d", "us-east-1f", "us-west-2a", "us-west-2b", "us-west-2c")


@pytest.fixture(scope="module")
def history() -> PriceHistory:
    return read_prices(PATH)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0.0)


@pytest.fixture
def source(history: PriceHistory, clock: ManualClock) -> PriceSource:
    return HistoricPrices(history, {"gpu": POOL}, clock, begin=BEGIN, zones=ZONES)


def test_it_offers_what_the_history_has_at_that_moment(
    source: PriceSource, clock: ManualClock, history: PriceHistory
) -> None:
    first = source.offers("gpu")
    spot = [one for one in first if one.market == "spot"]
    assert {one.zone for one in spot} == set(ZONES)
    for one in spot:
        assert one.price == history.series[one.zone, one.instance_type].at(BEGIN)
    assert source.on_demand("p3.2xlarge") == 3.06
    assert source.on_demand("c5.large") is None
    clock.time = 30 * DAY
    later = {key(one): one.price for one in source.offers("gpu")}
    assert later.keys() == {key(one) for one in first}
    assert later != {key(one): one.price for one in first}
    assert source.problems() == []


def test_nothing_is_told_of_the_future(source: PriceSource, clock: ManualClock) -> None:
    clock.time = 5 * DAY
    found = source.series("us-east-1b", "p3.2xlarge", BEGIN + DAY)
    assert found.times[0] <= BEGIN + DAY < found.times[1]
    assert found.times[-1] <= BEGIN + 5 * DAY
    clock.time = 6 * DAY
    assert source.series("us-east-1b", "p3.2xlarge", BEGIN + DAY).times[: len(found.times)] == found.times
    clock.time = -300 * DAY
    with pytest.raises(PriceError, match=r"no prices of p3\.2xlarge in us-east-1b yet"):
        source.series("us-east-1b", "p3.2xlarge", 0.0)
    assert {one.market for one in source.offers("gpu")} == {"on-demand"}


def test_what_is_not_there_is_named(source: PriceSource, history: PriceHistory, clock: ManualClock) -> None:
    with pytest.raises(OptionError, match="pool must be one of gpu; got 'cpu'"):
        source.offers("cpu")
    with pytest.raises(PriceError, match=r"no prices of g4dn\.xlarge in the zones"):
        HistoricPrices(history, {"gpu": [Machine("g4dn.xlarge", 4, 16.0)]}, clock)


def test_a_month_of_real_prices_moves_nodes_for_more_than_the_margin_only(
    source: PriceSource, clock: ManualClock
) -> None:
    """Decisions every six hours: what is chosen is never far from the cheapest, and moves seldom."""
    terms = Terms(aversion=0.0, per_place=0.25)
    loss = Interruption(restart=180.0, rework=300.0)

    def month(margin: float) -> tuple[int, float]:
        held: dict = {}
        moved, paid = 0, 0.0
        for step in range(4 * 30):
            clock.time = step * DAY / 4
            how = Terms(aversion=terms.aversion, per_place=terms.per_place, margin=margin)
            choice = choose(source.offers("gpu"), 32, loss, work=by_gpus, terms=how, held=held)
            now = {key(one.offer): one.nodes for one in choice.allocations}
            moved += sum(max(count - held.get(which, 0), 0) for which, count in now.items()) if held else 0
            held, paid = now, paid + choice.dollars * 6
        return moved, paid

    eager, cheapest = month(0.0)
    calm, paid = month(0.1)
    assert calm < eager / 2
    assert cheapest <= paid < 1.1 * cheapest
    assert paid < 32 * 3.06 * 24 * 30 * 0.45  # against on-demand


def test_a_bill_by_real_prices(source: PriceSource, clock: ManualClock) -> None:
    node = Node("a", 8, 61.0, instance_type="p3.2xlarge", zone="us-east-1b", market="spot", gpus=1)
    clock.time = 10 * DAY
    now = BEGIN + 10 * DAY

    def prices(one: Node):
        return source.series(one.zone, one.instance_type, BEGIN)

    found = bill(
        [Stay(node, BEGIN)], prices, lambda one: source.on_demand(one.instance_type), now, seconds=DAY
    )
    assert found.so_far.node_hours == 240.0
    assert found.on_demand == pytest.approx(264 * 3.06)
    assert 0.3 < found.dollars / found.on_demand < 0.41
    assert found.ahead.least <= found.ahead.expected <= found.ahead.most
