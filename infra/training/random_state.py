"""Random numbers that follow from the run's seed, the step and the process, so that nothing of them must be saved."""

import random
from hashlib import blake2b
from struct import unpack

import numpy as np
import torch

from ebbflow.infra.errors import TrainingError

MOST_SEED = 2**32 - 1


def seed_everything(seed: int, *stream: int) -> None:
    """Seed the global generators of python, numpy and torch (CPU and CUDA) for one stream of a run.

    Equal arguments give equal numbers, different streams unrelated ones. A run calls this at each step: one that
    restarts at step 100 draws what it would have drawn there anyway.

    Raises ``TrainingError`` for a seed outside 0 to 2**32 - 1.
    """
    if not 0 <= seed <= MOST_SEED:
        raise TrainingError(f"seed must be between 0 and {MOST_SEED}; got {seed}")
    # a hash: numpy's SeedSequence takes longer than all that follows
    digest = blake2b(repr((seed, *stream)).encode(), digest_size=20).digest()
    first, second, number = unpack("<QLQ", digest)
    random.seed(first)
    np.random.seed(second)
    torch.default_generator.manual_seed(number)  # torch.manual_seed looks for every kind of device: 100 µs
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
