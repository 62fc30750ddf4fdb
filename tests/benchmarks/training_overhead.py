"""What measuring and tuning cost a training, and how right they are: step times, noise scale, goodput.

Run from the repository root: ``python -m tests.benchmarks.training_overhead --out DIR [--device cuda]``. Writes
``training_overhead.json`` (``training_overhead_cuda.json``) and its picture, and ``training_goodput.svg``. On a
processor there are two processes that speak gloo, and one where that is another measurement; on a GPU there is one.
Three quarters of an hour on two quiet cores.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from ebbflow.tasks.drawing.charts import bars_svg, lines_svg
from tests.benchmarks.ranks import device_name, together
from tests.benchmarks.training_goodput import goodput
from tests.benchmarks.training_noise import noise
from tests.benchmarks.training_steps import CASES, CUDA_CASES, overhead

LOCAL = {
    "transformer": 8,
    "perceptron": 32,
    "large transformer": 16,
}  # examples a process; those of the transformer are of 64 tokens
PARTS = ("steps", "noise", "goodput")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--rounds",
        type=int,
        default=40,
        help="pairs of blocks of steps, over several launches",
    )
    parser.add_argument("--seeds", type=int, default=3, help="of the trainings for goodput")
    parser.add_argument("--parts", default=",".join(PARTS), help="which to measure; the others are kept")
    parser.add_argument(
        "--cases", default="", help="of steps, those whose name begins so; the others are kept"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    suffix = "" if given.device == "cpu" else f"_{given.device}"
    path = given.out / f"training_overhead{suffix}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found |= {"device": device_name(given.device), "torch": torch.__version__}
    worlds = (2, 1) if given.device == "cpu" else (1,)
    for part in given.parts.split(","):
        if part == "steps":
            local = {"cpu": 1, "cuda": 8}[given.device]
            rows = {row["case"]: row for row in found.get(part, [])}
            cases = CASES if given.device == "cpu" else CUDA_CASES
            for case in (case for case in cases if case.startswith(given.cases)):
                each = local * LOCAL[case.split(",")[0]]
                rows[case] = overhead(given.device, case, given.rounds, worlds[0], each)
            found[part] = [rows[case] for case in cases if case in rows]
        elif part == "noise":
            found[part] = [row for world in worlds for row in together(noise, world, given.device)]
        elif part == "goodput":
            found[part] = together(goodput, worlds[0], given.device, 512, given.seeds)
        else:
            parser.error(f"--parts: one of {', '.join(PARTS)}; got {part!r}")
        found[f"{part}_load"] = os.getloadavg()[0]
        path.write_text(json.dumps(found, indent=1) + "\n")
        _show(part, found[part])
    _draw(given.out, suffix, found)
    print("largest deviations:", ", ".join(f"{part} {value:.1%}" for part, value in largest(found).items()))


def _show(part: str, found: Any) -> None:
    if part == "steps":
        for row in found:
            print(
                f"{row['case']:22} {row['plain_ms']:8.1f} ms {row['elastic_ms']:8.1f} ms  x {row['ratio']:.3f}"
            )
    elif part == "noise":
        for row in found:
            print(f"{row['problem']:28} {row['samples']:15} {row['optimiser']:6} x {row['ratio']:.3f}")
    else:
        for row in found["rows"]:
            print(
                f"{row['batch']:6} measured {row['goodput']:9.1f}/s predicted {row['predicted_goodput']:9.1f}/s"
            )


def _draw(out: Path, suffix: str, found: dict[str, Any]) -> None:
    if "steps" in found:
        drawn = bars_svg(
            "Milliseconds of a step",
            [row["case"] for row in found["steps"]],
            {
                "plain": [row["plain_ms"] for row in found["steps"]],
                "with ElasticRun": [row["elastic_ms"] for row in found["steps"]],
            },
            unit="ms",
        )
        (out / f"training_overhead{suffix}.svg").write_text(drawn)
    if "goodput" in found:
        rows = found["goodput"]["rows"]
        best = max(row["goodput"] for row in rows)
        drawn = lines_svg(
            "Goodput by batch, of the best measured",
            {
                name: [(torch.tensor(row["batch"]).log2().item(), row[key] / best) for row in rows]
                for name, key in (("measured", "goodput"), ("predicted", "predicted_goodput"))
            },
            label="batch, log2 of examples",
        )
        (out / f"training_goodput{suffix}.svg").write_text(drawn)


def largest(found: dict[str, Any]) -> dict[str, float]:
    """Return the largest deviations of what was measured: the three that have bounds."""
    deviations = {
        "steps": lambda rows: max(row["ratio"] for row in rows) - 1,
        "noise": lambda rows: max(abs(row["ratio"] - 1) for row in rows),
        "goodput": lambda all_: max(abs(r["predicted_goodput"] / r["goodput"] - 1) for r in all_["rows"]),
    }
    return {part: float(of(found[part])) for part, of in deviations.items() if part in found}


if __name__ == "__main__":
    main()
