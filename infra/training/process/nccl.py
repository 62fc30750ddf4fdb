"""What PyTorch leaves to its user where a peer is lost in a collective over NCCL, which neither fails nor ends then.

The collective's kernel waits on the GPU, and behind it, in the order of its stream, all that the process asks of the
GPU later: the norm that it waits for, and the copy of a checkpoint. Another thread must abort the communicators
(NCCL's user guide, "Error handling and communicator abort"). What was reduced is void from then on.

``TORCH_NCCL_BLOCKING_WAIT`` is no help: DDP waits for futures, which do not support it, and with it no watchdog looks
at timeouts. By default the watchdog ends the process, in which nothing could be saved. If it is to write down first
what was under way, it sleeps for a minute before it aborts, with the lock that the next collective needs, and a
monitor beside it sleeps for eight more, for which the end of the group waits, and then ends the process, too.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

_WATCHDOG = {  # of torch 2.13's ProcessGroupNCCL
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort communicators
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
SHOWS = 1.0  # seconds in which a loss shows in a collective, where connections end with it
_CLOSING = 5.0  # seconds that ending groups may take

log = logging.getLogger(__name__)

_lock = threading.Lock()  # of one abort at a time
_aborted = threading.Event()  # by this module, since groups were begun last


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have errors and timeouts of collectives abort communicators, and nothing else; a user's own choices stay."""
    for name, value in _WATCHDOG.items():
        environment.setdefault(name, value)


def begun() -> None:
    """Take note that process groups are made anew."""
    _aborted.clear()


def abort() -> int:
    """End all collectives of this process over NCCL, and return how many groups they are of; from any thread.

    Waits 5 s at most.
    """
    found = list(_groups())
    with _lock:
        if found and not _aborted.is_set():
            _aborted.set()  # before what waits for them finds them ended
            _within(partial(_abort_all, found), "communicators")
    return len(found)


def check() -> None:
    """Raise ``DistBackendError`` where collectives of this process were aborted, or failed: what they gave is void.

    Called once the GPU has done them.
    """
    failed = next((said for one in _groups() if (said := _error(one))), "")
    if _aborted.is_set() or failed:
        raise dist.DistBackendError(
            f"NCCL communicator was aborted: {failed or 'other processes were lost'}; its collectives are void"
        )


def finish(device: torch.device) -> None:
    """Wait until the GPU has done what this process has asked of it, collectives over NCCL among it."""
    if device.type == "cuda" and any(True for _ in _groups()):
        torch.cuda.current_stream(device).synchronize()


def patience() -> float:
    """Return how many seconds ``abort`` may take."""
    return _CLOSING if any(True for _ in _groups()) else 0.0


def close() -> bool:
    """End the process groups, for at most 5 s; return whether that was enough.

    Others may be gone, and NCCL waits until CUDA graphs with its collectives are gone, too (since 2.26).
    """
    return _within(dist.destroy_process_group, "process groups")


def dissolve(failed: Callable[[str], None]) -> None:
    """End the process groups, of which some processes may be gone, so that others can be made.

    Raises ``DistBackendError`` where those over NCCL do not end, after a call of ``failed`` with the reason.
    """
    if not abort():  # to end its communicators in order NCCL would wait for those that are gone
        dist.destroy_process_group()
    elif not close() or dist.is_initialized():
        failed("a process group over NCCL does not end")
        raise dist.DistBackendError("NCCL communicator was aborted, and its process group does not end")


class LossWatch:
    """Aborts collectives that still wait some time after the loss of a process is known."""

    def __init__(self) -> None:
        self._since: float | None = None  # monotonic

    def reset(self) -> None:
        """Take note of a new group, from which none is lost."""
        self._since = None

    def look(self, *, lost: bool) -> bool:
        """Take note of whether processes are lost; return whether they have been for longer than a loss shows."""
        if not lost:
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        if self._since is None or time.monotonic() - self._since <= SHOWS:
            return False
        if not _aborted.is_set() and (count := abort()):
            log.warning("processes are lost: collectives of %d groups over NCCL are aborted", count)
        return True


def _within(act: Callable[[], None], what: str) -> bool:
    """Do what may hang in a thread of its own; return whether it has ended."""

    closing = _begun(act)
    closing.join(_CLOSING)
    if closing.is_alive():
        log.warning("%s did not end within %g s", what, _CLOSING)
        return False
    return True


def _abort_all(groups: Sequence[Any]) -> None:
    """Abort all at the same time: what one frees waits for the whole GPU, and so for the collectives of the others.

    NCCL's group calls, which say so, hold for a thread; torch aborts each group in another one.
    """
    for thread in [_begun(one.abort) for one in groups]:
        thread.join()


def _begun(act: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        with suppress(RuntimeError):  # of groups whose peers are gone
            act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _groups() -> Iterator[Any]:
    """Yield what carries tensors of GPUs in each process group, where that is NCCL."""
    if (kind := getattr(dist, "ProcessGroupNCCL", None)) is None:
        return
    for group in list(dist.distributed_c10d._world.pg_names):
        with suppress(RuntimeError):  # it takes no tensors of GPUs
            found = group._get_backend(torch.device("cuda"))
            if isinstance(found, kind):
                yield found


def _error(group: Any) -> str:
    """Return the error that NCCL's watchdog has seen; empty: none, or this torch does not tell."""
    get = getattr(group, "get_error", None)
    error = get() if get is not None else None
    name = str(getattr(error, "name", "SUCCESS"))
    return "" if name == "SUCCESS" else name
