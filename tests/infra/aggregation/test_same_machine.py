"""Gradients and parameters that pass through memory of one machine: the same numbers, and sent where that fails."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ebbflow.infra.aggregation import connections, same_machine
from ebbflow.infra.aggregation.frames import AggregatorAddress, Kind, TensorFrame, encode
from ebbflow.infra.aggregation.rules import Sgd
from ebbflow.infra.aggregation.same_machine import LEAST, AggregatorMemory, WorkerMemory
from ebbflow.infra.errors import AggregationError, InfraError
from ebbflow.infra.machine.memory_segments import MemorySegment, SegmentName, open_segment
from tests.infra.aggregation.round_worker import RoundWorker
from tests.infra.aggregation.services import PATIENCE, MovingService

pytestmark = pytest.mark.timeout(180)

SIZE = LEAST  # elements, of four bytes each: large enough not to be sent
ADDRESS = AggregatorAddress("127.0.0.1:7", "k")


@pytest.fixture(name="sent")
def _sent(monkeypatch: pytest.MonkeyPatch) -> list[TensorFrame]:
    """All that workers send."""
    found: list[TensorFrame] = []

    def spy(frames: list[TensorFrame]) -> Any:
        found.extend(frames)
        return encode(frames)

    monkeypatch.setattr(connections, "encode", spy)
    return found


@pytest.fixture(name="service")
def _service() -> Iterator[MovingService]:
    with MovingService("A", "B") as made:
        yield made


def _begin(worker: RoundWorker) -> None:
    worker.init({"weight": np.zeros(SIZE, np.float32)}, Sgd(lr=1.0))
    worker.pull(["weight"], 0)


def _round(worker: RoundWorker, number: int) -> None:
    found = worker.push({"weight": np.ones(SIZE, np.float32).data}, number)["weight"]
    assert (found == -(number + 1)).all()


def _pushed(sent: list[TensorFrame]) -> list[int]:
    found = [len(one.payload) for one in sent if one.kind is Kind.PUSH]
    sent.clear()
    return found


@pytest.mark.parametrize("hosts", [("A",), ("A", "B")])
def test_gradients_are_sent_no_more_once_the_aggregators_have_shown_that_they_read_them(
    service: MovingService, sent: list[TensorFrame], hosts: tuple[str, ...]
) -> None:
    [worker] = service.team("job", {"weight": hosts}, 1)
    _begin(worker)
    for number in range(6):
        _round(worker, number)
    sizes = _pushed(sent)
    assert sizes[-2 * len(hosts) :] == [0] * 2 * len(hosts), "a mirror reads them, too"


def test_nothing_is_shared_where_the_aggregator_cannot_read(
    service: MovingService, sent: list[TensorFrame], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: SegmentName) -> memoryview:
        raise InfraError("not permitted")

    monkeypatch.setattr(same_machine, "open_segment", refuse)
    [worker] = service.team("job", {"weight": ["A"]}, 1)
    _begin(worker)
    for number in range(3):
        _round(worker, number)
    assert _pushed(sent) == [4 * SIZE] * 3


def test_an_aggregator_that_cannot_read_any_more_is_sent_what_it_missed(
    service: MovingService, sent: list[TensorFrame], monkeypatch: pytest.MonkeyPatch
) -> None:
    [worker] = service.team("job", {"weight": ["A"]}, 1)
    _begin(worker)
    _round(worker, 0)
    _round(worker, 1)
    assert _pushed(sent)[-1] == 0

    def refuse(name: SegmentName) -> memoryview:
        raise InfraError("not permitted")

    monkeypatch.setattr(same_machine, "open_segment", refuse)
    service.aggregators["A"]._memory = AggregatorMemory()
    _round(worker, 2)
    _round(worker, 3)
    assert _pushed(sent) == [0, 4 * SIZE, 4 * SIZE]


def test_a_worker_that_cannot_read_is_sent_parameters(
    service: MovingService, sent: list[TensorFrame]
) -> None:
    [worker] = service.team("job", {"weight": ["A"]}, 1)

    class Blind(same_machine.SegmentViews):
        def payload(self, options: Any) -> memoryview:
            raise InfraError("not permitted")

    worker.agent._memory._views = Blind()
    _begin(worker)
    for number in range(3):
        _round(worker, number)
    assert _pushed(sent) == [4 * SIZE] * 3


def test_what_cannot_be_read_is_asked_for_and_sent_again_once(
    service: MovingService, sent: list[TensorFrame], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many answers say so: they arrive together, and each would send all that is waited for."""
    names = [f"t{at}" for at in range(20)]
    [worker] = service.team("job", {name: ["A"] for name in names}, 1)
    worker.agent._retry = PATIENCE  # so that nothing is sent again for being late
    zeros, ones = np.zeros(LEAST // 4, np.float32), np.ones(LEAST // 4, np.float32)

    def refuse(name: SegmentName) -> memoryview:
        raise InfraError("not permitted")

    def sent_of(kind: Kind) -> int:
        return sum(one.kind is kind for one in sent)

    worker.init(dict.fromkeys(names, zeros), Sgd(lr=1.0))
    worker.pull(names, 0)
    worker.push(dict.fromkeys(names, ones.data), 0)
    sent.clear()
    monkeypatch.setattr(same_machine, "open_segment", refuse)
    service.aggregators["A"]._memory = AggregatorMemory()
    worker.push(dict.fromkeys(names, ones.data), 1)
    assert sent_of(Kind.PUSH) == 2 * len(names), "to the aggregator that cannot read"

    [worker] = service.team("blind", {name: ["B"] for name in names}, 1)
    worker.agent._retry = PATIENCE
    sent.clear()
    monkeypatch.setattr(same_machine, "open_segment", open_segment)
    monkeypatch.setattr(worker.agent._memory._views, "payload", refuse)
    worker.init(dict.fromkeys(names, zeros), Sgd(lr=1.0))
    assert (worker.pull(names, 0)[names[-1]] == zeros).all()
    assert sent_of(Kind.PULL) == 2 * len(names), "by the worker that cannot read"


def test_who_names_memory_that_is_not_its_own_is_refused_and_stays_connected(service: MovingService) -> None:
    [worker] = service.team("job", {"weight": ["A"]}, 1)
    _begin(worker)
    foreign = MemorySegment(4 * SIZE)
    named = list(foreign.name._replace(proof="0" * 64))
    frame = TensorFrame(Kind.PUSH, "weight", 0, options={"memory": named, "at": [0, 4 * SIZE]}, view=1)
    with worker.agent._lock:
        worker.agent._links.sockets["A"].send_multipart(encode([frame]))
    _round(worker, 0)
    assert service.aggregators["A"].refused == 0


@pytest.mark.parametrize("at", [None, [0], [0, -1], [-1, 4], [True, 4], [97, 4], [0, "4"], [0, 1 << 40]])
def test_a_part_that_is_not_within_its_segment_is_refused(at: object) -> None:
    segment = MemorySegment(100)
    memory, options = AggregatorMemory(), {"memory": list(segment.name), "at": at}
    with pytest.raises(AggregationError):
        memory.gradient("job", TensorFrame(Kind.PUSH, "t", options=options))


@pytest.mark.parametrize(
    ("address", "near"),
    [("127.0.0.1:7", True), ("[::1]:7", True), ("localhost:7", True), ("10.77.0.2:7", False), ("agg.local:7", False)],
)  # fmt: skip
def test_only_a_loopback_address_is_taken_for_this_machine(address: str, near: bool) -> None:
    memory = WorkerMemory()
    memory.meet("A", AggregatorAddress(address, "k"))
    [frame] = memory.outgoing("A", [TensorFrame(Kind.PULL, "t")])
    assert ("memory" in frame.options) is near


def test_memory_of_processes_that_are_gone_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(same_machine.time, "monotonic", lambda: now[0])
    views, segments = same_machine.SegmentViews(), [MemorySegment(10) for _ in range(3)]
    views.open(list(segments[0].name))
    now[0] = 50.0
    views.open(list(segments[1].name))
    now[0] = 100.0
    views.open(list(segments[2].name))
    assert set(views._views) == {segments[1].name, segments[2].name}
    now[0] = 120.0
    views.open(list(segments[2].name))
    now[0] = 170.0
    views.open(list(segments[2].name))
    assert set(views._views) == {segments[2].name}, "without a new one, too"


def test_a_training_that_is_removed_keeps_no_memory_of_its_workers_and_uses_up_none_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(same_machine, "_OPEN", 2)
    monkeypatch.setattr(same_machine, "_BYTES", 100)
    memory, segments = AggregatorMemory(), [MemorySegment(40) for _ in range(4)]
    names = [{"memory": list(one.name)} for one in segments]
    assert [memory.reads("a", one) for one in names] == [True, True, False, False]
    assert memory.reads("a", names[0])
    assert memory.reads("b", names[2])
    large = MemorySegment(61)
    assert not memory.reads("b", {"memory": list(large.name)}), "101 bytes"
    memory.remove("a")
    assert list(memory._views) == ["b"]
    assert memory.reads("a", names[3])


def test_small_tensors_and_other_workers_than_of_this_training_share_nothing() -> None:
    memory = AggregatorMemory()
    assert memory.slots("a", LEAST - 1) == ()
    one, other = memory.slots("a", LEAST), memory.slots("b", LEAST)
    assert {slot.name[0][2] for slot in one} & {slot.name[0][2] for slot in other} == set()
    worker = WorkerMemory()
    worker.meet("A", ADDRESS)
    data = bytes(LEAST)
    assert worker.keep("t", data, ["A"]) == (data, {}), "it has not shown that it reads"
    worker._near["A"] = True
    assert worker.keep("t", data[1:], ["A"]) == (data[1:], {})
    assert worker.keep("t", data, ["A"])[1]["at"][1] == LEAST


def test_a_frame_on_its_way_to_another_machine_keeps_its_gradient_when_the_step_is_repeated() -> None:
    worker = WorkerMemory()
    worker.meet("near", ADDRESS)
    worker._near["near"] = True
    gradient = b"1" * LEAST

    def push(data: bytes, to: str) -> TensorFrame:
        payload, options = worker.keep("t", data, ["near", "far"])
        [frame] = worker.outgoing(to, [TensorFrame(Kind.PUSH, "t", 0, payload, options=options)])
        return frame

    queued = push(gradient, "far")
    assert (queued.payload, queued.options) == (gradient, {})
    again = push(b"2" * LEAST, "near")
    assert again.payload == b""
    assert bytes(queued.payload) == gradient
    read = AggregatorMemory().gradient("job", again)
    assert bytes(read.payload) == b"2" * LEAST
