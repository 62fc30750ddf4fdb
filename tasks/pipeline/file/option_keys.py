"""Keys of steps that are options of the requests which steps become, as those declare them."""

from ebbflow.planners.model.options import Declared, declared
from ebbflow.tasks.pipeline.file.kinds import MISSING, Duration, Flag, Items, Kind, Number, Text
from ebbflow.tasks.pipeline.file.sections import Key

# what a step may say of them
QUERY_OPTIONS = (
    "catalog", "at", "planner", "materialize", "dialect", "reuse", "hysteresis", "interruption_rate", "calibrate",
    "executor_memory", "verify",
)  # fmt: skip
TRIAL_OPTIONS = (
    "workdir", "requirements", "setup",
    "adaptive", "checkpoint_interval", "termination_grace", "final_save_timeout", "spill_dir",
)  # fmt: skip
TRAINING_OPTIONS = (
    "keep_checkpoints", "partial_checkpoint_interval", "partial_checkpoint_fraction", "partial_checkpoint_memory",
    "interruption_rate",
    "communication", "own_checkpoints", "step_pattern", "sync", "aggregators", "mirrors",
    "mirror_every", "aggregation_cluster", "preflight",
    "retry_policy", "retry_backoff", "node_timeout",
    "collective_timeout", "track",
)  # fmt: skip
TUNING_OPTIONS = (
    "metric", "maximize", "trials", "allocate", "epochs", "pruner", "reduction_factor", "min_epochs",
    "population_interval", "sampler", "seed", "study", "heartbeat_timeout", "track",
)  # fmt: skip

ELASTIC_OPTIONS = ("classes", "executors", "iterations", "staleness", "workdir")


def keys_of(request: type, *names: str) -> tuple[Key, ...]:
    """Return the keys of these options of a request's dataclass."""
    options = declared(request)
    return tuple(_key(options[name]) for name in names)


def _key(one: Declared) -> Key:
    said = one.option.in_file or one.option.help
    nothing = one.default in (None, "", ())
    if nothing and one.option.unless:
        said = f"{said}. Default: {one.option.unless}"
    return Key(one.name, _kind(one), said, MISSING if nothing else one.default)


def _kind(one: Declared) -> Kind:
    said = one.option
    if one.many:
        return Items(Text("a text"))
    if one.choices:
        return Text("a word", choices=one.choices)
    if one.kind is bool:
        return Flag()
    if said.unit == "s":
        return Duration()
    if one.kind in (int, float):
        bounds = {name: bound for name in ("min", "max") if (bound := getattr(said, name)) is not None}
        return Number(**bounds, above=said.above, whole=one.kind is int)
    return Text({"DIR": "a directory", "FILE": "a path"}.get(said.metavar, "a text"))
