"""Pages whose commands are one script: run from an empty directory, and their output is compared with what is shown.

A fenced block with ``title="NAME"`` is saved as that file. All ``sh`` blocks run in one shell, in order. A ``text``
block after an ``sh`` block is what the reader sees of it: its lines must be there in that order, ``...`` stands for
any lines, and what differs from run to run (durations, times of day, IDs, ports) is compared by its form.

``python -m tests.docs.task_pages docs/tasks/PAGE.md`` runs a page and prints what each block printed.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.docs.snippets import ROOT, Snippet, snippets
from tests.free_ports import free_port

FOLDER = "docs/tasks/"
WORDS = 1000  # of a page at most
_LIMIT = 600.0  # s
_MARK = "\x1e"
# what the test's environment has already, and a reader's must get first
_SET_UP = re.compile(r"^(python3 -m venv|\. \.venv/bin/activate|pip install|mkdir \S+ && cd)\b.*$", re.M)
_JOB = re.compile(r"^bash: line \d+: +\d+ Killed.*$|^.*\.sh: line \d+: +\d+ Killed.*$")
_FORMS = (
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID"),
    (r"-\d{4}-\d{6}-[0-9a-f]{4}\b", "-RUN"),
    (r"\bqep-[0-9a-f]{8}\b", "qep-PLAN"),
    (r"\b\d{4}-\d\d-\d\d\b", "DATE"),
    (r"^ *\d+ +DATE", "N DATE"),  # an event's number
    (r"\b\d\d:\d\d:\d\d(\.\d+)?\b", "CLOCK"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"\$\d[\d.,]*", "$N"),
    (r"\b\d[\d.,]* ?(?:s|ms|min|h|m)\b", "TIME"),
    (r"\b(step|loss|goodput|noise|throughput:?|rho|ρ) \d[\d.,]*( k)?", r"\1 N"),
    (r"\d[\d.,]*( k)? examples/s", "N examples/s"),
    (r"\b\d+ ?%", "N %"),
    (r"(?<![\d.])\d{1,3}\.\d+\b", "N"),
    (r"\b\d of (\d)\b", r"N of \1"),  # GPUs: how they are shared depends on what the apps have measured
    (r"\d+ leases revoked: preempted: .*", "LEASES revoked"),
    (r"(\d+|a few|an?) (second|minute)s? ago", "AGO"),
    (r"^\d+ events replayed", "N events replayed"),
    (r"\d apps? would have been", "N would have been"),
    (
        r"^([↺✓]) .* (reused|completed): [\d,]+ rows",
        r"\1 STAGE \2: N rows",
    ),  # which is first depends on timing
    (r"^stay: .*|^switch: .*", "DECISION"),
    (r"\b\d+ generations?\b", "N generations"),
)


@dataclass(frozen=True)
class Shown:
    """A block of commands, and what the page shows of their output."""

    commands: Snippet
    output: Snippet | None


def task_pages() -> list[str]:
    """Return the pages whose commands are one script."""
    return sorted({one.page for one in snippets() if one.page.startswith(FOLDER)})


def shown(page: str) -> list[Shown]:
    """Return the blocks of commands of a page, each with the output that follows it."""
    blocks = [one for one in snippets() if one.page == page]
    return [
        Shown(one, after if after is not None and after.language == "text" else None)
        for one, after in zip(blocks, [*blocks[1:], None], strict=True)
        if one.language == "sh"
    ]


def script(page: str) -> str:
    """Return a page as one shell script, which marks where the output of a block of commands ends."""
    lines = []
    for number, one in enumerate(block for block in snippets() if block.page == page):
        if one.language == "sh":
            lines.append(_SET_UP.sub(":", one.text))
            lines.append(f"printf '{_MARK}{one.line} %s{_MARK}\\n' $?\n")
        elif one.title:
            lines.append(f"cat > {one.title} <<'END-{number}'\n{one.text}END-{number}\n")
    return "".join(lines)


def run(page: str, folder: Path, home: Path) -> dict[int, tuple[int, str]]:
    """Run a page in an empty directory.

    Returns the exit status and the output (standard output and error) of each block of commands, by its line.
    No process that has ``home`` as its home is left.
    """
    port = str(free_port())  # the usual one (4200) another server may have
    path = folder.parent / "page.sh"
    path.write_text(script(page).replace("4200", port), encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("EBBFLOW_", "PREFECT_"))
    }
    environment |= {"HOME": str(home), "COLUMNS": "100", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    environment |= {"PREFECT_SERVER_API_PORT": port, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    log = folder.parent / "output.txt"
    try:
        with log.open("wb") as out:
            subprocess.run(
                ["bash", "-u", str(path)], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, timeout=_LIMIT, check=False,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(log.read_text(encoding="utf-8", errors="replace"))
        raise
    finally:
        end_processes(home)
    parts = re.split(f"{_MARK}(\\d+) (\\d+){_MARK}\n", log.read_text(encoding="utf-8", errors="replace"))
    return {
        int(line): (int(status), text)
        for text, line, status in zip(parts[0::3], parts[1::3], parts[2::3], strict=False)
    }


def end_processes(home: Path) -> None:
    """Kill every process that has this home."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get("HOME") == str(home):
                process.send_signal(signal.SIGKILL)


def missing(expected: str, output: str) -> list[str]:
    """Return the lines of ``expected`` that ``output`` lacks, or has elsewhere; none where all is as shown."""
    there = [_form(line) for line in output.splitlines() if line.strip() and not _JOB.match(line)]
    at, anywhere = 0, True
    wrong = []
    for line in filter(str.strip, expected.splitlines()):
        if line.strip() == "...":
            anywhere = True
            continue
        where = (
            _index(there, _form(line), at)
            if anywhere
            else (at if there[at : at + 1] == [_form(line)] else -1)
        )
        if where < 0:
            wrong.append(line)
            anywhere = True
        else:
            at, anywhere = where + 1, False
    return wrong


def _index(lines: Sequence[str], line: str, start: int) -> int:
    return next((n for n in range(start, len(lines)) if lines[n] == line), -1)


def _form(line: str) -> str:
    for pattern, form in _FORMS:
        line = re.sub(pattern, form, line)
    return " ".join(line.split())


def main() -> None:
    """Run the page named on the command line and print what each block printed."""
    page = sys.argv[1]
    with tempfile.TemporaryDirectory() as place:
        folder, home = Path(place, "work"), Path(place, "home")
        folder.mkdir()
        home.mkdir()
        printed = run(page, folder, home)
    for block in shown(page):
        status, text = printed.get(block.commands.line, (-1, "not reached\n"))
        print(f"=== {block.commands} status {status}\n{block.commands.text}--- printed\n{text}", end="")
        if block.output is not None and (wrong := missing(block.output.text, text)):
            print("--- shown, but not printed", *wrong, sep="\n")


if __name__ == "__main__":
    assert Path.cwd() == ROOT, "run it in the repository's root"
    main()
