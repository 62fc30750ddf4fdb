"""What a peer can do that speaks to a launcher, or to torch's store, and has no business there: nothing but be noted.

The peers here are on the same machine, which is the most that a network lets through.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import zmq
from torch.distributed import TCPStore

from ebbflow.infra.errors import LauncherLostError
from ebbflow.infra.protocols import TrainingJob
from ebbflow.infra.training.channel import keys, messages
from ebbflow.infra.training.channel.keys import KeyPair
from ebbflow.infra.training.channel.messages import MAX_FRAME, Question
from ebbflow.infra.training.channel.pipes import StreamMessage
from ebbflow.infra.training.channel.wire import (
    AgentEnd,
    Failure,
    Heartbeat,
    NodeEnd,
    NodeHeartbeat,
    NodeOrder,
    Order,
    RankState,
)
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.infra.training.process import channel
from ebbflow.infra.training.process.channel import Channel, Report
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.exchanges import Speakers

SCRIPT = Path(__file__).parents[1] / "launched_script.py"
PRELOAD = ("torch.distributed", "ebbflow.infra.training.process.world")
LONG = 150.0  # seconds: a bound for a busy machine, not an expectation


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, f"no {what} in {LONG:g} s"
        time.sleep(0.01)


class Peer:
    """Somebody with a ZeroMQ socket, and keys or none."""

    def __init__(self, address: str, server: str = "", pair: KeyPair | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if pair is not None:
            self.socket.curve_serverkey = keys.raw(server)
            self.socket.curve_publickey, self.socket.curve_secretkey = (
                keys.raw(pair.public),
                keys.raw(pair.secret),
            )
        self.socket.connect(f"tcp://{address}")

    def say(self, *frames: bytes) -> None:
        """Send where there is somebody who takes it."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(frames, zmq.NOBLOCK)

    def hears(self, seconds: float = 0.3) -> bool:
        return bool(self.socket.poll(seconds * 1000))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def speakers() -> Iterator[Speakers]:
    found = Speakers("a", "b")
    yield found
    found.close()


def refused(speakers: Speakers) -> list[str]:
    return [one.why for one in speakers.exchange.refusals.take(0.0, everything=True)]


def test_without_this_runs_key_nothing_can_be_said_or_heard(speakers: Speakers) -> None:
    launcher = speakers.open(1, {"a": range(1), "b": range(1, 2)})
    address, server = speakers.exchange.address, speakers.exchange.public
    said = messages.encode(Question("s", 1, 1, "post", Report("finished", 0, 1.0, 1, {"saved": True})))
    beat = messages.encode(NodeHeartbeat(Heartbeat(1, 1), 0))
    for peer in (
        Peer(address),
        Peer(address, server, KeyPair.make()),
        Peer(address, KeyPair.make().public, speakers.pairs["a"]),
    ):
        before = speakers.exchange.refusals.total
        for frame in (said, beat, b"", b"\0" * 100):
            peer.say(frame)
        until(lambda before=before: speakers.exchange.refusals.total > before, "refusal")  # type: ignore[misc]
        assert not peer.hears()
        peer.close()
    assert launcher.reports() == []
    assert speakers.exchange.look("a") == speakers.exchange.look("b") == (None, {})
    found = speakers.exchange.refusals.take(0.0, everything=True)
    # a connection that ended at once may be gone before its address could be asked for
    assert {one.address for one in found} <= {"127.0.0.1", ""}
    stranger = next(one for one in found if one.why == "its key is not one of this run's nodes")
    assert stranger.address == "127.0.0.1"


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, os.urandom(9000), b""])
def test_other_protocols_get_no_further_than_the_handshake(speakers: Speakers, words: bytes) -> None:
    host, _, port = speakers.exchange.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=LONG) as peer,
        contextlib.suppress(OSError),  # the end may come at any point
    ):
        peer.sendall(words)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1024):  # the greeting of ZeroMQ, then the end
            pass
    until(lambda: speakers.exchange.refusals.total, "refusal")
    speakers.open(1)
    assert speakers.process(1, "a").stop_request() is None, "others are served"


def test_a_node_speaks_for_itself_alone(speakers: Speakers) -> None:
    launcher = speakers.open(1, {"a": range(2), "b": range(2, 4)})
    speakers.open(2, {"a": range(1)})
    for rank in (2, 3, 4, -1):
        with pytest.raises(LauncherLostError, match=f"a report of rank {rank}"):
            speakers.process(1, "a").post(Report("finished", rank, 1.0, 1, {"saved": True}))
    for ask in (
        lambda process: process.stop_request(),
        lambda process: process.claim("x"),
        lambda process: process.meet(),
    ):
        with pytest.raises(LauncherLostError, match="it has no rank in generation 2"):
            ask(speakers.process(2, "b"))
    assert launcher.reports() == []
    assert speakers.process(2, "a").claim("x"), "nobody else has claimed it"
    assert speakers.process(2, "a").meet() == 1
    # a sign of life and an end that name another's rank
    peer = Peer(speakers.exchange.address, speakers.exchange.public, speakers.pairs["a"])
    foreign = NodeHeartbeat(Heartbeat(1, 1, (RankState(3, os.getpid(), "R", 0.0, 0.0),)), 0)
    failure = Failure(2, 1, "", "", "", 1.0)
    before = speakers.exchange.refusals.total
    for message in (
        foreign,
        NodeEnd(1, 1, AgentEnd("failed", (failure,))),
        NodeHeartbeat(Heartbeat(1, 7), 0),
        NodeEnd(1, 7, AgentEnd("succeeded")),
    ):
        peer.say(messages.encode(message))
    until(lambda: speakers.exchange.refusals.total == before + 4, "four refusals")
    assert speakers.exchange.look("a") == speakers.exchange.look("b") == (None, {})
    # the way to the store of a generation that it has no part in
    peer = Peer(speakers.exchange.address, speakers.exchange.public, speakers.pairs["b"])
    peer.say(messages.encode(StreamMessage("open", 1, 2)), b"")
    until(lambda: any("asks for the store of generation 2" in why for why in refused(speakers)), "refusal")
    peer.close()


def test_what_breaks_the_form_is_refused_and_counted(speakers: Speakers) -> None:
    launcher = speakers.open(1, {"a": range(2)})
    order = NodeOrder(1, Order("launch", 1, script="/bin/true"))
    good = json.loads(messages.encode(Question("s", 1, 1, "claim", name="x")))
    bad = [
        b"",
        b"\x80\x04\x95pickle",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"kind": "Question", "body": null}',
        messages.encode(order),  # only the launcher gives orders
        json.dumps({**good, "more": 1}).encode(),
        *(
            json.dumps({**good, "body": {**good["body"], **change}}).encode()
            for change in (
                {"number": "1"},
                {"number": True},
                {"number": 1.5},
                {"do": "launch"},
                {"do": ["claim"]},
                {"more": 1},
                {"report": {"kind": "finished"}},
                {"report": {"kind": "other", "rank": 0, "time": 0.0, "step": 0}},
                {"report": {"kind": "step", "rank": 0, "time": float("nan"), "step": 0}},
                {"report": {"kind": "step", "rank": 0, "time": 0.0, "step": 0, "content": []}},
                {"name": 7},
            )
        ),
        b" " * (MAX_FRAME + 1),
    ]
    peer = Peer(speakers.exchange.address, speakers.exchange.public, speakers.pairs["a"])
    for frame in bad:
        peer.say(frame)
    peer.say(b"{}", b"{}", b"{}")
    until(lambda: speakers.exchange.refusals.total == len(bad) + 1, f"{len(bad) + 1} refusals")
    assert launcher.reports() == []
    assert speakers.process(1, "a").claim("x")
    for _ in range(3):  # beyond what ZeroMQ reads at all: the connection ends, and nothing else
        peer.say(b" " * (2 * MAX_FRAME + 1))
    assert not peer.hears(1.0)
    assert speakers.process(1, "a").stop_request() is None
    peer.close()


def test_a_node_that_was_ended_is_not_heard(speakers: Speakers) -> None:
    launcher = speakers.open(1, {"a": range(1), "b": range(1, 2)})
    process = speakers.process(1, "b")
    process.stop_request()
    speakers.exchange.forget("b")
    process._timeout = 0.5
    with pytest.raises(LauncherLostError, match="does not answer"):
        process.post(Report("step", 1, 1.0, 1))
    assert launcher.reports() == []


def environment_of(pid: int) -> dict[str, str]:
    pairs = (
        entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
    )
    return dict(pairs)  # type: ignore[arg-type]


def files_with(folder: Path, secret: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


@pytest.mark.processes
def test_a_training_under_attack_runs_nothing_foreign_ends_right_and_keeps_its_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "marker"
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(marker)!r}, 'w')\n")
    nodes = LocalNodes(tmp_path / "nodes")
    nodes.folder.chmod(0o700)
    job = TrainingJob(
        "attacked",
        str(SCRIPT),
        (str(tmp_path), "1000000", "0.01"),
        str(tmp_path / "run"),
        RunSettings(termination_grace=20.0, recovery="restart"),
    )
    with TorchTrainer(nodes, preload=PRELOAD, replace=False) as trainer:
        trainer.launch(job, {"node-1": 1, "node-2": 1})
        until(lambda: trainer.status().step > 3, "training")
        exchange = trainer._exchange
        loop = trainer._loop
        assert loop is not None
        # no key, and another key
        order = messages.encode(
            NodeOrder(1, Order("launch", 99, script=str(evil), slots=1, nodes=1, world=1))
        )
        peers = [Peer(exchange.address), Peer(exchange.address, exchange.public, KeyPair.make())]
        # the key of node-1, as its processes have it
        environment = environment_of(nodes._nodes["node-1"].child.pid)
        own = KeyPair.of(environment[keys.NODE_SECRET])
        peers.append(Peer(exchange.address, exchange.public, own))
        for peer in peers:
            peer.say(order)
        entry = {
            channel.CHANNEL: exchange.address,
            channel.GENERATION: str(trainer.status().generation),
            keys.SERVER_KEY: exchange.public,
            keys.NODE_SECRET: own.secret,
        }
        speaker = Channel.connect(entry)
        assert speaker is not None
        with pytest.raises(LauncherLostError, match="a report of rank 1"):
            speaker.post(Report("finished", 1, time.time(), 10**9, {"saved": True}))
        # torch's store, and what the launcher once kept in one
        ranks = [
            child.pid
            for child in psutil.Process(nodes._nodes["node-1"].child.pid).children(recursive=True)
            if loop.generation is not None and loop.generation.node_of(0) == "node-1"
        ]
        assert ranks
        assert loop.generation is not None
        assert loop.generation._store is not None
        port = loop.generation._store.port
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LONG))
        found = store.list_keys()
        assert found, "it is the store of the ranks"
        for key in found:
            assert b"\x80\x04" not in store.get(key), "a pickle"
        old = {"do": "launch", "generation": 99, "nodes": 1, "slots": 1, "script": str(evil), "arguments": []}
        for member in ("node-1", "node-2"):
            for number in range(1, 9):
                key_of = loop._members[member].key
                store.set(f"ebbflow/attacked/node/{key_of}/order/{number}", json.dumps(old))
        store.set(f"/torch.rendezvous.attacked-{trainer.status().generation}", b"\x80\x04cos\nsystem\n.")
        # no secret shows
        secrets = [exchange._router._pair.secret]
        for name in ("node-1", "node-2"):
            environment = environment_of(nodes._nodes[name].child.pid)
            secrets.append(environment[keys.NODE_SECRET])
            assert keys.NODE_SECRET not in environment["EBBFLOW_NODE_ENTRY"]
        assert len(set(secrets)) == 3
        commands = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
        for secret in secrets:
            assert not any(secret in command for command in commands)
            assert files_with(nodes.folder, secret) == []
        step = trainer.status().step
        until(lambda: trainer.status().step > step + 20, "further training")
        trainer.stop()
        status = trainer.wait(LONG)
        for peer in peers:
            peer.close()
    assert status.state == "stopped", status
    assert not marker.exists()
    assert json.loads((tmp_path / "step").read_text()) == status.step < 10**9
    notes = [event.content for event in trainer.events() if event.kind == "peer-refused"]
    reasons = " ".join(str(note["why"]) for note in notes)
    assert "its key is not one of this run's nodes" in reasons
    # without any key: which end breaks it off first is chance
    assert "does not speak the encrypted protocol" in reasons or "before it had proven a key" in reasons
    assert "a message must be of a kind in" in reasons, "orders are the launcher's"
    assert {note["address"] for note in notes} <= {"127.0.0.1", ""}
    assert "refused 127.0.0.1" in caplog.text
    journal = (tmp_path / "run" / "events.jsonl").read_text()
    assert journal.count('"peer-refused"') == len(notes)
    for secret in secrets:
        assert files_with(tmp_path, secret) == []
        assert secret not in caplog.text
