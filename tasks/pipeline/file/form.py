"""The format of a pipeline's file: every section and key, once, for the reader and for the JSON schema."""

from ebbflow.tasks.pipeline.file.faults import FAULTS
from ebbflow.tasks.pipeline.file.kinds import Duration, Flag, Items, Named, Number, Plain, Schema, Size, Text
from ebbflow.tasks.pipeline.file.sections import Key, Section
from ebbflow.tasks.pipeline.file.steps import ELASTIC, NAME, QUERY, TRAINING, TUNING

FORMAT = 1

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
            "Kind of the pool's nodes: spark for Spark workers, gpu for nodes with slots for training processes",
            required=True,
        ),
        Key("nodes", _COUNT, "Number of nodes at the start. Default: the value of min_nodes"),
        Key("min_nodes", _COUNT, "Minimum number of nodes at any time", 0, formerly=("least", "min")),
        Key(
            "max_nodes",
            _COUNT,
            "Maximum number of nodes at any time. Default: the value of nodes",
            formerly=("most", "max"),
        ),
        Key("base", _COUNT, "Number of nodes, of the minimum, that are on-demand at any time", 0),
        Key(
            "slots",
            Number(min=1, max=64, whole=True),
            "Number of GPUs of a node; CPU cores where the machine has no GPU",
            1,
            formerly=("gpus",),
        ),
        Key("cores", Number(min=1, max=512, whole=True), "Number of CPU cores of a Spark worker", 1),
        Key("memory", Size(), "Memory of a Spark worker, such as 2GiB. Default: 1 GiB", 1.0),
        Key(
            "cpus_per_slot",
            Number(above=0, max=512),
            "CPU cores of this machine behind each core or slot of a node; needs control groups. Default: no cap",
            formerly=("cpus",),
        ),
        Key(
            "memory_limit",
            Size(),
            "Maximum memory of all processes of a node, such as 2500MiB; needs control groups. Default: none",
            0.0,
        ),
        Key(
            "memory_lend",
            Size(),
            "Maximum memory that each node lends to other nodes, such as 512MiB. Default: none",
            0.0,
        ),
        Key(
            "market",
            Text("a market", choices=("spot", "on-demand")),
            "Simulated market that the nodes are launched from",
            "spot",
        ),
        Key("price", Number(min=0), "Simulated price of a node in dollars per hour", 0.0),
        Key(
            "on_demand_price",
            Number(min=0),
            "Simulated price of an on-demand node in dollars per hour. Default: the value of price",
        ),
        Key("instance_type", Text(), "Simulated instance type of the nodes. Default: local-POOL"),
        Key("zone", Text(), "Simulated availability zone of the nodes. Default: none"),
        Key(
            "provision_time",
            Duration(above=False),
            "Simulated time from the launch of a node until it is ready, as a duration. Default: 0s",
            0.0,
            formerly=("boot",),
        ),
    ),
    "A pool of nodes of this machine, each a process group.",
)

LOCAL = Section(
    (
        Key("pools", Named(POOL), "Pools of nodes by name", required=True),
        Key(
            "interruption_rate",
            Number(min=0),
            "Expected interruptions per node-hour. Default: learned from those observed",
            formerly=("hazard",),
        ),
        Key(
            "faults",
            Items(Text("a fault such as 20s:kill:gpu")),
            f"Faults to inject, [STEP+]TIME:VERB:TARGET[:ARGUMENT]: {FAULTS.forms}. "
            "A pool as NODE means one of its nodes, a leased one where there is any",
            (),
            formerly=("at",),
        ),
    ),
    "A cluster on this machine, up while the pipeline runs.",
)

_LEDGER = Key(
    "ledger",
    Text("a database's address"),
    "Address of the ledger's database, which may hold ${env:NAME}",
    required=True,
)
_MASTER = Key(
    "master",
    Text("a Spark master"),
    "Address of the Spark master that queries run on. Default: queries run on DuckDB on this machine",
)

AWS = Section(
    (
        Key(
            "terraform_output",
            Text("a path"),
            "Path of the file that terraform output -json wrote. Default: $EBBFLOW_TERRAFORM_OUTPUT",
        ),
        Key("prices", Text("a path"), "Path of a file with on-demand prices. Default: AWS's price list"),
        Key(
            "pools",
            Items(Text("the name of a pool"), min=1),
            "Names of the pools that trainings, tuning runs and elastic jobs run on",
            (),
        ),
        Key(
            "spark_pools",
            Items(Text("the name of a pool"), min=1),
            "Names of the Spark pools that queries run on; the address of their master is in terraform_output. "
            "Default: none",
            (),
        ),
        Key(
            "directory",
            Text("an s3:// address", r"s3a?://\S+"),
            "Directory of results and runs on S3",
            required=True,
        ),
        Key(
            "master",
            Text("a Spark master"),
            "Address of the Spark master that queries run on. Default: that of spark_pools; without any, queries run "
            "on DuckDB on this machine",
        ),
        Key(
            "ledger",
            Text("a database's address"),
            "Address of the ledger's database, which may hold ${env:NAME}",
            required=True,
        ),
        Key("name", Text("a name", NAME), "Name of the cluster in the ledger", "local"),
        Key(
            "loop",
            Flag(),
            "Whether this process runs the capacity loop if no other process is the leader",
            False,
        ),
    ),
    "A cluster on AWS that Terraform has created.",
)

EXISTING = Section(
    (
        Key(
            "ledger",
            Text("a database's address"),
            "Address of the ledger's database, which may hold ${env:NAME}",
            required=True,
        ),
        Key("name", Text("a name", NAME), "Name of the cluster in the ledger", "local"),
        Key(
            "directory",
            Text("a directory"),
            "Directory of results and runs that all nodes can reach. Default: a directory of this machine",
        ),
        Key("fleet", Text("a name", NAME), "Name of the local nodes that trainings run on"),
        Key(
            "master",
            Text("a Spark master"),
            "Address of the Spark master that queries run on. Default: queries run on DuckDB on this machine",
        ),
    ),
    "A cluster whose capacity loop is another process (ebbflow capacity start).",
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
        Key("local", LOCAL, "Nodes of this machine, up while the pipeline runs"),
        Key("aws", AWS, "A fleet on AWS that Terraform has created"),
        Key("existing", EXISTING, "A cluster whose capacity loop is already running"),
    ),
    "Cluster that the pipeline runs on.",
    one_of=(("local", "aws", "existing"),),
)

PIPELINE = Section(
    (
        Key("format", Number(min=FORMAT, max=FORMAT, whole=True), "Version of the file's format", FORMAT),
        Key(
            "name",
            Text("a name of letters, digits, _ and -", NAME),
            "Identifier of the pipeline; the IDs of its runs start with it",
            required=True,
        ),
        Key(
            "display_name",
            Text(),
            "Name of the pipeline in reports and on the terminal. Default: the value of name",
            formerly=("title",),
        ),
        Key(
            "parameters",
            Named(Text("a text or a number", empty=True)),
            "Parameters by name, used as ${parameters.NAME}; --set NAME=VALUE overrides one",
            {},
        ),
        Key("cluster", CLUSTER, "Cluster that the pipeline runs on", required=True),
        Key(
            "budget",
            Number(above=0),
            "Budget of the pipeline in dollars, over all its steps. Default: unlimited",
        ),
        Key("teams", Named(TEAM), "Teams that share the cluster, by name", {}),
        Key("queries", Named(QUERY), "SQL queries by name", {}),
        Key("trainings", Named(TRAINING), "Trainings by name", {}),
        Key(
            "tunings",
            Named(TUNING),
            "Tuning runs over hyperparameters, by name",
            {},
            formerly=("searches", "sweeps"),
        ),
        Key("elastic_jobs", Named(ELASTIC), "Jobs of elastic executors, by name", {}),
        Key("loop", LOOP, "Settings of the capacity loop"),
        Key("quotas", QUOTAS, "Quotas that no decision may exceed", formerly=("limits",)),
        Key(
            "store",
            Text("a directory"),
            "Directory of the queries' checkpoints, local or s3://. Default: ~/.cache/ebbflow/store",
        ),
    ),
    "Queries, trainings, tuning runs and elastic jobs of several teams on one elastic cluster.",
)


def json_schema() -> Schema:
    """Return the format as a JSON schema, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Ebbflow pipeline",
        "description": PIPELINE.help,
        **PIPELINE.schema(),
    }


__all__ = ["FORMAT", "PIPELINE", "json_schema"]
