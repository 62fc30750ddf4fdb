"""Where daemons and their clients find each other, on S3 too."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory.peer import PeerAddress
from ebbflow.infra.memory.registry import AGAIN, MemoryRegistry

ONE, TWO = (PeerAddress(f"i-{n}", f"10.0.0.{n}", 4000 + n, 16 << 20) for n in (1, 2))


class Later(SystemClock):
    """A clock that is ahead."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds

    def now(self) -> float:
        return super().now() + self.seconds


def test_on_s3_all_have_one_token_and_find_who_has_announced_itself_of_late(s3: Callable[[], str]) -> None:
    where = f"{s3()}/memory"
    with pytest.raises(MemoryTierError, match=r"cannot be read .* start a daemon"):
        MemoryRegistry(where).token()
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: MemoryRegistry(where).token(create=True), range(4)))
    assert len({*made, MemoryRegistry(where).token()}) == 1
    clock = Later()
    registry = MemoryRegistry(where, clock)
    assert registry.addresses() == ()
    registry.announce(ONE)
    registry.announce(TWO)
    assert registry.addresses() == (), "a listing is used for some seconds"
    clock.seconds += 30
    assert registry.addresses() == (ONE, TWO)
    assert registry.find("i-1") == ONE
    registry.withdraw(PeerAddress("i-1", "10.0.0.9", 4009, 16 << 20))
    assert registry.find("i-1") == ONE, "another one has taken the name"
    registry.withdraw(ONE)
    assert registry.find("i-1") is None
    clock.seconds += 30
    assert registry.addresses() == (TWO,)
    clock.seconds += 5 * AGAIN
    assert registry.addresses() == (), "its node has vanished"


def test_in_a_directory_nothing_is_forgotten(tmp_path: Path) -> None:
    registry = MemoryRegistry(tmp_path / "memory", Later(1e6))
    assert registry.token(create=True) == MemoryRegistry(tmp_path / "memory").token()
    registry.announce(ONE)
    (tmp_path / "memory" / "peers" / "i-3.json").write_text("{}")
    assert registry.addresses() == (ONE,)
    assert not registry.remote
    registry.remove("i-1")
    registry.remove("i-1")
    assert registry.addresses() == ()
