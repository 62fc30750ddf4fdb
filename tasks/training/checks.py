"""Rules of a training's request (``request.TrainingRequest``) that concern several of its options."""

import re
from typing import Any

from ebbflow.infra.storage import user_files
from ebbflow.infra.storage.scripts import check_script
from ebbflow.planners.errors import OptionError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_OURS = "EBBFLOW_"


def check_code(request: Any) -> None:
    """Raise ``OptionError`` for a script, working directory or variable that cannot be what it is said to be.

    A working directory that is not there is no error yet: a run that is resumed elsewhere has its own copy.
    """
    if not request.workdir:
        check_script(request.script)
    else:
        from ebbflow.infra.training.workspace.packing import check_script_path

        check_script_path(request.script)
        folder = user_files.expanded(request.workdir)
        if folder.is_dir():
            check_script(str(folder / request.script))
    for text in request.env:
        name = text.partition("=")[0]
        if not _VARIABLE.fullmatch(name):
            raise OptionError(
                f"env must be KEY=VALUE or KEY, a name of letters, digits and _; got {name!r:.120}"
            )
        if name.startswith(_OURS):
            raise OptionError(f"env must not set variables of Ebbflow's own ({_OURS}...); got {name}")


def check_own_checkpoints(request: Any) -> None:
    """Raise ``OptionError`` for what a script with own checkpoints cannot be given."""
    if not request.own_checkpoints:
        if request.step_pattern:
            raise OptionError(
                "step_pattern goes with own_checkpoints; an ElasticRun reports its steps itself"
            )
        return
    if request.step_pattern:
        from ebbflow.infra.training.process.printed_steps import checked_pattern

        checked_pattern(request.step_pattern)
    given = {
        "communication": request.communication != "ddp",
        "preflight": request.preflight == "always",
        "checkpoint_interval": request.checkpoint_interval is not None,
        "partial_checkpoint_interval": request.partial_checkpoint_interval > 0,
        "spill_dir": bool(request.spill_dir),
        "restart": request.restart,
        "sync": request.sync != "allreduce",
    }
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise OptionError(
            f"{wrong[0]} needs a script that trains inside ElasticRun; with own_checkpoints the script sees to "
            "that itself"
        )


def check_sync(request: Any) -> None:
    """Raise ``OptionError`` for what the aggregation service does not do."""
    if request.mirrors >= request.aggregators:
        raise OptionError(f"mirrors must be below aggregators ({request.aggregators}); got {request.mirrors}")
    given = {
        "communication=planned": request.communication != "ddp",
        "partial_checkpoint_interval": request.partial_checkpoint_interval > 0,
        "nodes of the fleet": bool(request.pool),
    }
    wrong = next((name for name, is_given in given.items() if is_given), "")
    if request.sync == "service" and wrong:
        raise OptionError(f"{wrong} cannot be used with sync=service")
