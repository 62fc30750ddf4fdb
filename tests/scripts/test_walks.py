"""How ``walks`` counts a walk through modules, of made-up calls and of a made-up checkout."""

import subprocess
import sys
from pathlib import Path

from tests.scripts.walks import ROOT, Call, Recorder, Step, Walk

RUN, PLAN, FILES, SCREEN = (
    "tasks.query.run",
    "planners.query.planner",
    "infra.storage.files",
    "flows.query.bars",
)


def test_going_down_is_no_climb() -> None:
    walk = Walk.of([Call("", SCREEN), Call(SCREEN, RUN), Call(RUN, FILES), Call(FILES, PLAN)])
    assert (walk.stays, walk.modules, walk.rooms, walk.climbs) == (4, 4, 4, 0)


def test_a_caller_that_goes_on_makes_a_stay_but_no_climb() -> None:
    walk = Walk.of([Call("", RUN), Call(RUN, FILES), Call(RUN, RUN), Call(RUN, "tasks.query.recorder")])
    assert (walk.stays, walk.modules, walk.rooms, walk.climbs) == (4, 3, 2, 0)


def test_a_higher_layer_that_is_called_after_a_lower_one_is_a_climb() -> None:
    walk = Walk.of([Call("", RUN), Call(RUN, PLAN), Call(RUN, FILES)])
    assert walk.steps[-1] == Step(PLAN, FILES, climb=True)
    assert (walk.climbs, walk.callbacks) == (1, 0)


def test_a_call_from_below_is_a_callback() -> None:
    walk = Walk.of([Call("", SCREEN), Call(SCREEN, RUN), Call(RUN, SCREEN)])
    assert (walk.stays, walk.modules, walk.climbs, walk.callbacks) == (3, 2, 1, 1)
    assert walk.sequence().splitlines()[-1] == f"   3 ! {SCREEN}  (from {RUN})"


def test_a_loop_counts_once() -> None:
    once = [Call(RUN, PLAN), Call(RUN, FILES)]
    walk = Walk.of([Call("", RUN), *once, *once, *once])
    assert (walk.stays, walk.climbs) == (4, 1)  # run, planner, files, and the way back to the planner
    assert walk.table().split() == [
        *("stays", "4", "modules", "3", "rooms", "3", "climbs", "1", "callbacks", "0")
    ]


def test_calls_into_the_checkout_are_noted_but_those_of_imports(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "run.py").write_text(
        "import planners_of_test\n"
        "def helper(): return planners_of_test.plan(inner)\n"
        "def inner(): return 1\n"
        "helper()\n"  # while it is imported
    )
    (tmp_path / "planners").mkdir()
    (tmp_path / "planners" / "planners_of_test.py").write_text("def plan(ask): return ask() + len([ask()])\n")
    names: dict[str, object] = {}
    sys.path.insert(0, str(tmp_path / "planners"))
    recorder = Recorder(tmp_path)
    path = tmp_path / "tasks" / "run.py"
    code = compile(path.read_text(), str(path), "exec")
    sys.setprofile(recorder)
    try:
        exec(code, names)
        names["helper"]()  # type: ignore[operator]
    finally:
        sys.setprofile(None)
        sys.path.remove(str(tmp_path / "planners"))
        del sys.modules["planners_of_test"]
    run, plan = "tasks.run", "planners.planners_of_test"
    assert recorder.calls == [Call("", run), Call(run, plan), Call(plan, run)]


def test_a_query_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.scripts.walks", "query", "--steps"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert " tasks.query.run\n" in done.stdout
    assert done.stdout.split()[-2] == "callbacks"
