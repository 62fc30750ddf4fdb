"""How long a store that takes nothing holds up who deletes or replaces what is there, or ends."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.infra.memory.arrow import TierHandler
from ebbflow.infra.memory.behind import Lanes
from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.files import MemoryTier, TierFile
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.session import MemorySession
from ebbflow.planners.memory.slab_table import BlockRange
from tests.infra.memory.lenders import until


def test_all_files_of_a_directory_and_their_way_to_the_store_have_one_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, settings = [100.0], BlockSettings(store_timeout=600.0)
    tier = MemoryTier("memory+file", settings)

    class Never(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            now[0] += timeout
            return False

    def flush(_: TierFile) -> None:
        now[0] += 400.0

    store: Any = SimpleNamespace(then=lambda *_, **__: None, flush=flush)
    tier.store = store
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    for module in ("files", "arrow"):
        monkeypatch.setattr(f"ebbflow.infra.memory.{module}.time", clock)
    for name in ("d/a", "d/b", "d/c", "e"):
        file = TierFile(f"/{name}")
        file.released = Never()
        tier.add(file)
    tier.drop_below("/d")
    assert now == [700.0]
    assert "3 files at /d, which is deleted or replaced, are still on their way" in caplog.text
    TierHandler(tier, settings)._make_way("/e")
    assert now == [1300.0]
    assert "1 files at /e" in caplog.text


def test_a_store_that_hangs_does_not_hold_up_who_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry, back, taken = MemoryRegistry(tmp_path), threading.Event(), list[bytes]()
    registry.token(create=True)

    def write(_: BlockRange, data: bytes) -> None:
        assert back.wait(150)
        taken.append(data)

    behind: Any = SimpleNamespace(lane=lambda blocks: blocks.first, write=write)
    settings = BlockSettings(1, 16, 4, store_timeout=0.1)
    session = MemorySession(registry, behind, settings, threads=2, period=60.0)
    for block in range(4):
        session.blocks.write(4 * block, b"%d" % block)
    session.close()
    assert "has not taken what was written within 0.1 s" in caplog.text
    back.set()
    until(lambda: len(taken) == 4)
    assert sorted(taken) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("then", ["the same lane", "another lane", "wait", "close"])
def test_what_no_thread_could_be_started_for_is_done_by_the_next(
    monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    lanes, changed, done = Lanes(2), threading.Condition(), list[str]()

    def work() -> None:
        with changed:
            done.append("")
            changed.notify_all()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        lanes.submit("the same lane", work)
        lanes.submit("the same lane", work)
        assert not lanes.close(150), "not all is done"
    if then.endswith("lane"):
        lanes.submit(then, work)
    elif then == "wait":
        with changed:
            assert lanes.wait(changed, lambda: len(done) == 2, 150)
    assert lanes.close(150)
    assert len(done) == 2 + then.endswith("lane")
