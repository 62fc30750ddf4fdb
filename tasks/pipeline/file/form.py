"""The format of a pipeline's file: every section and key, once, for the reader and for the JSON schema."""

from ebbflow.tasks.pipeline.file.kinds import Duration, Flag, Items, Named, Number, Plain, Schema, Size, Text
from ebbflow.tasks.pipeline.file.sections import Key, Section
from ebbflow.tasks.pipeline.file.steps import NAME, QUERY, TRAINING, TUNING

FORMAT = 1

TEAM = Section(
    (
        Key("weight", Number(above=0, max=1e6), "of its apps against those of other teams", 1.0),
        Key("gpus", Number(min=0, max=1e6, whole=True), "that its apps hold together at most"),
        Key("dollars_per_hour", Number(min=0), "that its leases cost together at most"),
        Key("budget", Number(min=0), "dollars of all its apps"),
    ),
    "Who shares the cluster.",
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
        Key("hazard", Number(min=0), "losses expected per node-hour; learnt unless given"),
        Key(
            "at",
            Items(Text("a fault such as 20s:kill:gpu")),
            "faults on purpose: [STEP+]TIME:kill:NODE or [STEP+]TIME:notice:NODE:TIME; NODE may be a pool",
            (),
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
            "config",
            Text("a path"),
            "Path of the file that terraform output -json wrote. Default: $EBBFLOW_CONFIG",
        ),
        Key("prices", Text("a path"), "Path of a file with on-demand prices. Default: AWS's price list"),
        Key(
            "pools",
            Items(Text("the name of a pool"), min=1),
            "Names of the pools that trainings run on",
            required=True,
        ),
        Key(
            "folder",
            Text("an s3:// address", r"s3a?://\S+"),
            "Directory of results and runs on S3",
            required=True,
        ),
        Key(
            "master",
            Text("a Spark master"),
            "Address of the Spark master that queries run on. Default: queries run on DuckDB on this machine",
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
            "folder",
            Text("a folder"),
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
        Key("boot", Duration(above=False), "from asking for a node to work on it"),
        Key("wait", Duration(above=False), "Time that an app waits before nodes are launched for it"),
        Key("idle", Duration(above=False), "that nodes are not needed before they leave"),
        Key("hold", Duration(above=False), "after a change before nodes leave"),
        Key("reserve", Number(min=1, max=100), "times the expected time, for deadlines"),
    ),
    "When nodes are launched and terminated.",
)

LOOP = Section(
    (
        Key(
            "policy",
            Text(),
            "as ebbflow simulate training lists them, or of an installed package; MODULE:NAME with --allow-policy",
            "rho-bounded",
        ),
        Key("options", Named(Plain()), "of the policy", {}),
        Key("lease", Duration(), "that a lease lasts unless the policy says how long"),
        Key("interval", Duration(), "between auctions when nothing happens"),
        Key("leave", Duration(above=False), "before a notice's deadline, by which GPUs are free"),
        Key("grace", Duration(above=False), "Time to save and release a GPU that is preempted"),
        Key("silent", Duration(), "Heartbeat timeout, after which an app is marked lost"),
        Key("scaling", SCALING, "When nodes are launched and terminated"),
    ),
    "How the capacity loop decides.",
)

_POOL_LIMITS = Section(
    tuple(
        Key(name, Number(min=0, max=1e6, whole=True), said)
        for name, said in (
            ("least", "nodes"),
            ("most", "nodes"),
            ("on_demand_least", "nodes that are on-demand"),
            ("on_demand_most", "nodes that are on-demand"),
        )
    )
)

LIMITS = Section(
    (
        Key("dollars_per_hour", Number(above=0), "of the whole cluster"),
        Key("dollars_per_run", Number(above=0), "of one app"),
        Key("nodes", Number(min=0, max=1e6, whole=True), "of all pools"),
        Key("grow", Number(min=1, max=1e6, whole=True), "nodes that one decision adds to a pool"),
        Key("shrink", Number(min=1, max=1e6, whole=True), "nodes that one decision takes from a pool"),
        Key("pools", Named(_POOL_LIMITS), "of single pools", {}),
    ),
    "What no decision may exceed.",
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
        Key("loop", LOOP, "Settings of the capacity loop"),
        Key("limits", LIMITS, "Quotas that no decision may exceed"),
        Key(
            "store",
            Text("a folder"),
            "Directory of the queries' checkpoints, local or s3://. Default: ~/.cache/ebbflow/store",
        ),
    ),
    "Queries, trainings and tuning runs of several teams on one elastic cluster.",
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
