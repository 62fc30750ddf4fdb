"""One flipped byte in a store between two runs of a query: no wrong answer, and what is damaged is computed
again.

Run from the repository root: ``python -m tests.benchmarks.flipped_bytes --out DIR [--flips 10000] [--seed 1]``.
A flip changes one byte and neither size nor times. Flips are spread evenly over page headers, pages, footers
and manifests; half of them are in files that the answer reads. They hit stage files, results, slices, kept
samples and cached statistics in turn; of the last two, and of the index of slices, the "manifest" is what
carries the checksum. After each the query runs as a new process does (new store object, nothing remembered in
memory) on DuckDB. Writes ``flipped_bytes.json``; ends with status 1 if an answer was wrong, a run failed,
damage was not found or not repaired. Minutes on one core.
"""

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.protocols import Relation
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.results import read_checkpoint
from ebbflow.infra.storage import checksums
from ebbflow.infra.storage.files import write_text
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import sampling, statistics
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.tasks.query.driver import Driver
from ebbflow.tasks.query.request import QueryRequest
from tests.damaged_store import Store, computed
from tests.flips import KINDS, Flip, apply, choose, regions
from tests.tasks.driving import Obedient, Ride, Scripted

SAMPLE_ROWS = 20_000  # as the planner asks for
OFTEN = 1e9  # losses per node-hour: even queries of milliseconds are divided
SLICED = """
    SELECT o.p, count(*) AS n, sum(l.q) AS s FROM o JOIN l ON l.k = o.k WHERE l.m IN ('AIR', 'MAIL') GROUP BY o.p
"""


class Wrong(Exception):
    """What must hold did not."""


def demand(holds: bool, what: str) -> None:
    """Raise ``Wrong`` saying ``what`` unless it ``holds``."""
    if not holds:
        raise Wrong(what)


class Thing(Protocol):
    """Something that is stored; ``run`` flips a byte of ``kind``, lets the query run, and checks what must hold."""

    def run(self, rng: random.Random, kind: str, *, read: bool) -> Flip:
        """``read`` tells whether the answer reads the file. Raises ``Wrong``; returns the flip."""
        ...


class Flips:
    """Keeps the flip that was made last, for messages."""

    last: Flip | None = None

    def made(self, flip: Flip) -> Flip:
        """Apply the flip."""
        Flips.last = flip
        apply(flip)
        return flip


class Stages(Flips):
    """Files and manifests of a stage in the middle (``inner``), or of the result."""

    def __init__(self, store: Store, *, result: bool) -> None:
        self.store, self.target = store, store.sink if result else store.inner
        self.result = result

    def run(self, rng: random.Random, kind: str, *, read: bool) -> Flip:
        """See ``Thing``. The result is read by every run, so one that is not is a result of an older query."""
        store, target = self.store, self.target
        if self.result and not read:
            target = store.inner  # nothing asks for it while the result is there
        elif read and not self.result:
            store.manifest(store.sink).unlink()  # the answer is computed from what is below it
        flip = choose(rng, kind, store.folder, target)
        whole = {path: path.read_bytes() for path in (flip.path, store.manifest(target))}
        self.made(flip)
        driver, rows = store.run()
        demand(rows == store.rows, "the answer is wrong")
        if read:
            demand(target in computed(driver), "it was not computed again")
            demand(any(target[:16] in note for note in driver.recorder.notes), "nothing was said")
            demand(
                ParquetCheckpointStore(StorageLocation(store.folder)).find(target) is not None,
                "it was not repaired",
            )
            return flip
        demand(not computed(driver), "something was computed that was there")
        demand(
            ParquetCheckpointStore(StorageLocation(store.folder)).find(target) is None,
            "the damage was not found",
        )
        for path, data in whole.items():
            path.write_bytes(data)
        return flip


class Slices(Flips):
    """Files, manifests and index entries of a stage's slices."""

    def __init__(self, folder: Path, engine: Scripted) -> None:
        tables, count = folder / "tables", 16_000
        tables.mkdir(parents=True)
        pq.write_table(
            pa.table({"k": list(range(count // 4)), "p": [f"p{i % 5}" for i in range(count // 4)]}),
            tables / "o.parquet",
            row_group_size=256,
        )
        pq.write_table(
            pa.table(
                {
                    "k": [i // 4 for i in range(count)],
                    "m": [("AIR", "MAIL", "RAIL")[i % 3] for i in range(count)],
                    "q": [float(i % 50) for i in range(count)],
                }
            ),
            tables / "l.parquet",
            row_group_size=1024,
        )
        self.folder, self.engine = folder / "store", engine
        request = QueryRequest(SLICED, tables=str(tables), engine="duckdb", store=str(self.folder))
        self.ride = Ride(request, hazard=OFTEN)
        found = [(p, s) for p in self.ride.plans for s in p.stages if s.slicing is not None]
        self.plan: QueryExecutionPlan = found[0][0]
        self.stage: Stage = found[0][1]
        self.sink = self.plan.sink.output_fp
        self.rows = self._run()[1]
        self.index = (
            ParquetCheckpointStore(StorageLocation(self.folder)).cache("slices").under(self.stage.output_fp)
        )
        slices = {fingerprint for *_, fingerprint in self.index.values()}
        demand(len(slices) > 1, "there are no slices")

    def _run(self) -> tuple[Driver, list[dict[str, Any]]]:
        self.ride.store = ParquetCheckpointStore(StorageLocation(self.folder))
        driver = self.ride.drive(self.engine, Obedient(self.ride.plans, []), self.plan)
        assert driver.result is not None
        rows = read_checkpoint(driver.result).to_pylist()
        return driver, sorted(rows, key=lambda row: str(row["p"]))

    def run(self, rng: random.Random, kind: str, *, read: bool) -> Flip:
        """See ``Thing``."""
        fingerprints = {fingerprint for *_, fingerprint in self.index.values()}
        target = rng.choice(sorted(fingerprints))
        flip = choose(rng, kind, self.folder, target)
        in_index = kind == "manifest" and rng.random() < 0.5
        if in_index:
            path = rng.choice(sorted(Path(self.index.place.root).glob("*.json")))
            flip = Flip(kind, path, rng.randrange(path.stat().st_size), 1 << rng.randrange(8))
        manifest = self.folder / "manifests" / f"{target}.json"
        whole = {path: path.read_bytes() for path in (flip.path, manifest)}
        if read:
            (self.folder / "manifests" / f"{self.sink}.json").unlink()
        self.made(flip)
        driver, rows = self._run()
        demand(rows == self.rows, "the answer is wrong")
        if read:
            ran = next(
                s
                for s in driver.recorder.stages
                if s.fingerprint == self.stage.output_fp and s.status == "completed"
            )
            before = f"{len(fingerprints)} slices, {len(fingerprints) - 1} from before"
            demand(ran.note == before, f"{ran.note!r}, not {before!r}")
            after = ParquetCheckpointStore(StorageLocation(self.folder))
            there = {fingerprint for *_, fingerprint in self.index.values()}
            demand(there == fingerprints, "the index was not repaired")
            demand(all(after.find(one) for one in there), "it was not repaired")
            return flip
        demand(not computed(driver), "something was computed that was there")
        if in_index:
            there = {fingerprint for *_, fingerprint in self.index.values()}
            demand(len(there) == len(fingerprints) - 1, "the damage was not found")
        else:
            demand(
                ParquetCheckpointStore(StorageLocation(self.folder)).find(target) is None,
                "the damage was not found",
            )
        for path, data in whole.items():
            path.write_bytes(data)
        return flip


class Planning(Flips):
    """What is kept of tables: samples (Parquet with a checksum behind) and statistics (JSON that carries its own)."""

    def __init__(self, store: Store, folder: Path, *, samples: bool) -> None:
        self.store, self.samples = store, samples
        self.cache = ParquetCheckpointStore(StorageLocation(store.folder)).cache("statistics")
        # a table that no query names, with a cache of its own
        other = folder / "other"
        other.mkdir(parents=True)
        pq.write_table(
            pa.table({"x": list(range(300)), "y": [i % 7 for i in range(300)]}), other / "x.parquet"
        )
        named = QueryRequest(
            "SELECT count(*) AS n FROM x", tables=str(other), engine="duckdb", store=str(folder)
        )
        self.unread = Ride(named).gathered.relations["x"]
        self.read = store.ride.gathered.relations["b"]  # the one that has a predicate
        self.known = {relation.name: self._asked(relation) for relation in (self.unread, self.read)}
        self.forecast = self._forecast()

    def _asked(self, relation: Relation) -> tuple[dict[str, Any], list[float | None]]:
        forget()
        column = relation.columns[-1][0]
        said = statistics.collect(relation, self.cache, SAMPLE_ROWS, SystemClock())
        return asdict(said), statistics.selectivity(relation, [f"{column} > 2"], self.cache, SAMPLE_ROWS)

    def _path(self, relation: Relation) -> Path:
        key = sampling._key(relation, SAMPLE_ROWS)
        if self.samples:
            return Path(sampling._path(self.cache, key))
        return Path(self.cache.file(f"statistics/{statistics._FORMAT}/{key[0]}/{SAMPLE_ROWS}"))

    def _flip(self, rng: random.Random, kind: str, path: Path) -> Flip:
        size = path.stat().st_size
        if kind == "manifest":
            where = range(size - checksums.DIGITS, size) if self.samples else range(size)
            return Flip(kind, path, rng.choice(where), 1 << rng.randrange(8))
        inner = path.with_name(
            "inner"
        )  # the sample without its checksum, whose regions are those of the file
        inner.write_bytes(path.read_bytes()[: -checksums.DIGITS])
        where = rng.choice(regions(inner, kind))
        inner.unlink()
        return Flip(kind, path, rng.choice(where), 1 << rng.randrange(8))

    def _forecast(self) -> list[tuple[str, tuple[tuple[float, float], ...]]]:
        """Return what planning decides from statistics and samples, as a new process does."""
        forget()
        ride = Ride(self.store.ride.request)
        return [(plan.id, tuple((stage.rows, stage.bytes) for stage in plan.stages)) for plan in ride.plans]

    def run(self, rng: random.Random, kind: str, *, read: bool) -> Flip:
        """See ``Thing``."""
        relation = self.read if read else self.unread
        path = self._path(relation)
        whole = path.read_bytes()
        flip = self.made(self._flip(rng, kind, path))
        demand(self._forecast() == self.forecast, "planning decided something else")
        _, rows = self.store.run()
        demand(rows == self.store.rows, "the answer is wrong")
        if not read:
            demand(path.read_bytes() != whole, "something was computed that nobody asked for")
        if self.samples and read:
            # planning reads the sample of a table with a predicate, and draws it again if it is damaged
            demand(path.read_bytes() == whole, "the sample was not drawn again")
        demand(self._asked(relation) == self.known[relation.name], "statistics differ")
        demand(path.read_bytes() == whole, "it was not repaired")
        return flip


def forget() -> None:
    """Forget what a process remembers of samples and statistics."""
    sampling._memory.clear()
    statistics._open.clear()


def measure(flips: int, seed: int, show: Callable[[str], None]) -> dict[str, Any]:
    """Make the flips; return the counts."""
    rng, engine, start = random.Random(seed), Scripted(), time.monotonic()
    made: Counter[tuple[str, str, bool]] = Counter()
    wrong: list[str] = []
    try:
        with tempfile.TemporaryDirectory(prefix="ebbflow-flips-") as folder:
            place = Path(folder)
            (place / "stages").mkdir()
            store = Store(place / "stages", engine)
            things: dict[str, Thing] = {
                "stage files": Stages(store, result=False),
                "results": Stages(store, result=True),
                "slices": Slices(place / "slices", engine),
                "samples": Planning(store, place / "one", samples=True),
                "statistics": Planning(store, place / "two", samples=False),
            }
            turns: Counter[tuple[str, bool]] = Counter()
            for number in range(flips):
                kind, read = KINDS[number % len(KINDS)], number // len(KINDS) % 2 == 0
                name = _turn(list(things), kind, turns[kind, read])
                turns[kind, read] += 1
                store.ride.listener.notes.clear()
                Flips.last = None
                try:
                    things[name].run(rng, kind, read=read)
                except Exception as error:  # a traceback counts as much as a wrong answer
                    what = error if isinstance(error, Wrong) else traceback.format_exc()
                    wrong.append(f"flip {number}, {name}, {kind}, read={read}: {Flips.last}: {what}")
                    show(wrong[-1])
                    if len(wrong) >= 10:
                        break
                # a result that no answer reads is not there: what is below it was hit
                hit = "stage files" if name == "results" and not read else name
                made[hit, kind, read] += 1
                if (number + 1) % 1000 == 0:
                    show(f"{number + 1} flips, {time.monotonic() - start:.0f} s")
    finally:
        engine.close()
    return {
        "flips": sum(made.values()),
        "seed": seed,
        "wrong": wrong,
        "seconds": round(time.monotonic() - start, 1),
        "made": [
            {"thing": name, "kind": kind, "read": read, "flips": count}
            for (name, kind, read), count in sorted(made.items())
        ],
    }


def _turn(things: Sequence[str], kind: str, number: int) -> str:
    """Return whose turn it is; statistics have no pages."""
    able = [name for name in things if kind == "manifest" or name != "statistics"]
    return able[number % len(able)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found = measure(given.flips, given.seed, lambda text: print(text, flush=True))
    write_text(given.out / "flipped_bytes.json", json.dumps(found, indent=1) + "\n")
    print(f"{found['flips']} flips in {found['seconds']:.0f} s: {len(found['wrong'])} wrong")
    sys.exit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
