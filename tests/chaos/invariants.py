"""What must hold after a chaotic run, each with evidence in words.

The ledger is judged from its events by rules of this file's own, besides the product's ``audit`` and ``verify``: what
is checked must not check itself.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.ledger import Ledger, audit
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.storage.manifest import UnusableError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.files import CheckpointFiles
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    CapacityChanged,
    Ended,
    Event,
    Granted,
    Lease,
    LoopBegan,
    Slot,
)
from ebbflow.planners.training.saving.data_order import DataOrder
from tests.chaos import fit_data as data
from tests.chaos.injecting import Done
from tests.chaos.samples import account, read, wrong
from tests.chaos.scene import MARK, Training, Work

LEAST_R2 = 0.4  # of the best trial of a search; without any training about 0


@dataclass
class Findings:
    """Violations, and what was looked at: a check that saw nothing is none."""

    violations: list[str] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)

    def wrong(self, what: str, sentences: Iterable[str]) -> None:
        self.violations += [f"{what}: {sentence}" for sentence in sentences]

    def count(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self.seen[name] = self.seen.get(name, 0) + number


# --- the ledger ---------------------------------------------------------------------------------------------


def all_events(ledger: Ledger) -> list[Event]:
    """Return every event."""
    found: list[Event] = []
    while some := ledger.events(found[-1].number if found else 0, 1000):
        found += some
    return found


def double_bookings(events: Iterable[Event]) -> list[str]:
    """Return GPUs that two leases had at one recorded moment: between an event and the next one."""
    held: dict[Slot, Lease] = {}
    leases: dict[int, Lease] = {}
    said = []
    for event in events:
        match event.change:
            case Granted():
                for lease in event.change.leases:
                    slot = Slot(lease.node, lease.slot)
                    if (other := held.get(slot)) is not None:
                        said.append(
                            f"after event {event.number} GPU {slot.number} of {slot.node} has lease {other.number} "
                            f"of {other.app} and lease {lease.number} of {lease.app}"
                        )
                    held[slot] = leases[lease.number] = lease
            case Ended():
                for number in event.change.leases:
                    lease = leases[number]
                    if held.get(Slot(lease.node, lease.slot)) is lease:
                        del held[Slot(lease.node, lease.slot)]
    return said


def unended(events: Iterable[Event]) -> list[str]:
    """Return leases that were granted and never ended."""
    left: dict[int, Lease] = {}
    for event in events:
        if isinstance(event.change, Granted):
            left |= {lease.number: lease for lease in event.change.leases}
        elif isinstance(event.change, Ended):
            for number in event.change.leases:
                left.pop(number, None)
    return [f"lease {n} of {lease.app} on {lease.node} has not ended" for n, lease in sorted(left.items())]


def phases(events: Iterable[Event]) -> dict[str, tuple[str, str]]:
    """Return the last phase of each app, with its reason."""
    found: dict[str, tuple[str, str]] = {}
    for event in events:
        if isinstance(event.change, AppEntered):
            found[event.change.spec.id] = ("waiting", "")
        elif isinstance(event.change, AppMoved):
            found[event.change.app] = (event.change.phase, event.change.reason)
    return found


def check_ledger(ledger: Ledger, works: Sequence[Work], found: Findings) -> list[Event]:
    """Check the ledger by itself, and that every app has finished. Returns its events."""
    events = all_events(ledger)
    grants = sum(len(e.change.leases) for e in events if isinstance(e.change, Granted))
    found.count(events=len(events), leases=grants)
    found.wrong("double booking", double_bookings(events))
    found.wrong("audit", audit(events))
    found.wrong("replay", ledger.verify())
    found.wrong("lease", unended(events))
    known = phases(events)
    for work in works:
        for step in [*work.queries, *(t.step for t in work.trainings), *work.searches]:
            phase, reason = known.get(f"{work.name}.{step}", ("never entered", ""))
            if phase != "finished":
                found.wrong("app", [f"{work.name}.{step} is {phase}: {reason}"])
    return events


# --- faults -------------------------------------------------------------------------------------------------


def check_faults(done: Sequence[Done], events: Sequence[Event], found: Findings) -> None:
    """Check that what was done to the system shows: nodes that were killed have left, who died has come back."""
    for one in done:
        if one.why_not.startswith("WRONG"):
            found.wrong(one.kind, [one.why_not])
        if not one.proof:
            found.count(faults_without_a_victim=1)
            continue
        found.count(faults=1)
        after = [event for event in events if event.number > one.number]
        if one.kind in ("kill-spark", "kill-gpu", "notice-spark", "notice-gpu"):
            came = any(
                isinstance(e.change, CapacityChanged) and one.victim in {n.id for n in e.change.nodes}
                for e in events
            )
            left = any(isinstance(e.change, CapacityChanged) and one.victim in e.change.left for e in events)
            if came and not left:
                found.wrong(
                    one.kind,
                    [f"{one.victim} was taken away at {one.at:.1f} s, and the ledger does not know it"],
                )
            found.count(losses_on_record=int(came and left))
        elif one.kind == "kill-loop" and one.led:
            again = any(isinstance(e.change, LoopBegan) for e in after)
            if not again:
                found.wrong(one.kind, [f"no loop has begun after {one.victim} was killed at {one.at:.1f} s"])
            found.count(loops_again=int(again))
        elif one.kind == "kill-app":
            apps = [e for e in after if isinstance(e.change, AppEntered)]
            found.count(apps_again=sum(e.change.spec.pipeline == one.victim for e in apps))  # type: ignore[union-attr]


# --- results ------------------------------------------------------------------------------------------------


def check_queries(work: Work, folder: Path, tables: Path, found: Findings) -> None:
    """Compare the results of queries with DuckDB's own."""
    import pyarrow.parquet as pq

    from ebbflow.infra.query.results import same_rows

    for step, sql in work.queries.items():
        path = folder / "results" / step / f"{step}.parquet"
        try:
            result = pq.read_table(path)
        except (OSError, ValueError) as error:
            found.wrong("answer", [f"{work.name}.{step} has none: {error}"])
            continue
        expected = data.answer(sql, tables)
        found.count(queries=1, rows=expected.num_rows)
        if (difference := same_rows(result, expected)) is not None:
            found.wrong("answer", [f"{work.name}.{step} differs from DuckDB's: {difference}"])


def check_training(
    work: Work,
    one: Training,
    folder: Path,
    logs: Path,
    undisturbed: str,
    metrics: Mapping[str, str],
    found: Findings,
) -> None:
    """Check the samples that a training used, its end, and what it has learnt."""
    app = f"{work.name}.{one.step}"
    here = account(read(logs / app))
    order = DataOrder(data.SAMPLES, data.SEED)
    per_pass = data.SAMPLES // data.BATCH
    due = [
        order.indices(turn, n * data.BATCH, (n + 1) * data.BATCH).tolist()
        for turn in range(one.epochs)
        for n in range(per_pass)
    ]
    found.count(trainings=1, stretches=here.stretches, steps=len(here.steps), steps_again=here.repeated)
    found.wrong(f"samples of {app}", wrong(here, data.SAMPLES, data.BATCH, one.epochs, due, undisturbed))
    reached = float(metrics.get("metrics.r2", "nan"))
    if not reached >= one.least:
        found.wrong("target", [f"{app} reached r2 {reached}, and {one.least} is its target"])


def check_search(
    work: Work, step: str, trials: int, folder: Path, details: Mapping[str, Any], found: Findings
) -> None:
    """Check that a search has had all its trials, and a best one."""
    count = int(details.get("trials", 0))
    found.count(searches=1, trials=count)
    if count != trials:
        found.wrong("target", [f"the search {work.name}.{step} had {count} trials of {trials}"])
    if not details.get("best r2", 0) >= LEAST_R2:
        found.wrong("target", [f"the search {work.name}.{step} found {details.get('best r2')}"])


def check_files(disk: Path, found: Findings) -> None:
    """Check that nothing in the stores is half-written under a name that somebody reads."""
    import pyarrow.parquet as pq

    for folder in (disk / "store").glob("*/manifests"):
        store = ParquetCheckpointStore(StorageLocation(folder.parent))
        manifests = list(folder.glob("*.json"))
        whole = [one for one in store.checkpoints() if store.verify(one)]
        found.count(checkpoints=len(whole))
        found.wrong("store", store.problems())
        if len(whole) != len(manifests):
            found.wrong("store", [f"{len(manifests)} manifests, and {len(whole)} checkpoints are whole"])
    for path in (disk / "runs").rglob("results/*/*.parquet"):
        if path.name.startswith("."):
            continue
        try:
            pq.ParquetFile(path).metadata  # noqa: B018
        except (OSError, ValueError) as error:
            found.wrong("result", [f"{path} is half-written: {error}"])
    for path in (disk / "runs").rglob("*.json"):
        if path.name.startswith("."):
            continue
        try:
            json.loads(path.read_text())
        except ValueError as error:
            found.wrong("file", [f"{path} is half-written: {error}"])
    for folder in (disk / "runs").rglob("checkpoints"):
        files = CheckpointFiles(StorageLocation(folder), SystemClock())
        for name in files.names():
            with suppress(FileNotFoundError):
                if not (folder / name / "manifest.json").exists():
                    found.count(unfinished_checkpoints=1)
                    continue
            try:
                files.verify(name, files.manifest(name))
                found.count(training_checkpoints=1)
            except (InfraError, UnusableError, ValueError) as error:
                found.wrong("checkpoint", [f"{folder / name}: {error}"])
    found.count(temporary_files=sum(1 for path in disk.rglob(".*.tmp") if path.is_file()))


# --- what is left -------------------------------------------------------------------------------------------


def marked(uid: str) -> list[psutil.Process]:
    """Return the live processes that a run has started, by itself or through others."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == uid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def leftovers(uid: str) -> list[str]:
    """Return what is left of a run's processes, as sentences."""
    said = []
    for process in marked(uid):
        with suppress(psutil.Error, OSError):
            said.append(f"process {process.pid} is left: {' '.join(process.cmdline())[:200]}")
    return said
