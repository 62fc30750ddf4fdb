"""The models in training: many runs at once do what one run does, and what plain code does."""

import numpy as np
import pytest

from tests.evaluation.scar import lda
from tests.evaluation.scar.factorisation import COLUMNS, RANK, ROWS, Factorisation
from tests.evaluation.scar.lda import Topics, synthetic
from tests.evaluation.scar.mlr import CLASSES, Regression
from tests.evaluation.scar.problems import Problem, States, batches

NONE = np.zeros(3, np.int64)


def three(problem: Problem, iteration: int = 2) -> States:
    """Return three different states of one stream."""
    rng = np.random.default_rng(0)
    state = problem.start()[[0, 0, 0]]
    state = state + rng.normal(0, 0.02, state.shape).astype(state.dtype)
    return problem.advance(state, iteration, NONE)


@pytest.mark.parametrize("make", [Regression, Factorisation])
def test_runs_at_once_do_not_touch_each_other(make) -> None:
    problem = make()
    states = three(problem)
    together = problem.advance(states, 3, NONE)
    alone = np.concatenate([problem.advance(states[[run]], 3, NONE[:1]) for run in range(3)])
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        problem.loss(together), [problem.loss(alone[[run]])[0] for run in range(3)], rtol=1e-5
    )


def test_a_step_of_the_regression_is_that_of_gradient_descent() -> None:
    problem = Regression()
    state = three(problem)[[0]].astype(np.float64)
    chosen = problem.order[5]
    features, classes = problem.features[chosen].astype(np.float64), problem.classes[chosen]

    def loss(weights: np.ndarray) -> float:
        scores = features @ weights.reshape(-1, CLASSES)
        return float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(chosen)), classes]))

    moved = problem.advance(state, 5, NONE[:1])
    for at in (7, 333, 648):
        push = np.zeros_like(state[0])
        push[at] = 1e-5
        slope = (loss(state[0] + push) - loss(state[0] - push)) / 2e-5
        assert moved[0, at] == pytest.approx(state[0, at] - problem.rate * slope, abs=1e-6)


def test_the_factorisation_solves_each_side_in_turn() -> None:
    problem = Factorisation()
    state = problem.advance(problem.start(), 0, NONE[:1])
    left, right = state[0, : ROWS * RANK].reshape(ROWS, RANK), state[0, ROWS * RANK :].reshape(COLUMNS, RANK)
    residual = problem.matrix - left @ right.T
    assert problem.loss(state)[0] == pytest.approx(np.linalg.norm(residual))
    # The columns of R were solved last: nothing of the residual lies in L.
    np.testing.assert_allclose(left.T @ residual, 0.0, atol=1e-8)
    lost = state.copy()
    lost[:, : ROWS * RANK] = 7.0
    np.testing.assert_array_equal(problem.advance(lost, 1, NONE[:1]), problem.advance(state, 1, NONE[:1]))


def test_distances_of_blocks_are_euclidean() -> None:
    problem = Factorisation()
    now, saved = three(problem), three(problem, 3) * 1.5
    change = (now - saved).reshape(3, -1, RANK)
    np.testing.assert_allclose(problem.distances(now, saved), np.linalg.norm(change, axis=2))


def test_mini_batches_see_each_example_at_most_once_in_an_epoch() -> None:
    order = batches(np.random.default_rng(0), 100, 30, 7)
    assert order.shape == (7, 30)
    for epoch in (order[0:3], order[3:6]):
        assert len(np.unique(epoch)) == 90


def test_sampled_topics_keep_every_word_and_fit_better() -> None:
    problem = Topics(synthetic(1, documents=40, vocabulary=80, length=30), chains=3)
    states = problem.start()
    first = problem.loss(states)
    for sweep in range(15):
        states = problem.advance(states, sweep, np.arange(3))
    assert states.min() >= 0
    assert states.max() < lda.TOPICS
    assert (problem.loss(states) < first * 0.97).all()


def test_a_chain_goes_its_own_way_and_the_same_way_again() -> None:
    problem = Topics(synthetic(1, documents=20, vocabulary=50, length=20), chains=2)
    one = problem.start()[[0, 0, 0]]
    moved = problem.advance(one, 4, np.array([0, 1, 0]))
    np.testing.assert_array_equal(moved[0], moved[2])
    assert (moved[0] != moved[1]).any()


def test_a_single_word_is_drawn_by_the_sampler_s_formula() -> None:
    # One document of one word among others that stay: the frequencies of its topics are known.
    corpus = lda.Corpus("two", np.array([0, 0, 1]), np.array([0, 1, 3]), 2)
    problem = Topics(corpus, chains=1)
    state = np.array([[3, 5, 5]], np.int8)
    drawn = np.zeros(lda.TOPICS)
    for iteration in range(4000):
        # The words of place 0 are drawn together, without each other: only the last word stands.
        drawn[problem.advance(state, iteration, np.array([0]))[0, 0]] += 1
    by_word = np.full(lda.TOPICS, lda.BETA)
    total = np.full(lda.TOPICS, 2 * lda.BETA)
    total[5] += 1
    expected = by_word / total
    expected /= expected.sum()
    np.testing.assert_allclose(drawn / 4000, expected, atol=4 * np.sqrt(0.05 / 4000))


def test_distances_of_documents_are_lengths_times_total_variation() -> None:
    corpus = synthetic(2, documents=6, vocabulary=30, length=15)
    problem = Topics(corpus, chains=1)
    now, saved = problem.start(), problem.advance(problem.start(), 0, np.array([0]))
    found = problem.distances(now, saved)[0]
    for document in range(6):
        first, last = corpus.offsets[document : document + 2]
        shares = [
            (np.bincount(z[0, first:last], minlength=lda.TOPICS) + lda.ALPHA)
            / (last - first + lda.TOPICS * lda.ALPHA)
            for z in (now, saved)
        ]
        assert found[document] == pytest.approx(
            (last - first) * np.abs(shares[0] - shares[1]).sum() / 2, rel=1e-5
        )


def test_the_shipped_corpus_has_documents_of_known_words() -> None:
    corpus = lda.reference()
    lengths = np.diff(corpus.offsets)
    assert len(lengths) >= 100
    assert lengths.min() >= 30
    assert len(np.unique(corpus.words)) == corpus.vocabulary


def test_the_network_is_that_of_plain_pytorch_with_its_own_adam() -> None:
    import torch

    from tests.evaluation.scar.cnn import LAYERS, Network

    problem = Network()
    assert len(problem.offsets) - 1 == 228
    assert len(Network(by="layer").offsets) - 1 == 10
    plain = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.MaxPool2d(2), torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.MaxPool2d(2), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10),
    )  # fmt: skip
    # Ours keeps channels last: the kernels' (channel, y, x) and the flattened (channel, y, x) are turned.
    first = torch.from_numpy(problem.first)
    modules, at = [module for module in plain if hasattr(module, "weight")], 0
    for (outputs, inputs), module in zip(LAYERS, modules, strict=True):
        weight = first[at : at + outputs * inputs].reshape(outputs, inputs)
        if inputs == 64:
            weight = weight.reshape(outputs, 2, 2, 16).permute(0, 3, 1, 2).reshape(outputs, 64)
        module.weight.data = weight.reshape(module.weight.shape).clone()
        module.bias.data = first[at + outputs * inputs : at + outputs * (inputs + 1)].clone()
        at += outputs * (inputs + 1)
    optimizer = torch.optim.Adam(plain.parameters(), 1e-3)
    states = problem.start()[[0, 0]]
    for iteration in range(4):
        chosen = problem.order[iteration]
        optimizer.zero_grad()
        scores = plain(problem.images[chosen][:, None])
        torch.nn.functional.cross_entropy(scores, problem.classes[chosen]).backward()
        optimizer.step()
        states = problem.advance(states, iteration, NONE[:2])
    scores = plain(problem.images[problem.measured][:, None])
    loss = torch.nn.functional.cross_entropy(scores, problem.classes[problem.measured]).item()
    np.testing.assert_allclose(problem.loss(states), [loss, loss], rtol=1e-4)
    assert states[0, 0, -1] == 4
