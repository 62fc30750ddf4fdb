"""SIGKILL to the loop at any point of its cycle: the next one goes on, and no GPU is ever booked twice."""

import multiprocessing
import signal
import threading
from pathlib import Path

import pytest
from loopcases import BRIEF, ScriptedApp, double_bookings, settings, until
from loopprocess import POINTS, FileSource, run, write

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.ledger import LoopBegan
from ebbflow.tasks.capacity.loop import CapacityLoop


@pytest.mark.processes
def test_a_loop_that_is_killed_anywhere_is_followed_by_one_that_puts_all_right(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["loopprocess"])
    there = [["n0", 2], ["n1", 2]]
    write(tmp_path / "nodes.json", there)
    armed = tmp_path / "armed"
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        apps = [ScriptedApp(ledger, "a", 4).enter()]

        def step() -> None:
            for app in apps:
                app.step()

        for number, point in enumerate(POINTS):
            child = processes.Process(target=run, args=(str(tmp_path), point), daemon=True)
            child.start()
            begun = number + 1
            until(lambda begun=begun: ledger.state().token >= begun, "the lead", step)
            until(lambda: len(ledger.state().leases) > 0, "leases", step)
            armed.touch()
            # a node comes, another goes, an app enters: there is something to do at each point
            there = [*there[1:], [f"n{number + 2}", 2]]
            write(tmp_path / "nodes.json", there)
            apps.append(ScriptedApp(ledger, f"b{number}", 1).enter())
            until(lambda child=child: child.exitcode is not None, f"the end at {point!r}", step)
            assert child.exitcode == -signal.SIGKILL
            armed.unlink()
        stop = threading.Event()
        loop = CapacityLoop(ledger, None, FileSource(tmp_path / "nodes.json"), settings(), pace=BRIEF)
        last = threading.Thread(target=loop.run, args=(stop,), daemon=True)
        last.start()
        names = {name for name, _ in there}
        until(lambda: set(ledger.state().nodes) == names, "the nodes", step)
        until(lambda: len(ledger.state().leases) == 4, "all GPUs", step)
        until(
            lambda: {lease.node for lease in ledger.state().leases.values()} <= names, "no lost leases", step
        )
        for app in apps[:-1]:
            app.finish()
        apps[:] = apps[-1:]
        until(lambda: len(ledger.state().held(apps[0].id)) == 1, "the last one's lease", step)
        stop.set()
        last.join(150)
        assert len(ledger.events(kinds=[LoopBegan])) == len(POINTS) + 1
        assert double_bookings(ledger) == []
        assert ledger.verify() == []
