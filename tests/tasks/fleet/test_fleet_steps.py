"""Observe, decide, guard, act: on a simulated fleet, with prices that a test sets."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.aws.fleet.usage import NodeUsage, UsageLog
from ebbflow.infra.errors import AwsUnavailableError, PriceError, SettingsError
from ebbflow.infra.protocols import ApplyResult, ProviderCall, Refusal
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.limits import Limits
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target
from ebbflow.planners.model.prices import HOUR, Series
from ebbflow.tasks.fleet.money import cost, offers
from ebbflow.tasks.fleet.plan import plan, rate_after
from ebbflow.tasks.fleet.report import status
from ebbflow.tasks.fleet.request import FleetRequest, FleetRules
from ebbflow.tasks.fleet.steps import act, decide, guard, new_nodes, observe, same_choice, size_without, wish

NOW = 1_795_255_200.0
ZONE = "us-east-1a"


def node(name: str, market: str = "spot", kind: str = "m5.large") -> Node:
    return Node(name, 2, 7.0, instance_type=kind, market=market, zone=ZONE)


def pool(*nodes: Node, planned: int | None = None, **more) -> PoolState:
    count = len(nodes) if planned is None else planned
    return PoolState("etl", count, count, nodes, **{"max_nodes": 10, **more})


class Control:
    """A ``FleetControl`` that shows one fleet and remembers what it was asked."""

    def __init__(self, *pools: PoolState, notices: tuple[Notice, ...] = (), revision: int = 7) -> None:
        self.fleet = Fleet(revision, NOW, pools, notices)
        self.targets: list[tuple[Target, bool]] = []

    def observe(self) -> Fleet:
        return self.fleet

    def apply(self, target: Target, *, dry_run: bool = False) -> ApplyResult:
        self.targets.append((target, dry_run))
        return ApplyResult(
            self.fleet.revision, (ProviderCall("size", target.pool, target.nodes),), (), dry_run
        )


class Market:
    """A ``PriceSource``: m5.large at 0.03, before that at 0.09, on-demand at 0.1."""

    def __init__(self, known: bool = True) -> None:
        self.known = known

    def offers(self, name: str) -> tuple[Offer, ...]:
        if name == "unassigned":
            raise OptionError("no such pool")
        if not self.known:
            raise AwsUnavailableError("no answer")
        return (
            Offer("m5.large", ZONE, "on-demand", 0.1, 2, 8.0),
            Offer("m5.large", ZONE, "spot", 0.03, 2, 8.0),
            Offer("m6i.large", ZONE, "on-demand", 0.12, 2, 8.0),
            Offer("m6i.large", ZONE, "spot", 0.05, 2, 8.0),
        )

    def series(self, zone: str, kind: str, start: float) -> Series:
        if not self.known:
            raise PriceError("there are none")
        return Series((NOW - 100 * HOUR, NOW - HOUR), (0.09, 0.03))

    def on_demand(self, kind: str) -> float | None:
        return 0.1 if self.known else None

    def problems(self) -> list[str]:
        return [] if self.known else ["the price list is away"]


def rules(**limits) -> FleetRules:
    return FleetRules(Limits.parse(limits))


# --- observe ------------------------------------------------------------------------------------------------


def test_nodes_get_the_price_of_their_type_zone_and_market() -> None:
    gang = PoolState("etl/run-1", 1, 1, (node("i-3"),))
    stray = PoolState("unassigned", 1, 1, (node("i-4"),))
    seen = observe(Control(pool(node("i-1"), node("i-2", "on-demand")), gang, stray), Market())
    found = {n.id: n.price for p in seen.fleet.pools for n in p.nodes}
    assert found == {"i-1": 0.03, "i-2": 0.1, "i-3": 0.03, "i-4": 0.0}
    assert seen.problems == ()
    assert seen.pool_of("i-3").name == "etl/run-1"


def test_an_outage_of_prices_is_a_problem_and_no_error() -> None:
    seen = observe(Control(pool(node("i-1"))), Market(known=False))
    assert seen.pool("etl").nodes[0].price == 0.0
    assert seen.problems == ("prices of etl are not known: no answer", "the price list is away")
    assert status(seen, "lab", "r", float("inf")).dollars_per_hour is None


def test_pools_and_nodes_that_there_are_not_are_named() -> None:
    seen = observe(Control(pool(node("i-1"))), Market())
    with pytest.raises(OptionError, match="there is no pool 'etk' in this cluster; there are etl"):
        seen.pool("etk")
    with pytest.raises(OptionError, match="i-9 is no running node of this cluster"):
        seen.pool_of("i-9")


# --- decide, guard, act -------------------------------------------------------------------------------------


def test_a_pool_that_shrinks_is_told_who_leaves_and_those_with_a_notice_go_first() -> None:
    control = Control(pool(*map(node, "abc")), notices=(Notice("b", NOW + 90),))
    seen = observe(control, Market())
    target = decide(seen, wish(seen, "etl", 2, "smaller"), FleetRules())
    assert (target.nodes, target.drain) == (2, ("b",))
    named = decide(seen, wish(seen, "etl", 2, "smaller", drain=("c",)), FleetRules())
    assert named.drain == ("c",)


def test_spot_that_is_dry_becomes_on_demand() -> None:
    short = pool(node("a"), planned=3, short_since=NOW - 900, short_why="no capacity")
    seen = observe(Control(short), Market())
    target = decide(seen, wish(seen, "etl", 3, "as planned"), FleetRules())
    assert target.on_demand == 2
    assert "insufficient Spot capacity for 900 s (no capacity)" in target.reason


def test_the_guard_counts_new_nodes_at_the_dearest_spot_and_the_cheapest_on_demand_price() -> None:
    new = new_nodes({"etl": Market().offers("etl")})["etl"]
    assert (new.spot, new.on_demand) == (0.05, 0.1)
    seen = observe(Control(pool(node("a"))), Market())
    verdict = guard(seen, wish(seen, "etl", 5, "more"), rules(dollars_per_hour=0.135))
    assert verdict.target is not None
    assert verdict.target.nodes == 3  # 0.03 + 2 * 0.05
    assert verdict.reasons


def test_what_the_guard_refuses_is_not_applied() -> None:
    control = Control(pool(node("a")))
    seen = observe(control, Market())
    stale = replace(wish(seen, "etl", 2, "more"), revision=6)
    done = act(control, guard(seen, stale, FleetRules()))
    assert control.targets == []
    assert done.refused[0].of == "guard"
    assert "revision 6" in done.refused[0].why
    act(control, guard(seen, wish(seen, "etl", 2, "more"), FleetRules()), dry_run=True)
    assert [dry for _, dry in control.targets] == [True]


def test_two_verdicts_are_the_same_choice_whatever_the_revision() -> None:
    first = observe(Control(pool(node("a")), revision=7), Market())
    later = observe(Control(pool(node("a")), revision=9), Market())
    one, two, other = (
        guard(seen, wish(seen, "etl", count, f"{count}"), FleetRules())
        for seen, count in ((first, 2), (later, 2), (later, 3))
    )
    assert same_choice(one, two)
    assert not same_choice(one, other)
    assert not same_choice(one, replace(one, target=None))


@pytest.mark.parametrize(
    ("draining", "planned", "requested", "ids", "size"),
    [
        ((), 3, 3, ("a",), 2),
        ((), 5, 5, ("a",), 4),  # two are on their way
        (("a",), 2, 3, ("a",), 2),  # a shrink that was interrupted
        (("a",), 3, 3, ("a",), 2),  # drained before, with the plan as it was
        (("a",), 3, 3, ("b",), 2),
        (("a",), 2, 3, ("a", "b"), 1),
    ],
)
def test_the_size_without_some_nodes(draining, planned, requested, ids, size) -> None:
    state = PoolState("etl", planned, requested, tuple(map(node, "abc")), max_nodes=9, draining=draining)
    assert size_without(state, ids) == size


def test_a_plan_says_what_would_be_asked_and_asks_nothing() -> None:
    control = Control(pool(node("a")))
    seen = observe(control, Market())
    found = plan(control, seen, wish(seen, "etl", 4, "more"), rules(grow=2), UsageLog(NOW))
    assert [dry for _, dry in control.targets] == [True]
    assert found.changes
    assert found.target.nodes == 4
    assert found.verdict.target is not None
    assert found.verdict.target.nodes == 3
    assert any(line.startswith("2 × spot") for line in found.market)
    assert found.dollars_now == pytest.approx(0.03)
    assert found.dollars_then == pytest.approx(0.13)
    content = found.to_json()
    assert content["guard"]["target"]["nodes"] == 3
    assert content["would"]["asked"][0]["value"] == 3


def test_what_a_target_costs_counts_on_demand_nodes_at_their_price() -> None:
    seen = observe(Control(pool(node("a"), node("b"))), Market())
    state = seen.pool("etl")
    mixed = Target("etl", 4, 7, "", on_demand=1, drain=("b",))
    assert rate_after(seen, state, mixed) == pytest.approx(0.03 + 0.1 + 2 * 0.05)
    unknown = observe(Control(pool(node("a"))), Market(known=False))
    assert rate_after(unknown, unknown.pool("etl"), mixed) is None


# --- reports ------------------------------------------------------------------------------------------------


def test_a_status_tells_who_leaves_when() -> None:
    state = pool(*map(node, "abcd"), draining=("c",), short_since=NOW - 60)
    told = (Notice("a", NOW + 87), Notice("b", NOW, "rebalance"))
    found = status(observe(Control(state, notices=told), Market()), "lab", "us-east-1", 40.0)
    assert [row.state for row in found.nodes] == ["leaving", "advised", "draining", "ok"]
    (row,) = found.pools
    assert (row.leaving, row.advised, row.draining, row.seconds_left) == (1, 1, 1, 87.0)
    assert found.dollars_per_hour == pytest.approx(0.12)
    assert found.to_json()["pools"][0]["short_since"] == NOW - 60


def stay(name: str, hours: float, end: float | None = None, **more) -> NodeUsage:
    kept = {"spot": True, "pool": "etl", **more}
    return NodeUsage(name, kept.pop("pool"), "m5.large", ZONE, start=NOW - hours * HOUR, end=end, **kept)


def test_costs_follow_the_price_over_time_and_first_hours_that_ec2_ends_are_free() -> None:
    book = UsageLog(
        NOW - 5 * HOUR,
        (
            stay("a", 3),  # two hours at 0.09, one at 0.03
            stay("b", 2, NOW - 1.5 * HOUR, interrupted=True),
            stay("c", 2, spot=False, pool="master"),
        ),
    )
    found = cost("lab", book, Market(), NOW, 10 * HOUR)
    etl, master = found.pools
    assert (etl.pool, etl.nodes, master.pool) == ("etl", 2, "master")
    assert etl.bill.so_far.dollars == pytest.approx(0.21)
    assert etl.bill.so_far.free_hours == pytest.approx(0.5)
    assert master.bill.so_far.dollars == pytest.approx(0.2)
    assert found.total.bill.so_far.dollars == pytest.approx(0.41)
    assert found.total.bill.ahead.expected == pytest.approx(0.3 + 1.0)
    assert etl.bill.ahead.most == pytest.approx(0.9)  # as dear as it was for days
    assert found.since == NOW - 5 * HOUR
    assert found.to_json()["total"]["ahead"]["hours"] == 10


def test_costs_say_which_nodes_they_leave_out() -> None:
    book = UsageLog(NOW - HOUR, (stay("a", 1), stay("b", 1, NOW, exact=False)))
    unknown = cost("lab", book, Market(known=False), NOW, HOUR)
    assert unknown.total.nodes == 0
    assert any("2 nodes not counted" in problem for problem in unknown.problems)
    vague = cost("lab", book, Market(), NOW, HOUR)
    assert any("1 node terminated between polls" in problem for problem in vague.problems)


def test_of_offers_the_cheapest_useful_hour_is_marked_not_the_cheapest_price() -> None:
    taken = [
        NodeUsage(f"i-{i}", "etl", "m5.large", ZONE, True, NOW - HOUR, NOW - HOUR / 2, True)
        for i in range(200)
    ]
    costly = FleetRules().interruption
    costly = replace(costly, restart=1800.0, rework=3600.0)
    quiet, _ = offers("etl", Market().offers("etl"), Market(), UsageLog(NOW), costly, NOW)
    stormy, _ = offers("etl", Market().offers("etl"), Market(), UsageLog(NOW, tuple(taken)), costly, NOW)
    assert (quiet[0].instance_type, quiet[0].cheapest) == ("m5.large", True)
    assert stormy[0].cheapest
    assert (stormy[0].instance_type, stormy[0].market) != ("m5.large", "spot")
    assert sum(row.cheapest for row in stormy) == 1
    spot = next(row for row in quiet if row.market == "spot")
    assert spot.high == 0.09
    assert spot.mean == pytest.approx((0.09 * 99 + 0.03) / 100)
    assert spot.saving == pytest.approx(0.7)


# --- what is asked with -------------------------------------------------------------------------------------


def test_a_missing_configuration_teaches_how_to_write_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EBBFLOW_TERRAFORM_OUTPUT", raising=False)
    with pytest.raises(
        SettingsError,
        match=r"no file of Terraform's output is named; .*terraform output -json > ebbflow\.json",
    ):
        FleetRequest().settings()
    monkeypatch.setenv("EBBFLOW_TERRAFORM_OUTPUT", "/nowhere/prod.json")
    with pytest.raises(
        SettingsError, match=r"the file of Terraform's output /nowhere/prod\.json does not exist"
    ):
        FleetRequest().settings()


def test_limits_are_read_from_the_option_or_the_environment_and_from_nowhere_else(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EBBFLOW_CONFIG", raising=False)
    assert FleetRequest().rules() == FleetRules()
    (tmp_path / "fleet.toml").write_text(
        '[quotas]\nnodes = 5\n[fallback]\nafter = "1m"\nstep = 2\n[market]\nrestart = 30\nceiling = 0.2\n'
    )
    assert FleetRequest().rules() == FleetRules(), "what lies in the present folder was not asked for"
    found = FleetRequest(config="fleet.toml").rules()
    assert (found.limits.nodes, found.fallback.after, found.fallback.step) == (5, 60.0, 2)
    assert (found.interruption.restart, found.interruption.rework, found.terms.ceiling) == (30.0, 300.0, 0.2)
    (tmp_path / "other.toml").write_text("[quotas]\nnodes = 6\n")
    monkeypatch.setenv("EBBFLOW_CONFIG", str(tmp_path / "other.toml"))
    assert FleetRequest().rules().limits.nodes == 6
    assert FleetRequest(config="fleet.toml").rules().limits.nodes == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quotas = 3", "quotas must be a table; got 3"),
        (
            "[quota]\nnodes = 3",
            "quota is not known; known are quotas, fallback, market, .*; did you mean quotas",
        ),
        ("[quotas]\nnode = 3", "node is not known.*did you mean nodes"),
        ("[fallback]\nafter = true", "fallback.after must be a duration .*; got True"),
        ("[fallback]\nstep = 1.5", "fallback.step must be a whole number; got 1.5"),
        ("[fallback]\nafter = -1", "fallback.after must be a duration .*; got -1"),
        ('[fallback]\nhold = "5 parsecs"', "fallback.hold must be a duration"),
        ("[market]\nper_zone = 2", "market: per_zone must be above 0 and at most 1; got 2"),
        ("[market]\nspan = 0", "market: span must be >= 1 node; got 0"),
        ("nodes = ", "is not TOML"),
    ],
)
def test_a_wrong_file_of_limits_is_explained(text, message, tmp_path) -> None:
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(OptionError, match=message):
        FleetRules.read(tmp_path / "fleet.toml")
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        FleetRules.read(tmp_path / "none.toml")


def test_the_files_that_the_guide_shows_can_be_read(tmp_path) -> None:
    guide = (Path(__file__).parents[3] / "docs/fleet.md").read_text()
    agreed, limits = re.findall(r"```toml\n(.*?)```", guide, re.S)
    (tmp_path / "agreed.toml").write_text(agreed)
    (tmp_path / "fleet.toml").write_text(limits)
    assert FleetRequest(prices=str(tmp_path / "agreed.toml")).listed().on_demand == {"m5.large": 0.107}
    found = FleetRules.read(tmp_path / "fleet.toml")
    assert found.limits.pools["workers"].max_nodes == 20
    assert found.limits.teams["vision"].gpus == 8
    assert (found.fallback, found.interruption) == (FleetRules().fallback, FleetRules().interruption)


@given(st.integers(0, 12), st.integers(0, 6), st.integers(0, 12), st.floats(0.01, 2))
def test_no_wish_gets_past_the_limits(wanted, there, on_demand, budget) -> None:
    control = Control(pool(*(node(f"n{i}") for i in range(there))))
    seen = observe(control, Market())
    limited = rules(dollars_per_hour=budget, nodes=8)
    verdict = guard(seen, decide(seen, wish(seen, "etl", wanted, "w", on_demand=on_demand), limited), limited)
    assert verdict.target is not None
    assert verdict.target.nodes <= max(8, there)
    if verdict.target.nodes > there:
        found = rate_after(seen, seen.pool("etl"), verdict.target)
        assert found is not None
        assert found <= budget + 1e-9


def test_a_refusal_is_told() -> None:
    from ebbflow.flows.fleet.terminal import applied_lines

    done = ApplyResult(
        1,
        (ProviderCall("size", "etl", 3, "autoscaling:SetDesiredCapacity"),),
        (Refusal("i-1", "it is gone"),),
    )
    assert applied_lines(done) == ["etl: 3 nodes  (autoscaling:SetDesiredCapacity)", "not i-1: it is gone"]
    assert applied_lines(ApplyResult(1)) == ["nothing to request"]
