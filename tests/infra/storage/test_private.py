"""What Ebbflow makes is its user's alone, whatever the umask; or the group's, where that is said."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem

from ebbflow.infra.ledger import Ledger
from ebbflow.infra.storage import files, private
from ebbflow.planners.errors import OptionError


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make(folder: Path) -> None:
    private.make_folder(folder / "deep" / "er")
    private.write_text(folder / "deep" / "er" / "note", "1")
    private.reserve(folder / "deep" / "reserved")
    with private.open_file(folder / "log", "ab") as file:
        file.write(b"line")
    with private.output_stream(LocalFileSystem(), "file", str(folder / "part")) as out:
        out.write(b"rows")
    files.write_atomic(None, "file", str(folder / "own" / "atomic"), b"x")
    files.write_once(str(folder / "own" / "once"), b"x")
    (folder / "foreign").write_bytes(b"by a library")
    private.seal(folder / "foreign")


@pytest.mark.usefixtures("umask")
def test_folders_and_files_are_for_their_user_alone(tmp_path: Path) -> None:
    make(tmp_path / "store")
    for path in (tmp_path / "store", *(tmp_path / "store").rglob("*")):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.usefixtures("umask")
def test_a_group_may_come_in_where_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(private.SHARE, "group")
    make(tmp_path / "store")
    for path in (tmp_path / "store", *(tmp_path / "store").rglob("*")):
        # a stream of pyarrow's is opened where the file is there already, with its mode
        assert mode(path) == (0o2770 if path.is_dir() else 0o660), path
    assert private.hadoop_umask() == "007"
    monkeypatch.setenv(private.SHARE, "everybody")
    with pytest.raises(OptionError, match=r"EBBFLOW_SHARE must be group.*'everybody'"):
        private.make_folder(tmp_path / "other")


def test_what_is_there_already_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "log").touch()
    folder.chmod(0o755)
    (folder / "log").chmod(0o644)
    private.make_folder(folder)
    with private.open_file(folder / "log", "a"):
        pass
    private.reserve(folder / "log")
    assert (mode(folder), mode(folder / "log")) == (0o755, 0o644)
    with pytest.raises(FileExistsError):
        private.make_folder(folder, exist_ok=False)
    with pytest.raises(FileExistsError):
        private.make_folder(folder / "log")
    with pytest.raises(NotADirectoryError):
        private.make_folder(folder / "log" / "below")


@pytest.mark.usefixtures("umask")
def test_what_other_users_need_is_written_for_them(tmp_path: Path) -> None:
    files.write_atomic(None, "file", str(tmp_path / "deadline"), b"1.0", public=True)
    assert mode(tmp_path / "deadline") == 0o644


@pytest.mark.usefixtures("umask")
def test_a_ledgers_file_and_its_logs_are_private(tmp_path: Path) -> None:
    with Ledger.open(str(tmp_path / "place" / "ledger.db"), cluster="lab"):
        found = {path.name: mode(path) for path in (tmp_path / "place").iterdir()}
        assert set(found) >= {"ledger.db", "ledger.db-wal", "ledger.db-shm"}
        assert set(found.values()) == {0o600}
    assert mode(tmp_path / "place") == 0o700


ELSEWHERE = {
    "infra/storage/private.py": "decides",
    "infra/machine/cgroups.py": "files of the kernel",
    "infra/machine/network": "names of the kernel's namespaces, and one list of the networks on this machine, root's",
    "infra/tables/benchmark_data.py": "tables of benchmarks, where the user wants them",
    "infra/tables/dsdgen.py": "the same",
    "tasks/elastic/run.py": "made-up data",
    "infra/aws/node_agent.py": "/run/ebbflow, which every user of the node may look at",
    "infra/query/results.py": "a result, where the user wants it",
    "infra/query/table_results.py": "tables, where the user wants them",
    "infra/tables/targets": "tables, where the user wants them, as private as the directory that they are in",
    "infra/memory/gateway": "tables that Spark writes, where the user wants them",
    "infra/storage/files.py": "a report, where the user wants it",
    "infra/spark/native/stages.py": "an empty mark in a stage's own folder, which its executors look for",
    "tasks/simulation": "pages and results of simulations, where the user wants them",
}
REMOTE = {
    "infra/storage/files.py",
    "infra/query/checkpoints.py",
    "infra/storage/places.py",
    "infra/memory/arrow.py",
    "infra/memory/files.py",
}  # do so where the place is not local
MAKES = re.compile(
    r"\.mkdir\(|os\.makedirs\(|O_CREAT|\.touch\((?!fingerprint)|\.write_(text|bytes)\(|create_dir\(|"
    r"open_output_stream\(|\bopen\([^)\n]*[\"'][wax]|\.open\([\"'][wax]|shutil\.(copy|move)"
)


def test_no_module_makes_folders_or_files_by_itself() -> None:
    root = Path(__file__).parents[3]
    found = []
    for folder in ("infra", "tasks"):
        for path in sorted((root / folder).rglob("*.py")):
            name = str(path.relative_to(root))
            if any(name == one or name.startswith(f"{one}/") for one in ELSEWHERE):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                remote = name in REMOTE and re.search(r"[. ](create_dir|open_output_stream)\(", line)
                if MAKES.search(line) and "private." not in line and not remote:
                    found.append(f"{name}:{number}: {line.strip()}")
    assert found == []
