"""A place with a valid file of each kind that commands read, and what it looked like before a case."""

import json
import os
import shutil
from pathlib import Path

from ebbflow.infra.ledger import Ledger

PIPELINE = """\
name: shop
cluster:
  local:
    pools:
      gpu: {kind: gpu, nodes: 1, max_nodes: 2, price: 0.9}
    faults: [fit+5s:kill:gpu]
teams:
  research: {weight: 1}
queries:
  orders:
    team: research
    tables: tables
    sql: SELECT customer, sum(price) AS total FROM orders GROUP BY customer
trainings:
  fit:
    team: research
    script: script.py
    arguments: [--data, "${queries.orders.path}"]
    gpus: 1
    deadline: 30m
tunings:
  tune:
    team: research
    script: script.py
    space: {lr: {log: [0.001, 0.3]}, width: {int: [16, 128]}}
    trials: 6
loop:
  policy: rho-bounded
  lease_duration: 1m
  auction_interval: 20s
  scaling: {scale_out_after: 5s, scale_in_idle: 30s}
budget: 50
quotas: {dollars_per_hour: 10, pools: {gpu: {max_nodes: 2}}, teams: {research: {gpus: 2}}}
"""
LIMITS = """\
[quotas]
dollars_per_hour = 40
nodes = 60
[quotas.pools.gpu]
max_nodes = 4
[quotas.teams.vision]
gpus = 48
[teams.vision]
weight = 2
[scaling]
scale_in_idle = 300
pools = { gpu = "gpus" }
[loop]
lease_duration = 300
auction_interval = 60
[intervals]
capacity_poll_interval = 0.3
[policy]
name = "rho-bounded"
options = { rho = 1.5 }
[market]
span = 3600
[fallback]
"""
PRICES = 'source = "agreement"\nregion = "eu-west-1"\n[on_demand]\n"m5.large" = 0.107\n"p3.2xlarge" = 3.06\n'
JOBS = "id,arrival_s,gpus,duration_s,model,team\na,0,1,60,resnet,red\nb,10,2,120,vgg,blue\nc,20,1,30,,red\n"
CLUSTER = """\
nodes:
  - {count: 2, gpus: 2, type: p3.2xlarge, zone: us-east-1a, market: spot, price: 3.06}
  - {count: 1, gpus: 4, name: big}
start: 2020-01-01T00:00:00Z
"""
SPOT = "0,add,n1\n60000,add,n2\n120000,remove,n1\n"
SPOT_PRICES = (
    "timestamp,availability_zone,instance_type,product,spot_price_usd_per_hour\n"
    "2020-01-01T00:00:00Z,us-east-1a,p3.2xlarge,Linux/UNIX,0.9\n"
    "2020-03-01T00:00:00Z,us-east-1a,p3.2xlarge,Linux/UNIX,1.1\n"
)
_ROW = ["ResNet-18 (batch size 32)", "x", "x", "x", "x", "1000", "1", "1", "1", "0"]
TRACE = "\t".join(_ROW) + "\n" + "\t".join([*_ROW[:9], "30"]) + "\n"
THROUGHPUTS = json.dumps({"v100": {"('ResNet-18 (batch size 32)', 1)": {"null": 12.5}}})
SPACE = "lr: {log: [0.001, 1]}\nwidth: {int: [16, 128]}\nkind: {choice: [a, b]}\n"


def failures_text() -> str:
    """Return the failure table that is shipped, which a user's own looks like."""
    from importlib.resources import files

    return (files("ebbflow.planners.training.failures") / "failures.toml").read_text(encoding="utf-8")


def terraform() -> str:
    """Return outputs of a small cluster, as ``terraform output -json`` writes them."""
    pool = {
        "kind": "gpu",
        "group": "ebb-gpu",
        "launch_template": "lt-1",
        "instance_types": ["g5.xlarge"],
        "subnet_ids": ["subnet-1"],
        "on_demand_base": 0,
        "min_size": 0,
        "max_size": 4,
    }
    texts = {
        "cluster": "ebb",
        "region": "us-east-1",
        "account_id": "123456789012",
        "bucket": "ebb-bucket",
        "store": "s3://ebb-bucket/store",
        "kms_key_arn": "arn:aws:kms:us-east-1:123456789012:key/1",
        "notice_queue_url": "https://sqs.us-east-1.amazonaws.com/123456789012/ebb-notices",
        "dead_letter_queue_url": "https://sqs.us-east-1.amazonaws.com/123456789012/ebb-dead",
        "capacity_role_arn": "arn:aws:iam::123456789012:role/ebb-capacity",
        "settings_parameter": "/ebb/settings",
        "pools": {"gpu": pool},
        "documents": {"drain": "ebb-drain"},
    }
    return json.dumps({name: {"value": value} for name, value in texts.items()}, indent=1)


def communication() -> dict[str, str]:
    """Return a recorded training, the links of its gang and a plan for it, by their files' names."""
    from ebbflow.tasks.communication import plan_training
    from tests.planners.communication.test_recorded import links, recorded

    found = plan_training(recorded(), links(), search_seconds=0.1)
    return {
        "training.json": recorded().to_json(),
        "links.json": links().to_json(),
        "plan.json": found.plan.to_json(),
    }


class Workplace:
    """A working directory and a home, both made of a template that is made once."""

    def __init__(self, root: Path) -> None:
        self.template, self.work, self.home = root / "template", root / "work", root / "home"
        self._make()
        self.reset()

    def reset(self) -> None:
        """Bring both back to what the template has."""
        os.chdir(self.template)  # not in what is removed
        for path in (self.work, self.home):
            if path.exists():
                shutil.rmtree(path)
        shutil.copytree(self.template, self.work, symlinks=True, copy_function=_copied)
        (self.home / ".cache").mkdir(parents=True)
        os.chdir(self.work)

    def listing(self) -> dict[str, tuple[int, int]]:
        """Return kind and size of everything in the working directory and the home."""
        found = {}
        for root in (self.work, self.home):
            for folder, _, names in os.walk(root):
                for path in (Path(folder), *(Path(folder) / name for name in names)):
                    stat = path.lstat()
                    size = 0 if path.is_dir() and not path.is_symlink() else stat.st_size
                    found[str(path.relative_to(root.parent))] = (stat.st_mode, size)
        return found

    def _make(self) -> None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet as pq

        place = self.template
        (place / "tables").mkdir(parents=True)
        ids = list(range(60))
        orders = {"id": ids, "customer": [i % 6 for i in ids], "price": [1.0 * i for i in ids]}
        pq.write_table(pa.table(orders), place / "tables" / "orders.parquet")
        pq.write_table(pa.table({"id": list(range(6))}), place / "tables" / "customer.parquet")
        texts: dict[str, str] = {
            "q.sql": "SELECT customer, sum(price) AS total FROM orders GROUP BY customer\n",
            "script.py": "from ebbflow import ElasticRun\n",
            "pipeline.yaml": PIPELINE,
            "limits.toml": LIMITS,
            "prices.toml": PRICES,
            "config.json": terraform(),
            "space.yaml": SPACE,
            "failures.toml": failures_text(),
            "jobs.csv": JOBS,
            "cluster.yaml": CLUSTER,
            "spot.csv": SPOT,
            "spot-prices.csv": SPOT_PRICES,
            "rounds.trace": TRACE,
            "throughputs.json": THROUGHPUTS,
        }
        for name, text in (texts | communication()).items():
            (place / name).write_text(text)
        self._example(place)
        self._runs(place)
        np.savez(place / "data.npz", x=np.ones((40, 3)), y=np.arange(40) % 2, start=np.ones((2, 3)))
        Ledger.open(str(place / "ledger.db"), cluster="local").close()

    def _example(self, place: Path) -> None:
        """Put the pipeline of the examples beside tables that it can be checked with."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        examples = Path(__file__).parents[2] / "examples"
        text = (examples / "pipeline.yaml").read_text()
        assert "~/.cache/ebbflow/tpch/sf0.1" in text
        (place / "example.yaml").write_text(text.replace("~/.cache/ebbflow/tpch/sf0.1", "tpch"))
        (place / "train_orders.py").write_bytes((examples / "train_orders.py").read_bytes())
        (place / "tpch").mkdir()
        day = pa.array([10_000], pa.int32()).cast(pa.date32())
        orders = {"o_orderkey": [1], "o_totalprice": [2.0], "o_orderdate": day}
        pq.write_table(pa.table(orders), place / "tpch" / "orders.parquet")
        lines = {"l_orderkey": [1], "l_quantity": [2.0], "l_discount": [0.1]}
        pq.write_table(pa.table(lines), place / "tpch" / "lineitem.parquet")

    def _runs(self, place: Path) -> None:
        """Record a run of each kind, to go on with."""
        from ebbflow.tasks.pipeline.file.read import read_pipeline
        from ebbflow.tasks.pipeline.record import RunFolder
        from ebbflow.tasks.training.request import TrainingRequest
        from ebbflow.tasks.tuning.request import TuningRequest, read_space

        RunFolder(place / "runs", "mine").begin(read_pipeline(place / "pipeline.yaml"), {}, 0.0)
        script = str(place / "script.py")
        TrainingRequest(script, run_id="mine", runs_dir=str(place / "trainings")).save()
        space = read_space(place / "space.yaml")
        TuningRequest(script, space, "accuracy", run_id="mine", runs_dir=str(place / "tunings")).save()


def _copied(source: str, target: str) -> object:
    os.link(source, target)  # cases replace files, and write into none
    return target
