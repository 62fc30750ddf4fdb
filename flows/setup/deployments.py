"""``ebbflow prefect``: deployments and automations for people who have installed the package."""

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
console = Console()

_INIT_HELP = """Write prefect.yaml: deployments of all flows, for prefect deploy.

[b]Examples[/b]

    ebbflow prefect init

    ebbflow prefect init --pool gpu-workers --automations

Its entrypoints are modules of the installed package, so that nothing is copied. --automations writes
automations.yaml, too: prefect automation create --from-file automations.yaml. Files that are there stay as they
are, unless --force is given.
"""


def template(name: str) -> str:
    """Return a file that the package brings."""
    return files("ebbflow.flows.setup").joinpath("prefect_files", name).read_text(encoding="utf-8")


@app.command(help=_INIT_HELP)
def init(
    folder: Annotated[Path, typer.Option(help="Where to.", metavar="DIR")] = Path(),
    pool: Annotated[str, typer.Option(help="The work pool that runs the flows.")] = "ebbflow",
    automations: Annotated[bool, typer.Option("--automations", help="Write automations.yaml, too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
) -> None:
    if not pool.strip() or not pool.isprintable():
        raise OptionError(f"pool must be the name of a work pool; got {pool!r}")
    names = [DEPLOYMENTS, *([AUTOMATIONS] if automations else [])]
    there = [name for name in names if (folder / name).exists() and not force]
    if there == names:
        raise OptionError(f"{folder / there[0]} is there already; --force writes over it")
    for name in names:
        if name in there:
            _say(f"{folder / name} is there already, and stays as it is")
            continue
        write_text(folder / name, deployments(pool) if name == DEPLOYMENTS else template(name))
        _say(f"wrote {folder / name}")
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
    console.print(text, highlight=False, markup=False, soft_wrap=True)
