"""What a micro-task may rely on, told by one integer.

A task B may depend on a task A if the driver had been told of A's completion when it dispatched B. Completions are
numbered in the order in which the driver is told of them, and a task carries the number that was reached at its
dispatch, its *version*. Qiao et al., "Litz: Elastic Framework for High-Performance Distributed Machine Learning",
USENIX ATC 2018, section 3.3.
"""

from dataclasses import dataclass

from ebbflow.planners.errors import OptionError


@dataclass(slots=True)
class VersionClock:
    """Counts the completions that the driver knows about."""

    version: int = 0

    def __post_init__(self) -> None:
        if self.version < 0:
            raise OptionError(f"version must be >= 0; got {self.version}")

    def complete(self) -> int:
        """Return the number of one more completion; to be called before the driver hears of it.

        A task that the driver dispatches on hearing of it must carry the new version, or it could be served a cached
        value from before the very update that caused it.
        """
        self.version += 1
        return self.version


def may_depend(observed: int | None, version: int) -> bool:
    """Return whether a task of ``version`` may depend on completion number ``observed`` (``None``: not observed)."""
    return observed is not None and observed <= version


def is_hit(version: int, tag: int) -> bool:
    """Return whether a task of ``version`` may use a value that was fetched for a task of version ``tag``.

    What the fetching task depends on had been applied before it was dispatched, and a task of the same or a smaller
    version depends on no more than that.
    """
    return version <= tag
