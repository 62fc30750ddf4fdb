"""The feed over HTTP: from EventBridge through the queue into a file, whatever fails in between."""

import contextlib
import itertools
import json
import logging
import random
import time
from dataclasses import replace

import pytest

from ebbflow.infra.aws.clients import Clients
from ebbflow.infra.aws.naming import NODE_LEAVING, RULES, Names
from ebbflow.infra.aws.node_agent import NodeDeparture, SystemdNode
from ebbflow.infra.aws.notices.dead_letters import DeadLetters
from ebbflow.infra.aws.notices.events import WARNING, Interruption, LaunchFailed
from ebbflow.infra.aws.notices.feed import NoticeFeed
from ebbflow.infra.aws.notices.store import NoticeFile, NoticeLog
from ebbflow.infra.errors import AwsUnavailableError, CredentialsError, NoticeError, StorageError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Notice
from tests.aws.emulator import ENVIRONMENT
from tests.aws.faults import Faults

_NUMBERS = itertools.count(1)
NODES = "arn:aws:ec2:us-east-1:123456789012:instance/"


@pytest.fixture(scope="module")
def cluster(aws_emulator):
    account = aws_emulator.account()
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        for name, value in account.environment.items():
            patch.setenv(name, value)
        yield account.cluster("lab")


@pytest.fixture
def lab(cluster):
    """Return the module's cluster with queues that nobody has used."""
    sqs, bus = cluster.account.client("sqs"), cluster.account.client("events")
    number = next(_NUMBERS)
    urls, arns = [], []
    for name in (f"dead-{number}", f"notices-{number}"):
        urls.append(sqs.create_queue(QueueName=name)["QueueUrl"])
        found = sqs.get_queue_attributes(QueueUrl=urls[-1], AttributeNames=["QueueArn"])
        arns.append(found["Attributes"]["QueueArn"])
    settings = replace(cluster.settings, dead_letter_queue_url=urls[0], notice_queue_url=urls[1])
    lab = replace(cluster, settings=settings)
    redrive = json.dumps({"deadLetterTargetArn": arns[0], "maxReceiveCount": 5})
    set_queue(lab, RedrivePolicy=redrive, VisibilityTimeout=30)
    for rule in RULES:
        bus.put_targets(Rule=lab.names.rule(rule), Targets=[{"Id": "notices", "Arn": arns[1]}])
    yield lab
    lab.account.faults(Faults())


@pytest.fixture
def file(tmp_path):
    return NoticeFile(tmp_path / "notices.json")


@pytest.fixture
def feed(lab, file):
    feed = make(lab, file)
    yield feed
    feed.close()


def make(lab, file, attempts=4, **options):
    clients = Clients(lab.settings.region, lab.account.emulator.url, attempts=attempts)
    options = {"wait": 1, "rng": random.Random(0)} | options
    return NoticeFeed(clients, lab.settings.notice_queue_url, file, **options)


def send(lab, body):
    lab.account.client("sqs").send_message(QueueUrl=lab.settings.notice_queue_url, MessageBody=body)


def put(lab, kind, detail, source="aws.ec2"):
    entry = {"Source": source, "DetailType": kind, "Detail": json.dumps(detail)}
    answer = lab.account.client("events").put_events(Entries=[entry])
    assert answer["FailedEntryCount"] == 0


def set_queue(lab, **attributes):
    lab.account.client("sqs").set_queue_attributes(
        QueueUrl=lab.settings.notice_queue_url, Attributes={k: str(v) for k, v in attributes.items()}
    )


def left(lab, url=None):
    """Return how many messages a queue holds, hidden ones too."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = lab.account.client("sqs").get_queue_attributes(
        QueueUrl=url or lab.settings.notice_queue_url, AttributeNames=names
    )
    return sum(int(found["Attributes"][name]) for name in names)


def until(true, seconds=150.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def test_a_warning_is_kept_on_disk_and_then_deleted(lab, feed, file):
    heard = []
    feed.listen(heard.extend)
    before = time.time()
    lab.account.interrupt(["i-1"], end=False)
    assert feed.poll() == 1
    (notice,) = feed.notices()
    assert (notice.node_id, notice.kind) == ("i-1", "interruption")
    assert before + WARNING - 1 <= notice.deadline <= time.time() + WARNING
    assert [type(event) for event in heard] == [Interruption]
    assert file.read() == feed.notice_log()
    assert left(lab) == 0


def test_all_rules_bring_what_they_are_for(lab, feed):
    group = lab.names.group("etl")
    put(lab, "EC2 Instance Rebalance Recommendation", {"instance-id": "i-1"})
    put(lab, "EC2 Instance State-change Notification", {"instance-id": "i-2", "state": "terminated"})
    put(
        lab,
        "EC2 Instance-terminate Lifecycle Action",
        {"EC2InstanceId": "i-3", "AutoScalingGroupName": group},
        "aws.autoscaling",
    )
    failed = {"AutoScalingGroupName": group, "StatusMessage": "UnfulfillableCapacity - none"}
    put(lab, "EC2 Instance Launch Unsuccessful", failed, "aws.autoscaling")
    planned = {
        "service": "EC2",
        "eventTypeCategory": "scheduledChange",
        "eventTypeCode": "AWS_EC2_INSTANCE_STOP_SCHEDULED",
        "affectedEntities": [{"entityValue": "i-4"}],
    }
    put(lab, "AWS Health Event", planned, "aws.health")
    leaving = {"instance-id": "i-5", "deadline": time.time() + 100, "reason": "spot interruption"}
    put(lab, NODE_LEAVING, leaving, lab.names.event_source(f"{NODES}i-5"))
    put(lab, NODE_LEAVING, leaving | {"instance-id": "i-6"}, Names("other").event_source(f"{NODES}i-6"))
    failures = []
    feed.listen(lambda events: failures.extend(e for e in events if isinstance(e, LaunchFailed)))
    until(lambda: feed.poll() == 0 and feed.status().received)
    assert {n.node_id: n.kind for n in feed.notices()} == {
        "i-1": "rebalance",
        "i-3": "interruption",
        "i-4": "rebalance",
        "i-5": "interruption",
    }
    assert feed.ended() == {"i-2"}
    assert [(f.group, f.reason) for f in failures] == [(group, "UnfulfillableCapacity - none")]
    assert feed.notice_log().failures[group].reason == "UnfulfillableCapacity - none"
    assert left(lab) == 0
    assert feed.status().unreadable == 0


def test_what_a_node_finds_in_its_metadata_service_reaches_the_feed(lab, feed, tmp_path, monkeypatch):
    for name, value in lab.account.environment.items():  # the node's own credentials say whose it is
        monkeypatch.setenv(name, value)
    node = SystemdNode(
        region=lab.settings.region,
        arn="arn:aws:ec2:us-east-1:123456789012:instance/i-1",
        draining=tmp_path / "draining",
        cluster="lab",
        endpoint_url=lab.account.emulator.url,
    )
    deadline = time.time() + 200
    attempts = (node.report(NodeDeparture(deadline, "spot interruption")) for _ in range(20))
    assert any(attempts)  # the agent, too, tries again where the bus took too long
    while not feed.notices() and time.time() < deadline:
        feed.poll()
    assert feed.notices() == (Notice("i-1", deadline),)


def test_a_restart_loses_nothing_and_begins_with_what_was_known(lab, feed, file):
    lab.account.interrupt(["i-1"], end=False)
    feed.poll()
    known = feed.notices()
    feed.close()
    again = make(lab, file)
    assert again.notices() == ()
    again.open()
    assert again.notices() == known
    again.close()


def test_a_notice_that_cannot_be_kept_counts_and_is_not_deleted_until_it_can(lab, feed, file, monkeypatch):
    set_queue(lab, VisibilityTimeout=1)
    feed.open()

    def full(_book):
        raise StorageError("no space left")

    lab.account.interrupt(["i-1"], end=False)
    with monkeypatch.context() as patch:
        patch.setattr(file, "write", full)
        with pytest.raises(StorageError, match="no space left"):
            feed.poll()
        assert [n.node_id for n in feed.notices()] == ["i-1"]
        for _ in range(8):  # more often than the queue lets a message be received
            with pytest.raises(StorageError):
                feed.poll()
        assert left(lab) == 1
    time.sleep(1.1)
    feed.poll(0)
    until(lambda: feed.poll() == 0)
    assert left(lab) == left(lab, lab.settings.dead_letter_queue_url) == 0
    assert [n.node_id for n in file.read().notices()] == ["i-1"]


def test_a_process_that_ends_between_keeping_and_deleting_hears_it_twice_and_knows_it_once(
    lab, feed, file, monkeypatch
):
    set_queue(lab, VisibilityTimeout=1)
    lab.account.interrupt(["i-1"], end=False)
    monkeypatch.setattr(feed._sqs, "delete_message_batch", lambda **_: pytest.fail("killed here"))
    with pytest.raises(pytest.fail.Exception):
        feed.poll()
    feed.close()
    again = make(lab, file, wait=3)
    written = file.path.stat().st_mtime_ns
    assert again.poll() == 1
    assert len(again.notices()) == 1
    assert left(lab) == 0
    assert file.path.stat().st_mtime_ns == written  # nothing new, nothing written
    again.close()


def test_what_cannot_be_read_goes_to_the_dead_letters_by_the_queues_own_rule(lab, feed, caplog):
    redrive = {
        "deadLetterTargetArn": lab.account.client("sqs").get_queue_attributes(
            QueueUrl=lab.settings.dead_letter_queue_url, AttributeNames=["QueueArn"]
        )["Attributes"]["QueueArn"],
        "maxReceiveCount": 2,
    }
    set_queue(lab, VisibilityTimeout=0, RedrivePolicy=json.dumps(redrive))
    send(lab, "not JSON")
    lab.account.interrupt(["i-1"], end=False)
    with caplog.at_level(logging.WARNING):
        until(lambda: feed.poll() == 0 and left(lab) == 0)
    assert [n.node_id for n in feed.notices()] == ["i-1"]
    assert feed.status().unreadable == 2
    assert sum("left to the dead letters" in r.getMessage() for r in caplog.records) == 1
    assert left(lab, lab.settings.dead_letter_queue_url) == 1


def dead_letters(lab):
    return DeadLetters(
        Clients(lab.settings.region, lab.account.emulator.url), lab.settings.dead_letter_queue_url
    )


def test_dead_letters_are_counted_shown_and_tried_again(lab, feed):
    sqs, url = lab.account.client("sqs"), lab.settings.dead_letter_queue_url
    event = {
        "id": "1",
        "source": "aws.ec2",
        "detail-type": "EC2 Spot Instance Interruption Warning",
        "time": time.time(),
        "detail": {"instance-id": "i-1", "instance-action": "terminate"},
    }
    code = {"ERROR_CODE": {"DataType": "String", "StringValue": "KMS_ACCESS_DENIED"}}
    sqs.send_message(QueueUrl=url, MessageBody=json.dumps(event), MessageAttributes=code)
    for number in range(12):
        sqs.send_message(QueueUrl=url, MessageBody=f"nonsense {number}")
    letters = dead_letters(lab)
    assert letters.count() == 13
    shown = letters.show()
    assert len(shown) == 13
    assert [letter.problem == "" for letter in shown] == [True] + [False] * 12
    assert (shown[0].undelivered, shown[1].undelivered) == ("KMS_ACCESS_DENIED", "")
    assert "must be JSON" in shown[1].problem
    assert abs(shown[0].sent - time.time()) < 150
    assert len(letters.show(limit=3)) == 3
    assert letters.redrive(feed.take) == (1, 12)
    assert [n.node_id for n in feed.notices()] == ["i-1"]
    assert letters.count() == 12
    assert letters.redrive(feed.take) == (0, 12)


def test_dead_letters_stay_where_they_are_when_they_cannot_be_kept(lab, feed):
    send_to = lab.settings.dead_letter_queue_url
    body = {"source": "aws.ec2", "detail-type": "EC2 Instance Rebalance Recommendation", "time": 1.0}
    lab.account.client("sqs").send_message(
        QueueUrl=send_to, MessageBody=json.dumps(body | {"detail": {"instance-id": "i-1"}})
    )

    def full(_events):
        raise StorageError("no space left")

    with pytest.raises(StorageError):
        dead_letters(lab).redrive(full)
    assert left(lab, send_to) == 1


def test_one_feed_reads_a_queue(lab, feed, file):
    feed.open()
    feed.open()
    with pytest.raises(NoticeError, match="another process reads the notices"):
        make(lab, NoticeFile(file.path)).open()


def test_a_queue_that_does_not_exist_says_what_to_do(lab, file):
    lab.account.client("sqs").delete_queue(QueueUrl=lab.settings.notice_queue_url)
    with pytest.raises(NoticeError, match=r"there is no queue http.*; run terraform apply"):
        make(lab, file).start()
    with file.held():  # nothing is held by a feed that could not be opened
        pass


def test_a_queue_that_may_not_be_read_says_what_to_do(lab, file):
    from botocore.stub import Stubber

    feed = make(lab, file)
    with Stubber(feed._sqs) as stub:
        stub.add_client_error(
            "get_queue_attributes", "AccessDenied", "not authorized to perform: sqs:Get", 403
        )
        with pytest.raises(CredentialsError, match="role that Terraform's module iam makes"):
            feed.open()
    feed.close()


def test_an_outage_is_said_and_survived(lab, file, caplog):
    lab.account.faults(Faults(failed=1.0))
    feed = make(lab, file, attempts=1)
    heard = []
    with caplog.at_level(logging.WARNING), feed:
        feed.listen(heard.extend)
        until(lambda: feed.status().failing_since is not None)
        assert "InternalError" in feed.status().error
        lab.account.interrupt(["i-1"], end=False)
        time.sleep(1.5)
        assert not heard
        lab.account.faults(Faults())
        until(lambda: heard)
        until(lambda: left(lab) == 0)
        assert feed.status().failing_since is None
        assert feed.status().error == ""
    said = [r.getMessage() for r in caplog.records if r.name.startswith("ebbflow")]
    assert sum("notices cannot be read" in text for text in said) == 1
    assert sum("is available again" in text for text in said) == 1


def test_delays_grow_to_a_bound(lab, file, clock, monkeypatch):
    feed = make(lab, file, clock=clock)
    feed.open()
    delays = []

    def fails():
        delays.append(clock.now())
        feed._stop.set() if len(delays) == 12 else None
        raise AwsUnavailableError("away")

    monkeypatch.setattr(feed, "poll", fails)
    feed._run()
    gaps = [b - a for a, b in itertools.pairwise(delays)]
    assert 0.25 <= gaps[0] <= 0.5
    assert all(7.5 <= gap <= 15 for gap in gaps[-4:])
    assert len({round(gap, 6) for gap in gaps}) == len(gaps)


def test_everything_that_was_sent_is_known_in_the_end_however_it_comes(lab, feed, file):
    set_queue(lab, VisibilityTimeout=1)  # before the faults: they would hit this call, too
    lab.account.faults(Faults(twice=0.5, again=0.3, shuffled=True, late=0.3, failed=0.1, dropped_after=0.1))
    ids = [f"i-{n:02}" for n in range(40)]
    lab.account.interrupt(ids, end=False)
    lab.account.rebalance(ids[:10])

    def drained():
        with contextlib.suppress(AwsUnavailableError):
            feed.poll()
        return [n.kind for n in feed.notices()] == ["interruption"] * 40

    until(drained)
    assert [n.node_id for n in file.read().notices()] == ids
    lab.account.faults(Faults())


def test_a_listener_that_fails_keeps_nobody_from_hearing(lab, feed):
    heard = []
    feed.listen(lambda _: 1 / 0)
    feed.listen(heard.extend)
    lab.account.interrupt(["i-1"], end=False)
    feed.poll()
    assert heard
    assert left(lab) == 0


def test_a_feed_that_was_closed_may_be_closed_again_and_frees_its_file(lab, file):
    feed = make(lab, file)
    feed.start()
    feed.start()
    feed.close()
    feed.close()
    with file.held():
        pass


def test_a_wait_beyond_what_sqs_takes_is_refused(lab, file):
    with pytest.raises(OptionError, match="wait must be 0 to 20 s"):
        make(lab, file, wait=21)


def test_a_book_is_empty_before_it_is_opened(lab, file):
    assert make(lab, file).notice_log() == NoticeLog()
