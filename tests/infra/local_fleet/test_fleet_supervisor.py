"""What a local fleet's supervisor does, with machines that cost nothing; ``test_fleet_processes`` has real ones."""

import stat
import time
from dataclasses import replace

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError, PriceError
from ebbflow.infra.ledger.address import VARIABLE
from ebbflow.infra.local_fleet import begin
from ebbflow.infra.local_fleet.state import changes
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Offer, Target
from tests.infra.local_fleet.quick_provider import QuickFleet, there

GPU = LocalPool(
    "gpu", "gpu", cores=2, slots=2, initial=2, max_nodes=6, price=0.36, instance_type="g.small", zone="here"
)
SQL = LocalPool("sql", "spark", initial=1, max_nodes=3)


@pytest.fixture
def make(tmp_path):
    made = []

    def start(*pools, **options):
        made.append(QuickFleet(tmp_path, pools, **options))
        return made[-1]

    yield start
    for quick in made:
        quick.close()


def test_the_first_nodes_come_and_capacity_has_all_of_them(make):
    quick = make(GPU, SQL)
    quick.until(lambda state: len(there(state)) == 3)
    capacity = quick.fleet.capacity()
    assert [(n.id, n.gpus, n.cores, n.price, n.instance_type, n.zone) for n in capacity.nodes] == [
        ("gpu-1", 2, 2, 0.36, "g.small", "here"),
        ("gpu-2", 2, 2, 0.36, "g.small", "here"),
        ("sql-1", 0, 1, 0.0, "local", ""),
    ]
    assert capacity.revision == quick.fleet.observe().revision
    assert [pool.name for pool in quick.fleet.observe().pools] == ["gpu", "sql"]


def test_the_revision_of_two_handles_is_one_and_grows_at_changes_only(make):
    quick = make(GPU)
    quick.until(lambda state: len(there(state)) == 2)
    other, first = quick.again(), quick.fleet.capacity().revision
    time.sleep(0.1)  # in which the supervisor looks several times
    assert quick.fleet.capacity().revision == other.capacity().revision == first
    other.kill("gpu-1")
    assert quick.fleet.capacity().revision > first
    quick.until(lambda state: there(state) == ["gpu-2", "gpu-3"])
    assert quick.fleet.capacity().revision == first + 2


def test_a_noticed_node_is_told_replaced_and_gone_at_its_deadline(make):
    quick = make(GPU)
    quick.until(lambda state: len(there(state)) == 2)
    deadline = quick.fleet.notice("gpu-1", 600.0)
    assert quick.fleet.capacity().notices == (Notice("gpu-1", deadline),)
    assert quick.provider.notified[0] == ("gpu-1", deadline)
    quick.until(lambda state: there(state) == ["gpu-1", "gpu-2", "gpu-3"])
    deadline = quick.fleet.notice("gpu-1", 0.3)
    state = quick.until(lambda state: state.node("gpu-1") is None and "gpu-1" not in quick.provider.up)
    assert quick.clock.now() >= deadline
    assert (state.ended("gpu-1"), quick.fleet.lost("gpu-1")) == ("its notice period expired",) * 2
    assert quick.fleet.lost("gpu-2") == ""
    assert quick.fleet.lost("gpu-77") == "there is no such node"


def test_an_advice_and_what_others_have_heard_end_no_node(make):
    quick = make(GPU)
    quick.until(lambda state: len(there(state)) == 2)
    quick.fleet.notice("gpu-1", 0.05, "rebalance")
    quick.fleet.take_notices([Notice("gpu-2", quick.clock.now() + 0.05)])
    time.sleep(0.3)
    assert there(quick.fleet.state) == ["gpu-1", "gpu-2"]
    assert [notice.kind for notice in quick.fleet.capacity().notices] == ["rebalance", "interruption"]


def test_a_machine_that_dies_by_itself_is_seen_and_replaced(make):
    quick = make(GPU)
    quick.until(lambda state: len(there(state)) == 2)
    quick.provider.up.discard("gpu-2")
    assert [node.id for node in quick.fleet.capacity().nodes][:1] == ["gpu-1"]
    assert quick.fleet.lost("gpu-2") == "its process exited"
    quick.until(lambda state: there(state) == ["gpu-1", "gpu-3"])
    assert quick.fleet.state.experience(quick.clock.now())[0] == 1


def test_a_drawn_out_start_can_be_cancelled_and_takes_its_time_else(make):
    quick = make(replace(GPU, initial=1, provision_time=0.4))
    begun = quick.clock.now()
    quick.until(lambda state: there(state) == ["gpu-1"])
    assert quick.clock.now() - begun >= 0.3
    quick.fleet.add("gpu", 3)
    quick.until(lambda state: len(state.nodes) == 4)
    quick.fleet.add("gpu", -3)
    quick.until(lambda state: len(state.nodes) == 1)
    assert quick.provider.started == ["gpu-1"]
    assert quick.fleet.observe().pools[0].short_since is None


def test_starts_that_fail_are_tried_again_later_and_the_reason_is_told(make):
    quick = make(replace(GPU, initial=0))
    quick.provider.broken, begun = "no disk", quick.clock.now()
    quick.fleet.add("gpu")
    quick.until(lambda state: state.plans["gpu"].tries >= 1)
    assert quick.fleet.problems() == ["gpu: no disk"]
    assert quick.fleet.observe().pools[0].short_why == "no disk"
    assert quick.fleet.state.plans["gpu"].again > begun + 1.0
    quick.provider.broken = ""
    quick.fleet.apply(Target("gpu", 1, quick.fleet.observe().revision, "again"))  # which does not wait
    state = quick.until(lambda state: len(there(state)) == 1)
    assert (state.plans["gpu"].tries, quick.fleet.problems()) == (0, [])


def test_a_shut_market_gives_nothing_until_it_opens(make):
    quick = make(replace(GPU, initial=0))
    quick.fleet.outage("gpu", 60)
    quick.fleet.add("gpu", 2)
    time.sleep(0.1)  # in which the supervisor may look several times
    pool = quick.fleet.observe().pools[0]
    assert (pool.planned, pool.requested, pool.nodes, pool.short_why) == (2, 2, (), "insufficient capacity")
    quick.fleet.outage("gpu", 0)
    quick.until(lambda state: len(there(state)) == 2)


def test_a_node_that_arrives_too_late_for_the_plan_is_not_seen_at_all(make):
    quick = make(replace(GPU, initial=0))
    quick.provider.gate.clear()
    quick.fleet.add("gpu", 2)
    quick.until(lambda state: len(quick.provider.started) == 2)
    revision = quick.fleet.observe().revision
    quick.fleet.add("gpu", -2)
    quick.provider.gate.set()
    quick.until(lambda state: not state.nodes and not quick.supervisor._starting and not quick.provider.up)
    assert (quick.fleet.observe().revision, quick.provider.up) == (revision, set())


def test_an_end_that_a_crash_cut_off_is_carried_out_by_the_supervisor(make):
    quick = make(GPU)
    quick.until(lambda state: len(there(state)) == 2)
    quick.file.change(quick.uid, lambda state: state.noted("gpu-1", fate="killed without notice"))
    quick.until(lambda state: there(state) == ["gpu-2", "gpu-3"] and "gpu-1" not in quick.provider.up)


def test_what_a_supervisor_was_starting_the_next_one_starts_anew(make):
    quick = make(GPU, before=lambda state: changes.give(state, "gpu", 1, 0.0))
    quick.until(lambda state: there(state) == ["gpu-2", "gpu-3"])
    assert quick.fleet.lost("gpu-1") == "its start was interrupted"


def test_a_lost_supervisor_is_told_in_a_dry_run_and_started_again(make):
    quick = make(GPU)
    quick.until(lambda state: len(there(state)) == 2)
    assert quick.fleet.kept
    quick.file.change(quick.uid, lambda state: replace(state, supervisor=None))
    assert quick.fleet.repair(dry_run=True).refused[0].why.startswith("its node supervisor is gone")
    assert not quick.fleet.kept
    quick.fleet.observe()
    assert quick.fleet.kept


def test_down_leaves_what_must_not_be_used_twice_and_the_next_life_goes_on_from_there(make, tmp_path):
    quick = make(GPU)
    quick.until(lambda state: len(there(state)) == 2)
    revision = quick.fleet.observe().revision
    quick.close()
    assert quick.provider.up == set()
    for use in (quick.fleet.observe, quick.fleet.capacity, lambda: quick.fleet.kill("gpu-1")):
        with pytest.raises(ClusterError, match="taken down"):
            use()
    quick.fleet.down()
    again = make(GPU)
    again.until(lambda state: there(state) == ["gpu-3", "gpu-4"])
    assert again.fleet.observe().revision > revision
    assert again.fleet.lost("gpu-1") == "the fleet was taken down"


class Jumped(SystemClock):
    """The clock of a process that began after the wall clock was set."""

    def now(self):
        return super().now() + 3600.0


def test_whoever_has_another_clock_is_told_deadlines_by_it(make):
    quick = make(GPU)
    quick.until(lambda state: len(there(state)) == 2)
    here, jumped, clock = quick.fleet, quick.again(Jumped()), Jumped()
    deadline = jumped.notice("gpu-1", 600.0)
    assert deadline - clock.now() == pytest.approx(600.0, abs=150.0)
    assert jumped.observe().notices == (Notice("gpu-1", pytest.approx(deadline, abs=150.0)),)
    assert here.capacity().notices == (Notice("gpu-1", pytest.approx(deadline - 3600.0, abs=150.0)),)
    assert {n.id: n.deadline for n in jumped.view()}["gpu-1"] == pytest.approx(deadline, abs=150.0)
    revision = here.take_notices([Notice("gpu-2", quick.clock.now() + 600.0)])
    assert jumped.take_notices([Notice("gpu-2", clock.now() + 900.0)]) == revision  # which is later
    jumped.notice("gpu-1", 0.2)
    quick.until(lambda state: state.node("gpu-1") is None)
    quick.provider.gate.clear()
    since = [jumped.observe().pools[0].short_since, here.observe().pools[0].short_since]
    assert None in since or since[0] - since[1] == pytest.approx(3600.0, abs=150.0)


def test_prices_are_what_the_pools_say(make):
    quick = make(replace(GPU, on_demand_price=1.2), SQL)
    assert quick.fleet.offers("gpu") == (
        Offer("g.small", "here", "on-demand", 1.2, 2, 1.0, 2),
        Offer("g.small", "here", "spot", 0.36, 2, 1.0, 2),
    )
    assert [offer.market for offer in quick.fleet.offers("sql")] == ["spot"]
    assert (quick.fleet.on_demand("g.small"), quick.fleet.on_demand("p.large")) == (1.2, None)
    with pytest.raises(PriceError, match=r"g\.small"):
        quick.fleet.series("here", "g.small", 0.0)


def test_what_is_asked_for_wrongly_names_what_there_is(make):
    quick = make(replace(GPU, initial=1))
    quick.until(lambda state: len(there(state)) == 1)
    with pytest.raises(OptionError, match="must be one of gpu; got 'tpu'"):
        quick.fleet.add("tpu")
    with pytest.raises(OptionError, match="seconds must be >= 0"):
        quick.fleet.notice("gpu-1", -1)
    for act in (quick.fleet.kill, quick.fleet.notice, quick.fleet.pause, quick.fleet.resume):
        with pytest.raises(
            ClusterError, match="there is no node 'gpu-9' in the fleet 'lab' now; there are: gpu-1"
        ):
            act("gpu-9")
    with pytest.raises(OptionError, match="an app and a node"):
        quick.fleet.evict("", "gpu-1")


def test_a_supervisor_that_is_started_from_another_shell_keeps_the_fleets_ledger(tmp_path, monkeypatch):
    clock, file = SystemClock(), LocalFleetStateFile(tmp_path / "fleet")
    pool = LocalPool("agg", "cpu", aggregation="shop", max_nodes=1)
    seen: list[str | None] = []
    monkeypatch.setattr(begin, "_kept", lambda file, uid: True)
    monkeypatch.setattr(begin.processes, "spawn", lambda command, env, *rest: seen.append(env.get(VARIABLE)))

    def life() -> str:
        return begin.claim(file, "fleet", [pool], (), True, clock)

    monkeypatch.setenv(VARIABLE, "postgresql://me:secret@host/shop")
    first = life()
    begin.spawn_supervisor(file, first, clock)
    monkeypatch.delenv(VARIABLE)
    begin.spawn_supervisor(file, first, clock)
    assert seen == ["postgresql://me:secret@host/shop"] * 2
    [kept] = [one for one in file.folder.iterdir() if one.is_file() and b"secret" in one.read_bytes()]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    with file.locked():
        file.write(replace(file.read(), up=False))
    monkeypatch.setenv(VARIABLE, "other.db")
    monkeypatch.chdir(tmp_path)
    begin.spawn_supervisor(file, life(), clock)
    assert seen[2] == str(tmp_path / "other.db"), "another life of it has another"
