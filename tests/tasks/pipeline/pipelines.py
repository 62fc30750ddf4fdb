"""Pipelines for tests: a small right one, and ways to change it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ebbflow.tasks.pipeline.read import parse_pipeline
from ebbflow.tasks.pipeline.spec import Pipeline

SCRIPT = "from ebbflow.infra.training import ElasticRun\n"


def content(folder: Path) -> dict[str, Any]:
    """Return a right pipeline as plain values; its files are made in ``folder``."""
    (folder / "fit.py").write_text(SCRIPT)
    (folder / "tables").mkdir(exist_ok=True)
    return {
        "name": "shop",
        "cluster": {"local": {"pools": {"gpu": {"kind": "gpu", "nodes": 1, "most": 3, "price": 0.9}}}},
        "teams": {"sales": {"weight": 2}, "research": {"gpus": 2}},
        "queries": {"orders": {"team": "sales", "sql": "SELECT 1", "tables": str(folder / "tables")}},
        "trainings": {
            "fit": {"team": "sales", "script": "fit.py", "arguments": ["--data", "${queries.orders.path}"]}
        },
        "searches": {
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
