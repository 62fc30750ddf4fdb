"""Aggregators and agents over real connections: rounds, trainings that cannot reach each other, broken messages."""

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from ebbflow.infra.aggregation import master_copy
from ebbflow.infra.aggregation.agent import AggregationAgent
from ebbflow.infra.aggregation.aggregator import Aggregator
from ebbflow.infra.aggregation.frames import AggregatorAddress, Kind, TensorFrame, decode, encode
from ebbflow.infra.aggregation.master_copy import MasterCopy
from ebbflow.infra.aggregation.rules import Adam, OptimizerState, Sgd, as_bfloat16, gradient_sum
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.machine.encrypted_router import CurveKeys
from tests.infra.aggregation.round_worker import RoundWorker
from tests.infra.aggregation.services import PATIENCE, together


@pytest.fixture
def service() -> Iterator["Service"]:
    with Service() as made:
        yield made


class Service:
    """Two aggregators, and agents of trainings that they admit."""

    def __init__(self) -> None:
        self.aggregators = {name: Aggregator(name, threads=2) for name in ("A", "B")}
        self.agents: list[RoundWorker] = []

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.agents, *self.aggregators.values()):
            one.close()

    @property
    def addresses(self) -> dict[str, AggregatorAddress]:
        return {name: AggregatorAddress(one.address, one.public) for name, one in self.aggregators.items()}

    def admit(self, job: str, workers: int) -> list[CurveKeys]:
        pairs = [CurveKeys.make() for _ in range(workers)]
        for one in self.aggregators.values():
            one.admit(job, {f"w{i}": pair.public for i, pair in enumerate(pairs)})
        return pairs

    def agent(
        self,
        keys: CurveKeys,
        timeout_s: float = PATIENCE,
        *,
        place: int = 0,
        places: int = 1,
        mirrors: bool = False,
    ) -> RoundWorker:
        table = {"weight": ["A", "B"], "bias": ["B", "A"]} if mirrors else {"weight": ["A"], "bias": ["B"]}
        agent = AggregationAgent(
            keys, self.addresses, table, timeout_s=timeout_s, retry_s=1.0, share_memory=place != 1
        )
        made = RoundWorker(agent, place, places)
        self.agents.append(made)
        return made


def _gradient(worker: int, number: int, size: int) -> np.ndarray:
    return np.random.default_rng(1000 * worker + number).standard_normal(size).astype(np.float32)


SIZES = {"weight": 40000, "bias": 7}
_LARGE = 1 << 17  # bytes of a tensor that is worked on in a thread


@pytest.mark.parametrize("rule", [Sgd(lr=0.1, momentum=0.9), Adam(decoupled=True, weight_decay=0.1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mirrors", [False, True])
def test_workers_train_as_one_process_does(
    service: Service, rule: Sgd | Adam, dtype: str, mirrors: bool
) -> None:
    """Equal to the bit: gradients are summed in the order of workers. With mirrors, an aggregator is lost halfway."""
    begin = {name: np.ones(size, np.float32) for name, size in SIZES.items()}
    rounds, workers = 12, 3
    ended: dict[int, dict[str, np.ndarray]] = {}
    halfway = threading.Barrier(workers)

    def sent(worker: int, number: int, size: int) -> np.ndarray:
        gradient = _gradient(worker, number, size)
        return as_bfloat16(gradient) if dtype == "bfloat16" else gradient

    def work(worker: int, agent: RoundWorker) -> None:
        agent.init(begin, rule)
        found = agent.pull(SIZES, 0)
        for number in range(rounds):
            if mirrors and number == rounds // 2:
                halfway.wait(PATIENCE)
                if worker == 0:
                    service.aggregators["A"].close()
                halfway.wait(PATIENCE)
                agent.agent.drop("A")
            gradients = {name: sent(worker, number, size).data for name, size in SIZES.items()}
            found = agent.push(gradients, number, dtype=dtype)
        ended[worker] = {name: one.copy() for name, one in found.items()}

    agents = [
        service.agent(keys, place=place, places=workers, mirrors=mirrors)
        for place, keys in enumerate(service.admit("job", workers))
    ]
    together(*(lambda i=i, agent=agent: work(i, agent) for i, agent in enumerate(agents)))

    for name, size in SIZES.items():
        expected, state = begin[name].copy(), OptimizerState()
        for number in range(rounds):
            gradients = [_gradient(worker, number, size) for worker in range(workers)]
            if dtype == "bfloat16":
                gradients = [(as_bfloat16(g).astype(np.uint32) << 16).view(np.float32) for g in gradients]
            rule.update(expected, gradient_sum(gradients), state)
        assert [ended[worker][name].tobytes() == expected.tobytes() for worker in range(workers)] == [
            True
        ] * workers


def test_two_trainings_do_not_reach_each_others_tensors(service: Service) -> None:
    first, second = (service.agent(service.admit(job, 1)[0]) for job in ("first", "second"))
    first.init({"weight": np.full(3, 5, np.float32)}, Sgd(lr=1.0))
    with pytest.raises(AggregationError, match="this training has no tensor 'weight' on aggregator A"):
        second.pull(["weight"], 0)
    with pytest.raises(AggregationError, match="this training has no tensor 'weight'"):
        second.push({"weight": np.ones(3, np.float32).data}, 0)
    second.init({"weight": np.full(2, 7, np.float32)}, Sgd(lr=1.0))
    assert second.push({"weight": np.ones(2, np.float32).data}, 0)["weight"].tolist() == [6, 6]
    assert first.pull(["weight"], 0)["weight"].tolist() == [5, 5, 5]


def test_a_key_that_is_not_admitted_gets_nothing(service: Service) -> None:
    owner = service.agent(service.admit("job", 1)[0])
    owner.init({"weight": np.ones(3, np.float32)}, Sgd())
    stranger = service.agent(CurveKeys.make(), timeout_s=1.5)
    with pytest.raises(AggregationError, match="aggregator A must answer for tensor 'weight' within"):
        stranger.pull(["weight"], 0)
    assert owner.pull(["weight"], 0)["weight"].tolist() == [1, 1, 1]
    with pytest.raises(AggregationError, match="a key must be 64 hexadecimal digits"):
        service.aggregators["A"].admit("job", {"w9": "no key"})


def test_an_aggregator_in_anothers_place_gets_nothing(service: Service) -> None:
    keys = service.admit("job", 1)[0]
    wrong = {
        name: AggregatorAddress(one.address, CurveKeys.make().public)
        for name, one in service.addresses.items()
    }
    agent = RoundWorker(AggregationAgent(keys, wrong, {"weight": ["A"]}, timeout_s=1.5))
    service.agents.append(agent)
    with pytest.raises(AggregationError, match="must answer"):
        agent.init({"weight": np.ones(3, np.float32)}, Sgd())


def _raw(service: Service, keys: CurveKeys) -> "zmq.Socket[bytes]":
    where = service.addresses["A"]
    one = zmq.Context.instance().socket(zmq.DEALER)
    one.curve_serverkey = bytes.fromhex(where.public)
    one.curve_publickey, one.curve_secretkey = bytes.fromhex(keys.public), bytes.fromhex(keys.secret)
    one.linger = 0
    one.reconnect_ivl = -1  # so that what is ended stays ended
    one.rcvtimeo = 150_000
    one.connect(f"tcp://{where.address}")
    return one


@pytest.mark.parametrize(
    "broken",
    [
        [b"garbage"],
        [b"garbage", b"more"],
        [bytes(encode([TensorFrame(Kind.PUSH, "weight", 0, b"\0" * 12)])[0]), b"\1" * 12],
        [bytes(one) for one in encode([TensorFrame(Kind.PARAMETERS, "weight")])],
    ],
)
def test_a_malformed_message_ends_its_connection_only(service: Service, broken: list[bytes]) -> None:
    keys = service.admit("job", 2)
    other = service.agent(service.admit("other", 1)[0])
    other.init({"weight": np.ones(3, np.float32)}, Sgd(lr=1.0))
    raw = _raw(service, keys[0])
    try:
        pull = [bytes(one) for one in encode([TensorFrame(Kind.PULL, "weight", 0)])]
        raw.send_multipart(pull)
        assert (
            decode(raw.recv_multipart())[0].kind is Kind.ERROR
        )  # it is heard: the training has no such tensor
        monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.send_multipart(broken)
        assert monitor.poll(150_000), "the connection is closed"
        raw.disable_monitor()
        monitor.close(linger=0)
    finally:
        raw.close()
    assert service.aggregators["A"].refused == 1
    assert other.push({"weight": np.ones(3, np.float32).data}, 0)["weight"].tolist() == [0, 0, 0]
    # its worker may connect once more
    again = service.agent(keys[0])
    again.init({"weight": np.ones(3, np.float32)}, Sgd())


def test_a_round_that_lost_a_worker_is_repeated_without_it(service: Service) -> None:
    """What was pushed in the view before does not count, and nothing has changed by it."""
    agents = [service.agent(keys, place=i, places=2) for i, keys in enumerate(service.admit("job", 2))]
    agents[0].init({"weight": np.zeros(3, np.float32)}, Sgd(lr=1.0))
    agents[1].agent.push("weight", np.full(3, 7, np.float32).data, 0, 1, 1, 2)
    agents[1].agent.flush()
    survivor = agents[0].agent
    survivor.abandon()
    assert agents[0].pull({"weight": 3}, 0)["weight"].tolist() == [0, 0, 0]
    agents[0].view, agents[0].places = 2, 1
    assert agents[0].push({"weight": np.ones(3, np.float32).data}, 0)["weight"].tolist() == [-1, -1, -1]
    agents[1].agent.push("weight", np.full(3, 7, np.float32).data, 1, 1, 1, 2)  # it was only slow
    agents[1].agent.flush()
    assert agents[0].push({"weight": np.ones(3, np.float32).data}, 1)["weight"].tolist() == [-2, -2, -2]


def test_a_step_that_workers_leave_out_changes_nothing_and_ends_the_round(service: Service) -> None:
    agent = service.agent(service.admit("job", 1)[0])
    agent.init({"weight": np.zeros(3, np.float32)}, Adam(lr=1.0))
    found = agent.push({"weight": np.full(3, np.inf, np.float32).data}, 0, skip=True)
    assert (agent.squares["weight"], found["weight"].tolist()) == (float("inf"), [0, 0, 0])
    agent.push({"weight": np.ones(3, np.float32).data}, 1)
    state = agent.agent.states(["weight"], 2)["weight"]
    assert state.options == {"step": 1, "moments": ["mean", "square"]}
    assert np.frombuffer(state.payload, np.float32).tolist() == pytest.approx([0.1] * 3 + [0.001] * 3)


def test_moments_that_come_with_parameters_are_used(service: Service) -> None:
    agent = service.agent(service.admit("job", 1)[0])
    both = np.array([1, 1, 1, 10, 10, 10], np.float32)
    agent.init({"weight": both}, Sgd(lr=1.0, momentum=0.5), step=1, moments=["momentum"])
    assert agent.push({"weight": np.ones(3, np.float32).data}, 0)["weight"].tolist() == [-5, -5, -5]


def test_what_does_not_fit_a_tensor_is_refused(service: Service) -> None:
    agent = service.agent(service.admit("job", 1)[0])
    agent.init({"weight": np.zeros(3, np.float32)}, Sgd())
    with pytest.raises(AggregationError, match="must have 3 elements, not 2"):
        agent.push({"weight": np.ones(2, np.float32).data}, 0)
    with pytest.raises(AggregationError, match="must have a multiple of 1 elements, above 0, not 0"):
        agent.init({"bias": np.zeros(0, np.float32)}, Sgd())
    with pytest.raises(AggregationError, match="must have a multiple of 3 elements"):
        agent.init({"bias": np.zeros(4, np.float32)}, Adam(), moments=["mean", "square"])
    with pytest.raises(AggregationError, match=r"moments of sgd must be .* or none"):
        agent.init({"bias": np.zeros(4, np.float32)}, Sgd(), moments=["mean", "square"])
    with pytest.raises(AggregationError, match="tensor 'other' has no aggregator"):
        agent.pull(["other"], 0)


def test_a_training_has_a_limit_of_bytes() -> None:
    with Service() as service:
        service.aggregators["C"] = Aggregator("C", max_bytes=100)
        keys = service.admit("job", 1)[0]
        agent = RoundWorker(
            AggregationAgent(keys, service.addresses, {"x": ["C"], "y": ["C"]}, timeout_s=PATIENCE)
        )
        service.agents.append(agent)
        agent.init({"x": np.zeros(20, np.float32)}, Sgd())
        with pytest.raises(AggregationError, match="at most 100 bytes together"):
            agent.init({"y": np.zeros(6, np.float32)}, Sgd())
        agent.init({"y": np.zeros(5, np.float32)}, Sgd())


def test_a_tensor_has_a_limit_of_bytes_with_its_moments(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_copy, "MAX_PAYLOAD", 120)
    keys = service.admit("job", 1)[0]
    agent = RoundWorker(
        AggregationAgent(keys, service.addresses, {"x": ["A"], "y": ["A"]}, timeout_s=PATIENCE)
    )
    service.agents.append(agent)
    agent.init({"x": np.zeros(10, np.float32)}, Adam())
    with pytest.raises(AggregationError, match="at most 120 bytes with its moments; 'y' has 132"):
        agent.init({"y": np.zeros(11, np.float32)}, Adam())


def test_a_worker_that_floods_a_busy_tensor_loses_its_connection(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is held up; requests beyond the limit are not kept."""
    hold = threading.Event()
    add_up = MasterCopy.sum

    def slow(copy: MasterCopy) -> None:
        hold.wait(PATIENCE)
        add_up(copy)

    monkeypatch.setattr(MasterCopy, "sum", slow)
    keys = service.admit("job", 1)[0]
    raw = _raw(service, keys)
    try:
        init = TensorFrame(Kind.INIT, "weight", payload=b"\0" * _LARGE, options={"rule": {"name": "sgd"}})
        raw.send_multipart([bytes(one) for one in encode([init])])
        assert decode(raw.recv_multipart())[0].kind is Kind.READY
        monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        push = [bytes(one) for one in encode([TensorFrame(Kind.PUSH, "weight", 0, b"\0" * _LARGE, view=1)])]
        with contextlib.suppress(zmq.Again):  # the connection may have ended before all are sent
            for _ in range(60):
                raw.send_multipart(push, zmq.NOBLOCK)
        assert monitor.poll(150_000), "the connection is closed"
        raw.disable_monitor()
        monitor.close(linger=0)
    finally:
        hold.set()
        raw.close()
    assert service.aggregators["A"].refused == 1
