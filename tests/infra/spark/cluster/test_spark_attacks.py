"""A peer without the secret, on every socket of Spark's: nothing is executed, and the application goes on."""

import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil
import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.machine import processes
from ebbflow.infra.spark.cluster import daemons
from ebbflow.infra.spark.cluster.authentication import authenticated, properties_text
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.spark.cluster.state import StateFile
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.spark.java import find_java, spark_home
from ebbflow.infra.spark.master_api import get_master, new_client
from tests.free_ports import free_port
from tests.infra.spark_peer import ENDPOINTS, obeyed, rpc, sasl, say, say_all

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

S3_SECRET = "s3-key-that-nobody-may-see é=\\ !"
CONF = {
    "spark.hadoop.fs.s3a.secret.key": S3_SECRET,
    "spark.sql.shuffle.partitions": "2",
    "spark.cores.max": "2",
}
LONG = 240.0  # s: a bound for a busy machine


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSparkCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EBBFLOW_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("EBBFLOW_SHARE", "group")  # lets the group into stores, never into a secret
        with LocalSparkCluster.start("attacked", workers=1, cores=3, memory="2000m", cpu_limit=False) as made:
            yield made


@pytest.fixture(scope="module")
def engine(cluster: LocalSparkCluster) -> Iterator[SparkEngine]:
    made = SparkEngine.start(cluster.master_url, memory="600m", cores=1, conf=CONF)
    clock = SystemClock()
    end = clock.now() + LONG
    while len(executors(made)) < 3:  # two, and the driver
        assert clock.now() < end, executors(made)
        clock.sleep(0.2)
    yield made
    made.close()


@pytest.fixture
def lives(cluster: LocalSparkCluster, engine: SparkEngine) -> Iterator[None]:
    """Look, after a test, whether worker and application are as they were."""
    before = executors(engine)
    yield
    assert compute(engine) == 1000
    assert executors(engine) == before
    assert [n.state for n in cluster.status().nodes] == ["alive"]
    with new_client(10.0) as client:
        seen = get_master(client, cluster.master_ui)
    assert [a.id for a in seen.applications] == [engine.application_id]
    assert [w.state for w in seen.workers] == ["ALIVE"]


def compute(engine: SparkEngine) -> int:
    """Run a query with a shuffle on the executors."""
    query = "SELECT count(*) FROM (SELECT id % 1000 k FROM range(0, 100000, 1, 4) GROUP BY 1)"
    return int(engine._session.sql(query).collect()[0][0])


def executors(engine: SparkEngine) -> list[str]:
    url = f"{engine.ui_url}/api/v1/applications/{engine.application_id}/executors"
    return sorted(e["id"] for e in httpx.get(url, timeout=60.0, trust_env=False).json())


def members(cluster: LocalSparkCluster, engine: SparkEngine) -> list[psutil.Process]:
    assert engine._process is not None
    pids = [engine._process.gateway.proc.pid, *processes.members(cluster.state.mark)]
    return [psutil.Process(pid) for pid in pids]


def ports(process: psutil.Process) -> list[tuple[str, int]]:
    """Return where a process listens."""
    return [
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


# --- Spark's own protocol ---------------------------------------------------------------------------------


def test_no_process_of_spark_takes_a_message_without_the_secret(
    cluster: LocalSparkCluster, engine: SparkEngine, lives: None
) -> None:
    assert compute(engine) == 1000  # executors are there
    refused: dict[str, set[int]] = {}
    for process in members(cluster, engine):
        found = re.search(r"Master|Worker|CoarseGrained|SparkSubmit", " ".join(process.cmdline()))
        kind = found.group() if found else ""
        said = [
            (host, port, message)
            for host, port in ports(process)
            for message in [
                *(rpc(host, port, e) for e in ENDPOINTS),
                sasl(),
                rpc(host, port, "Master", one_way=True),
            ]
        ]
        for (_, port, _), answer in zip(said, say_all(said), strict=True):
            assert not obeyed(answer), (kind, answer[:300])
            if b"AuthRpcHandler" in answer:
                refused.setdefault(kind, set()).add(port)
    # RPC of master and worker; blocks of two executors; RPC and blocks of the driver
    assert {kind: len(found) for kind, found in refused.items() if kind != "CoarseGrained"} == {
        "Master": 1, "Worker": 1, "SparkSubmit": 2
    }  # fmt: skip
    assert len(refused["CoarseGrained"]) == 2


def test_a_spark_without_a_secret_would_have_taken_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pyspark import SparkConf, SparkContext\n"
        "conf = SparkConf().set('spark.ui.enabled', 'false').set('spark.driver.host', '127.0.0.1')\n"
        "context = SparkContext('local[1]', 'open', conf=conf); print('up', flush=True); sys.stdin.read()\n"
    )
    environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "JAVA_HOME": str(find_java().home)}
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        (java,) = (p for p in psutil.Process(driver.pid).children(recursive=True) if p.name() == "java")
        answers = [say(h, p, rpc(h, p, "endpoint-verifier")) for h, p in ports(java)]
        assert any(obeyed(answer) and b"hello" in answer for answer in answers)
    finally:
        children = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        driver.wait(30)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()


def test_a_local_application_takes_no_message_without_its_secret(cluster: LocalSparkCluster) -> None:
    code = (
        "import sys; from ebbflow.infra.spark.engine import SparkEngine\n"
        "engine = SparkEngine.start('local[1]', memory='600m')\n"
        "print(engine._process.gateway.proc.pid, flush=True); sys.stdin.read(); engine.close()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        process = psutil.Process(int(owner.stdout.readline()))
        answers = say_all([(h, p, rpc(h, p, e)) for h, p in ports(process) for e in ENDPOINTS])
        assert not any(map(obeyed, answers))
        assert sum(b"AuthRpcHandler" in answer for answer in answers) == 2 * len(ENDPOINTS)
        owner.communicate(timeout=150)


# --- a whole application ----------------------------------------------------------------------------------


def submit(
    cluster: LocalSparkCluster, folder: Path, settings: Mapping[str, str], file: Path | None, user: int
):
    """Start Spark's own SQL shell, a real application, as ``user``."""
    folder.mkdir()
    os.chown(folder, user, -1)
    java = find_java()
    command = [str(java.path), "-Xmx600m", *jvm_options(), "-cp", f"{spark_home()}/jars/*"]
    command += ["org.apache.spark.deploy.SparkSubmit", "--master", cluster.master_url]
    if file is not None:
        command += ["--properties-file", str(file)]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += ["--class", "org.apache.spark.sql.hive.thriftserver.SparkSQLCLIDriver", "spark-internal"]
    command += ["-e", "SELECT sum(id) FROM range(0, 1000, 1, 2)"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment |= {"JAVA_HOME": str(java.home), "SPARK_HOME": str(spark_home())}
    environment |= {"SPARK_SCALA_VERSION": "2.13"}
    if quick := os.environ.get("JDK_JAVA_OPTIONS"):
        environment |= {"JDK_JAVA_OPTIONS": quick}
    return subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        user=user,
    )


def jvm_options() -> list[str]:
    """Return what Spark's launcher gives every JVM."""
    words = daemons._java_command(find_java(), spark_home())
    return [word for word in words[1:] if word.startswith(("--add", "-D", "-XX:+Ignore"))]


@pytest.mark.slow  # a JVM for each attempt
def test_no_application_runs_without_the_secret(cluster: LocalSparkCluster, tmp_path: Path) -> None:
    """Not that of another account, with or without the file that holds it."""
    file = StateFile.of("attacked").properties
    attempts = {"without": ({}, None)}
    if os.geteuid() == 0:
        attempts["file"] = ({}, file)
    attack(cluster, tmp_path, attempts)


@pytest.mark.slow  # two more JVMs
def test_no_application_runs_with_a_guessed_secret(cluster: LocalSparkCluster, tmp_path: Path) -> None:
    """Not over TLS's handshake of Spark's own, and not over SASL alone."""
    wrong = {"spark.authenticate": "true", "spark.authenticate.secret": "0" * 64}
    encrypted = authenticated({"spark.master": "local"}) | wrong
    attack(cluster, tmp_path, {"wrong": (encrypted, None), "sasl": (wrong, None)})


def attack(
    cluster: LocalSparkCluster, tmp_path: Path, attempts: Mapping[str, tuple[Mapping[str, str], Path | None]]
) -> None:
    """Submit applications of another account beside the user's own: only that one runs."""
    tmp_path.chmod(0o755)
    for folder in list(tmp_path.parents)[:3]:
        if folder.stat().st_uid == os.geteuid() and str(folder) != "/tmp":
            folder.chmod(folder.stat().st_mode | 0o011)  # another account may pass
    other = 65534 if os.geteuid() == 0 else os.geteuid()
    common = {
        "spark.sql.catalogImplementation": "in-memory",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "500m",
        "spark.cores.max": "1",
        "spark.ui.enabled": "false",
    }
    known = applications(cluster)
    strangers = {
        name: submit(cluster, tmp_path / name, common | settings, file, other)
        for name, (settings, file) in attempts.items()
    }
    secret = StateFile.of("attacked").properties
    allowed = submit(cluster, tmp_path / "allowed", common, secret, os.geteuid())
    try:
        said, errors = allowed.communicate(timeout=LONG)
        assert (allowed.returncode, said.split()) == (0, ["499500"]), errors[-2000:]
        for name, stranger in strangers.items():
            said, errors = stranger.communicate(timeout=LONG)
            assert stranger.returncode != 0, name
            assert "499500" not in said, name
        assert len(applications(cluster) - known) == 1  # the one that was allowed
    finally:
        for process in (*strangers.values(), allowed):
            process.kill()
            process.wait(150)


def applications(cluster: LocalSparkCluster) -> set[str]:
    """Return the master's applications that are not this module's own."""
    with new_client(10.0) as client:
        answer = client.get(f"{cluster.master_ui}/json/").json()
    return {a["id"] for a in answer["activeapps"] + answer["completedapps"] if a["name"] != "ebbflow"}


# --- pages, gateway ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_and_status_apis_do_nothing(
    cluster: LocalSparkCluster, engine: SparkEngine, lives: None, method: str
) -> None:
    assert compute(engine) == 1000
    worker_ui = cluster._workers(cluster.state)[0].ui
    api = f"{engine.ui_url}/api/v1/applications/{engine.application_id}"
    asked = [
        f"{cluster.master_ui}/app/kill/?id={engine.application_id}&terminate=true",
        f"{cluster.master_ui}/driver/kill/?id=driver-1&terminate=true",
        f"{cluster.master_ui}/workers/kill/?host={cluster.state.nodes[0].host}",
        f"{engine.ui_url}/jobs/job/kill/?id=0",
        f"{engine.ui_url}/stages/stage/kill/?id=0&terminate=true",
        f"{worker_ui}/kill/",
        f"{worker_ui}/logPage/?logType=../../../../../../etc/passwd&appId=..&executorId=..",
        f"{worker_ui}/log/?logType=stdout&appId=../../../../../../../etc&executorId=.",
        f"{engine.ui_url}/executors/heapHistogram/?executorId=driver",
        f"{cluster.master_ui}/v1/submissions/create",
        f"{engine.ui_url}/v1/submissions/create",
        f"{api}/logs",
    ]
    with new_client(60.0) as client:
        for url in asked:
            answer = client.request(method, url)
            assert "root:x:0" not in answer.text, url
            assert "java.lang.Class" not in answer.text, url  # of a heap
            assert answer.status_code >= 400 or "submissionId" not in answer.text, url


def test_the_rest_submission_server_is_off(cluster: LocalSparkCluster, engine: SparkEngine) -> None:
    every = [port for process in members(cluster, engine) for _, port in ports(process)]
    assert 6066 not in every
    body = {"action": "CreateSubmissionRequest", "appResource": "", "clientSparkVersion": "4.3.0",
            "mainClass": "x", "appArgs": [], "environmentVariables": {}, "sparkProperties": {}}  # fmt: skip
    answer = httpx.post(
        f"{cluster.master_ui}/v1/submissions/create", json=body, timeout=30.0, trust_env=False
    )
    assert "submissionId" not in answer.text


def test_the_python_gateway_wants_its_token(engine: SparkEngine, lives: None) -> None:
    assert engine._process is not None
    gateway = engine._process.gateway.java_parameters
    assert gateway.address == "127.0.0.1"
    for command in (b"c\nt\ngetName\ne\n", b"A\nwrong\n", b"r\nu\njava.lang.Runtime\ne\n"):
        answer = say("127.0.0.1", gateway.port, command)
        assert answer.startswith(b"!x") or b"uthentication" in answer, answer
    (accumulators,) = ports(psutil.Process())
    assert accumulators[0] == "127.0.0.1"


# --- where the secret is ----------------------------------------------------------------------------------


def test_the_secret_is_shown_nowhere(cluster: LocalSparkCluster, engine: SparkEngine) -> None:
    assert compute(engine) == 1000
    state = cluster.state
    secrets = (state.secret, S3_SECRET, json.dumps(S3_SECRET)[1:-1])
    assert re.fullmatch(r"[0-9a-f]{64}", state.secret)
    assert state.secret not in repr(state)
    assert engine._context._jsc.hadoopConfiguration().get("fs.s3a.secret.key") == S3_SECRET
    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            lines += process.cmdline()
    assert any("CoarseGrainedExecutorBackend" in line for line in lines)
    assert not [line for line in lines if any(secret in line for secret in secrets)]
    with new_client(60.0) as client:
        for url in (
            f"{cluster.master_ui}/environment/",
            f"{cluster.master_ui}/json/",
            f"{engine.ui_url}/environment/",
            f"{engine.ui_url}/api/v1/applications/{engine.application_id}/environment",
        ):
            text = client.get(url).raise_for_status().text
            assert not any(secret in text for secret in secrets), url
    logs = [*Path(state.directory).rglob("*.log"), *Path(state.directory).rglob("std*")]
    assert len(logs) >= 4  # master, worker, executors
    for log in logs:
        assert not any(secret in log.read_text(errors="replace") for secret in secrets), log
    for file in (StateFile.of(state.name).path, StateFile.of(state.name).properties):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


@pytest.mark.slow  # two more JVMs
def test_another_cluster_has_another_secret_and_it_goes_with_the_cluster(cluster: LocalSparkCluster) -> None:
    with LocalSparkCluster.start("other", workers=0) as other:
        assert other.state.secret != cluster.state.secret
        file = StateFile.of("other").properties
        assert file.exists()
    assert not file.exists()


# --- a master of somebody else's --------------------------------------------------------------------------


def address() -> str:
    """Return an address of this machine that is not its loopback's; empty where it has none."""
    for found in psutil.net_if_addrs().values():
        for one in found:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    return ""


@pytest.mark.slow  # Spark tries for a minute to be taken without the secret
@pytest.mark.skipif(not address(), reason="this machine has no network")
def test_a_master_elsewhere_gets_the_users_secret_and_the_drivers_pages_stay_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    host, java, home = address(), find_java(), spark_home()
    settings = {**authenticated({"spark.master": "local"}), "spark.authenticate.secret": "5" * 64}
    del settings["spark.master"]
    conf = tmp_path / "conf"
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text(properties_text(settings))
    port = free_port(host)
    mark, url = f"elsewhere-{os.getpid()}/daemon", f"spark://{host}:{port}"
    file = conf / "spark-defaults.conf"
    arguments = {
        daemons.MASTER: ["--host", host, "--port", str(port), "--webui-port", "0"],
        daemons.WORKER: ["--host", host, "--webui-port", "0", "--cores", "1", "--memory", "900m",
                         "--work-dir", str(tmp_path / "work"), url],
    }  # fmt: skip
    try:
        for daemon, given in arguments.items():
            command = daemons.command(java, home, daemon, {}, file, given)
            # as on AWS: the pages of a worker on loopback, its RPC where the master reaches it
            environment = daemons.environment(java, home, "127.0.0.1")
            log = tmp_path / f"{daemon.rpartition('.')[2]}.log"
            processes.spawn(command, environment, mark, log)
            if daemon == daemons.MASTER:
                wait_for(host, port)
        code = (
            "import sys; from ebbflow.infra.spark.engine import SparkEngine\n"
            f"engine = SparkEngine.start({url!r}, memory='500m', cores=1)\n"
            "print(engine._session.sql('SELECT count(DISTINCT id % 1000) FROM range(10000)').collect()[0][0])\n"
            "print(engine.ui_url); print(engine._process.gateway.proc.pid, flush=True)\n"
            "sys.stdin.read(); engine.close()\n"
        )
        refused = subprocess.run(
            [sys.executable, "-c", code], input="", capture_output=True, text=True, timeout=LONG, check=False
        )
        assert "EngineUnavailableError" in refused.stderr  # nobody has told it the secret
        assert not refused.stdout
        with subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "SPARK_CONF_DIR": str(conf)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "1000\n"
            assert owner.stdout.readline().startswith("http://127.0.0.1:")
            driver = ports(psutil.Process(int(owner.stdout.readline())))
            assert {h for h, _ in driver} == {"127.0.0.1", host}
            for h, p in driver:
                answers = [say(h, p, rpc(h, p, e)) for e in ENDPOINTS]
                assert not any(map(obeyed, answers))
                if h == host:
                    assert all(b"AuthRpcHandler" in answer for answer in answers)
            assert sum(h == host for h, _ in driver) == 2  # RPC, blocks
            owner.communicate(timeout=150)
    finally:
        processes.destroy(f"elsewhere-{os.getpid()}/", [], SystemClock())


def wait_for(host: str, port: int) -> None:
    for _ in range(int(LONG * 10)):
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0):
            return
        SystemClock().sleep(0.1)
    raise AssertionError(f"nobody listens on {host}:{port}")
