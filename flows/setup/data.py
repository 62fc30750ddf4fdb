"""``ebbflow data``: the tables of TPC-H and TPC-DS, and skewed ones, to try queries on."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.options import AsJson, Quiet
from ebbflow.infra.tables import benchmark_data

app = typer.Typer(
    help="Parquet tables of TPC-H and TPC-DS, and skewed ones, made once and kept in ~/.cache/ebbflow.\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow data tpch --scale 1\n\n"
    "    ebbflow query flows/tpch/q9.sql --tables ~/.cache/ebbflow/tpch/sf1\n\n"
    "    ebbflow data tpcds --scale 1\n\n"
    "    ebbflow query ~/.cache/ebbflow/tpcds/sf1/queries/q72.sql \\\n"
    "        --dialect duckdb --tables ~/.cache/ebbflow/tpcds/sf1\n\n"
    "    ebbflow data skewed --scale 1\n\n"
    "TPC-H and TPC-DS are trademarks of the Transaction Processing Performance Council; nothing made with these "
    "tables is a published TPC result.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Scale = Annotated[
    float, typer.Option(help="Scale factor: 1 is about 1 GB of raw text, 0.01 takes less than a second.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Directory of the tables. Default: SUITE/sfSCALE in ~/.cache/ebbflow.",
        metavar="DIR",
    ),
]

_TPCH_HELP = """Make the eight TPC-H tables: some 5 seconds and 350 MB at scale factor 1.

[b]Examples[/b]

    ebbflow data tpch --scale 0.1

    ebbflow query flows/tpch/q9.sql \\
        --tables "$(ebbflow data tpch --scale 0.1 --quiet)"

    ebbflow data tpch --scale 10 --parts 16 --output /data/tpch10

The directory goes to standard output, messages to standard error. Tables that are there are not made again. A table \
is one Parquet file, or with --parts a directory of that many, as a large table on shared storage has. \
Needs tpchgen-cli: pip install 'prefect-ebbflow\\[demo]'.
"""

_TPCDS_HELP = """Make the 24 TPC-DS tables and the 99 queries: some 30 seconds and 370 MB at scale factor 1.

[b]Examples[/b]

    ebbflow data tpcds --scale 1

    ebbflow query ~/.cache/ebbflow/tpcds/sf1/queries/q3.sql \\
        --dialect duckdb --tables ~/.cache/ebbflow/tpcds/sf1

The queries (DIR/queries/qN.sql) are DuckDB's, hence --dialect duckdb on whichever engine. The generator is an \
older DuckDB with its tpcds extension; the first time it is installed into a virtual environment of its own under \
~/.cache/ebbflow/tools, which needs a package registry. The directory goes to standard output, messages to standard \
error. Tables that are there are not made again.
"""

_SKEWED_HELP = """Make eight tables whose columns depend on each other across joins: some 4 seconds and 120 MB at \
scale factor 1.

[b]Examples[/b]

    ebbflow data skewed --scale 1

    ebbflow query ~/.cache/ebbflow/skewed/sf1/queries/q3.sql \\
        --tables ~/.cache/ebbflow/skewed/sf1 --materialize every-join

A film archive, in the style of the join-order benchmark and JCC-H: one film in a hundred has a fifth of all roles, \
tags and credits, and people, tags and companies of its own. Each filter is estimated right, most joins are not, so \
that a plan is worth changing once the first sizes are known. The queries are DIR/queries/qN.sql. The directory goes \
to standard output, messages to standard error. Tables that are there are not made again.
"""


@app.command("tpch", help=_TPCH_HELP)
def tpch_command(
    scale: Scale = 1.0,
    output: Output = None,
    parts: Annotated[int, typer.Option(help="Number of files per table.")] = 1,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    target = output.expanduser() if output else benchmark_data.default_folder(_home(), "tpch", scale, parts)
    _print_directory("tpch", scale, tpch_tables(scale, target, _messages(quiet), parts), json)


@app.command("tpcds", help=_TPCDS_HELP)
def tpcds_command(
    scale: Scale = 1.0, output: Output = None, json: AsJson = False, quiet: Quiet = False
) -> None:
    target = output.expanduser() if output else benchmark_data.default_folder(_home(), "tpcds", scale)
    _print_directory("tpcds", scale, tpcds_tables(scale, target, _messages(quiet)), json)


@app.command("skewed", help=_SKEWED_HELP)
def skewed_command(
    scale: Scale = 1.0, output: Output = None, json: AsJson = False, quiet: Quiet = False
) -> None:
    target = output.expanduser() if output else benchmark_data.default_folder(_home(), "skewed", scale)
    _print_directory("skewed", scale, skewed_tables(scale, target, _messages(quiet)), json)


def _messages(quiet: bool) -> Console:
    return Console(stderr=True, quiet=quiet)


def _print_directory(suite: str, scale: float, directory: Path, as_json: bool) -> None:
    if not as_json:
        typer.echo(directory)
        return
    tables = sorted({path.name.removesuffix(".parquet") for path in directory.iterdir()} - {"queries"})
    queries = directory / "queries"
    print_json(
        {
            "suite": suite,
            "scale": scale,
            "directory": str(directory),
            "tables": tables,
            "queries": str(queries) if queries.is_dir() else None,
        }
    )


def tpch_tables(scale: float, directory: Path, console: Console, parts: int = 1) -> Path:
    """Return the directory of TPC-H tables at ``scale``, made unless it is there; messages go to ``console``.

    With ``parts`` above 1 each table is a directory of that many files. Raises ``DataError``.
    """
    _tell_cached("TPC-H", scale, directory, console)
    return benchmark_data.tpch(scale, directory, lambda line: _say(line, console), parts)


def tpcds_tables(scale: float, directory: Path, console: Console) -> Path:
    """Return the directory of TPC-DS tables and queries at ``scale``, made unless it is there.

    Messages go to ``console``. Raises ``DataError``.
    """
    _tell_cached("TPC-DS", scale, directory, console)
    return benchmark_data.tpcds(scale, directory, _home() / "tools", lambda line: _say(line, console))


def skewed_tables(scale: float, directory: Path, console: Console) -> Path:
    """Return the directory of skewed tables and queries at ``scale``, made unless it is there.

    Messages go to ``console``. Raises ``DataError``.
    """
    _tell_cached("skewed tables,", scale, directory, console)
    return benchmark_data.skewed(scale, directory, lambda line: _say(line, console))


def _home() -> Path:
    from ebbflow.infra.storage.files import home

    return home()


def _tell_cached(suite: str, scale: float, directory: Path, console: Console) -> None:
    if directory.is_dir():
        _say(f"{suite} scale factor {scale:g}, cached in {directory}", console)


def _say(line: str, console: Console) -> None:
    console.print(f"[bold]data[/]: {line}", soft_wrap=True, highlight=False)


def register(top: typer.Typer) -> None:
    """Add the group to the command line."""
    top.add_typer(app, name="data")
