"""Peers' memory before a store, opened while something else is done; what it takes is imported only then."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ebbflow.infra.storage.places import StorageLocation

if TYPE_CHECKING:
    from ebbflow.tasks.memory.tier import MemoryUse, OpenTier


@contextmanager
def opened_meanwhile(place: StorageLocation, use: "MemoryUse") -> "Iterator[Callable[[], OpenTier | None]]":
    """Use peers' memory before the store at ``place`` within the block, as ``memory_tier`` does.

    It yields what waits until that is open and returns it, and raises what has kept it from that.

    Args:
        place: the store; one without ``memory+`` has none before it.
        use: whether it has to be faster than the store.
    """
    if not place.tiered:
        yield lambda: None
        return
    with ExitStack() as leaving, ThreadPoolExecutor(1, thread_name_prefix="memory-opening") as pool:

        def opened() -> "OpenTier | None":
            from ebbflow.tasks.memory.tier import memory_tier

            return leaving.enter_context(memory_tier(place, use))

        yield pool.submit(opened).result
