"""The benchmark's nodes and apps in small, on a virtual clock, with loops that vanish: nothing is booked twice."""

from pathlib import Path

import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.infra.ledger.audit import audit
from ebbflow.planners.model.ledger import AppMoved, Granted, LoopBegan, Recalled
from ebbflow.tasks.capacity.loop import CapacityLoop
from tests.benchmarks.capacity_churn import Apps, Churn, SureEvictor
from tests.benchmarks.capacity_load import all_events, settings
from tests.evaluation.renting.virtual_clock import VirtualClock


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_comes_and_goes_no_gpu_is_booked_twice(tmp_path: Path, seed: int) -> None:
    clock = VirtualClock(1_700_000_000.0)
    with Ledger.open(str(tmp_path / "ledger.db"), clock=clock) as ledger:
        churn, apps = Churn(30, seed, clock), Apps(ledger, 12, seed)
        for _ in range(3):
            loop = CapacityLoop(
                ledger,
                None,
                churn,
                settings("rho-bounded"),
                evictor=SureEvictor(clock, 0.0),
                clock=clock,
                seed=seed,
            )
            loop.begin()
            for _ in range(30):
                for _ in range(3):
                    churn.change()
                apps.step()
                loop.step()
                clock.sleep(1.0)
            clock.sleep(20.0)  # it vanishes without a word, and its lead runs out
        events = all_events(ledger)
        assert audit(events) == []
        assert ledger.verify() == []
        counts = {
            kind: sum(isinstance(e.change, kind) for e in events) for kind in (Granted, Recalled, AppMoved)
        }
        assert counts[Granted] > 10
        assert counts[Recalled] > 10
        assert counts[AppMoved] > 0
        assert sum(isinstance(e.change, LoopBegan) for e in events) == 3
        state = ledger.state()
        assert {lease.node for lease in state.leases.values()} <= set(state.nodes)
