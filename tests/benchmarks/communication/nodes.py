"""Trainings by the plans of all systems on four nodes with limited links, real payloads, in turns.

    python -m tests.benchmarks.communication.nodes --out docs/benchmarks

Needs root (network namespaces). Two cases: the recommendation model (DLRM) with two channels, each with links of
its own, and a dense model with one. Two cores cannot compute for four nodes beside what links cost them, so most
of a layer's time is a device's, which its process waits for (``nodes_rank.on_device``); gradients are real.
Compute of an iteration is measured first, on links of 1 Gbit/s; the rate of the links is then what makes sending
what an iteration sends take 0.5, 1 and 2 times as long, and 0.125 and 8 times as long to see where nothing is to
be gained. Each system's plan runs in the same executor: blocks of iterations take turns, and plain DDP has a turn
with each of four bucket sizes, of which the best counts. The cost table is measured on single collectives before,
so the iteration that it predicts is not among what it was fitted to. Half an hour for both cases.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ebbflow.infra.machine import processes
from ebbflow.infra.machine.network import links, registry
from ebbflow.infra.machine.network.plan import node_interface, parse_rates
from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.drawing.charts import bars_svg
from tests.benchmarks.communication.nodes_rank import Assignment

RANKS = 4
CASES = {"dlrm": 2, "dense": 1}  # model: channels
RATIOS = (0.5, 1.0, 2.0)  # seconds of sending over seconds of compute, whose geometric mean counts
AROUND = (0.125, 8.0)
PROFILE_RATE = 1e9  # bit/s while compute is measured
LIMIT = 900.0  # s for one set of ranks
ROOT = Path(__file__).parents[3]


def ranks(rate: float, channels: int, folder: Path, **more: Any) -> dict[str, Any]:
    """Run four ranks on nodes with links of ``rate`` bit/s, and return what the first one says."""
    uid = os.urandom(6).hex()
    plan = registry.reserve(uid, str(folder), parse_rates(",".join([f"{round(rate / 1e3)}kbit"] * channels)))
    children = []
    try:
        links.make_bridges(plan)
        for number in range(1, RANKS + 1):
            links.add_node(plan, f"gpu-{number}", number)
        for rank in range(RANKS):
            given = Assignment(
                rank, RANKS, plan.links[0].address(1), 29400, interfaces=tuple(map(node_interface, range(channels))),
                **more,
            )  # fmt: skip
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": node_interface(0), "OMP_NUM_THREADS": "1"}
            children.append(
                processes.spawn(
                    [sys.executable, "-m", "tests.benchmarks.communication.nodes_rank", json.dumps(asdict(given))],
                    environment, f"{uid}/{rank}", folder / f"rank-{rank}.log", ROOT,
                    namespace=plan.namespace(f"gpu-{rank + 1}"),
                )
            )  # fmt: skip
        end = time.monotonic() + LIMIT
        for child in children:
            child.wait(max(1.0, end - time.monotonic()))
    finally:
        for child in children:
            child.kill()
            child.wait()
        registry.release(plan.tag)
    text = (folder / "rank-0.log").read_text().strip().splitlines()
    if any(child.returncode for child in children):
        raise SystemExit("\n".join([f"a rank failed; logs are in {folder}", *text[-20:]]))
    found: dict[str, Any] = json.loads(text[-1])
    return found


def case(model: str, channels: int, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure a model at all ratios."""
    more = {
        "model": model, "block": given.block, "search_seconds": 10.0, "measure_seconds": given.measure_seconds,
    }  # fmt: skip
    alone = ranks(PROFILE_RATE, channels, _fresh(folder), rounds=0, **more)
    print(f"{model}: compute {alone['compute_s']:.3f} s, {alone['sent_bytes'] / 1e6:.2f} MB sent", flush=True)
    rows = []
    for ratio in given.ratios:
        rate = alone["sent_bytes"] * 8 / (ratio * alone["compute_s"])
        found = ranks(rate, channels, _fresh(folder), rounds=given.rounds, **more)
        rows.append(_row(ratio, rate, found))
        print(
            json.dumps({key: rows[-1][key] for key in ("ratio", "mbit", "median_s", "gain", "load")}),
            flush=True,
        )
    counted = [row for row in rows if row["ratio"] in RATIOS]
    gains = {
        name: round(statistics.geometric_mean(row["gain"][name] for row in counted), 3)
        for name in (counted[0]["gain"] if counted else ())
    }
    return {
        "model": model,
        "channels": channels,
        "compute_s": alone["compute_s"],
        "rows": rows,
        "gains": gains,
    }


def _row(ratio: float, rate: float, found: Mapping[str, Any]) -> dict[str, Any]:
    median = {name: statistics.median(some) for name, some in found["seconds"].items()}
    best = min((name for name in median if name.startswith("DDP")), key=lambda name: median[name])
    ours = median["Syndicate"]
    others = {name: value for name, value in median.items() if not name.startswith("DDP")}
    errors = [abs(found["predicted_s"][name] / value - 1) for name, value in others.items()]
    return {
        "ratio": ratio,
        "mbit": round(rate / 1e6, 2),
        "median_s": {name: round(value, 4) for name, value in median.items()},
        "quartiles_s": {
            name: [round(q, 4) for q in statistics.quantiles(some, n=4)[::2]]
            for name, some in found["seconds"].items()
        },
        "predicted_s": {name: round(value, 4) for name, value in found["predicted_s"].items()},
        "prediction_error": round(statistics.median(errors), 3),
        "best_ddp": best,
        "gain": {name: round(value / ours, 3) for name, value in {**others, "DDP": median[best]}.items()},
        "choices": found["choices"],
        "contention": round(found["contention"], 2),
        "load": round(os.getloadavg()[0], 1),
    }


def _fresh(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


def picture(result: Mapping[str, Any]) -> str:
    """Draw iteration times over Syndicate's, a group of bars for each case and ratio."""
    groups = [f"{one['model']}, {row['ratio']:g}" for one in result["cases"] for row in one["rows"]]
    names = list(result["cases"][0]["rows"][0]["gain"])
    series = {name: [row["gain"][name] for one in result["cases"] for row in one["rows"]] for name in names}
    return bars_svg("Iteration time over that of Syndicate's plan", groups, series, unit="")


def main(words: Sequence[str] | None = None) -> None:
    """Run and write ``communication-nodes.json`` and ``.svg`` into ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="dlrm,dense", help="by commas")
    parser.add_argument("--ratios", default=",".join(f"{one:g}" for one in sorted((*RATIOS, *AROUND))))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system")
    parser.add_argument("--block", type=int, default=5, help="iterations of a turn")
    parser.add_argument("--measure-seconds", type=float, default=30.0, help="bound of the cost table")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    given = parser.parse_args(words)
    given.ratios = tuple(map(float, given.ratios.split(",")))
    links.check()
    result: dict[str, Any] = {"benchmark": "communication-nodes", "ranks": RANKS, "cases": []}
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as folder:
        for model in given.models.split(","):
            result["cases"].append(case(model, CASES[model], given, Path(folder)))
            write_text(given.out / "communication-nodes.json", json.dumps(result, indent=1) + "\n")
            write_text(given.out / "communication-nodes.svg", picture(result))


if __name__ == "__main__":
    main()
