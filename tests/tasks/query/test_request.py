"""Requests are checked before anything starts."""

from pathlib import Path
from typing import Any, get_args

import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.options import declared
from ebbflow.planners.query.planner import CutPolicy
from ebbflow.planners.query.running.baselines import POLICIES
from ebbflow.tasks.query.request import PlannerName, QueryRequest, default_store, read_sql


def request(**options: Any) -> QueryRequest:
    return QueryRequest(**({"sql": "SELECT 1", "tables": "data"} | options))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"store": "ftp://host/store"}, "'ftp://host/store' has the scheme 'ftp'"),
        ({"tables": "hdfs://host/t"}, "'hdfs://host/t' has the scheme 'hdfs'"),
        ({"output": "s3://"}, "'s3://' names no bucket"),
        ({"engine": "trino"}, "engine must be one of auto, spark, duckdb; got 'trino'"),
        ({"planner": "best"}, "best"),
        ({"materialize": "never"}, "materialize must be one of cost, every-join, none; got 'never'"),
        ({"sql": " \n"}, "sql must hold a query"),
        ({"weight": 0.0}, "weight must be > 0 and finite; got 0.0"),
        ({"tables": None}, "tables"),
        ({"tables": ""}, "tables"),
        ({"catalog": True}, "not both"),
        ({"tables": None, "catalog": True, "engine": "duckdb"}, "needs engine spark"),
        ({"fraction": 0.0}, "fraction must be > 0 and <= 1; got 0.0"),
        ({"fraction": 1.5}, "got 1.5"),
        ({"fraction": float("nan")}, "got nan"),
        ({"interruption_rate": -1.0}, "interruption_rate must be >= 0 per node-hour and finite; got -1.0"),
        ({"interruption_rate": float("nan")}, "got nan"),
        ({"store_budget": -1.0}, "store_budget must be >= 0 GiB and finite; got -1.0"),
        ({"store_budget": float("inf")}, "got inf"),
        ({"hysteresis": -0.1}, "hysteresis"),
        ({"hysteresis": 1.5}, "hysteresis"),
        ({"dialect": "klingon"}, "klingon"),
        ({"store": ""}, "store"),
        ({"master": "spark://host"}, "is spark://HOST:PORT; got 'spark://host'"),
        (
            {"master": "sc://h", "calibrate": True},
            r"calibrate \(--calibrate\) measures speed by the times of tasks",
        ),
        ({"master": "sc://h:1:2"}, "is sc://HOST:PORT; got 'sc://h:1:2'"),
        ({"master": "sc://h:15002/;use_ssl=true;token=s3cr3t"}, "must not hold 'token', which"),
        (
            {"master": "sc://h:15002/;x-key=s3cr3t"},
            "must not hold 'x-key', which logs and reports would show",
        ),
    ],
)
def test_an_option_that_breaks_its_rule_is_named_with_the_rule(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told) as caught:
        request(**options)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"fraction": 1.0},
        {"interruption_rate": 0.0},
        {"store_budget": 0.0},
        {"hysteresis": 0.0},
        {"dialect": "postgres"},
        {"master": "sc://h"},
        {"master": "sc://[::1]:15002/;use_ssl=true;user_id=me"},
    ],
)
def test_values_at_the_edge_of_their_rule_are_taken(options: dict[str, Any]) -> None:
    request(**options)


def test_sql_is_read_from_a_file_or_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "q.sql"
    path.write_text("SELECT 2 AS zwei -- ü", encoding="utf-8")
    plain = tmp_path / "query"
    plain.write_text("SELECT 3")
    assert read_sql(str(path)) == "SELECT 2 AS zwei -- ü"
    assert read_sql(str(plain)) == "SELECT 3"
    assert read_sql("SELECT 1") == "SELECT 1"
    assert read_sql("SELECT 1\n-- from old.sql") == "SELECT 1\n-- from old.sql"
    assert read_sql("SELECT '" + "x" * 5000 + "'").endswith("x'")
    assert QueryRequest.of(str(path), tables="data").sql.startswith("SELECT 2")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00S"])
def test_a_file_that_cannot_be_read_as_text_is_told(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "missing.sql"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=r"the query: .*missing\.sql"):
        read_sql(str(path))


def test_the_home_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))
    assert default_store() == str(tmp_path / "store")
    assert request().store == default_store()


def test_its_choices_are_those_that_there_are() -> None:
    assert get_args(PlannerName) == tuple(POLICIES)
    assert declared(QueryRequest)["materialize"].choices == get_args(CutPolicy)
