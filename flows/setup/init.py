"""``ebbflow init``: a small pipeline that runs right away, with its script, data and configuration file."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ebbflow.planners.errors import OptionError

FILES = ("pipeline.yaml", "train.py", "ebbflow.toml")
DATA = Path("data") / "sales.parquet"

_STORES, _DAYS, _HOURS = 20, 30, 4

_HELP = """Write a small pipeline that runs right away: pipeline.yaml, train.py, ebbflow.toml and generated data.

[b]Examples[/b]

    ebbflow init

    ebbflow init forecast && cd forecast && ebbflow run pipeline.yaml --check

Existing files are kept, and nothing is written, unless --force is given. The paths of the written files go to \
standard output, the next steps to standard error.

Exit status: 0 done, 2 usage error.
"""


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Directory to write into. Default: the current one.")
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    from ebbflow.infra.storage.files import write_text
    from ebbflow.infra.storage.user_files import output_problem

    paths = [directory / name for name in (*FILES, DATA)]
    existing = [str(path) for path in paths if path.exists()]
    if existing and not force:
        raise OptionError(f"{', '.join(existing)} exists already; --force overwrites it")
    for path in paths:
        if problem := output_problem(path):
            raise OptionError(f"DIR: cannot write to {str(path)!r}: {problem}")
    for name in FILES:
        write_text(directory / name, template(name))
    write_sales(directory / DATA)
    for path in paths:
        typer.echo(path)
    _print_next(directory)


def template(name: str) -> str:
    """Return one of ``FILES`` as it is written."""
    return files("ebbflow.flows.setup").joinpath("init_files", name).read_text(encoding="utf-8")


def write_sales(path: Path) -> None:
    """Write generated sales of some stores, a row for each part of a day, as Parquet; always the same."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    count = _STORES * _DAYS * _HOURS
    number = np.arange(count)
    visitors = random.integers(5, 80, count)
    price = random.uniform(8.0, 12.0, count).round(2)
    sold = np.maximum(0, visitors * (1.6 - price / 10) + random.normal(0.0, 2.0, count)).round()
    columns = {
        "store": number % _STORES,
        "day": number // (_STORES * _HOURS),
        "visitors": visitors,
        "price": price,
        "sold": sold.astype(np.int64),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def _print_next(directory: Path) -> None:
    from importlib.util import find_spec

    steps = [] if directory == Path() else [f"cd {directory}"]
    if find_spec("torch") is None:
        steps.append("pip install 'prefect-ebbflow[train]'")
    steps += ["ebbflow run pipeline.yaml --check", "ebbflow run pipeline.yaml --report report.html"]
    messages = Console(stderr=True)
    messages.print("\n  ".join(["next:", *steps]), highlight=False, markup=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("init", help=_HELP)(init)
