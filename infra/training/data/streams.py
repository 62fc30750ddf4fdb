"""Samples that can only be read one after the other: a run reads them in their order, and resumes at the same one."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ebbflow.infra.errors import DatasetError
from ebbflow.planners.errors import OptionError

KEPT = 1024  # samples, for steps that are repeated


class SampleStream:
    """Samples of a pass, read from an iterable in its own order; ``run.batches(stream, shuffle=False)`` takes it.

    Each process reads the whole stream and keeps its share of each step, so each sample is used once a pass on
    however many processes. In ``run.prepare(state={"stream": stream})`` it is part of checkpoints: where the iterable
    has ``state_dict`` and ``load_state_dict``, as torchdata's ``StatefulDataLoader`` and Hugging Face's iterable data
    sets have, it is set to where it was, else what was used is read again and left out.

    Args:
        make: an iterable that gives the same samples each time it is iterated, or a function that makes one for a
            pass; it must be a function where the iterable has a state.
        length: samples of a pass; what comes after them is not read.
        keep: last samples that are held in memory, at least those of a step on all processes.

    Raises ``OptionError``.
    """

    def __init__(
        self, make: Iterable[Any] | Callable[[], Iterable[Any]], length: int, keep: int = KEPT
    ) -> None:
        for name, value in (("length", length), ("keep", keep)):
            if value < 1:
                raise OptionError(f"{name} must be >= 1 samples; got {value}")
        if not callable(make) and hasattr(make, "load_state_dict"):
            raise OptionError(
                f"a {type(make).__name__} has a state: give a function that makes it, as each pass takes a new one"
            )
        self._make, self._length = make, length
        self._kept: deque[Any] = deque(maxlen=keep)
        self._source: Iterable[Any] = ()
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # number of the sample that is read next
        self._known: tuple[int, Any] | None = None  # a number, and the iterable's state before it

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        """Return a sample, for which those before it are read. Raises ``DatasetError`` where there are too few."""
        if not 0 <= number < self._length:
            raise IndexError(f"sample {number} of {self._length}")
        if self._iterator is None or number < self._next - len(self._kept):
            self._begin(number)
        while self._next <= number:
            self._read()
        return self._kept[number - self._next]

    def state_dict(self) -> dict[str, Any]:
        """Return where it is: how many samples are read, and the iterable's own state where it has one."""
        if self._iterator is None:
            number, state = self._known or (0, None)
        else:
            number, get = self._next, getattr(self._source, "state_dict", None)
            state = copy.deepcopy(get()) if callable(get) else None
        return {"read": number, "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave; nothing is read before the first sample is asked for."""
        self._iterator = None
        self._known = (int(state["read"]), state["state"]) if state["state"] is not None else None

    def _begin(self, number: int) -> None:
        """Begin where ``number`` lies ahead: at a known place, or the pass' beginning."""
        self._kept.clear()
        self._source = self._make() if callable(self._make) else self._make
        self._next = 0
        load = getattr(self._source, "load_state_dict", None)
        if self._known is not None and self._known[0] <= number and callable(load):
            load(copy.deepcopy(self._known[1]))
            self._next = self._known[0]
        self._iterator = iter(self._source)

    def _read(self) -> None:
        assert self._iterator is not None
        try:
            self._kept.append(next(self._iterator))
        except StopIteration:
            raise DatasetError(
                f"the stream ended after {self._next} samples; a pass has {self._length}"
            ) from None
        self._next += 1
