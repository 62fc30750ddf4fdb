"""The applications against references that share no code with the runtime."""

from math import lgamma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_samples import InProcessJob

from ebbflow.infra.elastic.apps.kmeans import KMeans
from ebbflow.infra.elastic.apps.lda import TOTALS, Lda, likelihood
from ebbflow.infra.elastic.apps.mlr import Mlr, loss_and_gradient
from ebbflow.planners.errors import OptionError


def test_gradient_of_cross_entropy() -> None:
    rng = np.random.default_rng(0)
    weights, x, y = rng.normal(size=(3, 4)), rng.normal(size=(6, 4)), rng.integers(3, size=6)
    _, gradient = loss_and_gradient(weights, x, y)
    for place in np.ndindex(weights.shape):
        step = np.zeros_like(weights)
        step[place] = 1e-6
        slope = (
            loss_and_gradient(weights + step, x, y)[0] - loss_and_gradient(weights - step, x, y)[0]
        ) / 2e-6
        assert gradient[place] == pytest.approx(slope, abs=1e-6)


def gradient_descent(app: Mlr) -> float:
    """Return the objective after plain gradient descent in one process."""
    with np.load(app.data) as arrays:
        x, y = np.hstack([arrays["x"], np.ones((len(arrays["x"]), 1))]), arrays["y"]
    weights = np.zeros((app.classes, x.shape[1]))
    for _ in range(app.iterations):
        scores = np.exp(x @ weights.T)
        chances = scores / scores.sum(axis=1, keepdims=True)
        gradient = (chances - np.eye(app.classes)[y]).T @ x / len(y) + app.decay * weights
        weights -= app.rate * gradient
    loss = -np.log(
        (np.exp(x @ weights.T) / np.exp(x @ weights.T).sum(axis=1, keepdims=True))[range(len(y)), y]
    )
    return float(loss.mean() + app.decay / 2 * (weights**2).sum())


def test_mlr_under_bsp_is_gradient_descent(digits: str, tmp_path: Path) -> None:
    app = Mlr(digits, classes=10, executors=5, iterations=25, exact=True)
    values = InProcessJob(app, 2, tmp_path).finish()
    assert app.objective(values) == pytest.approx(gradient_descent(app), rel=1e-6)


def test_mlr_converges_under_any_staleness(digits: str, tmp_path: Path) -> None:
    finals = {}
    for staleness in (0, 1, 4):
        app = Mlr(digits, classes=10, executors=4, iterations=80, staleness=staleness)
        finals[staleness] = app.objective(InProcessJob(app, 2, tmp_path / str(staleness), 5).finish(100_000))
    assert max(finals.values()) <= 1.02 * min(finals.values())
    assert max(finals.values()) < 0.6  # from ln 10 = 2.3


def serial_gibbs(app: Lda, seed: int) -> float:
    """Return the log-likelihood after Gibbs sampling by the formula, one token after the other."""
    rng = np.random.default_rng(seed)
    with np.load(app.data) as arrays:
        documents, words = arrays["document"], arrays["word"]
    topics = rng.integers(app.topics, size=len(words))
    u = np.zeros((documents.max() + 1, app.topics))
    w = np.zeros((app.words, app.topics))
    np.add.at(u, (documents, topics), 1)
    np.add.at(w, (words, topics), 1)
    for _ in range(app.epochs):
        for place, (document, word) in enumerate(zip(documents, words, strict=True)):
            u[document, topics[place]] -= 1
            w[word, topics[place]] -= 1
            chances = (
                (u[document] + app.alpha) * (w[word] + app.beta) / (w.sum(axis=0) + app.words * app.beta)
            )
            topics[place] = np.searchsorted(np.cumsum(chances), rng.random() * chances.sum())
            u[document, topics[place]] += 1
            w[word, topics[place]] += 1
    return by_definition(u, w, app.alpha, app.beta)


def by_definition(u: Any, w: Any, alpha: float, beta: float) -> float:
    """Return log p(words, topics) with the gamma function."""
    total = 0.0
    for counts, prior in ((u, alpha), (w.T, beta)):
        for row in counts:
            total += lgamma(len(row) * prior) - lgamma(len(row) * prior + row.sum())
            total += sum(lgamma(count + prior) - lgamma(prior) for count in row)
    return total


@pytest.mark.parametrize("barrier", [False, True])
def test_lda_is_as_good_as_serial_gibbs(corpus: str, tmp_path: Path, barrier: bool) -> None:
    app = Lda(corpus, topics=8, executors=6, epochs=12, barrier=barrier)
    job = InProcessJob(app, 2, tmp_path, 2)
    while app.blocks * 3 * app.executors > job.master.ledger.clock.version:
        job.network.step()
    job.join()
    job.steps(200)
    job.leave("n1")
    values = job.finish()
    counts = app.counts(values)
    tokens = 60 * 40
    assert counts.sum() == tokens == values[TOTALS].sum()
    assert (counts.sum(axis=0) == values[TOTALS]).all()
    assert counts.min() >= 0
    again = np.zeros_like(counts)  # the topics that executors hold say the same
    by_document = np.zeros((60, 8), np.int64)
    for index, topics in job.master.states.items():
        executor = app.executor(index)
        executor.load_input()
        np.add.at(again, (executor.word, topics), 1)  # type: ignore[attr-defined]
        np.add.at(by_document, (executor.document * app.executors + index, topics), 1)  # type: ignore[attr-defined]
    assert (again == counts).all()
    exact = by_definition(by_document, counts, app.alpha, app.beta)
    assert likelihood(by_document, counts, app.alpha, app.beta) == pytest.approx(exact)
    history = job.master.driver.history  # type: ignore[attr-defined]
    assert len(history) == app.epochs
    if barrier:
        assert history[-1] == pytest.approx(exact)
    serial = (
        serial_gibbs(app, 3) + serial_gibbs(app, 4)
    ) / 2  # on so few words chains end some per cent apart
    assert exact >= serial - 0.02 * abs(serial)


def test_kmeans_finds_clusters(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(5, 3)) * 10
    x = np.repeat(truth, 200, axis=0) + rng.normal(size=(1000, 3))
    np.savez(tmp_path / "points.npz", x=x, start=truth + rng.normal(size=(5, 3)))
    app = KMeans(str(tmp_path / "points.npz"), 5, executors=4, iterations=25)
    job = InProcessJob(app, 2, tmp_path, 1)
    values = job.finish()
    assert np.abs(app.centres(values) - truth).max() < 0.5
    assert app.objective(values) == pytest.approx(3.0, rel=0.1)
    assert sum(int(value[-1]) for value in values.values()) == 5 + 4 * 25 * app.sample
    assert set(job.master.states.values()) == {25}


def test_lda_needs_priors(corpus: str) -> None:
    with pytest.raises(OptionError, match=r"alpha and beta > 0; got 3, 0, 0\.01"):
        Lda(corpus, topics=3, alpha=0)
