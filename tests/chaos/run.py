"""One chaotic run of the whole system: ``python -m tests.chaos.run SEED FOLDER``.

A capacity loop, pipelines and local nodes, each in processes of their own, meet the faults of ``faults.Script``;
whoever dies is started again as an orchestrator does. When the faults are over the rest has to come to its end
within a bound, and ``invariants`` says what must hold then. Writes ``outcome.json`` into the folder; exits with 1 if
anything did not hold.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import InfraError, LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import list_fleets
from ebbflow.infra.storage.files import write_text
from tests.chaos import fit_data, invariants
from tests.chaos.faults import Script
from tests.chaos.injecting import Injector
from tests.chaos.invariants import Findings
from tests.chaos.keeping import Kept
from tests.chaos.scene import (
    CLUSTER,
    HERE,
    Scene,
    Work,
    command,
    labs,
    opened_scene,
    shop,
    tables,
    works,
    write,
)
from tests.chaos.watching import Uses

BOUND = 480.0  # s after the last fault, or after the last work began, within which all has come to its end
BRIEF_BOUND = 180.0
LEFT = 40.0  # s for leases to end once all apps have
GONE = 20.0  # s for processes to be gone once their parents have ended
STOP = 60.0  # s for a loop to stop
TWIN = 30.0  # s for a second process of a run to be refused
_LOOK = 0.1  # s
OUTCOME = "outcome.json"


@dataclass
class Play:
    """A run under way."""

    scene: Scene
    say: Callable[[str], None]
    findings: Findings = field(default_factory=Findings)
    works: list[Work] = field(default_factory=list)
    apps: list[Kept] = field(default_factory=list)
    loops: list[Kept] = field(default_factory=list)
    injector: Injector | None = None
    beside: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    weights: dict[str, Future[str]] = field(default_factory=dict)  # of undisturbed trainings, by app
    began: float = field(default_factory=time.monotonic)

    # --- processes ------------------------------------------------------------------------------------------

    @property
    def runs(self) -> Path:
        return self.scene.disk / "runs"

    def loop(self, name: str) -> Kept:
        arguments = [
            "capacity", "start", "--cluster", CLUSTER, "--source", f"local:{self.scene.fleet.name}",
            "--config", str(self.scene.folder / "limits.toml"), "--runner", "plain",
        ]  # fmt: skip
        return Kept(name, lambda: command(*arguments), self.scene.folder, self.scene.environment)

    def app(self, work: Work) -> Kept:
        path = write(work, self.scene.folder)
        return Kept(
            work.name, lambda: self.resumed(work.name, path), self.scene.folder, self.scene.environment
        )

    def resumed(self, name: str, path: Path) -> Sequence[str]:
        """Return what begins a run, or goes on with it."""
        own = ["--runs-dir", str(self.runs), "--runner", "plain"]
        if (self.runs / name / "run.json").exists():
            return command("run", "--resume", name, *own)
        return command("run", str(path), "--run-id", name, *own)

    def twin(self, kept: Kept) -> "subprocess.CompletedProcess[bytes]":
        """Start a second process for a run that one holds; it must be refused."""
        return subprocess.run(
            list(kept.command()),
            cwd=self.scene.folder,
            env=dict(self.scene.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TWIN,
            check=False,
        )

    # --- acts -----------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Let everything happen, and check what must hold."""
        script = self.scene.script
        with ExitStack() as stack:
            ledger = stack.enter_context(self.scene.open())
            uses = stack.enter_context(Uses(self.scene.fleet.state.uid, ledger))
            self.loops += [self.loop("loop"), *([self.loop("spare")] if script.spare else [])]
            stack.callback(self.end_all)
            for loop in self.loops:
                loop.start()
            self.await_(lambda: ledger.leader() is not None, 90.0, "a loop leads")
            for work in works(script, self.scene):
                self.add(work)
            self.injector = Injector(self.scene, self.loops, self.apps, self.twin, self.say)
            if script.spark:
                self.await_(lambda: bool(ledger.state().apps), 120.0, "an app has entered")
            else:  # few seconds, which are to meet a training
                self.await_(self.trains, 120.0, "a step is done")
            self.injector.begin()
            self.until_over()
            self.injector.end()
            self.check_end(ledger)
        self.findings.count(looks=uses.looks, gpus_seen=uses.seen)
        self.findings.wrong("use", sorted(set(uses.problems)))
        if not uses.seen:
            self.findings.wrong("use", ["no GPU was ever seen in use"])

    def trains(self) -> bool:
        """Tell whether any step of a training is done."""
        return any('"done"' in path.read_text() for path in self.scene.logs.rglob("*.jsonl"))

    def add(self, work: Work) -> None:
        self.works.append(work)
        self.apps.append(self.app(work))
        self.apps[-1].start()
        for one in work.trainings:
            if one.gpus == 1:  # on several processes sums are rounded otherwise
                self.weights[f"{work.name}.{one.step}"] = self.beside.submit(
                    fit_data.undisturbed, HERE / "fit.py", work.queries[one.query], self.scene.data, one.x, one.y,
                    one.epochs, self.scene.data.parent / "undisturbed",
                )  # fmt: skip

    def until_over(self) -> None:
        """Look after everybody until all pipelines have ended. While there are faults to come, there is work."""
        script, injector = self.scene.script, self.injector
        assert injector is not None
        quiet = time.monotonic()
        bound = BOUND if script.spark else BRIEF_BOUND
        while True:
            self.tend()
            left = [app for app in self.apps if not app.over]
            if injector.busy:
                quiet = time.monotonic()
                if script.spark:
                    self.keep_busy({app.name.rstrip("0123456789") for app in left})
            elif not left:
                return
            elif time.monotonic() - quiet > bound:
                names = ", ".join(app.name for app in left)
                self.findings.wrong("bound", [f"{names} did not end within {bound:g} s after the last fault"])
                for kept in [*left, *self.loops]:
                    kept.stacks()
                return
            time.sleep(_LOOK)

    def keep_busy(self, kinds: set[str]) -> None:
        """Begin another pipeline of each kind of which none runs."""
        for kind in {"shop", "labs"} - kinds:
            number = sum(app.name.startswith(kind) for app in self.apps) + 1
            if kind == "shop":
                self.add(shop(self.scene, number, trains=False))
            else:
                self.add(labs(self.scene, number, epochs=6, pause=0.2, trials=0))

    def tend(self) -> None:
        for kept in [*self.loops, *self.apps]:
            kept.tend()

    def await_(self, true: Callable[[], bool], seconds: float, what: str) -> bool:
        """Wait, looking after everybody, until something is so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.tend()
            with suppress(LedgerError):
                if true():
                    return True
            time.sleep(_LOOK)
        self.findings.wrong("bound", [f"not within {seconds:g} s: {what}"])
        return False

    def end_all(self) -> None:
        for kept in [*self.apps, *self.loops]:
            kept.over = True
            if kept.pid:
                kept.stop(STOP)

    def check_end(self, ledger: Ledger) -> None:
        self.await_(lambda: not ledger.state().leases, LEFT, "all leases have ended")
        for loop in self.loops:
            if said := loop.stop(STOP):
                self.findings.wrong("end", [said])
        assert self.injector is not None
        for kept in [*self.loops, *self.apps]:
            self.findings.wrong("process", kept.problems())
        events = invariants.check_ledger(ledger, self.works, self.findings)
        invariants.check_faults(self.injector.done, events, self.findings)
        self.check_results()
        invariants.check_files(self.scene.disk, self.findings)

    def check_results(self) -> None:
        for work in self.works:
            folder = self.runs / work.name
            try:
                steps = json.loads((folder / "run.json").read_text())["steps"]
            except (OSError, ValueError) as error:
                self.findings.wrong("record", [f"{work.name}: {error}"])
                continue
            invariants.check_queries(work, folder, self.scene.data, self.findings)
            for one in work.trainings:
                known = self.weights.get(f"{work.name}.{one.step}")
                weights = known.result(fit_data.LONG) if known is not None else ""
                metrics = steps[one.step]["results"]
                invariants.check_training(work, one, folder, self.scene.logs, weights, metrics, self.findings)
            for step, trials in work.searches.items():
                invariants.check_search(work, step, trials, folder, steps[step]["details"], self.findings)


def run(script: Script, folder: Path, data: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Do one run in ``folder`` and return what came of it; ``violations`` is empty if all held."""
    began = time.monotonic()
    findings, play = Findings(), None
    uid = ""
    try:
        with opened_scene(script, folder, tables(data)) as scene:
            uid = scene.uid
            play = Play(scene, say, findings)
            play.play()
        if any(book.name == scene.fleet.name for book in list_fleets()):
            findings.wrong("left", [f"the fleet {scene.fleet.name} is up"])
    except (
        InfraError,
        OSError,
        subprocess.SubprocessError,
        AssertionError,
        KeyError,
        ValueError,
        RuntimeError,
    ):
        findings.wrong("harness", [traceback.format_exc()[-2000:]])
    if uid:
        end = time.monotonic() + GONE
        while (left := invariants.leftovers(uid)) and time.monotonic() < end:
            time.sleep(_LOOK)
        findings.wrong("left", left)
        for process in invariants.marked(uid):  # so that they do not disturb the next run
            with suppress(Exception):
                process.kill()
    done = play.injector.done if play is not None and play.injector is not None else []
    outcome = {
        "seed": script.seed,
        "seconds": round(time.monotonic() - began, 1),
        "ledger": "PostgreSQL" if script.postgres else "SQLite",
        "violations": findings.violations,
        "seen": findings.seen,
        "faults": [one.to_json() for one in done],
        "restarts": {kept.name: len(kept.starts) - 1 for kept in (*play.loops, *play.apps)} if play else {},
    }
    write_text(folder / OUTCOME, json.dumps(outcome, indent=1) + "\n")
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--brief", action="store_true", help="the short form: no Spark, some seconds")
    parser.add_argument("--data", type=Path, help="where tables and undisturbed results are kept")
    given = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # so that all is taken down, also behind a shell's &
        signal.signal(number, signal.default_int_handler)
    folder = given.folder.absolute()
    outcome = run(
        Script.of(given.seed, brief=given.brief), folder, (given.data or folder / "data").absolute()
    )
    for sentence in outcome["violations"]:
        print(f"WRONG {sentence}", file=sys.stderr)
    return 1 if outcome["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
