"""Hugging Face's Trainer on nodes that come and go: a tiny GPT-2 made from a config, on text that is generated here.

    ebbflow train examples/train_hf.py --own-checkpoints --nodes local:2x1 --fault 20s:notice:node-2:20s

The five lines that differ from a plain script are marked; nothing is downloaded.
"""

import argparse
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ebbflow import hugging_face_callback, newest_checkpoint  # 1

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=8, help="examples of a step, on all processes together")
parser.add_argument("--save-steps", type=int, default=20)
parser.add_argument("--output", default=os.path.join(os.environ.get("EBBFLOW_RUN_FOLDER", "."), "hf"))  # 2
options = parser.parse_args()

text = " ".join(f"{a} plus {b} is {a + b}." for a in range(40) for b in range(40)).encode()
blocks = [torch.tensor(list(text[at : at + 64])) for at in range(0, len(text) - 64, 64)]
# whole steps in a pass: Trainer pads a shorter last one by its processes
blocks = blocks[: len(blocks) // options.batch * options.batch]

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,  # what is drawn for dropout depends on the processes
)  # fmt: skip
trainer = Trainer(
    GPT2LMHeadModel(config),
    TrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch // int(os.environ.get("WORLD_SIZE", "1")),  # 3
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=options.save_steps,
        save_total_limit=2,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=[{"input_ids": block, "labels": block} for block in blocks],
    callbacks=[hugging_face_callback()],  # 4
)
trainer.train(resume_from_checkpoint=newest_checkpoint(options.output))  # 5
if trainer.is_world_process_zero():
    trainer.state.save_to_json(os.path.join(options.output, "history.json"))
