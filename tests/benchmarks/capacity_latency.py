"""How soon a cluster answers, on real nodes: notices, deaths and arrivals.

Run from the repository root: ``python -m tests.benchmarks.capacity_latency --out DIR``. A local fleet with Spark
workers and GPU nodes, the capacity loop in a process of its own with its usual pace, apps that speak through real
agents, and queries that run on the workers one after another. Time and again: an app arrives while a GPU is free; a
GPU node on which an app holds a lease gets a notice, or is killed; the same happens to a Spark worker while a query
runs on it. Writes ``capacity_latency.json`` and ``capacity_latency.svg``; ends with 1 if the 95th percentile of a
figure misses its bar.
"""

import argparse
import json
import logging
import math
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.local_fleet.state.fleet_state import LocalNode
from ebbflow.infra.storage.files import write_text
from ebbflow.planners.model import Capacity
from ebbflow.planners.model.ledger import AppSpec, CapacityChanged, Change, Decided, Ended, Granted, Recalled
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import ReplanDecision
from ebbflow.tasks.apps.agent import AppAgent
from ebbflow.tasks.apps.allocation import AllocationStatus
from ebbflow.tasks.capacity.metrics import percentile
from ebbflow.tasks.capacity.node_sources import opened_loop
from ebbflow.tasks.capacity.request import CapacityRequest
from ebbflow.tasks.drawing.charts import bars_svg
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.opening import opened_engine
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator

LIMIT = 180.0  # s for anything that is waited for; far beyond every bar
NOTICE = 6.0  # s from a notice to the end of the node
SETTLED = 1.5  # s without a change before the next repetition
BARS = {  # figure -> (from what to what, s that its 95th percentile must be below; infinite: it is only told)
    "arrival": ("an app enters while a GPU is free -> its first lease", 2.0),
    "arrival_known": ("the same -> the app knows", math.inf),
    "notice_gpu": ("a notice to a GPU node -> new auction decided, leases on it called back", 1.0),
    "notice_query": ("a notice to a Spark worker -> the query on it has re-planned", 1.0),
    "death_gpu": ("the processes of a GPU node die -> its loss is written, leases on it have ended", 3.0),
    "death_worker": ("the processes of a Spark worker die -> its loss is written", 3.0),
    "death_query": ("the same -> the query on it has re-planned", 3.0),
}
SQL = (
    "SELECT a.k % 97 AS g, count(*) AS n, sum(a.v * b.v) AS s FROM a JOIN b ON a.k = b.k JOIN c ON a.g = c.g "
    "GROUP BY a.k % 97"
)


def lead(ledger: str, fleet: str, limits: str, stop: Flag) -> None:
    """Be the capacity loop, in a process of its own, until ``stop``."""
    request = CapacityRequest(ledger, fleet, f"local:{fleet}", config=limits)
    over = threading.Event()
    parent = os.getppid()

    def watch() -> None:
        while not stop.wait(0.5) and os.getppid() == parent:
            pass
        over.set()

    threading.Thread(target=watch, daemon=True).start()
    with opened_loop(request) as opened:
        opened.loop.run(over)


# --- what is watched ----------------------------------------------------------------------------------------------


@dataclass
class Site:
    """The cluster, and what was measured, by figure, s."""

    fleet: LocalFleet
    ledger: Ledger
    clock: SystemClock
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def note(self, figure: str, seconds: float) -> None:
        self.seconds.setdefault(figure, []).append(seconds)

    def until(self, reached: Callable[[], Any], what: str) -> Any:
        """Wait until something is so, and return it."""
        end = self.clock.now() + LIMIT
        while not (found := reached()):
            if self.clock.now() > end:
                raise RuntimeError(f"no {what} in {LIMIT:g} s")
            self.clock.sleep(0.01)
        return found

    def event(self, after: int, right: Callable[[Change], bool], what: str) -> float:
        """Return when an event above number ``after`` was written of which ``right`` holds, once there is one."""

        def look() -> float | None:
            return next((e.at for e in self.ledger.events(after, 1000) if right(e.change)), None)

        found: float = self.until(look, what)
        return found

    def whole(self, nodes: int) -> bool:
        """Tell whether all nodes are there, for the loop too, and none is about to leave."""
        state = self.ledger.state()
        up = [node.id for node in self.fleet.state.nodes if node.visible and node.deadline is None]
        return len(up) == nodes and set(up) == set(state.nodes) and not state.notices

    def rest(self, nodes: int) -> None:
        """Wait until all is as at the beginning, for a while."""
        quiet = self.clock.now()
        number = -1

        def still() -> bool:
            nonlocal quiet, number
            now = self.ledger.state().number
            if now != number or not self.whole(nodes):
                quiet, number = self.clock.now(), now
            return self.clock.now() - quiet > SETTLED

        with suppress(RuntimeError):  # an auction a minute is no reason to give up
            self.until(still, "rest")


class Holder:
    """An app that holds what it is granted and lets go of what is called back."""

    def __init__(self, site: Site, name: str, gpus: int) -> None:
        self.site, self.name = site, name
        self.known: float | None = None  # when it first knew of a lease
        spec = AppSpec(name, "training", gpus=gpus, min_gpus=gpus, max_gpus=gpus)
        self.agent = AppAgent(site.ledger, spec, site.clock, changed=self._changed)

    def _changed(self, standing: AllocationStatus) -> None:
        if standing.leases and self.known is None:
            self.known = self.site.clock.now()

    def __enter__(self) -> "Holder":
        self.agent.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.agent.__exit__(None, None, None)

    def node(self) -> str:
        """Return a node that it holds a GPU of, once it does."""

        def look() -> str | None:
            held = self.site.ledger.state().held(self.name)
            return next((lease.node for lease in held if lease.recalled is None), None)

        found: str = self.site.until(look, f"lease of {self.name}")
        return found


class Queries(NullQueryListener):
    """Runs the same query over and over, and remembers when it decided on which capacity."""

    def __init__(self, site: Site, request: QueryRequest) -> None:
        self.site, self.request = site, request
        self.seen: list[
            tuple[float, frozenset[str]]
        ] = []  # when it heard of a change, and what can be used then
        self.decided_at: list[float] = []
        self.running = 0.0  # since when a stage runs; 0: none does
        self.count = 0
        self.problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Queries":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(LIMIT)

    def stage_started(self, stage: Stage) -> None:
        self.running = self.running or self.site.clock.now()

    def capacity_changed(self, capacity: Capacity, change: str) -> None:
        self.seen.append((self.site.clock.now(), frozenset(node.id for node in capacity.usable)))

    def decided(self, decision: ReplanDecision) -> None:
        self.decided_at.append(self.site.clock.now())

    def ready(self, workers: Sequence[str]) -> bool:
        """Tell whether a query runs on these workers and will for a while."""
        if self.problem:
            raise RuntimeError(f"a query failed: {self.problem}")
        now = self.site.clock.now()
        usable = self.seen[-1][1] if self.seen else frozenset(workers)
        return bool(self.running) and now - self.running > 1.0 and set(workers) <= usable

    def without(self, node: str, since: float, count: int) -> float | None:
        """Return when a query has decided on a capacity without ``node`` since then; not a number: it had ended."""
        heard = next((at for at, usable in self.seen if at >= since and node not in usable), None)
        if heard is None:
            return math.nan if self.count != count else None
        done = next((at for at in self.decided_at if at >= heard), None)
        return math.nan if done is None and self.count != count else done

    def _run(self) -> None:
        from ebbflow.tasks.query.app import run_query_app
        from ebbflow.tasks.query.app_requests import query_spec

        try:
            with opened_engine(self.request, self.site.clock) as opened:
                while not self._stop.is_set():
                    self.seen.clear()
                    run_query_app(
                        self.request,
                        query_spec(self.request, f"query{self.count}"),
                        self.site.ledger,
                        PlainOrchestrator(self),
                        clock=self.site.clock,
                        opened=opened,
                        stop=self._stop,
                    )
                    self.running, self.count = 0.0, self.count + 1
        except Exception as error:
            if not self._stop.is_set():
                traceback.print_exc()
                self.problem = repr(error)


# --- what happens -------------------------------------------------------------------------------------------------


def arrivals(site: Site, times: int) -> None:
    for number in range(times):
        after = site.ledger.state().number
        began = site.clock.now()
        with Holder(site, f"arrival{number}", 1) as app:
            name = app.name
            granted = site.event(after, lambda c, name=name: _grants(c, name), "grant")  # type: ignore[misc]
            site.note("arrival", granted - began)
            known: float = site.until(lambda app=app: app.known, "standing")  # type: ignore[misc]
            site.note("arrival_known", known - began)
        site.event(after, lambda c: isinstance(c, Ended), "end of the lease")
        site.clock.sleep(0.37 * (1 + number % 3))  # so that looks are met at all their moments


def notices_gpu(site: Site, times: int, nodes: int) -> None:
    with Holder(site, "holder", 1) as app:
        for number in range(times):
            site.rest(nodes)
            node, after = app.node(), site.ledger.state().number
            site.clock.sleep(0.13 * (number % 5))
            began = site.clock.now()
            site.fleet.notice(node, NOTICE)
            called = site.event(after, lambda c: isinstance(c, Recalled), "recall")
            decided = site.event(after, lambda c: isinstance(c, Decided) and c.kind == "auction", "decision")
            site.note("notice_gpu", max(called, decided) - began)
            site.until(lambda node=node: site.fleet.state.node(node) is None, f"end of {node}")  # type: ignore[misc]


def deaths_gpu(site: Site, times: int, nodes: int) -> None:
    with Holder(site, "victim", 1) as app:
        for number in range(times):
            site.rest(nodes)
            node, after = app.node(), site.ledger.state().number
            site.clock.sleep(0.13 * (number % 5))
            began = site.clock.now()
            _die(site.fleet.state.there(node))
            lost = site.event(after, lambda c, node=node: _left(c, node), "loss")  # type: ignore[misc]
            ended = site.event(after, lambda c: isinstance(c, Ended), "end of the lease")
            site.note("death_gpu", max(lost, ended) - began)


def workers(site: Site, queries: Queries, times: int, nodes: int, *, dies: bool) -> None:
    done = tries = 0
    while done < times and tries < 3 * times:
        tries += 1
        site.rest(nodes)
        there = [node for node in site.fleet.state.nodes if node.pool == "sql" and node.visible]
        names = [node.id for node in there]
        site.until(lambda names=names: queries.ready(names), "query on all workers")  # type: ignore[misc]
        victim, after, count = there[tries % len(there)], site.ledger.state().number, queries.count
        began = site.clock.now()
        if dies:
            _die(victim)
        else:
            site.fleet.notice(victim.id, NOTICE)
        found = site.until(
            lambda id_=victim.id, began=began, count=count: queries.without(id_, began, count),  # type: ignore[misc]
            "new plan",
        )
        if not math.isnan(found):
            site.note("death_query" if dies else "notice_query", found - began)
            done += 1
        if dies:
            lost = site.event(after, lambda c, id_=victim.id: _left(c, id_), "loss")  # type: ignore[misc]
            site.note("death_worker", lost - began)
        site.until(lambda id_=victim.id: site.fleet.state.node(id_) is None, f"end of {victim.id}")  # type: ignore[misc]


def _die(node: LocalNode) -> None:
    """Kill the process that stands for a machine, from outside: its fleet is to find out."""
    assert node.process is not None
    os.kill(node.process.pid, signal.SIGKILL)


def _grants(change: Change, app: str) -> bool:
    return isinstance(change, Granted) and any(lease.app == app for lease in change.leases)


def _left(change: Change, node: str) -> bool:
    return isinstance(change, CapacityChanged) and node in change.left


# --- all of it ----------------------------------------------------------------------------------------------------


def tables(folder: Path, rows: int) -> None:
    """Write the tables of the query."""
    import duckdb

    connection = duckdb.connect()
    for name, count, columns in (
        ("a", rows, "range AS k, range % 1000 AS g, random() AS v"),
        ("b", rows, "range AS k, random() AS v"),
        ("c", 1000, "range AS g, 'group ' || range AS name"),
    ):
        path = folder / f"{name}.parquet"
        connection.execute(f"COPY (SELECT {columns} FROM range({count})) TO '{path}' (ROW_GROUP_SIZE 100000)")
    connection.close()


def measure(times: int, rows: int, *, query: bool) -> dict[str, list[float]]:
    """Return all times of each figure, s."""
    spawn = multiprocessing.get_context("spawn")
    pools = [LocalPool("gpu", "gpu", slots=2, initial=2, max_nodes=4)]
    if query:
        pools.append(LocalPool("sql", "spark", cores=1, memory=1.0, initial=2, max_nodes=4))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["EBBFLOW_HOME"] = str(folder / "home")
        limits = folder / "limits.toml"
        limits.write_text('[scaling]\nenabled = false\n[loop]\ntermination_grace = "3s"\ndrain_lead = "2s"\n')
        clock = SystemClock()
        fleet = stack.enter_context(LocalFleet.start(pools, "latency", gpus=(), wait=240.0, clock=clock))
        ledger = stack.enter_context(Ledger.open(str(folder / "ledger.db"), cluster="latency", clock=clock))
        stop = spawn.Event()
        loop = spawn.Process(
            target=lead, args=(str(folder / "ledger.db"), "latency", str(limits), stop), daemon=True
        )
        loop.start()
        stack.callback(loop.join, 60.0)
        stack.callback(stop.set)
        site, nodes = Site(fleet, ledger, clock), sum(pool.start for pool in pools)
        site.until(lambda: site.whole(nodes), "nodes in the ledger")
        for name, work in (("arrivals", arrivals),):
            work(site, times)
            print(name, _said(site), flush=True)
        for name, on_gpus in (("notices", notices_gpu), ("deaths", deaths_gpu)):
            on_gpus(site, times, nodes)
            print(name, "of GPU nodes", _said(site), flush=True)
        if query:
            tables(folder, rows)
            request = QueryRequest(
                SQL,
                tables=str(folder),
                master=fleet.spark_master,
                store=str(folder / "store"),
                reuse=False,
                executor_memory="512m",
                conf={"spark.ui.showConsoleProgress": "false"},
            )
            with Queries(site, request) as queries:
                for dies in (False, True):
                    workers(site, queries, times, nodes, dies=dies)
                    print("deaths" if dies else "notices", "of workers", _said(site), flush=True)
        problems = ledger.verify()
        if problems:
            raise RuntimeError(f"the ledger does not verify: {problems[:3]}")
        return site.seconds


def _said(site: Site) -> str:
    return ", ".join(f"{name} {max(values):.2f} s at most" for name, values in site.seconds.items())


def summary(values: Sequence[float]) -> dict[str, float | int]:
    shares = (("p50", 0.5), ("p95", 0.95), ("worst", 1.0))
    found = {name: round(percentile(values, share) or 0.0, 3) for name, share in shares}
    return {"count": len(values), **found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rows", type=int, default=6_000_000, help="of the query's large tables")
    parser.add_argument("--without-query", action="store_true", help="GPU nodes alone; needs no Java")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    given.out.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    seconds = measure(given.repeats, given.rows, query=not given.without_query)
    figures = {
        name: {"what": what, "bar_s": bar if math.isfinite(bar) else None, **summary(seconds[name])}
        for name, (what, bar) in BARS.items()
        if name in seconds
    }
    holds = {
        f"{one['what']}: under {one['bar_s']:g} s": one["p95"] < one["bar_s"]
        for one in figures.values()
        if one["bar_s"] is not None
    }
    found: dict[str, Any] = {
        "repeats": given.repeats,
        "rows": given.rows,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load": round(load, 1),
        "figures": figures,
        "seconds": {name: [round(one, 3) for one in values] for name, values in seconds.items()},
        "holds": holds,
    }
    write_text(given.out / "capacity_latency.json", json.dumps(found, indent=1) + "\n")
    shares = {"median": "p50", "95 %": "p95", "worst": "worst"}
    series = {name: [float(one[key]) for one in figures.values()] for name, key in shares.items()}
    picture = bars_svg("From what happens to the answer, seconds", list(figures), series)
    write_text(given.out / "capacity_latency.svg", picture)
    print(json.dumps({k: v for k, v in found.items() if k != "seconds"}, indent=1), flush=True)
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
