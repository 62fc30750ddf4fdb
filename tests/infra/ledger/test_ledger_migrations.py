"""The tables are made by migrations, once, whoever opens first."""

import importlib
import multiprocessing
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import Ledger, migrate, migrate_ledger
from ebbflow.infra.ledger.address import parse
from ebbflow.infra.ledger.database.database import Database
from ebbflow.infra.ledger.database.schema import metadata
from ebbflow.infra.ledger.rows import codec, seals
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import CapacityChanged, Ended, Granted, Lease, Recalled, Saved
from tests.infra.ledger.ledger_values import app

KINDS = pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
Fresh = Callable[[str], str]


@KINDS
def test_migrations_make_the_tables_that_the_code_knows(kind: str, fresh_database: Fresh) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    ledger = Ledger.open(fresh_database(kind))
    with ledger._database._engine.connect() as connection:
        options = {"version_table": migrate.VERSION_TABLE, "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []
    ledger.close()


def test_every_step_is_known_in_order() -> None:
    folder = Path(migrate.__file__).parent / "migrations" / "versions"
    assert tuple(sorted(p.name[:4] for p in folder.glob("0*.py"))) == migrate.STEPS
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(folder.parent))
    walked = [step.revision for step in ScriptDirectory.from_config(config).walk_revisions()]
    assert tuple(reversed(walked)) == migrate.STEPS


@KINDS
def test_a_ledger_of_a_newer_ebbflow_is_refused(kind: str, fresh_database: Fresh) -> None:
    url = fresh_database(kind)
    ledger = Ledger.open(url)
    ledger.write([app("a")])
    with ledger._database._engine.begin() as connection:
        connection.execute(text("UPDATE ledger_version SET version_num = '0999'"))
    ledger.close()
    for attempt in (lambda: Ledger.open(url), lambda: migrate_ledger(url)):
        with pytest.raises(LedgerError, match="schema version 0999, of a newer Ebbflow"):
            attempt()


@KINDS
def test_a_step_that_fails_leaves_nothing(
    kind: str, fresh_database: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alembic import command

    url = fresh_database(kind)
    real = command.upgrade

    def breaks(*args: object, **kwargs: object) -> None:
        real(*args, **kwargs)  # type: ignore[arg-type]
        raise LedgerError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(command, "upgrade", breaks)
        with pytest.raises(LedgerError, match="power"):
            Ledger.open(url)
    database = Database(parse(url), SystemClock())
    assert database.read("look", migrate.version) == ""
    database.close()
    with pytest.raises(LedgerError, match="there is no ledger"):
        migrate_ledger(url)
    Ledger.open(url).close()
    assert migrate_ledger(url) == (migrate.STEPS[-1], migrate.STEPS[-1])


@KINDS
def test_many_threads_open_a_new_ledger_at_once(kind: str, fresh_database: Fresh) -> None:
    url, failed = fresh_database(kind), []

    def work(name: str) -> None:
        try:
            with Ledger.open(url) as ledger:
                ledger.write([app(name)])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert not failed
    with Ledger.open(url) as ledger:
        assert set(ledger.state().apps) == {f"t{n}" for n in range(5)}
        assert ledger.verify() == []


def _open_and_write(url: str, name: str) -> None:
    with Ledger.open(url) as ledger:
        ledger.write([app(name)])


@pytest.mark.processes
@KINDS
def test_several_processes_open_a_new_ledger_at_once(kind: str, fresh_database: Fresh) -> None:
    url = fresh_database(kind)
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=_open_and_write, args=(url, f"p{n}")) for n in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    with Ledger.open(url) as ledger:
        assert set(ledger.state().apps) == {"p0", "p1"}
        assert ledger.verify() == []


FORMER_KINDS = {name: former for former, name in codec.FORMER.items()}


def as_of_0001(url: str) -> None:
    """Bring a ledger back to schema version 0001, with the names of changes that it had."""
    database = Database(parse(url), SystemClock())
    steps = importlib.import_module("ebbflow.infra.ledger.migrations.versions.0002_words")
    with database._engine.begin() as connection:
        rows = connection.execute(text("SELECT cluster, number, at, kind, body FROM ledger_events")).all()
        for row in rows:
            former = FORMER_KINDS.get(row.kind, row.kind)
            body = seals.seal(
                seals.unseal(row.body, row.number, float(row.at), row.kind), row.number, float(row.at), former
            )
            connection.execute(
                text(
                    "UPDATE ledger_events SET kind = :kind, body = :body WHERE cluster = :c AND number = :n"
                ),
                {"kind": former, "body": body, "c": row.cluster, "n": row.number},
            )
        connection.execute(text("DROP TABLE ledger_records"))  # of version 0003
        for table, old, new in steps._RENAMED:
            connection.execute(text(f"ALTER TABLE {table} RENAME COLUMN {new} TO {old}"))
        connection.execute(text("UPDATE ledger_version SET version_num = '0001'"))
    database.close()


@KINDS
def test_a_ledger_of_the_first_version_is_migrated_and_read(kind: str, fresh_database: Fresh) -> None:
    url = fresh_database(kind)
    with Ledger.open(url) as ledger:
        lead = ledger.lead("loop", 60.0)
        lead.write([CapacityChanged(1, (Node("n", 4, 16.0, gpus=2, price=1.0),)), app("a")])
        lead.write([Granted((Lease(1, "a", "n", 0, 1.0, 99.0, 1), Lease(2, "a", "n", 1, 1.0, 99.0, 1)))])
        lead.write([Recalled((1,), 50.0, "preempted"), Ended((2,), "released"), Saved("a", "s3://b/1", 1)])
        changes = [event.change for event in ledger.events()]
        state = ledger.state()
    as_of_0001(url)
    assert migrate_ledger(url) == ("0001", migrate.STEPS[-1])
    with Ledger.open(url) as ledger:
        assert [event.change for event in ledger.events()] == changes
        assert ledger.verify() == []
        assert ledger.state().leases == state.leases
        assert ledger.state().leases[1].recalled == 50.0
        revoked = ledger.events(kinds=["lease-revoked"])
        assert [event.change for event in revoked] == [Recalled((1,), 50.0, "preempted")]
        ledger.lead("loop", 60.0).write([Ended((1,), "released")])
        assert len(ledger.events(kinds=[Ended])) == 2  # under the former name and under today's
        assert ledger.verify() == []


def test_a_changed_byte_of_an_old_event_is_still_found(fresh_database: Fresh) -> None:
    url = fresh_database("sqlite")
    with Ledger.open(url) as ledger:
        ledger.write([app("a")])
    as_of_0001(url)
    with closing(sqlite3.connect(parse(url).path)) as connection, connection:
        connection.execute("""UPDATE ledger_events SET body = replace(body, '"a"', '"b"')""")
    migrate_ledger(url)
    with Ledger.open(url) as ledger, pytest.raises(LedgerError, match="checksum"):
        ledger.events()
