"""Gangs in steps: what the guard refuses is not asked for, and nothing but the guard's word starts one."""

import ast
from pathlib import Path

import pytest

from ebbflow.infra.errors import InsufficientCapacityError
from ebbflow.infra.protocols import ApplyResult, Gang, ProviderCall, Refusal
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.guard import RunMoney
from ebbflow.planners.fleet.limits import Limits
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState
from ebbflow.planners.model.gangs import GangRequest, GangTarget
from ebbflow.tasks.fleet.gangs import end_gang, gang_of, guard_gang, start_gang
from ebbflow.tasks.fleet.request import FleetRules
from ebbflow.tasks.fleet.steps import Observation

ROOT = Path(__file__).parents[3]
RUN = GangRequest("run-1", "gpu", 4)
OFFER = Offer("g5.xlarge", "a", "spot", 0.5, 4, 16.0, gpus=1)
NODE = Node("i-1", 4, 16.0, price=0.5, gpus=1)


class Gangs:
    """A ``GangControl`` that remembers what it was asked."""

    def __init__(self, *held: str, refuses: str = "", dry: bool = False) -> None:
        self.has, self.refuses, self.dry = set(held), refuses, dry
        self.asked: list[tuple[GangTarget, bool]] = []

    def held(self, request: GangRequest) -> bool:
        return request.name in self.has

    def start(self, target: GangTarget, *, dry_run: bool = False) -> Gang:
        self.asked.append((target, dry_run))
        request = target.request
        if request.name in self.has:
            return Gang(request.name, request.pool, ("i-8", "i-9"))
        if self.refuses:
            return Gang(request.name, request.pool, (), refused=self.refuses)
        if self.dry:
            raise InsufficientCapacityError("there are none")
        ask = ProviderCall("gang", request.name, request.size, "test:Start")
        return Gang(request.name, request.pool, () if dry_run else ("i-2", "i-3"), ask)

    def end(self, name: str, *, dry_run: bool = False) -> tuple[ProviderCall, ...]:
        return (ProviderCall("end", "i-8, i-9"),) if name in self.has else ()


def seen(*pools: PoolState) -> Observation:
    found = pools or (PoolState("gpu", 1, 1, (NODE,)),)
    return Observation(Fleet(7, 1000.0, found), {"gpu": (OFFER,)})


def rules(**limits: float) -> FleetRules:
    return FleetRules(Limits(**limits))


def test_what_the_guard_lets_through_is_started_and_a_dry_run_says_what_it_would_be() -> None:
    gangs = Gangs()
    verdict = guard_gang(seen(), gangs, RUN, rules(nodes=5, dollars_per_hour=2.5), why="a run")
    assert verdict.target == GangTarget(RUN, 7, "a run", (("gpu", 1),))
    dry = start_gang(gangs, verdict, dry_run=True)
    assert (dry.nodes, dry.applied.dry_run, len(dry.applied.asked)) == ((), True, 1)
    done = start_gang(gangs, verdict)
    assert done.nodes == ("i-2", "i-3")
    assert done.applied == ApplyResult(7, (ProviderCall("gang", "run-1", 4, "test:Start"),))
    assert [dry for _, dry in gangs.asked] == [True, False]


@pytest.mark.parametrize(
    ("limits", "run", "said"),
    [
        ({"nodes": 4}, None, "all pools may have 4"),
        ({"dollars_per_hour": 2.4}, None, "the limit is $2.4/h"),
        ({"dollars_per_run": 3.0}, RunMoney(0.0, 2 * 3600.0), "the run may cost $3"),
    ],
)
def test_what_the_guard_refuses_is_not_asked_for(limits, run, said) -> None:
    gangs = Gangs()
    done = start_gang(gangs, guard_gang(seen(), gangs, RUN, rules(**limits), run=run))
    assert gangs.asked == []
    assert done.nodes == ()
    (refusal,) = done.applied.refused
    assert refusal.of == "guard"
    assert said in refusal.why


def test_a_gang_that_is_held_passes_and_is_returned_as_it_is() -> None:
    gangs = Gangs("run-1")
    verdict = guard_gang(seen(), gangs, RUN, rules(nodes=1, dollars_per_hour=0.1))
    done = start_gang(gangs, verdict)
    assert (done.nodes, done.applied.asked) == (("i-8", "i-9"), ())


def test_what_has_become_stale_is_a_refusal_and_a_want_of_machines_an_error() -> None:
    stale = Gangs(refuses="decided for revision 7; the fleet is at revision 8")
    done = start_gang(stale, guard_gang(seen(), stale, RUN, rules()))
    assert done.applied.refused == (Refusal("run-1", stale.refuses),)
    with pytest.raises(InsufficientCapacityError):
        start_gang(dry := Gangs(dry=True), guard_gang(seen(), dry, RUN, rules()))


def test_gangs_are_found_by_name_and_returned() -> None:
    shown = seen(PoolState("gpu", 1, 1, (NODE,)), PoolState("gpu/run-1", 2, 2, ()))
    assert gang_of(shown, "run-1").planned == 2
    with pytest.raises(OptionError, match="there is no gang 'gpu' in this cluster; there are run-1"):
        gang_of(shown, "gpu")
    with pytest.raises(OptionError, match="there are none"):
        gang_of(seen(), "run-1")
    assert [str(ask) for ask in end_gang(Gangs("run-1"), "run-1", dry_run=True).asked] == ["end i-8, i-9"]
    assert end_gang(Gangs(), "run-1").asked == ()


def _callers(name: str) -> set[str]:
    """Return the modules that call what ends in ``name``."""
    found = set()
    for folder in ("planners", "infra", "tasks", "flows"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if all(part in text for part in name.split(".")) and any(
                isinstance(each, ast.Call) and ast.unparse(each.func).endswith(name)
                for each in ast.walk(ast.parse(text))
            ):
                found.add(path.relative_to(ROOT).as_posix())
    return found


def test_nothing_starts_a_gang_around_the_guard() -> None:
    assert _callers("GangTarget") == {"planners/fleet/guard_gang.py"}
    assert _callers("gangs.start") == {"tasks/fleet/gangs.py"}
    assert _callers("create_fleet") == {"infra/aws/fleet/gangs.py"}
