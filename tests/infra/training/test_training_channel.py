"""What a launcher and its processes tell each other, over a real store."""

import json
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ebbflow.infra.training import channel
from ebbflow.infra.training.channel import Channel, Report, RunSettings, StopRequest


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def worker(store: TCPStore, generation: int) -> Channel:
    found = Channel.connect(
        {
            channel.CHANNEL: f"127.0.0.1:{store.port}",
            channel.RUN_ID: "a",
            channel.GENERATION: str(generation),
        }
    )
    assert found is not None
    return found


def post(process: Channel, *said: Report) -> None:
    for report in said:
        process.post(report)
    process.stop_request()  # a set is not answered, this is: what was said has arrived


def test_reports_come_once_each_in_order(store: TCPStore) -> None:
    launcher, process = Channel(store, "a", 1), worker(store, 1)
    said = [Report("step", 0, 10.0 + n, n, {"loss": 1.5 / (n + 1)}) for n in range(12)]
    post(process, *said[:5])
    assert launcher.reports() == said[:5]
    post(process, *said[5:])
    assert launcher.reports() == said[5:]
    assert launcher.reports() == []


def test_what_one_process_never_said_hides_nothing_of_the_others(store: TCPStore) -> None:
    launcher = Channel(store, "a", 1, world=3)
    first, third = worker(store, 1), worker(store, 1)
    third._posted += 1  # it died before its words arrived
    said = [Report("step", 0, 10.0, 1), Report("step", 0, 12.0, 2)]
    post(first, said[0])
    post(third, Report("step", 2, 11.0, 1))
    post(first, said[1])
    assert launcher.reports() == said


def test_a_request_to_stop_reaches_its_generation_only(store: TCPStore) -> None:
    old, new = worker(store, 1), worker(store, 2)
    assert new.stop_request() is None
    Channel(store, "a", 2).request_stop(StopRequest("notice", deadline=123.0))
    assert new.stop_request() == StopRequest("notice", 123.0)
    assert old.stop_request() is None


def test_without_a_launcher_there_is_no_channel() -> None:
    assert Channel.connect({}) is None


def test_settings_travel_through_the_environment() -> None:
    settings = RunSettings(grace=5.0, keep=3, adaptive=False)
    assert RunSettings.from_environment({channel.SETTINGS: settings.to_json()}) == settings
    assert json.loads(settings.to_json())["checkpoint_every"] is None
    assert RunSettings.from_environment({}) == RunSettings()


def test_what_a_process_holds_is_remembered_by_later_settings() -> None:
    found = RunSettings(max_local=16, keep=9)
    assert RunSettings(keep=3).keeping(found) == RunSettings(keep=3, max_local=16)
    assert RunSettings(max_local=8).keeping(found).max_local == 8
