"""Elastic runs of real processes under a launcher's channel, and what they wrote."""

import json
import os
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbflow.infra.memory.registry import DIRECTORY
from ebbflow.infra.protocols.trainings import SETTINGS
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.process import channel as names
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.exchanges import Speakers
from tests.infra.training.rank_server import Rank, RankServer

SCRIPT = Path(__file__).with_name("elastic_script.py")


class Launch:
    """A launcher's channel without the launcher."""

    def __init__(self, server: RankServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.speakers = Speakers()
        self.generation = 0
        self.reports: list[Report] = []

    def start(self, world: int, settings: RunSettings | None = None, **case: Any) -> list[Rank]:
        self.generation += 1
        self.reports = []
        self.channel = self.speakers.open(self.generation, world)
        environment = {
            **self.speakers.environment(self.generation),
            **{name: os.environ[name] for name in (DIRECTORY,) if name in os.environ},
            names.RUN_FOLDER: str(self.folder / "run"),
            # nobody is there with whom processes could agree on who comes and goes
            SETTINGS: replace(settings or RunSettings(), recovery="restart").to_json(),
            "CASE": json.dumps({"log": str(self.folder / f"log-{self.generation}")} | case),
        }
        if "local" in case:  # processes of a node
            environment["LOCAL_WORLD_SIZE"] = str(case["local"])
        return self.server.start(SCRIPT, world, environment)

    def run(self, world: int, settings: RunSettings | None = None, **case: Any) -> list[int | None]:
        return self.wait(self.start(world, settings, **case))

    def wait(self, ranks: list[Rank]) -> list[int | None]:
        exits = self.server.wait(ranks)
        self.reports += self.channel.reports()
        return exits

    def until_reports(self, count: int, timeout: float = 200) -> None:
        """Return once so many reports have come."""
        deadline = time.monotonic() + timeout
        while len(self.reports) < count:
            assert time.monotonic() < deadline, f"{len(self.reports)} of {count} reports have come"
            self.reports += self.channel.reports()
            self.server.look()

    def said(self, kind: str) -> list[Report]:
        return [report for report in self.reports if report.kind == kind]

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(StorageLocation(self.folder / "run" / "checkpoints"))

    def log(self) -> "Log":
        return Log(self.folder)


class Log:
    """What all processes of all generations wrote."""

    def __init__(self, folder: Path) -> None:
        self.losses: dict[int, list[float]] = defaultdict(list)  # by step, of each process that took it
        self.seen: dict[int, list[int]] = defaultdict(list)  # by pass
        self.of_step: dict[int, list[int]] = defaultdict(list)
        self.end: dict[str, Any] = {}
        for path in sorted(folder.glob("log-*")):
            entries = [json.loads(line) for line in path.read_text().splitlines()]
            done = {entry["step"] for entry in entries if "loss" in entry}
            for entry in entries:
                if "loss" in entry:
                    self.losses[entry["step"]].append(entry["loss"])
                elif "end" in entry:
                    self.end = entry["end"]
                elif entry["step"] in done:  # else the step ended with its process
                    self.seen[entry["turn"]] += entry["seen"]
                    self.of_step[entry["step"]] += entry["seen"]


def same(log: Log, static: Log) -> None:
    """The same steps over the same samples, with the same losses, to the same weights."""
    assert sorted(log.losses) == sorted(static.losses)
    for step, losses in static.losses.items():
        np.testing.assert_allclose(log.losses[step], losses[0], rtol=2e-5)
        assert sorted(log.of_step[step]) == sorted(static.of_step[step])
    assert [sorted(log.seen[turn]) for turn in sorted(log.seen)] == [list(range(100))] * 3
    np.testing.assert_allclose(log.end["weights"], static.end["weights"], rtol=1e-4, atol=1e-6)
    assert log.end["lr"] == pytest.approx(static.end["lr"])
    assert log.end["gained"] == pytest.approx(300 / 24)
