"""Rules of a training's request (``request.TrainingRequest``) that concern several of its options."""

import re
from pathlib import Path
from typing import Any

from ebbflow.infra.storage import user_files
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.storage.scripts import check_script
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names
from ebbflow.planners.training.replicas import whole_replicas

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


def check_gpus(request: Any) -> None:
    """Raise ``OptionError`` for bounds on GPUs that contradict each other or the nodes."""
    if request.max_gpus is not None and request.max_gpus < request.min_gpus:
        raise OptionError(f"max_gpus must be >= min_gpus ({request.min_gpus}); got {request.max_gpus}")
    if request.gpus < request.min_gpus:
        raise OptionError(
            f"nodes {request.nodes} have {request.gpus} GPUs; min_gpus requires {request.min_gpus} at the start"
        )
    if request.replica_gpus > (most := min(request.gpus, request.most_gpus)):
        raise OptionError(
            f"replica_gpus must be <= {most}, the GPUs of the nodes that the run may use; got {request.replica_gpus}"
        )
    usable = sum(whole_replicas(request.placement, request.replica_gpus, request.most_gpus).values())
    if usable < request.min_gpus:
        raise OptionError(
            f"min_gpus must be <= {usable}, the GPUs of the nodes in whole multiples of replica_gpus "
            f"({request.replica_gpus}) that the run may use; got {request.min_gpus}"
        )


def check_pool(request: Any) -> None:
    """Raise ``OptionError`` for what nodes of the fleet cannot be given."""
    if request.pool and not request.runs_dir.startswith(("s3://", "s3a://")):
        raise OptionError(
            f"runs_dir must be on S3, which all nodes of {request.nodes} reach; got {request.runs_dir}"
        )
    if request.pool and (request.fault or request.cpus_per_slot is not None):
        raise OptionError(f"fault and cpus_per_slot are for nodes of this machine; got nodes {request.nodes}")


def absolute_source(source: str, folder: str = "") -> str:
    """Return the source of a working directory with an absolute path; a relative one is taken from ``folder``."""

    def absolute(path: str) -> Path:
        return (Path(folder or ".") / Path(path).expanduser()).absolute()

    if source.startswith("git+"):
        return source
    path, at, ref = source.rpartition("@")
    return f"{absolute(path)}@{ref}" if at and not absolute(source).is_dir() else str(absolute(source))


def checked_trackers(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the trackers as they are recorded. Raises ``OptionError``."""
    if not texts:
        return ()
    from ebbflow.infra.training.tracking.targets import checked

    return checked(texts)


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


def check_failure_rules(request: Any) -> None:
    """Raise ``OptionError`` for a failure table that cannot be read."""
    from ebbflow.tasks.training.failures import failure_table

    if request.failure_rules is not None:
        try:
            failure_table(request.failure_rules)
        except OptionError as error:
            raise OptionError(f"failure_rules: {error}") from error


def check_saving(request: Any) -> None:
    """Raise ``OptionError`` for places and ways of saving that there are not."""
    if request.partial_checkpoint_memory and not request.partial_checkpoint_interval:
        raise OptionError(
            "partial_checkpoint_memory must come with partial_checkpoint_interval above 0; got 0"
        )
    if request.spill_dir:
        StorageLocation(request.spill_dir)


def check_recovery(request: Any) -> None:
    """Raise ``OptionError`` where processes cannot stay while others are lost, leave or join, as is asked."""
    given = {
        "communication=planned": request.communication != "ddp",
        "partial_checkpoint_interval": request.partial_checkpoint_interval > 0,
        "own_checkpoints": request.own_checkpoints,
        "sync=service, which never restarts those that are left,": request.sync == "service",
        "nodes of the fleet": bool(request.pool),
    }
    wrong = next((name for name, is_given in given.items() if is_given), "")
    if request.recovery == "in-place" and wrong:
        raise OptionError(f"{wrong} cannot be used with recovery=in-place")


def check_sync(request: Any) -> None:
    """Raise ``OptionError`` for what the aggregation service does not do."""
    if request.mirrors >= request.aggregators:
        raise OptionError(f"mirrors must be below aggregators ({request.aggregators}); got {request.mirrors}")
    if request.mirror_every > 1 and not request.mirrors:
        raise OptionError(f"mirror_every must come with mirrors above 0; got {request.mirror_every}")
    if request.aggregation_cluster:
        names.CLUSTER.check(request.aggregation_cluster)
        if request.sync == "allreduce":
            raise OptionError(
                f"aggregation_cluster must come with sync=service or auto; got sync={request.sync}"
            )
    given = {
        "communication=planned": request.communication != "ddp",
        "partial_checkpoint_interval": request.partial_checkpoint_interval > 0,
    }
    wrong = next((name for name, is_given in given.items() if is_given), "")
    if request.sync != "allreduce" and wrong:
        raise OptionError(f"{wrong} cannot be used with sync={request.sync}")
    if request.sync == "auto" and request.preflight == "never":
        raise OptionError("sync=auto must have a preflight run, which measures; got preflight=never")
