"""A directory is built once however many want it, and one whose builder was killed counts for nothing."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.workspace.building import build_once, run_command
from ebbflow.infra.training.workspace.environment import environment_for, environment_key, python_of
from tests.code_projects import write_wheel

LONG = 150.0  # seconds: a bound for a busy machine, not an expectation


def test_many_want_it_and_one_builds(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(target: Path) -> None:
        built.append(target)
        time.sleep(0.05)
        (target / "file").write_text("whole")

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: build_once(tmp_path, "key", build, SystemClock()), range(8)))
    assert found == set(built)
    assert len(built) == 1
    assert (built[0] / "file").read_text() == "whole"


def test_what_fails_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("")
        raise TrainingError("no")

    with pytest.raises(TrainingError):
        build_once(tmp_path, "key", fail, SystemClock())
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert build_once(tmp_path, "key", lambda target: None, SystemClock()).is_dir()


@pytest.mark.processes
def test_a_builder_that_was_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    source = (
        "import sys, time, pathlib\n"
        "from ebbflow.infra.clock import SystemClock\n"
        "from ebbflow.infra.training.workspace.building import build_once\n"
        "def build(target):\n"
        "    (target / 'half').write_text('')\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(600)\n"
        "build_once(pathlib.Path(sys.argv[1]), 'key', build, SystemClock())\n"
    )
    with subprocess.Popen([sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == b"begun\n"
        with ThreadPoolExecutor(1) as pool:  # waits for the builder, and builds when that is gone
            waiting = pool.submit(build_once, tmp_path, "key", lambda target: None, SystemClock())
            assert not waiting.done()
            os.kill(builder.pid, signal.SIGKILL)
            found = waiting.result(LONG)
    assert list(found.iterdir()) == []
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [found]


def test_the_last_lines_of_a_command_are_told_without_secrets(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "for n in $(seq 30); do echo line $n; done; echo token is $TOKEN; exit 3"
    with pytest.raises(TrainingError, match="the setup command ended with status 3:") as error:
        run_command(
            ["/bin/sh", "-c", script],
            "the setup command",
            tmp_path,
            {**os.environ, "TOKEN": "s3cret"},
            ["s3cret"],
        )
    said = str(error.value).splitlines()
    assert said[1:] == [*(f"line {n}" for n in range(20, 31)), "token is ***"]
    assert "s3cret" not in capfd.readouterr().out


def test_versions_make_another_environment_and_files_do_where_a_line_names_one() -> None:
    plain = "numpy\nflask[async]>=2 ; python_version > '3' # web\n\n# a comment\n"
    assert environment_key(plain, "code-1") == environment_key(plain, "code-2")
    assert environment_key(plain, "code") != environment_key("numpy", "code")
    for line in ("./a.whl", "-r more.txt", "-e .", "a @ file:///a.whl", "lib/a"):
        assert environment_key(line, "code-1") != environment_key(line, "code-2"), line


@pytest.mark.processes
def test_an_environment_adds_to_the_nodes_own(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    made = environment_for(f"{wheel}\nnumpy\n", tmp_path, "", tmp_path / "cache", SystemClock())
    source = "import sys, tinygreet, torch, ebbflow, numpy; print(numpy.__file__, sys.prefix)"
    done = subprocess.run(
        [python_of(made), "-c", source], capture_output=True, text=True, check=True, timeout=LONG, cwd="/"
    )
    numpy, prefix = done.stdout.split()
    assert Path(prefix) == made
    assert made not in Path(numpy).parents, "what the node has is not installed again"


def test_a_command_that_does_not_end_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(
        TrainingError, match=r"the setup command must end within 0\.5 s, and did not:\nwaiting"
    ):
        run_command(
            ["/bin/sh", "-ec", "echo waiting; sleep 500; true"],
            "the setup command",
            tmp_path,
            os.environ,
            timeout=0.5,
        )
    assert time.monotonic() - began < LONG
