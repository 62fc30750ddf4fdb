"""What a process of a generation does first: become an ordinary Python process that runs the user's script."""

import atexit
import contextlib
import json
import os
import signal
import sys
import time
import traceback
import types
from pathlib import Path

from ebbflow.infra.storage import private
from ebbflow.infra.training.channel.wire import SCRIPT
from ebbflow.infra.training.workspace.preparing import DIRECTORY

RANKS = "ranks"  # directory, in the node's own, with a file for each process


def run_script() -> None:
    """Run the script that ``SCRIPT`` in the environment names as ``__main__``, with its arguments.

    A process that was forked from a warm node has the node's imports and nothing else of it: signal handlers,
    random state and thread counts are those of a new process.
    """
    task = json.loads(os.environ[SCRIPT])
    _announce(Path(task["folder"]))
    _forget_parent()
    code: object = 0
    try:
        script = _fetched(task["script"], Path(task["folder"]).parent / "script")
        _execute(script, task["arguments"])
    except SystemExit as leave:
        code = leave.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        # into the rank's own log, as Python would, without our own frames
        own = (
            error.__traceback__.tb_next.tb_next
            if error.__traceback__ and error.__traceback__.tb_next
            else None
        )
        traceback.print_exception(type(error), error, own)
        raise
    finally:
        # multiprocessing ends its children without these; a script may count on them
        atexit._run_exitfuncs()
        _part()
        sys.stdout.flush()
        sys.stderr.flush()
    if code not in (None, 0):
        raise SystemExit(code)


def _fetched(script: str, folder: Path) -> str:
    """Return the path of the script; one on S3 is copied into ``folder`` first, so that tracebacks show its lines."""
    if "://" not in script:
        return script
    from ebbflow.infra.storage.files import write_atomic
    from ebbflow.infra.storage.places import StorageLocation

    place, _, name = script.rpartition("/")
    write_atomic(None, "file", str(folder / name), StorageLocation(place).read(name))
    return str(folder / name)


def _execute(script: str, arguments: list[str]) -> None:
    source = Path(script).read_bytes()
    program = compile(source, script, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    if directory := os.environ.get(DIRECTORY):
        sys.path.insert(0, directory)  # modules beside the script come first, as Python has it
    sys.path.insert(0, str(Path(script).resolve().parent))
    exec(program, main.__dict__)  # noqa: S102 - running the user's script is what this process is for


def _announce(folder: Path) -> None:
    """Notify the node which process has which rank."""
    private.make_folder(folder)
    rank = os.environ["RANK"]
    beside = folder / f".{rank}"
    private.write_text(beside, json.dumps({"rank": int(rank), "pid": os.getpid(), "started": time.time()}))
    beside.replace(folder / rank)


def _part() -> None:
    """Close what the script has left open to other ranks.

    This process continues until its node's others are done as well; a rank elsewhere must not wait for it meanwhile.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        from ebbflow.infra.training.process import nccl  # with torch

        nccl.close()


def _forget_parent() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_DFL)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        # the variable was read when the node imported torch
        with contextlib.suppress(ValueError):
            torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
