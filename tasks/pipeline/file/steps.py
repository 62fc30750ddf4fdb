"""The keys of a pipeline's steps, once, for the reader and for the JSON schema."""

from ebbflow.tasks.elastic.request import APPS, ElasticRequest
from ebbflow.tasks.pipeline.file.kinds import Deadline, Duration, Items, Named, Number, Plain, Text
from ebbflow.tasks.pipeline.file.option_keys import (
    ELASTIC_OPTIONS,
    QUERY_OPTIONS,
    TRAINING_OPTIONS,
    TRIAL_OPTIONS,
    TUNING_OPTIONS,
    keys_of,
)
from ebbflow.tasks.pipeline.file.sections import Key, Section
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.request import TuningRequest

ENGINES = ("auto", "spark", "duckdb")
NAME = r"[A-Za-z][A-Za-z0-9_-]{0,39}"
_VARIABLES = Named(
    Text("a text", empty=True), r"[A-Za-z_][A-Za-z0-9_]{0,99}", "a variable's name holds A-Z a-z 0-9 _"
)
_SCRIPT = Key(
    "script",
    Text("the path of a Python file"),
    "Path of the Python file that trains inside ElasticRun; relative to this file",
    required=True,
)
_ARGUMENTS = Key(
    "arguments",
    Items(Text("a text", empty=True)),
    "Arguments of the script, which may hold references to results, such as ${queries.NAME.path}. Default: none",
    (),
)
_ENVIRONMENT = Key(
    "environment",
    _VARIABLES,
    "Environment variables of the script's processes; ${env:NAME} is resolved at the start and never stored",
    {},
)

_STEP = (
    Key(
        "display_name",
        Text(),
        "Name of the step in reports and on the terminal. Default: the step's key",
        formerly=("title",),
    ),
    Key("team", Text(), "Team that the step belongs to; one of the keys of teams"),
    Key(
        "after",
        Items(Text("the name of a step")),
        "Names of steps that must have finished before this one starts, beside those it refers to",
        (),
    ),
    Key(
        "deadline",
        Deadline(),
        "Deadline of the step: a duration from the pipeline's start, such as 20m, or a timestamp with its offset. "
        "Nodes are launched to meet it. Default: no deadline",
    ),
    Key("weight", Number(above=0, max=1e6), "Weight of the step against other steps of its team", 1.0),
    Key(
        "attempts",
        Number(min=1, max=100, whole=True),
        "Maximum number of attempts; each resumes where the one before was lost",
        3,
        formerly=("retries",),
    ),
)
_BUDGET = Key(
    "budget",
    Number(above=0),
    "Budget of the step in dollars; no nodes are launched for it beyond. Default: unlimited",
)
_GPU_STEP = (
    *_STEP,
    _BUDGET,
    _SCRIPT,
    _ARGUMENTS,
    _ENVIRONMENT,
    Key(
        "gpus",
        Number(min=1, max=10_000, whole=True),
        "Requested number of GPUs; of a tuning run, of each trial",
        1,
    ),
    *keys_of(TrainingRequest, *TRIAL_OPTIONS),
)

QUERY = Section(
    (
        *_STEP,
        Key("sql", Text("a query"), "Text of the SQL query; exactly one of sql and file is given"),
        Key("file", Text("a path"), "Path of a file with the SQL query; relative to this file"),
        Key(
            "tables",
            Items(Text("a directory"), min=1),
            "Directories of Parquet tables, local or s3://, or results of other queries (${queries.NAME.path})",
        ),
        Key(
            "output",
            Text("a name of letters, digits, _ and -", NAME),
            "Table name of the result. Default: the step's key",
        ),
        Key(
            "engine",
            Text("an engine", choices=ENGINES),
            "Engine that runs the query: spark, duckdb, or auto: spark where the cluster has Spark workers, else "
            "duckdb. Default: auto",
        ),
        *keys_of(QueryRequest, *QUERY_OPTIONS),
        Key(
            "conf",
            Named(Text("a text", empty=True), r"[A-Za-z][A-Za-z0-9._-]{0,199}", "a Spark setting's name"),
            "Spark settings by name, such as spark.sql.shuffle.partitions",
            {},
        ),
    ),
    "A SQL query that is re-planned while it runs; its result is a directory of Parquet.",
    one_of=(("sql", "file"),),
)

TRAINING = Section(
    (
        *_GPU_STEP,
        Key(
            "min_gpus",
            Number(min=1, max=10_000, whole=True),
            "Minimum number of GPUs that the training runs on; with fewer it waits. Default: 1",
        ),
        Key(
            "max_gpus",
            Number(min=1, max=10_000, whole=True),
            "Maximum number of GPUs that the training runs on. Default: the value of gpus",
        ),
        *keys_of(TrainingRequest, *TRAINING_OPTIONS),
        Key(
            "failure_rules",
            Text("a path"),
            "Path of a file with failure rules that precede the built-in ones; relative to this file",
        ),
    ),
    "A PyTorch script that trains inside ElasticRun.",
)

TUNING = Section(
    (
        *_GPU_STEP,
        Key(
            "space",
            Named(Plain()),
            "Hyperparameters to tune, each with its range, such as lr: {log: [0.001, 1]}",
            required=True,
        ),
        Key("parallel", Number(min=1, max=1000, whole=True), "Maximum number of trials at once", 4),
        Key(
            "max_gpus",
            Number(min=1, max=10_000, whole=True),
            "Maximum number of GPUs of a trial while GPUs are free. Default: the value of gpus",
        ),
        *keys_of(TuningRequest, *TUNING_OPTIONS),
    ),
    "A tuning run over hyperparameters, whose trials are trainings.",
)

ELASTIC = Section(
    (
        *_STEP,
        _BUDGET,
        Key(
            "app",
            Text("an application"),
            f"Application: {', '.join(APPS)} (a regression, a clustering, a topic model), or FILE.py:CLASS "
            "in workdir, which the operator allows (--allow-workdir)",
            required=True,
        ),
        Key(
            "parameters",
            Named(Plain()),
            "Arguments of the class of FILE.py:CLASS by name, beside executors and iterations",
            {},
        ),
        Key(
            "input",
            Text("a path or an address"),
            "Input of the job, an .npz file or a Parquet table, or the result of a query (${queries.NAME.file}): "
            "columns of numbers, for mlr with a label, or document and word for lda; FILE.py:CLASS reads it itself",
        ),
        Key("label", Text("a column's name"), "Column of the class of each row, for mlr", "y"),
        Key(
            "workers",
            Number(min=1, max=10_000, whole=True),
            "Requested number of workers, each on one GPU or slot; fewer are used while there are no more",
            1,
        ),
        Key(
            "max_workers",
            Number(min=1, max=10_000, whole=True),
            "Maximum number of workers while slots are free. Default: the value of workers",
        ),
        *keys_of(ElasticRequest, *ELASTIC_OPTIONS),
        Key(
            "termination_grace",
            Duration(),
            "Time for a snapshot and the release of preempted slots",
            30.0,
        ),
    ),
    "A job of elastic executors, which move between workers as slots come and go; its result is an .npz file.",
)
