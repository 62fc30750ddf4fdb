"""What each mode really listens on is what docs/security.md says."""

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pytest

from tests.docs.listening import Listening, Row, Scene, compare, rows, settle, table

pytestmark = pytest.mark.timeout(600)

EBBFLOW = str(Path(sys.executable).with_name("ebbflow"))
TIMEOUT = 240.0  # s: a bound for a busy machine
HEAVY = "SELECT count(*) AS n FROM big a JOIN big b ON a.id * b.id % 1000003 < b.k + 3 AND a.k <> b.k"
SPARK = {
    "deploy.master.Master": "master",
    "deploy.worker.Worker": "worker",
    "CoarseGrainedExecutorBackend": "executor",
    "native.probe pyspark": "executor's Python",
    "deploy.SparkSubmit": "driver's JVM",
    "ebbflow query": "driver's Python",
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    duckdb.sql("SELECT range AS id, range % 7 AS k FROM range(200000)").write_parquet(
        str(folder / "big.parquet")
    )
    return folder


class Command:
    """A command of Ebbflow's that runs in a mode."""

    def __init__(self, scene: Scene, home: Path, arguments: Sequence[str | Path]) -> None:
        self._log = home / f"{arguments[0]}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [EBBFLOW, *map(str, arguments)],
                env=scene.environment(home),
                cwd=home,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def runs(self) -> bool:
        return self._process.poll() is None

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(150)


@contextmanager
def mode(kinds: dict[str, str]) -> Iterator[Scene]:
    """Give a scene, of which nothing is left at the end."""
    scene = Scene(kinds)
    try:
        yield scene
    finally:
        scene.end()


def run(scene: Scene, home: Path, *arguments: str | Path) -> None:
    done = subprocess.run(
        [EBBFLOW, *map(str, arguments)],
        env=scene.environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def holds(scene: Scene, home: Path, wanted: list[Row], *arguments: str | Path) -> None:
    """Run a command and compare its sockets with the table; it is then killed."""
    command = Command(scene, home, arguments)
    try:
        settle(scene, wanted, command.runs, TIMEOUT)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{command.said()}") from error
    finally:
        command.stop()


def watched(scene: Scene, home: Path, *arguments: str | Path, until: Callable[[str], bool]) -> None:
    """Run a command that may open nothing, and look at it until it has got far enough."""
    command = Command(scene, home, arguments)
    try:
        while not until(command.said()):
            assert command.runs(), command.said()
            assert scene.listening() == []
        assert scene.listening() == []
    finally:
        command.stop()


# --- the table, and how it is compared --------------------------------------------------------------------


def test_every_row_has_an_interface_that_is_known() -> None:
    words = {"none", "address of the node", "the address that nodes call", "address towards the master"}
    words |= {"every address of the node"}  # which who administers the cluster has asked for
    for row in table():
        known = row.interface in {*words, "127.0.0.1", "127.0.0.0/8", "unix 0700"}
        assert known or row.interface.startswith("as you start it"), row


def test_a_local_mode_is_on_loopback_or_behind_a_folder() -> None:
    here = ("query with", "ebbflow", "training on local", "elastic", "--runner")
    for row in table():
        if row.mode.startswith(here):
            assert row.interface in ("none", "127.0.0.1", "127.0.0.0/8", "unix 0700"), row


WANTED = [Row("m", "driver", "RPC", "127.0.0.1"), Row("m", "driver", "results (optional)", "127.0.0.1")]


@pytest.mark.parametrize(
    ("found", "extra", "missing"),
    [
        ([Listening(1, "driver", "127.0.0.1", 5)], 0, 0),
        ([Listening(1, "driver", "127.0.0.1", 5), Listening(1, "driver", "127.0.0.1", 6)], 0, 0),
        ([Listening(1, "driver", "127.0.0.1", 5 + n) for n in range(3)], 1, 0),
        ([Listening(1, "driver", "0.0.0.0", 5)], 1, 1),
        ([Listening(1, "driver", "::", 5)], 1, 1),
        ([Listening(1, "worker", "127.0.0.1", 5)], 1, 1),
        ([Listening(1, "driver", "/tmp/socket")], 1, 1),
        ([], 0, 1),
    ],
)
def test_what_is_too_much_and_what_is_stale_is_told(found: list[Listening], extra: int, missing: int) -> None:
    assert tuple(map(len, compare(found, WANTED))) == (extra, missing)


def test_sockets_of_other_processes_are_seen(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import socket, sys
        kept = [socket.create_server(("0.0.0.0", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6)]
        unix = socket.socket(socket.AF_UNIX); unix.bind(sys.argv[1]); unix.listen(); kept.append(unix)
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.bind(("127.0.0.1", 0)); kept.append(udp)
        print("up", flush=True); sys.stdin.read()
        """
    )
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    path = str(open_folder / "socket")
    with mode({"-c": "probe"}) as scene:
        probe = subprocess.Popen(
            [sys.executable, "-c", code, path],
            env=scene.environment(tmp_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert probe.stdout is not None
        assert probe.stdout.readline() == "up\n"
        found = scene.listening()
        assert {s.address for s in found} == {"0.0.0.0", "::1", path, "127.0.0.1"}
        (unix,) = (s for s in found if s.address == path)
        assert not unix.fits("unix 0700")
        open_folder.chmod(0o700)
        assert unix.fits("unix 0700")
        probe.kill()
        probe.wait(30)


# --- modes ------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_query_on_duckdb_opens_nothing(tables: Path, tmp_path: Path) -> None:
    assert rows("query with DuckDB") == []
    with mode({}) as scene:
        arguments = ("query", HEAVY, "--tables", tables, "--engine", "duckdb", "--store", tmp_path / "store")
        stages = tmp_path / "store"
        watched(scene, tmp_path, *arguments, until=lambda _: any(stages.rglob("*.parquet*")))


@pytest.mark.spark
def test_a_query_on_local_spark(tables: Path, tmp_path: Path) -> None:
    with mode(SPARK) as scene:
        arguments = ("query", HEAVY, "--tables", tables, "--master", "local[1]", "--store", tmp_path / "s")
        holds(scene, tmp_path, rows("query with Spark, local[N]"), *arguments)


@pytest.mark.spark
def test_a_query_on_a_local_cluster(tables: Path, tmp_path: Path) -> None:
    with mode(SPARK) as scene:
        try:
            run(scene, tmp_path, "local", "up", "--spark", "2", "--memory", "1g")
            arguments = (
                "query",
                HEAVY,
                "--tables",
                tables,
                "--master",
                "local-fleet",
                "--store",
                tmp_path / "s",
            )
            holds(scene, tmp_path, rows("ebbflow local up --spark"), *arguments)
        finally:
            run(scene, tmp_path, "local", "down", "--yes")


@pytest.mark.processes
def test_a_gateway_to_memory(tmp_path: Path) -> None:
    with mode({"ebbflow memory": "the command"}) as scene:
        holds(
            scene,
            tmp_path,
            rows("ebbflow memory gateway"),
            "memory",
            "gateway",
            "--store",
            tmp_path / "store",
        )


@pytest.mark.processes
def test_a_training_on_local_nodes(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "flows" / "digits.py"
    # ranks are forked from their node and show its command line; the node itself listens on nothing
    kinds = {"launcher.node": "rank", "ebbflow train": "launcher", "": "rank"}
    with mode(kinds) as scene:
        arguments = ("train", script, "--nodes", "local:2x1", "--runs-dir", tmp_path / "run")
        wanted = rows("training on local nodes")
        holds(scene, tmp_path, wanted, *arguments, "--", "--epochs", "5000")


@pytest.mark.processes
def test_elastic_executors(tmp_path: Path) -> None:
    with mode({"ebbflow elastic": "master", "": "worker"}) as scene:
        arguments = ("elastic", "mlr", "--workers", "2", "--iterations", "100000")
        holds(scene, tmp_path, rows("elastic executors"), *arguments)


@pytest.mark.processes
def test_a_capacity_loop_on_local_nodes_and_the_page_of_its_ledger(tmp_path: Path) -> None:
    assert rows("ebbflow capacity start, local fleet") == []
    ledger = tmp_path / "ledger.sqlite"
    with mode({"ebbflow report": "the command"}) as scene:
        try:
            run(scene, tmp_path, "local", "up", "--gpu", "1", "--slots", "1")
            loop = ("capacity", "start", "--source", "local", "--cluster", "lab", "--ledger", ledger)
            watched(scene, tmp_path, *loop, until=lambda said: "gpu-1" in said)
            page = ("report", "0", "--serve", "--ledger", ledger, "--cluster", "lab")
            holds(scene, tmp_path, rows("ebbflow report --serve"), *page)
        finally:
            run(scene, tmp_path, "local", "down", "--yes")


@pytest.mark.prefect
def test_prefects_temporary_server(tables: Path, tmp_path: Path) -> None:
    kinds = {"prefect.server.api.server": "Prefect's temporary server"}
    with mode(kinds) as scene:
        arguments = ("query", HEAVY, "--tables", tables, "--engine", "duckdb", "--store", tmp_path / "store")
        wanted = rows("--runner prefect without a server")
        holds(scene, tmp_path, wanted, *arguments, "--runner", "prefect")
