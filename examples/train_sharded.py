"""Trains a small transformer whose parameters are sharded over processes, to continue sums of digits.

torchrun --nproc-per-node 2 examples/train_sharded.py --parallel fsdp
ebbflow train examples/train_sharded.py --nodes local:2x2 -- --parallel hsdp
"""

import argparse

import torch
from torch import nn

from ebbflow import ElasticRun

DIGITS, LENGTH, WIDTH, LAYERS = 10, 24, 64, 4


class Model(nn.Module):
    """Guesses each next digit; its blocks are gathered one by one while it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.digit, self.place = nn.Embedding(DIGITS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.out = nn.Linear(WIDTH, DIGITS)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        length = digits.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=digits.device)
        x = self.digit(digits) + self.place.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.out(x)


def sequences(count: int) -> torch.Tensor:
    """Return sequences in which each digit is the sum of the two before it, modulo ten."""
    found = torch.randint(DIGITS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    for place in range(2, LENGTH + 1):
        found[:, place] = (found[:, place - 1] + found[:, place - 2]) % DIGITS
    return found


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--parallel", choices=["ddp", "fsdp", "hsdp"], default="fsdp")
    options.add_argument("--epochs", type=int, default=4)
    asked = options.parse_args()
    data, test = sequences(2304).split((2048, 256))
    with ElasticRun.start(seed=1) as run:
        model, optimizer = run.prepare(
            Model(),
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            batch_size=64,
            clip_norm=1.0,
            parallel=asked.parallel,
        )
        for epoch in run.epochs(asked.epochs):
            for (batch,) in run.batches((data,)):
                guessed = model(batch[:, :-1])
                run.backward(nn.functional.cross_entropy(guessed.flatten(0, 1), batch[:, 1:].flatten()))
                run.step()
            kept = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
            here = sum((v.to_local() if hasattr(v, "to_local") else v).numel() for v in kept)
            with torch.no_grad():  # on all processes: blocks are gathered from all of them
                right = model(test[:, :-1].to(run.device)).argmax(-1).cpu() == test[:, 1:]
            run.report(accuracy=float(right[:, 1:].float().mean()))
            if run.is_main:
                print(
                    f"epoch {epoch}: accuracy {run.metrics['accuracy']:.3f} at step {run.progress.step} on "
                    f"{run.statistics.gpus} processes; {here:,} numbers of parameters and moments in each"
                )


if __name__ == "__main__":
    main()
