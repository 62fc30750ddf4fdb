"""The network simulator: closed forms, fairness, and what holds for every network."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.communication.algebra import all_reduce, all_to_all, ring_all_reduce
from ebbflow.planners.communication.costs import LinkModel
from ebbflow.planners.communication.network import Flow, Link, fair_rates, flow_ends, motif_seconds
from ebbflow.planners.errors import OptionError

LINKS = {"a": Link(100.0, 0.5), "b": Link(50.0)}


def test_one_flow_takes_its_latency_and_its_bytes() -> None:
    assert flow_ends([Flow(("a",), 200.0)], LINKS) == [2.5]
    assert flow_ends([Flow(("a", "b"), 200.0)], LINKS) == [4.5]


def test_two_flows_on_a_link_take_twice_as_long_and_disjoint_ones_do_not_meet() -> None:
    assert flow_ends([Flow(("b",), 100.0)] * 2, LINKS) == [4.0, 4.0]
    assert flow_ends([Flow(("a",), 100.0), Flow(("b",), 100.0)], LINKS) == [1.5, 2.0]


def test_a_flow_is_faster_once_the_other_has_ended() -> None:
    assert flow_ends([Flow(("b",), 50.0), Flow(("b",), 100.0)], LINKS) == [2.0, 3.0]
    assert flow_ends([Flow(("b",), 100.0), Flow(("b",), 100.0, start=1.0)], LINKS) == [3.0, 4.0]


def test_flows_wait_for_others() -> None:
    assert flow_ends([Flow(("a",), 100.0), Flow(("b",), 50.0, after=(0,))], LINKS) == [1.5, 2.5]


def test_rates_are_max_min_fair() -> None:
    assert fair_rates([("a",), ("a", "b"), ("b",), ("b",)], {"a": 100.0, "b": 60.0}) == [
        80.0,
        20.0,
        20.0,
        20.0,
    ]


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True), min_size=1, max_size=6),
    st.lists(st.floats(1, 100), min_size=3, max_size=3),
)
def test_no_link_is_overfull_and_every_flow_has_a_full_link(
    paths: list[list[str]], capacities: list[float]
) -> None:
    links = dict(zip("abc", capacities, strict=True))
    rates = fair_rates([tuple(path) for path in paths], links)
    loads = {link: sum(r for r, p in zip(rates, paths, strict=True) if link in p) for link in links}
    assert all(loads[link] <= links[link] * (1 + 1e-9) for link in links)
    for rate, path in zip(rates, paths, strict=True):
        full = [link for link in path if loads[link] >= links[link] * (1 - 1e-9)]
        assert any(
            all(rate >= other * (1 - 1e-9) for other, p in zip(rates, paths, strict=True) if link in p)
            for link in full
        )


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=5), st.floats(1.1, 4))
def test_more_bandwidth_is_never_slower(sizes: list[float], factor: float) -> None:
    flows = [Flow(("a",) if i % 2 else ("a", "b"), size) for i, size in enumerate(sizes)]
    faster = {name: Link(link.capacity * factor, link.latency) for name, link in LINKS.items()}
    assert max(flow_ends(flows, faster)) <= max(flow_ends(flows, LINKS)) * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "size"), [(2, 1_000_000), (4, 1_000_000), (8, 64_000)])
def test_a_ring_takes_what_the_formula_says(ranks: int, size: int) -> None:
    model = LinkModel(launch=0.0)
    links = {
        f"{kind}{i}": Link(1 / model.per_byte, model.alpha / 2)
        for i in range(ranks)
        for kind in ("up", "down")
    }
    flows: list[Flow] = []
    held: dict[int, int] = {}
    for motif in ring_all_reduce(all_reduce(ranks, size)):
        transfers = list(motif.transfers())
        for r in range(ranks - 1):
            came = {}
            for src, dst, low, high in transfers[r * ranks : (r + 1) * ranks]:
                after = (held[src],) if src in held else ()
                came[dst] = len(flows)
                flows.append(Flow((f"up{src}", f"down{dst}"), high - low, after=after))
            held = came
    assert motif_seconds(flows, links) == pytest.approx(model.ring(ranks, size), rel=1e-3)


def test_senders_that_overflow_a_receiver_s_buffer_slow_it_down() -> None:
    def seconds(senders: int) -> float:
        links = {"down": Link(1e6, buffer=2**17)} | {f"up{i}": Link(1e9) for i in range(senders)}
        return motif_seconds([Flow((f"up{i}", "down"), 1e6 / senders) for i in range(senders)], links)

    times = [seconds(n) for n in (1, 2, 4, 8)]
    assert times[0] == times[1] == pytest.approx(1.0)
    assert all(a < b for a, b in pairwise(times[1:]))


def test_an_all_to_all_conserves_bytes() -> None:
    flows = [Flow((f"up{s}", f"down{d}"), 1.0) for s, d, _, _ in all_to_all(4, 1).transfers() if s != d]
    links = {f"{kind}{i}": Link(1.0) for i in range(4) for kind in ("up", "down")}
    assert motif_seconds(flows, links) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("flows", "message"),
    [
        ([Flow(("x",), 1.0)], "over the link 'x', which the network does not have"),
        ([Flow(("a",), 1.0, after=(0,))], "must wait for earlier flows only"),
        ([Flow(("a",), -1.0)], "bytes of flow 0 must be >= 0"),
    ],
)
def test_flows_that_are_none_are_refused(flows: list[Flow], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        flow_ends(flows, LINKS)


def test_a_link_without_capacity_is_refused() -> None:
    with pytest.raises(OptionError, match="capacity of a link must be > 0"):
        Link(0.0)
