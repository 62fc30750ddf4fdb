"""What AdaptDL's simulator knows of an application: measured speed and gradient statistics (Pollux, OSDI 2021).

The files of one application's directory are ``placements.csv``, ``scalability.csv`` and one ``validation-<B>.csv``
for each total batch size B that was measured.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isnan
from pathlib import Path
from typing import Any, NamedTuple

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.traces.rows import count, not_negative, positive, read_rows, real, text


class Epoch(NamedTuple):
    """One epoch at one total batch size."""

    progress: float  # at its end, in iterations at the smallest batch
    iteration: float  # at its end, iterations really done
    sqr: float  # squared norm of the gradient, at the smallest batch
    var: float  # variance of the gradient, at the smallest batch


@dataclass(frozen=True, slots=True)
class ByHand:
    """What the authors set by hand for an application, against its files."""

    local_max: int | None = None  # examples per GPU and pass
    max_gpus: int | None = None


BY_HAND: Mapping[str, ByHand] = {"yolov3": ByHand(local_max=8), "ncf": ByHand(max_gpus=1)}


def ceiling(value: float) -> int:
    """Return ``value`` rounded up, forgiving 1e-8."""
    return ceil(value - 1e-8)


def rotated(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest rotation of a placement's GPU counts, compared element by element."""
    return min(counts[i:] + counts[:i] for i in range(len(counts)))


class Profile:
    """True speed, efficiency and length of one application."""

    def __init__(
        self,
        name: str,
        placements: Sequence[tuple[tuple[int, ...], int, float, float]],
        scalability: Sequence[tuple[int, int, int, float, float]],
        validation: Mapping[int, Sequence[Epoch]],
        by_hand: ByHand | None = None,
    ) -> None:
        """Build it from rows (counts, local batch, step s, sync s) and (nodes, GPUs, local batch, step s, sync s)."""
        by_hand = BY_HAND.get(name, ByHand()) if by_hand is None else by_hand
        self.name = name
        self.batches = sorted(validation)
        self.first_batch = self.batches[0]
        self.last_batch = self.batches[-1]
        locals_ = [row[1] for row in placements]
        self.local_min = min(locals_)
        self.local_max = by_hand.local_max or max(locals_)
        self.most_gpus = by_hand.max_gpus
        self.epochs = min(len(rows) for rows in validation.values())
        self.boundaries = [
            min(validation[batch][epoch].progress for batch in self.batches) for epoch in range(self.epochs)
        ]
        self._validation = validation
        self._curves = _curves(name, placements)
        self._rows = (placements, scalability)
        self._outside: Callable[[float, float, float], Any] | None = None
        self._most_nodes = 0
        self._speeds: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}
        self._gradients: dict[tuple[int, int], tuple[float, float]] = {}

    def speed(self, counts: tuple[int, ...], local: int) -> tuple[float, float]:
        """Return seconds of one forward-backward pass and, of these, of synchronisation.

        ``counts`` are the GPUs of each node in the order of taking them, ``local`` the examples per GPU.

        Raises:
            WorkloadError: ``local`` or the placement lies outside what was measured.
        """
        key = (counts, local)
        found = self._speeds.get(key)
        if found is None:
            curve = self._curves.get(rotated(counts))
            found = self._within(counts, local, *curve) if curve else self._between(counts, local)
            self._speeds[key] = found
        return found

    def _within(
        self, counts: tuple[int, ...], local: int, sizes: list[int], steps: list[float], syncs: list[float]
    ) -> tuple[float, float]:
        if not sizes[0] <= local <= sizes[-1]:
            raise WorkloadError(
                f"{self.name}: {local} examples per GPU on {_shown(counts)} were not measured;"
                f" sizes there are {sizes[0]} to {sizes[-1]}"
            )
        if len(sizes) == 1:
            return steps[0], syncs[0]
        high = min(max(bisect_left(sizes, local), 1), len(sizes) - 1)
        a, b = sizes[high - 1], sizes[high]
        step, sync = (
            (ys[high] - ys[high - 1]) / (b - a) * (local - a) + ys[high - 1] for ys in (steps, syncs)
        )
        return step, sync

    def _between(self, counts: tuple[int, ...], local: int) -> tuple[float, float]:
        if self._outside is None:
            self._outside = self._triangulate()
        values = self._outside(min(len(counts), self._most_nodes), sum(counts), local)
        step, sync = (float(value) for value in values.reshape(-1))
        if isnan(step):
            widest = max(max(row[0]) for row in self._rows[0])
            nodes = f", nodes of 1 to {widest} GPUs" if max(counts) > widest else ""
            raise WorkloadError(
                f"{self.name}: {local} examples per GPU on {_shown(counts)} lie outside what was measured{nodes}"
            )
        return step, sync

    def _triangulate(self) -> Callable[[float, float, float], Any]:
        """Return the linear interpolation over (nodes, GPUs, local batch).

        The order of the points is part of the result: the grid has many equally good triangulations.
        """
        import numpy as np
        from scipy.interpolate import LinearNDInterpolator

        placements, scalability = self._rows
        sums: dict[tuple[int, int, int], list[float]] = {}
        for counts, local, step, sync in placements:
            entry = sums.setdefault((len(counts), sum(counts), local), [0.0, 0.0, 0.0])
            entry[0] += step
            entry[1] += sync
            entry[2] += 1
        points = [*sorted(sums), *(row[:3] for row in scalability)]
        values = [(sums[key][0] / sums[key][2], sums[key][1] / sums[key][2]) for key in sorted(sums)]
        values += [(row[3], row[4]) for row in scalability]
        self._most_nodes = max(point[0] for point in points)
        return LinearNDInterpolator(np.array(points, float), np.array(values, float))  # type: ignore[no-any-return]

    def gradient(self, total: int, epoch: int) -> tuple[float, float]:
        """Return squared norm and variance of the gradient at total batch ``total`` during ``epoch`` (from 0)."""
        key = (total, epoch)
        found = self._gradients.get(key)
        if found is None:
            low, high = self._neighbours(total)
            a, b = self._validation[low][epoch], self._validation[high][epoch]
            found = (self._mix(total, low, high, a.sqr, b.sqr), self._mix(total, low, high, a.var, b.var))
            self._gradients[key] = found
        return found

    def gain(self, total: int, epoch: int) -> float:
        """Return the progress of one iteration at ``total``, in iterations at the smallest batch."""
        sqr, var = self.gradient(total, epoch)
        return (var + sqr) / (var / (total / self.first_batch) + sqr)

    def iterations(self, total: int, epoch: int) -> float:
        """Return the iterations at total batch ``total`` done by the end of ``epoch``."""
        low, high = self._neighbours(total)
        a, b = self._validation[low][epoch], self._validation[high][epoch]
        return self._mix(total, low, high, a.iteration, b.iteration)

    def _neighbours(self, total: int) -> tuple[int, int]:
        if not self.first_batch <= total <= self.last_batch:
            raise WorkloadError(
                f"{self.name}: total batch {total} was not measured;"
                f" sizes are {self.first_batch} to {self.last_batch}"
            )
        at = bisect_left(self.batches, total)
        return (total, total) if self.batches[at] == total else (self.batches[at - 1], self.batches[at])

    @staticmethod
    def _mix(total: int, low: int, high: int, at_low: float, at_high: float) -> float:
        if low == high:
            return at_low
        return ((total - low) * at_high + (high - total) * at_low) / (high - low)

    def split(self, total: float, gpus: int, *, spare_one: bool = False) -> tuple[int, int]:
        """Return examples per GPU and pass, and accumulation passes, of a wished total batch on ``gpus`` GPUs.

        One GPU accumulates at least once if ``total`` exceeds the smallest batch, since a single pass cannot tell the
        gradient's noise; with ``spare_one`` it always does.
        """
        local = ceiling(total / gpus)
        passes = ceiling(local / self.local_max) - 1
        if gpus == 1 and (spare_one or total > self.first_batch):
            passes = max(1, passes)
        size = ceiling(local / (passes + 1))
        return min(size, floor(self.last_batch / (gpus * (passes + 1)))), passes

    def iteration_time(self, counts: tuple[int, ...], local: int, passes: int) -> float:
        """Return seconds of one iteration: ``passes`` without synchronisation and one with it."""
        step, sync = self.speed(counts, local)
        return step + passes * (step - sync)


def _curves(
    name: str, placements: Sequence[tuple[tuple[int, ...], int, float, float]]
) -> dict[tuple[int, ...], tuple[list[int], list[float], list[float]]]:
    by_counts: dict[tuple[int, ...], list[tuple[int, float, float]]] = {}
    for counts, local, step, sync in placements:
        by_counts.setdefault(rotated(counts), []).append((local, step, sync))
    curves = {}
    for counts, rows in by_counts.items():
        rows.sort(key=lambda row: row[0])
        sizes = [row[0] for row in rows]
        if len(set(sizes)) != len(sizes):
            raise WorkloadError(f"{name}: placement {_shown(counts)} has a local batch twice")
        curves[counts] = (sizes, [row[1] for row in rows], [row[2] for row in rows])
    return curves


def _shown(counts: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, counts)) + ")"


def _digits(field: str) -> tuple[int, ...]:
    field = text(field)
    if not (field.isascii() and field.isdigit()) or "0" in field:
        raise ValueError(f"must be digits 1 to 9, one a node; got {field!r}")
    return tuple(int(digit) for digit in field)


def read_profile(folder: Path) -> Profile:
    """Read one application's directory.

    Raises:
        WorkloadError: a missing or malformed file, with line number and reason.
    """
    times = {"step_time": positive, "sync_time": not_negative}
    placed = read_rows(
        folder / "placements.csv", {"placement": _digits, "local_bsz": count, **times}, ignore_extra=True
    )
    scaled = read_rows(
        folder / "scalability.csv",
        {"num_nodes": count, "num_replicas": count, "local_bsz": count, **times},
        ignore_extra=True,
    )
    placements = [(row[0], row[1], row[2], row[3]) for _, row in placed]
    scalability = [(row[0], row[1], row[2], row[3], row[4]) for _, row in scaled]
    validation: dict[int, list[Epoch]] = {}
    for path in sorted(folder.glob("validation-*.csv")):
        try:
            batch = count(path.stem.removeprefix("validation-"))
        except ValueError as error:
            raise WorkloadError(f"{path}: the batch size in the name {error}") from None
        columns = {
            "progress": positive,
            "iteration": positive,
            "grad_sqr": not_negative,
            "grad_var": positive,
        }
        rows = list(read_rows(path, columns, {"metric": real}))
        validation[batch] = epochs = [Epoch(*row[:4]) for _, row in rows]
        for (line, _), before, after in zip(rows[1:], epochs, epochs[1:], strict=False):
            if after.progress <= before.progress:
                raise WorkloadError(f"{path}, line {line}: progress must grow; got {after.progress}")
    empty = [batch for batch, epochs in validation.items() if not epochs]
    if not placements or not scalability or not validation or empty:
        what = f"epochs of batch {empty[0]}" if empty else "rows of placements, scalability or validation"
        raise WorkloadError(f"{folder}: has no {what}")
    lengths = {len(epochs) for epochs in validation.values()}
    if len(lengths) > 1:
        raise WorkloadError(f"{folder}: validation files differ in their number of epochs: {sorted(lengths)}")
    return Profile(folder.name, placements, scalability, validation)


class Profiles(Mapping[str, Profile]):
    """The applications under one directory, each read when it is first asked for. Raises ``WorkloadError``."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise WorkloadError(f"{self.folder}: is not a directory of profiles")
        self._names = sorted(path.parent.name for path in self.folder.glob("*/placements.csv"))
        if not self._names:
            raise WorkloadError(f"{self.folder}: has no application with a placements.csv")
        self._read: dict[str, Profile] = {}

    def __getitem__(self, name: str) -> Profile:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._read:
            self._read[name] = read_profile(self.folder / name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
