"""Whether the optimizer's groups are set alike on all processes.

A script may set learning rates and other hyperparameters by hand, by a rank, a count or a measurement of its own
process. Replicas would drift apart then, and shards be updated by different rules.

Two numbers of each process travel in the all-reduce that ends a step: a digest d of its settings, and d². With n
processes n·Σd² = (Σd)² holds only where all are equal (the inequality of Cauchy and Schwarz). Sums of whole numbers
are exact in double precision: with 20 bits up to 8192 processes. Two settings have the same digest once in a million.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.checkpoints.shards import is_sharded

_BITS = 20
# which parameters, and which of several programs does the same arithmetic: nodes may differ in these
_LEFT_OUT = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
_MISSING = "nothing"
_UNREAD = object()  # a value that is not compared

Settings = list[dict[str, Any]]


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Return the hyperparameters of each group: plain values, and tensors of one element as numbers."""
    found: Settings = []
    for group in optimizer.param_groups:
        mine = {}
        for name, value in group.items():
            if name not in _LEFT_OUT and (plain := _plain(value)) is not _UNREAD:
                mine[str(name)] = plain
        found.append(mine)
    return found


def digest_pair(settings: Settings) -> tuple[float, float]:
    """Return the two numbers of a process that are summed over all."""
    text = repr([sorted(group.items()) for group in settings]).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=3).digest()) >> (24 - _BITS)
    return float(digest), float(digest * digest)


def are_equal(count: int, digests: float, squares: float) -> bool:
    """Tell whether ``count`` processes gave the same digest, by the sums of digests and of their squares."""
    return count * int(squares) == int(digests) ** 2


def check_equal(settings: Settings, from_all: Callable[[Settings], list[Any]], step: int) -> None:
    """Compare the settings themselves, once digests differ; collective.

    Args:
        settings: of this process.
        from_all: gives each process's, by rank.
        step: that is not taken where they differ.

    Raises ``TrainingError``, in all processes, which names a group and the values in it.
    """
    found = difference(from_all(settings))
    if found:
        raise TrainingError(
            f"the optimizer is set differently on the processes, so step {step} is not taken: {found}; let what sets "
            "it depend on neither the rank nor what one process counts or measures by itself: use run.progress, "
            "run.prepare(scheduler=...), or a value that all processes have exchanged. Where the script counts its "
            "own steps, keep the count in run.prepare(state=...)"
        )


def difference(by_rank: Sequence[Settings]) -> str:
    """Return in words the first setting that differs, with its values, and how many more there are; empty: none."""
    if len({len(settings) for settings in by_rank}) > 1:
        return "the number of groups is " + _values([len(settings) for settings in by_rank])
    found = [
        f"{name} of group {number} is {values}"
        for number, groups in enumerate(zip(*by_rank, strict=True))
        for name in dict.fromkeys(name for group in groups for name in group)
        if (values := _values([_shown(group, name) for group in groups]))
    ]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + more if found else ""


def _values(by_rank: Sequence[object]) -> str:
    """Return in words which processes have which value; empty where all have the same."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(by_rank):
        ranks.setdefault(str(value), []).append(str(rank))
    if len(ranks) < 2:
        return ""
    said = [
        f"{value} in process{'es' if len(those) > 1 else ''} {_some(those)}" for value, those in ranks.items()
    ]
    return " and ".join(said[:4]) + (f" and {len(said) - 4} other values" if len(said) > 4 else "")


def _some(ranks: Sequence[str]) -> str:
    return ", ".join(ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _shown(group: Mapping[str, Any], name: str) -> str:
    return repr(group[name]) if name in group else _MISSING


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is float or kind is str or value is None:  # most of them, and each step asks
        return value
    if kind is bool or kind is int:
        return float(value)
    if isinstance(value, list | tuple):
        found = tuple(map(_plain, value))
        return _UNREAD if _UNREAD in found else found
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not is_sharded(value) else _UNREAD
    if isinstance(value, Real):
        return float(value)
    return value if isinstance(value, str) else _UNREAD
