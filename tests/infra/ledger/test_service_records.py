"""Records that processes of a service share: changed in one transaction, of one cluster, checked as they are read."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import text

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger.records import RecordKey, Records
from tests.infra.ledger.conftest import Place

KEY = RecordKey("counter", "one")


def test_records_are_put_read_and_removed(place: Place) -> None:
    records = place.open().records
    assert records.read() == {}
    records.put(KEY, {"n": 1})
    records.put(KEY, {"n": 2})
    found = place.open().records.read()
    assert {key: one.body for key, one in found.items()} == {KEY: {"n": 2}}
    assert place.open(cluster=place.cluster + "-other").records.read() == {}
    before = records.write(lambda _: {KEY: None, RecordKey("other", "one"): {}})
    assert before.keys() == {KEY}
    assert records.read().keys() == {RecordKey("other", "one")}


def test_changes_of_several_writers_do_not_overlap(place: Place) -> None:
    def add(found: Records) -> Mapping[RecordKey, Mapping[str, Any]]:
        return {KEY: {"n": found[KEY].body["n"] + 1 if KEY in found else 1}}

    ledgers = [place.open() for _ in range(3)]

    def work(index: int) -> None:
        for _ in range(5):
            ledgers[index].records.write(add)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert ledgers[0].records.read()[KEY].body == {"n": 15}


def test_a_damaged_record_is_not_read(place: Place) -> None:
    ledger = place.open()
    ledger.records.put(KEY, {"n": 1})
    with ledger._database._engine.begin() as connection:
        connection.execute(text("UPDATE ledger_records SET body = replace(body, '{\"n\": 1', '{\"n\": 2')"))
    with pytest.raises(LedgerError):
        ledger.records.read()
