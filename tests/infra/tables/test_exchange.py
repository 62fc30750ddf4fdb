"""Directories that other programs write into while a commit puts another one in their place."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import TableError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.targets import exchange
from ebbflow.infra.tables.targets.folder import FolderTarget
from ebbflow.infra.tables.targets.model import CommitConflictError, TableChange


class Table:
    """A directory of Parquet files, with an open try to write into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target = FolderTarget(StorageLocation(path))

    def put(self, name: str, value: int) -> Path:
        """Let another program write a file."""
        return written(self.path / name, value)

    def commit(self, run: str, name: str, *removed: str, data: StorageLocation | None = None) -> None:
        state = self.target.look(run)
        place = data or self.target.data(state, (), run)
        if data is None:
            written(Path(place.root) / name, 0)
        change = TableChange(run, (), (), (), frozenset(str(self.path / one) for one in removed))
        self.target.commit(state, change, place)

    def there(self) -> list[str]:
        return sorted(
            str(one.relative_to(self.path))
            for one in self.path.rglob("*")
            if one.is_file() and one.parent.name != "_ebbflow"
        )

    def beside(self) -> list[str]:
        """Return what commits have left."""
        return sorted(
            one.name
            for one in self.path.parent.iterdir()
            if one.name.startswith(".") and not one.name.endswith("-lock")
        )

    def value(self, name: str) -> Any:
        return pq.ParquetFile(self.path / name).read().column("v").to_pylist()[0]


def written(path: Path, value: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.table({"v": [value]}), temporary)
    temporary.rename(path)
    return path


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> Table:
    table = Table(tmp_path / "t")
    for number in range(3):
        table.put(f"{number}.parquet", number)
    return table


def at_swap(
    monkeypatch: pytest.MonkeyPatch,
    table: Table,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Let others do something right before and right after the table's directory is exchanged."""
    swap = exchange.swap

    def swapped(new: str, old: str) -> None:
        if old != str(table.path):
            swap(new, old)
            return
        monkeypatch.setattr(exchange, "swap", swap)
        before()
        swap(new, old)
        after()

    monkeypatch.setattr(exchange, "swap", swapped)


def test_a_file_that_is_written_on_meanwhile_is_one_file(
    table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (table.path / "said.txt").write_text("a")
    with (table.path / "said.txt").open("a") as log:

        def say() -> None:
            log.write("b")
            log.flush()

        at_swap(monkeypatch, table, before=say)
        with caplog.at_level(logging.WARNING):
            table.commit("run1", "new.parquet")
        log.write("c")
    assert (table.path / "said.txt").read_text() == "abc"
    assert table.there() == ["0.parquet", "1.parquet", "2.parquet", "new.parquet", "said.txt"]
    assert not table.beside()
    assert not caplog.records


@pytest.mark.parametrize("links", [True, False])
def test_what_others_did_before_an_exchange_does_not_undo_what_they_did_after_it(
    table: Table, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    table.put("3.parquet", 3)
    if not links:

        def refused(*_: Any) -> None:
            raise PermissionError("not here")

        monkeypatch.setattr(os, "link", refused)

    def before() -> None:
        for number in (0, 1):
            table.put(f"{number}.parquet", 10 + number)
        for number in (2, 3):
            (table.path / f"{number}.parquet").unlink()

    def after() -> None:
        for number in (0, 2):
            table.put(f"{number}.parquet", 20 + number)

    at_swap(monkeypatch, table, before, after)
    table.commit("run1", "new.parquet")
    assert table.there() == ["0.parquet", "1.parquet", "2.parquet", "new.parquet"], "3 was deleted"
    assert [table.value(f"{number}.parquet") for number in range(3)] == [20, 11, 22]
    assert not table.beside()


def test_a_directory_that_others_do_not_leave_alone_stays_until_the_next_write(
    table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    move, number = exchange._move, [0]

    def busy(source: str, *rest: Any) -> Any:
        failed = move(source, *rest)
        number[0] += 1
        (Path(source) / f"late{number[0]}.txt").write_text("x")
        return failed

    with monkeypatch.context() as patched:
        patched.setattr(exchange, "_move", busy)
        patched.setattr(exchange, "_PAUSE", 0.0)
        table.commit("run1", "new.parquet", "0.parquet")
    (left,) = table.beside()
    assert f"{left} stays until" in caplog.text
    assert os.listdir(table.path.parent / left) == [f"late{number[0]}.txt"]
    assert table.target.look("run1").written
    assert not table.beside()
    assert f"late{number[0]}.txt" in table.there()
    assert "0.parquet" not in table.there()


def test_what_cannot_be_moved_is_told_and_moved_at_the_next_write(
    table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    identity = exchange._identity

    def refused(path: str) -> Any:
        if path.endswith(".old/1.parquet"):
            raise PermissionError(f"{path} is another's")
        return identity(path)

    at_swap(monkeypatch, table, before=lambda: table.put("1.parquet", 11))
    with monkeypatch.context() as patched:
        patched.setattr(exchange, "_identity", refused)
        patched.setattr(exchange, "_PAUSE", 0.0)
        table.commit("run1", "new.parquet")
    assert "1.parquet is another's" in caplog.text
    assert len(table.beside()) == 1
    assert table.value("1.parquet") == 1
    table.commit("run2", "newer.parquet")
    assert table.value("1.parquet") == 11
    assert not table.beside()
    assert not any(one.stat().st_size for one in (table.path / "_ebbflow").iterdir())


@pytest.mark.parametrize("changed", ["0.parquet", "1.parquet"])
def test_whoever_writes_next_finishes_an_exchange_whose_process_died(
    changed: str, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    def before() -> None:
        table.put(changed, 10)
        (table.path / "2.parquet").unlink()

    at_swap(monkeypatch, table, before, lambda: table.put("late.parquet", 5))
    with monkeypatch.context() as patched:
        patched.setattr(exchange, "conclude", killed)
        with pytest.raises(KeyboardInterrupt):
            table.commit("run1", "new.parquet", "0.parquet")
    assert len(table.beside()) == 1
    removed = changed == "0.parquet"
    assert Table(table.path).target.look("run1").written is not removed
    kept = ["0.parquet", "1.parquet"] if removed else ["1.parquet"]
    assert table.there() == sorted([*kept, "late.parquet", *([] if removed else ["new.parquet"])])
    assert table.value(changed) == 10
    assert not table.beside()


def test_a_conflict_after_the_exchange_leaves_others_files_and_can_be_tried_again(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = table.target.look("run1")
    data = table.target.data(state, (), "run1")
    written(Path(data.root) / "new.parquet", 7)

    def after() -> None:
        (table.path / "late.txt").write_text("x")
        table.put("1.parquet", 11)

    at_swap(monkeypatch, table, lambda: table.put("0.parquet", 10), after)
    with pytest.raises(CommitConflictError, match=r"changed by another program .*: 0\.parquet"):
        table.commit("run1", "", "0.parquet", data=data)
    assert table.there() == ["0.parquet", "1.parquet", "2.parquet", "late.txt"]
    assert (table.value("0.parquet"), table.value("1.parquet")) == (10, 11)
    assert [one.name for one in Path(data.root).rglob("*") if one.is_file()] == ["new.parquet"]
    assert not table.target.look("run1").written
    table.commit("run1", "", "0.parquet", data=data)
    assert table.there() == ["1.parquet", "2.parquet", "late.txt", "new.parquet"]
    assert table.target.look("run1").written
    assert not table.beside()


def test_directories_that_are_links_are_refused(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    table.put("d=1/a.parquet", 1)
    written(tmp_path / "far/b.parquet", 2)
    (table.path / "d=2").symlink_to(tmp_path / "far")
    with pytest.raises(TableError, match=r"holds the directory .*/d=2, which is a link"):
        table.commit("run1", "d=1/new.parquet")
    assert (table.path / "d=2/b.parquet").exists()


def test_what_tells_of_an_exchange_is_read_as_it_was_written() -> None:
    links = exchange.Links(
        ".t.ebbflow-run1-1",
        "_ebbflow/run1",
        {"a": (1, 2, 3), "b ü": (4, 5, 6), "c": (7, 8, 9)},
        {"a": (1, 2, 3), "b ü": (40, 5, 6)},
        frozenset({"c"}),
        frozenset({"d"}),
    )
    assert exchange.Links.decoded(links.encoded()) == links
    for damaged in (b"", b"{}", b"[]", b"[1, 2, 3, 4, 5, 6, 7]", links.encoded()[:-5]):
        assert exchange.Links.decoded(damaged) is None
