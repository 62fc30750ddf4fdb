"""Topics of documents by collapsed Gibbs sampling; blocks are documents with the topics of their words.

Words at the same place of all documents are sampled at once, from counts without any of them: the approximation that
distributed samplers make (Newman et al., "Distributed Algorithms for Topic Models", JMLR 2009), here for at most one
word of each document at a time.
"""

import re
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tests.evaluation.scar.problems import States

TOPICS = 20
ALPHA, BETA = 0.1, 0.1


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents one after the other."""

    name: str
    words: NDArray[np.int64]  # shape (tokens,): id of each word
    offsets: NDArray[np.int64]  # where documents begin, and where the last ends
    vocabulary: int


@cache
def synthetic(seed: int = 0, documents: int = 150, vocabulary: int = 600, length: int = 120) -> Corpus:
    """Return documents drawn from LDA's own model: 20 topics of few words each, one to three in a document."""
    rng = np.random.default_rng([seed, 4])
    topics = rng.dirichlet(np.full(vocabulary, 0.05), TOPICS)
    shares = rng.dirichlet(np.full(TOPICS, 0.08), documents)
    lengths = np.maximum(rng.poisson(length, documents), 10)
    words = [
        rng.choice(vocabulary, int(n), p=share @ topics) for n, share in zip(lengths, shares, strict=True)
    ]
    return Corpus("synthetic", np.concatenate(words), np.concatenate([[0], np.cumsum(lengths)]), vocabulary)


@cache
def reference(seed: int = 0, documents: int = 300, longest: int = 100) -> Corpus:
    """Return paragraphs of the language reference that Python ships for ``help()``: 300 drawn of those with 30 words.

    Of each the first ``longest`` words count that are in at least 5 paragraphs and in less than a tenth of all.
    """
    from pydoc_data.topics import topics

    parts = [part for text in topics.values() for part in re.split(r"\n\s*\n", text)]
    found = [re.findall(r"[a-z_]{3,}", part.lower()) for part in dict.fromkeys(parts)]
    seen: dict[str, int] = {}
    for part in found:
        for word in set(part):
            seen[word] = seen.get(word, 0) + 1
    kept = {word for word, count in seen.items() if 5 <= count < len(found) / 10}
    chosen = [part for part in ([word for word in part if word in kept] for part in found) if len(part) >= 30]
    rng = np.random.default_rng([seed, 5])
    drawn = [chosen[at][:longest] for at in rng.permutation(len(chosen))[:documents]]
    ids = {word: number for number, word in enumerate(sorted({word for part in drawn for word in part}))}
    words = np.array([ids[word] for part in drawn for word in part])
    return Corpus("reference", words, np.concatenate([[0], np.cumsum([len(p) for p in drawn])]), len(ids))


class Topics:
    """LDA with 20 topics; each stream is a chain of its own start and chances, which a continued run keeps to."""

    chunk = 20
    look_every = 1

    def __init__(self, corpus: Corpus, *, chains: int = 20, seed: int = 0) -> None:
        self.name = "LDA"
        self.corpus, self.offsets = corpus, corpus.offsets
        self.chains, self.seed = chains, seed
        lengths = np.diff(corpus.offsets)
        self.documents = np.repeat(np.arange(len(lengths)), lengths)
        starts = corpus.offsets[:-1]
        self.places = [starts[lengths > place] + place for place in range(int(lengths.max()))]

    def start(self) -> States:
        rng = np.random.default_rng([self.seed, 6])
        return rng.integers(0, TOPICS, (self.chains, len(self.corpus.words)), dtype=np.int8)

    def advance(self, states: States, iteration: int, streams: NDArray[np.int64]) -> States:
        moved = states.copy()
        by_document, by_word, total = self._counts(states)
        in_documents, in_words, in_all = by_document.reshape(-1), by_word.reshape(-1), total.reshape(-1)
        runs = np.arange(len(states))[:, None]
        chances = self._chances(iteration, streams)
        most = self.corpus.vocabulary * BETA
        for tokens in self.places:
            document = (runs * by_document.shape[1] + self.documents[tokens]) * TOPICS
            word = (runs * self.corpus.vocabulary + self.corpus.words[tokens]) * TOPICS
            old = moved[:, tokens].astype(np.int64)
            for counts, first in ((in_documents, document), (in_words, word), (in_all, runs * TOPICS)):
                np.add.at(counts, (first + old).ravel(), np.float32(-1))
            weights = by_word.reshape(-1, TOPICS)[word // TOPICS]
            weights += np.float32(BETA)
            weights *= by_document.reshape(-1, TOPICS)[document // TOPICS] + np.float32(ALPHA)
            weights *= (np.float32(1) / (total + np.float32(most)))[:, None]
            np.cumsum(weights, axis=2, out=weights)
            drawn = chances[:, tokens] * weights[..., -1]
            new = np.minimum((weights < drawn[..., None]).sum(axis=2), TOPICS - 1)
            moved[:, tokens] = new
            for counts, first in ((in_documents, document), (in_words, word), (in_all, runs * TOPICS)):
                np.add.at(counts, (first + new).ravel(), np.float32(1))
        return moved

    def loss(self, states: States) -> NDArray[np.float64]:
        """Return the negative log-likelihood of the words given the estimated topics, nats."""
        by_document, by_word, total = self._counts(states)
        theta = (by_document + ALPHA) / (by_document.sum(axis=2, keepdims=True) + TOPICS * ALPHA)
        phi = (by_word + BETA) / (total[:, None] + self.corpus.vocabulary * BETA)
        chances = np.empty((len(states), len(self.corpus.words)), np.float32)
        for run in range(len(states)):
            full = theta[run] @ phi[run].T
            chances[run] = full[self.documents, self.corpus.words]
        return -np.log(chances, dtype=np.float64).sum(axis=1)

    def distances(self, now: States, saved: States) -> NDArray[np.float64]:
        """Return each document's length times the total variation between its topic shares (section 5.4.1)."""
        # With equal lengths the smoothing cancels but for its weight: L·TV = L/(L + Kα) · ½·Σ|counts' difference|.
        change = np.abs(self._by_document(now) - self._by_document(saved)).sum(axis=2) / 2
        lengths = np.diff(self.offsets)
        return np.asarray(change * lengths / (lengths + TOPICS * ALPHA))

    def _by_document(self, states: States) -> NDArray[np.float32]:
        runs, documents = len(states), len(self.offsets) - 1
        keys = (np.arange(runs)[:, None] * documents + self.documents) * TOPICS + states
        counts = np.bincount(keys.ravel(), minlength=runs * documents * TOPICS)
        return counts.reshape(runs, documents, TOPICS).astype(np.float32)

    def _counts(self, states: States) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        runs, words = len(states), self.corpus.vocabulary
        keys = (np.arange(runs)[:, None] * words + self.corpus.words) * TOPICS + states
        counts = np.bincount(keys.ravel(), minlength=runs * words * TOPICS)
        by_word = counts.reshape(runs, words, TOPICS).astype(np.float32)
        return self._by_document(states), by_word, by_word.sum(axis=1)

    def _chances(self, iteration: int, streams: NDArray[np.int64]) -> NDArray[np.float32]:
        drawn = {
            int(stream): np.random.default_rng([self.seed, 7, int(stream), iteration]).random(
                len(self.corpus.words), dtype=np.float32
            )
            for stream in np.unique(streams)
        }
        return np.stack([drawn[int(stream)] for stream in streams])
