"""The embedded engine runs what fits this machine, Spark the rest."""

import pytest

from ebbflow.planners.errors import UnsupportedQueryError
from ebbflow.planners.query.costs.query_engines import EXPANSION, Fit

_GIB = 2**30


@pytest.mark.parametrize(
    ("held", "disk", "engine"),
    [
        (0.0, 0.0, "duckdb"),
        (8.0, 0.0, "duckdb"),
        (8.1, 0.0, "spark"),
        (8.1, 1.0, "duckdb"),
        (32.0, 48.0, "duckdb"),  # three quarters of it on half of the disk
        (32.0, 47.0, "spark"),
        (32.1, 1000.0, "spark"),
    ],
)
def test_what_is_held_must_fit_memory_or_spill_within_bounds(held: float, disk: float, engine: str) -> None:
    choice = Fit(held * _GIB / EXPANSION, 8.0, disk).choose()
    assert choice.engine == engine
    assert "8.0 GiB of memory" in choice.reason


def test_what_duckdb_refuses_is_for_spark_and_without_spark_duckdb_has_to_do() -> None:
    assert Fit(1.0, 8.0, 1.0, refusal="no function f").choose().engine == "spark"
    assert "no function f" in Fit(1.0, 8.0, 1.0, refusal="no function f").choose().reason
    with pytest.raises(UnsupportedQueryError, match=r"\(no function f\).*\(there is no Java\)"):
        Fit(1.0, 8.0, 1.0, refusal="no function f", without_spark="there is no Java").choose()
    large = Fit(100.0 * _GIB, 8.0, 1.0, without_spark="there is no Java").choose()
    assert large.engine == "duckdb"
    assert "there is no Java" in large.reason
