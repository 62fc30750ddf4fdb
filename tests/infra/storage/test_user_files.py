"""Files that users name: what breaks a rule is refused with file, rule and position, and nothing hangs."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.storage import user_files, user_yaml
from ebbflow.planners.errors import OptionError

READERS: list[Callable[[Path], Any]] = [
    user_files.read_text,
    user_files.read_json,
    user_files.read_toml,
    user_yaml.read_yaml,
]


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**31)  # sparse


def _bomb() -> str:
    return "\n".join(
        ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    )


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "it is a directory; a regular file is needed"),
        (os.mkfifo, "it is a named pipe; a regular file is needed"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device; a regular file is needed"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"ok\n\xff"), r"not UTF-8 text: .*\(0xff\) at byte 3, line 2"),
        (lambda path: path.write_bytes(b"a\0b"), "it has a NUL at byte 1"),
        (_large, "at most 16,777,216 are read"),
    ],
)
def test_what_is_no_text_file_is_refused(
    read: Callable[[Path], Any], make: Callable[[Path], object], rule: str, tmp_path: Path
) -> None:
    path = tmp_path / "given"
    make(path)
    with pytest.raises(OptionError, match=rule) as error:
        read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("read", "text", "rule"),
    [
        (user_files.read_json, '{"a": }', "not JSON: Expecting value at line 1, column 7"),
        (user_files.read_json, '{"a": 1, "a": 2}', "the key 'a' is given twice"),
        (user_files.read_json, '{"a": NaN}', "numbers must be finite; got NaN"),
        (user_files.read_json, '{"a": 1e999}', "numbers must be finite; got 1e999"),
        (user_files.read_json, "9" * 5000, "not JSON that can be used"),
        (user_files.read_json, "[" * 100_000, "nested too deeply"),
        (user_files.read_toml, "a = 1\na = 2", "not TOML: Cannot overwrite a value"),
        (user_files.read_toml, "a = " + "[" * 50_000, "nested too deeply"),
        (user_yaml.read_yaml, "a: [", "not YAML: .* at line 1, column"),
        (user_yaml.read_yaml, "a: 1\na: 2", "the key 'a' is given twice at line 2, column 1"),
        (user_yaml.read_yaml, "[" * 5000, "line 1: values are nested too deeply"),
        (user_yaml.read_yaml, "a: &a [*a]", "an alias must not stand for what it is a part of"),
        (user_yaml.read_yaml, _bomb(), "at most 200,000 values"),
        (user_yaml.read_yaml, "a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        (user_yaml.read_yaml, "? [a, b]\n: 1", "a key must be a word"),
    ],
)  # fmt: skip
def test_what_breaks_its_format_is_refused(
    read: Callable[..., Any], text: str, rule: str, tmp_path: Path
) -> None:
    path = tmp_path / "given"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=rule) as error:
        read(path, error=WorkloadError)
    assert str(path) in str(error.value)


def test_right_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_bytes(b"\xef\xbb\xbf" + "a: é\nb: &x [1]\nc: *x\n".encode())
    assert user_yaml.read_yaml(path) == {"a": "é", "b": [1], "c": [1]}
    assert user_files.first_line(path) == "a: é"
    path.write_text("")
    assert user_yaml.read_yaml(path) is None


def test_places_to_write(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("")
    folder.mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for right in (file, tmp_path / "new", folder / "much" / "further" / "below"):
        assert user_files.output_problem(right) == ""
    assert user_files.output_problem(folder, directory=True) == ""
    assert user_files.output_problem(tmp_path / "new", directory=True) == ""
    for wrong, rule in (
        (folder, "it is a directory"),
        (tmp_path / "pipe", "it is a named pipe"),
        (tmp_path / "loop", "Too many levels"),
        (file / "below", "Not a directory"),
        (Path("/proc/nothing"), "the kernel's own"),
        (tmp_path / ("x" * 300) / "y", "File name too long"),
    ):
        assert rule in user_files.output_problem(wrong), wrong
    assert "no directory" in user_files.output_problem(file, directory=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "loop", "pipe"]
