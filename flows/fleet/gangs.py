"""``ebbflow fleet gang | end``: nodes that are wanted all at once for one run, and their return."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ebbflow.flows.fleet.answer import Answer, applied_json
from ebbflow.flows.fleet.options import GRACE, Grace, with_cluster
from ebbflow.flows.runs.answers import confirm, fail
from ebbflow.flows.runs.options import AsJson, DryRun, Yes, duration_option
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.drawing.wording import plural

if TYPE_CHECKING:
    from ebbflow.planners.fleet.guard_gang import GangVerdict
    from ebbflow.tasks.fleet.request import FleetRequest
    from ebbflow.tasks.fleet.steps import Observation

Name = Annotated[str, typer.Argument(help="Name of the gang: letters, digits and dashes.", metavar="NAME")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``ebbflow fleet``."""
    for command in (gang, end):
        app.command()(command)


@with_cluster
def gang(
    request: "FleetRequest",
    name: Name,
    pool: Annotated[
        str,
        typer.Option(
            help="Name of the node pool whose instance types are used, as in Terraform.", metavar="POOL"
        ),
    ],
    size: Annotated[int, typer.Option(help="Number of nodes.", metavar="N", min=1)],
    market: Annotated[Literal["spot", "on-demand"], typer.Option(help="Market of the nodes.")] = "spot",
    max_price: Annotated[
        float | None,
        typer.Option(
            help="Maximum price of one Spot node, $/h. Default: its on-demand price.", metavar="DOLLARS"
        ),
    ] = None,
    expected_duration: Annotated[
        float | None,
        duration_option(help="Expected duration of the run, by which the quota dollars_per_run is checked."),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Start N nodes at once for one run, or none: of one type, in one zone.

    [b]Examples[/b]

        ebbflow fleet gang run-1 --pool trainers --size 8 --dry-run

        ebbflow fleet gang run-1 --pool trainers --size 8 --expected-duration 6h

        ebbflow fleet gang run-2 --pool trainers --size 4 --market on-demand --yes

    It costs money: the guard lets it through whole or refuses it. Its nodes count against the limits of its pool, its
    team and all pools, and no loop replaces, grows or shrinks it. Given again, the command starts nothing twice.
    Return it with ebbflow fleet end NAME.
    """
    from ebbflow.flows.fleet.terminal import applied_lines, gang_view
    from ebbflow.infra.errors import AwsUnavailableError, InsufficientCapacityError
    from ebbflow.planners.fleet.guard import RunMoney
    from ebbflow.planners.model.gangs import GangRequest
    from ebbflow.tasks.fleet.gangs import guard_gang, start_gang
    from ebbflow.tasks.fleet.request import unlimited
    from ebbflow.tasks.fleet.steps import observe, opened

    wanted = GangRequest(name, pool, size, market, max_price=max_price)
    with opened(request) as fleet, Answer(json=json, dry_run=dry_run) as answer:
        if pool not in fleet.settings.pools:
            known = ", ".join(sorted(fleet.settings.pools)) or "none"
            raise OptionError(f"--pool must be one of the cluster's ({known}); got {pool!r}")
        limits = fleet.rules.limits
        if unlimited(limits):
            answer.note(
                "no quota is set: --config FILE or $EBBFLOW_CONFIG names the configuration file (docs/fleet.md)"
            )
        if limits.dollars_per_run < float("inf") and expected_duration is None:
            answer.note(
                f"--expected-duration is not given: the quota of ${limits.dollars_per_run:g} per run is not checked"
            )
        run = RunMoney(0.0, expected_duration or None)

        def judged() -> "tuple[Observation, GangVerdict]":
            seen = observe(fleet.control, fleet.prices)
            return seen, guard_gang(seen, fleet.gangs, wanted, fleet.rules, run=run)

        seen, verdict = judged()
        if verdict.target is not None and fleet.gangs.held(wanted):
            held = start_gang(fleet.gangs, verdict).nodes
            answer.tell(gang=name, nodes=list(held), started=False)
            answer.say(f"{name} is running already: {', '.join(held)}")
            return
        would = start_gang(fleet.gangs, verdict, dry_run=True)
        answer.show(gang_view(wanted, seen, verdict, would.applied))
        answer.tell(
            gang=name,
            guard={"passes": verdict.target is not None, "reasons": list(verdict.reasons)},
            would=applied_json(would.applied),
            problems=list(seen.problems),
            nodes=[],
            started=False,
        )
        if verdict.target is None:
            fail(f"nothing was done: {'; '.join(verdict.reasons)}")
        if dry_run:
            answer.say("dry run: nothing was done")
            return
        confirm(f"Start {plural(size, f'{market} node')} of {pool}?", answer.sure(yes))
        seen, again = judged()  # a notice may have come, or others have grown, while somebody thought
        if again.target is None:
            fail(f"nothing was done: {'; '.join(again.reasons)}")
        try:
            started = start_gang(fleet.gangs, again)
        except InsufficientCapacityError as error:
            other = ", or --market on-demand" if market == "spot" else ""
            fail(f"{error}. Retry later, or request fewer nodes{other}")
        except AwsUnavailableError as error:
            fail(
                f"{error}. Whether the gang was started is not known: repeat the command, it starts no gang twice"
            )
        if started.applied.refused:
            fail(f"nothing was done: {'; '.join(applied_lines(started.applied))}; retry")
        answer.tell(nodes=list(started.nodes), started=True, done=True)
        answer.say(f"started: {', '.join(started.nodes)}")
        answer.say(f"they incur costs until terminated: ebbflow fleet end {name}")


@with_cluster
def end(
    request: "FleetRequest",
    name: Name,
    termination_grace: Grace = GRACE,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Return a gang: its nodes finish what runs on them, and are ended.

    [b]Examples[/b]

        ebbflow fleet end run-1 --dry-run

        ebbflow fleet end run-1 --termination-grace 1m

    Each node is told to finish; after --termination-grace it is terminated even if it is still busy.
    """
    from ebbflow.flows.fleet.terminal import applied_lines
    from ebbflow.tasks.fleet.draining import drain
    from ebbflow.tasks.fleet.gangs import end_gang, gang_of
    from ebbflow.tasks.fleet.steps import observe, opened

    with opened(request) as fleet, Answer(json=json, dry_run=dry_run) as answer:
        seen = observe(fleet.control, fleet.prices)
        state = gang_of(seen, name)
        would = end_gang(fleet.gangs, name, seen.fleet.revision, dry_run=True)
        answer.tell(gang=name, would=applied_json(would), drained=None, terminated=None)
        for line in applied_lines(would):
            answer.say(line)
        if dry_run:
            answer.say("dry run: nothing was done")
            return
        confirm(
            f"Terminate {name}, {plural(max(state.planned, len(state.nodes)), 'node')}?", answer.sure(yes)
        )
        if state.nodes and termination_grace > 0:
            try:
                drained = drain(
                    fleet.runner(min(termination_grace, 60.0)),
                    state.nodes,
                    termination_grace,
                    fleet.clock,
                    answer.say,
                )
            except KeyboardInterrupt:
                answer.say(
                    f"interrupted; the gang is not terminated and incurs costs. To continue: ebbflow"
                    f" fleet end {name}"
                )
                raise
            answer.tell(drained=asdict(drained), done=True)
        answer.tell(terminated=applied_json(end_gang(fleet.gangs, name, seen.fleet.revision)), done=True)
        answer.say(f"{name} is terminated")
