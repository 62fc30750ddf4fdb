"""What the thread of an encrypted port knows of its own listening."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.machine.encrypted_router import EncryptedRouter

LONG = 150.0  # seconds: a bound for a busy machine, not an expectation


class Port(EncryptedRouter):
    """A port on which nobody speaks."""

    def __init__(self) -> None:
        super().__init__(
            "127.0.0.1", 0, domain=b"test", max_message=1 << 10, owner="a test", failure=TrainingError
        )

    def is_admitted(self, public: str) -> bool:
        return False

    def on_message(self, connection: bytes, parts: Sequence[Any], first: Any) -> None: ...


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_time_in_which_nobody_could_be_heard_is_not_listened() -> None:
    port = Port()
    try:
        until(lambda: port.listened > 0)  # though nobody speaks
        before = time.monotonic(), port.listened
        assert port.complete(lambda: time.sleep(1.5), LONG)
        held = port.listened
        until(lambda: port.listened > held)
        assert port.listened - before[1] < time.monotonic() - before[0] - 0.5
    finally:
        port.close()
