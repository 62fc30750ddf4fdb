"""The search for a plan in a process of its own: it must not take the training's interpreter.

``python -P -m ebbflow.infra.communication.searching`` reads a request from standard input and writes its answer to
standard output, both JSON.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.infra.errors import TrainingError
from ebbflow.planners.communication.baselines import System
from ebbflow.planners.communication.measured import MeasuredLinks
from ebbflow.planners.communication.plan import CommunicationPlan
from ebbflow.planners.communication.planning import bars_of, problem_of, search_plan
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.errors import EbbflowError

NICE = 10
START_SECONDS = 30.0  # that a process may take to start besides its search


@dataclass(frozen=True)
class SearchRequest:
    """What is searched.

    Args:
        recorded: the training.
        links: what its channels do.
        version: of the plan.
        seconds: bound of the search.
        seed: of the random walk.
        system: the scheduler that plans.
        hand_order: names of collectives, the most urgent first, for the system ``HO``.
    """

    recorded: RecordedTraining
    links: MeasuredLinks
    version: int
    seconds: float = 10.0
    seed: int = 0
    system: System = "Syndicate"
    hand_order: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the request as text."""
        return json.dumps(
            {
                "recorded": self.recorded.to_json(), "links": self.links.to_json(), "version": self.version,
                "seconds": self.seconds, "seed": self.seed, "system": self.system, "hand_order": self.hand_order,
            }
        )  # fmt: skip


@dataclass(frozen=True)
class SearchAnswer:
    """What was found.

    Args:
        plan: the best.
        gain: predicted share of the iteration that it saves.
        bars: ``plain`` and ``plan``: what runs when in an iteration, as (lane, name, start, end).
    """

    plan: CommunicationPlan
    gain: float
    bars: dict[str, list[list[Any]]]


class BackgroundSearch:
    """A search that runs beside the training, with a lower priority.

    Args:
        request: what is searched.

    Raises ``TrainingError`` where the process cannot be started.
    """

    def __init__(self, request: SearchRequest) -> None:
        self._end = time.monotonic() + request.seconds + START_SECONDS
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ebbflow.infra.communication.searching"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.to_json())
            self._process.stdin.close()
        except OSError as error:
            self.cancel()
            raise TrainingError(f"the search for a plan did not start: {error}") from error
        self._process.stdin = None

    def poll(self) -> SearchAnswer | None:
        """Return the answer if there is one. Raises ``TrainingError`` for a search that failed or takes too long."""
        if self._process.poll() is None:
            if time.monotonic() > self._end:
                self.cancel()
                raise TrainingError("the search for a plan did not end in time")
            return None
        out, problem = self._process.communicate()
        if self._process.returncode != 0:
            last = (problem.strip().splitlines() or ["no message"])[-1]
            raise TrainingError(f"the search for a plan failed: {last:.300}")
        said = json.loads(out)
        return SearchAnswer(CommunicationPlan.from_json(said["plan"]), float(said["gain"]), said["bars"])

    def cancel(self) -> None:
        """End the search."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def search(request: SearchRequest) -> SearchAnswer:
    """Search in this process. Raises ``OptionError`` for what cannot be planned."""
    problem = problem_of(
        request.recorded,
        request.links,
        rng=np.random.default_rng(request.seed),
        clock=time.monotonic,
        seconds=request.seconds,
        hand_order=request.hand_order,
    )
    found = search_plan(problem, version=request.version, system=request.system)
    bars = {
        "plain": bars_of(found.plain, request.recorded.dag),
        "plan": bars_of(found.best, request.recorded.dag),
    }
    return SearchAnswer(
        found.plan, found.gain, {key: [list(bar) for bar in some] for key, some in bars.items()}
    )


def main() -> int:
    """Answer the request on standard input; exit with 1 and a message where there is no plan."""
    os.nice(NICE)
    try:
        said = json.loads(sys.stdin.read())
        request = SearchRequest(
            RecordedTraining.from_json(said["recorded"]),
            MeasuredLinks.from_json(said["links"]),
            int(said["version"]),
            float(said["seconds"]),
            int(said["seed"]),
            said["system"],
            tuple(said["hand_order"]),
        )
        answer = search(request)
    except (EbbflowError, ValueError, KeyError, TypeError) as error:
        print(error, file=sys.stderr)
        return 1
    json.dump({"plan": answer.plan.to_json(), "gain": answer.gain, "bars": answer.bars}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
