"""Training on spot traces: our recovery beside two published ways to recover, in the public engine.

Run from the repository root: ``python -m tests.benchmarks.spot_recovery --out DIR``. Writes ``spot_recovery.json``
and ``spot_recovery.svg``: the share of effective training of every model on every trace, and how it changes with the
costs of recovery. Simulated, deterministic, half a minute of processor time.
"""

import argparse
import json
from pathlib import Path

from ebbflow.infra.simulation.traces.rows import read_spot_rows
from ebbflow.planners.training.saving.checkpointing import HazardAware
from ebbflow.tasks.drawing.charts import bars_svg
from tests.benchmarks.spot.models import MODELS
from tests.benchmarks.spot.sensitivity import replica_rows, sensitivity
from tests.benchmarks.spot.service import service_rows
from tests.benchmarks.spot.table import recovery_table

DATA = Path(__file__).parent.parent / "fixtures" / "training" / "oobleck"
TRACES = ("6h", "1h", "10m", "g4dn-trace")
STRANGE = (
    "GPT-3 6.7B",
    "g4dn-trace",
)  # the published figures of this row are artefacts of the engine's book-keeping


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    traces = {name: read_spot_rows(DATA / f"{name}.csv") for name in TRACES}
    models = list(MODELS.values())
    rows = [*recovery_table(models, traces, [HazardAware()]), *replica_rows(models, traces)]
    rows += service_rows(models, traces)
    rows = [row for row in rows if (row["model"], row["trace"]) != STRANGE]
    found = {"rows": rows, "sensitivity": sensitivity(models, traces, STRANGE)}
    (given.out / "spot_recovery.json").write_text(json.dumps(found, indent=1) + "\n")
    cases = list(dict.fromkeys((row["model"], row["trace"]) for row in rows))
    ways = list(dict.fromkeys(str(row["recovery"]) for row in rows))
    shares = {(row["model"], row["trace"], row["recovery"]): float(row["share"]) for row in rows}
    drawn_ways = [way for way in ways if all((*case, way) in shares for case in cases)]
    drawn = bars_svg(
        "Share of effective training",
        [f"{model}, {trace}" for model, trace in cases],
        {way: [shares[*case, way] for case in cases] for way in drawn_ways},
        unit="",
    )
    (given.out / "spot_recovery.svg").write_text(drawn)
    for model, trace in cases:
        told = {way: shares[model, trace, way] for way in ways if (model, trace, way) in shares}
        print(f"{model:14} {trace:11}", *(f"{way} {share:.4f}" for way, share in told.items()))
    for row in found["sensitivity"]:
        print(row)


if __name__ == "__main__":
    main()
