"""Aggregators as processes: two trainings share one, a killed one is noticed, and none outlives its parent."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from ebbflow.infra.aggregation import shared_process
from ebbflow.infra.aggregation.agent import AggregationAgent
from ebbflow.infra.aggregation.process import AggregatorProcess
from ebbflow.infra.aggregation.registry import AggregatorRecord
from ebbflow.infra.aggregation.rules import Sgd
from ebbflow.infra.aggregation.timing import HeldTensor
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.machine.encrypted_router import CurveKeys
from ebbflow.infra.training.service.aggregator_sets import AggregatorGroup
from tests.infra.aggregation.round_worker import RoundWorker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.fixture
def process() -> Iterator[AggregatorProcess]:
    made = AggregatorProcess("A", threads=2)
    yield made
    made.close()


def _agent(process: AggregatorProcess, job: str, timeout_s: float = 60.0) -> RoundWorker:
    keys = CurveKeys.make()
    process.command(do="admit", job=job, workers={"w0": keys.public})
    return RoundWorker(
        AggregationAgent(keys, {"A": process.where}, {"t": ["A"]}, timeout_s=timeout_s, retry_s=0.5)
    )


def test_two_trainings_share_a_process(process: AggregatorProcess) -> None:
    agents = {job: _agent(process, job) for job in ("first", "second")}
    for i, agent in enumerate(agents.values()):
        agent.init({"t": np.full(4, i, np.float32)}, Sgd(lr=1.0))
    for number in range(3):
        found = [agent.push({"t": np.ones(4, np.float32).data}, number)["t"] for agent in agents.values()]
        assert [one.tolist() for one in found] == [[-number - 1] * 4, [-number] * 4]
    process.command(do="remove", job="first")
    found = process.command(do="status")
    assert found == {"done": "status", "refused": 0, "tensors": 1, "bytes": 16, "updates": 6}
    record = AggregatorRecord.of(process.command(do="held")["record"])
    assert (record.where, record.updates, record.moved) == (process.where, 6, 0)
    assert record.held == {"second": {"t": HeldTensor(16, round=3)}}
    agents["second"].push({"t": np.ones(4, np.float32).data}, 3)
    for agent in agents.values():
        agent.close()


def test_as_many_files_may_be_open_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 256 if soft > 256 else soft - 1
    found = []

    def stop(*_: object, **__: object) -> None:
        found.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        raise AggregationError("enough")

    monkeypatch.setattr(shared_process, "Aggregator", stop)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        process = AggregatorProcess("A")
        try:
            found.append(resource.prlimit(process.pid, resource.RLIMIT_NOFILE))
        finally:
            process.close()
        with pytest.raises(AggregationError, match="enough"):
            shared_process.serve_shared(cast(Ledger, None), "a1", "127.0.0.1", 0, 1, 1.0, lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [(hard, hard)] * 2


def test_commands_that_break_their_form(process: AggregatorProcess) -> None:
    for wrong in (
        {"do": "steal"},
        {"do": "admit", "job": 1},
        {"do": "admit", "job": "a", "workers": {"w": 1}},
    ):
        with pytest.raises(AggregationError, match="must be admit, dismiss, remove, status or held"):
            process.command(**wrong)
    with pytest.raises(AggregationError, match="64 hexadecimal digits"):
        process.command(do="admit", job="a", workers={"w": "short"})


def test_answers_that_come_too_late_are_those_of_no_other_command() -> None:
    group = AggregatorGroup("127.0.0.1", 1)
    try:
        group.start()
        (pid,) = group.pids.values()
        os.kill(pid, signal.SIGSTOP)
        assert group.held() == {}
        os.kill(pid, signal.SIGCONT)
        group.remove("job")
        with pytest.raises(AggregationError, match="64 hexadecimal digits"):
            group.admit("job", {"w": "short"})
        end = time.monotonic() + 150.0
        while not (found := group.held()):
            assert time.monotonic() < end
        assert found["aggregator-1"]["held"] == {}
    finally:
        group.close()


def test_one_that_does_not_read_holds_nobody_up(process: AggregatorProcess) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    long = "job" * 100_000  # more than a pipe takes
    with pytest.raises(AggregationError, match=r"aggregator A must read a command within 0\.5 s"):
        process.command(0.5, do="remove", job=long)
    os.kill(process.pid, signal.SIGCONT)
    assert process.command(do="status")["done"] == "status", "what was left of the command went first"
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(AggregationError, match="must read a command"):
        process.command(0.0, do="remove", job=long)
    process.close()
    assert process.ended


def test_an_aggregator_that_is_killed_is_noticed(process: AggregatorProcess) -> None:
    agent = _agent(process, "job", timeout_s=2.0)
    agent.init({"t": np.ones(4, np.float32)}, Sgd())
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(AggregationError, match="aggregator A must answer for tensor 't' within 2 s"):
        agent.pull(["t"], 0)
    with pytest.raises(AggregationError, match="aggregator A has ended"):
        process.command(do="status")
    agent.close()


def test_it_ends_with_its_input() -> None:
    arguments = [sys.executable, "-m", "ebbflow.infra.aggregation.process", "A"]
    ended = subprocess.run(arguments, input=b"no command\n", capture_output=True, timeout=100, check=False)
    first, second = ended.stdout.decode().splitlines()
    assert '"address": "127.0.0.1:' in first
    assert second == '{"error": "a command must be a JSON object on one line"}'
    assert (ended.returncode, ended.stderr) == (0, b"")
    wrong = subprocess.run([*arguments, "no.such.host."], capture_output=True, timeout=100, check=False)
    assert wrong.returncode == 1
    assert b"aggregator A: an aggregator cannot listen on no.such.host." in wrong.stderr
