"""The page on renting: dollars, deadlines and interruptions of each way to rent, by world."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from ebbflow.tasks.drawing.charts import bars_svg
from tests.evaluation.page import Pictures, table
from tests.evaluation.renting import metrics as figures
from tests.evaluation.renting.driver import INTERVAL, PATIENCE, RESTART
from tests.evaluation.renting.fleet import BOOT, NOTICE
from tests.evaluation.renting.metrics import Row, Runs
from tests.evaluation.renting.plan import HOURS, REGIONS, SHARE, SLACKS, WORLDS
from tests.evaluation.renting.strategies import PLAIN_RESERVE, Planned

WAYS = {
    "planned": "planned: scaling and market choice by the planners",
    "cheapest-work": "cheapest-work: the machine on which the whole job costs least at the start, asked for once",
    "cheapest-hour": "cheapest-hour: the machine with the lowest price per hour at the start, asked for once",
    "on-demand": "on-demand: the cheapest for the whole job",
}

ABOUT = {
    "prices": "prices only, limit at the on-demand price: nothing is interrupted",
    "limit": "prices only, limit at the price of the start: where it rises, nodes are taken back",
    "presence": "prices, and in every place the nodes of a real g4dn pool, each living its own life",
    "scarce": f"as presence, but only {SHARE:.0%} of those nodes are to be had: about one at a time in each place",
}

SPANS = {0.6: "needs several GPUs", 1.2: "a fifth to spare", 2.0: "twice the time"}


def page(found: Mapping[str, Any], folder: str) -> tuple[str, Pictures]:
    """Return the page without its head, as Markdown, and its pictures by name. ``folder`` is that of the pictures."""
    runs = Runs(found)
    drawn = {"fleet-dollars": _picture(runs), "fleet-in-time": _in_time_picture(runs)}
    parts = [
        _claims(runs),
        _setup(runs),
        *(_world(runs, world) for world in WORLDS),
        *(f"![{name}]({folder}{name}.svg)\n" for name in drawn),
        _by_slack(runs),
        _elsewhere(),
        _LIMITS,
    ]
    return "\n".join(parts), drawn


def _claims(runs: Runs) -> str:
    money = (
        ("costs less per finished job", figures.dollars_per_finished),
        ("costs less per job in time", figures.dollars_per_timely),
    )
    rows = []
    for world in WORLDS:
        for other in runs.strategies()[1:]:
            for words, measure in money:
                ratio = runs.ratio(measure, world, "planned", other)
                holds = figures.verdict(ratio._replace(mean=ratio.mean - 1), less=True)
                rows.append((f"{world}: planned {words} than {other}", f"{ratio.shown()} times", holds))
            difference = runs.difference(figures.in_time, world, "planned", other)
            holds = figures.verdict(difference, less=False)
            claim = f"{world}: planned is in time more often than {other}"
            rows.append((claim, f"{difference.shown('{:.1f}')} points", holds))
    head = "## Claims\n\nMeans over the beginnings, beginning by beginning, with 95 % intervals.\n\n"
    return head + table(("claim", "measured", "holds"), rows)


def _setup(runs: Runs) -> str:
    beginnings = max(len(rows) for rows in runs.worlds.values())
    planned = Planned()
    models = ", ".join(
        f"{model} ({', '.join(f'{slack:g}' for slack in all_)})" for model, all_ in SLACKS.items()
    )
    ways = "\n".join(f"- {words}" for words in WAYS.values())
    worlds = "\n".join(f"- **{world}**: {words}" for world, words in ABOUT.items())
    jobs = f"""Jobs of {HOURS:g} h on the better single GPU, at the speeds that Gavel's authors measured on K80 and
        V100 GPUs; in brackets the time allowed, times that: {models}. A job that is not done after {PATIENCE:g} times
        its time is given up; what it cost counts. Machines are p2.xlarge, p2.8xlarge, p3.2xlarge, p3.8xlarge and
        p3.16xlarge in all zones of one region ({", ".join(REGIONS)}). Each job begins at {beginnings} random moments
        between 4 January and 16 March 2020, the same ones for all ways and worlds. Spot nodes cost each moment's
        real price, from their grant on. They work {BOOT:g} s later, hear {NOTICE:g} s ahead that they must leave, and
        every change of a job's nodes stops it for {RESTART:g} s; it saves before a notice runs out, so nothing else
        is lost."""
    rules = f"""Plain ways on spot plan for {PLAIN_RESERVE:.0%} of the time, so that something is left for
        interruptions, and let their pool ask again for whatever is lost; on-demand plans for all of it. The planned
        way decides every {INTERVAL / 60:g} min and at every change: the fewest nodes of each type that end in time,
        {planned.guard / 60:g} min and a move to spare, priced by the market's rule; the cheapest type wins, the
        present one with {planned.margin:.0%} in its favour. A place that is short for {planned.dry_after / 60:g} min
        is left out for {planned.dry_for / 60:g} min. When work stands still or is behind and on-demand could only
        just do it, on-demand it is."""
    unknown = """Nobody knows which pool had which shortage, so in the last two every place plays the trace from an
        offset of its own, drawn by seed."""
    history = """How the rules came about: the planned way's switch to on-demand was changed after a first look
        at the beginnings that this page shows. Six fresh beginnings cost 0.96, 0.92, 0.96 and 1.10
        times what cheapest-work costs for each finished job, in the order of the worlds above; they are
        not in the tables. In the world of the limit bids are the price of the start itself, since at
        1.02 times that price nothing was ever interrupted."""
    parts = (
        "## What is simulated",
        _wrapped(jobs),
        ways,
        _wrapped(rules),
        "The worlds:",
        worlds,
        _wrapped(unknown),
        _wrapped(history),
    )
    return "\n\n".join(parts) + "\n"


def _wrapped(words: str) -> str:
    return fill(" ".join(words.split()), 118, break_on_hyphens=False)


def _world(runs: Runs, world: str) -> str:
    rows = []
    for name in runs.strategies():
        ratio = runs.ratio(figures.dollars_per_finished, world, name, "on-demand")
        rows.append(
            (
                name,
                runs.value(figures.dollars_per_finished, world, name).shown(),
                ratio.shown(),
                runs.value(figures.dollars_per_timely, world, name).shown(),
                runs.value(figures.in_time, world, name).shown("{:.1f}"),
                runs.value(figures.availability, world, name).shown("{:.1f}"),
                runs.value(figures.interruptions, world, name).shown(),
                runs.value(figures.restarts, world, name).shown(),
                runs.value(figures.hours, world, name).shown(),
                runs.value(figures.on_demand, world, name).shown("{:.1f}"),
            )
        )
    head = (
        "way",
        "$ per finished job",
        "over on-demand",
        "$ per job in time",
        "in time, %",
        "training, % of time",
        "interruptions per job",
        "starts per job",
        "hours per job",
        "of $ on-demand, %",
    )
    return f"## World: {world}\n\n{ABOUT[world][0].upper()}{ABOUT[world][1:]}.\n\n{table(head, rows)}"


def _by_slack(runs: Runs) -> str:
    slacks = (
        sorted({row["slack"] for rows in runs.worlds["prices"] for row in rows[0:]}) if runs.worlds else []
    )
    rows = []
    for world in WORLDS:
        for slack in slacks:

            def mine(row: Row, slack: float = slack) -> bool:
                return bool(row["slack"] == slack)

            for name in runs.strategies():
                rows.append(
                    (
                        world,
                        f"{slack:g} ({SPANS.get(slack, 'other')})",
                        name,
                        runs.value(figures.dollars_per_finished, world, name, mine).shown(),
                        runs.value(figures.in_time, world, name, mine).shown("{:.1f}"),
                        runs.value(figures.hours, world, name, mine).shown(),
                    )
                )
    head = ("world", "time allowed", "way", "$ per finished job", "in time, %", "hours per job")
    return f"## By time allowed\n\n{table(head, rows)}"


def _picture(runs: Runs) -> str:
    series = {
        name: [runs.value(figures.dollars_per_finished, world, name).mean for world in WORLDS]
        for name in runs.strategies()
    }
    return bars_svg("Dollars per finished job", list(WORLDS), series, unit="$")


def _in_time_picture(runs: Runs) -> str:
    series = {
        name: [runs.value(figures.in_time, world, name).mean for world in WORLDS]
        for name in runs.strategies()
    }
    return bars_svg("Jobs that finished in time", list(WORLDS), series, unit="%")


def _elsewhere() -> str:
    return """## Measured elsewhere

- Share of effective training time on traces of spot nodes, beside the published ways to recover:
  [recovering from lost spot nodes](benchmarks.md#recovering-from-lost-spot-nodes).
- One large job that rents nodes by goodput instead of throughput, Pollux's cloud experiment:
  [one large job on rented nodes](pollux-evaluation.md#one-large-job-on-rented-nodes-fig-314).
"""


_LIMITS = """## What is not here

- On-demand capacity is always there; EC2's refund of a first hour that it interrupts, minimum charges, disks and
  traffic between zones are left out.
- Prices of 2020 moved slowly and hardly ever reached the on-demand price, so *prices* is nearly free of risk. No
  public record joins prices and interruptions of one pool: *presence* and *scarce* put a g4dn pool's hours behind
  prices of p2 and p3. Its nodes were lost more often, about once in two hours, than those of most pools are.
- Jobs that finish late count as finished, and one that waits for a low price or a free node is cheap: beside the
  dollars stands how many were in time.
- One's own demand moves no price and takes no node from others.
"""
