"""What of a result goes to standard output, and what is said of it."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flowcases import COMMAND, TIMEOUT
from rich.console import Console

from ebbflow.flows.query.output import check_format, show_result
from ebbflow.infra.protocols import Checkpoint
from ebbflow.infra.query.results import result_at
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from tests.sweeps import spread

Make = Callable[..., Checkpoint]


@pytest.fixture
def stored(tmp_path: Path) -> Make:
    def make(*parts: pa.Table) -> Checkpoint:
        for i, part in enumerate(parts):
            pq.write_table(part, tmp_path / f"part-{i}.parquet")
        return result_at(StorageLocation(str(tmp_path)), (), sum(part.num_rows for part in parts))

    return make


def shown(
    result: Checkpoint, capsysbinary: pytest.CaptureFixture[bytes], **options: object
) -> tuple[bytes, str]:
    messages = Console(file=io.StringIO(), width=80)
    show_result(result, messages, **options)  # type: ignore[arg-type]
    assert isinstance(messages.file, io.StringIO)
    return capsysbinary.readouterr().out, messages.file.getvalue()


NUMBERS = pa.table({"n": list(range(30))})


def test_a_table_has_20_rows_unless_told_otherwise(
    stored: Make, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    result = stored(NUMBERS, NUMBERS)
    for options, rows, said in (
        ({}, 20, "20 of 60 rows; --limit 0 shows all\n"),
        ({"limit": 3}, 3, "3 of 60 rows; --limit 0 shows all\n"),
        ({"limit": 0}, 60, ""),
        ({"limit": 60}, 60, ""),
    ):
        out, messages = shown(result, capsysbinary, **options)
        assert (len(out.splitlines()), messages) == (2 + rows, said)


@pytest.mark.parametrize("limit", [None, 0, 1, 30, 31, 100])
def test_other_formats_have_all_rows_unless_told_otherwise(
    limit: int | None, stored: Make, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    result = stored(NUMBERS, NUMBERS)
    wanted = [*range(30), *range(30)][: limit or None]
    said = f"{limit} of 60 rows; --limit 0 shows all\n" if limit and limit < 60 else ""
    for format, read in (
        ("csv", lambda out: list(map(int, out.decode().splitlines()[1:]))),
        ("json", lambda out: [row["n"] for row in json.loads(out)]),
        ("parquet", lambda out: pq.read_table(io.BytesIO(out))["n"].to_pylist()),
    ):
        out, messages = shown(result, capsysbinary, format=format, limit=limit)
        assert (read(out), messages) == (wanted, said)


def test_a_result_without_rows_keeps_its_columns(
    stored: Make, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    result = stored(NUMBERS[:0])
    assert shown(result, capsysbinary, format="json") == (b"[]\n", "")
    assert shown(result, capsysbinary, format="csv") == (b"n\n", "")
    assert pq.read_table(io.BytesIO(shown(result, capsysbinary, format="parquet")[0])).equals(NUMBERS[:0])
    assert shown(result, capsysbinary)[0].startswith(b"n")


def test_a_table_that_is_piped_has_all_columns(
    stored: Make, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    result = stored(pa.table({f"column_{i}": ["x" * 20] for i in range(50)}))
    out, messages = shown(result, capsysbinary)
    assert b"column_49" in out
    assert messages == ""


def test_parquet_is_not_for_a_terminal() -> None:
    with pytest.raises(OptionError, match=r"--format parquet writes bytes, .* use --output FILE"):
        check_format("parquet", terminal=True)
    check_format("parquet", terminal=False)
    check_format("csv", terminal=True)


@pytest.mark.parametrize("format", spread(("json", "table", "csv", "parquet"), 2))
def test_a_reader_that_has_seen_enough_is_no_error(format: str, stored: Make, tmp_path: Path) -> None:
    stored(pa.table({"n": [i * 7919 % 1_000_003 for i in range(200_000)], "s": ["x" * 40] * 200_000}))
    script = (
        "from rich.console import Console; from ebbflow.flows.query.output import show_result\n"
        "from ebbflow.infra.query.results import result_at\n"
        "from ebbflow.infra.storage.places import StorageLocation\n"
        f"result = result_at(StorageLocation({str(tmp_path)!r}), (), 200_000)\n"
        f"show_result(result, Console(stderr=True), format={format!r}, limit=3000 if {format!r} == 'table' else 0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        child.stdout.close()
        said = child.stderr.read().decode()
    assert child.returncode == 0, said
    assert "Error" not in said


def test_a_full_disk_is_an_error_of_ours(tables: str) -> None:
    asked = ["query", "SELECT id FROM orders", "--tables", tables, "--engine", "duckdb", "--runner", "plain"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, *asked, "-q"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write the result to standard output: No space left on device\n"
