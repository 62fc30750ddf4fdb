"""The pipeline of a chaotic run on emulated AWS, and what must hold of its results."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
import pyarrow.parquet as pq

from ebbflow.infra.elastic.apps.kmeans import KMeans
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.storage.files import write_text
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.tasks.pipeline.outcome import PipelineOutcome
from tests.chaos import invariants
from tests.chaos.scene import MARK
from tests.elastic_results import undisturbed

if TYPE_CHECKING:
    from tests.aws.cluster import Cluster

ROWS, EPOCHS, BATCH, TRIALS = 1024, 4, 32, 3
ITERATIONS, EXECUTORS, GROUPS = 250, 6, 3
STEPS = EPOCHS * ROWS // 2 // BATCH
SCRIPT = """
import argparse, time
import pyarrow.parquet, torch
from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.training import ElasticRun

parser = argparse.ArgumentParser()
parser.add_argument("--data")
parser.add_argument("--lr", type=float, default=0.3)
parser.add_argument("--pause", type=float, default=0.0)
given = parser.parse_args()
files, path = resolve(given.data)
table = pyarrow.parquet.read_table(path, filesystem=files).sort_by("x")
x = torch.tensor(table["x"].to_pylist(), dtype=torch.float32).unsqueeze(1)
y = torch.tensor(table["y"].to_pylist(), dtype=torch.float32).unsqueeze(1)
with ElasticRun.start(seed=1) as run:
    model, _ = run.prepare(
        torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=given.lr), batch_size=BATCH
    )
    for _ in run.epochs(EPOCHS):
        for inputs, wanted in run.batches((x, y)):
            run.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
            run.step()
            time.sleep(given.pause)
        run.report(slope=float(next(model.parameters()).detach()))
print("slope", float(next(model.parameters()).detach()))
"""


def pipeline(folder: Path, lab: "Cluster", spark: bool) -> dict[str, Any]:
    """Return the file's content."""
    aws = lab.section(folder / "ledger.db") | ({"spark_pools": ["etl"]} if spark else {})
    data = ["--data", "${queries.pairs.file}"]
    trains = {"checkpoint_interval": "1s", "termination_grace": "5s", "adaptive": False, "attempts": 20}
    return {
        "name": "shop",
        "cluster": {"aws": aws},
        "budget": 500,
        "queries": {
            "pairs": {
                "sql": "SELECT x, twice AS y FROM pairs WHERE x < 1",
                "tables": "tables",
                "attempts": 20,
                "engine": "spark" if spark else "duckdb",
            }
        },
        "trainings": {
            "fit": {
                **trains,
                "script": "fit.py",
                "arguments": [*data, "--pause", "0.08"],
                "preflight": "never",
                "retry_backoff": "1s",
            }
        },
        "tunings": {
            "rates": {
                **trains,
                "script": "fit.py",
                "arguments": [*data, "--pause", "0.02"],
                "space": {"lr": {"log": [0.05, 0.5]}},
                "metric": "slope",
                "maximize": True,
                "trials": TRIALS,
                "parallel": 1,
                "epochs": EPOCHS,
                "sampler": "random",
                "seed": 5,
                "pruner": "none",
            }
        },
        "elastic_jobs": {
            "groups": {
                "app": "kmeans",
                "input": "${queries.pairs.file}",
                "classes": GROUPS,
                "executors": EXECUTORS,
                "iterations": ITERATIONS,
                "max_workers": 2,
                "termination_grace": "5s",
                "attempts": 20,
            }
        },
        "loop": {
            "lease_duration": "20s",
            "auction_interval": "2s",
            "termination_grace": "5s",
            "drain_lead": "4s",
            "scaling": {
                "provision_time": "5s",
                "scale_out_after": "500ms",
                "scale_in_idle": "30s",
                "cooldown": "500ms",
            },
        },
        "quotas": {"dollars_per_hour": 50},
        "store": str(folder / "store"),
    }


def check(
    outcome: PipelineOutcome,
    lab: "Cluster",
    folder: Path,
    data: Path,
    cache: Path,
    wrong: Callable[[str], object],
) -> dict[str, int]:
    """Hold the results to undisturbed ones, and look for what is left; return what was counted."""
    pairs, fit, rates, groups = (outcome.step(name) for name in ("pairs", "fit", "rates", "groups"))
    place = StorageLocation(pairs.results["path"])
    rows = pq.read_table(place.path(""), filesystem=place.fs()).sort_by("x").to_pydict()
    if rows != {"x": [n / 512 for n in range(512)], "y": [n / 256 for n in range(512)]}:
        wrong(f"the query's result has {len(rows.get('x', ()))} rows that are not what they should be")
    if fit.details["steps"] != STEPS:
        wrong(f"the training has done {fit.details['steps']} steps of {STEPS}")
    plain, got = slope(data, 0.3, cache), float(fit.results["metrics.slope"])
    if abs(got - plain) > 1e-6:
        wrong(f"the training has come to {got}, undisturbed to {plain}")
    study = optuna.load_study(study_name="one.rates", storage=f"sqlite:///{folder / 'ledger.db'}")
    whole = [one for one in study.trials if one.state.name == "COMPLETE"]
    if len(whole) != TRIALS or rates.details["trials"] != TRIALS:
        wrong(f"of {TRIALS} trials {len(whole)} are complete")
    for one in whole:
        expected = slope(data, one.params["lr"], cache)
        if one.value is None or abs(one.value - expected) > 1e-6:
            wrong(f"trial {one.number} has come to {one.value}, undisturbed to {expected}")
    found = StorageLocation(groups.results["directory"])
    (data / "groups.npz").write_bytes(found.read("input.npz"))
    app = KMeans(str(data / "groups.npz"), GROUPS, EXECUTORS, ITERATIONS)
    (data / "centres.npz").write_bytes(found.read("parameters.npz"))
    with np.load(data / "centres.npz") as result:
        if not np.array_equal(result["centres"], app.centres(undisturbed(app, ITERATIONS))):
            wrong("the elastic job's centres are not those of an undisturbed run")
    with Ledger.open(str(folder / "ledger.db"), cluster="lab", create=False) as ledger:
        if problems := ledger.verify():
            wrong(f"the ledger: {problems[0]}")
        state = ledger.state()
        if state.leases:
            wrong(f"{len(state.leases)} leases are left")
        if late := {app.spec.id: app.phase for app in state.apps.values() if app.phase != "finished"}:
            wrong(f"apps that have not finished: {late}")
        events = invariants.all_events(ledger)
        for sentence in invariants.double_bookings(events):
            wrong(sentence)
    for pool in lab.settings.pools:
        if nodes := lab.nodes(pool):
            wrong(f"instances of {pool} are left: {', '.join(one['id'] for one in nodes)}")
    if errors := lab.account.state()["errors"]:
        wrong(f"the emulator: {errors[0]}")
    return {"leases": sum(type(event.change).__name__ == "Granted" for event in events)}


def slope(data: Path, lr: float, cache: Path) -> float:
    """Return what a training comes to that nothing disturbs, in a process of its own without a launcher.

    It is the same in all runs, which keep it in ``cache``.
    """
    known = json.loads((cache / "slopes.json").read_text()) if (cache / "slopes.json").exists() else {}
    if repr(lr) not in known:
        done = subprocess.run(
            [sys.executable, str(data / "fit.py"), "--data", str(data / "result.parquet"), "--lr", repr(lr)],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            env={k: v for k, v in os.environ.items() if k != MARK} | {"OMP_NUM_THREADS": "1"},
            cwd=data,
        )
        known[repr(lr)] = float(done.stdout.split("slope")[-1])
        cache.mkdir(parents=True, exist_ok=True)
        write_text(cache / "slopes.json", json.dumps(known))
    return float(known[repr(lr)])
