"""Commits of results to tables: by tries that are killed, beside other tries, and beside other programs."""

import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.table_results import write_into
from ebbflow.infra.tables.targets import exchange
from ebbflow.infra.tables.targets.model import folder_name
from tests.infra.query.table_results.lake import FORMATS, ROWS, TARGETS, Lake, Make, same

_KILLED = """
import os, signal, sys
from ebbflow.infra.query import table_results
from ebbflow.infra.query.duckdb import DuckDbEngine
from tests.infra.query.table_results.lake import ROWS, TARGETS, Lake, results_in
from pathlib import Path
folder, format = sys.argv[1:]
into = Lake(Path(folder), None).into(format, partitions=("day",))
TARGETS[format].commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
table_results.write_into(results_in(Path(folder))(ROWS), into, "run2", DuckDbEngine.start(threads=1))
"""


@pytest.mark.parametrize("format", FORMATS)
def test_a_process_that_is_killed_before_its_commit_leaves_the_table_as_it_was(
    embedded: DuckDbEngine, format: str, lake: Lake, result: Make
) -> None:
    into = lake.into(format, partitions=("day",))
    write_into(result(ROWS), into, "run1", embedded)
    before = lake.files()
    command = [sys.executable, "-c", _KILLED, str(lake.folder), format]
    child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)
    assert child.returncode == -signal.SIGKILL, child.stderr[-3000:]
    assert len(lake.files()) > len(before), "its data files are there"
    same(lake.rows(format), ROWS)
    assert write_into(result(ROWS), into, "run2", embedded)
    assert [row["k"] for row in lake.rows(format)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len(lake.files()) == 2 * len(before), "and are not any more"
    assert not write_into(result(ROWS), into, "run2", embedded)
    assert len(lake.rows(format)) == 8


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", ["append", "overwrite", "merge"])
def test_a_commit_between_a_look_and_a_commit_is_seen(
    embedded: DuckDbEngine, format: str, mode: str, lake: Lake, result: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.table({"k": [1, 2], "v": ["a", "b"]})
    other = pa.table({"k": [2, 3], "v": ["c", "d"]})
    commit = TARGETS[format].commit
    seen: list[str] = []

    def after_others(*given: Any) -> None:
        if len(seen) < 3:  # the table is made by another, then changed, then written by another try
            seen.append(mode)
            monkeypatch.setattr(TARGETS[format], "commit", commit)
            if len(seen) < 3:
                write_into(result(other), lake.into(format), f"other{len(seen)}", embedded)
            else:
                write_into(result(rows), into, "run1", embedded)
            monkeypatch.setattr(TARGETS[format], "commit", after_others)
        commit(*given)

    into = lake.into(format, mode=mode, keys=("k",) if mode == "merge" else ())
    monkeypatch.setattr(TARGETS[format], "commit", after_others)
    assert not write_into(result(rows), into, "run1", embedded)
    assert len(seen) == 3
    expected = {
        "append": [(1, "a"), (2, "b"), (2, "c"), (2, "c"), (3, "d"), (3, "d")],
        "overwrite": [(1, "a"), (2, "b")],
        "merge": [(1, "a"), (2, "b"), (3, "d"), (3, "d")],
    }
    assert [(row["k"], row["v"]) for row in lake.rows(format)] == expected[mode]
    assert len(lake.files()) >= len(lake.relation(format).files)
    left = [file for file in lake.files() if "ebbflow-run1" in file]
    if mode != "merge" or format != "parquet":
        assert len(left) == 1, "files of tries that were not committed are deleted"


def test_what_other_programs_do_to_a_directory_while_it_is_committed_is_kept(
    embedded: DuckDbEngine, lake: Lake, result: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = lake.into("parquet", mode="overwrite")
    other = pa.table({"k": [7], "v": ["z"]})
    write_into(result(pa.table({"k": [1], "v": ["a"]})), lake.into("parquet"), "run0", embedded)
    link = exchange.link

    def then(change: Callable[[], object]) -> Callable[..., Any]:
        def linked(*given: Any) -> Any:
            monkeypatch.setattr(exchange, "link", link)
            found = link(*given)
            change()
            return found

        return linked

    def added() -> None:
        pq.write_table(other, lake.path / "other.parquet")
        (lake.path / "notes").mkdir()
        (lake.path / "notes/_said.txt").write_text("x")

    monkeypatch.setattr(exchange, "link", then(added))
    assert write_into(result(pa.table({"k": [2], "v": ["b"]})), into, "run1", embedded)
    assert [row["k"] for row in lake.rows("parquet")] == [2, 7], "a file that was put there stays"
    assert (lake.path / "notes/_said.txt").read_text() == "x"
    (lake.path / "notes/_said.txt").unlink()
    (lake.path / "notes").rmdir()

    monkeypatch.setattr(exchange, "link", then((lake.path / "other.parquet").unlink))
    assert write_into(result(pa.table({"k": [3], "v": ["c"]})), lake.into("parquet"), "run2", embedded)
    assert [row["k"] for row in lake.rows("parquet")] == [2, 3], "one that was deleted does not come back"

    changed: list[str] = []

    def rewritten() -> None:
        (file,) = lake.path.glob("*run1*.parquet")
        pq.write_table(other, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").rename(file)
        changed.append(file.name)

    monkeypatch.setattr(exchange, "link", then(rewritten))
    merging = lake.into("parquet", mode="merge", keys=("k",))
    assert write_into(result(pa.table({"k": [2, 7], "v": ["d", "e"]})), merging, "run3", embedded)
    assert changed
    found = [(row["k"], row["v"]) for row in lake.rows("parquet")]
    assert found == [(2, "d"), (3, "c"), (7, "e")], (
        "the rows are merged once more, into what the file has now"
    )

    def replaced() -> None:
        (file,) = lake.path.glob("*run3*.parquet")
        pq.write_table(other, file)

    monkeypatch.setattr(exchange, "link", then(replaced))
    assert write_into(result(pa.table({"k": [4], "v": ["f"]})), into, "run4", embedded)
    assert [row["k"] for row in lake.rows("parquet")] == [4], "overwritten once more, by the same files"
    assert [path.name for path in lake.folder.iterdir() if path.name.startswith(".t.")] == [".t.ebbflow-lock"]


def test_tries_at_once_write_once(embedded: DuckDbEngine, lake: Lake, result: Make) -> None:
    found = result(pa.table({"k": [1]}))
    for format in FORMATS:
        with ThreadPoolExecutor(3) as pool:
            tries = [pool.submit(write_into, found, lake.into(format), "run1", embedded) for _ in range(3)]
            assert sorted(one.result() for one in tries) == [False, False, True], format
            others = [
                pool.submit(write_into, found, lake.into(format), f"run{n}", embedded) for n in (2, 3, 4)
            ]
            assert [one.result() for one in others] == [True] * 3
        assert len(lake.rows(format)) == 4
        if format == "delta":
            subprocess.run(["rm", "-r", str(lake.path)], check=True, timeout=60)


def test_what_another_try_has_not_moved_yet_does_not_keep_a_table_from_being_made(
    embedded: DuckDbEngine, lake: Lake, result: Make
) -> None:
    begun = lake.path / folder_name("run1")
    begun.mkdir(parents=True)
    (begun / "part-00000.parquet").write_bytes(b"PAR1")
    assert write_into(result(pa.table({"k": [1]})), lake.into("delta"), "run1", embedded)
