"""``ebbflow fleet notices``: what waits to be read, and what nobody could read."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ebbflow.flows.fleet.answer import Answer
from ebbflow.flows.fleet.options import with_cluster
from ebbflow.flows.runs.answers import fail, print_json
from ebbflow.flows.runs.options import AsJson, DryRun
from ebbflow.tasks.drawing.wording import plural

if TYPE_CHECKING:
    from ebbflow.tasks.fleet.request import FleetRequest

app = typer.Typer(
    help="Interruption notices: unread messages and dead letters.\n\n"
    "[b]Examples[/b]\n\n"
    "    ebbflow fleet notices show\n\n"
    "    ebbflow fleet notices read       (where no capacity loop runs)\n\n"
    "    ebbflow fleet notices redrive",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()


@app.command()
@with_cluster
def show(
    request: "FleetRequest",
    limit: Annotated[int, typer.Option(help="Maximum number of entries to show.", min=1)] = 100,
    json: AsJson = False,
) -> None:
    """Show notices that could not be handled, and why. They stay where they are.

    [b]Example[/b]

        ebbflow fleet notices show --limit 10
    """
    from dataclasses import asdict

    from ebbflow.flows.fleet.terminal import letters_view
    from ebbflow.tasks.fleet.steps import opened

    with opened(request) as fleet:
        letters = fleet.dead_letters().show(limit)
        if json:
            print_json({"dead_letters": [asdict(letter) for letter in letters]})
        elif letters:
            console.print(letters_view(letters, 60))
        else:
            console.print("no dead letters")


@app.command()
@with_cluster
def redrive(request: "FleetRequest", dry_run: DryRun = False, json: AsJson = False) -> None:
    """Try notices again that could not be handled; what can be read today is taken in and deleted.

    [b]Examples[/b]

        ebbflow fleet notices redrive --dry-run

        ebbflow fleet notices redrive

    Run it where the capacity loop runs, while it is stopped: one process at a time keeps the notices.
    """
    from ebbflow.tasks.fleet.steps import opened, take_notices

    with opened(request) as fleet, Answer(json=json, dry_run=dry_run) as answer:
        letters = fleet.dead_letters()
        if dry_run:
            good = [letter for letter in letters.show(1000) if not letter.problem]
            answer.tell(would_redrive=len(good))
            answer.say(f"dry run: {plural(len(good), 'notice')} would be redriven")
            return
        with take_notices(fleet) as feed:
            taken, left = letters.redrive(feed.take)
        answer.tell(redriven=taken, left=left, done=taken > 0)
        answer.say(f"{taken} redriven, {left} left")
        if left:
            fail("what is left cannot be read: ebbflow fleet notices show tells why")


@app.command()
@with_cluster
def read(request: "FleetRequest", json: AsJson = False) -> None:
    """Take in the notices that wait, where no capacity loop does.

    [b]Example[/b]

        ebbflow fleet notices read && ebbflow fleet status

    A loop elsewhere would not hear of what is read here: use it only while none runs.
    """
    from ebbflow.tasks.fleet.steps import opened, take_notices

    with opened(request) as fleet, Answer(json=json) as answer, take_notices(fleet) as feed:
        total = 0
        while came := feed.poll():
            total += came
        nodes = len(feed.notices())
        answer.tell(messages=total, interruption_pending=nodes, done=total > 0)
        answer.say(f"{plural(total, 'message')} read; {plural(nodes, 'node')} marked interruption pending")
