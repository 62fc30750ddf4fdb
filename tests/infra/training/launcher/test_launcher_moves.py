"""What the launcher passes on to a generation, and nodes and their devices, with processes left out."""

from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine import cgroups, devices
from ebbflow.infra.training.channel.wire import AgentEnd, Entry, Heartbeat, Order
from ebbflow.infra.training.launcher import generation as generations
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.infra.training.launcher.job import Options
from ebbflow.infra.training.launcher.journal import Record
from ebbflow.infra.training.launcher.members import Loss, Members
from ebbflow.infra.training.launcher.moves import Control, Resizer
from ebbflow.infra.training.launcher.pool import Admit, admit_none
from ebbflow.infra.training.launcher.service import Workforce
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.infra.training.process.channel import Report, StopRequest
from ebbflow.planners.errors import OptionError
from tests.infra.training.workforces import make_workforce


class Pool:
    """A machine room with room for so many nodes."""

    host, uid = "127.0.0.1", "pool"

    def __init__(self, room: int) -> None:
        self.room = room
        self.there: list[str] = []

    def start(self, name: str, slots: int, entry: Entry, admit: Admit = admit_none) -> None:
        if len(self.there) >= self.room:
            raise ClusterError(f"no room for {name}")
        self.there.append(name)

    def lost(self, name: str) -> str:
        return "" if name in self.there else "gone"

    def paused(self, name: str) -> bool:
        return False

    def end(self, name: str) -> None:
        if name in self.there:
            self.there.remove(name)


class Exchange:
    """An exchange with nodes that say nothing but ``said``."""

    address, public = "127.0.0.1:1", "00" * 32
    listened = 0.0  # seconds
    said: Heartbeat | None = None
    ended: AgentEnd | None = None

    def wire(self, key: str) -> "Exchange":
        return self

    def admit(self, public: str) -> None: ...

    def send(self, order: Order) -> None: ...

    def beat(self) -> Heartbeat | None:
        return self.said

    def agent_end(self, generation: int) -> AgentEnd | None:
        return self.ended

    def close(self) -> None: ...


class Generation:
    """A generation that notes what it is asked."""

    stop = None
    number = 3

    def __init__(self, placement: dict[str, int]) -> None:
        self.workforce: Workforce | None = None  # an all-reduce whose processes stay
        self.placement = placement
        self.asked: list[str] = []
        self.dismissed: list[str] = []

    def ask_to_stop(self, reason: str, deadline: float) -> None:
        self.asked.append(reason)
        self.deadline = deadline

    def dismiss(self, name: str, how: str) -> None:
        self.dismissed.append(name)
        del self.placement[name]

    def node_of(self, rank: int) -> str:
        return list(self.placement)[rank]


class World:
    def __init__(self, room: int, **options: Any) -> None:
        clock = SystemClock()
        self.record, self.control, self.pool = Record(clock), Control(), Pool(room)
        self.exchange = Exchange()
        self.members = Members(
            self.pool, self.exchange, "r", clock, self.record.note, grace=1.0, preload=(), silence=9.0, stopped=1.0
        )  # fmt: skip
        self.moves = Resizer(self.control, self.members, self.record, Options(**options), clock)
        self.generation = Generation({"node-1": 1, "node-2": 1, "node-3": 1})
        self.members.start(self.generation.placement)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.record.events()]

    def report_times(self, seconds: list[float], times: int = 40) -> None:
        for step in range(times):
            report = Report("step", 0, 0.0, step, {"compute_seconds": seconds})
            self.moves.look_for_straggler(report, self.generation)


def test_a_straggler_is_replaced_or_left_out() -> None:
    for replace, target in (
        (True, {"node-1": 1, "node-3": 1, "node-4": 1}),
        (False, {"node-1": 1, "node-3": 1}),
    ):
        world = World(9, replace=replace)
        world.report_times([0.1, 0.3, 0.1])
        assert world.control.target == target
        assert world.kinds()[-1] == "straggler"
    world = World(9, stragglers=False)
    world.report_times([0.1, 0.3, 0.1])
    assert world.control.target is None


def test_a_node_that_is_refused_changes_the_move_and_not_the_run() -> None:
    world = World(room=4)
    wanted = {"node-1": 1, "node-4": 1, "node-5": 1}
    world.control.resize(wanted)
    world.moves.serve(world.generation, grace=1.0)
    assert world.members.refused == {"node-5": "no room for node-5"}
    assert world.control.target == {"node-1": 1, "node-4": 1}
    assert world.generation.asked == []  # node-4 is not ready yet


def test_a_move_to_where_the_run_is_asks_for_nothing() -> None:
    world = World(9)
    world.control.resize(world.generation.placement)
    world.moves.serve(world.generation, grace=1.0)
    assert world.control.target is None
    assert world.generation.asked == []


def test_a_move_with_a_deadline_waits_for_new_nodes_only_half_of_the_time() -> None:
    world, clock = World(9), SystemClock()
    world.control.resize({"node-1": 1, "node-4": 1}, by=clock.now() + 100.0)
    world.moves.serve(world.generation, grace=1000.0)
    assert world.generation.asked == [], "node-4 is not ready yet, and there is time"
    late = {"node-1": 1, "node-5": 1}
    by = clock.now()
    world.control.resize(late, by=by)
    world.moves.serve(world.generation, grace=1000.0)
    assert world.generation.asked == ["resize"]
    assert by < world.generation.deadline < by + 60.0, "a moment to save in, however late"
    world.control.resize(late, by=clock.now() + 50.0)
    world.moves._prepared_by = 0.0
    world.moves.serve(world.generation, grace=1000.0)
    assert world.generation.deadline < clock.now() + 48.0, "saved before the deadline, with time to end"


def in_place(world: World) -> Workforce:
    """Let the world's workers come and go while the others train."""
    made = world.generation.workforce = make_workforce("node-1", "node-2", "node-3")
    return made


class Now(SystemClock):
    time = 1000.0

    def now(self) -> float:
        return self.time


class Workers:
    """A generation's channel to processes that say nothing."""

    def __init__(self) -> None:
        self.asked: list[StopRequest] = []

    def request_stop(self, stop: StopRequest) -> None:
        self.asked.append(stop)

    def reports(self) -> tuple[Report, ...]:
        return ()


def launched(world: World, clock: Now) -> tuple[generations.Generation, Workers]:
    """Return a generation whose processes train."""
    made = generations.Generation(
        3, {"node-1": 1, "node-2": 1}, world.members, world.exchange, clock, world.record.note,
        HangRule(), rescue=20.0, form=600.0,
    )  # type: ignore[arg-type]  # fmt: skip
    workers = Workers()
    made._channel = workers  # type: ignore[assignment]
    return made, workers


def test_who_is_left_hears_of_a_loss_whether_a_stop_is_asked_for_before_it_or_after() -> None:
    world, clock = World(9), Now()
    made, workers = launched(world, clock)
    made.ask_to_stop("notice", 1120.0)
    made.look({"node-2": Loss("gone")})
    assert workers.asked == [StopRequest("notice", 1120.0), StopRequest("notice", 1120.0, lost=True)]
    made.look({})
    assert len(workers.asked) == 2
    made, workers = launched(world, clock)
    made.look({"node-2": Loss("gone")})
    made.ask_to_stop("notice", 1010.0)
    assert [(stop.deadline, stop.lost) for stop in workers.asked] == [(1020.0, True), (1010.0, True)]


def test_a_loss_during_a_stop_leaves_a_save_the_time_that_the_stop_has() -> None:
    world, clock = World(9), Now()
    made, _ = launched(world, clock)
    made.ask_to_stop("notice", 1060.0)
    wire = Exchange()
    wire.ended = AgentEnd("failed")
    world.members["node-2"].wire = wire  # type: ignore[assignment]
    assert not made.look({})
    clock.time = 1055.0  # later than survivors get where nothing is asked
    assert not made.look({})
    assert "cut-off" not in world.kinds()
    clock.time = 1063.0
    assert not made.look({})
    assert "cut-off" in world.kinds()


def test_nodes_leave_in_place_while_enough_are_left() -> None:
    for minimum, asked in ((1, []), (2, ["resize"])):
        world = World(9, minimum=minimum)
        workforce = in_place(world)
        world.control.resize({"node-1": 1})
        world.moves.serve(world.generation, grace=1.0)
        assert world.generation.asked == asked
        assert workforce.retired == (set() if asked else {"node-2", "node-3"})


def test_nodes_that_are_wanted_again_before_they_have_left_stay() -> None:
    world = World(9)
    workforce = in_place(world)
    members = workforce.meeting.membership
    world.control.resize({"node-1": 1})
    world.moves.serve(world.generation, grace=1.0)
    world.control.resize({"node-1": 1, "node-2": 1})
    world.moves.serve(world.generation, grace=1.0)
    assert workforce.retired == {"node-3"}
    assert world.kinds()[-1] == "worker-stays"
    members._pass_boundary()
    assert members.view.members == (0, 1)
    world.control.resize({"node-1": 1, "node-2": 1, "node-3": 1})
    world.moves.serve(world.generation, grace=1.0)
    assert workforce.retired == {"node-3"}, "it has left, and is done without until it joins"
    assert world.control.target == {"node-1": 1, "node-2": 1, "node-3": 1}, "once its processes are gone"
    del world.generation.placement["node-3"]
    workforce.leave("node-3", "it was asked to leave")
    world.members.end(["node-3"])
    joined: list[object] = []
    world.moves.serve(world.generation, 1.0, lambda generation, nodes: joined.append(nodes))
    world.members["node-3"].beat = Heartbeat(1, 0)
    world.moves.serve(world.generation, 1.0, lambda generation, nodes: joined.append(nodes))
    assert joined == [{"node-3": 1}]
    world.generation.placement["node-3"] = 1
    rank = workforce.take_in("node-3", "key", 1).start
    world.moves.serve(world.generation, grace=1.0)
    assert world.control.target is None
    members.enter(rank)
    members._pass_boundary()
    assert members.view.members == (0, 1, rank)
    world.control.resize({"node-1": 1})
    world.moves.serve(world.generation, grace=1.0)
    assert workforce.retired == {"node-2", "node-3"}, "it may be asked again"
    members._pass_boundary()
    assert members.view.members == (0,)


def test_a_node_with_a_notice_waits_half_of_its_time_for_one_that_it_can_tell_where_the_training_is() -> None:
    for joins, asked in ((False, ["notice"]), (True, [])):
        world = World(9)
        workforce = in_place(world)
        for name in ("node-2", "node-3"):
            workforce.leave(name, "it was killed")
        del world.generation.placement["node-3"]
        rank = workforce.take_in("node-2", "key", 1).start
        world.members["node-1"].beat = Heartbeat(1, 0, notice=SystemClock().now() + 100.0)
        world.moves.serve(world.generation, grace=1.0)
        assert world.generation.asked == []
        assert workforce.retired == {"node-1"}
        if joins:
            workforce.meeting.membership.enter(rank)
            workforce.meeting.membership._pass_boundary()
        world.members["node-1"].beat = Heartbeat(2, 0, notice=SystemClock().now() - 1.0)
        world.moves.serve(world.generation, grace=1.0)
        assert world.generation.asked == asked


def test_a_node_that_leaves_before_its_workers_have_joined_is_done_without() -> None:
    world = World(9)
    workforce = in_place(world)
    workforce.take_in("node-4", "key", 1)
    world.generation.placement["node-4"] = 1
    world.control.resize({"node-1": 1, "node-2": 1, "node-3": 1})
    world.moves.serve(world.generation, grace=1.0)
    assert world.generation.dismissed == ["node-4"]
    assert not workforce.retired
    assert world.control.target is None


def test_a_node_that_loses_its_processes_again_and_again_is_not_waited_for() -> None:
    world = World(9)
    workforce = in_place(world)
    for _ in range(2):
        workforce.leave("node-3", "it was killed")
        workforce.take_in("node-3", "key", 1)
    workforce.leave("node-3", "it was killed")
    del world.generation.placement["node-3"]
    joined: list[object] = []
    world.control.resize({"node-1": 1, "node-2": 1, "node-3": 1})
    world.moves.serve(world.generation, 1.0, lambda generation, nodes: joined.append(nodes))
    assert not joined
    assert world.control.target is None
    assert "node-3" not in world.pool.there, "nobody uses it"
    (changed,) = [event for event in world.record.events() if event.kind == "resize-changed"]
    assert changed.content["reason"] == "node-3 lost its processes again and again"
    assert changed.content["unstarted"] == []


@pytest.mark.parametrize("stays", [False, True])
def test_what_is_asked_meanwhile_is_not_replaced_by_what_is_left_of_an_older_wish(stays: bool) -> None:
    world = World(room=4)
    if stays:
        in_place(world)
    newer = {"node-1": 1, "node-2": 1}
    start = world.pool.start

    def asked_meanwhile(name: str, slots: int, entry: Entry, admit: Admit = admit_none) -> None:
        if name == "node-5":
            world.control.resize(newer, "capacity", by=99.0)
        start(name, slots, entry, admit)

    world.pool.start = asked_meanwhile  # type: ignore[method-assign]
    world.control.resize({"node-1": 1, "node-4": 1, "node-5": 1})
    world.moves.serve(world.generation, grace=1.0)
    assert world.kinds()[-1] == "resize-changed"
    assert world.record.events()[-1].content["unstarted"] == ["node-5"]
    assert (world.control.target, world.control.reason, world.control.by) == (newer, "capacity", 99.0)


def test_a_node_is_silent_by_what_could_be_heard_however_late_the_launcher_looks() -> None:
    world = World(9)
    world.exchange.said = Heartbeat(1, 0)
    assert not world.members.look()
    for _ in range(5):
        world.exchange.listened += 1.5
        assert not world.members.look()
    world.exchange.listened += 60.0
    world.exchange.said = Heartbeat(2, 0)
    assert not world.members.look(), "they were heard, only not looked at"
    turns = 0
    while not (lost := world.members.look()):
        world.exchange.listened += 1.5
        turns += 1
        assert turns < 10
    assert set(lost) == {"node-1", "node-2", "node-3"}
    assert turns == 6


def test_options_are_checked() -> None:
    for bad in ({"minimum": 0}, {"node_timeout": 0.0}, {"rescue": -1.0}, {"start": "thread"}):
        with pytest.raises(OptionError):
            Options(**bad)
    with pytest.raises(OptionError, match="cpus"):
        LocalNodes(cpus=0.0)


def test_gpus_are_counted_without_touching_them(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert devices.visible({}, tmp_path) == ("0", "1")
    environment = {devices.VISIBLE: "4,GPU-7,6"}
    devices.hold_to((), environment)
    assert environment[devices.VISIBLE] == "4,GPU-7,6"
    devices.hold_to((0, 2), environment)
    assert environment[devices.VISIBLE] == "4,6"
    with pytest.raises(ClusterError, match="GPU 2 is asked for; this machine has 2"):
        devices.hold_to((2,), environment)
    alone: dict[str, str] = {devices.VISIBLE: ""}
    devices.hold_to((1,), alone)
    assert alone == {devices.VISIBLE: ""}, "slots are processors there"
    assert devices.visible({}, tmp_path / "none") == ()
    assert devices.visible({"CUDA_VISIBLE_DEVICES": "3, GPU-5"}, tmp_path) == ("3", "GPU-5")
    for nothing in ("", "-1"):
        assert devices.visible({"CUDA_VISIBLE_DEVICES": nothing}, tmp_path) == ()


def test_local_nodes_share_the_gpus_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.infra.training.local_nodes._NODE", "no.such.module")
    with LocalNodes(gpus=["0", "1", "2"]) as nodes:
        nodes.start("a", 2, Entry("", "00" * 32, "r", "a", "ka", "", ""))
        with pytest.raises(ClusterError, match="needs 2 GPUs and 1 of 3 are free"):
            nodes.start("b", 2, Entry("", "00" * 32, "r", "b", "kb", "", ""))
        nodes.kill("a")
        nodes.start("b", 3, Entry("", "00" * 32, "r", "b", "kc", "", ""))


@pytest.mark.skipif(cgroups.find_controller() is None, reason="no control group can be made here")
def test_a_node_is_held_to_its_processors_and_its_group_goes_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "stays.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr("ebbflow.infra.training.local_nodes._NODE", "stays")
    with LocalNodes(cpus=0.25, gpus=(), environment={"PYTHONPATH": str(tmp_path)}) as nodes:
        nodes.start("a", 2, Entry("", "00" * 32, "r", "a", "ka", "", ""))
        group = nodes._nodes["a"].group
        assert group is not None
        quota = group / "cpu.max" if (group / "cpu.max").exists() else group / "cpu.cfs_quota_us"
        assert quota.read_text().split()[0] == "200000"  # while it starts
        (nodes._nodes["a"].folder / "ready").touch()
        assert nodes.lost("a") == ""
        assert quota.read_text().split()[0] == "50000"
        nodes.kill("a")
        assert not group.exists()
        nodes.start("b", 1, Entry("", "00" * 32, "r", "b", "kb", "", ""))
        other = nodes._nodes["b"].group
    assert other is not None
    assert not other.exists()


def test_a_node_that_does_not_come_up_is_ended_and_the_others_are_waited_for() -> None:
    world = World(9, form=30.0)
    in_place(world)
    target = {"node-1": 1, "node-2": 1, "node-3": 1, "node-4": 1, "node-5": 1}
    world.control.resize(target)
    joined: list[object] = []

    def serve() -> None:
        world.moves.serve(world.generation, 1.0, lambda generation, nodes: joined.append(nodes))

    serve()
    assert {"node-4", "node-5"} <= set(world.pool.there)
    world.members["node-4"].heard -= 60.0
    serve()
    assert "node-4" not in world.pool.there
    assert world.record.events()[-1].content["without"] == ["node-4"]
    assert world.control.target == {name: 1 for name in target if name != "node-4"}
    world.members["node-5"].beat = Heartbeat(1, 0)
    serve()
    assert joined == [{"node-5": 1}]
