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
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.pipeline.outcome import PipelineOutcome
from ebbflow.tasks.pipeline.run import PipelineRequest, run_steps
from tests.aws.cluster import PRICES, Cluster
from tests.aws.emulator import ENVIRONMENT, Emulator, PoolShape
from tests.chaos import invariants
from tests.chaos.aws_events import LOOK, Injector, Machines, events_of
from tests.chaos.aws_pipeline import BATCH, EPOCHS, ROWS, SCRIPT, check, pipeline
from tests.chaos.run import OUTCOME
from tests.chaos.scene import MARK, uid_of
from tests.forked_python import forked_python
from tests.infra.aws.systems_manager import SystemsManager
from tests.infra.aws.torch_hosts import Hosts

if TYPE_CHECKING:
    from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster

BOUND = 1200.0  # s for the pipeline to come to its end, also on a busy machine
GONE = 30.0  # s for processes to be gone

RULES = (
    "[intervals]\npoll_interval = 0.1\ncapacity_poll_interval = 0.3\nfleet_poll_interval = 0.7\n"
    "batch_delay = 0.05\nleader_lease = 8\n"
)


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
        time.sleep(LOOK)
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
