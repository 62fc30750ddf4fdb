"""Trains a small recommendation model (DLRM) on generated clicks, with embedding tables across processes.

torchrun --nproc-per-node 2 examples/train_dlrm.py
torchrun --nproc-per-node 4 examples/train_dlrm.py --communication ddp

Three all-to-alls move indices to the tables' owners, embeddings back, and their gradients to the owners again; the
indices of the next batch travel while this one is computed. Perceptrons are replicated by DDP. Tables that are spread
over processes are not elastic: this runs under torchrun, with a fixed number of processes.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ebbflow import Exchange, Exchanged, PlainCollectives, PlannedCommunication, PlanningSettings

DENSE, ROWS, DIM, POOLING = 13, 2000, 16, 4


class Clicks:
    """Generated samples: dense features, indices into each table, and whether the user clicked."""

    def __init__(self, tables: int, seed: int) -> None:
        self.tables, self.drawn = tables, torch.Generator().manual_seed(seed)
        fixed = torch.Generator().manual_seed(0)  # the same taste in all processes
        self.taste, self.weights = (
            torch.randn(tables, ROWS, generator=fixed),
            torch.randn(DENSE, generator=fixed),
        )

    def batch(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        dense = torch.randn(size, DENSE, generator=self.drawn)
        shares = torch.rand(size, self.tables, POOLING, generator=self.drawn)
        indices = (shares.pow(3) * ROWS).long()  # few items are most of the clicks
        liked = self.taste.gather(1, indices.permute(1, 0, 2).reshape(self.tables, -1))
        score = liked.view(self.tables, size, POOLING).mean(2).sum(0) + dense @ self.weights / 2
        chance = torch.sigmoid(score)
        return dense, indices, torch.bernoulli(chance, generator=self.drawn)


class Perceptrons(nn.Module):
    """What all processes hold: dense features to a vector, and with the embeddings to a logit."""

    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, width), nn.ReLU(), nn.Linear(width, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(DIM * (tables + 1), width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, dense: Tensor, embedded: Any) -> Tensor:
        below = self.bottom(dense)  # embeddings are under way meanwhile
        return self.top(torch.cat([below, embedded()], dim=1)).squeeze(1)


class Tables(nn.Module):
    """The embedding tables that this process owns; table ``t`` is of process ``t % ranks``."""

    def __init__(self, tables: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.own = range(rank, tables, ranks)
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="mean") for _ in self.own)

    def forward(self, indices: Sequence[Tensor]) -> Tensor:
        return torch.stack([bag(one) for bag, one in zip(self.bags, indices, strict=True)])


def train(
    tables: int,
    batch: int,
    width: int,
    steps: int,
    communication: PlannedCommunication | None,
    bucket_mb: float = 1.0,
) -> list[float]:
    """Return the losses of this process' batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    submit = communication.submit if communication else PlainCollectives().submit
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(Perceptrons(tables, width), bucket_cap_mb=bucket_mb)
    if communication is not None:
        communication.reduce(model)
    torch.manual_seed(100 + rank)
    owned, clicks = Tables(tables, rank, ranks), Clicks(tables, rank)
    optimizer = torch.optim.SGD([*model.parameters(), *owned.parameters()], lr=0.1)
    counts = [len(range(owner, tables, ranks)) for owner in range(ranks)]  # tables of each process
    to_owners = [count * batch * POOLING for count in counts]
    from_all = [len(owned.own) * batch * POOLING] * ranks
    wait = communication.wait if communication else None
    embeddings = Exchange(submit, "emb-fwd", "emb-bwd", wait)

    def send(indices: Tensor) -> Any:
        """Send a batch's indices to the owners of their tables."""
        rows = torch.cat([indices[:, owner::ranks].permute(1, 0, 2).reshape(-1) for owner in range(ranks)])
        received = torch.empty(sum(from_all), dtype=torch.int64)
        return submit("data-prep", Exchanged(rows, received, to_owners, from_all))

    samples = clicks.batch(batch)
    arriving = send(samples[1])
    losses = []
    for step in range(steps):
        if communication is not None:
            communication.begin()
        dense, _, clicked = samples
        samples, arrived = clicks.batch(batch), arriving
        arriving = send(samples[1])  # of the next iteration: it travels while this one is computed
        got = communication.wait("data-prep", arrived) if communication else arrived.wait()
        asked = got.received.view(ranks, len(owned.own), batch, POOLING)
        looked_up = owned([asked[:, k].reshape(-1, POOLING) for k in range(len(owned.own))])
        mine = looked_up.view(len(owned.own), ranks, batch * DIM).transpose(0, 1)
        token = embeddings.request(
            mine.reshape(-1),
            [len(owned.own) * batch * DIM] * ranks,
            [count * batch * DIM for count in counts],
        )

        def embedded(token: Tensor = token) -> Tensor:
            rows = embeddings.wait(token)
            parts = rows.split([count * batch * DIM for count in counts])
            each = [part.view(-1, batch, DIM).transpose(0, 1).reshape(batch, -1) for part in parts]
            return torch.cat(each, dim=1)

        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, embedded), clicked)
        optimizer.zero_grad()
        if communication is not None:
            communication.forward_done()
        loss.backward()
        if communication is not None:
            communication.reduced()
        for parameter in owned.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(ranks)  # the mean over processes, as DDP's
        finite = all(bool(p.grad.isfinite().all()) for p in [*model.parameters(), *owned.parameters()])
        sound = torch.tensor([float(finite)])
        dist.all_reduce(sound, op=dist.ReduceOp.MIN)
        if sound.item():  # a plan that failed leaves no numbers: that step is dropped by all
            optimizer.step()
        if communication is not None:
            communication.end()
        losses.append(float(loss.detach()))
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {sum(losses[-50:]) / 50:.4f}", flush=True)
    arriving.wait()
    return losses


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--communication", choices=("planned", "ddp"), default="planned")
    options.add_argument("--tables", type=int, default=8)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--steps", type=int, default=300)
    given = options.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    communication = None
    if given.communication == "planned":
        communication = PlannedCommunication.start(
            PlanningSettings(), lambda said: print(said["state"], said.get("reason", ""), flush=True)
        )
    try:
        train(given.tables, given.batch, given.width, given.steps, communication)
    finally:
        if communication is not None:
            communication.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
