"""Data that all workers of a test's jobs can read."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an ``.npz`` file with scikit-learn's digits, every feature from 0 to 1, and ten first centres."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    np.savez(path, x=x / 16, y=y, start=x[:10] / 16)
    return str(path)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an ``.npz`` file with 60 documents of 40 tokens, drawn from 8 topics over 150 words."""
    rng = np.random.default_rng(1)
    topics = rng.dirichlet(np.full(150, 0.05), 8)
    mixtures = rng.dirichlet(np.full(8, 0.1), 60)
    words = [rng.choice(150, p=topics[rng.choice(8, p=mixture)]) for mixture in mixtures for _ in range(40)]
    path: Path = tmp_path_factory.mktemp("corpus") / "corpus.npz"
    np.savez(path, document=np.repeat(np.arange(60), 40), word=np.array(words))
    return str(path)
