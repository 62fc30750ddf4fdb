"""Lightning's Trainer on nodes that come and go: a tiny language model, on text that is generated here.

    ebbflow train examples/train_lightning.py --own-checkpoints --nodes local:2x1 --fault 20s:notice:node-2:20s

The lines that differ from a plain script are marked; nothing is downloaded.
"""

import argparse
import json
import os

import lightning
import torch

from ebbflow import lightning_callback, newest_checkpoint  # 1

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8, help="examples of a step, on all processes together")
parser.add_argument("--save-steps", type=int, default=20)
parser.add_argument(
    "--output", default=os.path.join(os.environ.get("EBBFLOW_RUN_FOLDER", "."), "lightning")
)  # 2
options = parser.parse_args()
world = int(os.environ.get("WORLD_SIZE", "1"))

text = " ".join(f"{a} plus {b} is {a + b}." for a in range(40) for b in range(40)).encode()
blocks = [torch.tensor(list(text[at : at + 64])) for at in range(0, len(text) - 64, 64)]


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 32)
        self.layer = torch.nn.GRU(32, 64, batch_first=True)
        self.head = torch.nn.Linear(64, 256)

    def training_step(self, batch, index):
        seen, _ = self.layer(self.embedding(batch[:, :-1]))
        loss = torch.nn.functional.cross_entropy(self.head(seen).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        mean = self.trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean").item()
        if self.trainer.is_global_zero:
            with open(os.path.join(options.output, "losses.jsonl"), "a") as file:
                file.write(json.dumps({"step": self.trainer.global_step, "loss": mean}) + "\n")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
os.makedirs(options.output, exist_ok=True)
loader = torch.utils.data.DataLoader(blocks, batch_size=options.batch // world, shuffle=True)
trainer = lightning.Trainer(
    max_steps=options.steps,
    num_nodes=world // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    accelerator="auto",
    strategy="ddp" if world > 1 else "auto",
    default_root_dir=options.output,
    enable_checkpointing=False,
    logger=False,
    callbacks=[lightning_callback(options.output, options.save_steps)],  # 3
)
trainer.fit(Model(), loader, ckpt_path=newest_checkpoint(options.output))  # 4
