"""How long an auction of GPUs takes and how far from optimal it can be, by GPUs, bidders and fragmentation.

Run from the repository root: ``python -m tests.benchmarks.auction --out DIR``. Writes ``auction.json`` and
``auction.svg`` and prints a table; exits with 1 when a figure breaks its bound. Solving has one thread and waits for
nothing, so its processor time is what is measured. A gap is proven: by how much the bidders' geometric-mean rho may
exceed the best possible.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ebbflow.infra.storage.files import write_text
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.scheduling.auction.auction import AuctionOptions, auction
from ebbflow.planners.scheduling.auction.payments import kept_fractions
from ebbflow.planners.scheduling.auction.problem import Problem
from ebbflow.planners.scheduling.auction.relaxation import relax
from ebbflow.planners.scheduling.auction.search import solve_search
from ebbflow.planners.scheduling.bids import BidTable, Offer, prepare_bid
from ebbflow.planners.scheduling.finish_time import Job, SingleJob
from ebbflow.planners.scheduling.locality import Slowdown
from ebbflow.tasks.drawing.charts import bars_svg

MACHINE = 8  # GPUs
NETWORK = Slowdown(1.0, 1.0, 1.29, 1.6)  # VGG-like
COMPUTE = Slowdown(1.0, 1.0, 1.0, 1.02)  # Inception-like
SEEDS = 5


@dataclass(frozen=True)
class Case:
    """A size and a state of the cluster. ``seconds`` and ``gap`` bound the medians where something must hold."""

    name: str
    gpus: int  # free ones
    bidders: int
    largest: int  # demand; demands are powers of two up to it
    free: str = "uniform"  # free GPUs of a machine: whole, uniform in 1..8, or mostly few
    rack: int = 16  # machines
    gangs: bool = False  # half the apps take all or nothing
    held: float = 0.0  # share of apps with GPUs under a lease that goes on
    mixed: bool = False  # every app its own slowdowns instead of two kinds
    seconds: float = float("inf")
    gap: float = float("inf")


CASES = (
    Case("64 GPUs, 20 bidders", 64, 20, 16),
    Case("256 GPUs, 60 bidders", 256, 60, 32),
    Case("1,024 GPUs, 200 bidders", 1024, 200, 32, seconds=1.0, gap=0.01),
    Case("4,096 GPUs, 300 bidders", 4096, 300, 128),
    Case("10,240 GPUs, 600 bidders", 10240, 600, 128, seconds=5.0, gap=0.02),
    Case("1,024 / 200, whole machines, gangs", 1024, 200, 32, "whole", 16, True, seconds=1.0, gap=0.01),
    Case("1,024 / 200, few free a machine", 1024, 200, 32, "few", 16, seconds=1.0, gap=0.01),
    Case("1,024 / 200, few free, racks of 8", 1024, 200, 32, "few", 8, seconds=1.0, gap=0.01),
    Case("1,024 / 200, few free, racks of 4", 1024, 200, 32, "few", 4, seconds=1.0, gap=0.01),
    Case("10,240 / 600, whole machines, gangs", 10240, 600, 128, "whole", 16, True, seconds=5.0, gap=0.02),
    Case("10,240 / 600, few free a machine", 10240, 600, 128, "few", 16, seconds=5.0, gap=0.02),
    Case("10,240 / 600, few free, racks of 8", 10240, 600, 128, "few", 8, seconds=5.0, gap=0.02),
    Case("10,240 / 600, few free, racks of 4", 10240, 600, 128, "few", 4, seconds=5.0, gap=0.02),
    Case("1,024 / 200, racks of 4, 40 % hold, mixed", 1024, 200, 32, "few", 4, False, 0.4, True, 1.0, 0.01),
    Case(
        "10,240 / 600, racks of 4, 40 % hold, mixed", 10240, 600, 128, "few", 4, False, 0.4, True, 5.0, 0.02
    ),
)


@dataclass(frozen=True)
class Figure:
    """Medians over seeds; the worst gap beside."""

    case: Case
    rows: int  # of all bid tables
    tables_s: float  # making the bid tables
    auction_s: float  # relaxation, search, proof and hidden payments
    payments_s: float  # the payments of it
    gap: float
    worst_gap: float
    kept: float  # mean kept fraction of winners
    forfeited: float  # share of the offer

    @property
    def met(self) -> bool:
        return self.auction_s <= self.case.seconds and self.gap <= self.case.gap


def offered(case: Case, rng: np.random.Generator) -> Offer:
    """Return machines with free GPUs until there are as many as the case says."""
    few = 1.0 / np.arange(1, MACHINE + 1) ** 1.5
    free: list[int] = []
    while sum(free) < case.gpus:
        one = MACHINE
        if case.free == "uniform":
            one = int(rng.integers(1, MACHINE + 1))
        elif case.free == "few":
            one = int(rng.choice(MACHINE, p=few / few.sum())) + 1
        free.append(min(one, case.gpus - sum(free)))
    count = len(free)
    return Offer(tuple(f"m{i}" for i in range(count)), np.array(free), np.arange(count) // case.rack)


def tables(case: Case, offer: Offer, rng: np.random.Generator) -> tuple[list[BidTable], dict[str, int]]:
    """Return bids of apps somewhere within their lives, half network- and half compute-intensive, and their gangs."""
    found, gangs = [], {}
    demands = [2**k for k in range(case.largest.bit_length())]
    for number in range(case.bidders):
        demand = int(rng.choice(demands))
        total = float(rng.lognormal(np.log(3.75 * 3600.0), 1.4)) * demand  # GPU-seconds, one a second
        left = total * float(rng.uniform(0.05, 1.0))
        rack = float(rng.uniform(1.0, 1.6))
        own = Slowdown(1.0, 1.0, rack, rack * float(rng.uniform(1.0, 1.6)))
        job = Job(left, 1.0, demand, own if case.mixed else NETWORK if rng.random() < 0.5 else COMPUTE)
        app = SingleJob(cluster_gpus=offer.total, n_avg=case.bidders, job=job, iterations_total=total)
        now = (total - left) / demand * float(rng.uniform(1.0, 4.0))
        held = ()
        if demand > 1 and rng.random() < case.held:
            held = ((offer.nodes[int(rng.integers(len(offer.nodes)))], int(rng.integers(1, min(demand, 4)))),)
        least = demand if case.gangs and rng.random() < 0.5 else 1
        table = prepare_bid(
            f"a{number}", app, offer, Capacity(0, ()), now, max_gpus=demand, min_gpus=least, held=held
        )
        if table is not None:
            found.append(table)
            gangs[table.app] = least
    return found, gangs


def measure(case: Case, seeds: int) -> Figure:
    """Solve the case ``seeds`` times, each another one."""
    taken, gaps, kept, forfeited, rows = [], [], [], [], []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        offer = offered(case, rng)
        began = time.process_time()
        bids, gangs = tables(case, offer, rng)
        made = time.process_time()
        options = AuctionOptions(solver="search")
        outcome = auction(offer, bids, options, least=gangs, rng=np.random.default_rng(seed))
        solved = time.process_time()
        problem = Problem.of(offer, bids)
        relaxation = relax(problem)
        some = solve_search(problem, relaxation=relaxation, repairs=0)
        unpaid = time.process_time()
        kept_fractions(problem, some, "prices", relaxation)
        taken.append((made - began, solved - made, time.process_time() - unpaid))
        gaps.append(outcome.gap)
        kept.append(statistics.mean(c for app, c in outcome.kept.items() if outcome.won[app]))
        forfeited.append(outcome.forfeited / offer.total)
        rows.append(sum(len(t.gpus) for t in bids))
    medians = (statistics.median(column) for column in zip(*taken, strict=True))
    return Figure(
        case, int(statistics.median(rows)), *medians, statistics.median(gaps), max(gaps),
        statistics.median(kept), statistics.median(forfeited),
    )  # fmt: skip


def picture(figures: Sequence[Figure]) -> str:
    """Draw seconds by case."""
    groups = [f.case.name for f in figures]
    series = {
        "bid tables": [f.tables_s for f in figures],
        "auction with payments": [f.auction_s for f in figures],
    }
    return bars_svg("An auction, processor seconds (median)", groups, series, unit="s")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    figures = []
    print(
        f"{'case':43} {'rows':>7} {'tables s':>9} {'auction s':>9} {'payments s':>10} {'gap':>7} {'worst':>7}"
    )
    for case in CASES:
        if given.only not in case.name:
            continue
        figure = measure(case, given.seeds)
        figures.append(figure)
        print(
            f"{case.name:43} {figure.rows:7} {figure.tables_s:9.3f} {figure.auction_s:9.3f} "
            f"{figure.payments_s:10.3f} {figure.gap:7.2%} {figure.worst_gap:7.2%}"
            f"{'' if figure.met else '  over its bound'}",
            flush=True,
        )
    found = {"seeds": given.seeds, "figures": [{**asdict(f), "case": _bounds(f.case)} for f in figures]}
    write_text(given.out / "auction.json", json.dumps(found, indent=1) + "\n")
    write_text(given.out / "auction.svg", picture(figures))
    return 0 if all(f.met for f in figures) else 1


def _bounds(case: Case) -> dict[str, object]:
    """Return the case with "none" for a missing bound, which JSON has no number for."""
    plain = asdict(case)
    return {key: None if value == float("inf") else value for key, value in plain.items()}


if __name__ == "__main__":
    sys.exit(main())
