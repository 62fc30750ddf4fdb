"""A ledger whose disk changes bytes, loses the end of a file, or may only be read."""

import os
import random
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from ebbflow.infra.errors import LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.ledger import history as snapshots
from ebbflow.infra.ledger.rows import codec, seals
from ebbflow.planners.model.ledger import AppReport
from tests.infra.ledger import ledger_child
from tests.infra.ledger.conftest import Place
from tests.infra.ledger.ledger_values import app

FLIPS = 400


def test_a_sealed_text_is_json_and_no_character_of_it_or_of_what_it_is_about_can_change() -> None:
    import json

    for body in ("{}", '{"a":1}', '{"a":"\\"xxh64\\":\\"0123456789abcdef\\""}'):
        sealed = seals.seal(body, 3, 1.5, "granted")
        assert seals.unseal(sealed, 3, 1.5, "granted") == body
        assert {key: value for key, value in json.loads(sealed).items() if key != "xxh64"} == json.loads(body)
        for about in ((4, 1.5, "granted"), (3, 2.5, "granted"), (3, 1.5, "ended")):
            with pytest.raises(LedgerError, match="checksum mismatch"):
                seals.unseal(sealed, *about)
        for at in range(len(sealed)):
            for mask in (1, 4, 32):
                changed = sealed[:at] + chr(ord(sealed[at]) ^ mask) + sealed[at + 1 :]
                try:  # a text that carries no checksum any more is no text of ours: reading is strict
                    known = json.loads(seals.unseal(changed, 3, 1.5, "granted"))
                except (LedgerError, ValueError):
                    continue
                assert set(known) - {"a"}, changed


def test_a_text_of_before_there_were_checksums_is_read(place: Place) -> None:
    ledger = place.open()
    (event,) = ledger.write([app("a")])
    bare = {"body": codec.pack(event.change).body, "c": place.cluster}
    ledger._database.transact(
        "make it old",
        lambda c: c.execute(text("UPDATE ledger_events SET body = :body WHERE cluster = :c"), bare),
    )
    assert set(place.open().state().apps) == {"a"}


@pytest.mark.parametrize("column", ["body", "at", "kind"])
def test_an_event_that_is_not_what_was_written_is_named_and_not_believed(place: Place, column: str) -> None:
    ledger = place.open()
    ledger.write([app("abc")])
    ledger.write([app("b")])
    new = {
        "body": "replace(body, 'abc', 'abd')",
        "at": "at + 1",
        "kind": "'app-moved'",
    }[column]
    ledger._database.transact(
        "damage it",
        lambda c: c.execute(
            text(f"UPDATE ledger_events SET {column} = {new} WHERE cluster = :c AND number = 1"),
            {"c": place.cluster},
        ),
    )
    with pytest.raises(LedgerError, match=r"event 1: .*checksum mismatch.*restore a backup"):
        place.open().state()
    assert any("event 1" in said for said in place.open().verify())


def test_a_damaged_snapshot_costs_replay_and_a_damaged_report_is_left_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "EVERY", 2)
    ledger = place.open()
    ledger.write([app("abc")])
    ledger.write([app("b")])
    ledger._journal.keep_snapshot()
    ledger.report("b", AppReport(1.0, message="abc"))
    for table in ("ledger_snapshots", "ledger_reports"):
        ledger._database.transact(
            "damage it",
            lambda c, table=table: c.execute(  # type: ignore[misc]
                text(f"UPDATE {table} SET body = replace(body, 'abc', 'abd') WHERE cluster = :c"),
                {"c": place.cluster},
            ),
        )
    found, unread = place.open(), dict[str, Any]()
    assert set(found.state().apps) == {"abc", "b"}
    assert found.reports(unread=unread) == {}
    assert set(unread) == {"b"}
    assert "checksum mismatch" in unread["b"].why


# --- the file -----------------------------------------------------------------------------------------------


@pytest.fixture(name="written", scope="module")
def _written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file with some history and a snapshot, and what it adds up to."""
    path = tmp_path_factory.mktemp("whole") / "ledger.db"
    rng = random.Random(7)
    with pytest.MonkeyPatch.context() as patch, Ledger.open(str(path)) as ledger:
        patch.setattr(snapshots, "EVERY", 77)
        lead = ledger.lead("x")
        ledger_child.set_up(ledger, lead)
        for _ in range(60):
            lead.write(ledger_child.step(ledger.state(), rng, "steady"))
            ledger._journal.keep_snapshot()
        assert ledger.verify() == []
        state = ledger.state()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path, state


def _opened(path: Path) -> Any:
    """Return the state, or the error that stands for it."""
    try:
        with Ledger.open(str(path)) as ledger:
            return ledger.state()
    except LedgerError as error:
        return error


def _of_texts(path: Path, data: bytes) -> list[range]:
    """Return where in the file the texts are that the state is read from: the newest snapshot, and events since."""
    with sqlite3.connect(path) as connection:
        number, body = connection.execute(
            "SELECT number, body FROM ledger_snapshots ORDER BY number DESC"
        ).fetchone()
        since = connection.execute("SELECT body FROM ledger_events WHERE number > ?", [number]).fetchall()
    connection.close()
    assert since
    found = []
    for content in [body, *(one for (one,) in since)]:
        for start in range(0, len(content), 100):  # long ones are spread over pages
            piece = content[start : start + 100].encode()
            if (at := data.find(piece)) >= 0:
                found.append(range(at, at + len(piece)))
    return found


def test_no_flipped_byte_of_a_ledgers_file_gives_another_state(
    written: tuple[Path, Any], tmp_path: Path
) -> None:
    path, state = written
    data, rng, ends = path.read_bytes(), random.Random(19), Counter[str]()
    texts = _of_texts(path, data)
    for number in range(FLIPS):
        damaged = bytearray(data)
        at = rng.choice(rng.choice(texts)) if number % 2 else rng.randrange(len(data))
        damaged[at] ^= 1 << rng.randrange(8)
        place = tmp_path / str(number) / "ledger.db"
        place.parent.mkdir()
        place.write_bytes(damaged)
        found = _opened(place)
        ends[type(found).__name__] += 1
        assert isinstance(found, LedgerError) or found == state, f"byte {at}"
        shutil.rmtree(place.parent)
    assert ends["State"] > 0
    assert ends["LedgerError"] > 0, ends


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_a_file_that_was_cut_off_is_no_ledger_of_another_state(
    written: tuple[Path, Any], tmp_path: Path, part: float
) -> None:
    path, state = written
    data = path.read_bytes()
    place = tmp_path / "ledger.db"
    place.write_bytes(data[: int(len(data) * part)])
    found = _opened(place)
    if part == 0.0:  # as a new one: nobody can tell it from one that was just made
        assert found.number == 0
    else:
        assert isinstance(found, LedgerError) or found == state, found
    if 0.0 < part < 0.9:
        assert str(place) in str(found)


def test_a_log_that_was_cut_off_costs_what_had_not_been_said_to_be_written(tmp_path: Path) -> None:
    """As a power cut leaves it: the write-ahead log ends in the middle of a transaction."""
    path = tmp_path / "ledger.db"
    with Ledger.open(str(path)) as ledger:
        sizes = []
        for number in range(8):
            ledger.write([app(f"a{number}")])
            sizes.append((tmp_path / "ledger.db-wal").stat().st_size)
        for kept in range(1, 8):
            place = tmp_path / str(kept)
            place.mkdir()
            shutil.copy(path, place / "ledger.db")
            log = (tmp_path / "ledger.db-wal").read_bytes()
            (place / "ledger.db-wal").write_bytes(log[: sizes[kept] - 1])  # one byte short of the next
    for kept in range(1, 8):
        with Ledger.open(str(tmp_path / str(kept) / "ledger.db")) as ledger:
            assert ledger.state().number == kept
            assert ledger.verify() == []


@pytest.fixture(name="disk")
def _disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("a disk can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def test_a_ledger_whose_disk_may_only_be_read_says_so_and_is_written_to_again_after(disk: Path) -> None:
    def mounted(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True, timeout=30)

    with Ledger.open(str(disk / "ledger.db")) as ledger:
        ledger.write([app("a")])
        with open(disk / "ledger.db", "rb"):  # a disk that is being written to cannot be made read-only
            pass
    mounted("ro")
    with (
        pytest.raises(LedgerError, match=r"read.?only|cannot"),
        Ledger.open(str(disk / "ledger.db")) as ledger,
    ):
        ledger.write([app("b")])
    mounted("rw")
    with Ledger.open(str(disk / "ledger.db")) as ledger:
        assert set(ledger.state().apps) == {"a"}
        ledger.write([app("b")])
        assert ledger.verify() == []


def test_a_server_that_may_only_be_read_says_so_and_is_written_to_again_after(postgres: Any) -> None:
    with Ledger.open(postgres.url, cluster="read-only") as ledger:
        ledger.write([app("a")])
        postgres.sql("ALTER DATABASE ledger SET default_transaction_read_only = on")
        try:
            ledger._database._engine.dispose()  # a new connection has it
            with pytest.raises(LedgerUnavailableError, match=r"read.?only"):
                ledger.write([app("b")])
            assert set(ledger.state().apps) == {"a"}
        finally:
            postgres.sql("ALTER DATABASE ledger RESET default_transaction_read_only")
        ledger._database._engine.dispose()
        ledger.write([app("b")])
        assert ledger.verify() == []
