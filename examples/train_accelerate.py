"""A loop with Hugging Face's Accelerate on nodes that come and go: a tiny language model, on generated text.

    ebbflow train examples/train_accelerate.py --own-checkpoints --nodes local:2x1 --fault 20s:notice:node-2:20s

The lines that differ from a plain script are marked; nothing is downloaded.
"""

import argparse
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

from ebbflow import accelerate_saves  # 1

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8, help="examples of a step, on all processes together")
parser.add_argument("--save-steps", type=int, default=20)
parser.add_argument("--stateful", action="store_true", help="let the loader resume by torchdata's state")
parser.add_argument(
    "--output", default=os.path.join(os.environ.get("EBBFLOW_RUN_FOLDER", "."), "accelerate")
)  # 2
options = parser.parse_args()

text = " ".join(f"{a} plus {b} is {a + b}." for a in range(40) for b in range(40)).encode()
blocks = [torch.tensor(list(text[at : at + 64])) for at in range(0, len(text) - 64, 64)]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 32)
        self.layer = torch.nn.GRU(32, 64, batch_first=True)
        self.head = torch.nn.Linear(64, 256)

    def forward(self, batch):
        seen, _ = self.layer(self.embedding(batch[:, :-1]))
        return torch.nn.functional.cross_entropy(self.head(seen).flatten(0, 1), batch[:, 1:].flatten())


set_seed(0)
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    dataloader_config=DataLoaderConfiguration(
        split_batches=True, use_seedable_sampler=True, use_stateful_dataloader=options.stateful
    ),
)
loader = torch.utils.data.DataLoader(blocks, batch_size=options.batch, shuffle=True, drop_last=True)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
os.makedirs(options.output, exist_ok=True)
saves = accelerate_saves(accelerator, options.output, options.save_steps)  # 3
for batch in saves.batches(loader, options.steps):  # 4
    loss = model(batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    if accelerator.is_main_process:
        print(f"step {saves.step + 1}: loss {mean:.4f}", flush=True)
        with open(os.path.join(options.output, "losses.jsonl"), "a") as file:
            file.write(json.dumps({"step": saves.step + 1, "loss": mean}) + "\n")
