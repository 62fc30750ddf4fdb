"""The format of a pipeline's file: every section and key, once, for the reader and for the JSON schema."""

from ebbflow.tasks.pipeline.file.faults import FAULTS
from ebbflow.tasks.pipeline.file.kinds import (
    Deadline,
    Duration,
    Flag,
    Items,
    Key,
    Named,
    Number,
    Plain,
    Schema,
    Section,
    Size,
    Text,
)
from ebbflow.tasks.pipeline.file.option_keys import (
    QUERY_OPTIONS,
    SEARCH_OPTIONS,
    TRAINING_OPTIONS,
    TRIAL_OPTIONS,
    keys_of,
)
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.request import TuningRequest

FORMAT = 1
STEPS = ("queries", "trainings", "searches")
ENGINES = ("spark", "duckdb")

_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,39}"
_VARIABLES = Named(
    Text("a text", empty=True), r"[A-Za-z_][A-Za-z0-9_]{0,99}", "a variable's name holds A-Z a-z 0-9 _"
)
_SCRIPT = Key(
    "script", Text("the path of a Python file"), "a Python file; relative to this one", required=True
)
_ARGUMENTS = Key("arguments", Items(Text("a text", empty=True)), "of the script; may refer to results", ())
_ENVIRONMENT = Key(
    "environment", _VARIABLES, "for the script's processes; ${env:NAME} is never written down", {}
)

_STEP = (
    Key("title", Text(), "what people call it"),
    Key("team", Text(), "whose it is; one of teams"),
    Key("after", Items(Text("the name of a step")), "steps that must have finished", ()),
    Key(
        "deadline",
        Deadline(),
        "nodes are rented to keep it; a duration from the pipeline's beginning, or a moment",
    ),
    Key("weight", Number(above=0, max=1e6), "beside others of its team", 1.0),
    Key("attempts", Number(min=1, max=100, whole=True), "runs of it, lost ones gone on with", 3),
)
_GPU_STEP = (
    *_STEP,
    Key("budget", Number(above=0), "dollars; nodes beyond it are not rented for it"),
    _SCRIPT,
    _ARGUMENTS,
    _ENVIRONMENT,
    Key("gpus", Number(min=1, max=10_000, whole=True), "wanted; of a search: of each trial", 1),
    *keys_of(TrainingRequest, *TRIAL_OPTIONS),
)

QUERY = Section(
    (
        *_STEP,
        Key("sql", Text("a query"), "the query itself"),
        Key("file", Text("a path"), "or a file that holds it; relative to this one"),
        Key(
            "tables",
            Items(Text("a folder"), min=1),
            "folders of Parquet tables, local or s3://, or results of other queries",
        ),
        Key(
            "output",
            Text("a name of letters, digits, _ and -", _NAME),
            "the result's name as a table; the step's name unless given",
        ),
        Key(
            "engine",
            Text("an engine", choices=ENGINES),
            "spark where the cluster has Spark workers, else duckdb",
        ),
        *keys_of(QueryRequest, *QUERY_OPTIONS),
        Key(
            "conf",
            Named(Text("a text", empty=True), r"[A-Za-z][A-Za-z0-9._-]{0,199}", "a Spark setting's name"),
            "further Spark settings",
            {},
        ),
    ),
    "A SQL query that re-plans itself; its result is a folder of Parquet.",
    one_of=(("sql", "file"),),
)

TRAINING = Section(
    (
        *_GPU_STEP,
        Key("min_gpus", Number(min=1, max=10_000, whole=True), "with fewer it waits; 1 unless given"),
        Key(
            "max_gpus",
            Number(min=1, max=10_000, whole=True),
            "it uses no more; as many as gpus unless given",
        ),
        *keys_of(TrainingRequest, *TRAINING_OPTIONS),
        Key(
            "failure_rules",
            Text("a path"),
            "file of rules that are tried before the built-in failure table; relative to this file",
        ),
    ),
    "A PyTorch script that trains inside ElasticRun.",
)

SEARCH = Section(
    (
        *_GPU_STEP,
        Key("space", Named(Plain()), "a parameter a line, such as lr: {log: [0.001, 1]}", required=True),
        Key("parallel", Number(min=1, max=1000, whole=True), "trials at once at most", 4),
        Key(
            "max_gpus",
            Number(min=1, max=10_000, whole=True),
            "of a trial when others leave some; gpus unless given",
        ),
        *keys_of(TuningRequest, *SEARCH_OPTIONS),
    ),
    "A search over hyper-parameters, whose trials are trainings.",
)

TEAM = Section(
    (Key("weight", Number(above=0, max=1e6), "Weight of the team's apps against those of other teams", 1.0),),
    "A team that shares the cluster.",
)

_COUNT = Number(min=0, max=64, whole=True)

POOL = Section(
    (
        Key(
            "kind",
            Text("a kind", choices=("spark", "gpu")),
            "Kind of the nodes: spark (workers for queries) or gpu (for trainings)",
            required=True,
        ),
        Key("nodes", _COUNT, "Initial number of nodes. Default: min_nodes"),
        Key("min_nodes", _COUNT, "Minimum number of nodes", 0),
        Key("max_nodes", _COUNT, "Maximum number of nodes. Default: nodes"),
        Key("base", _COUNT, "Number of on-demand nodes among them", 0),
        Key(
            "slots",
            Number(min=1, max=64, whole=True),
            "GPUs of a node; CPU cores where the machine has no GPUs",
            1,
        ),
        Key("cores", Number(min=1, max=512, whole=True), "CPU cores of a node", 1),
        Key("memory", Size(), "Memory of a node", 1.0),
        Key(
            "cpus_per_slot",
            Number(above=0, max=512),
            "CPU cores of this machine behind one core or slot; needs control groups",
        ),
        Key(
            "market",
            Text("a market", choices=("spot", "on-demand")),
            "Simulated market of the nodes",
            "spot",
        ),
        Key("price", Number(min=0), "Simulated price in dollars per node-hour", 0.0),
        Key(
            "on_demand_price",
            Number(min=0),
            "Simulated on-demand price in dollars per node-hour. Default: price",
        ),
        Key("instance_type", Text(), "Simulated instance type. Default: local-POOL"),
        Key("zone", Text(), "Simulated availability zone"),
        Key(
            "provision_time",
            Duration(above=False),
            "Simulated time from the request of a node to its start",
            0.0,
        ),
    ),
    "Node pool of this machine; each node is a group of processes.",
)

LOCAL = Section(
    (
        Key("pools", Named(POOL), "Node pools of this machine", required=True),
        Key("hazard", Number(min=0), "losses expected per node-hour; learnt unless given"),
        Key(
            "faults",
            Items(Text("a fault such as 20s:kill:gpu")),
            f"Faults to inject, [STEP+]TIME:VERB:TARGET[:ARGUMENT]: {FAULTS.forms}. "
            "A pool as NODE means one of its nodes, a leased one where there is any",
            (),
        ),
    ),
    "A cluster on this machine, up while the pipeline runs.",
)

AWS = Section(
    (
        Key(
            "terraform_output",
            Text("a path"),
            "File written by terraform output -json; $EBBFLOW_TERRAFORM_OUTPUT unless given",
        ),
        Key("prices", Text("a path"), "a file of on-demand prices; else AWS's own list"),
        Key("pools", Items(Text("the name of a pool"), min=1), "that trainings run on", required=True),
        Key("folder", Text("an s3:// address", r"s3a?://\S+"), "where results and runs live", required=True),
        Key("master", Text("a Spark master"), "that queries run on; without one they run on DuckDB here"),
        Key("ledger", Text("a database's address"), "may hold ${env:NAME}", required=True),
        Key("name", Text("a name", _NAME), "of the cluster in that ledger", "local"),
        Key("loop", Flag(), "whether this process runs the capacity loop, where none leads", False),
    ),
    "The cluster that Terraform has made.",
)

EXISTING = Section(
    (
        Key("ledger", Text("a database's address"), "may hold ${env:NAME}", required=True),
        Key("name", Text("a name", _NAME), "of the cluster in that ledger", "local"),
        Key("folder", Text("a folder"), "where results and runs live, which all nodes reach"),
        Key("fleet", Text("a name", _NAME), "Name of the local fleet (ebbflow local) that trainings run on"),
        Key("master", Text("a Spark master"), "that queries run on; without one they run on DuckDB here"),
    ),
    "A cluster whose capacity loop runs elsewhere (ebbflow capacity start).",
)

SCALING = Section(
    (
        Key(
            "provision_time",
            Duration(above=False),
            "Time from the launch request of a node to the first work on it",
        ),
        Key(
            "scale_out_after",
            Duration(above=False),
            "Time that an app is pending before nodes are launched for it",
        ),
        Key("scale_in_idle", Duration(above=False), "Time that nodes are unneeded before they are drained"),
        Key(
            "cooldown", Duration(above=False), "Time after a change of a pool's size before its next scale-in"
        ),
        Key(
            "scale_tolerance",
            Number(min=0, max=0.99),
            "Share of a pool's nodes; a smaller scale-in is not made",
        ),
        Key(
            "deadline_safety_factor",
            Number(min=1, max=100),
            "Factor on the expected time of work with a deadline",
        ),
        Key(
            "min_marginal_goodput",
            Number(above=0, max=1),
            "Share of a single GPU's goodput that each provisioned GPU must add; only requests count unless given",
        ),
    ),
    "When nodes are launched and terminated.",
)

LOOP = Section(
    (
        Key(
            "policy",
            Text(),
            "Scheduling policy: a name of ebbflow simulate training, of an installed package, or MODULE:NAME with "
            "--allow-policy",
            "rho-bounded",
        ),
        Key("options", Named(Plain()), "Options of the policy", {}),
        Key("lease_duration", Duration(), "Duration of a lease unless the policy sets it"),
        Key("auction_interval", Duration(), "Maximum time between auctions"),
        Key("debounce", Duration(above=False), "Time in which changes are gathered before an auction"),
        Key(
            "drain_lead",
            Duration(above=False),
            "Time before a node ends by which its GPUs are free",
        ),
        Key(
            "termination_grace",
            Duration(above=False),
            "Time to save a checkpoint and release a preempted GPU",
        ),
        Key("heartbeat_timeout", Duration(), "Time without a heartbeat after which an app is marked lost"),
        Key(
            "plan_timeout",
            Duration(above=False),
            "Time that a plan waits for GPUs beyond the termination grace",
        ),
        Key(
            "unsaved_work",
            Duration(above=False),
            "Unsaved work above which an app is protected from preemption",
        ),
        Key("preempt_exempt", Duration(above=False), "Maximum time of such a protection"),
        Key(
            "deadline_priority_boost_max",
            Number(min=1, max=1000),
            "Maximum factor on the weight of an app near its deadline",
        ),
        Key("scaling", SCALING, "When nodes are launched and terminated"),
    ),
    "How the capacity loop decides.",
)

_POOL_QUOTA = Section(
    tuple(
        Key(name, Number(min=0, max=1e6, whole=True), said)
        for name, said in (
            ("min_nodes", "Minimum number of nodes of the pool"),
            ("max_nodes", "Maximum number of nodes of the pool"),
            ("min_on_demand_nodes", "Minimum number of on-demand nodes of the pool"),
            ("max_on_demand_nodes", "Maximum number of on-demand nodes of the pool"),
        )
    )
)

_TEAM_QUOTA = Section(
    (
        Key(
            "gpus",
            Number(min=0, max=1e6, whole=True),
            "Maximum number of GPUs that the team's apps hold together",
        ),
        Key("dollars_per_hour", Number(above=0), "Maximum dollars per hour of the team's leases together"),
        Key("budget", Number(min=0), "Maximum dollars of all apps of the team"),
    )
)

QUOTAS = Section(
    (
        Key("dollars_per_hour", Number(above=0), "Maximum dollars per hour of the whole cluster"),
        Key("dollars_per_run", Number(above=0), "Maximum dollars of one app"),
        Key("nodes", Number(min=0, max=1e6, whole=True), "Maximum number of nodes of all pools"),
        Key(
            "grow",
            Number(min=1, max=1e6, whole=True),
            "Maximum number of nodes that one decision adds to a pool",
        ),
        Key(
            "shrink",
            Number(min=1, max=1e6, whole=True),
            "Maximum number of nodes that one decision takes from a pool",
        ),
        Key("pools", Named(_POOL_QUOTA), "Quotas of single pools", {}),
        Key("teams", Named(_TEAM_QUOTA), "Quotas of single teams", {}),
    ),
    "Quotas that no decision exceeds.",
)

CLUSTER = Section(
    (
        Key("local", LOCAL, "nodes of this machine"),
        Key("aws", AWS, "a fleet on AWS"),
        Key("existing", EXISTING, "a cluster whose loop runs already"),
    ),
    "Where everything runs.",
    one_of=(("local", "aws", "existing"),),
)

PIPELINE = Section(
    (
        Key("format", Number(min=FORMAT, max=FORMAT, whole=True), "of this file", FORMAT),
        Key("name", Text("a name of letters, digits, _ and -", _NAME), "of the pipeline", required=True),
        Key("title", Text(), "what people call it"),
        Key(
            "parameters",
            Named(Text("a text or a number", empty=True)),
            "for ${parameters.NAME}; --set changes them",
            {},
        ),
        Key("cluster", CLUSTER, "where everything runs", required=True),
        Key("budget", Number(above=0), "dollars of all apps of the pipeline"),
        Key("teams", Named(TEAM), "Teams that share the cluster", {}),
        Key("queries", Named(QUERY), "SQL queries", {}),
        Key("trainings", Named(TRAINING), "trainings", {}),
        Key("searches", Named(SEARCH), "searches over hyper-parameters", {}),
        Key("loop", LOOP, "Settings of the capacity loop"),
        Key("quotas", QUOTAS, "Quotas that no decision exceeds"),
        Key("store", Text("a folder"), "where queries' checkpoints live, local or s3://"),
    ),
    "Queries, trainings and searches of several teams on one elastic cluster.",
)


def json_schema() -> Schema:
    """Return the format as a JSON schema, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Ebbflow pipeline",
        "description": PIPELINE.help,
        **PIPELINE.schema(),
    }


__all__ = ["FORMAT", "PIPELINE", "STEPS", "json_schema"]
