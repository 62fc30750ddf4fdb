"""Measures what channels do: a sweep over sizes and options, the same on all ranks, within a bounded time.

The time of a collective is that of its slowest rank. Ranks agree after each repetition on that time, and on whether
to continue, in one all-reduce of two numbers; its own duration is not counted.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from ebbflow.infra.communication.channels import Channels
from ebbflow.infra.communication.payloads import Exchanged, Payload, Summed
from ebbflow.planners.communication.costs import Choice, TableModel
from ebbflow.planners.communication.dag import Kind
from ebbflow.planners.communication.measured import MeasuredLinks, rising
from ebbflow.planners.communication.plan import pieces_of
from ebbflow.planners.errors import OptionError

REPEATS = 5  # of each size and option; the median counts
WARM_UP = 1
MAX_BYTES = 1 << 30
CLOSE = 8  # sizes that differ by a smaller factor count as one


@dataclass(frozen=True)
class Sweep:
    """What is measured. Raises ``OptionError`` for what cannot be.

    Args:
        sizes: kind -> bytes of one rank, rising.
        choices: kind -> ways to carry it out, the library's own first.
        seconds: bound of the whole; the library's own way is measured at all sizes in any case.
        repeats: of each size and choice.
    """

    sizes: Mapping[Kind, Sequence[int]]
    choices: Mapping[Kind, Sequence[Choice]]
    seconds: float = 5.0
    repeats: int = REPEATS

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.repeats < 1:
            raise OptionError(
                f"a sweep needs seconds > 0 and repeats >= 1; got {self.seconds} and {self.repeats}"
            )
        for kind, sizes in self.sizes.items():
            if not sizes or list(sizes) != sorted(set(sizes)) or not 4 <= sizes[0] <= sizes[-1] <= MAX_BYTES:
                raise OptionError(f"sizes of {kind} must rise from 4 to {MAX_BYTES} bytes; got {list(sizes)}")
            if not self.choices.get(kind):
                raise OptionError(f"a sweep of {kind} needs a choice; got none")


def sizes_for(payloads: Sequence[float]) -> tuple[int, ...]:
    """Return up to four sizes to measure so that all payloads lie between two: the smallest, the largest, between."""
    some = sorted({min(max(int(size), 4), MAX_BYTES) for size in payloads})
    if not some:
        return ()
    low, high = some[0], some[-1]
    if high < CLOSE * low:  # sizes that lie close together would show noise only
        return tuple(sorted({max(low // CLOSE, 4), high}))
    between = [round(low * (high / low) ** share) for share in (1 / 3, 2 / 3)]
    return tuple(sorted({low, *between, high}))


def measure(
    channels: Channels, sweep: Sweep, *, clock: Callable[[], float] = time.perf_counter
) -> MeasuredLinks:
    """Measure, on all ranks at once and with the same arguments; all return the same. No piece may run meanwhile.

    Args:
        channels: of which those that the choices name are measured.
        sweep: what.
        clock: s.
    """
    measuring = _Measuring(channels, clock, clock() + sweep.seconds)
    points: dict[tuple[Kind, int, str], dict[int, float]] = {}
    for kind, sizes in sweep.sizes.items():
        for k, choice in enumerate(sweep.choices[kind]):
            for size in (sizes[-1], *sizes[:-1]):
                found = measuring.seconds(kind, choice, size, sweep.repeats, needed=k == 0)
                if found is not None:
                    points.setdefault((kind, channels.ranks, choice.name), {})[size] = found
    rows = {
        key: rising(sorted(some.items()))
        for key, some in points.items()
        if len(some) == len(sweep.sizes[key[0]])  # half a row would be a wrong one
    }
    used = 1 + max(choice.channel for some in sweep.choices.values() for choice in some)
    contention = 1.0
    if used > 1 and sweep.sizes:
        kind = next(iter(sweep.sizes))
        contention = measuring.contention(kind, sweep.sizes[kind][-1])
    return MeasuredLinks(channels.ranks, used, TableModel(rows), contention)


class _Measuring:
    """One sweep on one rank."""

    def __init__(self, channels: Channels, clock: Callable[[], float], deadline: float) -> None:
        self._channels, self._clock, self._deadline = channels, clock, deadline

    def seconds(self, kind: Kind, choice: Choice, size: int, repeats: int, *, needed: bool) -> float | None:
        """Return the median; ``None`` where the time was over before it began."""
        if self._agree(0.0)[1] and not needed:
            return None
        run = self._runner(kind, choice, size)
        times = []
        for k in range(WARM_UP + repeats):
            began = self._clock()
            run()
            slowest, over = self._agree(self._clock() - began)
            if k >= WARM_UP:
                times.append(slowest)
                if over:
                    break
        return median(times)

    def contention(self, kind: Kind, size: int) -> float:
        """Return how much longer two channels take at once than the slower one alone."""
        runs = [self._runner(kind, Choice(channel=channel), size) for channel in (0, 1)]
        alone: list[float] = []
        both: list[float] = []
        for k in range(WARM_UP + 3):
            for some, times in (((runs[0],), alone), ((runs[1],), alone), (tuple(runs), both)):
                began = self._clock()
                _at_once(some)
                slowest, _ = self._agree(self._clock() - began)
                if k >= WARM_UP:
                    times.append(slowest)
        slower = max(median(alone[::2]), median(alone[1::2]))
        return median(both) / slower if slower > 0 else 1.0

    def _runner(self, kind: Kind, choice: Choice, size: int) -> Callable[[], None]:
        ranks = self._channels.ranks
        pieces, payload = pieces_of(kind, ranks, choice), _payload(kind, ranks, size)

        def run() -> None:
            for piece in pieces:
                self._channels.run(choice.channel, piece, payload)

        return run

    def _agree(self, seconds: float) -> tuple[float, bool]:
        """Return the longest time of all ranks, and whether the first one's clock says that the time is over."""
        over = self._channels.rank == 0 and self._clock() > self._deadline
        told = torch.tensor([seconds, float(over)], dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._channels.groups[0])
        slowest, ended = told.tolist()
        return slowest, ended > 0


def _payload(kind: Kind, ranks: int, size: int) -> Payload:
    if kind == "all-to-all":
        each = max(size // 4 // ranks, 1)
        rows = [each] * ranks
        return Exchanged(torch.zeros(each * ranks), torch.zeros(each * ranks), rows, rows)
    return Summed(torch.zeros(max(size // 4, 1)))


def _at_once(runs: Sequence[Callable[[], None]]) -> None:
    """Run in a thread each; the first error of any is raised."""
    errors: list[BaseException] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(run,), daemon=True) for run in runs[1:]]
    for thread in threads:
        thread.start()
    guarded(runs[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
