"""What is decided before and beside Spark's JVM: masters, settings, the meaning of failures, sums of metrics."""

import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ebbflow.infra.errors import (
    BroadcastTooLargeError,
    EngineUnavailableError,
    StageFailedError,
    StorageFullError,
    TableError,
)
from ebbflow.infra.machine.network import registry
from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark import relations
from ebbflow.infra.spark.failures import headline, is_own, parse, translate
from ebbflow.infra.spark.groupwatch import GroupWatch
from ebbflow.infra.spark.metrics import StatusApi, TaskFailure, group_metrics
from ebbflow.infra.spark.native.probe import DAEMON
from ebbflow.infra.spark.session import check_master
from ebbflow.infra.spark.settings import (
    addresses,
    broadcast_limit,
    executor_memory,
    has_nodes_here,
    settings,
    stays_on_this_machine,
)
from ebbflow.infra.storage.places import StorageLocation
from tests.free_ports import free_port

TOO_LARGE = BroadcastTooLargeError


def test_nobody_listening_at_the_masters_address_is_told_within_seconds_and_before_a_jvm_starts() -> None:
    from ebbflow.infra.spark.engine import SparkEngine

    port = free_port()
    began = time.monotonic()
    with pytest.raises(EngineUnavailableError, match=rf"spark://127\.0\.0\.1:{port} .*check the address"):
        SparkEngine.start(f"spark://127.0.0.1:{port}")
    assert time.monotonic() - began < 150


def test_one_reachable_master_of_several_is_enough() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        check_master(f"spark://127.0.0.1:1,127.0.0.1:{listener.getsockname()[1]}", timeout=2.0)


def test_a_master_url_that_spark_does_not_know_is_refused() -> None:
    from ebbflow.infra.spark.engine import SparkEngine

    with pytest.raises(EngineUnavailableError, match=r"'mesos://x:1'.*use local"):
        SparkEngine.start("mesos://x:1")


def test_masters_are_read_from_urls() -> None:
    assert addresses("spark://a:1,b:2") == [("a", 1), ("b", 2)]
    assert addresses("spark://[::1]:7077") == [("::1", 7077)]
    assert addresses("local[2]") == []


def test_only_loopback_masters_keep_the_driver_on_loopback() -> None:
    assert stays_on_this_machine("local[*]")
    assert stays_on_this_machine("spark://127.0.0.1:7077")
    assert not stays_on_this_machine("spark://127.0.0.1:7077,10.0.0.2:7077")
    assert "spark.driver.host" not in settings("spark://10.0.0.2:7077", app_name="a")
    assert settings("spark://localhost:7077", app_name="a")["spark.driver.host"] == "127.0.0.1"


def test_nodes_of_a_network_on_this_machine_have_its_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    (tmp_path / "0ab").write_text(json.dumps({"uid": "0ab", "owner": "x", "subnets": ["198.18.4.0/22"]}))
    assert has_nodes_here("local[*]")
    assert has_nodes_here("spark://198.18.4.1:7077")
    assert not has_nodes_here("spark://198.18.8.1:7077")
    assert not has_nodes_here("spark://198.18.4.1:7077,10.0.0.2:7077")
    assert not has_nodes_here("spark://master:7077")
    assert not stays_on_this_machine("spark://198.18.4.1:7077")
    (tmp_path / "0ac").write_text(json.dumps({"uid": "0ac", "owner": "x", "subnets": ["no network"]}))
    assert [entry.uid for entry in registry.entries()] == ["0ab"]


def test_memory_is_an_executors_except_in_local_mode_where_the_driver_is_the_executor() -> None:
    assert settings("local[2]", app_name="a", memory="3g")["spark.driver.memory"] == "3g"
    cluster = settings("spark://h:1", app_name="a", memory="3g")
    assert cluster["spark.executor.memory"] == "3g"
    assert cluster["spark.driver.memory"] != "3g"


@pytest.mark.parametrize("gib", [1.0, 2.0, 4.0, 16.0, 64.0])
def test_an_executors_heap_leaves_room_in_its_worker(gib: float) -> None:
    heap = int(executor_memory(gib).removesuffix("m"))
    assert 450 < heap <= gib * 1024 - 384


def test_user_settings_win_except_those_the_engine_relies_on() -> None:
    conf = {"spark.locality.wait": "9s", "spark.ui.enabled": "false", "spark.scheduler.mode": "FIFO"}
    chosen = settings("local", app_name="a", conf=conf)
    assert chosen["spark.locality.wait"] == "9s"
    assert chosen["spark.ui.enabled"] == "true"
    assert chosen["spark.scheduler.mode"] == "FAIR"


def test_python_workers_are_forked_with_their_imports_where_executors_are_known_to_have_this_environment() -> (
    None
):
    def daemon(master: str, **environment: str) -> str | None:
        return settings(master, app_name="a", environment=environment).get("spark.python.daemon.module")

    assert daemon("local[2]") == daemon("spark://127.0.0.1:7077", PYSPARK_PYTHON=sys.executable) == DAEMON
    assert daemon("local[2]", PYSPARK_PYTHON="python3") is daemon("spark://h:1") is None


def test_a_task_gives_a_silent_machine_up_sooner_than_spark_does_unless_the_user_is_more_patient() -> None:
    keys = [f"spark.shuffle.io.connection{what}Timeout" for what in ("Creation", "")]
    chosen = settings("spark://h:1", app_name="a")
    connected, answered = (int(chosen[key].removesuffix("s")) for key in keys)
    assert 3 <= connected < answered <= 30  # a second packet is sent after 1 s, a third after 3 s
    assert settings("spark://h:1", app_name="a", conf={keys[1]: "90s"})[keys[1]] == "90s"


def test_the_broadcast_limit_follows_an_executors_memory_unless_the_user_names_one() -> None:
    key = "spark.sql.autoBroadcastJoinThreshold"
    assert int(settings("local[2]", app_name="a", memory="8g")[key]) == 64 << 20
    assert int(settings("spark://h:1", app_name="a")[key]) == broadcast_limit("1g")  # Spark's own heap
    assert 10 << 20 < int(settings("spark://h:1", app_name="a", memory="1400m")[key]) < 64 << 20
    assert int(settings("spark://h:1", app_name="a", memory="500m")[key]) == 10 << 20
    assert settings("local[2]", app_name="a", conf={key: "-1"})[key] == "-1"
    assert key not in settings("spark://h:1", app_name="a", conf={"spark.executor.memory": "1e3"})


def test_s3_follows_the_aws_environment() -> None:
    chosen = settings(
        "local", app_name="a", environment={"AWS_ENDPOINT_URL": "http://h:9", "AWS_REGION": "eu-west-1"}
    )
    assert chosen["spark.hadoop.fs.s3a.endpoint"] == "http://h:9"
    assert chosen["spark.hadoop.fs.s3a.path.style.access"] == "true"
    assert chosen["spark.hadoop.fs.s3a.endpoint.region"] == "eu-west-1"


@pytest.mark.parametrize(
    ("text", "hinted", "kind"),
    [
        ("x.SparkException: Cannot broadcast the table over 1 rows: 2 rows.", False, TOO_LARGE),
        ("x.SparkException: Not enough memory to build and broadcast the table", False, TOO_LARGE),
        ("x.SparkException: Could not execute broadcast in 5 secs.", False, TOO_LARGE),
        ("x.SparkException: 2 GiB is bigger than spark.driver.maxResultSize 1g", False, TOO_LARGE),
        ("java.lang.OutOfMemoryError: Java heap space", True, TOO_LARGE),
        ("java.lang.OutOfMemoryError: Java heap space", False, StageFailedError),
        ("ExecutorLostFailure (executor 1 exited) Reason: Command exited with code 52", True, TOO_LARGE),
        ("java.io.IOException: No space left on device", True, StorageFullError),
        ("x.Y: Job 3 cancelled because SparkContext was shut down", False, EngineUnavailableError),
        ("x.SparkArithmeticException: [DIVIDE_BY_ZERO] Division by zero.", True, StageFailedError),
    ],
)
def test_failures_become_the_error_that_says_what_to_do(
    text: str, hinted: bool, kind: type[Exception]
) -> None:
    sql = "SELECT /*+ BROADCAST(a) */ 1" if hinted else "SELECT /*+ MERGE(a) */ 1"
    assert type(translate(parse(text), stage="s", sql=sql)) is kind


def test_a_look_for_tables_without_a_driver_says_so_and_not_that_the_table_is_at_fault() -> None:
    from py4j.protocol import Py4JError, Py4JNetworkError

    class Session:
        def __init__(self, error: Exception) -> None:
            self._error = error

        def table(self, name: str) -> None:
            raise self._error

    with pytest.raises(EngineUnavailableError, match="driver went away"):
        relations.tables(Session(Py4JNetworkError("Answer from Java side is empty")), ["t"])
    with pytest.raises(TableError, match="'t' cannot be read: no class"):
        relations.tables(Session(Py4JError("no class")), ["t"])


def test_the_headline_is_the_condition_nearest_to_the_cause() -> None:
    text = (
        "x.SparkException: Job aborted due to stage failure: Task 0 failed\n\tat a.B.c(B.java:1)\n"
        "Caused by: x.SparkArithmeticException: [DIVIDE_BY_ZERO] Division by zero.\n\tat d.E.f(E.java:2)"
    )
    assert headline(parse(text)) == "SparkArithmeticException: [DIVIDE_BY_ZERO] Division by zero."


@pytest.mark.parametrize(
    ("message", "own"),
    [
        ("ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: gone", False),
        ("FetchFailed(BlockManagerId(1, h, 1, None), shuffleId=0)", False),
        ("TaskKilled (Stage cancelled)", False),
        ("ExecutorLostFailure (executor 1 exited ...) Reason: Command exited with code 52", True),
        ("org.apache.spark.SparkArithmeticException: [DIVIDE_BY_ZERO]", True),
    ],
)
def test_a_lost_machine_is_not_a_tasks_own_failure(message: str, own: bool) -> None:
    assert is_own(message) is own


class _Api:
    """Answers as the status API does, active at first."""

    def __init__(self) -> None:
        self.asked = 0

    def attempts(self, stages: list[int]) -> list[dict[str, Any]]:
        self.asked += 1
        base = {
            "stageId": 1,
            "status": "COMPLETE",
            "numCompleteTasks": 4,
            "numFailedTasks": 0,
            "executorRunTime": 2000,
            "shuffleWriteBytes": 10,
            "diskBytesSpilled": 0,
            "inputBytes": 5,
        }
        return [
            base | {"attemptId": 0, "numFailedTasks": 2, "diskBytesSpilled": 7},
            base
            | {"attemptId": 1, "status": "ACTIVE" if self.asked < 3 else "COMPLETE", "numCompleteTasks": 1},
        ]

    def failures(self, attempts: list[tuple[int, int]]) -> list[Any]:
        assert attempts == [(1, 0)]
        return [
            TaskFailure(1, 0, 0, "ExecutorLostFailure (executor 1 ...)", 3.0),
            TaskFailure(1, 1, 0, "java.io.IOException: reported its own run time", 9.0),
        ]


def test_metrics_sum_all_attempts_and_count_the_time_of_tasks_whose_executor_vanished() -> None:
    from ebbflow.infra.clock import SystemClock

    api = _Api()
    metrics = group_metrics(api, [1], SystemClock())  # type: ignore[arg-type]
    assert api.asked == 3
    assert metrics.task_seconds == 2.0 + 2.0 + 3.0
    assert (metrics.tasks, metrics.failed_tasks, metrics.retried_stages) == (7, 2, 1)
    assert (metrics.shuffle_bytes, metrics.spilled_bytes, metrics.input_bytes) == (20, 7, 10)


def test_tasks_that_were_told_of_are_not_taken_back_by_a_look_that_does_not_see_them_yet() -> None:
    jobs: list[int] = []
    stage = SimpleNamespace(
        stageId=0,
        currentAttemptId=0,
        numTasks=3,
        numActiveTasks=2,
        numCompletedTasks=1,
        numFailedTasks=0,
    )
    tracker = SimpleNamespace(
        getJobIdsForGroup=lambda group: jobs,
        getJobInfo=lambda job: SimpleNamespace(stageIds=[0], status="RUNNING"),
        getStageInfo=lambda number: stage,
    )
    seen: list[tuple[int, int]] = []
    context = SimpleNamespace(statusTracker=lambda: tracker)
    watch = GroupWatch(
        context,
        cast(StatusApi, None),
        "a-job",
        lambda progress: seen.append((progress.tasks_total, progress.tasks_done)),
    )
    watch.look()
    watch.begun(2)
    watch.look()
    jobs.append(0)
    watch.look()
    watch.finish()
    assert seen == [(0, 0), (2, 0), (2, 0), (3, 1), (3, 3)]


def test_native_tasks_that_are_to_come_count_until_spark_sql_takes_over() -> None:
    """Three tasks write what about four join, which turn out to be two. Wasted work counts no more."""
    stages: dict[int, SimpleNamespace] = {}
    tracker = SimpleNamespace(
        getJobIdsForGroup=lambda group: list(stages),
        getJobInfo=lambda job: SimpleNamespace(stageIds=[job], status="RUNNING"),
        getStageInfo=stages.get,
    )

    def ran(number: int, tasks: int, done: int) -> None:
        stages[number] = SimpleNamespace(
            stageId=number,
            currentAttemptId=0,
            numTasks=tasks,
            numActiveTasks=tasks - done,
            numCompletedTasks=done,
            numFailedTasks=0,
        )
        watch.look()

    seen: list[tuple[int, int, bool]] = []
    watch = GroupWatch(
        SimpleNamespace(statusTracker=lambda: tracker),
        cast(StatusApi, None),
        "a-job",
        lambda progress: seen.append((progress.tasks_total, progress.tasks_done, progress.native)),
    )
    watch.begun(3, 4)
    ran(0, 3, 3)
    watch.begun(2)  # nothing is reported as not done any more
    watch.look()
    ran(1, 2, 1)
    assert seen == [(7, 0, True), (7, 3, True), (5, 3, True), (5, 4, True)]
    assert watch.stages() == {0, 1}
    watch.withdrawn()
    assert watch.stages() == set()
    ran(2, 6, 0)
    assert seen[-1] == (6, 0, False)
    watch.finish()
    assert (seen[-1], watch.stages()) == ((6, 6, False), {2})


def test_failures_of_native_tasks_that_were_in_vain_do_not_stop_spark_sql() -> None:
    stages: dict[int, SimpleNamespace] = {}
    tracker = SimpleNamespace(
        getJobIdsForGroup=lambda group: list(stages),
        getJobInfo=lambda job: SimpleNamespace(stageIds=[job], status="RUNNING"),
        getStageInfo=stages.get,
    )

    def failed(number: int, times: int) -> str | None:
        stages[number] = SimpleNamespace(
            stageId=number,
            currentAttemptId=0,
            numTasks=2,
            numActiveTasks=1,
            numCompletedTasks=0,
            numFailedTasks=times,
        )
        watch.look()
        return watch.verdict

    def failures(attempts: list[tuple[int, int]]) -> list[TaskFailure]:
        return [
            TaskFailure(stage, 0, attempt, f"java.io.IOException: of stage {stage}", 1.0)
            for stage, attempt in attempts
            for _ in range(stages[stage].numFailedTasks)
        ]

    seen: list[int] = []
    watch = GroupWatch(
        SimpleNamespace(statusTracker=lambda: tracker),
        cast(StatusApi, SimpleNamespace(failures=failures)),
        "a-job",
        lambda progress: seen.append(progress.tasks_failed),
    )
    assert failed(0, 3) is None
    assert failed(0, 4) == "java.io.IOException: of stage 0"
    watch.withdrawn()
    assert watch.verdict is None
    assert failed(1, 1) is None
    assert failed(1, 4) == "java.io.IOException: of stage 1"
    assert seen == [3, 4, 1, 4]


@pytest.mark.parametrize(
    ("lacking", "proven", "unread"),
    [(False, False, []), (False, True, ["plain"]), (True, False, ["plain", "parted"])],
    ids=["to run", "to prove", "out of reach"],
)
def test_files_are_not_looked_at_where_a_statement_is_only_proven(
    monkeypatch: pytest.MonkeyPatch, lacking: bool, proven: bool, unread: list[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(relations, "register", lambda session, relation: None)
    monkeypatch.setattr(relations, "register_columns", lambda session, relation: seen.append(relation.name))
    monkeypatch.setattr(relations, "storable", lambda frame: frame)
    plain = Relation("plain", "file", (), (("a", "int"),))
    parted = Relation("parted", "file", (), (("a", "int"),), partitions=("a",))
    job = StageJob("id", "it", "SELECT 1", (plain, parted), StorageLocation("file:///none"), native=True)
    session = SimpleNamespace(sql=lambda text: text)
    assert relations.frame_of(session, job, lacking=lacking, proven=proven) == "SELECT 1"
    assert seen == unread
