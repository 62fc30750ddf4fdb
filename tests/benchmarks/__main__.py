"""All benchmarks, one after another: ``python -m tests.benchmarks`` (``make bench``).

Needs the TPC-H tables of ``ebbflow demo`` for those on TPC-H; they are generated when missing.
"""

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from ebbflow.flows.setup.data import tpch_tables
from ebbflow.infra.storage.files import home

OUT = "docs/benchmarks"


def main() -> None:
    """Run each benchmark in a process of its own."""
    tables = str(tpch_tables(1.0, home() / "tpch" / "sf1", Console()))
    commands = [
        ["tests.benchmarks.planning", "--out", OUT],
        ["tests.benchmarks.plans", "--tables", tables, "--out", OUT],
        ["tests.benchmarks.auction", "--out", OUT],
        ["tests.benchmarks.training_simulator", "--out", OUT],
        ["tests.benchmarks.pollux", "--out", OUT],
        ["tests.benchmarks.policies", "--out", OUT],
        ["tests.benchmarks.spot_recovery", "--out", OUT],
        ["tests.benchmarks.training_recovery", "--out", OUT],
        ["tests.benchmarks.training_pauses", "--out", OUT],
        ["tests.benchmarks.training_chaos", "--out", OUT],
        ["tests.benchmarks.training_checkpoints", "--out", OUT],
        ["tests.benchmarks.training_overhead", "--out", OUT],
        ["tests.benchmarks.elastic_executors", "--out", OUT],
        ["tests.benchmarks.flipped_bytes", "--out", OUT],
        ["tests.benchmarks.fault_matrix", "--out", OUT],
        ["tests.benchmarks.ledger", "--out", OUT],
        ["tests.benchmarks.fleet_chaos", "--seeds", "200", "--out", OUT],
        ["tests.benchmarks.capacity_load", "--out", OUT],
        ["tests.benchmarks.capacity_latency", "--out", OUT],
        ["tests.benchmarks.metrics_cost", "--out", OUT],
        ["tests.benchmarks.packing", "--out", OUT],
        ["tests.benchmarks.tpch", "--tables", tables, "--engine", "duckdb", "--rounds", "5", "--out", OUT],
        ["tests.benchmarks.tpch", "--tables", tables, "--engine", "spark", "--out", OUT],
        ["tests.benchmarks.native_stages", "--tables", tables, "--out", OUT],
        ["tests.benchmarks.query_start", "--out", OUT],
        ["tests.benchmarks.elastic_training", "--out", OUT],
        ["tests.benchmarks.coverage"],
        ["tests.benchmarks.document"],
    ]
    Path(OUT).mkdir(parents=True, exist_ok=True)
    for command in commands:
        print("$ python -m", " ".join(command), flush=True)
        subprocess.run([sys.executable, "-m", *command], check=True, timeout=4 * 3600)


if __name__ == "__main__":
    main()
