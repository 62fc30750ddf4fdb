"""Random numbers that follow from the run's seed, the step and the process, so that nothing of them must be saved."""

import random

import numpy as np
import torch

from ebbflow.infra.errors import TrainingError

MOST_SEED = 2**32 - 1


def seed_everything(seed: int, *stream: int) -> None:
    """Seed the global generators of python, numpy and torch (CPU and CUDA) for one stream of a run.

    Equal arguments give equal numbers, different streams independent ones (numpy's ``SeedSequence``). A run calls
    this at each step: one that restarts at step 100 draws what it would have drawn there anyway.

    Raises ``TrainingError`` for a seed outside 0 to 2**32 - 1.
    """
    if not 0 <= seed <= MOST_SEED:
        raise TrainingError(f"seed must be between 0 and {MOST_SEED}; got {seed}")
    words = np.random.SeedSequence([seed, *stream]).generate_state(4, np.uint32)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    number = (int(words[2]) << 32 | int(words[3])) >> 1
    torch.default_generator.manual_seed(number)  # torch.manual_seed looks for every kind of device: 100 µs
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
