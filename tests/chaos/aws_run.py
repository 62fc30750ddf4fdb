"""One chaotic run of a pipeline on emulated AWS: ``python -m tests.chaos.aws_run SEED FOLDER``.

A query on a Spark pool, a training, a search and an elastic job, all on instances that are launched for them. An
instance of the emulated AWS is a loopback address with real processes: what Systems Manager is told to start there,
and of the Spark pool a worker of a real Spark cluster. Instances get warnings, vanish without one, lose their
processes, and the pipeline is stopped and resumed, as the seed says. Writes ``outcome.json`` into the folder; exits
with 1 if anything did not hold: a result that differs from an undisturbed one, a trial that ended twice or never, a
lease, an instance or a process that is left.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ebbflow.infra.elastic.apps.kmeans import KMeans
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.storage.files import write_text
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.tasks.pipeline.outcome import PipelineOutcome
from ebbflow.tasks.pipeline.run import NullWatcher, PipelineRequest, run_steps
from ebbflow.tasks.pipeline.view import ClusterView
from tests.aws.emulator import ENVIRONMENT, Emulator, PoolShape
from tests.chaos import invariants
from tests.chaos.run import OUTCOME
from tests.chaos.scene import MARK, uid_of
from tests.elastic_results import undisturbed
from tests.forked_python import forked_python
from tests.infra.aws.systems_manager import SystemsManager
from tests.infra.aws.torch_hosts import Hosts

if TYPE_CHECKING:
    from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
    from tests.aws.cluster import Cluster

BOUND = 1200.0  # s for the pipeline to come to its end, also on a busy machine
GONE = 30.0  # s for processes to be gone
ROWS, EPOCHS, BATCH, TRIALS = 1024, 4, 32, 3
ITERATIONS, EXECUTORS, GROUPS = 250, 6, 3
STEPS = EPOCHS * ROWS // 2 // BATCH
KINDS = ("interrupt", "take", "kill", "stop")
_LOOK = 0.2  # s

RULES = (
    "[intervals]\npoll_interval = 0.1\ncapacity_poll_interval = 0.3\nfleet_poll_interval = 0.7\n"
    "batch_delay = 0.05\nleader_lease = 8\n"
)
PRICES = 'source = "made up"\nregion = "us-east-1"\n[on_demand]\n"g5.xlarge" = 1.006\n"m5.large" = 0.096\n'
SCRIPT = """
import argparse, time
import pyarrow.parquet, torch
from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.training import ElasticRun

parser = argparse.ArgumentParser()
parser.add_argument("--data")
parser.add_argument("--lr", type=float, default=0.3)
parser.add_argument("--pause", type=float, default=0.0)
given = parser.parse_args()
files, path = resolve(given.data)
table = pyarrow.parquet.read_table(path, filesystem=files).sort_by("x")
x = torch.tensor(table["x"].to_pylist(), dtype=torch.float32).unsqueeze(1)
y = torch.tensor(table["y"].to_pylist(), dtype=torch.float32).unsqueeze(1)
with ElasticRun.start(seed=1) as run:
    model, _ = run.prepare(
        torch.nn.Linear(1, 1), lambda p: torch.optim.SGD(p, lr=given.lr), batch_size=BATCH
    )
    for _ in run.epochs(EPOCHS):
        for inputs, wanted in run.batches((x, y)):
            run.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
            run.step()
            time.sleep(given.pause)
        run.report(slope=float(next(model.parameters()).detach()))
print("slope", float(next(model.parameters()).detach()))
"""


@dataclass(frozen=True)
class Event:
    """Something that happens ``after`` s since a step runs."""

    step: str
    after: float
    kind: str
    notice: float = 0.0  # s


def events_of(seed: int, spark: bool) -> list[Event]:
    """Return what happens in a run."""
    rng = random.Random(seed)
    steps = ["fit", "rates", "groups", *(["pairs"] if spark else [])]
    found = [
        Event(step, rng.uniform(0.5, 4.0), rng.choice(("interrupt", "take", "kill")), rng.uniform(4.0, 30.0))
        for step in rng.sample(steps, rng.randint(2, len(steps)))
    ]
    if rng.random() < 0.5:
        found.append(Event(rng.choice(["fit", "rates", "groups"]), rng.uniform(1.0, 6.0), "stop"))
    return found


class Machines:
    """What is behind the instances: their processes end with them, and those of the Spark pool have a worker."""

    def __init__(self, lab: "Cluster", hosts: Hosts, spark: "LocalSparkCluster | None") -> None:
        self._lab, self._hosts, self._spark = lab, hosts, spark
        self._known: dict[str, str] = {}  # workers of the Spark pool: starting, there, gone
        self._warned: set[str] = set()
        self._gone: set[str] = set()
        self._work = ThreadPoolExecutor(2)
        self._stop = threading.Event()
        self.problems: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(150)
        self._work.shutdown(wait=True)

    def warn(self, node: str, seconds: float) -> None:
        """Do what a node's agent does at a notice: Spark decommissions the worker."""
        if self._spark is not None and self._known.get(node) == "there":
            with suppress(ClusterError):
                self._spark.notice(node, seconds)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK):
            try:
                self._look()
            except Exception:
                self.problems.append(traceback.format_exc()[-500:])

    def _look(self) -> None:
        for one in self._lab.account.state()["instances"]:
            node = one["id"]
            if not one["alive"]:
                if node not in self._gone:
                    self._gone.add(node)
                    self._hosts.take(node)
                    if self._spark is not None and node in self._known:
                        self._work.submit(self._end, node)
            elif self._is_new_worker(one):
                self._known[node] = "starting"
                self._work.submit(self._begin, node)

    def _is_new_worker(self, one: dict[str, Any]) -> bool:
        in_pool = one["tags"].get("ebbflow:pool") == "etl"
        return self._spark is not None and in_pool and one["id"] not in self._known

    def _begin(self, node: str) -> None:
        assert self._spark is not None
        ec2 = self._lab.account.client("ec2")
        try:
            found = ec2.describe_instances(InstanceIds=[node])["Reservations"][0]["Instances"][0]
            self._spark.add(node_id=node, host=found["PrivateIpAddress"])
            self._known[node] = "there"
        except ClusterError as error:
            if node not in self._gone:
                self.problems.append(f"no Spark worker on {node}: {error}")
        if node in self._gone:
            self._end(node)

    def _end(self, node: str) -> None:
        assert self._spark is not None
        with suppress(ClusterError):
            self._spark.kill(node)


class Injector(NullWatcher):
    """Lets the events of a run happen."""

    def __init__(self, lab: "Cluster", hosts: Hosts, machines: Machines, events: Sequence[Event]) -> None:
        self._lab, self._hosts, self._machines = lab, hosts, machines
        self.left = list(events)
        self.done: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.stop = threading.Event()
        self._view: ClusterView | None = None
        self._since: dict[str, float] = {}

    def watch(self, view: ClusterView, steps: Any) -> None:
        self._view = view

    def note(self, text: str) -> None:
        self.lines.append(f"{time.strftime('%H:%M:%S')} {text}")
        print(self.lines[-1], flush=True)

    def tick(self) -> None:
        assert self._view is not None
        state, now = self._view.ledger.state(), time.monotonic()
        for event in list(self.left):
            app = f"one.{event.step}"
            record = state.apps.get(app)
            if record is None or record.phase != "running":
                continue
            if now - self._since.setdefault(event.step, now) < event.after:
                continue
            if event.step == "pairs":
                nodes = [one["id"] for one in self._lab.nodes("etl")]
            else:
                nodes = sorted({lease.node for lease in state.held(app)})
            if event.kind != "stop" and not nodes:
                continue
            self.left.remove(event)
            self._do(event, nodes[0] if nodes else "")

    def _do(self, event: Event, node: str) -> None:
        self.note(f"EVENT {event.kind} for {event.step} on {node}")
        if event.kind == "stop":
            self.stop.set()
        elif event.kind == "take":
            self._lab.account.take([node])
        elif event.kind == "interrupt":
            self._lab.account.interrupt([node], event.notice)
            self._machines.warn(node, event.notice)
        proof = node or "stopped"
        if event.kind == "kill":
            killed = self._hosts.take(node)
            proof = f"{killed} processes on {node}" if killed else ""
        self.done.append({"kind": event.kind, "step": event.step, "proof": proof})


def pipeline(folder: Path, lab: "Cluster", spark: bool) -> dict[str, Any]:
    """Return the file's content."""
    aws = {
        "terraform_output": "ebbflow.json",
        "prices": "prices.toml",
        "pools": ["gpu"],
        "directory": lab.settings.store,
        "ledger": str(folder / "ledger.db"),
        "name": "lab",
        "loop": True,
        **({"spark_pools": ["etl"]} if spark else {}),
    }
    data = ["--data", "${queries.pairs.file}"]
    trains = {"checkpoint_interval": "1s", "termination_grace": "5s", "adaptive": False, "attempts": 20}
    return {
        "name": "shop",
        "cluster": {"aws": aws},
        "budget": 500,
        "queries": {
            "pairs": {
                "sql": "SELECT x, twice AS y FROM pairs WHERE x < 1",
                "tables": "tables",
                "attempts": 20,
                "engine": "spark" if spark else "duckdb",
            }
        },
        "trainings": {
            "fit": {
                **trains,
                "script": "fit.py",
                "arguments": [*data, "--pause", "0.08"],
                "preflight": "never",
                "retry_backoff": "1s",
            }
        },
        "tunings": {
            "rates": {
                **trains,
                "script": "fit.py",
                "arguments": [*data, "--pause", "0.02"],
                "space": {"lr": {"log": [0.05, 0.5]}},
                "metric": "slope",
                "maximize": True,
                "trials": TRIALS,
                "parallel": 1,
                "epochs": EPOCHS,
                "sampler": "random",
                "seed": 5,
                "pruner": "none",
            }
        },
        "elastic_jobs": {
            "groups": {
                "app": "kmeans",
                "input": "${queries.pairs.file}",
                "classes": GROUPS,
                "executors": EXECUTORS,
                "iterations": ITERATIONS,
                "max_workers": 2,
                "termination_grace": "5s",
                "attempts": 20,
            }
        },
        "loop": {
            "lease_duration": "20s",
            "auction_interval": "2s",
            "termination_grace": "5s",
            "drain_lead": "4s",
            "scaling": {
                "provision_time": "5s",
                "scale_out_after": "500ms",
                "scale_in_idle": "30s",
                "cooldown": "500ms",
            },
        },
        "quotas": {"dollars_per_hour": 50},
        "store": str(folder / "store"),
    }


# --- what must hold -----------------------------------------------------------------------------------------


def check(
    outcome: PipelineOutcome,
    lab: "Cluster",
    folder: Path,
    data: Path,
    cache: Path,
    wrong: Callable[[str], object],
) -> dict[str, int]:
    """Hold the results to undisturbed ones, and look for what is left; return what was counted."""
    pairs, fit, rates, groups = (outcome.step(name) for name in ("pairs", "fit", "rates", "groups"))
    place = StorageLocation(pairs.results["path"])
    rows = pq.read_table(place.path(""), filesystem=place.fs()).sort_by("x").to_pydict()
    if rows != {"x": [n / 512 for n in range(512)], "y": [n / 256 for n in range(512)]}:
        wrong(f"the query's result has {len(rows.get('x', ()))} rows that are not what they should be")
    if fit.details["steps"] != STEPS:
        wrong(f"the training has done {fit.details['steps']} steps of {STEPS}")
    plain, got = slope(data, 0.3, cache), float(fit.results["metrics.slope"])
    if abs(got - plain) > 1e-6:
        wrong(f"the training has come to {got}, undisturbed to {plain}")
    study = optuna.load_study(study_name="one.rates", storage=f"sqlite:///{folder / 'ledger.db'}")
    whole = [one for one in study.trials if one.state.name == "COMPLETE"]
    if len(whole) != TRIALS or rates.details["trials"] != TRIALS:
        wrong(f"of {TRIALS} trials {len(whole)} are complete")
    for one in whole:
        expected = slope(data, one.params["lr"], cache)
        if one.value is None or abs(one.value - expected) > 1e-6:
            wrong(f"trial {one.number} has come to {one.value}, undisturbed to {expected}")
    found = StorageLocation(groups.results["directory"])
    (data / "groups.npz").write_bytes(found.read("input.npz"))
    app = KMeans(str(data / "groups.npz"), GROUPS, EXECUTORS, ITERATIONS)
    (data / "centres.npz").write_bytes(found.read("parameters.npz"))
    with np.load(data / "centres.npz") as result:
        if not np.array_equal(result["centres"], app.centres(undisturbed(app, ITERATIONS))):
            wrong("the elastic job's centres are not those of an undisturbed run")
    with Ledger.open(str(folder / "ledger.db"), cluster="lab", create=False) as ledger:
        if problems := ledger.verify():
            wrong(f"the ledger: {problems[0]}")
        state = ledger.state()
        if state.leases:
            wrong(f"{len(state.leases)} leases are left")
        if late := {app.spec.id: app.phase for app in state.apps.values() if app.phase != "finished"}:
            wrong(f"apps that have not finished: {late}")
        events = invariants.all_events(ledger)
        for sentence in invariants.double_bookings(events):
            wrong(sentence)
    for pool in lab.settings.pools:
        if nodes := lab.nodes(pool):
            wrong(f"instances of {pool} are left: {', '.join(one['id'] for one in nodes)}")
    if errors := lab.account.state()["errors"]:
        wrong(f"the emulator: {errors[0]}")
    return {"leases": sum(type(event.change).__name__ == "Granted" for event in events)}


def slope(data: Path, lr: float, cache: Path) -> float:
    """Return what a training comes to that nothing disturbs, in a process of its own without a launcher.

    It is the same in all runs, which keep it in ``cache``.
    """
    known = json.loads((cache / "slopes.json").read_text()) if (cache / "slopes.json").exists() else {}
    if repr(lr) not in known:
        done = subprocess.run(
            [sys.executable, str(data / "fit.py"), "--data", str(data / "result.parquet"), "--lr", repr(lr)],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            env={k: v for k, v in os.environ.items() if k != MARK} | {"OMP_NUM_THREADS": "1"},
            cwd=data,
        )
        known[repr(lr)] = float(done.stdout.split("slope")[-1])
        cache.mkdir(parents=True, exist_ok=True)
        write_text(cache / "slopes.json", json.dumps(known))
    return float(known[repr(lr)])


# --- one run ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run under way."""

    seed: int
    folder: Path
    spark: bool
    cache: Path  # of what all runs need
    violations: list[str] = field(default_factory=list)
    done: list[dict[str, Any]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)  # events whose step was over before
    seen: dict[str, int] = field(default_factory=dict)
    resumes: int = 0

    def play(self) -> None:
        folder, data = self.folder, self.folder / "data"
        data.mkdir()
        values = [n / 512 for n in range(ROWS)]
        (folder / "tables").mkdir()
        pq.write_table(
            pa.table({"x": values, "twice": [2 * v for v in values]}), folder / "tables" / "pairs.parquet"
        )
        half = values[: ROWS // 2]
        pq.write_table(pa.table({"x": half, "y": [2 * v for v in half]}), data / "result.parquet")
        script = SCRIPT.replace("EPOCHS", str(EPOCHS)).replace("BATCH", str(BATCH))
        for place in (folder, data):
            (place / "fit.py").write_text(script)
        (folder / "fleet.toml").write_text(RULES)
        (folder / "prices.toml").write_text(PRICES)
        with ExitStack() as stack:
            stack.enter_context(forked_python())
            emulator = stack.enter_context(Emulator.start(folder / "aws", seed=self.seed))
            account = emulator.account()
            os.environ.update(account.environment)
            lab = self.cluster(account)
            service = SystemsManager()
            stack.callback(service.close)
            service.online = Everybody()
            os.environ["AWS_ENDPOINT_URL_SSM"] = service.url
            service.script = hosts = Hosts()
            stack.callback(hosts.close)
            spark = self.spark_cluster(stack)
            outputs = dict(lab.outputs)
            if spark is not None:
                outputs["spark_master"] = {"sensitive": False, "value": spark.master_url}
            (folder / "ebbflow.json").write_text(json.dumps(outputs))
            machines = Machines(lab, hosts, spark)
            stack.callback(machines.close)
            outcome = self.steps(lab, hosts, machines)
            self.violations += machines.problems
            if service.problems:
                self.violations.append(f"Systems Manager: {service.problems[0]}")
            if outcome is not None:
                self.seen |= check(outcome, lab, folder, data, self.cache, self.violations.append)

    def cluster(self, account: Any) -> "Cluster":
        ec2 = account.client("ec2")
        vpc = ec2.create_vpc(CidrBlock="127.64.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="127.64.16.0/20", AvailabilityZone="us-east-1a")
        account.subnets = [subnet["Subnet"]["SubnetId"]]
        account.configure(drain_seconds=3)  # as nodes with an agent do that finds them idle
        pools = [PoolShape("gpu", "gpu", types=("g5.xlarge",), most=4)]
        if self.spark:
            pools.append(PoolShape("etl", "spark", types=("m5.large",), most=2))
        found: Cluster = account.cluster("lab", *pools)
        return found

    def spark_cluster(self, stack: ExitStack) -> "LocalSparkCluster | None":
        if not self.spark:
            return None
        from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

        return stack.enter_context(
            LocalSparkCluster.start("etl", workers=0, cores=1, memory="1g", cpu_limit=False)
        )

    def steps(self, lab: "Cluster", hosts: Hosts, machines: Machines) -> PipelineOutcome | None:
        """Run the pipeline through all events to its end; ``None`` where it does not come to it."""
        file = self.folder / "shop.yaml"
        file.write_text(yaml.safe_dump(pipeline(self.folder, lab, self.spark), sort_keys=False))
        runs = str(self.folder / "runs")
        injector = Injector(lab, hosts, machines, events_of(self.seed, self.spark))
        request = PipelineRequest(str(file), run_id="one", runs_dir=runs)
        late = threading.Timer(BOUND, injector.stop.set)
        late.daemon = True
        late.start()
        try:
            while True:
                outcome = run_steps(request, injector, stop=injector.stop)
                if outcome.state != "stopped" or not late.is_alive():
                    break
                self.resumes += 1
                injector.stop.clear()
                request = PipelineRequest(resume="one", runs_dir=runs)
        finally:
            late.cancel()
            self.done = injector.done
            self.missed = [f"{event.kind} of {event.step}" for event in injector.left]
        if outcome.state == "finished":
            return outcome
        reasons = {step.name: f"{step.state} {step.reason}" for step in outcome.steps}
        self.violations.append(f"the pipeline is {outcome.state}: {reasons}")
        return None


class Everybody(set[str]):
    """The nodes that Systems Manager knows: all there are."""

    def __contains__(self, node: object) -> bool:
        return True

    def __ge__(self, others: object) -> bool:
        return True


def run(seed: int, folder: Path, spark: bool, cache: Path) -> dict[str, Any]:
    """Do a run and return its outcome."""
    began = time.monotonic()
    uid = uid_of(os.getpid())
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    os.environ.update(
        {
            MARK: uid,
            "EBBFLOW_HOME": str(folder / "home"),
            "EBBFLOW_CONFIG": str(folder / "fleet.toml"),
            "OMP_NUM_THREADS": "1",
        }
    )
    from ebbflow.infra.aws import train_nodes

    train_nodes.LOGS = str(folder / "node-logs")
    defaults = train_nodes.AwsNodes.__init__.__kwdefaults__
    assert defaults is not None
    defaults["folder"] = str(folder / "node-work")
    found = Run(seed, folder, spark, cache)
    try:
        found.play()
    except Exception:
        found.violations.append(traceback.format_exc()[-2000:])
    end = time.monotonic() + GONE
    while (left := others(uid)) and time.monotonic() < end:
        time.sleep(_LOOK)
    found.violations += left
    outcome = {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "ledger": "SQLite",
        "spark": spark,
        "violations": found.violations,
        "seen": {"faults": sum(bool(one["proof"]) for one in found.done), **found.seen},
        "faults": found.done,
        "missed": found.missed,
        "restarts": {"pipeline": found.resumes},
    }
    write_text(folder / OUTCOME, json.dumps(outcome, indent=1) + "\n")
    return outcome


def others(uid: str) -> list[str]:
    """Return what is left of a run's processes but this one and the interpreter that forks."""
    own = (f"process {os.getpid()} ", "forked_python")
    return [said for said in invariants.leftovers(uid) if not any(one in said for one in own)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, help="where undisturbed results are kept")
    parser.add_argument("--no-spark", action="store_true", help="the query on DuckDB, without a Spark pool")
    given = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    folder = given.folder.absolute()
    outcome = run(given.seed, folder, not given.no_spark, (given.data or folder / "cache").absolute())
    for sentence in outcome["violations"]:
        print(f"WRONG {sentence}", file=sys.stderr)
    return 1 if outcome["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
