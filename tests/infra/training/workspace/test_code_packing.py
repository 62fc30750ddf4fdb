"""A working directory becomes one archive, the same for the same files, or an error that says what is wrong."""

import gzip
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from ebbflow.infra.training.workspace import packing
from ebbflow.infra.training.workspace.packing import PackedCode, check_script_path, pack
from ebbflow.planners.errors import OptionError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    for name in ("train.py", "lib/a.py", "notes.log", "data.bin"):
        (folder / name).write_text(name)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link.py").symlink_to("train.py")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "train.cpython-313.pyc").write_text("")
    return folder


def names(packed: PackedCode) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(packed.data))) as tar:
        return tar.getnames()


def test_the_same_files_are_the_same_archive_whenever_and_wherever_they_were_written(
    project: Path, tmp_path: Path
) -> None:
    first = pack(str(project), "train.py")
    assert names(first) == ["data.bin", "lib/a.py", "link.py", "notes.log", "run.sh", "train.py"]
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", str(project), str(other)], check=True, timeout=60)
    os.utime(other / "train.py", (1, 1))
    assert pack(str(other), "train.py") == first
    (other / "lib" / "a.py").write_text("another")
    assert pack(str(other), "train.py").digest != first.digest
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(first.data))) as tar:
        modes = {member.name: member.mode for member in tar}
    assert (modes["run.sh"], modes["train.py"]) == (0o755, 0o644)


def test_files_that_patterns_name_are_left_out(project: Path) -> None:
    (project / ".gitignore").write_text("*.log\n*.bin\n")
    assert names(pack(str(project), "train.py")) == [
        ".gitignore",
        "lib/a.py",
        "link.py",
        "run.sh",
        "train.py",
    ]
    (project / ".ebbflowignore").write_text("*.log\n*ignore\n")  # in place of git's: data is often in that
    assert "data.bin" in names(pack(str(project), "train.py"))
    assert "notes.log" not in names(pack(str(project), "train.py"))


def test_what_cannot_be_packed_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"script must be a file of workdir .*; it has no 'gone.py'"):
        pack(str(project), "gone.py")
    with pytest.raises(OptionError, match=r"workdir must be a directory, REPOSITORY@REF .* got '/nowhere'"):
        pack("/nowhere", "train.py")
    monkeypatch.setattr(packing, "MAX_FILES", 3)
    with pytest.raises(
        OptionError, match=r"must have at most 3 files; leave some out by patterns in .ebbflowignore"
    ):
        pack(str(project), "train.py")
    monkeypatch.setattr(packing, "MAX_BYTES", 1000)
    (project / "big.bin").write_bytes(bytes(900))
    (project / "more.bin").write_bytes(bytes(900))
    monkeypatch.setattr(packing, "MAX_FILES", 100)
    with pytest.raises(
        OptionError, match=r"at most 0 MiB of files; the largest so far: big.bin \(0 MiB\), more.bin"
    ):
        pack(str(project), "train.py")
    monkeypatch.undo()
    (project / "out").symlink_to("/etc")
    with pytest.raises(OptionError, match=r"a symbolic link to a file outside of it: out -> /etc"):
        pack(str(project), "train.py")


@pytest.mark.parametrize("script", ["/abs/train.py", "../train.py", "train.txt", ""])
def test_a_script_is_a_path_in_the_working_directory(script: str) -> None:
    with pytest.raises(OptionError, match="relative to workdir"):
        check_script_path(script)


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, timeout=60, capture_output=True)


def test_a_commit_is_packed_as_it_was_whatever_lies_in_the_directory(project: Path) -> None:
    git(project, "init", "--quiet", "--initial-branch=main")
    git(project, "add", "train.py", "lib")
    git(project, "commit", "--quiet", "-m", "first")
    git(project, "tag", "v1")
    (project / "train.py").write_text("changed since")
    packed = pack(f"{project}@v1", "train.py")
    assert names(packed) == ["lib/a.py", "train.py"]
    assert len(packed.commit) == 40
    assert pack(f"{project}@{packed.commit}", "train.py") == packed
    assert pack(f"git+file://{project}@main", "train.py") == packed
    assert names(pack(f"{project}@v1#subdirectory=lib", "a.py")) == ["a.py"]
    with pytest.raises(OptionError, match="git rev-parse failed"):
        pack(f"{project}@gone", "train.py")
    with pytest.raises(OptionError, match="git fetch failed"):
        pack(f"git+file://{project}@gone", "train.py")


def test_a_token_in_an_address_is_refused_and_not_repeated() -> None:
    for address in ("git+https://user:s3cret@host/code@main", "git+https://s3cret@host/code@main"):
        with pytest.raises(
            OptionError, match=r"must not hold a password or token: https://\*\*\*@host/code"
        ) as error:
            pack(address, "train.py")
        assert "s3cret" not in str(error.value)
    with pytest.raises(OptionError, match="branch, tag or commit"):
        pack("git+https://host/code@--upload-pack=x", "train.py")
