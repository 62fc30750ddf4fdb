"""Names, addresses and rates of the network of a run."""

import ipaddress

import pytest

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine.network.plan import (
    NODES,
    Link,
    NetworkPlan,
    free_number,
    free_subnets,
    parse_rates,
    rate_text,
    tag_of,
)
from ebbflow.planners.errors import OptionError

PLAN = NetworkPlan(tag_of("0123456789ab"), (Link(2e8, "198.18.0.0/22"), Link(5e7, "198.18.4.0/22")))


@pytest.mark.parametrize(
    ("text", "rates"),
    [("200mbit", (2e8,)), (" 1.5Gbit ", (1.5e9,)), ("500kbit", (5e5,)), ("200mbit,50mbit", (2e8, 5e7))],
)
def test_rates(text: str, rates: tuple[float, ...]) -> None:
    assert parse_rates(text) == rates


@pytest.mark.parametrize(
    "text", ["", "200", "200mb", "0mbit", "99kbit", "11gbit", "-1mbit", "1e3mbit", "mbit", ","]
)
def test_what_is_no_rate_is_refused_with_what_was_given(text: str) -> None:
    with pytest.raises(OptionError, match="a link's rate must be such as '200mbit'"):
        parse_rates(text)


def test_a_node_has_two_links_at_most() -> None:
    with pytest.raises(OptionError, match="at most 2 links; got 3"):
        parse_rates("1mbit,1mbit,1mbit")


def test_names_fit_into_the_kernels_and_differ() -> None:
    names = [PLAN.bridge(0), PLAN.bridge(1)]
    names += [PLAN.interface(link, number) for link in (0, 1) for number in (1, 2, NODES)]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 15
    assert all(PLAN.tag in name for name in [*names, PLAN.namespace("gpu-1")])


def test_each_node_has_an_address_on_each_link_none_of_them_the_machines() -> None:
    for link in PLAN.links:
        network = ipaddress.ip_network(link.subnet)
        addresses = [ipaddress.ip_address(link.address(number)) for number in range(1, NODES + 1)]
        assert len(set(addresses)) == NODES
        assert all(one in network and one != network.broadcast_address for one in addresses)
        assert ipaddress.ip_address(link.host) not in addresses
    assert [PLAN.inside(PLAN.links[0].address(number)) for number in (1, 7, NODES)] == [1, 7, NODES]
    with pytest.raises(ClusterError, match=r"198\.18\.0\.1 is no node's address"):
        PLAN.inside(PLAN.host)


def test_a_number_whose_address_is_in_use_is_passed_over() -> None:
    first = PLAN.links[0]
    assert free_number(5, PLAN.links, set()) == 5
    assert free_number(NODES + 1, PLAN.links, {first.address(1), first.address(2)}) == NODES + 3
    with pytest.raises(ClusterError, match="no more than 1000 addresses"):
        free_number(1, PLAN.links, {first.address(number) for number in range(1, NODES + 1)})


def test_networks_overlap_with_none_that_is_there() -> None:
    assert free_subnets(2, ["10.0.0.0/8", "198.18.0.0/22", "198.18.9.1/32"]) == (
        "198.18.4.0/22",
        "198.18.12.0/22",
    )
    with pytest.raises(
        ClusterError, match=r"2 networks are needed for nodes, and 0 of 198\.18\.0\.0/15 are free"
    ):
        free_subnets(2, ["198.16.0.0/12"])


def test_what_may_go_at_once_and_wait_follows_the_rate() -> None:
    fast, slow = PLAN.links[0], Link(1e6, "198.18.8.0/22")
    assert (fast.burst, slow.burst) == (250_000, 65_536)
    assert (fast.queue, slow.queue) == (2_750_000, 78_036)
    assert rate_text(2e8) == "200 Mbit/s"
