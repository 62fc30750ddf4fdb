"""``ebbflow communication``: measure links, search and explain plans, compare schedulers of collectives."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ebbflow.flows.runs.answers import print_json
from ebbflow.flows.runs.option_checks import CheckedGroup
from ebbflow.flows.runs.options import AsJson, duration_option
from ebbflow.planners.errors import OptionError

if TYPE_CHECKING:
    from ebbflow.planners.communication.measured import MeasuredLinks
    from ebbflow.planners.communication.plan import CommunicationPlan

app = typer.Typer(
    cls=CheckedGroup,
    help="Planned communication of trainings: measure links, search a plan, explain it, compare schedulers.\n\n"
    "A training that ran with --communication planned keeps training.json and links.json in the directory "
    "communication of its run's directory. There:\n\n"
    "    ebbflow communication plan training.json --links links.json\n\n"
    "    ebbflow communication compare training.json --links links.json\n\n"
    "[b]Measure this machine[/b]\n\n"
    "    ebbflow communication profile --ranks 4 --output links.json\n\n"
    "docs/communication.md explains.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
console = Console()
errors = Console(stderr=True)


class Collective(StrEnum):
    """What is measured."""

    all_reduce = "all-reduce"
    all_to_all = "all-to-all"


class Scheduler(StrEnum):
    """The schedulers of the thesis' evaluation."""

    fifo = "FIFO"
    lifo = "LIFO"
    ho = "HO"
    s_exec = "S-Exec"
    s_sched = "S-Sched"
    s_sched_greedy = "S-Sched+greedy"
    syndicate = "Syndicate"


Training = Annotated[
    str, typer.Argument(help="Recorded training, a JSON file that a planned run keeps.", metavar="TRAINING")
]
Links = Annotated[
    str,
    typer.Option(
        "--links", help="Measured links, a JSON file of a planned run or of profile.", metavar="FILE"
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the random walk.", min=0, max=2**32 - 1)]
Picture = Annotated[
    str | None, typer.Option("--picture", help="SVG file for the timelines. Default: none.", metavar="FILE")
]
SearchTime = Annotated[
    float, duration_option("--search-time", help="Maximum duration of the search.", min=0.01, shown=10.0)
]


@app.command("profile")
def profile(
    ranks: Annotated[int, typer.Option(help="Number of processes.", min=2, max=64)] = 4,
    collective: Annotated[
        list[Collective] | None,
        typer.Option(help="Collective to measure. Repeatable. Default: both.", metavar="KIND"),
    ] = None,
    min_kib: Annotated[
        float, typer.Option("--min-kib", help="Smallest payload of a process, KiB.", min=0.0625, max=1048576)
    ] = 4.0,
    max_kib: Annotated[
        float, typer.Option("--max-kib", help="Largest payload of a process, KiB.", min=0.0625, max=1048576)
    ] = 8192.0,
    steps: Annotated[int, typer.Option(help="Number of payload sizes.", min=2, max=20)] = 5,
    channels: Annotated[int, typer.Option(help="Number of process groups side by side.", min=1, max=8)] = 2,
    measure_time: Annotated[
        float, duration_option("--measure-time", help="Maximum duration of the sweep.", min=0.1, shown=20.0)
    ] = 20.0,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="JSON file for the measurements. Default: none.", metavar="FILE"),
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure collectives among processes of this machine: sizes x options, and where one option takes over."""
    from ebbflow.infra.packages import require

    if min_kib >= max_kib:
        raise OptionError(f"--min-kib must be below --max-kib; got {min_kib:g} and {max_kib:g}")
    require("torch", "measuring collectives", "train")
    from ebbflow.infra.communication.local_sweep import measure_this_machine
    from ebbflow.infra.storage.files import write_text

    sizes = _sizes(min_kib, max_kib, steps)
    kinds = [one.value for one in collective or list(Collective)]
    found = measure_this_machine(ranks, dict.fromkeys(kinds, sizes), channels=channels, seconds=measure_time)
    if output is not None:
        write_text(output, found.to_json())
        errors.print(f"measurements: {output}", highlight=False, soft_wrap=True)
    if json:
        print_json(_described(found))
    else:
        _print_links(found)


def _sizes(low: float, high: float, steps: int) -> tuple[int, ...]:
    return tuple(sorted({round(1024 * low * (high / low) ** (k / (steps - 1))) for k in range(steps)}))


def _described(links: "MeasuredLinks") -> dict[str, Any]:
    from ebbflow.planners.communication.measured import best_ranges, fit_links

    kinds = sorted({kind for kind, _, _ in links.table.rows})
    said: dict[str, Any] = {"ranks": links.ranks, "channels": links.channels, "contention": links.contention}
    said["best"] = {
        kind: [{"from": r.low, "to": r.high, "choice": r.choice} for r in best_ranges(links, kind)]
        for kind in kinds
    }
    said["seconds"] = {
        f"{kind} {name}": [[size, seconds] for size, seconds in points]
        for (kind, _, name), points in links.table.rows.items()
    }
    ring = links.table.rows.get(("all-reduce", links.ranks, "ring/1@0"))
    if ring is not None and len(ring) > 1:
        fitted = fit_links(links.ranks, ring)
        said["latency"] = fitted.alpha
        said["bytes_per_second"] = 1 / fitted.per_byte if fitted.per_byte else None
    return said


def _print_links(links: "MeasuredLinks") -> None:
    said = _described(links)
    console.print(f"{links.ranks} processes, {links.channels} channels", highlight=False)
    if "latency" in said:
        speed = said["bytes_per_second"]
        shown = f"{speed / 1e6:,.0f} MB/s" if speed else "not limited within these sizes"
        console.print(
            f"rings fit a latency of {said['latency'] * 1e6:,.0f} µs and {shown} per process", highlight=False
        )
    if links.channels > 1:
        word = "share their links" if links.usable_channels == 1 else "carry side by side"
        console.print(
            f"two channels at once take {links.contention:.2f} times as long as one alone: they {word}",
            highlight=False,
        )
    table = Table("collective", "fastest on channel 0", "from KiB", "to KiB", box=None, header_style="bold")
    for kind, ranges in said["best"].items():
        for one in ranges:
            table.add_row(kind, one["choice"], f"{one['from'] / 1024:,.1f}", f"{one['to'] / 1024:,.1f}")
    console.print(table)


@app.command("plan")
def plan(
    training: Training,
    links: Links,
    system: Annotated[Scheduler, typer.Option(help="Scheduler that plans.")] = Scheduler.syndicate,
    search_time: SearchTime = 10.0,
    seed: Seed = 0,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="JSON file for the plan. Default: none.", metavar="FILE"),
    ] = None,
    picture: Picture = None,
    json: AsJson = False,
) -> None:
    """Search a plan for a recorded training, and show what it saves by prediction."""
    from ebbflow.tasks.communication import (
        picture_of_search,
        plan_training,
        read_links,
        read_training,
    )

    _check_picture(picture)
    recorded = read_training(training)
    found = plan_training(
        recorded, read_links(links), system=system.value, search_seconds=search_time, seed=seed
    )
    _save(output, found.plan.to_json(), "plan")
    _save(picture, picture_of_search(found, recorded) if picture else "", "picture")
    if json:
        print_json(_plan_said(found.plan) | {"gain": found.gain})
    else:
        _print_plan(found.plan)
        console.print(
            f"an iteration takes {_ms(found.plan.seconds)} with the plan and {_ms(found.plan.plain_seconds)} without "
            f"by prediction ({found.gain:+.1%} saved); measured without: {_ms(recorded.seconds)}",
            highlight=False,
            soft_wrap=True,
        )


@app.command("explain")
def explain(
    plan: Annotated[str, typer.Argument(help="Plan, a JSON file that plan --output wrote.", metavar="PLAN")],
    training: Annotated[
        str | None,
        typer.Option(
            "--training",
            help="Recorded training that must be able to run the plan, a JSON file that a planned run keeps. "
            "Default: none, nothing is compared.",
            metavar="FILE",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show a plan: how each collective is cut and carried out, and the order in which pieces are launched."""
    from ebbflow.tasks.communication import check_plan, read_plan, read_training

    found = read_plan(plan)
    if training is not None:
        check_plan(found, read_training(training))
    if json:
        print_json(_plan_said(found))
    else:
        _print_plan(found)
        for number, some in enumerate(_order(found)):
            console.print(f"{number + 1:>4}  {escape(', '.join(some))}", highlight=False, soft_wrap=True)


@app.command("compare")
def compare(
    training: Training,
    links: Links,
    hand_order: Annotated[
        str | None,
        typer.Option(
            help="Collectives by name, the most urgent first, by commas: the order of HO. Default: the last "
            "submitted first.",
            metavar="NAMES",
        ),
    ] = None,
    search_time: SearchTime = 10.0,
    seed: Seed = 0,
    picture: Picture = None,
    json: AsJson = False,
) -> None:
    """Simulate the schedulers FIFO, LIFO, HO, S-Exec, S-Sched and Syndicate side by side on a recorded training."""
    from ebbflow.tasks.communication import (
        compare_systems,
        picture_of_systems,
        read_links,
        read_training,
    )

    _check_picture(picture)
    order = [name.strip() for name in hand_order.split(",")] if hand_order is not None else []
    found = compare_systems(
        read_training(training), read_links(links), hand_order=order, search_seconds=search_time, seed=seed
    )
    _save(picture, picture_of_systems(found) if picture else "", "picture")
    if json:
        print_json(
            [
                {"system": one.system, "seconds": one.seconds, "idle": one.idle, "options": one.options}
                for one in found
            ]
        )
        return
    lifo = next(one.seconds for one in found if one.system == "LIFO")
    table = Table("scheduler", box=None, header_style="bold")
    for name in ("iteration, simulated", "against LIFO", "compute idle"):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(one.system, _ms(one.seconds), f"{one.seconds / lifo:.3f}", f"{one.idle:.1%}")
    console.print(table)


def _check_picture(path: str | None) -> None:
    if path is not None and not path.lower().endswith(".svg"):
        raise OptionError(f"--picture must end with .svg; got {path!r:.200}")


def _save(path: str | None, text: str, what: str) -> None:
    from ebbflow.infra.storage.files import write_text

    if path is not None:
        write_text(path, text)
        errors.print(f"{what}: {escape(path)}", highlight=False, soft_wrap=True)


def _order(plan: "CommunicationPlan") -> list[list[str]]:
    """Return the pieces that are launched one after the other; those in one row may start together."""
    rows: list[list[str]] = [[] for _ in range(plan.order.length)]
    for (op, piece), number in sorted(plan.order.numbers.items()):
        rows[number].append(f"{op}[{piece}] on channel {plan.order.channels[op, piece]}")
    return rows


def _plan_said(plan: "CommunicationPlan") -> dict[str, Any]:
    return {
        "version": plan.version,
        "ranks": plan.ranks,
        "digest": plan.digest,
        "seconds": plan.seconds,
        "plain_seconds": plan.plain_seconds,
        "collectives": {
            name: {"kind": one.kind, "bytes": one.bytes, "choice": one.choice.name}
            for name, one in plan.collectives.items()
        },
        "order": _order(plan),
    }


def _print_plan(plan: "CommunicationPlan") -> None:
    console.print(f"plan for {plan.ranks} processes, {plan.channels} channels", highlight=False)
    table = Table("collective", "kind", box=None, header_style="bold")
    for name in ("MB per process", "algorithm", "pieces", "channel"):
        table.add_column(name, justify="right")
    for name, one in plan.collectives.items():
        choice = one.choice
        table.add_row(
            escape(name),
            one.kind,
            f"{one.bytes / 1e6:,.3f}",
            choice.algorithm,
            str(choice.pieces),
            str(choice.channel),
        )
    console.print(table)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms"


def register(top: typer.Typer) -> None:
    """Add the group to the command line."""
    top.add_typer(app, name="communication")
