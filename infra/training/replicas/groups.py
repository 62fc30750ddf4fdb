"""Process groups that end while their process lives on, and whose peers may vanish."""

import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

FORM = 15.0  # seconds in which a process group must be made
PATIENCE = 1.0  # s for the threads of a group's last reductions to release it
_POLL = 0.001
_OWN = 3  # references: the caller's, this module's, and the one that is counted
_held: list[Any] = []  # groups that a thread of theirs may still hold


def await_release(group: Any) -> bool:
    """Wait until only the caller holds a process group; tell whether that is so.

    Its connections end, and its peers see that, when the last reference goes. A thread of its own must not be the one
    that frees it: that waits for the threads, and a thread that waits for itself ends the process. What is not
    released in time is held until a later call finds it free.
    """
    end = time.monotonic() + PATIENCE
    while sys.getrefcount(group) > _OWN and time.monotonic() < end:
        time.sleep(_POLL)
    free = sys.getrefcount(group) <= _OWN
    _held[:] = [one for one in _held if sys.getrefcount(one) > _OWN]
    if not free:
        _held.append(group)
    return free


def second_of_two() -> None:
    """Make a default group in which this process is the second of two, and which carries nothing.

    It is for the script of a process that is to join others: in a group of its own that would be the first, and do
    what only the first may.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=1, world_size=2)


def collectives(device: torch.device) -> int:
    """Return the number of collectives that the default group has begun; ``device``: that its process trains on."""
    if not dist.is_initialized() or dist.get_backend() == dist.Backend.FAKE:
        return 0
    group = dist.group.WORLD
    found = [group._get_backend(torch.device(kind)) for kind in {"cpu", device.type}]
    return sum(int(one._get_sequence_number_for_group()) for one in found)


class Connections:
    """The connections that a process group makes, which another thread can cut.

    A machine that vanishes ends no connection, and gloo has no call to end a collective that waits for it. Cut, its
    collectives fail as they do where a peer ends. What other threads open while the group is made counts as its own.

    Args:
        spared: ports of peers that are none of the group.
    """

    def __init__(self, spared: frozenset[int]) -> None:
        self._spared = spared
        self._before = frozenset(number for _, number in _sockets())
        self._made: frozenset[int] = frozenset()

    def take(self) -> None:
        """Take those that were made since this object was."""
        self._made = frozenset(number for _, number in _sockets()) - self._before

    def cut(self) -> int:
        """End those that are there, and return how many they were."""
        count = 0
        for descriptor, number in _sockets():
            if number in self._made:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
                    same = (
                        os.fstat(found.fileno()).st_ino == number
                    )  # else the descriptor is another's meanwhile
                    internet = found.family in (socket.AF_INET, socket.AF_INET6)
                    if same and internet and found.getpeername()[1] not in self._spared:
                        found.shutdown(socket.SHUT_RDWR)
                        count += 1
        return count


@dataclass(slots=True)
class GroupState:
    """What a process knows of its group and of its steps."""

    timeout: float = FORM  # seconds of a collective
    store: Any = None  # of the generation
    epoch: int = 0  # number of the agreement that the group follows
    ended: int = 0  # steps that are ended; -1: it does not know the training's state
    sums: list[float] | None = None  # with which the last one ended
    broken: BaseException | None = None  # how the group was lost
    due: bool = False  # whether the launcher waits for the end of a step to change the members
    joining: tuple[int, ...] = ()  # ranks of members that do not know the training's state
    fixed: str = ""  # why the members cannot change; empty: they can
    found: str = ""  # the same, of what this process alone knows
    asks: bool = False  # whether one of them has found something
    counted: int = 0  # collectives of the group, when the last of the run's own had ended
    watches: bool = False  # whether those of the script are looked for
    asked: bool = False  # whether the script has asked which process is the first
    release: Callable[[], None] = lambda: None  # lets go of what else holds the group
    connections: Connections | None = None
    spared: frozenset[int] = frozenset()  # ports that are none of a group's
    tries: int = 0
    tried: tuple[int, tuple[int, ...]] = (-1, ())


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield this process's sockets, as their descriptors and inode numbers."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino
