"""The worked examples of the thesis: its motivating one (Fig. 4.6) and a DLRM that fits the ratios of model A2."""

from ebbflow.planners.communication.dag import CommOp, ComputeOp, Dependency, TrainingDag
from ebbflow.planners.communication.schedule import ExecutionOption, PlannedMotif
from ebbflow.planners.communication.workloads import DEPENDENCIES

MOTIVATING = TrainingDag(
    (ComputeOp("f1", 2), ComputeOp("f2", 1.5), ComputeOp("f3", 2), ComputeOp("g", 1)),
    (
        CommOp("a", "all-to-all", 1, 4),
        CommOp("b", "all-reduce", 1, 4),
        CommOp("c", "all-reduce", 1, 4),
        CommOp("d", "all-reduce", 1, 4),
    ),
    (
        Dependency("f1", "a"),
        Dependency("f1", "b"),
        Dependency("f2", "c"),
        Dependency("f3", "d"),
        Dependency("b", "g"),
        Dependency("c", "g"),
        Dependency("d", "g"),
    ),
)


def option(
    name: str, seconds: float, channel: int = 0, motifs: int = 1, algorithm: str = "whole"
) -> ExecutionOption:
    """Return an option of equal motifs that take this many seconds together."""
    return ExecutionOption(
        name, tuple(PlannedMotif(seconds / motifs, (channel,)) for _ in range(motifs)), algorithm
    )


MOTIVATING_OPTIONS = {
    "a": (option("rdma", 2.5), option("tcp", 3.5, channel=1)),
    "b": (option("ring", 2.5, algorithm="ring"), option("tree", 3, algorithm="tree")),
    "c": (option("ring", 2, algorithm="ring"), option("tree", 2.5, algorithm="tree")),
    "d": (option("ring", 2, algorithm="ring"), option("tree", 2.5, algorithm="tree")),
}

_COMPUTE = {
    "fwd-emb": 3.5, "fwd-bottom": 6.3, "fwd-top": 9.3, "bwd-top": 18.2, "bwd-bottom": 9.0, "bwd-emb": 4.0,
}  # fmt: skip
_COMM = {"data-prep": 22.1, "emb-fwd": 9.9, "ar-top": 4.1, "emb-bwd": 9.9, "ar-bottom": 26.5}
HAND_ORDER = ("emb-bwd", "data-prep", "emb-fwd", "ar-top", "ar-bottom")

DLRM = TrainingDag(
    tuple(ComputeOp(name, seconds) for name, seconds in _COMPUTE.items()),
    tuple(
        CommOp(name, "all-reduce" if name.startswith("ar-") else "all-to-all", 1.0, 128, name == "data-prep")
        for name in _COMM
    ),
    DEPENDENCIES,
)
"""Time unit: 1 % of LIFO's iteration."""


def dlrm_plan(
    factor: float = 1.0, channel: int = 0, motifs: int = 1, top: int = 1, bottom: int = 1
) -> dict[str, ExecutionOption]:
    """Return a plan of the DLRM: all-to-alls by factor, channel and motifs, all-reduces by segments."""
    cuts = {"ar-top": top, "ar-bottom": bottom}
    return {
        name: option(f"/{cuts[name]}", seconds, 0, cuts[name])
        if name in cuts
        else option(f"{factor:g}/{motifs}@{channel}", seconds * factor, channel, motifs)
        for name, seconds in _COMM.items()
    }


DLRM_OPTIONS = {
    name: tuple(
        option(f"/{cut}", seconds, 0, cut) for cut in ((1, 2, 4) if name == "ar-top" else (1, 2, 4, 8))
    )
    if name.startswith("ar-")
    else (
        option("default", seconds),
        option("spline", 0.62 * seconds, algorithm="spline"),
        option("tcp", 1.15 * seconds, channel=1, motifs=4, algorithm="spline"),
    )
    for name, seconds in _COMM.items()
}
"""324 plans."""
