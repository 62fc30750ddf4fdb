"""Daemons as processes: who is refused, what eviction and draining do; nothing is lost when they are killed."""

import asyncio
import hashlib
import random
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory import protocol
from ebbflow.infra.memory.blocks import BlockSettings, TierMetrics
from ebbflow.infra.memory.hosting import PendingAnswer
from ebbflow.infra.memory.lending import daemon
from ebbflow.infra.memory.lending.counters import MemoryCounters
from ebbflow.infra.memory.lending.daemon import DaemonSettings, MemoryDaemon
from ebbflow.infra.memory.peer import PeerAddress, PeerLink
from ebbflow.infra.memory.protocol import Frame, Kind
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.session import MemorySession
from ebbflow.planners.memory.slab_table import SlabState
from tests.infra.memory.lenders import SLAB, FileBehind, Lender, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

BLOCK = 64 << 10


def _link(lender: Lender, token: bytes) -> PeerLink:
    return PeerLink(lender.address, token, "test", lambda peer, frame: None, lambda peer: None)


def _ask(link: PeerLink, frame: Frame) -> Frame:
    answer = PendingAnswer()
    link.post(frame, answer.set)
    assert answer.done.wait(150)
    assert answer.frame is not None
    return answer.frame


def _said(lender: Lender, data: bytes) -> str:
    """Return the error that a daemon answers raw bytes with, after which it closes the connection."""
    with socket.create_connection((lender.address.host, lender.address.port), timeout=30) as peer:
        peer.sendall(data)
        found = b""
        while piece := peer.recv(1 << 16):
            found += piece
    header, payload = found[: protocol.HEADER_BYTES], found[protocol.HEADER_BYTES :]
    frame = protocol.decode(header, payload)
    assert frame.kind == Kind.ERROR
    return bytes(frame.payload).decode()


def test_who_breaks_a_rule_is_refused_and_the_daemon_serves_others(
    registry: MemoryRegistry, lend: Callable[..., Lender]
) -> None:
    lender, token = lend("a"), registry.token()
    good = _link(lender, token)
    lent = _ask(good, Frame(Kind.MAP, generation=1))
    assert lent.size == SLAB
    assert _ask(good, Frame(Kind.WRITE, slab=lent.slab, generation=1, payload=b"mine")).kind == Kind.ACK

    with pytest.raises(MemoryTierError, match="does not hold this cluster's token"):
        _link(lender, b"x" * 32)
    header, payload = protocol.encode(Frame(Kind.HELLO, payload=b"{}"))
    assert "random bytes" in _said(lender, header + bytes(payload))
    huge = bytearray(header)
    huge[-12:-4] = (1 << 63).to_bytes(8, "little")
    assert f"at most {protocol.MAX_CONTROL} bytes, not {1 << 63}" in _said(lender, bytes(huge))
    later = protocol.VERSION + 1
    other = protocol.encode(Frame(Kind.HELLO, payload=b"{}", version=later))[0]
    said = _said(lender, other)
    assert f"version {later} of the memory protocol, this side {protocol.VERSION}" in said
    assert "must begin with" in _said(lender, b"GET / HTTP/1.1\r\n\r\n".ljust(protocol.HEADER_BYTES, b" "))
    early = protocol.encode(Frame(Kind.READ, slab=lent.slab, generation=1, size=4))[0]
    assert "READ is not allowed at this point" in _said(lender, early)

    foreign = _link(lender, token)
    for kind in (Kind.READ, Kind.WRITE):
        answer = _ask(foreign, Frame(kind, slab=lent.slab, generation=1, size=4, payload=b""))
        assert answer.kind == Kind.ERROR
        assert b"not lent to this client" in bytes(answer.payload)
    beyond = _ask(good, Frame(Kind.READ, slab=lent.slab, generation=1, offset=SLAB - 1, size=2))
    assert b"outside a slab" in bytes(beyond.payload)
    stale = _ask(good, Frame(Kind.READ, slab=lent.slab, generation=2, size=4))
    assert b"under generation 2" in bytes(stale.payload)

    assert bytes(_ask(good, Frame(Kind.READ, slab=lent.slab, generation=1, size=4)).payload) == b"mine"
    status = protocol.unpack_json(_ask(good, Frame(Kind.STATUS)).payload)
    assert (status["mapped"], status["clients"]) == (1, 2)
    assert status["refusals"] >= 9
    for link in (good, foreign):
        link.close()


def test_what_clients_tell_of_themselves_is_checked_and_passed_on(
    registry: MemoryRegistry, lend: Callable[..., Lender]
) -> None:
    lender, told = lend("a"), {"session": "s1", **TierMetrics(remote_hits=3, stall_seconds=0.5).as_dict()}
    good, other = _link(lender, registry.token()), _link(lender, registry.token())
    for values in (told, {**told, "remote_hits": 4}):
        good.tell(Frame(Kind.METRICS, payload=protocol.pack_json(values)))
    other.tell(Frame(Kind.METRICS, payload=protocol.pack_json({**told, "fallbacks": -1})))
    until(lambda: other.ended)  # whoever breaks the rule is disconnected
    (row,) = protocol.unpack_json(_ask(good, Frame(Kind.STATUS)).payload)["sessions"]
    assert (row["session"], row["client"], row["connected"]) == ("s1", "test", True)
    assert (row["remote_hits"], row["stall_seconds"]) == (4, 0.5)
    good.close()


def test_a_daemon_ends_with_the_process_that_it_follows(
    registry: MemoryRegistry, lend: Callable[..., Lender]
) -> None:
    with subprocess.Popen(["sleep", "600"]) as machine:
        lender = lend("a", follow=machine.pid)
        link = _link(lender, registry.token())
        assert not lender.ended
        machine.kill()
    until(lambda: lender.ended and link.ended)
    assert registry.find("a") is None


def test_another_client_finds_zeros(registry: MemoryRegistry, lend: Callable[..., Lender]) -> None:
    lender = lend("a", max_bytes=SLAB)
    first, second = _link(lender, registry.token()), _link(lender, registry.token())
    lent = _ask(first, Frame(Kind.MAP, generation=1))
    _ask(first, Frame(Kind.WRITE, slab=lent.slab, generation=1, offset=7, payload=b"secret"))
    assert _ask(second, Frame(Kind.MAP, generation=1)).size == 0, "there is one slab"
    first.close()
    until(lambda: _ask(second, Frame(Kind.QUERY_MEM)).size == 1)
    mine = _ask(second, Frame(Kind.MAP, generation=5))
    found = _ask(second, Frame(Kind.READ, slab=mine.slab, generation=5, size=SLAB))
    assert not any(bytes(found.payload))
    second.close()


class _Reader:
    """Writes random blocks and checks all that was written, by checksum."""

    def __init__(self, session: MemorySession, slabs: int) -> None:
        self._blocks, self._rng = session.blocks, random.Random(1)
        self._sums: dict[int, bytes] = {}
        self._count = slabs * SLAB // BLOCK

    def write(self, count: int) -> None:
        for number in self._rng.sample(range(self._count), count):
            data = self._rng.randbytes(BLOCK)
            self._blocks.write(number * BLOCK, data)
            self._sums[number] = hashlib.sha256(data).digest()

    def check(self) -> None:
        for number, checksum in self._sums.items():
            assert hashlib.sha256(self._blocks.read(number * BLOCK, BLOCK)).digest() == checksum, number


def test_blocks_survive_killed_evicting_and_restarted_daemons(
    registry: MemoryRegistry, lend: Callable[..., Lender], tmp_path: Path
) -> None:
    lenders = {f"node-{n}": lend(f"node-{n}") for n in range(6)}
    slabs = 24
    behind = FileBehind(tmp_path / "behind", SLAB, BLOCK)
    session = MemorySession(
        registry,
        behind,
        BlockSettings(slabs, SLAB, BLOCK, request_blocks=1, hot=0.5, request_timeout=20.0),
        period=0.1,
    )
    store, reader = session.blocks, _Reader(session, slabs)
    try:
        assert sorted(session.peers) == sorted(lenders)
        for slab in range(slabs):
            assert store.slabs.map(slab)
        assert set(store.slabs.table.hosts) == set(lenders), "spread over all"
        reader.write(300)
        reader.check()
        assert store.metrics.remote_hits > 0

        rng = random.Random(2)
        for busiest in (False, True):
            hosts = store.slabs.table.hosts
            name = hosts.most_common(1)[0][0] if busiest else rng.choice(sorted(lenders))
            lenders[name].kill()
            reader.write(60)
            reader.check()
            lenders[name] = lend(name)
            until(lambda name=name: name in session.peers)  # type: ignore[misc]

        before = store.metrics.evictions
        name = store.slabs.table.hosts.most_common(1)[0][0]
        lenders[name].terminate()  # a notice: all its slabs are evicted before it ends
        assert store.metrics.evictions > before
        assert name not in store.slabs.table.hosts
        reader.write(60)
        reader.check()

        for one in lenders.values():
            one.kill() if not one.ended else None
        reader.check()
        assert not store.slabs.table.hosts
        for slab in range(slabs):
            store.flush(slab)
        assert store.metrics.store_hits > 0
    finally:
        session.close()
        behind.close()


class _Machine:
    """A daemon in a thread of this process, on a machine whose memory a test sets."""

    def __init__(self, registry: MemoryRegistry, slabs: int, period: float = 0.05) -> None:
        self.others = 0  # bytes that the machine's own work takes
        self._loop = asyncio.new_event_loop()
        settings = DaemonSettings("a", registry.token(), slab_bytes=SLAB, headroom=0.5, period=period)
        self._total = 2 * slabs * SLAB + SLAB // 2  # half of it is headroom
        self.daemon = MemoryDaemon(settings, look=self._look)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._do(self.daemon.start())
        registry.announce(PeerAddress("a", "127.0.0.1", self.daemon.port, SLAB))

    def _look(self) -> MemoryCounters:
        lent = self.daemon.allocated if hasattr(self, "daemon") else 0
        return MemoryCounters(self._total, self._total - self.others - lent)

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(150)

    def close(self) -> None:
        self._do(self.daemon.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(150)
        self._loop.close()


def test_a_daemon_gives_way_and_takes_the_least_active_slabs_first(
    registry: MemoryRegistry, tmp_path: Path
) -> None:
    machine, behind = _Machine(registry, slabs=4), FileBehind(tmp_path / "behind", SLAB, BLOCK)
    session = MemorySession(registry, behind, BlockSettings(8, SLAB, BLOCK, hot=1e9), period=60.0)
    store = session.blocks
    try:
        assert [store.slabs.map(slab) for slab in range(4)] == [True] * 4
        for slab in range(4):
            for _ in range(slab + 1 if slab != 2 else 9):
                store.write(slab * SLAB, b"x" * BLOCK)
        store.tick(1.0)
        machine.others = 2 * SLAB  # of the half that is not headroom
        until(lambda: store.slabs.table.states[SlabState.MAPPED] == 2)
        assert [store.slabs.table.state(slab) is SlabState.MAPPED for slab in range(4)] == [
            False,
            False,
            True,
            True,
        ]
        until(lambda: machine.daemon.status()["mapped"] + machine.daemon.status()["unmapped"] == 2)
        assert machine.daemon.status()["evictions"] == 2
        machine.others = 0
        until(lambda: machine.daemon.status()["unmapped"] == 2)
        assert all(store.read(slab * SLAB, BLOCK) == b"x" * BLOCK for slab in range(4))
    finally:
        session.close()
        behind.close()
        machine.close()


def test_slabs_that_are_given_back_while_their_activity_is_asked_for_end_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = MemoryDaemon(
        DaemonSettings("a", b"t" * 32, slab_bytes=4096, max_bytes=1 << 16, period=0.001),
        look=lambda: MemoryCounters(1 << 30, 1 << 30),
    )
    steps: list[int] = []

    def step() -> int:
        steps.append(1)
        if len(steps) == 1:
            raise KeyError("a defect")
        made._draining = True
        return 0

    async def run() -> None:
        made._memory.allocate(1)
        handle = made._memory.lend("7", 1)
        assert handle is not None
        asked = asyncio.create_task(made._activity({"7": (handle,)}))
        await asyncio.sleep(0)  # it is about to ask
        await made._take_back("7", handle, 1)
        assert await asked == {}
        monkeypatch.setattr(made, "_step", step)
        async with asyncio.timeout(150):
            await made._control()

    asyncio.run(run())
    assert len(steps) == 2, "memory is looked after all the same"


def test_a_daemon_does_not_wait_for_its_period_while_little_is_free(
    registry: MemoryRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "LOOKS", 2000)
    machine, behind = _Machine(registry, slabs=4, period=600.0), FileBehind(tmp_path / "behind", SLAB, BLOCK)
    session = MemorySession(registry, behind, BlockSettings(8, SLAB, BLOCK, hot=1e9), period=60.0)
    try:
        assert [session.blocks.slabs.map(slab) for slab in range(4)] == [True] * 4
        machine.others = 3 * SLAB  # of 4.25 slabs of headroom
        until(lambda: machine.daemon.status()["mapped"] == 1)  # at a look, not at the period's end
    finally:
        session.close()
        behind.close()
        machine.close()
