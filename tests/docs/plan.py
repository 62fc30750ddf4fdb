"""What becomes of a snippet: run, by ``make bench`` or as a part of its page, compared, or only checked, and why."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tests.docs.snippets import Snippet

How = Literal["run", "slow", "output", "page", "check"]

AWS = "needs an AWS account"
INSTALL = "installs packages; make demo and make test install from the lock"
MEMORY = "needs daemons on nodes: tests/tasks/query/test_memory_store.py runs such queries"
PREFECT = "starts a Prefect server; tests/flows run the same flows"
DATABASE = "needs a cluster and a database that others use"
SESSION = "needs a SparkSession with tables: tests/tasks/query/test_given_session.py has one"
OURS = "shows a part of something; the text around it says of what"
AIRFLOW = "needs Airflow, which has an environment of its own: make airflow"
OWN = "has files beside it: tests/tasks/elastic/test_elastic_app.py runs them"
DIFF = "leads to the whole file after it: tests/docs/test_migration.py"
EDITOR = "is read by whoever works on the project; make test and make check are run as they are"


@dataclass(frozen=True)
class Plan:
    """What becomes of the snippets of a page that begin with these words."""

    begins: str
    how: How
    why: str = ""  # it is not run
    after: tuple[str, ...] = ()  # snippets of the page, by their beginnings, that are run before it
    given: tuple[str, ...] = ()  # ``GIVEN``, that are laid into the folder before it
    saved: str = ""  # written into this file of the folder first; the snippet itself is then not run
    lines: Callable[[str], str] = field(default=lambda text: text)  # what of it is run


def without(*words: str) -> Callable[[str], str]:
    """Return what leaves out the lines that hold one of these words."""
    return lambda text: (
        "\n".join(line for line in text.splitlines() if not any(word in line for word in words)) + "\n"
    )


PAGE = Plan("", "page")  # all commands of the page are one script: tests/docs/task_pages.py

PLANS: dict[str, tuple[Plan, ...]] = {
    "README.md": (
        Plan("make demo", "check", "takes minutes; tests/flows/setup run it"),
        Plan(". .venv/bin/activate", "slow", given=("examples",), lines=without(". .venv")),
        Plan("from prefect import flow", "check", PREFECT),
    ),
    "CONTRIBUTING.md": (Plan("make check", "check", EDITOR),),
    "docs/getting-started.md": (
        Plan("python3 -m venv", "run", lines=without("venv", "pip")),
        Plan("from pathlib import Path", "run"),
        Plan("cat > revenue.sql", "run", after=("from pathlib import Path",)),
        Plan("country ", "output"),
        Plan("import torch", "slow", saved="fit.py"),
        Plan("ebbflow train fit.py", "slow", after=("import torch",)),
        Plan("...", "output"),
    ),
    "docs/memory.md": (Plan("", "check", MEMORY),),
    "docs/how-queries-run.md": (Plan("", "check", OURS),),
    "docs/communication.md": (
        Plan("ebbflow train", "check", "trains the reader's script; tests/infra/training plan real runs"),
        Plan("from ebbflow import", "check", OURS),
        Plan("torchrun", "check", "takes minutes; tests/infra/communication/test_train_dlrm.py runs it"),
        Plan("[links]", "check", OURS),
    ),
    "docs/aggregation.md": (
        Plan(
            "ebbflow train",
            "check",
            "trains the reader's script; tests/infra/training/service runs real ones",
        ),
        Plan(
            "ebbflow aggregation serve",
            "check",
            "serves until it is ended; tests/infra/training/service/test_shared_aggregators.py shares some",
        ),
        Plan(
            "ebbflow local up",
            "check",
            "runs until it is ended; tests/tasks/capacity/test_loop_aggregators.py runs such nodes and a loop",
        ),
        Plan("aggregation      =", "check", "tests/terraform applies the same in the example complete"),
        Plan("from ebbflow import", "check", OURS),
        Plan("ebbflow simulate aggregation", "slow"),
    ),
    "docs/simulation.md": (Plan("ebbflow simulate training", "slow"),),
    "docs/own-query.md": (
        Plan("from ebbflow import run_query", "check", SESSION),
        Plan("pip install", "check", "needs a server; make connect runs queries on one"),
        Plan("note: sales", "check", OURS),
        Plan("note: orders: Delta Lake", "check", OURS),
        Plan("# what is in there", "slow", given=("shop",)),
        Plan("# how many orders?", "slow", given=("shop",)),
        Plan(
            "ebbflow query prices.sql",
            "check",
            "reads a file of the reader's; tests/flows/test_bad_sql.py does so",
        ),
        Plan("ebbflow query revenue.sql --tables s3://", "check", AWS),
        Plan("from ebbflow import", "run", given=("shop",)),
    ),
    "docs/migration.md": (
        Plan("-import", "check", DIFF),
        Plan("-from pathlib", "check", DIFF),
        Plan("import torch", "slow", saved="fit.py"),
        Plan("ebbflow train fit.py", "slow", after=("import torch",)),
        Plan("from ebbflow import QueryRequest", "slow", given=("shop",)),
        Plan("from prefect import flow", "check", PREFECT),
    ),
    "docs/own-policy.md": (
        Plan("from ebbflow import App", "run", saved="mine.py"),
        Plan("from dataclasses import dataclass", "run", given=("decides",)),
        Plan("import numpy as np", "run", after=("from ebbflow import App",)),
        Plan("ebbflow capacity start", "check", "runs until it is stopped; tests/tasks/capacity start loops"),
        Plan("[policy]", "run", given=("loop rules",)),
        Plan("[project.entry-points", "run", given=("offered policies",)),
    ),
    "docs/local.md": (
        Plan("ebbflow local up", "slow"),
        Plan("pip install", "check", "needs root; tests/infra/local_fleet make such networks"),
        Plan("from ebbflow import", "run"),
    ),
    "docs/code.md": (
        Plan("digits/", "check", OURS),
        Plan(
            "ebbflow train train.py",
            "check",
            "installs a package; tests/tasks/training/test_training_code.py",
        ),
        Plan("   5.5 s", "check", OURS),
        Plan("failed after", "check", OURS),
        Plan("trainings:", "check", OURS),
    ),
    "docs/sharded-models.md": (
        Plan("model, optimizer", "check", OURS),
        Plan("from torch.distributed.device_mesh", "check", OURS),
        Plan("ebbflow train script.py", "check", "tests/infra/training/sharded trains such groups"),
        Plan("ebbflow train examples/train_sharded.py", "slow", given=("examples",)),
        Plan("finished after", "check", OURS),
        Plan("checkpoints/", "check", OURS),
        Plan("from ebbflow import load_checkpoint", "check", OURS),
    ),
    "docs/tracking.md": (
        Plan("pip install", "check", "tests/tasks/training/tracking runs such trainings"),
        Plan("", "check", OURS),
    ),
    "docs/training.md": (
        Plan("import torch", "check", OURS),
        Plan("pip install 'prefect-ebbflow[train]'", "slow", given=("examples",), lines=without("pip")),
        Plan("# take nodes away", "check", OURS),
        Plan("ebbflow train words.py", "check", OURS),
        Plan("step 384", "check", OURS),
        Plan("ebbflow fleet grow trainers", "check", AWS),
        Plan(
            "ebbflow train fit.py --own",
            "check",
            "tests/tasks/training/test_own_checkpoints.py trains such scripts",
        ),
        Plan("from ebbflow import ElasticRun, SampleStream", "check", OURS),
        Plan("+from ebbflow import", "check", "tests/frameworks trains the examples that have these lines"),
        Plan("finished after", "check", OURS),
        Plan("[[rule]]", "run", given=("failure table",)),
        Plan("from ebbflow import train", "check", PREFECT),
    ),
    "docs/tuning.md": (
        Plan("pip install 'prefect-ebbflow[tune]'", "check", OURS),
        Plan("", "check", "tests/tasks/tuning runs tuning runs together, and trials in trackers"),
    ),
    "docs/pipelines.md": (
        Plan("name: churn", "run", given=("pipeline",)),
        Plan("ebbflow run pipeline.yaml", "check", "takes minutes; tests/flows run pipelines"),
        Plan("cluster:\n  aws", "check", AWS),
        Plan("cluster:\n  existing", "check", DATABASE),
        Plan("ebbflow run --resume", "check", OURS),
        Plan("from ebbflow import", "check", PREFECT),
        Plan("elastic_jobs:", "check", OWN),
    ),
    "docs/elastic-executors.md": (
        Plan("from ebbflow import", "check", OURS),
        Plan("from dataclasses import dataclass", "run"),
        Plan("import numpy as np", "check", OWN),
        Plan("ebbflow elastic histogram.py", "check", OWN),
    ),
    "docs/fleet.md": (
        Plan("pip install 'prefect-ebbflow[aws]'", "check", AWS),
        Plan('source = "agreement', "run", given=("on-demand prices",)),
        Plan("[quotas]", "run", given=("fleet rules",)),
        Plan("from prefect import flow", "check", AWS),
    ),
    "docs/aws.md": (
        Plan("pip install", "check", INSTALL),
        Plan("[quotas]", "run", given=("fleet rules",)),
        Plan("", "check", AWS),
    ),
    "docs/airflow.md": (
        Plan("pip install -r", "check", INSTALL),
        Plan("", "check", AIRFLOW),
    ),
    "docs/prefect.md": (Plan("", "check", PREFECT),),
    "docs/security.md": (Plan("mkdir -m 700", "check", AWS),),
    "docs/tasks/query-losing-a-worker.md": (PAGE,),
    "docs/tasks/elastic-torchrun.md": (PAGE,),
    "docs/tasks/two-teams.md": (PAGE,),
    "docs/tasks/prefect-resume.md": (PAGE,),
    "docs/ledger.md": (
        Plan("sqlite3", "run", given=("ledger",)),
        Plan("ebbflow ledger verify", "run", given=("ledger",), after=("sqlite3",)),
        Plan("from ebbflow import", "run", given=("ledger",), after=("sqlite3",)),
        Plan("", "check", DATABASE),
    ),
    "docs/operations.md": (
        Plan("[teams.vision]", "run", given=("loop rules",)),
        Plan("make chaos", "check", EDITOR),
        Plan("", "check", DATABASE),
    ),
}


def plan_of(snippet: Snippet) -> Plan | None:
    """Return what becomes of a snippet; the first plan that fits counts."""
    return next((plan for plan in PLANS.get(snippet.page, ()) if snippet.text.startswith(plan.begins)), None)
