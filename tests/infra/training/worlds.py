"""Small worlds of gloo processes that tests start: one process, itself a fork where there are, forks its ranks."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[3]  # where modules of tests are found
TIMEOUT = 280.0  # seconds
EXCHANGE = timedelta(seconds=240)  # of one collective


def run_module(module: str, *arguments: str, timeout: float = TIMEOUT) -> str:
    """Run ``python -m module ...``, which calls ``fork_world``, and return what it printed; it must exit with 0."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def fork_world(ranks: Callable[[int], object], size: int, *, killed: Collection[int] = ()) -> None:
    """Run ``ranks(rank)`` in ``size`` forked processes of one gloo group. For a process without threads.

    ``killed``: ranks that must end by SIGKILL; the others end the process group that they have at last.
    """
    import torch.distributed as dist

    gc.freeze()  # else ranks look through, and so copy, all that they have from here
    with tempfile.TemporaryDirectory() as meeting:
        children = []
        for rank in range(size):
            child = os.fork()
            if child:
                children.append(child)
                continue
            status = 1
            try:
                dist.init_process_group(
                    "gloo", f"file://{meeting}/store", rank=rank, world_size=size, timeout=EXCHANGE
                )
                ranks(rank)
                dist.barrier()
                dist.destroy_process_group()
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        exits = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        wanted = [-signal.SIGKILL if rank in killed else 0 for rank in range(size)]
        assert exits == wanted, f"ranks ended with {exits}"
