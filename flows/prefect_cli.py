"""``ebbflow prefect``: deployments and automations for people who have installed the package."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.report import write_text

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
automations.yaml, too: prefect automation create --from-file automations.yaml
"""


def template(name: str) -> str:
    """Return a file that the package brings."""
    return files("ebbflow.flows").joinpath("prefect_files", name).read_text(encoding="utf-8")


@app.command(help=_INIT_HELP)
def init(
    folder: Annotated[Path, typer.Option(help="Where to.", metavar="DIR")] = Path(),
    pool: Annotated[str, typer.Option(help="The work pool that runs the flows.")] = "ebbflow",
    automations: Annotated[bool, typer.Option("--automations", help="Write automations.yaml, too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
) -> None:
    names = [DEPLOYMENTS, *([AUTOMATIONS] if automations else [])]
    if (there := [name for name in names if (folder / name).exists()]) and not force:
        raise OptionError(f"{folder / there[0]} is there already; --force writes over it")
    if not pool.strip() or any(c in pool for c in "\n\"'#:"):
        raise OptionError(f"pool must be the name of a work pool; got {pool!r}")
    for name in names:
        text = template(name)
        if name == DEPLOYMENTS:
            text = text.replace("\n    name: ebbflow\n", f"\n    name: {pool}\n")
            text = text.replace("work-pool create ebbflow ", f"work-pool create {pool} ")
            text = text.replace("--pool ebbflow ", f"--pool {pool} ")
        write_text(folder / name, text)
        console.print(f"wrote {escape(str(folder / name))}", highlight=False, soft_wrap=True)
    console.print(
        f"next:\n  prefect work-pool create {pool} --type process\n  prefect deploy --all\n"
        f"  prefect worker start --pool {pool}",
        highlight=False,
        soft_wrap=True,
    )
