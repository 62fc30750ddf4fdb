"""``WatchedStore``: what a process group meets over, until it is told that somebody it waits for is gone."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ebbflow.infra.training.process.world import ViewChangedError

FAILED = "failed"  # set by a member that could not make the group
_LOOK = 0.001  # seconds between two looks, at first
_SELDOM = 0.005  # at last: others wait for what this process does next


class WatchedStore(dist.Store):  # type: ignore[misc]
    """A store in which nobody waits for those that are gone.

    Args:
        store: of the group, which is used for nothing else.
        changed: tells whether there are other members than those that make the group.
        timeout: seconds that a value is waited for.
    """

    def __init__(self, store: dist.Store, changed: Callable[[], bool], timeout: float) -> None:
        super().__init__()
        self._store, self._changed, self.patience = store, changed, timeout

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        """Return a value, once it is there. Raises ``ViewChangedError``."""
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> Any:
        """Return values, once they are there. Raises ``ViewChangedError``."""
        self.wait(keys)
        return self._store.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._store.multi_set(keys, values)

    def add(self, key: str, value: int) -> int:
        found: int = self._store.add(key, value)
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there. Raises ``ViewChangedError``, also where a value does not come."""
        del timeout  # torch's barrier asks again and again; ours is for the whole
        end, pause = time.monotonic() + self.patience, _LOOK
        while not self._store.check(keys):
            if self._changed() or self._store.check([FAILED]) or time.monotonic() > end:
                raise ViewChangedError("the members of the process group have changed")
            time.sleep(pause)
            pause = min(2 * pause, _SELDOM)
