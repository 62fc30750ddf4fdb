"""Which decisions keep what went into them, for a page that follows a ledger for months."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from ebbflow.planners.model.ledger import Decided
from ebbflow.tasks.report.cluster.explained import quiet

_SMALL = ("pool", "current")  # that others than the page look up

Taken = Callable[[int], None]


class KeptInputs:
    """Says when a decision's inputs will not be shown any more.

    A page shows ``most`` rows of decisions at most: the newest that changed something, then the newest of the others;
    equal ones that follow each other are one row, with the last one's inputs (``cluster_explained.decision_rows``).

    Args:
        most: rows.
        strip: called with the place of each decision whose inputs can go.
    """

    def __init__(self, most: int, strip: Taken) -> None:
        self._most, self._strip = most, strip
        self._rows: tuple[deque[deque[int]], deque[deque[int]]] = (deque(), deque())
        self._last: Decided | None = None

    def add(self, place: int, decided: Decided) -> None:
        """Take the next decision that the page may show."""
        rows = self._rows[quiet(decided)]
        before, self._last = self._last, without_inputs(decided)
        if before is not None and _same(before, decided):
            row = rows[-1]
            row.append(place)
            # what followed of a scaling target, which nobody knows yet, can make rows of its own of them
            if len(row) > (self._most if decided.kind == "scaling" else 1):
                self._strip(row.popleft())
            return
        rows.append(deque([place]))
        if len(rows) > self._most:
            for gone in rows.popleft():
                self._strip(gone)


def without_inputs(decided: Decided) -> Decided:
    """Return a decision without its inputs, but for those that are looked up by name."""
    return replace(decided, inputs={name: decided.inputs[name] for name in _SMALL if name in decided.inputs})


def _same(a: Decided, b: Decided) -> bool:
    return (a.kind, a.app, a.reason, a.outcome) == (b.kind, b.app, b.reason, b.outcome)
