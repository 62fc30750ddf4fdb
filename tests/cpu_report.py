"""What tests cost: ``--cpu-report FILE`` writes CPU seconds of each test and each shared fixture, dearest first."""

import json
import os
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


def _living(pid: int | str) -> float:
    """Return the CPU seconds of the descendants that live, with those of their descendants that ended."""
    total = 0.0
    try:
        children = [
            c for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()
        ]
    except OSError:
        return 0.0
    for child in children:
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / TICKS + _living(child)
    return total


def spent() -> float:
    """Return the CPU seconds of this process and its descendants; those of orphans are lost."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + _living("self")


class CpuReport:
    """Adds up what the tests of one process cost; a fixture's setup counts for itself and not for its test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, float] = defaultdict(float)
        self._fixtures: dict[str, float] = defaultdict(float)
        self._collection = 0.0
        self._aside = 0.0  # of the setups of shared fixtures within what is measured now

    def pytest_collection_finish(self) -> None:
        self._collection = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before, self._aside = spent(), 0.0
        try:
            return (yield)
        finally:
            self._tests[item.nodeid] += spent() - before - self._aside

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before, outer, self._aside = spent(), self._aside, 0.0
        try:
            return (yield)
        finally:
            whole = spent() - before
            self._fixtures[f"{fixturedef.baseid}::{fixturedef.argname}"] += whole - self._aside
            self._aside = outer + whole

    def pytest_sessionfinish(self) -> None:
        def ranked(costs: dict[str, float]) -> dict[str, float]:
            found = sorted(costs.items(), key=lambda item: -item[1])
            return {name: round(seconds, 3) for name, seconds in found}

        report = {
            "total": round(spent(), 1),
            "collection": round(self._collection, 1),
            "fixtures": ranked(self._fixtures),
            "tests": ranked(self._tests),
        }
        self._path.write_text(json.dumps(report, indent=1))
