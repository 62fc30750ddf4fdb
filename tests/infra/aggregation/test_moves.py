"""Tensors that move while they are trained: nothing of the trajectory changes, and nothing is kept behind."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ebbflow.infra.aggregation import moves
from ebbflow.infra.aggregation.aggregator import SERVICE
from ebbflow.infra.aggregation.frames import Kind, TensorFrame, encode
from ebbflow.infra.aggregation.master_copy import MasterCopy
from ebbflow.infra.aggregation.rules import Adam, OptimizerState, Sgd, as_bfloat16, gradient_sum
from ebbflow.infra.aggregation.same_machine import shared_copy
from ebbflow.infra.aggregation.timing import MEASURED, WARM_UP
from ebbflow.infra.errors import AggregationError, InfraError
from tests.infra.aggregation.round_worker import RoundWorker
from tests.infra.aggregation.services import PATIENCE, MovingService, together

SIZES = {"weight": 40000, "bias": 7}


def _gradient(worker: int, number: int, size: int) -> np.ndarray:
    return np.random.default_rng(1000 * worker + number).standard_normal(size).astype(np.float32)


def _pushed(worker: RoundWorker, number: int) -> list[float]:
    found: list[float] = worker.push({"weight": np.ones(3, np.float32).data}, number)["weight"].tolist()
    return found


def _trained_until(worker: RoundWorker, hosts: tuple[str, ...]) -> int:
    """Train until a tensor's aggregators are these; return the round that begins."""
    number, end = 0, time.monotonic() + PATIENCE
    while worker.agent.table["weight"] != hosts:
        assert time.monotonic() < end, worker.agent.table
        assert _pushed(worker, number) == [-number - 1] * 3
        number += 1
    return number


def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("rule", "dtype", "mirrors", "copies"),
    [
        (Sgd(lr=0.1, momentum=0.9), "float32", False, "memory"),
        (Adam(decoupled=True, weight_decay=0.1), "bfloat16", False, "sent"),
        (Adam(), "float32", True, "unread"),
    ],
)
def test_tensors_that_move_every_5_rounds_train_as_those_that_stay(
    rule: Sgd | Adam, dtype: str, mirrors: bool, copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to the bit, moments included: whichever aggregator sums, it does so in the order of workers."""
    taken: list[str] = []

    def take(frame: TensorFrame) -> TensorFrame:
        taken.append("memory" if "memory" in frame.options else "sent")
        if taken[-1] == "memory" and copies == "unread":
            raise InfraError("it is another machine's")
        return shared_copy(frame)

    warmed: list[int] = []
    warm = MasterCopy.warm

    def warm_up(tensor: MasterCopy) -> None:
        warmed.append(len(tensor.slots))
        warm(tensor)

    monkeypatch.setattr(MasterCopy, "warm", warm_up)
    monkeypatch.setattr(moves, "shared_copy", take)
    monkeypatch.setattr(moves, "_LEAST_SHARED", 0)
    if copies == "sent":
        monkeypatch.setattr(moves, "may_be_near", lambda _: False)
    names, rounds, workers = ("A", "B", "C"), 40, 3
    begin = {name: np.ones(size, np.float32) for name, size in SIZES.items()}
    table = {"weight": ["A", "D"], "bias": ["B", "D"]} if mirrors else {"weight": ["A"], "bias": ["B"]}
    ended: dict[int, dict[str, np.ndarray]] = {}
    with MovingService(*names, "D") as service:
        team = service.team("job", table, workers)
        over = threading.Event()

        def mover() -> None:
            while not over.wait(0.02):
                target = names[team[0].number // 5 % len(names)]
                where = target, service.addresses[target]
                for name in set(names) - {target}:
                    service.aggregators[name].move({("job", tensor): where for tensor in SIZES})

        def work(place: int, worker: RoundWorker) -> None:
            worker.init(begin, rule)
            found = worker.pull(SIZES, 0)
            for number in range(rounds):
                gradients = {name: _gradient(place, number, size) for name, size in SIZES.items()}
                sent = {
                    name: (as_bfloat16(one) if dtype == "bfloat16" else one).data
                    for name, one in gradients.items()
                }
                found = worker.push(sent, number, dtype=dtype)
                worker.number = number
                time.sleep(0.01)
            ended[place] = {name: one.copy() for name, one in found.items()}

        thread = threading.Thread(target=mover)
        thread.start()
        try:
            together(*(lambda i=i, one=one: work(i, one) for i, one in enumerate(team)))  # type: ignore[misc]
        finally:
            over.set()
            thread.join()
        assert sum(one.moved for one in service.aggregators.values()) >= 4
        assert set(taken) == ({"memory", "sent"} if copies == "unread" else {copies})
        assert (2 in warmed) == (copies == "memory"), (
            "memory that workers read is there before they wait for it"
        )
        states = team[0].agent.states(SIZES, rounds)

    for name, size in SIZES.items():
        expected, state = begin[name].copy(), OptimizerState()
        for number in range(rounds):
            gradients = [_gradient(worker, number, size) for worker in range(workers)]
            if dtype == "bfloat16":
                gradients = [(as_bfloat16(g).astype(np.uint32) << 16).view(np.float32) for g in gradients]
            rule.update(expected, gradient_sum(gradients), state)
        assert [ended[place][name].tobytes() == expected.tobytes() for place in range(workers)] == [
            True
        ] * workers
        kept = np.frombuffer(states[name].payload, np.float32)
        assert kept.tobytes() == b"".join(one.tobytes() for one in state.moments.values())


def test_a_tensor_is_gone_where_it_was_and_workers_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = MasterCopy.fill

    def late(tensor: MasterCopy, frame: TensorFrame) -> None:
        _until(lambda: any(one.kind is Kind.PUSH for _, one in list(tensor.waiting)), "a gradient before it")
        fill(tensor, frame)

    monkeypatch.setattr(MasterCopy, "fill", late)
    with MovingService("A", "B") as service:
        (worker,) = service.team("job", {"weight": ["A"]}, 1)
        worker.init({"weight": np.zeros(3, np.float32)}, Sgd(lr=1.0))
        worker.push({"weight": np.ones(3, np.float32).data}, 0)
        target = {("job", "weight"): ("B", service.addresses["B"])}
        service.aggregators["A"].move(target)
        _until(lambda: service.hosts("job") == {"weight": {"A", "B"}}, "B expects it")
        for number in range(1, 4):
            assert (
                worker.push({"weight": np.ones(3, np.float32).data}, number)["weight"].tolist()
                == [-number - 1] * 3
            )
        assert worker.agent.table == {"weight": ("B",)}
        _until(lambda: service.hosts("job") == {"weight": {"B"}}, "A has deleted it")
        assert service.aggregators["A"].moved == 1
        assert service.aggregators["B"].waited > service.aggregators["A"].waited == 0
        service.aggregators["A"].close()
        assert _pushed(worker, 4) == [-5] * 3


def test_tensors_move_one_after_another_and_together_where_there_is_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("a", "b", "c")
    monkeypatch.setattr(moves, "_AT_ONCE", 1)
    with MovingService("A", "B") as service:
        (worker,) = service.team("job", {name: ["A"] for name in names}, 1)
        old = service.aggregators["A"]
        worker.init({name: np.zeros(3, np.float32) for name in names}, Sgd(lr=1.0))
        worker.pull(names, 0)
        where = {("job", name): ("B", service.addresses["B"]) for name in names}
        old.move(where)
        most, number, end = 0, 0, time.monotonic() + PATIENCE
        while old.held():
            assert time.monotonic() < end
            old.move(where)
            most = max(most, len(old._moves._moves))
            ones = {name: np.ones(3, np.float32).data for name in names}
            assert {float(one[0]) for one in worker.push(ones, number).values()} == {-number - 1}
            number += 1
        assert (most, old.moved) == (1, 3)
        back = service.aggregators["B"]
        _until(lambda: len(back.held()) == 3, "B has them")
        there = dict.fromkeys(where, ("A", service.addresses["A"]))

        def moving(within_s: float) -> int:
            back.move(there, within_s)
            return len(back._moves._moves)

        _until(lambda: moving(60.0) == 1, "one of them is on its way")
        _until(lambda: moving(0.1) == 3, "the others are not kept back")


def test_a_tensor_stays_where_its_new_aggregator_is_lost_before_workers_know() -> None:
    with MovingService("A", "B") as service:
        (worker,) = service.team("job", {"weight": ["A"]}, 1)
        worker.init({"weight": np.zeros(3, np.float32)}, Sgd(lr=1.0))
        worker.pull(["weight"], 0)
        service.aggregators["A"].move({("job", "weight"): ("B", service.addresses["B"])})
        _until(lambda: "B" in service.hosts("job")["weight"], "B expects it")
        service.aggregators["B"].close()
        service.aggregators["A"].keep_from("B")
        for number in range(3):
            assert (
                worker.push({"weight": np.ones(3, np.float32).data}, number)["weight"].tolist()
                == [-number - 1] * 3
            )
        assert worker.agent.table == {"weight": ("A",)}


def test_what_is_not_taken_in_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with MovingService("A", "B") as service:
        (worker,) = service.team("job", {"weight": ["A"]}, 1)
        worker.init({"weight": np.zeros(3, np.float32)}, Sgd(lr=1.0))
        old = service.aggregators["A"]
        monkeypatch.setattr(old._moves, "_hear", lambda *_: None)  # answers of the new host do not come
        old.move({("job", "weight"): ("B", service.addresses["B"])})
        _until(lambda: service.hosts("job") == {"weight": {"A", "B"}}, "B expects it")
        monkeypatch.setattr(moves, "_GIVE_UP", 0.0)
        old.move({})
        _until(lambda: service.hosts("job") == {"weight": {"A"}}, "B does not expect it any more")


def test_a_training_that_is_removed_while_a_copy_is_taken_gets_no_memory_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []
    tensor = MasterCopy.expected("B", "job", "weight", 1)
    tensors = {("job", "weight"): tensor}

    def apart(act: Callable[[], None], then: Callable[[], None]) -> None:
        act()
        then()

    def slots(job: str, size: int) -> tuple[()]:
        asked.append((job, size))
        return ()

    one = moves.TensorMoves(
        "B", tensors, lambda *_: None, apart, lambda act: act(), lambda _: None, lambda *_: None, lambda _: None,
        slots,
    )  # fmt: skip

    def fill(self: MasterCopy, _: TensorFrame) -> None:
        self.parameters = np.zeros(4, np.float32)
        tensors.clear()

    monkeypatch.setattr(MasterCopy, "fill", fill)
    try:
        one._take_copy(tensor, "A", 1, TensorFrame(Kind.MOVE, "weight", 0, b"", options={"near": True}))
    finally:
        one.close()
    assert asked == []


def test_workers_go_on_with_a_mirror_where_a_copy_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with MovingService("A", "B", "C") as service:
        (worker,) = service.team("job", {"weight": ["A", "C"]}, 1)
        worker.init({"weight": np.zeros(3, np.float32)}, Sgd(lr=1.0))
        worker.pull(["weight"], 0)
        monkeypatch.setattr(service.aggregators["A"]._moves, "_send_copy", lambda *_: None)
        service.aggregators["A"].move({("job", "weight"): ("B", service.addresses["B"])})
        _until(lambda: "B" in service.hosts("job")["weight"], "B expects it")
        number = _trained_until(worker, ("B", "C"))
        with ThreadPoolExecutor(1) as threads:
            pushed = threads.submit(_pushed, worker, number)  # B keeps it until the copy is there
            service.aggregators["A"].close()
            worker.agent.drop("A")
            service.aggregators["B"].keep_from("A")
            assert pushed.result(PATIENCE) == [-number - 1] * 3
        assert _pushed(worker, number + 1) == [-number - 2] * 3
        assert worker.agent.table == {"weight": ("C",)}


def test_workers_go_on_with_a_mirror_where_they_are_sent_to_an_aggregator_that_is_lost() -> None:
    with MovingService("A", "B", "C") as service:
        (worker,) = service.team("job", {"weight": ["A", "C"]}, 1)
        worker.init({"weight": np.zeros(3, np.float32)}, Sgd(lr=1.0))
        worker.pull(["weight"], 0)
        service.aggregators["A"].move({("job", "weight"): ("B", service.addresses["B"])})
        _until(lambda: "B" in service.hosts("job")["weight"], "B expects it")
        worker.agent.drop("B")  # it is told of the loss before it is sent there
        service.aggregators["B"].close()
        number = _trained_until(worker, ("C",))
        assert _pushed(worker, number) == [-number - 1] * 3
        service.aggregators["A"].keep_from("B")
        _until(lambda: all(one.mirror for one in service.aggregators["A"].held()), "A's copy counts no more")


def test_parameters_that_have_come_stay_when_their_aggregator_is_lost() -> None:
    with MovingService("A", "B") as service:
        (worker,) = service.team("job", {"weight": ["A", "B"]}, 1)
        worker.init({"weight": np.ones(3, np.float32)}, Sgd(lr=1.0))
        agent = worker.agent
        agent.pull(["weight"], 0)
        end = time.monotonic() + PATIENCE
        while agent._missing(Kind.PARAMETERS, ["weight"]):
            assert time.monotonic() < end
            agent._pump(0.1)
        agent.drop("A")
        assert agent.parameters(["weight"]).keys() == {"weight"}


def test_a_mirror_does_not_take_the_tensor_that_it_mirrors() -> None:
    with MovingService("A", "B") as service:
        (worker,) = service.team("job", {"weight": ["A", "B"]}, 1)
        worker.init({"weight": np.zeros(3, np.float32)}, Sgd(lr=1.0))
        service.aggregators["A"].move({("job", "weight"): ("B", service.addresses["B"])})
        for number in range(5):
            worker.push({"weight": np.ones(3, np.float32).data}, number)
        assert worker.agent.table == {"weight": ("A", "B")}
        assert service.aggregators["A"].moved == 0


def test_only_aggregators_may_move_tensors(caplog: pytest.LogCaptureFixture) -> None:
    with MovingService("A", "B") as service:
        worker, other = service.team("job", {"weight": ["A"]}, 2)
        worker.init({"weight": np.zeros(3, np.float32)}, Sgd(lr=1.0))
        options = {"do": "expect", "job": "other", "migration": 1}
        socket = other.agent._links.sockets["A"]
        socket.send_multipart(encode([TensorFrame(Kind.MOVE, "weight", options=options)]))
        _until(lambda: service.aggregators["A"].refused == 1, "the connection is ended")
        assert service.hosts("other") == {}
        assert "w1 must not send MOVE" in caplog.text
        assert SERVICE not in {one.job_id for one in service.aggregators["A"].held()}


def test_what_is_moved_without_its_form_is_refused() -> None:
    with MovingService("A", "B") as service:
        moves = service.aggregators["A"]._moves
        for options in ({}, {"job": "", "migration": 1}, {"job": "j", "migration": 0}, {"job": "j"}):
            with pytest.raises(AggregationError, match="must have the training and the number"):
                moves.receive("B", b"c", TensorFrame(Kind.MOVE, "weight", options=options))


def test_rounds_are_measured_after_a_warm_up() -> None:
    with MovingService("A") as service:
        (worker,) = service.team("job", {"weight": ["A"]}, 1)
        worker.init({"weight": np.zeros(3, np.float32)}, Sgd(lr=1.0))
        (tensor,) = service.aggregators["A"].held()
        for number in range(WARM_UP + MEASURED):
            assert tensor.timing.profile is None
            worker.push({"weight": np.ones(3, np.float32).data}, number)
        found = tensor.timing.profile
        assert found is not None
        assert 0 < found.execution_us < found.iteration_us
