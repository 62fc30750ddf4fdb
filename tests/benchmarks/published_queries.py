"""Statements of published test suites, run by Ebbflow and by DuckDB alone over the same tables, and compared.

Run from the repository root: ``python -m tests.benchmarks.published_queries --suite duckdb --from DIR --log FILE``.
DIR is a checkout of the suite's repository that you have (duckdb/duckdb, apache/spark or tobymao/sqlglot): nothing
of it is part of this project. Scripts are run in an order drawn from their names, so that a run of some ``--minutes``
is a sample of the suite; each script's outcomes are added to the log at once, and the same command resumes. Prints
each difference, and a table by construct; exits with 1 when there is a difference. ``--out`` puts the suite's counts
into a JSON file.

Spark's statements are run on DuckDB, in its dialect as far as sqlglot can write them so. sqlglot's read tables that
are made of the columns they name.
"""

import argparse
import hashlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ebbflow.infra.storage.files import write_text
from tests.benchmarks.published.comparing import DIFFERENCES, Outcome, compare
from tests.benchmarks.published.constructs import constructs
from tests.benchmarks.published.suites import SUITES, Script, chosen, filled, scripts, with_tables

_START = 120.0  # seconds for the process that runs statements to begin
_COMPARED = ("same", "error", "refused", *DIFFERENCES)


def main() -> None:
    """Compare the statements of the suite that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--from", dest="checkout", type=Path, required=True, help="checkout of the suite")
    parser.add_argument("--revision", default="", help="the checkout's commit, for the counts")
    parser.add_argument("--under", default="", help="scripts whose names begin so, by commas")
    parser.add_argument("--minutes", type=float, default=10.0, help="start no script later than this")
    parser.add_argument("--seconds", type=float, default=30.0, help="of one statement, both ways")
    parser.add_argument("--log", type=Path, required=True, help="JSON lines of outcomes, to resume from")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the counts of all suites")
    given = parser.parse_args()
    found = chosen(list(scripts(given.suite, given.checkout)), [u for u in given.under.split(",") if u])
    found.sort(key=lambda script: hashlib.sha256(script.name.encode()).hexdigest())
    logged = _logged(given.log)
    over = time.monotonic() + 60 * given.minutes
    with given.log.open("a") as log:
        runner = _Runner(given.checkout.resolve(), given.seconds)
        for script in found:
            if script.skipped or script.name in logged:
                continue
            if time.monotonic() > over:
                break
            logged[script.name] = outcomes = runner.run(with_tables(script))
            log.write(json.dumps({"script": script.name, "outcomes": outcomes}) + "\n")
            log.flush()
            for one in outcomes:
                if one["kind"] in DIFFERENCES:
                    print(
                        f"{one['kind']}: {script.name}:{one['line']}: {one['reason']}\n  {one['sql']}",
                        flush=True,
                    )
        runner.close()
    counts = _counts(found, logged) | {"revision": given.revision, "under": given.under}
    if given.out:
        whole = json.loads(given.out.read_text()) if given.out.exists() else {}
        suites = whole.get("suites", {}) | {given.suite: counts}
        write_text(
            given.out, json.dumps({"benchmark": "published_queries", "suites": suites}, indent=1) + "\n"
        )
    _print(counts)
    sys.exit(1 if any(counts["outcomes"].get(kind) for kind in DIFFERENCES) else 0)


def _logged(path: Path) -> dict[str, list[dict[str, Any]]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {told["script"]: told["outcomes"] for told in map(json.loads, lines)}


class _Runner:
    """Runs scripts in a process of its own, which is replaced where a statement takes too long or crashes it."""

    def __init__(self, checkout: Path, seconds: float) -> None:
        self._checkout, self._seconds = checkout, seconds
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Any = None

    def run(self, script: Script) -> list[dict[str, Any]]:
        """Return what became of the script's queries, in order."""
        found: dict[int, Outcome] = {}
        while True:
            if self._process is None:
                self._start()
            self._pipe.send((script, frozenset(found)))
            ended = self._followed(found)
            if ended:
                break
        return [
            {"line": script.steps[place].line, "sql": script.steps[place].sql, **asdict(outcome)}
            | {"constructs": sorted(constructs(script.steps[place].sql))}
            for place, outcome in sorted(found.items())
            if script.steps[place].query
        ]

    def _followed(self, found: dict[int, Outcome]) -> bool:
        """Take outcomes into ``found`` until the script has ended; tell whether it has by itself."""
        place = 0
        while True:
            try:
                if not self._pipe.poll(self._seconds):
                    self.close()
                    found[place] = Outcome("timed out")
                    return True  # what follows in the script is likely to be as long
                told, *what = self._pipe.recv()
            except (EOFError, ConnectionError):
                self.close()
                return self._given_up(place, Outcome("crashed"), found)
            if told == "began":
                (place,) = what
            elif told == "done":
                found[what[0]] = what[1]
            else:
                return True

    def _given_up(self, place: int, outcome: Outcome, found: dict[int, Outcome]) -> bool:
        """Enter an outcome; tell whether the script cannot be run on: a statement that sets it up failed."""
        again = place in found
        found[place] = outcome
        return again

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs, self._checkout), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(_START) or self._pipe.recv() != "ready":
            raise RuntimeError("the process that runs statements did not start")

    def close(self) -> None:
        """Stop the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
            self._pipe.close()


def _serve(pipe: Connection, checkout: Path) -> None:
    import os

    from ebbflow.tasks.query.opening import opened_engine
    from ebbflow.tasks.query.request import QueryRequest

    with tempfile.TemporaryDirectory() as top:
        work = Path(top) / "work"
        work.mkdir()
        if (checkout / "data").is_dir():
            (work / "data").symlink_to(checkout / "data")
        os.chdir(work)
        request = QueryRequest("SELECT 1", tables=top, engine="duckdb", store=str(Path(top) / "store"))
        with opened_engine(request) as opened:
            pipe.send("ready")
            while True:
                try:
                    script, left_out = pipe.recv()
                except EOFError:
                    return
                with tempfile.TemporaryDirectory(dir=top) as folder:
                    places = {
                        "__TEST_DIR__": folder,
                        "{TEST_DIR}": folder,
                        "__WORKING_DIRECTORY__": str(work),
                    }
                    compare(
                        filled(script, places),
                        Path(folder),
                        opened,
                        left_out,
                        lambda place: pipe.send(("began", place)),
                        lambda place, outcome: pipe.send(("done", place, outcome)),
                    )
                pipe.send(("ended",))


def _counts(found: Sequence[Script], logged: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the counts of what is logged of the scripts ``found``."""
    outcomes = [one for script in found for one in logged.get(script.name, ())]
    compared = [one for one in outcomes if one["kind"] in _COMPARED]
    answered = [one for one in compared if one["kind"] not in ("error", "refused")]
    by_construct: dict[str, Counter[str]] = {}
    for one in compared:
        for name in ("all", *one["constructs"]):
            counter = by_construct.setdefault(name, Counter())
            counter["statements"] += 1
            counter["answered"] += one["kind"] not in ("error", "refused")
            counter["planned"] += one["planned"]
            counter["refused"] += one["kind"] == "refused"
            counter["different"] += one["kind"] in DIFFERENCES
    return {
        "scripts": len([s for s in found if s.name in logged]),
        "scripts_all": len(found),
        "scripts_skipped": dict(Counter(s.skipped for s in found if s.skipped).most_common()),
        "statements": len(outcomes),
        "outcomes": dict(sorted(Counter(one["kind"] for one in outcomes).items())),
        "stages": {str(n): of for n, of in sorted(Counter(one["stages"] for one in answered).items())},
        "refused": dict(
            Counter(_refusal(one["reason"]) for one in compared if one["kind"] == "refused").most_common()
        ),
        "unplanned": dict(
            Counter(_unplanned(one["reason"]) for one in answered if not one["planned"]).most_common()
        ),
        "constructs": {name: dict(by_construct[name]) for name in sorted(by_construct)},
    }


def _refusal(reason: str) -> str:
    """Return what a refusal is about, without the statement's own words."""
    kind, _, text = reason.partition(": ")
    if kind == "SqlSyntaxError":
        return "sqlglot cannot read it"
    for word, said in (
        ("reads files", "reads files"),
        ("is no table", "a file or text in the place of a table"),
        ("known to read nothing", "a table function that is not known to read nothing"),
        ("runs code", "runs SQL that is given as text"),
        ("unknown table", "a file or a table of another database"),
        ("settings", "reads settings or secrets"),
        ("may not contain", "a statement inside it that is no query"),
        ("exactly one query", "not exactly one query"),
    ):
        if word in text:
            return said
    return "other"


def _unplanned(reason: str) -> str:
    """Return why a query runs whole, without the statement's own words."""
    for word, said in (
        ("COLUMNS(", "COLUMNS(...)"),
        ("PIVOT", "PIVOT ... ON and UNPIVOT ... ON"),
        ("only the engine knows", "* of what only the engine knows"),
        ("columns where", "the engine makes other columns of its SELECT"),
        ("recursive", "recursive WITH"),
        ("not deterministic", "not deterministic"),
        ("could not be separated", "its subqueries cannot be separated"),
        ("names cannot be resolved", "its names cannot be resolved"),
    ):
        if word in reason:
            return said
    return "a column cannot be resolved" if reason else "none told"


def _print(counts: dict[str, Any]) -> None:
    print(f"{counts['scripts']} of {counts['scripts_all']} scripts, {counts['statements']} statements")
    for key in ("outcomes", "stages", "refused", "unplanned"):
        print(f"{key}: " + ", ".join(f"{name} {count}" for name, count in counts[key].items()))
    print("| construct | statements | planned | refused | different |\n|---|---|---|---|---|")
    for name, of in counts["constructs"].items():
        share = f"{of['planned'] / of['answered']:.0%}" if of["answered"] else "-"
        print(f"| {name} | {of['statements']} | {share} | {of['refused']} | {of['different']} |")


if __name__ == "__main__":
    main()
