"""Over-decomposed executors on worker processes that come, go and are killed (Litz, USENIX ATC 2018).

Run from the repository root: ``python -m tests.benchmarks.elastic_executors --out DIR``. Writes
``elastic_executors.json`` and ``elastic_executors.svg``. About five minutes on two cores.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.infra.elastic import Application, ElasticJob, Result, Settings
from ebbflow.infra.elastic.apps.kmeans import KMeans
from ebbflow.infra.elastic.apps.lda import Lda, likelihood
from ebbflow.infra.elastic.apps.mlr import Mlr
from ebbflow.tasks.drawing.charts import lines_svg
from tests.benchmarks.elastic_apps import Sleeping, StragglingMlr
from tests.benchmarks.elastic_estimates import ideal_scale_out_time

LIMIT = 600.0  # seconds of one job
CHAINS = 5  # of LDA, each with its own seed
SEEDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "elastic_executors.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    found["machine"] = f"{os.cpu_count()} cores, {platform.machine()}"
    for part in given.parts.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found[part] = PARTS[part](Path(folder))
        found[part]["load"] = os.getloadavg()[0]
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(part, {k: v for k, v in found[part].items() if k != "progress"}, flush=True)
    if "scale_out" in found:
        progress = {
            name: [tuple(p) for p in points] for name, points in found["scale_out"]["progress"].items()
        }
        svg = lines_svg("Iterations done, sleeping tasks", progress, label="seconds", unit="")
        (given.out / "elastic_executors.svg").write_text(svg)


# --- data


def digits(folder: Path) -> str:
    """Write scikit-learn's digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    path = folder / "digits.npz"
    np.savez(path, x=x / 16, y=y, start=x[:10] / 16)
    return str(path)


def clusters(folder: Path) -> str:
    """Write 60,000 points of 10 classes in 100 dimensions."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(10, 100))
    y = rng.integers(10, size=60_000)
    path = folder / "clusters.npz"
    np.savez(path, x=centres[y] + 2 * rng.normal(size=(60_000, 100)), y=y)
    return str(path)


def corpus(folder: Path) -> str:
    """Write 300 documents of 60 tokens, from 20 topics over 600 words."""
    rng = np.random.default_rng(0)
    topics = rng.dirichlet(np.full(600, 0.02), 20)
    mixtures = rng.dirichlet(np.full(20, 0.1), 300)
    words = [rng.choice(600, p=topics[rng.choice(20, p=mixture)]) for mixture in mixtures for _ in range(60)]
    path = folder / "corpus.npz"
    np.savez(path, document=np.repeat(np.arange(300), 60), word=np.array(words))
    return str(path)


# --- runs


def done(job: ElasticJob) -> int:
    """Return the iterations or epochs that are complete."""
    return len(job.driver.history)  # type: ignore[attr-defined]


def wait(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` holds, or the job would be over."""
    end = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


def seconds(result: Result) -> float:
    """Return the time from the start of the first task to the end."""
    times = {event.kind: event.time for event in result.events}
    return times["finished"] - times["started"]


def run(
    app: Application, workers: int = 2, steps: tuple[tuple[int, int], ...] = (), kill_at: int = 0
) -> Result:
    """Run ``app``; ``steps`` are (iterations done, workers from then on); SIGKILL one worker at ``kill_at``."""
    settings = Settings(snapshot_every=1.0)
    with ElasticJob(app, workers, settings=settings) as job:
        for at, number in steps:
            wait(lambda at=at: done(job) >= at)  # type: ignore[misc]
            job.scale_to(number)
            wait(lambda number=number: sum(e > 0 for e, _ in job.holds().values()) == number)  # type: ignore[misc]
        if kill_at:
            wait(lambda: done(job) >= kill_at)
            os.kill(next(iter(job.workers().values())), signal.SIGKILL)
        return job.result(LIMIT)


def transparency(folder: Path) -> dict[str, Any]:
    """Compare the end of static runs, of 2 -> 4 -> 2 workers, and of runs one of whose workers is killed.

    Where chains of random draws end is itself random, so those of LDA are compared by means over several seeds.
    """
    data, text = digits(folder), corpus(folder)
    apps: dict[str, tuple[Callable[[int], Application], int, int]] = {
        "MLR, BSP, fixed point": (lambda seed: Mlr(data, 10, 16, 300, exact=True), 300, 1),
        "MLR, BSP, floats": (lambda seed: Mlr(data, 10, 16, 300), 300, 1),
        "MLR, SSP, s = 2": (lambda seed: Mlr(data, 10, 16, 300, staleness=2), 300, 1),
        "mini-batch k-means": (lambda seed: KMeans(data, 10, 16, 300), 300, 1),
        "LDA, block rotation": (lambda seed: Lda(text, 20, 8, 40, seed=seed), 40, CHAINS),
    }
    rows = []
    for name, (make, length, seeds) in apps.items():
        runs = []
        for seed in range(seeds):
            static = run(make(seed))
            elastic = run(make(seed), steps=((length // 10, 4), (length // 2, 2)))
            runs.append((static, elastic, run(make(seed), kill_at=length // 2)))
        ends = [[_objective(make(0), result) for result in kind] for kind in zip(*runs, strict=True)]
        values = [statistics.mean(found) for found in ends]
        kinds = [event.kind for _, elastic, _ in runs for event in elastic.events]
        rows.append(
            {
                "app": name,
                "seeds": seeds,
                "static": values[0],
                "elastic": values[1],
                "killed": values[2],
                "difference": abs(values[1] / values[0] - 1),
                "difference_killed": abs(values[2] / values[0] - 1),
                "spread_static": (max(ends[0]) - min(ends[0])) / abs(values[0]),
                "identical": all(_same(static, elastic) for static, elastic, _ in runs),
                "identical_killed": all(_same(static, killed) for static, _, killed in runs),
                "joined": kinds.count("joined") / seeds,
                "left": kinds.count("left") / seeds,
                "restored": [event.kind for *_, killed in runs for event in killed.events].count("restored")
                / seeds,
            }
        )
    return {"rows": rows}


def _objective(app: Application, result: Result) -> float:
    if isinstance(app, Mlr | KMeans):
        return app.objective(result.parameters)
    assert isinstance(app, Lda)
    documents = np.zeros((300, app.topics), np.int64)
    for index, topics in result.executors.items():
        executor = app.executor(index)
        executor.load_input()
        np.add.at(documents, (executor.document * app.executors + index, topics), 1)  # type: ignore[attr-defined]
    counts = app.counts(result.parameters)
    assert counts.sum() == documents.sum() == 300 * 60
    return likelihood(documents, counts, app.alpha, app.beta)


def _same(first: Result, second: Result) -> bool:
    return all((first.parameters[key] == value).all() for key, value in second.parameters.items())


def decomposition(folder: Path) -> dict[str, Any]:
    """Measure the time of an iteration by executors a worker, the work being the same; in turns."""
    data, numbers = clusters(folder), (1, 2, 4, 8, 16)
    times: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(SEEDS):
        for number in numbers:
            result = run(Mlr(data, 10, 2 * number, 60))
            times[number].append(seconds(result) / 60)
    base = statistics.median(times[1])
    rows = [
        {"executors": n, "seconds": statistics.median(t), "ratio": statistics.median(t) / base}
        for n, t in times.items()
    ]
    return {"rows": rows, "must": {"4": 1.15, "16": 1.5}}


def scale_out(folder: Path) -> dict[str, Any]:
    """Measure 4 -> 8 workers with sleeping tasks against the ideal."""
    length, progress = 40, {}
    times = {}
    for name, workers in (("4 workers", 4), ("8 workers", 8), ("4, then 8", 4)):
        with ElasticJob(Sleeping(32, length, 0.1), workers) as job:
            wait(lambda: any(event.kind == "started" for event in job.events()))
            start, points, asked = time.monotonic(), [(0.0, 0)], None
            while not job.ended:
                if done(job) > points[-1][1]:
                    points.append((time.monotonic() - start, done(job)))
                if asked is None and name == "4, then 8" and done(job) >= length // 3:
                    asked = (time.monotonic() - start, job.driver._sums, done(job))  # type: ignore[attr-defined]
                    job.scale_to(8)
                time.sleep(0.005)
            result = job.result(1.0)
        progress[name], times[name] = points, seconds(result)
    assert asked is not None
    ideal = ideal_scale_out_time(asked[0], asked[2] / length, times["8 workers"])
    actual = times["4, then 8"]
    return {
        "static_4": times["4 workers"], "static_8": times["8 workers"], "trigger": asked[0],
        "ideal": ideal, "actual": actual, "ratio": actual / ideal, "must": 1.05, "progress": progress,
    }  # fmt: skip


def scale_in(folder: Path) -> dict[str, Any]:
    """Measure from the request to the exit of the last process, 4 -> 2 workers, by state of the leaving ones."""
    rows = []
    for size in (0, 4, 16, 64):
        taken = []
        for _ in range(SEEDS):
            with ElasticJob(
                Sleeping(16, 10_000, 0.01, size * 2**20), 4, settings=Settings(snapshot_every=None)
            ) as job:
                wait(lambda: done(job) >= 5)
                pids = job.workers()
                start = time.monotonic()
                job.scale_to(2)
                wait(lambda: len(job.workers()) == 2)
                taken.append(time.monotonic() - start)
                assert len(pids) == 4
        rows.append({"mib": 8 * size, "seconds": statistics.median(taken)})
    slope = (rows[-1]["seconds"] - rows[0]["seconds"]) / rows[-1]["mib"]
    return {"rows": rows, "mib_per_second": 1 / slope, "must_stateless": 3.0}


def staleness(folder: Path) -> dict[str, Any]:
    """Measure loss and time by staleness, on digits, with a straggler that changes."""
    data = digits(folder)
    rows = []
    for bound in (0, 1, 2, 4):
        plain = [run(Mlr(data, 10, 8, 300, staleness=bound)) for _ in range(SEEDS)]
        app = StragglingMlr(data, 10, 8, 60, staleness=bound)
        slow = [run(app) for _ in range(SEEDS)]
        rows.append(
            {
                "staleness": bound,
                "loss": statistics.median(app.objective(r.parameters) for r in plain),
                "straggling_seconds": statistics.median(seconds(r) for r in slow),
            }
        )
    losses = [row["loss"] for row in rows]
    return {"rows": rows, "spread": max(losses) / min(losses) - 1, "must": 0.02}


def gibbs(folder: Path) -> dict[str, Any]:
    """Compare LDA's log-likelihood with that of serial Gibbs sampling, which one executor and one block are."""
    data, epochs = corpus(folder), 60
    ends: dict[str, list[float]] = {"serial": [], "rotation": []}
    for seed in range(SEEDS):
        for name, executors in (("serial", 1), ("rotation", 8)):
            app = Lda(data, 20, executors, epochs, seed=seed)
            ends[name].append(_objective(app, run(app, 1 if name == "serial" else 2)))
    serial, rotation = (statistics.mean(ends[name]) for name in ("serial", "rotation"))
    return {**ends, "difference": abs(rotation / serial - 1), "must": 0.02}


def recovery(folder: Path) -> dict[str, Any]:
    """Measure from SIGKILL until tasks run again, both ways to recover."""
    data = clusters(folder)
    rows = []
    for way in ("global", "partial"):
        noticed, restored, losses = [], [], []
        for _ in range(SEEDS):
            app = Mlr(data, 10, 16, 120)
            settings = Settings(snapshot_every=1.0, recovery=way, running_every=0.5)  # type: ignore[arg-type]
            with ElasticJob(app, 2, settings=settings) as job:
                wait(lambda: done(job) >= 60)
                os.kill(next(iter(job.workers().values())), signal.SIGKILL)
                at = job._clock.now()
                result = job.result(LIMIT)
            lost = next(e for e in result.events if e.kind == "lost")
            again = next(e for e in result.events if e.kind in {"restored", "patched"})
            noticed.append(lost.time - at)
            restored.append(again.time - lost.time)
            losses.append(app.objective(result.parameters))
        rows.append(
            {
                "recovery": way,
                "noticed_s": statistics.median(noticed),
                "restored_s": statistics.median(restored),
                "objective": statistics.median(losses),
            }
        )
    static = run(Mlr(data, 10, 16, 120))
    return {"rows": rows, "static": Mlr(data, 10, 16, 120).objective(static.parameters)}


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "transparency": transparency,
    "decomposition": decomposition,
    "scale_out": scale_out,
    "scale_in": scale_in,
    "staleness": staleness,
    "gibbs": gibbs,
    "recovery": recovery,
}

if __name__ == "__main__":
    main()
