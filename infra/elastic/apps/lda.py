"""Topics of documents: latent Dirichlet allocation by collapsed Gibbs sampling, with blocks of words going round.

An executor holds documents and their tokens' topics; no two executors ever sample the same word at once, so that only
the totals of the topics are stale (Litz, section 4.3; the sampler is Griffiths and Steyvers, PNAS 2004).
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbflow.infra.elastic.application import (
    Application,
    Completion,
    Dispatcher,
    Driver,
    Executor,
    Key,
    TaskContext,
    Value,
)
from ebbflow.infra.elastic.apps.arrays import opened
from ebbflow.infra.elastic.registry import register
from ebbflow.planners.elastic.schedules import BlockRotation
from ebbflow.planners.errors import OptionError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
TOTALS = "totals"

register(BlockRotation)


class Lda(Application):
    """Samples topics of all tokens for ``epochs`` epochs; ``blocks`` (default: as many as executors) of words.

    ``data`` is the URI of an ``.npz`` file that all workers can read: ``document`` and ``word`` of each token, both
    from 0. Parameters are the word-topic counts, one array a block, and the totals of the topics.

    Raises ``OptionError``.
    """

    def __init__(
        self,
        data: str,
        topics: int,
        executors: int = 8,
        epochs: int = 20,
        blocks: int | None = None,
        alpha: float = 0.1,
        beta: float = 0.01,
        seed: int = 0,
        barrier: bool = False,
        shards: int = 8,
    ) -> None:
        if topics < 1 or not (alpha > 0 and beta > 0):
            raise OptionError(f"topics must be >= 1, alpha and beta > 0; got {topics}, {alpha}, {beta}")
        self.data = data
        self.topics = topics
        self.executors = executors
        self.epochs = epochs
        self.blocks = blocks or executors
        self.alpha = alpha
        self.beta = beta
        self.seed = seed
        self.barrier = barrier
        self.shards = shards
        with opened(data) as arrays:
            self.words = int(arrays["word"].max()) + 1

    def driver(self) -> Driver:
        return LdaDriver(self)

    def executor(self, index: int) -> Executor:
        return LdaExecutor(self, index)

    def parameters(self) -> Mapping[Key, Value]:
        counts = np.zeros((self.words, self.topics), np.int64)
        for index in range(self.executors):
            executor = LdaExecutor(self, index)
            executor.load_input()
            np.add.at(counts, (executor.word, executor.topic), 1)
        parameters: dict[Key, Value] = {TOTALS: counts.sum(axis=0)}
        for block in range(self.blocks):
            parameters[block] = counts[block :: self.blocks]
        return parameters

    def counts(self, parameters: Mapping[Key, Value]) -> Ints:
        """Return the word-topic counts, words × topics."""
        counts = np.zeros((self.words, self.topics), np.int64)
        for block in range(self.blocks):
            counts[block :: self.blocks] = parameters[block]
        return counts


class LdaDriver(Driver):
    """Rotates the blocks; ``history`` has the log-likelihood of words and topics after each epoch.

    Without a barrier executors end an epoch at different times; each counts as it was when it ended it.
    """

    def __init__(self, app: Lda) -> None:
        self._app = app
        self._rotation = BlockRotation(app.executors, app.blocks, app.epochs, app.barrier)
        self._documents: dict[int, dict[int, float]] = {}  # by epoch and executor, as of its last round in it
        self._blocks: dict[int, dict[int, tuple[float, Ints]]] = {}  # by epoch and block
        self.history: list[float] = []

    def start(self, job: Dispatcher) -> None:
        for release in self._rotation.start():
            job.dispatch(release.executor, release.iteration)

    def complete(self, job: Dispatcher, completion: Completion) -> None:
        executor, round_ = completion.task.executor, completion.task.args
        documents, words, totals = completion.result
        epoch = round_ // self._app.blocks
        self._documents.setdefault(epoch, {})[executor] = documents
        self._blocks.setdefault(epoch, {})[self._rotation.block(executor, round_)] = (words, totals)
        for release in self._rotation.finish(executor, round_):
            job.dispatch(release.executor, release.iteration)
        while min(self._rotation.finished) >= (len(self.history) + 1) * self._app.blocks:
            self._close_epoch()

    def _close_epoch(self) -> None:
        epoch, app = len(self.history), self._app
        blocks = self._blocks.pop(epoch).values()
        totals = np.sum([totals for _, totals in blocks], axis=0)
        rising = rising_logs(app.words * app.beta, int(totals.max()))
        words = sum(words for words, _ in blocks) - float(rising[totals].sum())
        self.history.append(words + sum(self._documents.pop(epoch).values()))

    def state_dict(self) -> dict[str, Any]:
        names = ("_rotation", "_documents", "_blocks", "history")
        return copy.deepcopy({name: getattr(self, name) for name in names})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in copy.deepcopy(state).items():
            setattr(self, name, value)


class LdaExecutor(Executor):
    """Every ``executors``-th document; its state is the topic of each token."""

    def __init__(self, app: Lda, index: int) -> None:
        self._app = app
        self._index = index
        self.document: Ints
        self.word: Ints
        self.topic: Ints
        self._of_block: list[Ints]  # tokens
        self._by_document: Ints

    def load_input(self) -> None:
        with opened(self._app.data) as arrays:
            document, word = arrays["document"], arrays["word"]
        mine = document % self._app.executors == self._index
        self.set_input((document[mine] // self._app.executors, word[mine]))

    def input_state(self) -> Any:
        return self.document, self.word

    def set_input(self, data: Any) -> None:
        self.document, self.word = data
        blocks = self._app.blocks
        self._of_block = [np.flatnonzero(self.word % blocks == block) for block in range(blocks)]
        rng = np.random.default_rng((self._app.seed, self._index))
        self.load_state_dict(rng.integers(self._app.topics, size=len(self.word)))

    def state_dict(self) -> Any:
        return self.topic.copy()

    def load_state_dict(self, state: Any) -> None:
        self.topic = np.array(state)
        documents = int(self.document.max()) + 1 if len(self.document) else 0
        self._by_document = np.zeros((documents, self._app.topics), np.int64)
        np.add.at(self._by_document, (self.document, self.topic), 1)

    async def run(self, context: TaskContext, args: int) -> tuple[float, float, Ints]:
        """Sample one block; return the documents' and the block's log-likelihood, and the block's topic totals."""
        app = self._app
        block = (self._index + args) % app.blocks
        old_counts, old_totals = await context.get(block, TOTALS)
        counts, totals = old_counts.copy(), old_totals.copy()
        tokens = self._of_block[block]
        rng = np.random.default_rng((app.seed, self._index, 1 + args))
        self.topic[tokens] = sample(
            self.document[tokens], self.word[tokens] // app.blocks, self.topic[tokens], self._by_document,
            counts, totals, app.alpha, app.beta, app.words * app.beta, rng,
        )  # fmt: skip
        context.update(block, counts - old_counts)
        context.update(TOTALS, totals - old_totals)
        return (
            document_likelihood(self._by_document, app.alpha),
            _word_likelihood(counts, app.beta),
            counts.sum(axis=0),
        )


def sample(
    documents: Ints,
    words: Ints,
    topics: Ints,
    by_document: Ints,
    by_word: Ints,
    totals: Ints,
    alpha: float,
    beta: float,
    beta_sum: float,
    rng: np.random.Generator,
) -> Ints:
    """Return new topics of tokens, each drawn given all others; the three counts are changed in place.

    The chance of topic k is proportional to (U_dk + alpha)(W_vk + beta)/(n_k + V·beta), without the token itself.
    """
    chosen = topics.copy()
    draws = rng.random(len(topics))
    for place, (document, word, topic) in enumerate(
        zip(documents.tolist(), words.tolist(), topics.tolist(), strict=True)
    ):
        of_document, of_word = by_document[document], by_word[word]
        of_document[topic] -= 1
        of_word[topic] -= 1
        totals[topic] -= 1
        # totals that other executors change meanwhile may be off by their tokens, but stay positive with V·beta
        chances = (of_document + alpha) * (of_word + beta) / np.maximum(totals + beta_sum, beta)
        sums = chances.cumsum()
        new = int(sums.searchsorted(draws[place] * sums[-1], side="right"))
        of_document[new] += 1
        of_word[new] += 1
        totals[new] += 1
        chosen[place] = new
    return chosen


def rising_logs(start: float, most: int) -> Floats:
    """Return lgamma(start + n) − lgamma(start) for n from 0 to ``most``."""
    return np.concatenate([[0.0], np.cumsum(np.log(start + np.arange(most)))])


def document_likelihood(by_document: Ints, alpha: float) -> float:
    """Return the log-probability of the topics of all tokens, given the documents' lengths."""
    if not by_document.size:
        return 0.0
    lengths = by_document.sum(axis=1)
    topics = by_document.shape[1]
    each = rising_logs(alpha, int(by_document.max()))[by_document].sum()
    return float(each - rising_logs(alpha * topics, int(lengths.max()))[lengths].sum())


def _word_likelihood(by_word: Ints, beta: float) -> float:
    """Return the words' part of the log-likelihood of a block, without the totals' part."""
    return float(rising_logs(beta, int(by_word.max(initial=0)))[by_word].sum())


def likelihood(by_document: Ints, by_word: Ints, alpha: float, beta: float) -> float:
    """Return log p(words, topics) of all tokens from the two counts."""
    totals = by_word.sum(axis=0)
    rising = rising_logs(len(by_word) * beta, int(totals.max()))
    return (
        document_likelihood(by_document, alpha)
        + _word_likelihood(by_word, beta)
        - float(rising[totals].sum())
    )
