"""Runs stages as Spark jobs whose tasks are DuckDB's."""

import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from ebbflow.infra.errors import StageCancelledError, StageFailedError, TableError
from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark.failures import first_line
from ebbflow.infra.spark.native.catalyst import NotDoneError, NotNativeError, resolved
from ebbflow.infra.spark.native.exchange import costs, hashes
from ebbflow.infra.spark.native.exchange.costs import ByHash
from ebbflow.infra.spark.native.exchange.division import Division, Way
from ebbflow.infra.spark.native.exchange.merging import MANY, merging
from ebbflow.infra.spark.native.exchange.program import Program, Slice
from ebbflow.infra.spark.native.exchange.ranges import divided
from ebbflow.infra.spark.native.exchange.waves import MERGED, Waves
from ebbflow.infra.spark.native.objects import (
    check_places,
    mark,
    remove_hidden,
    remove_others,
    rows_of,
    tidy_within,
    until_tasks_have_left,
    withdraw,
)
from ebbflow.infra.spark.native.probe import trouble
from ebbflow.infra.spark.native.programs import program
from ebbflow.infra.spark.native.slices import arm_parts
from ebbflow.infra.spark.native.statements import PARTS
from ebbflow.infra.spark.native.worker import Done, Part, Settings, Work, ahead, sweep
from ebbflow.infra.spark.settings import (
    LEAST_MEMORY,
    addresses,
    has_nodes_here,
    is_local,
    native_memory,
    spill_folders,
)
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import public_settings
from ebbflow.infra.tables.confinement import NOTHING, AllowedAccess

_FINER = 16  # tasks among which a lost one is divided: each may read again what it needs of other relations
_FEW = 20_000  # rows that tasks have written and this process can merge sooner than an executor
_TIDIED = 10.0  # s in which tasks of a cancelled stage are told, and what they have left is removed
_log = logging.getLogger(__name__)
_probed: dict[str, str] = {}  # by application: what is wrong with its executors
_empty: dict[str, dict[int, Any]] = {}  # RDDs by application and number of partitions: making one takes time
_probing = threading.Lock()  # engines may share an application, and do share cloudpickle's registry
_POLL = 0.2  # s after which whoever waits for another's answer sees that it was cancelled


@dataclass(frozen=True, slots=True)
class Native:
    """A stage that ran natively."""

    rows: int
    tasks: int
    read: int  # bytes
    spilled: int  # bytes


class NativeStages:
    """Runs stages natively on the executors of one SparkContext. Safe for several threads.

    ``owned`` says that the context is ours: then tasks on this machine run in this Python environment, unless
    PYSPARK_PYTHON names another.
    """

    def __init__(self, context: Any, *, owned: bool) -> None:
        self._context = context
        self._application = str(context.applicationId)
        if owned and has_nodes_here(context.master) and "PYSPARK_PYTHON" not in os.environ:
            context.pythonExec = sys.executable
        self._access = NOTHING
        self._begun: dict[str, Callable[[int, int], object]] = {}  # by job, while it runs
        conf = context.getConf()
        self._threads = max(1, int(conf.get("spark.task.cpus", "1")))
        self._memory = native_memory(conf, context.master, context.defaultParallelism, self._threads)
        self._room = self._memory << 20  # bytes of tables that each task may read
        self._cores = max(1, int(context.defaultParallelism) // self._threads)  # tasks that run at once
        self._speculates = (
            conf.get("spark.speculation", "false").lower() == "true"
        )  # repeats what is not lost
        self._spilling = spill_folders(context.master, conf)

    def confine(self, access: AllowedAccess) -> None:
        """Hold later stages to ``access``, or what they read and write where that is more."""
        self._access = access

    def trouble(self, cancelled: threading.Event) -> str:
        """Return why no stage can run natively here; empty if some can. The first call asks an executor.

        Raises ``StageCancelledError``; then the next call asks again.
        """
        while (found := _probed.get(self._application)) is None:
            if cancelled.is_set():
                raise StageCancelledError("cancelled before it began")
            if _probing.acquire(timeout=_POLL):
                try:
                    if self._application not in _probed:
                        _probed[self._application] = self._without_memory() or trouble(self._context)
                except Exception as error:
                    if not cancelled.is_set():
                        _probed[self._application] = f"executors cannot run Python: {first_line(error)}"
                finally:
                    _probing.release()
        return found

    def _without_memory(self) -> str:
        """Return that executors' containers, where they are held to a size, have no part for DuckDB's memory."""
        master, conf = self._context.master, self._context.getConf()
        if is_local(master) or addresses(master) or conf.get("spark.executor.pyspark.memory", ""):
            return ""
        return "set spark.executor.pyspark.memory, or executors' containers have no memory for it"

    @property
    def known_trouble(self) -> str:
        """Return what ``trouble`` has said; empty if it was not asked."""
        return _probed.get(self._application, "")

    def run(
        self,
        frame: Any,
        job: StageJob,
        columns: Sequence[tuple[str, str]],
        cancelled: threading.Event,
        begun: Callable[[int, int], object] = lambda tasks, later: None,
    ) -> Native:
        """Run the stage that ``frame`` is, in the job group of the calling thread; ``begun`` is told of the number of
        tasks as soon as Spark is given them, and about how many are to join what these exchange.

        Raises:
            NotNativeError: it cannot run natively, or did not (``NotDoneError``); nothing of it is left.
            StageCancelledError: it was cancelled.
            StageFailedError: it did not, and something of it is left.
        """
        if why := self.trouble(cancelled):
            raise NotNativeError(why)
        check_places(job)
        self._cores = max(1, int(self._context.defaultParallelism) // self._threads)
        run = partial(self._armed, job, cancelled)
        if not job.arms:
            sizes = {r.name.lower(): r.bytes for r in job.relations}
            try:
                made = program(resolved(frame), columns, sizes, escapes="escape" in job.sql.lower())
                way = self._division.way(made, job)
            except (RecursionError, TableError) as error:
                raise NotNativeError(f"it cannot be planned: {first_line(error)}") from error
            run = partial(self._carried_out, made, job, way, cancelled)
        self._begun[job.id] = begun
        try:
            return run()
        except NotNativeError:  # each task has ended
            withdraw(job)
            raise
        except Exception as error:
            if cancelled.is_set():
                raise StageCancelledError(f"{job.name} was cancelled") from error
            # Spark leaves others of the job's tasks running: none of them may write from here on
            if not mark(job) and not mark(job):
                raise StageFailedError(f"{job.name}: its tasks cannot be told to end") from error
            until_tasks_have_left(job.output)
            withdraw(job)
            raise NotDoneError(f"its tasks failed: {first_line(error)}") from error
        except BaseException:  # the calling thread was interrupted: first of all the job ends
            cancelled.set()
            with suppress(Exception):  # a JVM that is gone runs nothing
                self._context.cancelJobGroup(job.id)
            raise
        finally:
            self._begun.pop(job.id, None)
            if cancelled.is_set():  # nobody waits for what is left
                tidy_within(_TIDIED, job)
            else:
                remove_hidden(job.output)
            for folder in self._spilling:
                sweep(folder)

    @property
    def _division(self) -> Division:
        return Division(self._room, self._cores)

    # --- what is run --------------------------------------------------------------------------------------

    def _armed(self, job: StageJob, cancelled: threading.Event) -> Native:
        """Run the job's arms: nothing of a plan of Spark's needs to be proven."""
        parts = arm_parts(job, {one.name: self._division.count(one.bytes) for one in job.relations})
        done = self._job(job, parts, cancelled)
        if job.layout is not None:
            remove_others(job.output, {path for one in done for path in one.files})
        return _summed(done, done, len(parts))

    def _carried_out(self, made: Program, job: StageJob, way: Way, cancelled: threading.Event) -> Native:
        relations = {r.name.lower(): r for r in job.relations}
        scans = tuple(replace(relations[t], name=f"s{number}") for number, t in made.scans.items())
        if not way:
            done = self._job(job, [Part(made.whole, scans, "part-00000.parquet")], cancelled)
            return _summed(done, done, 1)
        if isinstance(way, Waves):
            merge, every = way.run(job.output, scans, partial(self._slices, job, cancelled))
            last = self._merged(job, merge, sum(d.rows for d in every), cancelled)
            return _summed(last, [*every, *last], len(every) + 1)
        before = list[Done]()
        if isinstance(way, ByHash):
            split, files, before, done = self._exchanged(made, job, way, scans, cancelled)
        else:
            split = way[0].made.split
            ahead.begin()  # for merging
            names = [split.file.format(number) for number in range(len(way))]
            listed, done = self._slices(job, cancelled, way, names, scans)
            files = list(chain.from_iterable(listed))
        every = [*before, *done]
        if not split.merge:
            return _summed(done, every, len(every))
        rows = sum(d.rows for d in done)
        tasks = min(self._cores, rows // MANY + 1)
        if rows > MANY and sum(info.size for info in _infos(job, files)) > MERGED:
            raise NotDoneError("slices have found too many rows for one task")
        if tasks > 1 and (several := merging(made, split.merge)) is not None:
            parts = several.parts(_written(job, files), tasks)
            done, split = self._job(job, parts, cancelled), several.split
            every += done
            if not split.merge:
                return _summed(done, every, len(every))
            rows, files = sum(d.rows for d in done), [part.file for part in parts]
        merge = Part(split.merge, (_written(job, files), *scans), "part-00000.parquet")
        last = self._merged(job, merge, rows, cancelled)
        return _summed(last, [*every, *last], len(every) + 1)

    def _merged(self, job: StageJob, merge: Part, rows: int, cancelled: threading.Event) -> list[Done]:
        """Merge what tasks have written: here, where that is so little that another job of Spark's takes longer."""
        output = job.output
        read = [relation.name for relation in merge.relations if merge.names(relation)]
        if output.local and rows <= _FEW and all(name.startswith(PARTS) for name in read):
            settings = Settings(AllowedAccess.of((), [output]), 1, LEAST_MEMORY)
            done = Work(settings, output.root, (merge,), output.scheme, last=True).here()
            if cancelled.is_set():
                raise StageCancelledError(f"{job.name} was cancelled")
            if not done.error:
                return [done]
        return self._job(job, [merge], cancelled)

    def _exchanged(
        self, made: Program, job: StageJob, way: ByHash, scans: Sequence[Relation], cancelled: threading.Event
    ) -> tuple[costs.Statements, list[str], list[Done], list[Done]]:
        """Have tasks write what is exchanged, and others join it. Return what the latter run, the names of the files
        that they have written, and what became of the former and of the latter."""
        exchanges = {f"s{number}": exchange for number, exchange in way.made.exchanges.items()}
        by_name = {relation.name: relation for relation in scans}
        size, room = sum(by_name[name].bytes for name in exchanges), self._room - way.others
        later = self._division.count(size)
        grain = hashes.grain(later, way.size / room, local=job.output.local)
        parts = hashes.writing(exchanges, by_name, partial(self._division.writers, sorts=grain == 1), grain)
        least = min(later, self._cores) if any(e.groups for e in exchanges.values()) else 1  # of many rows
        flat = [part for listed in parts.values() for part in listed]
        found, before = self._shared(
            job, cancelled, flat, lambda n, count: hashes.finer_writing(flat[n], by_name, count), later
        )
        these = iter(found)
        parts = {name: [part for _ in listed for part in next(these)] for name, listed in parts.items()}
        scans_, sizes = hashes.exchanged(exchanges, by_name, parts, job.output, sum(d.rows for d in before))

        def count(probed: float, built: float) -> int:
            return min(
                max(self._division.count(probed + built), math.ceil(2 * built / room), least), hashes.BUCKETS
            )

        split, full = way.made.split, bool(made.full)
        joins = hashes.joining(
            split.first, scans_, sizes, f"s{made.sliced}", split.file, count, room, whole=full, grain=grain
        )
        if len({one.ranges for one in joins}) == len(joins):  # no key's rows are in two of them
            split = way.made.apart if len(joins) > 1 else costs.Statements(way.made.whole, "")
            joins = [
                replace(one, statement=split.first, file=split.file.format(n)) for n, one in enumerate(joins)
            ]
        found, done = self._shared(
            job,
            cancelled,
            joins,
            lambda n, count: hashes.finer_joining(joins[n], scans_, sizes, grain, count),
        )
        return split, [part.file for some in found for part in some], before, done

    def _slices(
        self,
        job: StageJob,
        cancelled: threading.Event,
        slices: Sequence[Slice],
        names: Sequence[str],
        scans: Sequence[Relation],
        later: int = 0,
    ) -> tuple[list[list[str]], list[Done]]:
        """Compute slices as files of these names; return the names of what there is in place of each, and what became
        of the tasks."""
        by_number = {int(one.name[1:]): one for one in scans if not one.name.startswith(PARTS)}

        def finer(number: int, count: int) -> list[Part]:
            return [one.part(scans, "") for one in divided(slices[number], by_number, count)]

        parts = [one.part(scans, name) for one, name in zip(slices, names, strict=True)]
        found, done = self._shared(job, cancelled, parts, finer, later)
        return [[part.file for part in some] for some in found], done

    def _shared(
        self,
        job: StageJob,
        cancelled: threading.Event,
        parts: Sequence[Part],
        finer: Callable[[int, int], Sequence[Part]],
        later: int = 0,
    ) -> tuple[list[Sequence[Part]], list[Done]]:
        """Run parts; return what there is in place of each, and what became of the tasks.

        One that Spark repeats, most often since its executor is lost, once another like it has ended is divided among
        all when the others have, too. ``finer`` returns a part, by its place, as so many at most.
        """
        divisible = len(parts) > 1 and not self._speculates
        done = self._job(job, [replace(one, divisible=divisible) for one in parts], cancelled, later)
        found, again = list[Sequence[Part]]([part] for part in parts), list[Part]()
        for number, (one, part) in enumerate(zip(done, parts, strict=True)):
            if one.left and (rows := rows_of(job.output, part.file)) is not None:  # it had ended
                done[number] = Done(rows)
        if left := [number for number, one in enumerate(done) if one.left]:
            self._cores = max(1, int(self._context.defaultParallelism) // self._threads)
            for number in left:
                stem = parts[number].file.removesuffix(".parquet")
                these = finer(number, min(math.ceil(self._cores / len(left)), _FINER))
                found[number] = [replace(one, file=f"{stem}-{n}.parquet") for n, one in enumerate(these)]
                again += found[number]
            _log.info("%s: %d lost tasks are divided among %d", job.name, len(left), len(again))
            done = [one for one in done if not one.left] + self._job(job, again, cancelled, later)
            for number in left:  # a machine that stood still may have gone on, and written part of the result
                if parts[number].file.startswith("part-"):
                    job.output.remove(parts[number].file)
        return found, done

    def _job(
        self, job: StageJob, parts: Sequence[Part], cancelled: threading.Event, later: int = 0
    ) -> list[Done]:
        if cancelled.is_set():
            raise StageCancelledError(f"{job.name} was cancelled before it began")
        access = AllowedAccess.of(job.relations, [job.output])
        if self._access.covers(access):
            access = self._access
        settings = Settings(access, self._threads, self._memory)
        output = job.output
        work = Work(settings, output.root, tuple(parts), output.scheme, tuple(public_settings().items()))
        self._begun[job.id](len(parts), later)
        try:
            done = self._collected(work)
        except Exception as error:
            # in local mode Spark does not repeat a task whose worker was killed
            if cancelled.is_set() or not is_local(self._context.master):
                raise
            _log.warning("a task of %s failed and is repeated: %s", job.name, first_line(error))
            rows = [rows_of(output, part.file) if part.layout is None else None for part in parts]
            unwritten = (part for part, count in zip(parts, rows, strict=True) if count is None)
            left = tuple(replace(part, divisible=False) for part in unwritten)
            again = iter(self._collected(replace(work, parts=left, last=True)) if left else [])
            done = [next(again) if count is None else Done(count) for count in rows]
        if cancelled.is_set():
            raise StageCancelledError(f"{job.name} was cancelled")
        if errors := [d.error for d in done if d.error]:
            raise NotDoneError(f"DuckDB refused it ({errors[0]})")
        return done

    def _collected(self, work: Work) -> list[Done]:
        if self._application not in _empty:
            _empty.clear()  # of applications that have ended: a process has one at a time
        rdds, tasks = _empty.setdefault(self._application, {}), len(work.parts)
        if tasks not in rdds:
            rdds[tasks] = self._context.parallelize([], tasks)
        return list(rdds[tasks].mapPartitionsWithIndex(work.run).collect())


def _infos(job: StageJob, names: Sequence[str]) -> list[Any]:
    """Return what the file system tells of what tasks have written."""
    return list(job.output.fs().get_file_info([job.output.path(name) for name in names]))


def _written(job: StageJob, names: Sequence[str]) -> Relation:
    """Return as a relation what tasks have written for others to merge."""
    files = tuple(FileEntry(f"{job.output.root}/{name}", 1, 0.0) for name in names)
    return Relation(PARTS, job.output.scheme, files, ())


def _summed(last: Sequence[Done], all_: Sequence[Done], tasks: int) -> Native:
    return Native(sum(d.rows for d in last), tasks, sum(d.read for d in all_), sum(d.spilled for d in all_))
