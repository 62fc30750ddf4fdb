"""What a launcher and its processes tell each other, over a real connection."""

import json
import threading
from collections.abc import Iterator

import pytest

from ebbflow.infra.errors import LauncherLostError
from ebbflow.infra.protocols.trainings import SETTINGS, launcher_settings
from ebbflow.infra.training.process.channel import Channel, Report, StopRequest
from ebbflow.infra.training.process.link import Link
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.exchanges import Speakers


@pytest.fixture
def speakers() -> Iterator[Speakers]:
    found = Speakers()
    yield found
    found.close()


def post(process: Channel, *said: Report) -> None:
    for report in said:
        process.post(report)


def test_reports_come_once_each_in_order(speakers: Speakers) -> None:
    launcher, process = speakers.open(1), speakers.process(1)
    said = [Report("step", 0, 10.0 + n, n, {"loss": 1.5 / (n + 1)}) for n in range(12)]
    post(process, *said[:5])
    assert launcher.reports() == said[:5]
    post(process, *said[5:])
    assert launcher.reports() == said[5:]
    assert launcher.reports() == []


def test_reports_of_several_processes_come_by_time(speakers: Speakers) -> None:
    launcher = speakers.open(1, 3)
    first, third = speakers.process(1), speakers.process(1)
    said = [Report("step", 0, 10.0, 1), Report("step", 2, 11.0, 1), Report("step", 0, 12.0, 2)]
    post(first, said[0], said[2])
    post(third, said[1])
    assert launcher.reports() == said


def test_a_request_to_stop_reaches_its_generation_only(speakers: Speakers) -> None:
    speakers.open(1)
    launcher = speakers.open(2)
    old, new = speakers.process(1), speakers.process(2)
    assert new.stop_request() is None
    launcher.request_stop(StopRequest("notice", deadline=123.0))
    assert new.stop_request() == StopRequest("notice", 123.0)
    assert old.stop_request() is None


def test_the_first_to_claim_has_it(speakers: Speakers) -> None:
    speakers.open(1, 2)
    speakers.open(2, 2)
    first, second, later = speakers.process(1), speakers.process(1), speakers.process(2)
    assert first.claim("spill")
    assert not second.claim("spill")
    assert not first.claim("spill")
    assert second.claim("another")
    assert later.claim("spill")


def test_a_generation_that_is_over_is_told_nothing_and_tells_nothing(speakers: Speakers) -> None:
    launcher, process = speakers.open(1), speakers.process(1)
    launcher.request_stop(StopRequest("notice"))
    launcher.close()
    process.post(Report("step", 0, 10.0, 1))
    assert process.stop_request() is None
    with pytest.raises(LauncherLostError, match="there is no generation 2"):
        speakers.process(2).stop_request()


def test_a_launcher_that_has_gone_is_noticed_at_once(speakers: Speakers) -> None:
    speakers.open(1)
    process = speakers.process(1)
    process.stop_request()
    speakers.close()
    with pytest.raises(RuntimeError, match="is gone: nothing listens there"):
        process.stop_request()


def test_without_a_launcher_there_is_no_channel() -> None:
    assert Channel.connect({}) is None


def test_settings_travel_through_the_environment() -> None:
    settings = RunSettings(termination_grace=5.0, keep_checkpoints=3, adaptive=False)
    assert launcher_settings({SETTINGS: settings.to_json()}) == settings
    assert json.loads(settings.to_json())["checkpoint_interval"] is None
    assert launcher_settings({}) == RunSettings()


def test_what_a_process_holds_is_remembered_by_later_settings() -> None:
    found = RunSettings(max_local=16, keep_checkpoints=9)
    assert RunSettings(keep_checkpoints=3).keeping(found) == RunSettings(keep_checkpoints=3, max_local=16)
    assert RunSettings(max_local=8).keeping(found).max_local == 8


def test_what_cannot_be_done_about_what_was_heard_does_not_make_the_launcher_lost() -> None:
    tried = threading.Semaphore(0)

    def fail(stop: StopRequest | None) -> None:
        tried.release()
        raise OSError("too many open files")

    link = Link(None, 0, 1.0, listen_every=0.001, heard=fail)
    link.open()
    assert tried.acquire(timeout=150)
    assert tried.acquire(timeout=150), "it goes on"
    link.close()
    assert (link.lost, link.stop) == (False, None)
