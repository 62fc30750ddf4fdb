"""Measured collectives: a table that is kept as text, what latency and bandwidth fit it, and where options cross."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ebbflow.planners.communication.costs import ALGORITHMS, Choice, LinkModel, TableModel
from ebbflow.planners.communication.dag import CommOp, Kind
from ebbflow.planners.communication.recorded import _check_format, _kind
from ebbflow.planners.errors import OptionError

FORMAT = 1
INDEPENDENT = (
    1.4  # times one channel's seconds that two may take at once and still be worth using side by side
)


@dataclass(frozen=True)
class MeasuredLinks:
    """What a sweep over sizes and options found on the channels of one gang. Raises ``OptionError`` if it is none.

    Args:
        ranks: processes.
        channels: that were measured.
        table: seconds by size, for each kind and choice.
        contention: seconds of two channels at once over the seconds of the slower one alone: 1 where each has links
            of its own, 2 where they share theirs; 1 with a single channel.
    """

    ranks: int
    channels: int
    table: TableModel
    contention: float = 1.0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.channels < 1 or not 0 < self.contention < float("inf"):
            raise OptionError(
                "measured links must have ranks and channels >= 1 and a finite contention > 0; got "
                f"{self.ranks}, {self.channels}, {self.contention}"
            )
        if not self.table.rows:
            raise OptionError("measured links must have a measurement; got none")

    @property
    def usable_channels(self) -> int:
        """Return how many channels are worth using side by side: one where they share their links."""
        return self.channels if self.contention <= INDEPENDENT else 1

    def choices(self, kind: Kind) -> tuple[Choice, ...]:
        """Return the measured choices of a kind on the channels that are worth using, the library's own first."""
        found = [
            choice_of(name) for one, ranks, name in self.table.rows if (one, ranks) == (kind, self.ranks)
        ]
        usable = [one for one in found if one.channel < self.usable_channels]
        return tuple(
            sorted(usable, key=lambda one: (one != Choice(), one.channel, one.algorithm, one.pieces))
        )

    def to_json(self) -> str:
        """Return the measurements as text."""
        rows = [
            [kind, ranks, name, [list(point) for point in points]]
            for (kind, ranks, name), points in self.table.rows.items()
        ]
        return json.dumps(
            {
                "format": FORMAT,
                "ranks": self.ranks,
                "channels": self.channels,
                "contention": self.contention,
                "rows": rows,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "MeasuredLinks":
        """Return the measurements that ``to_json`` wrote. Raises ``OptionError`` for any other text."""
        try:
            said: dict[str, Any] = json.loads(text)
            _check_format(said, "table of measured links")
            rows = {
                (_kind(kind), int(ranks), choice_of(name).name): tuple(
                    (float(x), float(y)) for x, y in points
                )
                for kind, ranks, name, points in said["rows"]
            }
            table = TableModel(rows)
            return cls(int(said["ranks"]), int(said["channels"]), table, float(said["contention"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OptionError(f"not a table of measured links: {error!r:.200}") from error


def choice_of(name: str) -> Choice:
    """Return the choice of a name such as ``ring/4@0``. Raises ``OptionError``."""
    try:
        algorithm, rest = name.split("/")
        pieces, channel = rest.split("@")
        found = Choice(algorithm, int(pieces), int(channel))
    except (ValueError, AttributeError) as error:
        raise OptionError(
            f"a choice must be ALGORITHM/PIECES@CHANNEL, such as ring/4@0; got {name!r:.60}"
        ) from error
    if found.algorithm not in ALGORITHMS:
        raise OptionError(
            f"the algorithm of a choice must be one of {', '.join(ALGORITHMS)}; got {name!r:.60}"
        )
    if found.pieces < 1 or found.channel < 0:
        raise OptionError(f"a choice must have pieces >= 1 and a channel >= 0; got {name!r:.60}")
    return found


def rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return measurements with seconds that never fall as bytes rise: the closest ones, by least squares.

    A larger collective is no faster than a smaller one; where it was measured so, both times are noise around one.

    Args:
        points: pairs of bytes and seconds, bytes rising.

    Source: Ayer et al., "An Empirical Distribution Function for Sampling with Incomplete Information", Annals of
    Mathematical Statistics 26(4), 1955 (pooling adjacent violators).
    """
    pools: list[tuple[float, int]] = []  # mean and count
    for _, seconds in points:
        mean, count = seconds, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return tuple((size, mean) for (size, _), mean in zip(points, means, strict=True))


def fit_links(ranks: int, points: Sequence[tuple[float, float]]) -> LinkModel:
    """Return the latency and bandwidth that fit measured ring all-reduces best, by relative least squares.

    ``T(S) = 2 (N - 1) alpha + 2 S b (N - 1) / N``; launching is in alpha.

    Args:
        ranks: N, at least 2.
        points: pairs of bytes and seconds, of two sizes or more.

    Raises ``OptionError`` for fewer, or seconds that are not above 0.
    """
    if ranks < 2 or len({size for size, _ in points}) < 2:
        raise OptionError(
            f"links are fitted from 2 ranks and 2 sizes or more; got {ranks} ranks and {len(points)} points"
        )
    if any(seconds <= 0 for _, seconds in points):
        raise OptionError("links are fitted from measurements above 0 s")
    sizes, seconds = (np.array(one, dtype=float) for one in zip(*points, strict=True))
    matrix = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(matrix, np.ones_like(sizes), rcond=None)
    if slope <= 0:  # noise only: no byte costs anything that could be seen
        fixed, slope = float(np.median(seconds)), 0.0
    if fixed < 0:
        fixed, slope = 0.0, float(np.sum(sizes / seconds) / np.sum((sizes / seconds) ** 2))
    return replace(
        LinkModel(), alpha=fixed / (2 * (ranks - 1)), per_byte=slope * ranks / (2 * (ranks - 1)), launch=0.0
    )


@dataclass(frozen=True, slots=True)
class BestRange:
    """``choice`` is the fastest from ``low`` bytes up to ``high``, as far as was measured."""

    low: float
    high: float
    choice: str


def best_ranges(
    links: MeasuredLinks, kind: Kind, *, channel: int = 0, steps: int = 200
) -> tuple[BestRange, ...]:
    """Return which choice is the fastest at which sizes, from the smallest measured one to the largest.

    Args:
        links: what was measured.
        kind: of the collectives.
        channel: whose choices are compared.
        steps: sizes that are compared, a geometric row; where one choice takes over from another is known to one
            step.
    """
    names = [
        name
        for one, ranks, name in links.table.rows
        if (one, ranks) == (kind, links.ranks) and choice_of(name).channel == channel
    ]
    sizes = [x for name in names for x, _ in links.table.rows[kind, links.ranks, name]]
    if not sizes:
        return ()
    low, high = max(min(sizes), 1.0), max(*sizes, 1.0)
    found: list[BestRange] = []
    for size in np.geomspace(low, high, steps) if high > low else [low]:
        op = CommOp("any", kind, float(size), links.ranks)
        costs: Mapping[str, float] = {name: links.table.seconds(op, choice_of(name)) for name in names}
        best = min(names, key=lambda name: (costs[name], name))
        if found and found[-1].choice == best:
            found[-1] = replace(found[-1], high=float(size))
        else:
            found.append(BestRange(float(size), float(size), best))
    return tuple(found)
