"""``ebbflow prefect``: deployments and automations of the installed package."""

import json
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from ebbflow.infra.storage.files import write_text
from ebbflow.planners.errors import OptionError

DEPLOYMENTS, AUTOMATIONS = "prefect.yaml", "automations.yaml"

app = typer.Typer(
    help="Deploy Ebbflow's flows to Prefect.\n\n"
    "    ebbflow prefect init\n\n"
    "    prefect work-pool create ebbflow --type process\n\n"
    "    prefect deploy --all\n\n"
    "    prefect worker start --pool ebbflow\n\n"
    "Blocks for clusters, AWS accounts and storage: prefect block register -m ebbflow.flows.blocks",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
messages = Console(stderr=True)

_INIT_HELP = """Write prefect.yaml: deployments of all flows, for prefect deploy.

[b]Examples[/b]

    ebbflow prefect init

    ebbflow prefect init --pool gpu-workers --automations

Entrypoints are modules of the installed package: no code is copied. --automations writes automations.yaml, too, for \
prefect automation create --from-file automations.yaml. Existing files are kept unless --force is given. The paths \
of the written files go to standard output, the next steps to standard error.

Exit status: 0 done, 2 usage error.
"""


def template(name: str) -> str:
    """Return the text of a packaged file."""
    return files("ebbflow.flows.setup").joinpath("prefect_files", name).read_text(encoding="utf-8")


@app.command(help=_INIT_HELP)
def init(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Directory to write into. Default: the current one.",
            metavar="DIR",
            show_default=False,
        ),
    ] = Path(),
    pool: Annotated[
        str, typer.Option(help="Prefect work pool that runs the flows.", metavar="NAME")
    ] = "ebbflow",
    automations: Annotated[bool, typer.Option("--automations", help="Write automations.yaml, too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    if not pool.strip() or not pool.isprintable():
        raise OptionError(f"pool must be the name of a work pool; got {pool!r}")
    names = [DEPLOYMENTS, *([AUTOMATIONS] if automations else [])]
    there = [name for name in names if (output / name).exists() and not force]
    if there == names:
        raise OptionError(f"{output / there[0]} exists already; --force overwrites it")
    for name in names:
        if name in there:
            _say(f"kept: {output / name} exists already; --force overwrites it")
            continue
        write_text(output / name, deployments(pool) if name == DEPLOYMENTS else template(name))
        typer.echo(output / name)
    named = shlex.quote(pool)
    steps = []
    if DEPLOYMENTS not in there:
        steps += [f"prefect work-pool create {named} --type process", "prefect deploy --all"]
        steps += [f"prefect worker start --pool {named}"]
    if automations:
        steps += [f"prefect automation create --from-file {AUTOMATIONS}"]
    _say("\n  ".join(["next:", *steps]))


def deployments(pool: str) -> str:
    """Return the package's ``prefect.yaml`` for a work pool."""
    text, shown = template(DEPLOYMENTS), shlex.quote(pool)
    text = text.replace("\n    name: ebbflow\n", f"\n    name: {_yaml(pool)}\n")
    text = text.replace("work-pool create ebbflow ", f"work-pool create {shown} ")
    return text.replace("--pool ebbflow ", f"--pool {shown} ")


def _yaml(text: str) -> str:
    """Return ``text`` as a YAML value, in quotes where it needs some."""
    try:
        plain = yaml.safe_load(f"name: {text}") == {"name": text}
    except yaml.YAMLError:
        plain = False
    return text if plain else json.dumps(text)


def _say(text: str) -> None:
    messages.print(text, highlight=False, markup=False, soft_wrap=True)


def register(top: typer.Typer) -> None:
    """Add the group to the command line."""
    top.add_typer(app, name="prefect")
