"""The stage of a chaotic run: tables, a small disk, a database behind a network, nodes, and what is to be done."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ebbflow.infra.ledger import Ledger
from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.storage.files import write_text
from ebbflow.infra.tables.benchmark_data import tpch
from tests.chaos.faults import Script
from tests.chaos.proxy import Proxy

HERE = Path(__file__).parent
MARK = "EBBFLOW_CHAOS"  # in the environment of all that a run starts
CLUSTER = "chaos"
SCALE = 0.02  # of TPC-H
DISK = 192  # MiB of the disk that gets full
POOLS = {"spark": "sql", "gpu": "gpu"}

LIMITS = """
[loop]
lease_duration = 24
auction_interval = 3
drain_lead = 2
termination_grace = 6
heartbeat_timeout = 6
plan_timeout = 15

[scaling]
provision_time = 5
scale_out_after = 2
scale_in_idle = 15
cooldown = 5
pools = { gpu = "gpus", sql = "cores" }

[teams.sales]
weight = 2

[quotas.teams.labs]
gpus = 2

[intervals]
leader_lease = 4
capacity_poll_interval = 0.3
fleet_poll_interval = 1
reconcile_interval = 20

[quotas]
dollars_per_hour = 20
"""


BRIEF_LIMITS = """
[loop]
lease_duration = 16
auction_interval = 2
drain_lead = 1
termination_grace = 3
heartbeat_timeout = 3
plan_timeout = 10

[scaling]
provision_time = 2
scale_out_after = 1
scale_in_idle = 15
cooldown = 5
pools = { gpu = "gpus" }

[intervals]
leader_lease = 2
capacity_poll_interval = 0.3
fleet_poll_interval = 1
"""


@dataclass(frozen=True, slots=True)
class Training:
    """A training step whose result can be known beforehand."""

    step: str
    query: str
    x: str
    y: str
    epochs: int
    pause: float  # s
    gpus: int = 1
    least: float = 0.8  # r2 that it is to reach


@dataclass(frozen=True, slots=True)
class Work:
    """A pipeline, and what must come of it."""

    name: str
    content: Mapping[str, Any]  # of its file
    queries: Mapping[str, str]  # SQL by step
    trainings: tuple[Training, ...] = ()
    searches: Mapping[str, int] = field(default_factory=dict)  # trials by step


@dataclass
class Scene:
    """All that a run takes place on."""

    script: Script
    folder: Path
    uid: str
    data: Path
    disk: Path  # results, runs and checkpoints
    mounted: bool  # the disk is one of its own, and can be full
    ledger: str  # address, as the processes know it
    direct: str  # the same without the network in between
    environment: Mapping[str, str]
    wall: Path
    fleet: LocalFleet
    proxy: Proxy | None = None

    @property
    def logs(self) -> Path:
        return self.folder / "samples"

    def open(self) -> Ledger:
        """Open the ledger past the network. Raises ``LedgerError``."""
        return Ledger.open(self.direct, cluster=CLUSTER)


def uid_of(pid: int) -> str:
    """Return the mark of all that the run in process ``pid`` starts."""
    return f"chaos-{pid}"


@contextmanager
def opened_scene(script: Script, folder: Path, data: Path) -> Iterator[Scene]:
    """Set the stage in ``folder``; at the end nodes, database and disk are gone, files and logs stay."""
    folder.mkdir(parents=True, exist_ok=True)
    uid = uid_of(os.getpid())
    wall = folder / "wall"
    wall.write_text("0")
    with ExitStack() as stack:
        disk, mounted = stack.enter_context(_disk(folder / "disk"))
        proxy, ledger, direct = stack.enter_context(_database(script, folder, disk))
        # of this process, too: the fleet's supervisor and nodes have it from here
        os.environ.update(
            {
                MARK: uid,
                "EBBFLOW_HOME": str(folder / "home"),
                "EBBFLOW_LEDGER": ledger,
                "EBBFLOW_TEST_WALL": str(wall),
                "PYTHONPATH": str(HERE / "wall"),
                "PYTHONFAULTHANDLER": "1",
                "OMP_NUM_THREADS": "1",
                "COLUMNS": "300",
            }
        )
        os.environ.pop("PREFECT_API_URL", None)
        (folder / "limits.toml").write_text(LIMITS if script.spark else BRIEF_LIMITS)
        Ledger.open(direct, cluster=CLUSTER).close()
        fleet = LocalFleet.start(pools(script), f"chaos-{script.seed}", gpus=(), wait=240.0)
        stack.callback(fleet.down)
        yield Scene(
            script, folder, uid, data, disk, mounted, ledger, direct, dict(os.environ), wall, fleet, proxy
        )


def pools(script: Script) -> list[LocalPool]:
    """Return the nodes that there are at first, and may be."""
    price = {"price": 0.9, "on_demand_price": 3.0}
    found = [
        LocalPool(
            POOLS["gpu"],
            "gpu",
            slots=1,
            initial=2,
            min_nodes=1,
            max_nodes=3,
            instance_type="local-gpu",
            **price,
        )
    ]
    if script.spark:
        found.append(
            LocalPool(
                POOLS["spark"],
                "spark",
                cores=1,
                memory=2.0,
                initial=2,
                min_nodes=1,
                max_nodes=3,
                instance_type="local-sql",
            )
        )
    return found


@contextmanager
def _disk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield a folder that is a small disk of its own, where such can be mounted (by root), and whether it is one."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
        timeout=30,
    )
    mounted = done.returncode == 0
    try:
        yield folder, mounted
    finally:
        if mounted:
            kept = folder.with_name("kept")
            (folder / "ballast").unlink(missing_ok=True)
            with suppress(OSError, shutil.Error):
                shutil.copytree(folder, kept, dirs_exist_ok=True, symlinks=True)
            subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True, timeout=30)


@contextmanager
def _database(script: Script, folder: Path, disk: Path) -> Iterator[tuple[Proxy | None, str, str]]:
    if not script.postgres:
        path = str((disk if script.ledger_on_disk else folder) / "ledger.db")
        yield None, path, path
        return
    from tests.infra.ledger.postgres import server

    with server() as database, Proxy(database.folder / ".s.PGSQL.5432") as proxy:
        yield proxy, f"postgresql://tester@127.0.0.1:{proxy.port}/ledger", database.url


def tables(folder: Path, scale: float = SCALE) -> Path:
    """Return TPC-H tables, made once."""
    return tpch(scale, folder / f"tpch-{scale:g}", lambda _: None)


# --- what is to be done -------------------------------------------------------------------------------------

TPCH = ("q5", "q7", "q8", "q9", "q12", "q14")

PAIRS = """
SELECT c_custkey AS id, c_acctbal AS balance, 2 * c_acctbal + c_custkey AS twice
FROM customer WHERE c_custkey < 1000
"""


def works(script: Script, scene: Scene) -> list[Work]:
    """Return the pipelines that a run begins with."""
    if not script.spark:
        return [labs(scene, 1, epochs=4, pause=0.1, trials=0)]
    return [shop(scene, 1, trains=True), labs(scene, 1, epochs=8, pause=0.25, trials=3)]


def shop(scene: Scene, number: int, *, trains: bool) -> Work:
    """Return a pipeline of two queries on Spark, one of which feeds a training on up to two nodes."""
    own = files("ebbflow.flows")
    drawn = TPCH[(scene.script.seed + number) % len(TPCH)]
    sql = {
        "baskets": (own / "setup" / "demo_files" / "baskets.sql").read_text(),
        drawn: (own / "tpch" / f"{drawn}.sql").read_text(),
    }
    wide = Training("wide", "baskets", "pieces", "total", epochs=6, pause=0.25, gpus=2, least=0.4)
    queries = {
        name: {"team": "sales", "sql": text, "tables": str(scene.data), "engine": "spark", "attempts": 50}
        for name, text in sql.items()
    }
    content = {**_head(scene, f"shop{number}"), "queries": queries}
    if trains:
        content["trainings"] = {"wide": {**_training(scene, wide), "team": "sales", "max_gpus": 2}}
    return Work(f"shop{number}", content, sql, (wide,) if trains else ())


def labs(scene: Scene, number: int, epochs: int, pause: float, trials: int) -> Work:
    """Return a pipeline of a query on DuckDB that feeds a training on one GPU, and a search."""
    exact = Training("exact", "pairs", "balance", "twice", epochs, pause)
    content = {
        **_head(scene, f"labs{number}"),
        "queries": {
            "pairs": {
                "team": "labs",
                "sql": PAIRS,
                "tables": str(scene.data),
                "engine": "duckdb",
                "attempts": 50,
            }
        },
        "trainings": {"exact": {**_training(scene, exact), "team": "labs"}},
    }
    if trials:
        tune = _training(scene, Training("tune", "pairs", "balance", "twice", 3, 0.05))
        content["tunings"] = {
            "tune": {
                **{
                    key: value
                    for key, value in tune.items()
                    if key not in ("preflight", "retry_backoff", "gpus")
                },
                "team": "labs",
                "space": {"lr": {"log": [0.01, 0.3]}},
                "metric": "r2",
                "trials": trials,
                "parallel": 1,
                "epochs": 3,
                "pruner": "none",
            }
        }
    return Work(f"labs{number}", content, {"pairs": PAIRS}, (exact,), {"tune": trials} if trials else {})


def _head(scene: Scene, name: str) -> dict[str, Any]:
    existing = {"ledger": "${env:EBBFLOW_LEDGER}", "name": CLUSTER, "fleet": scene.fleet.name}
    if scene.script.spark:
        existing["master"] = scene.fleet.spark_master
    return {
        "name": name,
        "cluster": {"existing": existing},
        "teams": {"sales": {"weight": 2}, "labs": {}},
        "store": str(scene.disk / "store" / name),
    }


def _training(scene: Scene, one: Training) -> dict[str, Any]:
    arguments = [
        "--data", f"${{queries.{one.query}.path}}", "--x", one.x, "--y", one.y, "--log", str(scene.logs),
        "--epochs", str(one.epochs), "--pause", str(one.pause),
    ]  # fmt: skip
    return {
        "script": str(HERE / "fit.py"),
        "arguments": arguments,
        "gpus": 1,
        "adaptive": False,
        "checkpoint_interval": "2s",
        "termination_grace": "5s",
        "retry_backoff": "2s",
        "preflight": "never",
        "attempts": 50,
    }


def write(work: Work, folder: Path) -> Path:
    """Write a pipeline's file."""
    path = folder / f"{work.name}.yaml"
    write_text(path, yaml.safe_dump(dict(work.content), sort_keys=False))
    return path


def command(*arguments: str) -> Sequence[str]:
    """Return what starts the command line."""
    return [sys.executable, "-P", "-m", "ebbflow.flows.cli", *arguments]
