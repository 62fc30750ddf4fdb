"""What a pipeline's own cluster is brought up with, without bringing one up."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipelines import changed, content, read

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.tasks.capacity.actuator import LocalEvictor
from ebbflow.tasks.faults import Fault
from ebbflow.tasks.pipeline import site as sites
from ebbflow.tasks.pipeline.faulting import schedule_of
from ebbflow.tasks.pipeline.file.spec import Pipeline
from ebbflow.tasks.pipeline.site import Site, opened_site


class Asked:
    """A fleet and a loop that only remember what they were made with."""

    def __init__(self) -> None:
        self.fleet: dict[str, Any] = {}
        self.loop: dict[str, Any] = {}

    @contextmanager
    def start(self, pools: Any, name: str, **options: Any) -> Iterator[Any]:
        self.fleet = {"pools": pools, "name": name, **options}
        yield SimpleNamespace(name=name)

    def made(self, ledger: Any, fleet: Any, source: Any, settings: Any, **options: Any) -> Any:
        self.loop = {"fleet": fleet, "settings": settings, **options}

        def run(stop: threading.Event) -> Any:
            stop.wait(150)
            return SimpleNamespace(reason="stopped")

        return SimpleNamespace(run=run)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(sites, "LocalFleet", SimpleNamespace(start=asked.start))
    monkeypatch.setattr(sites, "CapacityLoop", asked.made)
    return asked


def opened(pipeline: Pipeline, folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return opened_site(pipeline, "one", folder, lambda step: f"one.{step}", lambda _: None, SystemClock())


def test_the_loop_of_local_nodes_can_end_what_silent_apps_left_there(asked: Asked, tmp_path: Path) -> None:
    with opened(read(content(tmp_path), tmp_path), tmp_path / "run") as site:
        assert isinstance(site, Site)
        evictor = asked.loop["evictor"]
        assert isinstance(evictor, LocalEvictor)
        assert evictor._fleet is asked.loop["fleet"]
        assert site.grace == asked.loop["settings"].termination_grace_s
        assert not site.joined


def test_nodes_that_are_slow_to_boot_are_waited_for(asked: Asked, tmp_path: Path) -> None:
    plain = changed(content(tmp_path), "cluster.local.pools.gpu.provision_time", "5m")
    with opened(read(plain, tmp_path), tmp_path / "run"):
        assert asked.fleet["wait"] == 420.0


def test_a_fault_whose_nodes_are_out_of_reach_is_tried_again(tmp_path: Path) -> None:
    done, looks = threading.Event(), []

    def view() -> Any:
        looks.append(1)
        if len(looks) < 3:
            raise ClusterError("the fleet's state file cannot be read")
        return [SimpleNamespace(id="gpu-1", pool="gpu", state="alive", since=0.0)]

    fleet: Any = SimpleNamespace(view=view, kill=lambda _: done.set())
    record = SimpleNamespace(phase="running", first_lease=None)
    ledger: Any = SimpleNamespace(state=lambda: SimpleNamespace(apps={"one.fit": record}, booked={}))
    faults = schedule_of(
        [Fault(0.0, "kill", "gpu")], fleet, ledger, lambda _: "", lambda _: None, SystemClock()
    )
    faults.begin()
    assert done.wait(150), "it was given up"
    faults.end()
