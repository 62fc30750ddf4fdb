"""``ebbflow fleet grow | shrink | drain``: what costs money, or ends nodes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ebbflow.flows.fleet.answer import Answer, applied_json
from ebbflow.flows.fleet.options import GRACE, Grace, with_cluster
from ebbflow.flows.runs.answers import confirm, fail
from ebbflow.flows.runs.options import AsJson, DryRun, Yes
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.drawing.wording import plural

if TYPE_CHECKING:
    from ebbflow.planners.fleet.guard import GuardResult
    from ebbflow.planners.model.fleet import Target
    from ebbflow.tasks.fleet.request import FleetRequest
    from ebbflow.tasks.fleet.steps import Observation, OpenedFleet

Pool = Annotated[str, typer.Argument(help="Name of the node pool in Terraform.", metavar="POOL")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``ebbflow fleet``."""
    for command in (grow, shrink, drain):
        app.command()(command)


@with_cluster
def grow(
    request: "FleetRequest",
    pool: Pool,
    count: Annotated[int, typer.Argument(help="Number of nodes to add.", metavar="N", min=1)],
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="Launch on-demand nodes instead of Spot nodes.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Ask for N more nodes.

    [b]Examples[/b]

        ebbflow fleet grow workers 2 --dry-run

        ebbflow fleet grow workers 2

        ebbflow fleet grow workers 1 --on-demand --yes

    It costs money: the guard checks budgets and limits first, and what it lets through is shown before anything is
    asked for. Nodes arrive later, or never; ebbflow fleet status tells.
    """
    from ebbflow.tasks.fleet.request import unlimited
    from ebbflow.tasks.fleet.steps import opened, wish

    with opened(request) as fleet, Answer(json=json, dry_run=dry_run) as answer:
        _of_group(fleet, pool)
        if unlimited(fleet.rules.limits):
            answer.note(
                "no quota is set: --config FILE or $EBBFLOW_CONFIG names the configuration file (docs/fleet.md)"
            )

        def wanted(seen: "Observation") -> "Target":
            state = seen.pool(pool)
            kind = "on-demand " if on_demand else ""
            return wish(
                seen,
                pool,
                state.planned + count,
                f"{plural(count, f'{kind}node')} more than {state.planned}: requested by the operator",
                on_demand=state.on_demand + count if on_demand else None,
            )

        def refused(seen: "Observation", target: "Target") -> bool:
            state = seen.pool(pool)
            # spot nodes are not what was asked for
            return target.nodes <= state.planned or (on_demand and target.on_demand <= state.on_demand)

        _change(fleet, answer, wanted, f"Grow {pool}?", dry_run, yes, refused=refused)
        if not dry_run:
            answer.say("requested; ebbflow fleet status --watch 10 shows them launch")


@with_cluster
def shrink(
    request: "FleetRequest",
    pool: Pool,
    count: Annotated[
        int | None, typer.Argument(help="Number of nodes to remove.", metavar="N", min=1)
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            help="IDs of the nodes to remove instead of a number, comma-separated or repeated.", metavar="ID"
        ),
    ] = None,
    termination_grace: Grace = GRACE,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Drain N nodes, or those named, and end them. They are not replaced.

    [b]Examples[/b]

        ebbflow fleet shrink workers 1 --dry-run

        ebbflow fleet shrink workers 2 --termination-grace 10m

        ebbflow fleet shrink workers --nodes i-0123456789abcdef0

    Without --nodes those go first that leave anyway, then the most expensive. Nodes that have not arrived yet are
    given up before any other. Each node is told to finish; after --termination-grace it is terminated even if it is
    still busy, and its work restarts elsewhere.
    """
    from ebbflow.tasks.fleet.steps import opened, size_without, wish

    ids = _ids(nodes)
    if (count is None) == (not ids):
        raise OptionError("name a number of nodes or --nodes ID, one of both: ebbflow fleet shrink POOL 1")
    with opened(request) as fleet, Answer(json=json, dry_run=dry_run) as answer:
        _of_group(fleet, pool)

        def wanted(seen: "Observation") -> "Target":
            state = seen.pool(pool)
            for name in ids:
                if seen.pool_of(name).name != pool:
                    raise OptionError(f"{name} is a node of pool {seen.pool_of(name).name}, not of {pool}")
            if (count or 0) > state.planned:
                raise OptionError(
                    f"{pool} has only {plural(state.planned, 'node')} planned; got {count} fewer"
                )
            size = size_without(state, ids) if ids else state.planned - (count or 0)
            why = (
                f"{', '.join(ids)} to be terminated"
                if ids
                else f"{plural(count or 0, 'node')} fewer than {state.planned}"
            )
            return wish(seen, pool, size, f"{why}: requested by the operator", drain=ids)

        found = _change(
            fleet,
            answer,
            wanted,
            f"Shrink {pool}?",
            dry_run,
            yes,
            refused=lambda s, t: t.nodes >= s.pool(pool).planned and not t.drain,
        )
        if found is not None:
            _leave(fleet, answer, *found, termination_grace, end=True)


@with_cluster
def drain(
    request: "FleetRequest",
    nodes: Annotated[
        list[str], typer.Argument(help="Node IDs, as ebbflow fleet status shows them.", metavar="ID")
    ],
    termination_grace: Grace = GRACE,
    end: Annotated[
        bool, typer.Option("--end", help="Terminate the nodes after the drain; their pool replaces them.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Let nodes finish what runs on them and take nothing new.

    [b]Examples[/b]

        ebbflow fleet drain i-0123456789abcdef0

        ebbflow fleet drain i-0123456789abcdef0 --end  (replaces the node)

    The size of the pool stays. A node that is drained and not terminated incurs costs: terminate it by
    --end, which replaces it, or by ebbflow fleet shrink POOL --nodes ID, which does not.
    """
    from ebbflow.tasks.fleet.steps import opened, wish

    ids = _ids(nodes)
    with opened(request) as fleet, Answer(json=json, dry_run=dry_run) as answer:

        def wanted(seen: "Observation") -> "Target":
            pools = sorted({seen.pool_of(name).name for name in ids})
            if len(pools) > 1:
                raise OptionError(f"drain nodes of one pool at a time; these are of {', '.join(pools)}")
            _of_group(fleet, pools[0])
            state = seen.pool(pools[0])
            return wish(
                seen,
                state.name,
                state.planned,
                f"{', '.join(ids)} to be drained: requested by the operator",
                drain=ids,
            )

        question = f"Drain {'and terminate ' if end else ''}{', '.join(ids)}?"
        found = _change(fleet, answer, wanted, question, dry_run, yes, refused=lambda s, t: not t.drain)
        if found is not None:
            _leave(fleet, answer, *found, termination_grace, end=end)


def _change(
    fleet: "OpenedFleet",
    answer: Answer,
    wanted: "Callable[[Observation], Target]",
    question: str,
    dry_run: bool,
    yes: bool,
    *,
    refused: "Callable[[Observation, Target], bool]",
) -> "tuple[Observation, Target] | None":
    """Show what a wish comes to, ask, and apply it; ``None`` after a dry run. ``refused``: nothing is left of it."""
    from ebbflow.flows.fleet.terminal import applied_lines, plan_view, verdict_lines
    from ebbflow.tasks.fleet.plan import plan as make
    from ebbflow.tasks.fleet.steps import act, decide, guard, observe, same_choice

    def judged() -> "tuple[Observation, GuardResult]":
        seen = observe(fleet.control, fleet.prices)
        return seen, guard(seen, decide(seen, wanted(seen), fleet.rules), fleet.rules)

    seen, verdict = judged()
    shown = make(fleet.control, seen, wanted(seen), fleet.rules, fleet.stays.look())
    answer.show(plan_view([shown], seen.problems))
    answer.tell(plan=shown.to_json(), problems=list(seen.problems), applied=None)
    if verdict.target is None or refused(seen, verdict.target):
        fail(f"nothing was done: {'; '.join(verdict_lines(verdict))}")
    if dry_run:
        answer.say("dry run: nothing was done")
        return None
    confirm(question, answer.sure(yes))
    seen, again = judged()  # a notice may have come while somebody thought
    if not same_choice(verdict, again) or again.target is None:
        fail("nothing was done: the fleet has changed meanwhile; check ebbflow fleet status and retry")
    applied = act(fleet.control, again)
    answer.tell(applied=applied_json(applied), done=bool(applied.asked))
    if applied.asked or applied.refused:
        for line in applied_lines(applied):
            answer.say(line)
    if applied.revision != again.target.revision:
        fail("nothing was done: the fleet has changed meanwhile; check ebbflow fleet status and retry")
    return seen, again.target


def _leave(
    fleet: "OpenedFleet", answer: Answer, seen: "Observation", target: "Target", wait: float, *, end: bool
) -> None:
    """Drain the nodes of ``target`` with progress, and end them."""
    from ebbflow.flows.fleet.terminal import applied_lines
    from ebbflow.tasks.fleet.draining import drain as let_finish

    nodes = [node for node in seen.pool(target.pool).nodes if node.id in target.drain]
    if not nodes:
        return

    say = answer.say
    names = ",".join(node.id for node in nodes)
    try:
        drained = let_finish(fleet.runner(min(wait, 60.0)), nodes, wait, fleet.clock, say)
    except KeyboardInterrupt:
        say(
            f"interrupted; draining nodes keep draining. To continue: ebbflow fleet shrink {target.pool} "
            f"--nodes {names}"
        )
        raise
    answer.tell(drained=asdict(drained), terminated=None, done=len(drained.untold) < len(nodes))
    if not end:
        say(
            f"not terminated; they incur costs until terminated: ebbflow fleet shrink {target.pool} --nodes {names}"
        )
        if drained.untold:
            fail(f"{len(drained.untold)} of {plural(len(nodes), 'node')} could not be drained")
        return
    if drained.busy:
        say(f"{plural(len(drained.busy), 'node')} not known to be idle: the lifecycle hook waits once more")
    ended = fleet.control.terminate([node.id for node in nodes])
    answer.tell(terminated=applied_json(ended), done=bool(ended.asked))
    for line in applied_lines(ended):
        say(line)
    if ended.refused:
        fail(f"{len(ended.refused)} of {plural(len(nodes), 'node')} not ended")


def _ids(given: Sequence[str] | None) -> tuple[str, ...]:
    names = [name.strip() for text in given or () for name in text.split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def _of_group(fleet: "OpenedFleet", pool: str) -> None:
    if pool not in fleet.settings.pools:
        known = ", ".join(sorted(fleet.settings.pools)) or "none"
        hint = "; the size of a gang is fixed; ebbflow fleet end terminates it" if "/" in pool else ""
        raise OptionError(f"POOL must be one of the cluster's ({known}); got {pool!r}{hint}")
