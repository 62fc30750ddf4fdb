"""What a user asks for: one elastic training, checked before anything starts.

Commands are made of what it declares, so that every start of the command line imports it: what is heavy waits.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ebbflow.infra.errors import StorageError, TrainingError
from ebbflow.infra.storage import records
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names, options, trainings
from ebbflow.planners.model.options import option
from ebbflow.planners.model.trainings import CommunicationChoice, PreflightChoice, RetryChoice, RunSettings
from ebbflow.tasks.faults import Fault
from ebbflow.tasks.training import checks
from ebbflow.tasks.training.faults import FAULTS
from ebbflow.tasks.training.node_names import NODES, slots_of

if TYPE_CHECKING:
    from ebbflow.planners.training.plan import TrainingPlan

_FORMAT = 2
_FILE = "request.json"
_LAUNCHED = "run.json"  # what the launcher keeps


def default_runs_dir() -> str:
    """Return where runs live unless asked otherwise."""
    return str(home() / "runs")


@dataclass(frozen=True)
class TrainingRequest:
    """One training. Raises ``OptionError`` for a value that breaks its rule."""

    script: str  # path of a Python file; with ``workdir`` relative to it
    arguments: tuple[str, ...] = ()  # of the script
    workdir: str = option(
        "",
        "Working directory of the script, unpacked once on each node: DIR, REPO@REF of a git repository on this "
        "machine, or git+URL@REF. The script's path is relative to it. Patterns in .ebbflowignore, or else "
        ".gitignore, exclude files",
        unless="the script alone, in the directory that its node runs in",
        metavar="SOURCE",
    )
    requirements: str = option(
        "",
        "Requirements file of pip: an environment with these packages on top of the nodes' own is built once on each "
        "node",
        unless="the nodes' own environment",
        metavar="FILE",
    )
    setup: str = option(
        "",
        "Shell command that runs once on each node, in the working directory and environment, before the script",
        unless="none",
        metavar="COMMAND",
    )
    env: tuple[str, ...] = option(
        (),
        "Environment variable of the script's processes, KEY=VALUE; KEY alone takes the value that it has when the "
        "run is launched, which is recorded nowhere. Repeatable",
        metavar="KEY[=VALUE]",
    )
    repack: bool = option(  # holds for one launch
        False,
        "With --resume: pack the working directory and requirements again. Default: the run keeps the code that it "
        "began with",
        flags="--repack",
    )
    nodes: str = option(
        "local:1x1",
        "Nodes with their GPUs: local:NODESxGPUS of this machine; aws:POOL:NODESxGPUS or aws:POOL/GANG:NODESxGPUS "
        "of the cluster's fleet",
        metavar="NODES",
    )
    min_gpus: int = option(1, "Minimum number of GPUs; with fewer the run waits", min=1)
    max_gpus: int | None = option(None, "Maximum number of GPUs", unless="all GPUs of the nodes")
    replica_gpus: int = option(
        1,
        "Number of GPUs that hold one replica of the model, for tensor parallelism and for replicas over several "
        "nodes: a run uses a multiple of it, and the GPUs left over stay idle",
        min=1,
    )
    name: str = option("", "Display name of the run", unless="none")
    run_id: str = option("", "Run ID", unless="generated")
    runs_dir: str = option(  # all nodes reach it
        default_runs_dir,
        "Directory of all runs, DIR or s3://bucket/prefix",
        unless="runs/ in ~/.cache/ebbflow",
        metavar="DIR",
    )
    restart: bool = option(  # holds for one launch
        False,
        "With --resume: restart at step 0 if none of the run's checkpoints is usable. Nothing is deleted. Default: "
        "fail",
        flags="--restart",
    )
    adaptive: bool = option(
        True,
        "Whether the batch size follows the goodput",
        unless="--adaptive",
        in_file="Whether the batch size follows the goodput",
    )
    communication: CommunicationChoice = option(
        "ddp",
        "Exchange of gradients: ddp is PyTorch's own; planned searches an order and a cut for each collective "
        "while the run trains, and falls back to ddp",
        unless="ddp",
        metavar="CHOICE",
    )
    script_hyperparameters: bool = False  # of the optimizer, not the checkpoint's
    own_checkpoints: bool = option(
        False,
        "Run any torchrun script unchanged: it saves and restores by itself, gets SIGTERM before it must leave, and "
        "status 0 means finished",
        flags="--own-checkpoints",
        in_file="Whether the script is any torchrun script, unchanged: it saves and restores by itself, gets SIGTERM "
        "before it must leave, and status 0 means finished",
    )
    step_pattern: str = option(
        "",
        "With --own-checkpoints: regular expression whose first group is the step in the output of rank 0",
        unless="the progress bars and step lines of common frameworks",
        in_file="With own_checkpoints: regular expression whose first group is the step in the output of rank 0",
        metavar="REGEX",
    )
    sync: trainings.SyncRequest = option(
        "allreduce",
        "Where gradients meet: in an all-reduce, at aggregators (service), or where it is cheaper (auto)",
        unless="allreduce",
        metavar="CHOICE",
    )
    recovery: trainings.RecoveryChoice = option(
        "auto",
        "What processes do when others fail, leave or join: in-place keeps them, restart starts all of them "
        "again, auto is in-place where the script and its options allow it",
        unless="auto",
        metavar="CHOICE",
    )
    aggregators: int = option(1, "With --sync service: number of aggregator processes", min=1, max=64)
    mirrors: int = option(0, "With --sync service: number of mirrors of a tensor", min=0, max=63, unless="0")
    mirror_every: int = option(
        1, "With --mirrors: rounds between two updates of mirrors", min=1, max=1_000_000, unless="each"
    )
    aggregation_cluster: str = option(
        "", "With --sync service: cluster of shared aggregators", unless="its own", metavar="NAME"
    )
    preflight: PreflightChoice = option("auto", "Preflight run before the training: auto, always or never")
    preflight_steps: int = option(20, "Steps of the preflight run", min=1, command=False)
    checkpoint_interval: float | None = option(
        None,
        "Time between two full checkpoints",
        unless="from the measured costs and the interruption rate",
        unit="s",
        min=0,
    )
    keep_checkpoints: int = option(2, "Number of full checkpoints to keep", min=1, max=1000)
    partial_checkpoint_interval: int = option(
        0,
        "Iterations in which partial checkpoints have saved every parameter once, those that changed most first; "
        "they count if all processes are lost at once",
        unless="no partial checkpoints",
        in_file="Iterations in which partial checkpoints have saved every parameter once; 0: no partial checkpoints",
        metavar="ITERATIONS",
        min=0,
        max=1e9,
    )
    partial_checkpoint_fraction: float = option(
        0.125, "Fraction of the parameters in each partial checkpoint", above=0, max=1
    )
    partial_checkpoint_memory: bool = option(
        False,
        "Keep partial checkpoints in memory that nodes lend first, and in the run's directory behind it",
        flags="--partial-checkpoint-memory",
    )
    interruption_rate: float | None = option(
        None, "Expected interruptions per node-hour", unless="learned from observed interruptions", min=0
    )
    price: float = option(0.0, "Price of a GPU-hour for cost accounting, dollars", unless="0", min=0)
    failure_rules: str | None = option(
        None,
        "TOML or YAML file of rules that are tried before the built-in failure table",
        unless="none",
        metavar="FILE",
    )
    retry_policy: RetryChoice = option(
        "by-class",
        "Retry policy: by-class retries failures that a retry can recover; blind retries three times",
        unless="by-class",
        metavar="POLICY",
    )
    retry_backoff: float = option(
        120.0, "Delay before the first retry after an infrastructure failure", unit="s", min=0
    )
    node_timeout: float = option(3600.0, "Maximum time to wait for nodes", unit="s", min=0)
    collective_timeout: float = option(
        60.0, "Timeout of a collective operation, after which it is an error", unit="s", above=0
    )
    termination_grace: float = option(
        30.0, "Time that processes have to save and exit after a stop request", unit="s", above=0
    )
    final_save_timeout: float = option(
        120.0,
        "Time in which a failed final save is retried before the checkpoint goes to --spill-dir, and in which "
        "checkpoints that cannot be read at the start are tried again",
        in_file="Time in which a failed final save is retried before the checkpoint goes to spill_dir, and in which "
        "checkpoints that cannot be read at the start are tried again",
        unit="s",
        min=0,
    )
    spill_dir: str = option(
        "",
        "Directory for a checkpoint that the run's directory cannot take, DIR or s3://bucket/prefix",
        unless="/var/tmp, then the temporary directory, of the saving node",  # noqa: S108  in words
        metavar="DIR",
    )
    cpus_per_slot: float | None = option(
        None, "CPU cores of each local GPU slot; needs control groups", unless="no limit", above=0
    )
    fault: tuple[str, ...] = option(
        (),
        "Fault to inject, TIME:VERB[:TARGET][:ARGUMENT]: 20s:kill:node-2, 35s:notice:node-1:10s, 40s:pause:node-1, "
        "45s:resume:node-1, 50s:add:1, 60s:remove:1. Repeatable",
        metavar="FAULT",
    )
    track: tuple[str, ...] = option(
        (),
        "Experiment tracker that shows the run, over all its restarts, as one: mlflow:DIR#EXPERIMENT, "
        "mlflow:URI#EXPERIMENT, or wandb:PROJECT (offline without a key). Repeatable",
        unless="no tracker",
        in_file="Experiment trackers that show the run, over all its restarts, as one: "
        "mlflow:DIR#EXPERIMENT, mlflow:URI#EXPERIMENT, or wandb:PROJECT (offline without a key)",
        metavar="TRACKER",
    )
    metrics: str = option(
        "",
        "Serve /metrics for Prometheus and /healthz at HOST:PORT while it runs, such as 127.0.0.1:9465",
        unless="not served",
        metavar="HOST:PORT",
    )
    report: tuple[str, ...] = option(
        (),
        "Report file: .html is a page, .json is data. Repeatable",
        unless="no report",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        """Check everything that can be checked without starting anything."""
        checks.check_code(self)
        object.__setattr__(self, "track", checks.checked_trackers(self.track))
        options.check_metrics(self.metrics)
        checks.check_failure_rules(self)
        if self.run_id:
            names.RUN.check(self.run_id)
        if not self.runs_dir.strip():
            raise OptionError("runs_dir must name a directory, local or s3://; got an empty text")
        options.check(self)
        object.__setattr__(self, "report", options.check_report_paths(self.report))
        self.place  # noqa: B018  a wrong one is refused here
        checks.check_gpus(self)
        checks.check_saving(self)
        self.faults  # noqa: B018  parsed here so that a wrong one is refused
        checks.check_own_checkpoints(self)
        checks.check_sync(self)
        checks.check_recovery(self)
        checks.check_pool(self)

    @property
    def pool(self) -> str:
        """Return the fleet's pool that it runs on; empty for this machine."""
        found = NODES.fullmatch(self.nodes.strip())
        return (found["pool"] or "") if found else ""

    @property
    def placement(self) -> dict[str, int]:
        """Return the slots of each node to begin with."""
        return slots_of(self.nodes, fleet=True)

    @property
    def gpus(self) -> int:
        """Return the slots of all nodes."""
        return sum(self.placement.values())

    @property
    def most_gpus(self) -> int:
        """Return the most slots that the run may use; infinite ambitions end at 10,000."""
        return 10_000 if self.max_gpus is None else self.max_gpus

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Return the scripted faults in order of time."""
        return tuple(sorted((FAULTS.parse(text) for text in self.fault), key=lambda fault: fault.after))

    def plan(self, placement: Mapping[str, int], *, resumes: bool, seed: int = 0) -> "TrainingPlan":
        """Return what is decided of the run before it begins on ``placement`` (node -> slots).

        Raises ``OptionError`` for a failure table that cannot be read.
        """
        from ebbflow.planners.training.plan import TrainingPlan
        from ebbflow.tasks.training.failures import failure_table

        settings = RunSettings(
            termination_grace=self.termination_grace,
            checkpoint_interval=self.checkpoint_interval,
            keep_checkpoints=self.keep_checkpoints,
            partial_checkpoint_interval=self.partial_checkpoint_interval,
            partial_checkpoint_fraction=self.partial_checkpoint_fraction,
            partial_checkpoint_memory=self.partial_checkpoint_memory,
            adaptive=self.adaptive,
            script_hyperparameters=self.script_hyperparameters,
            communication=self.communication,
            own_checkpoints=self.own_checkpoints,
            step_pattern=self.step_pattern,
            sync="service" if self.sync == "service" else "allreduce",
            recovery="restart" if self.pool else self.recovery,
            aggregators=self.aggregators,
            mirrors=self.mirrors,
            mirror_every=self.mirror_every,
            aggregation_cluster=self.aggregation_cluster,
            collective_timeout=self.collective_timeout,
            final_save_timeout=self.final_save_timeout,
            spill_dir=self.spill_dir,
            restart=self.restart and resumes,
        )
        return TrainingPlan.of(
            settings,
            failure_table(self.failure_rules),
            placement=placement,
            max_gpus=self.most_gpus,
            hazard=self.interruption_rate,
            preflight="never" if self.own_checkpoints else self.preflight,  # it counts reported steps
            preflight_steps=self.preflight_steps,
            retry_policy=self.retry_policy,
            retry_backoff=self.retry_backoff,
            free=self.price == 0,  # processes of this machine wait for no other job and cost nothing but time
            resumes=resumes,
            seed=seed,
            sync=self.sync,
            replica=self.replica_gpus,
        )

    @property
    def run_directory(self) -> str:
        """Return the run's own directory, as its user names it."""
        return f"{self.runs_dir.rstrip('/')}/{self.run_id}"

    @cached_property
    def place(self) -> StorageLocation:
        """Return the run's own directory."""
        return StorageLocation(self.runs_dir).under(self.run_id)

    @property
    def recorded(self) -> bool:
        """Return whether there is a run of this id. Raises ``StorageError``."""
        return self._has(_FILE)

    @property
    def launched(self) -> bool:
        """Return whether a run of this id was ever launched. Raises ``StorageError``."""
        return self._has(_LAUNCHED)

    def _has(self, name: str) -> bool:
        with translated(f"read {self.place}"):
            return self.place.is_file(name)

    def save(self) -> None:
        """Write the request into the run's directory, for ``--resume``. Raises ``StorageError``."""
        records.save(self.place.under(_FILE), {**asdict(self), "restart": False, "repack": False}, _FORMAT)

    @classmethod
    def load(cls, runs_dir: str, run: str, changes: Mapping[str, Any] | None = None) -> "TrainingRequest":
        """Return the recorded request of ``run``, with ``changes``. Raises ``TrainingError`` or ``OptionError``."""
        names.RUN.check(run)
        where = StorageLocation(runs_dir).under(f"{run}/{_FILE}")
        try:
            data = records.load(where, _FORMAT)
            known = {f.name for f in fields(cls)}
            values = {name: value for name, value in data.items() if name in known}
            values |= {"arguments": tuple(values["arguments"]), "fault": (), "runs_dir": runs_dir}
            values |= {name: tuple(values.get(name, ())) for name in ("report", "env", "track")}
        except StorageError as error:
            raise TrainingError(f"there is no run {run!r} in {runs_dir} to resume: {error}") from error
        except records.OtherVersionError:
            raise TrainingError(
                f"run {run} was started by another version of Ebbflow; resume it with that version"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainingError(
                f"{where} is damaged ({error}); restore it from a backup, or name the script "
                f"with its options and another --id"
            ) from error
        return cls(**(values | dict(changes or {})))
