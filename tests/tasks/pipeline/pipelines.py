"""Pipelines for tests: a small right one, and ways to change it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ebbflow.tasks.pipeline.file.read import parse_pipeline
from ebbflow.tasks.pipeline.file.spec import Pipeline

SCRIPT = "from ebbflow.infra.training import ElasticRun\n"
_PAIRS = """
import argparse, os, time
import pyarrow.parquet, torch
from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.training import ElasticRun

parser = argparse.ArgumentParser()
parser.add_argument("--data")
files, path = resolve(parser.parse_args().data)
table = pyarrow.parquet.read_table(path, filesystem=files)
x = torch.tensor(table["x"].to_pylist(), dtype=torch.float32).unsqueeze(1)
y = torch.tensor(table["y"].to_pylist(), dtype=torch.float32).unsqueeze(1)
with ElasticRun.start(seed=1) as run:
    model, _ = run.prepare(
        torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=0.3), batch_size=32
    )
    for _ in run.epochs(EPOCHS):
        for inputs, wanted in run.batches((x, y)):
            run.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
            run.step()
            time.sleep(PAUSE)
        run.report(slope=float(next(model.parameters()).detach()), told=float(os.environ.get("TOLD", 0)))
"""


def pairs_script(epochs: int, pause: float) -> str:
    """Return a training that learns how y follows from x; with ``pause`` s after each step."""
    return _PAIRS.replace("EPOCHS", str(epochs)).replace("PAUSE", str(pause))


def write_pairs(folder: Path) -> None:
    """Write a table ``pairs`` of x and twice as much, 1024 rows, half of them below x = 1."""
    folder.mkdir(exist_ok=True)
    values = [n / 512 for n in range(1024)]
    pq.write_table(pa.table({"x": values, "twice": [2 * v for v in values]}), folder / "pairs.parquet")


def content(folder: Path) -> dict[str, Any]:
    """Return a right pipeline as plain values; its files are made in ``folder``."""
    (folder / "fit.py").write_text(SCRIPT)
    write_pairs(folder / "tables")
    return {
        "name": "shop",
        "cluster": {"local": {"pools": {"gpu": {"kind": "gpu", "nodes": 1, "max_nodes": 3, "price": 0.9}}}},
        "teams": {"sales": {"weight": 2}, "research": {}},
        "quotas": {"teams": {"research": {"gpus": 2}}},
        "queries": {"orders": {"team": "sales", "sql": "SELECT 1", "tables": str(folder / "tables")}},
        "trainings": {
            "fit": {"team": "sales", "script": "fit.py", "arguments": ["--data", "${queries.orders.path}"]}
        },
        "tunings": {
            "tune": {
                "team": "research",
                "script": "fit.py",
                "after": "fit",
                "space": {"lr": {"log": [0.1, 1]}},
            }
        },
    }


def changed(plain: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return ``plain`` with another value at ``path``; ``None`` takes the key away."""
    *above, last = path.split(".")
    table = plain
    for key in above:
        table = table.setdefault(key, {})
    if value is None:
        del table[last]
    else:
        table[last] = value
    return plain


def text_of(plain: Mapping[str, Any]) -> str:
    """Return the file."""
    return yaml.safe_dump(dict(plain), sort_keys=False)


def read(plain: Mapping[str, Any], folder: Path, **parameters: str) -> Pipeline:
    """Return the pipeline that the values describe."""
    return parse_pipeline(text_of(plain), "shop.yaml", str(folder), parameters)
