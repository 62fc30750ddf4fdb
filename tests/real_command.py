"""The real command, many times: one interpreter that has imported it, of which each call is a fork."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SERVER = """
import gc, json, os, sys

import typer._adapters, typer.rich_utils
import ebbflow.flows.query.command, ebbflow.tasks.pipeline.run, ebbflow.tasks.training.run, ebbflow.tasks.tuning.run
from ebbflow.flows import cli

gc.freeze()  # else a child that ends looks through, and so copies, all that it has from here
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (1, 2):
            os.dup2(os.open(asked["said"][number - 1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(asked["folder"])
        os.umask(asked["umask"])
        os.environ.clear()
        os.environ.update(asked["variables"])
        sys.argv = ["ebbflow", *asked["words"]]
        cli.main()
        break  # its interpreter ends as that of the command does
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Done:
    """How a call ended."""

    returncode: int
    stdout: str
    stderr: str


class RealCommand:
    """Calls of the command in processes of their own."""

    def __init__(
        self, process: "subprocess.Popen[str]", folder: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self._process, self._said = process, [folder / "stdout", folder / "stderr"]
        self._variables = variables or {}

    def run(self, words: Sequence[str]) -> Done:
        """Call ``ebbflow WORDS`` where this process is, with its environment; negative codes are signals."""
        umask = os.umask(0o077)  # it is told only when it is set
        os.umask(umask)
        asked = {
            "words": list(words),
            "folder": str(Path.cwd()),
            "umask": umask,
            "said": list(map(str, self._said)),
            "variables": {**os.environ, **self._variables},
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks has ended with {self._process.wait(150)}"
        return Done(int(answer), *(path.read_text(errors="replace") for path in self._said))


@contextmanager
def real_command(folder: Path, variables: Mapping[str, str] | None = None) -> Iterator[RealCommand]:
    """Start the interpreter, with ``variables`` beside this process's environment; ``folder`` is to write in."""
    folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-Pc", _SERVER],
        env={**os.environ, **(variables or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield RealCommand(process, folder, variables)
        finally:
            process.kill()
