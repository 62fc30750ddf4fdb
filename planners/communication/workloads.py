"""DLRM trainings to plan for: the models of the thesis' evaluation in shape, and of any other size."""

from dataclasses import dataclass

from ebbflow.planners.communication.dag import CommOp, ComputeOp, Dependency, TrainingDag
from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class DlrmModel:
    """Sizes of a recommendation model with embedding tables across ranks (Table 4.2).

    Args:
        tables: embedding tables of all ranks.
        dim: average columns of a table.
        pooling: average lookups of a sample in a table.
        layers: of the multi-layer perceptrons.
        width: average width of a layer.
        mflops: millions of operations for a sample, forward.
        top_share: fraction of the dense parameters that are the top perceptron's.
    """

    tables: int
    dim: int
    pooling: int
    layers: int
    width: int
    mflops: float
    top_share: float = 0.1


A1 = DlrmModel(500, 68, 27, 26, 914, 89)
A2 = DlrmModel(1000, 93, 15, 20, 3375, 638)
A3 = DlrmModel(1000, 231, 17, 26, 3210, 784)

SHARES = {
    "fwd-emb": 0.07,
    "fwd-bottom": 0.12,
    "fwd-top": 0.18,
    "bwd-top": 0.37,
    "bwd-bottom": 0.18,
    "bwd-emb": 0.08,
}
"""Fractions of an iteration's compute, in program order: those of the fixture that fits model A2."""

DEPENDENCIES = (
    Dependency("data-prep", "fwd-emb"),
    Dependency("ar-bottom", "fwd-bottom", 1),
    Dependency("emb-fwd", "fwd-top"),
    Dependency("ar-top", "fwd-top", 1),
    Dependency("emb-bwd", "bwd-emb"),
    Dependency("fwd-emb", "emb-fwd"),
    Dependency("bwd-top", "ar-top"),
    Dependency("bwd-top", "emb-bwd"),
    Dependency("bwd-bottom", "ar-bottom"),
    Dependency("bwd-emb", "data-prep", 1),
)


def dlrm_dag(
    model: DlrmModel, ranks: int, *, batch: int = 512, flops: float = 9e12, groups: int = 1
) -> TrainingDag:
    """Return an iteration of a DLRM.

    Args:
        model: its sizes.
        ranks: processes; tables are spread over them.
        batch: samples of a rank.
        flops: operations per second that a rank reaches.
        groups: into how many collectives each exchange of embeddings is cut, each with its part of the tables.

    Raises ``OptionError``.
    """
    if ranks < 1 or batch < 1 or not flops > 0 or not 1 <= groups <= model.tables:
        raise OptionError(
            f"ranks and batch must be >= 1, flops > 0, groups from 1 to {model.tables}; got {ranks}, {batch}, "
            f"{flops:g}, {groups}"
        )
    compute = 3 * model.mflops * 1e6 * batch / flops
    embedded = 4.0 * model.tables * model.dim * batch / groups
    looked_up = 8.0 * model.tables * model.pooling * batch / groups
    dense = 4.0 * model.layers * model.width**2
    kinds = {
        "data-prep": looked_up,
        "emb-fwd": embedded,
        "ar-top": dense * model.top_share,
        "emb-bwd": embedded,
        "ar-bottom": dense * (1 - model.top_share),
    }
    cut = {name: _names(name, 1 if name.startswith("ar-") else groups) for name in kinds}
    comm = tuple(
        CommOp(
            one, "all-reduce" if name.startswith("ar-") else "all-to-all", size, ranks, name == "data-prep"
        )
        for name, size in kinds.items()
        for one in cut[name]
    )
    dependencies = tuple(
        Dependency(before, after, edge.lag)
        for edge in DEPENDENCIES
        for before in cut.get(edge.before, (edge.before,))
        for after in cut.get(edge.after, (edge.after,))
    )
    blocks = tuple(ComputeOp(name, compute * share) for name, share in SHARES.items())
    return TrainingDag(blocks, comm, dependencies)


def _names(name: str, groups: int) -> tuple[str, ...]:
    return (name,) if groups == 1 else tuple(f"{name}/{k}" for k in range(groups))
