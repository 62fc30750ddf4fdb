"""Benchmark data: made whole or not at all, once, with errors that say what to do."""

import shutil
import sys
from collections import namedtuple
from pathlib import Path

import duckdb
import pytest

from ebbflow.infra.errors import DataError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import benchmark_data
from ebbflow.infra.tables import parquet as tables


def silent(_: str) -> None:
    pass


def test_tpch_is_made_once(tmp_path: Path) -> None:
    said: list[str] = []
    folder = benchmark_data.tpch(0.01, tmp_path / "deep" / "sf0.01", said.append)
    made = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert len(made) == 8
    assert any("TPC-H scale factor 0.01" in line for line in said)
    said.clear()
    assert benchmark_data.tpch(0.01, folder, said.append) == folder
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == made
    assert not said
    assert [p.name for p in folder.parent.iterdir()] == ["sf0.01"]


def test_parts_make_each_table_a_folder_of_files(tmp_path: Path) -> None:
    folder = benchmark_data.tpch(0.01, tmp_path / "parts", silent, parts=3)
    found = {t.name: len(t.files) for t in tables.discover(StorageLocation(folder))}
    assert len(found) == 8
    assert found["lineitem"] == found["orders"] == 3


def test_folders_are_told_apart_by_scale_and_parts() -> None:
    home = Path("home")
    assert benchmark_data.default_folder(home, "tpcds", 1.0) == home / "tpcds" / "sf1"
    assert benchmark_data.default_folder(home, "tpch", 0.01, 4) == home / "tpch" / "sf0.01-parts4"


def test_tpcds_has_its_tables_and_queries(tpcds: Path) -> None:
    assert len(list(tpcds.glob("*.parquet"))) == len(tables.discover(StorageLocation(tpcds))) == 24
    assert {p.name for p in (tpcds / "queries").iterdir()} == {f"q{n}.sql" for n in range(1, 100)}
    assert not [p.name for p in tpcds.iterdir() if p.name.startswith(".")]
    assert not [p.name for p in tpcds.parent.iterdir() if p.name.startswith(".")]


def test_skewed_tables_depend_on_each_other_across_joins(tmp_path: Path) -> None:
    said: list[str] = []
    folder = benchmark_data.skewed(0.02, tmp_path / "sf0.02", said.append)
    assert benchmark_data.skewed(0.02, folder, silent) == folder
    assert len(said) == 9
    assert sorted(p.name for p in (folder / "queries").iterdir()) == [f"q{n}.sql" for n in range(1, 9)]
    with duckdb.connect() as connection:
        for name in tables.discover(StorageLocation(folder)):
            connection.execute(f"CREATE VIEW {name.name} AS FROM '{folder}/{name.name}.parquet'")

        def rows(text: str) -> float:
            found = connection.execute(f"SELECT count(*) FROM {text}").fetchone()
            assert found is not None
            return float(found[0])

        tagged, topic = rows("film_tags"), "t.topic = 'topic-00'"
        one = rows(f"tags t WHERE {topic}") / rows("tags")
        joined = rows(f"film_tags ft JOIN tags t ON ft.tag_id = t.t_id WHERE {topic}") / tagged
        assert one == pytest.approx(0.01)
        assert joined == pytest.approx(0.2, abs=0.02), (
            "a filter that keeps 1 % of tags keeps a fifth of what refers to them"
        )
        for path in (folder / "queries").iterdir():
            connection.execute(path.read_text()).fetchall()


@pytest.mark.parametrize(
    ("scale", "parts", "word"), [(0.0, 1, "scale"), (1e9, 1, "scale"), (1.0, 0, "parts")]
)
def test_a_value_out_of_range_is_named(tmp_path: Path, scale: float, parts: int, word: str) -> None:
    with pytest.raises(DataError, match=rf"{word} must be in .*; got"):
        benchmark_data.tpch(scale, tmp_path / "x", silent, parts)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot keep data in .*file"):
        benchmark_data.tpch(0.01, tmp_path / "file" / "sf", silent)


def test_too_little_space_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 2**30))
    with pytest.raises(DataError, match=r"tpch at scale factor 10 needs about 4\.0 GiB .* has 1\.0 GiB free"):
        benchmark_data.tpch(10.0, tmp_path / "sf10", silent)
    assert not list(tmp_path.iterdir())


def test_what_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(command: list[str], *_: object) -> None:
        (Path(command[-1]) / "orders.parquet").write_text("half")
        raise DataError("the generator broke")

    monkeypatch.setattr(benchmark_data, "_run", broken)
    with pytest.raises(DataError, match="the generator broke"):
        benchmark_data.tpch(0.01, tmp_path / "sf", silent)
    assert not list(tmp_path.iterdir())


def test_another_process_that_was_faster_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(command: list[str], *_: object) -> None:
        (Path(command[-1]) / "orders.parquet").write_text("mine")
        (tmp_path / "sf").mkdir()
        (tmp_path / "sf" / "orders.parquet").write_text("theirs")

    monkeypatch.setattr(benchmark_data, "_run", slow)
    folder = benchmark_data.tpch(0.01, tmp_path / "sf", silent)
    assert (folder / "orders.parquet").read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["sf"]


def test_a_program_that_hangs_is_stopped() -> None:
    with pytest.raises(DataError, match="sleeper was stopped: it took more than 0 s"):
        benchmark_data._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.3, None, "sleeper")


def test_a_program_that_fails_is_quoted_and_a_full_disk_named() -> None:
    script = "import sys; print('one'); sys.exit('IO Error: No space left on device')"
    said: list[str] = []
    with pytest.raises(DataError, match=r"x failed with status 1 \(no space left on the disk\): IO Error"):
        benchmark_data._run([sys.executable, "-c", script], 60.0, said.append, "x")
    assert said == ["one"]


def test_without_a_package_registry_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError, match=r"duckdb==.* cannot be installed: is a package registry reachable"):
        benchmark_data.tpcds(0.01, tmp_path / "sf0.01", tmp_path / "tools", silent)
    assert [p.name for p in tmp_path.iterdir()] == ["tools"]
    assert not list((tmp_path / "tools").iterdir())
