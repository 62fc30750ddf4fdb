"""SQL that is wrong in every way that was thought of, by the real command: one message, status 2, and no trace."""

import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from flowcases import TIMEOUT
from typer.testing import CliRunner

from ebbflow.flows import cli
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.query.sql.nesting import LONGEST
from tests.real_command import RealCommand, real_command
from tests.sweeps import spread

PIPELINE = """
name: bad
cluster: {{local: {{pools: {{sql: {{kind: spark, nodes: 1}}}}}}}}
queries:
  theirs: {{file: {file}, engine: duckdb, tables: {tables}}}
"""

WRONG = {
    "only a comment": "-- nothing",
    "only blanks": " \n\t ",
    "only a semicolon": ";",
    "two statements": "SELECT 1; SELECT 2",
    "no query": "DROP TABLE orders",
    "an unfinished string": "SELECT 'abc FROM orders",
    "an unfinished name": 'SELECT "abc FROM orders',
    "an unfinished comment": "SELECT 1 /* FROM orders",
    "an unfinished parenthesis": "SELECT (1 FROM orders",
    "one parenthesis too many": "SELECT 1) FROM orders",
    "a NUL": "SELECT 'a\0b' FROM orders",
    "a lone surrogate": "SELECT '\ud800' FROM orders",
    "an unknown table": "SELECT * FROM nowhere",
    "an unknown column": "SELECT nothing FROM orders",
    "a name of 100,000 letters": f"SELECT {'x' * 100_000} FROM orders",
    "a table of 100,000 letters": f"SELECT * FROM {'x' * 100_000}",
    "nothing but operators": "SELECT + - * /",
    "a keyword alone": "SELECT",
    "a clause that sqlglot stumbles over": "SELECT map(id) USING 'cat' FROM orders",
    "too long": "SELECT 1 -- " + "x" * LONGEST,
    "3,000 parentheses": "SELECT " + "(" * 3000 + "1" + ")" * 3000,
    "3,000 parentheses that are not closed": "SELECT " + "(" * 3000,
    "30,000 brackets": "SELECT " + "[" * 30_000,
    "1,000 calls": "SELECT " + "abs(" * 1000 + "1" + ")" * 1000,
    "1,000 cases": "SELECT " + "CASE WHEN id = 1 THEN 1 ELSE " * 1000 + "1" + " END" * 1000 + " FROM orders",
    "500 subqueries": "SELECT * FROM " + "(SELECT * FROM " * 500 + "orders" + ")" * 500,
    "500 scalar subqueries": "SELECT " + "(SELECT " * 500 + "1" + ")" * 500,
    "500 conditions in one another": "SELECT 1 FROM orders WHERE " + "id IN (SELECT id FROM orders WHERE " * 500
    + "true" + ")" * 500,
    "5,000 additions": "SELECT " + "+".join(["1"] * 5000),
    "5,000 conditions": "SELECT id FROM orders WHERE " + " AND ".join(f"id <> {n}" for n in range(5000)),
    "5,000 alternatives": "SELECT id FROM orders WHERE " + " OR ".join(f"id = {n}" for n in range(5000)),
    "2,000 unions": " UNION ALL ".join(["SELECT id FROM orders"] * 2000),
    "5,000 negations": "SELECT " + "NOT " * 5000 + "true",
    "5,000 minus signs": "SELECT " + "- " * 5000 + "1",
    "5,000 casts": "SELECT id" + "::int" * 5000 + " FROM orders",
    "5,000 concatenations": "SELECT " + " || ".join(["'a'"] * 5000),
    "5,000 fields": "SELECT id" + ".a" * 5000 + " FROM orders",
    "5,000 indices": "SELECT id" + "[0]" * 5000 + " FROM orders",
    "1,000 arrays in one another": "SELECT " + "array(" * 1000 + "1" + ")" * 1000,
    "1,000 types in one another": "SELECT CAST(1 AS " + "array<" * 1000 + "int" + ">" * 1000 + ")",
    "1,000 WITHs in one another": "WITH a AS (" * 1000 + "SELECT 1" + ") SELECT 1" * 1000,
}  # fmt: skip
OF_TABLES = {
    "an unknown table",
    "an unknown column",
    "a name of 100,000 letters",
    "a table of 100,000 letters",
}
RIGHT = {
    "5,000 values": f"SELECT count(*) AS n FROM orders WHERE id IN ({', '.join(map(str, range(5000)))})",
    "600 columns": "SELECT " + ", ".join(f"id + {n} AS c{n}" for n in range(600)) + " FROM orders",
    "30 parentheses": "SELECT " + "(" * 30 + "id" + ")" * 30 + " AS x FROM orders",
    "400 additions": "SELECT id" + " + 1" * 400 + " AS x FROM orders",
    "300 alternatives": "SELECT id FROM orders WHERE " + " OR ".join(f"id = {n}" for n in range(300)),
    "100 unions": " UNION ALL ".join(["SELECT id FROM orders"] * 100),
    "60 joins": "SELECT o0.id FROM orders o0 "
    + " ".join(f"JOIN orders o{n} ON o0.id = o{n}.id" for n in range(1, 60)),
    "a trailing semicolon": "SELECT id FROM orders;",
    "comments around": "/* a */ SELECT id -- b\nFROM orders -- c",
    "a byte order mark": "\ufeffSELECT id FROM orders",
}


def options(tables: str, folder: Path) -> list[str]:
    return ["--tables", tables, "--store", str(folder / "store"), "--engine", "duckdb"]


def file_of(sql: str | bytes, folder: Path) -> str:
    path = folder / "theirs.sql"
    path.write_bytes(sql if isinstance(sql, bytes) else sql.encode("utf-8", "surrogatepass"))
    return str(path)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCommand]:
    folder = tmp_path_factory.mktemp("command")
    with real_command(folder, {"EBBFLOW_HOME": str(folder / "home")}) as command:
        yield command


def asked() -> Iterator[ParameterSet]:
    """Yield all texts with the commands that tell of them.

    The deep ones take a second or two each, of which the most is the parser's: all commands but one of each are slow.
    """
    for name in WRONG:
        for place, command in enumerate(("query", "explain", "run")):
            slow = name[0].isdigit() and zlib.crc32(name.encode()) % 3 != place
            if name not in OF_TABLES or command != "run":  # tables are not looked for by that check
                yield pytest.param(name, command, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("name", "command"), list(asked()))
def test_wrong_sql_is_told_by_query_explain_and_check(
    name: str, command: str, tables: str, tmp_path: Path
) -> None:
    path = file_of(WRONG[name], tmp_path)
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(PIPELINE.format(file=path, tables=tables))
    arguments = {
        "query": [path, *options(tables, tmp_path), "--runner", "plain"],
        "explain": [path, *options(tables, tmp_path)],
        "run": [str(pipeline), "--check"],
    }
    done = CliRunner().invoke(cli.app, [command, *arguments[command]])
    assert isinstance(done.exception, EbbflowError), (done.exception, done.output)
    assert 0 < len(str(done.exception)) < 2000
    assert not (tmp_path / "store" / "stages").exists()


@pytest.mark.parametrize("name", RIGHT)
def test_sql_that_is_odd_but_right_is_run(name: str, tables: str, tmp_path: Path) -> None:
    path = file_of(RIGHT[name], tmp_path)
    done = CliRunner().invoke(cli.app, ["query", path, *options(tables, tmp_path), "--runner", "plain"])
    assert done.exception is None, done.exception


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"SELECT 1\n\xff FROM orders", r"is not UTF-8 text: .*\(0xff\) at byte 9, line 2"),
        ("SELECT 'ä' FROM orders".encode("latin-1"), r"is not UTF-8 text: .*\(0xe4\) at byte 8, line 1"),
        ("SELECT 1 FROM orders".encode("utf-16"), r"is not UTF-8 text: .*\(0xff\) at byte 0, line 1"),
        (b"", "sql must hold a query; got an empty text"),
        (b"SELECT 1 " + b" " * (4 * LONGEST), "at most 4,000,000 are read"),
    ],
)
def test_a_file_that_is_no_text_names_file_rule_and_place(
    content: bytes, rule: str, tables: str, tmp_path: Path
) -> None:
    path = file_of(content, tmp_path)
    done = CliRunner().invoke(cli.app, ["explain", path, *options(tables, tmp_path)])
    assert isinstance(done.exception, EbbflowError)
    with pytest.raises(EbbflowError, match=rule):
        raise done.exception
    assert path in str(done.exception) or not content


@pytest.mark.parametrize("name", spread((n for n in WRONG if n[0].isdigit()), 3))
def test_deep_sql_ends_the_real_command_with_a_message(
    name: str, tables: str, tmp_path: Path, command: RealCommand
) -> None:
    path = file_of(WRONG[name], tmp_path)
    done = command.run(["explain", path, *options(tables, tmp_path)])
    assert done.returncode == 2, (done.returncode, done.stderr[-2000:])
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_functions_are_allowed_by_the_command_line_alone(tables: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a\n7\n")
    path = file_of(f"SELECT x.a FROM read_csv('{tmp_path}/x.csv') AS x", tmp_path)
    asked = ["query", path, *options(tables, tmp_path), "--dialect", "duckdb", "--runner", "plain"]
    for more in ([], ["--allow-functions", "read_text,glob"]):
        done = CliRunner().invoke(cli.app, [*asked, *more])
        assert isinstance(done.exception, EbbflowError)
        assert "--allow-functions read_csv" in str(done.exception)
    done = CliRunner().invoke(
        cli.app, [*asked, "--allow-functions", "READ_CSV,read_text", "--allow-functions", "glob"]
    )
    assert done.exception is None, done.exception
    assert "7" in done.output
    done = CliRunner().invoke(cli.app, [*asked, "--allow-functions", "read csv"])
    assert "must be names of functions such as read_csv" in str(done.exception)


@pytest.mark.parametrize("command", ["query", "explain", "run"])
def test_help_names_the_option(command: str) -> None:
    shown = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "160"}).output
    assert "--allow-functions" in shown


def test_a_deep_query_does_not_exhaust_the_stack_of_a_thread() -> None:
    """Planning may run in threads, whose C stacks are smaller than the first one's."""
    script = (
        "import threading\n"
        "from ebbflow.planners.errors import EbbflowError\n"
        "from ebbflow.planners.query.sql.parse import parse\n"
        "def look():\n"
        "    for text in ('(' * 100_000, 'SELECT 1' + '+1' * 100_000, 'SELECT ' + 'NOT ' * 100_000 + '1'):\n"
        "        try: parse(text)\n"
        "        except EbbflowError: print('told')\n"
        "threading.stack_size(512 * 1024)\n"
        "thread = threading.Thread(target=look); thread.start(); thread.join()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\n" * 3, "")
