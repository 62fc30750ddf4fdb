"""How long records of a service are silent, whatever clocks say and however long the ledger is out of reach."""

from collections.abc import Callable

from ebbflow.infra.aggregation.registry import AGGREGATOR, TIMEOUT, SilenceClock
from ebbflow.infra.ledger.records import RecordKey, ServiceRecord

A, B = RecordKey(AGGREGATOR, "a"), RecordKey(AGGREGATOR, "b")
Write = Callable[[float], float]  # when a record that is read at this time was written


class Reader:
    """Looks twice a second at two aggregators; ``a`` writes once a second by a clock that is an hour late."""

    def __init__(self) -> None:
        self.clock, self.now = SilenceClock(), 0.0
        self.found: dict[RecordKey, float] = {}

    def look(self, seconds: float, a: Write, b: Write) -> list[float]:
        """Look for so long; return the silences of ``b``."""
        end, silences = self.now + seconds, []
        while self.now < end:
            records = {A: ServiceRecord(a(self.now), {}), B: ServiceRecord(b(self.now), {})}
            self.found = self.clock.look(records, self.now)
            silences.append(self.found[B])
            self.now += 0.5
        return silences

    def miss(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.clock.miss(self.now)
            self.now += 0.5


def late(now: float) -> float:
    return now // 1 - 3600


def fast(now: float) -> float:
    return now // 1 + 3600


def test_a_record_is_silent_since_its_date_has_not_changed_whatever_its_clock_says() -> None:
    reader = Reader()
    reader.look(1.0, late, fast)
    assert reader.found[A] > TIMEOUT  # a date is all that is known
    assert max(reader.look(10.0, late, fast)) < 1.5
    assert reader.found[A] < 1.5
    silences = reader.look(10.0, late, lambda _: 3600.0)
    assert silences[-1] > TIMEOUT
    assert reader.found[A] < 1.5


def test_nobody_is_silent_for_what_the_ledger_was_away() -> None:
    reader = Reader()
    reader.look(10.0, late, fast)
    reader.miss(60.0)
    back = reader.now
    stuck = reader.look(14.0, late, lambda _: fast(10.0))  # b needs a while to reach it again
    assert max(stuck) < TIMEOUT
    assert max(reader.look(5.0, late, fast)) < TIMEOUT
    assert reader.look(30.0, late, lambda _: fast(back))[-1] > TIMEOUT  # and then b is lost


def test_nobody_is_silent_while_nobody_can_write() -> None:
    reader = Reader()
    reader.look(10.0, late, fast)
    assert max(reader.look(60.0, lambda _: late(10.0), lambda _: fast(10.0))) < TIMEOUT
    assert max(reader.look(10.0, late, lambda _: fast(10.0))) < TIMEOUT


def test_nobody_is_silent_while_the_reader_stands_still() -> None:
    reader = Reader()
    reader.look(10.0, late, fast)
    reader.now += 100.0
    assert max(reader.look(0.5, late, lambda _: fast(9.5))) < TIMEOUT


def test_who_was_lost_before_stays_lost() -> None:
    reader = Reader()
    reader.look(10.0, late, fast)
    assert reader.look(10.0, late, lambda _: fast(10.0))[-1] > TIMEOUT
    reader.miss(60.0)
    assert min(reader.look(30.0, late, lambda _: fast(10.0))) > TIMEOUT
