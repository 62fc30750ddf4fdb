"""Commands start fast: they import what they need, counted in modules and not in seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from ebbflow.flows import cli

TIMEOUT = 120.0  # s
_SAYING = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=open({file!r}, "w")))
from ebbflow.flows import cli
cli.main()
"""


def imported(tmp_path: Path, *arguments: str) -> set[str]:
    """Return the modules that a process of the command line has imported at its end."""
    file = tmp_path / "modules"
    command = [sys.executable, "-c", _SAYING.format(file=str(file)), *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "COV_"))}
    env["EBBFLOW_HOME"] = str(tmp_path / "home")
    subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=True, env=env)
    return set(file.read_text().split())


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("ebbflow.")}


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    group = typer.main.get_command(cli.app)
    commands = dict(group.commands)  # type: ignore[attr-defined]
    assert [one.name for one in cli.Commands.listed] == list(commands)
    for one in cli.Commands.listed:
        assert commands[one.name].name == one.name
        assert commands[one.name].help.partition("\n\n")[0].replace("\n", " ") == one.help


def test_help_imports_no_command(tmp_path: Path) -> None:
    modules = imported(tmp_path, "--help")
    heavy = "numpy scipy pandas pyarrow duckdb sqlglot pydantic prefect jinja2 yaml psutil asyncio http"
    assert not packages(modules) & set(heavy.split())
    assert not modules & {"urllib.request", "importlib.metadata", "concurrent.futures"}
    assert not {name for name in ours(modules) if name.startswith("ebbflow.tasks")}
    assert len(ours(modules)) <= 30
    assert len(modules) <= 400


@pytest.mark.processes
def test_a_count_on_the_embedded_engine_imports_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"a": range(1000)}), tmp_path / "t.parquet")
    command = ("query", "SELECT count(*) AS n FROM t", "--tables", str(tmp_path))
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    for _ in range(2):  # the second has measurements of the first to fit
        modules = imported(tmp_path, *command)
        heavy = "scipy pandas prefect pydantic jinja2 psutil yaml asyncio networkx alembic sqlalchemy torch pyspark"
        assert not packages(modules) & set(heavy.split())
        assert not modules & {"urllib.request", "numpy.ma", "sqlglot.dialects.snowflake"}
        assert len(ours(modules)) <= 208
        assert len(modules) <= 695
    assert not (tmp_path / "asked").exists()  # a virtual machine starts for nothing
