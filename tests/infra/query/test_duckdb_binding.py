"""Statements are bound, not run, in a database that stays."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pytest

from ebbflow.infra.protocols import Relation
from ebbflow.infra.query import duckdb_statements
from ebbflow.infra.query.duckdb_statements import output_names, refusal


def table(*columns: str) -> Relation:
    return Relation("t", "file", (), tuple((name, "bigint") for name in columns))


def test_a_statement_sees_its_own_tables_and_none_of_another_statement() -> None:
    assert output_names("SELECT * FROM t", [table("a", "b")]) == ("a", "b")
    assert output_names("SELECT * FROM t", [table("c")]) == ("c",)
    assert output_names("SELECT * FROM t", []) is None
    assert "t does not exist" in refusal("SELECT * FROM t", [])
    assert not refusal("SELECT a FROM t", [table("a")])


def test_statements_of_several_threads_are_bound_at_once() -> None:
    together = threading.Barrier(4, timeout=150)

    def bind(number: int) -> bool:
        together.wait()
        wanted = f"c{number}"
        return all(output_names("SELECT * FROM t", [table(wanted)]) == (wanted,) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(bind, range(4)))


def test_a_statement_reaches_files_only_where_all_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("a\n1\n")
    text = f"SELECT * FROM read_csv('{file}')"
    for _ in range(2):  # what is allowed to one is not to the next
        assert output_names(text, [], everything=True) == ("a",)
        assert "disabled" in refusal(text, [])


@pytest.mark.parametrize("kind", [duckdb.FatalException, duckdb.InternalException])
@pytest.mark.parametrize("ask", [output_names, refusal])
def test_a_database_that_refuses_all_after_an_error_is_replaced(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], ask: Callable[..., Any]
) -> None:
    def break_it(*_: Any) -> None:
        duckdb_statements._binder(os.getpid(), False).close()  # as good as invalidated
        raise kind("database has been invalidated")

    with monkeypatch.context() as patch:
        patch.setattr(duckdb_statements, "_bound", break_it)
        assert ask("SELECT 1 AS a", []) in (None, "database has been invalidated")
    assert output_names("SELECT 1 AS a", []) == ("a",)
    assert not refusal("SELECT 1 AS a", [])
