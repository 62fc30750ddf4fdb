"""Where slabs are placed: few messages, distinct hosts first, and an even spread without anybody who knows all."""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.placement import (
    MapRequest,
    Offer,
    PlacementDecision,
    Probe,
    Reply,
    Request,
    place_slab,
)


class Hosts:
    """Hosts that answer, refuse or time out."""

    def __init__(
        self, free: Mapping[str, int], refusing: Sequence[str] = (), silent: Sequence[str] = ()
    ) -> None:
        self.free = dict(free)
        self.refusing, self.silent = refusing, silent
        self.probed: list[tuple[str, ...]] = []
        self.requests: Counter[str] = Counter()

    def answer(self, request: Request) -> Reply:
        if isinstance(request, Probe):
            self.probed.append(request.hosts)
            return {h: Offer(self.free[h]) for h in request.hosts if h not in self.silent}
        assert isinstance(request, MapRequest)
        self.requests[request.host] += 1
        if request.host in self.refusing or not self.free[request.host]:
            return None
        self.free[request.host] -= 1
        return self.free[request.host]

    def place(self, search: Generator[Request, Reply, PlacementDecision]) -> PlacementDecision:
        reply: Reply = None
        while True:
            try:
                reply = self.answer(search.send(reply))
            except StopIteration as end:
                decision: PlacementDecision = end.value
                return decision


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_host_with_most_free_slabs_of_two_is_chosen() -> None:
    hosts = Hosts({"a": 1, "b": 5})
    found = hosts.place(place_slab(["a", "b"], [], _rng()))
    assert (found.host, found.messages) == ("b", 6)
    assert found.reason == "b: most free slabs (5) of 2 hosts probed without a slab of this client"


def test_hosts_of_unequal_size_can_be_compared_by_usage() -> None:
    search = place_slab(["big", "small"], [], _rng(), by_usage=True)
    assert isinstance(next(search), Probe)
    request = search.send({"big": Offer(20, 0.9), "small": Offer(3, 0.2)})
    assert request == MapRequest("small")
    with pytest.raises(StopIteration) as end:
        search.send(7)
    decision = end.value.value
    assert (decision.host, decision.handle) == ("small", 7)
    assert decision.reason.startswith("small: least memory in use (3)")


def test_a_single_new_host_with_memory_goes_before_all_old_ones() -> None:
    hosts = Hosts({"new": 1, "old": 50})
    assert hosts.place(place_slab(["new"], ["old"], _rng())).host == "new"
    found = hosts.place(place_slab(["new"], ["old"], _rng()))
    assert found.host == "old"
    assert found.reason.endswith("with slabs of this client, as no other had memory")


def test_a_refusal_is_followed_by_the_other_host_and_by_further_draws() -> None:
    hosts = Hosts(dict.fromkeys("abcdef", 1), refusing="abcd")
    for seed in range(20):
        hosts.free = dict.fromkeys("abcdef", 1)
        assert hosts.place(place_slab(list("abcdef"), [], _rng(seed))).host in set("ef")
    all_refuse = Hosts(dict.fromkeys("abcdefghij", 1), refusing="abcdefghij")
    found = all_refuse.place(place_slab(list("abcdefghij"), [], _rng(), redraws=3))
    assert (found.host, found.handle, found.messages) == (None, None, 4 * 4 + 8 * 2)
    assert max(all_refuse.requests.values()) == 1
    assert found.reason == "none of 8 hosts probed has a free slab, 8 refused"


def test_hosts_that_time_out_are_left_out() -> None:
    hosts = Hosts({"a": 9, "b": 1, "c": 9}, silent="ac")
    assert hosts.place(place_slab(["a", "b"], ["c"], _rng())).host == "b"
    found = hosts.place(place_slab(["a"], ["c"], _rng()))
    assert (found.host, found.messages) == (None, 2)
    assert found.reason == "none of 2 hosts probed has a free slab"
    assert hosts.place(place_slab([], [], _rng())).reason == "there is no host"


@given(st.integers(1, 30), st.integers(0, 10**6), st.data())
def test_slabs_land_on_distinct_hosts_while_there_are_new_ones(
    peers: int, seed: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, peers))
    hosts = Hosts({f"h{n}": data.draw(st.integers(1, 5)) for n in range(peers)})
    rng, held = _rng(seed), set[str]()
    for _ in range(k):
        found = hosts.place(place_slab([h for h in hosts.free if h not in held], sorted(held), rng))
        assert found.host is not None
        held.add(found.host)
    assert len(held) == k


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 60), st.integers(0, 10**6))
def test_messages_do_not_grow_with_the_cluster(free: list[int], held: int, seed: int) -> None:
    hosts = Hosts({str(h): n for h, n in enumerate(free)})
    old = set(list(hosts.free)[:held])
    found = hosts.place(place_slab(sorted(set(hosts.free) - old), sorted(old), _rng(seed)))
    assert found.messages <= 2 * (2 + 2) + 2
    assert all(len(probe) <= 2 for probe in hosts.probed)
    if found.host is not None:
        assert hosts.requests.total() == 1


def _maximum_load(n: int, choices: int, rng: np.random.Generator) -> int:
    """Return the slabs of the fullest of n hosts after n clients have placed one each."""
    hosts = Hosts({str(h): n for h in range(n)})
    for _ in range(n):
        hosts.place(place_slab(list(hosts.free), [], rng, choices=choices))
    return n - min(hosts.free.values())


@pytest.mark.parametrize(
    ("n", "one", "two"),
    [(32, 3.7, 2.2), (128, 4.4, 2.7), pytest.param(1024, 5.4, 3.0, marks=pytest.mark.slow)],
)
def test_two_choices_spread_slabs_evenly(n: int, one: float, two: float) -> None:
    """The reference's mean maximum loads of n balls in n bins, within three standard errors of their rounding."""
    rng, runs = _rng(1), 12 if n > 128 else 6400 // n
    for choices, expected in ((1, one), (2, two)):
        loads = [_maximum_load(n, choices, rng) for _ in range(runs)]
        error = max(float(np.std(loads)) / runs**0.5, 0.05)
        assert abs(float(np.mean(loads)) - expected) <= 0.05 + 3 * error


def test_choices_and_redraws_outside_their_ranges_are_refused() -> None:
    for search in (place_slab(["a"], [], _rng(), choices=0), place_slab(["a"], [], _rng(), redraws=-1)):
        with pytest.raises(OptionError, match="choices must be at least 1 and redraws at least 0"):
            next(search)
