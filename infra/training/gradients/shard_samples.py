"""Samples of the gradient where parameters are sharded: each rank's in each of its passes, seen as it is reduced.

FSDP reduces a block's gradients and scatters the sum. What goes in is one rank's gradient of one pass, so its norm is
that of a sample. Where gradients are pre-conditioned, a rank has Adam's moments of its own shard only: in steps that
are measured it then gets all ranks' gradients of its shard (all-to-all, which moves as many bytes), takes their
weighted norms, and sums them up itself. Every pass is reduced at once, so that no rank ever holds a whole gradient.

With tensor parallelism the ranks of a group get the same examples, and are one sample together. Their parts of a
parameter are others' elements; what is not cut, each of them has, and counts for its share of the norm.
"""

import time
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.infra.training.checkpoints.shards import Division, cut_along, local, region_of
from ebbflow.infra.training.gradients.preconditioner import AdamPreconditioner
from ebbflow.infra.training.gradients.squares import LocalNorms, SquareSums

TENSOR = "tp"  # name of a mesh's dimension along which processes are tensor parallel


class ShardSamples:
    """Takes over how a sharded model's gradients are summed, and their norms with it.

    Args:
        model: a ``FSDPModule``, whose gradients become sums; losses are divided by the number of ranks instead.
        division: how many shards and replicas there are.
        sums: of squares.
        preconditioner: of Adam.
        tensor: ranks of a tensor-parallel group.
    """

    pair = None

    def __init__(
        self,
        model: Any,
        division: Division,
        sums: SquareSums,
        preconditioner: AdamPreconditioner | None,
        tensor: int = 1,
    ) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._sums, self._preconditioner = sums, preconditioner
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._replicas, self._tensor = division.replicas, tensor
        self._copies = {p: copies(p, tensor) for p in self._parameters}
        self.loss_factor = tensor / (division.parts * division.replicas)
        self._measured = self._conditioned = False
        self._squares: list[Tensor] = []  # of the pass: of this rank's gradient
        self._of_ranks: list[
            Tensor
        ] = []  # of the pass: of this shard of each rank's gradient, pre-conditioned
        self._passes: list[tuple[float, Tensor]] = []  # weight and squares
        self._group: Any = None
        self._received: tuple[Tensor, list[Tensor]] | None = (
            None  # all ranks' shard, and the parameters in it
        )
        self._seconds = self._reduced_at = 0.0
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_Reduction(self._reduce))
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._scattered)

    def begin(self, measured: bool) -> None:
        self.forget()
        self._measured = measured
        self._conditioned = measured and self._preconditioner is not None and self._preconditioner.on

    def after_pass(self, weight: float, last: bool) -> None:
        self._square_received()
        found = self._of_ranks if self._conditioned else self._squares
        if self._measured and found:
            self._passes.append((weight, torch.stack(found).sum(0)))
        self._squares, self._of_ranks = [], []

    def norms(self, examples: float, scale: float) -> LocalNorms:
        total = sum(
            self._squared([p for p in self._parameters if p.grad is not None and self._copies[p] == count])
            / count
            for count in set(self._copies.values())
        )
        total /= self._replicas * scale**2
        found = LocalNorms(0.0, 0.0, total, self._seconds)
        if self._measured and self._passes:
            weights = torch.tensor([weight for weight, _ in self._passes], dtype=torch.float64)
            squares = torch.stack([square for _, square in self._passes]).double().cpu()
            per_sample = self._weighted(weights, squares)
            unscale = (scale * self.loss_factor) ** -2
            found = found._replace(
                local=per_sample * unscale, samples=float((weights > 0).sum()) / self._tensor
            )
        self.forget()
        return found

    def forget(self) -> None:
        self._squares, self._of_ranks, self._passes = [], [], []
        self._received = None
        self._seconds = self._reduced_at = 0.0

    def _squared(self, parameters: list[Tensor]) -> float:
        """Return the sum of squares of these parameters' gradients, as far as they lie here."""
        with torch.no_grad():  # the part that lies here is a view then, and no step of a backward pass
            gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if not self._measured:
            return float(self._sums.rough(gradients))
        factors = None
        if self._conditioned and self._preconditioner is not None:
            factors = [local(factor) for factor in self._preconditioner.of(parameters)]
        return float(self._sums.of(gradients, factors))

    def _weighted(self, weights: Tensor, squares: Tensor) -> float:
        """Return the sum of this rank's squares over their weights; shapes (passes,) and (passes[, ranks])."""
        if self._conditioned:  # squares of all ranks of the group, and each has weights of its own
            device = local(self._parameters[0]).device
            members = dist.get_world_size(self._group)
            gathered = torch.empty(members * len(weights), dtype=torch.float64, device=device)
            dist.all_gather_single(gathered, weights.to(device), group=self._group)
            weights = gathered.view(members, -1).T.cpu()
        return float(torch.where(weights > 0, squares / weights.clamp(min=1e-300), 0.0).sum())

    # --- while gradients are reduced ------------------------------------------------------------------------

    def _reduce(self, output: Tensor, given: Tensor, group: Any) -> None:
        self._square_received()
        self._group = group
        begun = time.monotonic()
        if self._conditioned:
            received = torch.empty_like(given)
            dist.all_to_all_single(received, given, group=group)
            rows = received.view(dist.get_world_size(group), -1)
            torch.sum(rows, 0, out=output)
            self._received = rows, []
        else:
            dist.reduce_scatter_single(output, given, op=dist.ReduceOp.SUM, group=group)
        if not given.is_cuda:  # on a GPU it is only begun, and runs beside what is computed
            self._reduced_at = time.monotonic()
            self._seconds += self._reduced_at - begun
        if self._measured and not self._conditioned:
            if self._tensor == 1:
                self._squares.append(self._sums.of([given]))
            else:  # how much counts is known once the parameters in it are
                self._received = given.view(dist.get_world_size(group), -1), []

    def _scattered(self, parameter: Tensor) -> None:
        """Note which parameters a block has, in the order of their gradients; replicas have summed theirs by then."""
        if self._reduced_at:
            self._seconds += time.monotonic() - self._reduced_at if self._replicas > 1 else 0.0
            self._reduced_at = 0.0
        if self._received is not None:
            self._received[1].append(parameter)

    def _square_received(self) -> None:
        """Take the norms of the last block's gradients, of each rank."""
        if self._received is None:
            return
        rows, parameters = self._received
        self._received = None
        factors = self._laid_out(parameters, rows)
        squares = torch.stack([self._sums.of([row], [factors]) for row in rows])
        if self._conditioned:
            self._of_ranks.append(squares)
        else:
            self._squares.append(squares.sum())

    def _laid_out(self, parameters: list[Tensor], rows: Tensor) -> Tensor:
        """Return the factors as they lie in a block's reduced gradient: shards one after another, padded."""
        found, at = rows.new_zeros(rows.shape[1]), 0
        factors: list[Any] = [None] * len(parameters)
        if self._conditioned and self._preconditioner is not None:
            factors = self._preconditioner.of(parameters)
        for parameter, factor in zip(parameters, factors, strict=True):
            width, weight = _padded(parameter, rows.shape[0]), self._copies[parameter] ** -0.5
            if factor is None:
                found[at : at + width] = weight
            else:
                values = local(factor).reshape(-1)
                torch.mul(values, weight, out=found[at : at + values.numel()])
            at += width
        return found


class _Reduction:
    """FSDP's interface for a reduction of its own (``torch.distributed.fsdp``'s ``ReduceScatter``)."""

    def __init__(self, reduce: Callable[[Tensor, Tensor, Any], None]) -> None:
        self._do = reduce

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._do(output_tensor, input_tensor, group)


def copies(parameter: Any, tensor: int) -> int:
    """Return how many of the ``tensor`` ranks of a tensor-parallel group hold the same part of a parameter."""
    dimension = _tensor_dimension(parameter)
    return tensor if dimension is None or cut_along(parameter.placements[dimension]) is None else 1


def _tensor_dimension(parameter: Any) -> int | None:
    """Return the dimension of a parameter's mesh along which it is tensor parallel."""
    names = parameter.device_mesh.mesh_dim_names or ()
    return names.index(TENSOR) if TENSOR in names else None


def _padded(parameter: Any, shards: int) -> int:
    """Return the elements of a shard of the parameter's gradient, with what pads the last ones."""
    dimension = _tensor_dimension(parameter)
    region = region_of(parameter, () if dimension is None else (dimension,))
    along = next(
        place
        for number, placement in enumerate(parameter.placements)
        if number != dimension and (place := cut_along(placement)) is not None
    )
    lengths = [part.stop - part.start for part in region]
    return int(prod(lengths) // max(1, lengths[along]) * -(-lengths[along] // shards))
