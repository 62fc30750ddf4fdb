"""One machine as capacity."""

import pytest

from ebbflow.infra.query import local
from ebbflow.infra.query.local import LocalCapacity, machine_memory
from ebbflow.planners.errors import OptionError


def test_the_machine_is_one_node_that_never_changes() -> None:
    source = LocalCapacity()
    first, second = source.capacity(), source.capacity()
    assert first.revision == second.revision == 1
    assert first.same_nodes(second)
    (node,) = first.usable
    assert node.cores >= 1
    assert 0 < node.memory < machine_memory()
    assert node.market == "on-demand"


def test_a_given_size_is_kept() -> None:
    capacity = LocalCapacity(cores=3, memory=1.5).capacity()
    assert (capacity.cores, capacity.memory) == (3, 1.5)


@pytest.mark.parametrize("wrong", [{"cores": 0}, {"memory": 0.0}, {"memory": float("nan")}])
def test_no_size_at_all_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="must be"):
        LocalCapacity(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("granted", "cores", "slow", "notes"), [(0.4, 1, 2.5, 1), (1.5, 2, 4 / 3, 1), (2.0, 2, 1.0, 0)]
)
def test_a_part_of_a_core_counts_as_a_slow_one(
    monkeypatch: pytest.MonkeyPatch, granted: float, cores: int, slow: float, notes: int
) -> None:
    monkeypatch.setattr(local, "granted_cores", lambda: granted)
    assert local.LocalCapacity().capacity().cores == cores
    assert local.slowness("duckdb") == pytest.approx(slow)
    assert local.slowness("spark") == 1.0  # its cores are its own
    assert len(local.quota_notes()) == notes
