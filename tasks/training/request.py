"""What a user asks for: one elastic training, checked before anything starts.

Commands are made of what it declares, so that every start of the command line imports it: what is heavy waits.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ebbflow.infra.errors import StorageError, TrainingError
from ebbflow.infra.storage import records
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.storage.scripts import check_script
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names, options
from ebbflow.planners.model.options import option
from ebbflow.planners.model.trainings import CanaryChoice, RetryChoice, RunSettings
from ebbflow.tasks.faults import Fault
from ebbflow.tasks.training.faults import FAULTS

if TYPE_CHECKING:
    from ebbflow.planners.training.plan import TrainingPlan

_FORMAT = 1
_FILE = "request.json"
_LAUNCHED = "run.json"  # what the launcher keeps
_NODES = re.compile(
    r"(?:local|aws:(?P<pool>[a-z](?:-?[a-z0-9])+(?:/[a-z0-9](?:-?[a-z0-9])*)?))"  # a gang is pool/gang
    r":(?P<nodes>[1-9][0-9]{0,3})(?:x(?P<slots>[1-9][0-9]{0,2}))?"
)


def default_folder() -> str:
    """Return where runs live unless asked otherwise."""
    return str(home() / "runs")


def slots_of(nodes: str, fleet: bool = False) -> dict[str, int]:
    """Return the slots of each node that ``local:3x2``, or with ``fleet`` ``aws:POOL:3x2`` too, names.

    Raises ``OptionError``.
    """
    found = _NODES.fullmatch(nodes.strip())
    if found is None or (found["pool"] and not fleet):
        also = ", or aws:POOL:NODESxSLOTS" if fleet else ""
        raise OptionError(f"nodes must be local:NODESxSLOTS, such as local:3x2{also}; got {nodes!r}")
    return {f"node-{n}": int(found["slots"] or 1) for n in range(1, int(found["nodes"]) + 1)}


@dataclass(frozen=True)
class TrainingRequest:
    """One training. Raises ``OptionError`` for a value that breaks its rule."""

    script: str  # path of a Python file
    arguments: tuple[str, ...] = ()  # of the script
    nodes: str = option(
        "local:1x1",
        "local:NODESxGPUS: nodes of this machine; aws:POOL:NODESxGPUS, aws:POOL/GANG:NODESxGPUS: of the cluster's "
        "fleet",
        metavar="NODES",
    )
    min_gpus: int = option(1, "With fewer than these it waits", min=1)
    max_gpus: int | None = option(None, "It uses no more", unless="all there are")
    title: str = option("", "What people call the run", flags="--name")
    id: str = option("", "Of the run, for its folder and --resume", unless="made up")
    folder: str = option(  # all nodes reach it
        default_folder,
        "Where runs live, DIR or s3://bucket/prefix",
        unless="runs/ in ~/.cache/ebbflow",
        metavar="DIR",
    )
    restart: bool = option(  # holds for one launch
        False,
        "With --resume: begin again at step 0 where none of the run's checkpoints can be used. Nothing is deleted",
        flags="--restart",
    )
    adaptive: bool = option(True, "Let the batch follow the goodput")
    canary: CanaryChoice = option("auto", "Whether a short trial comes first")
    canary_steps: int = option(20, min=1, command=False)
    checkpoint_every: float | None = option(
        None,
        unless="from measured costs and the hazard",
        in_file="between full checkpoints",
        unit="s",
        min=0,
    )
    keep: int = option(2, "Full checkpoints that are kept", min=1, max=1000)
    running_every: int = option(
        0,
        "Also write all parameters once in so many iterations, those that changed most first: it counts where all "
        "processes are lost at once",
        unless="not",
        in_file="iterations of a running checkpoint; 0: none",
        metavar="ITERATIONS",
        min=0,
        max=1e9,
    )
    running_fraction: float = option(0.125, "Of the parameters in each of those writes", above=0, max=1)
    hazard: float | None = option(
        None, "Losses expected per node-hour", unless="learnt from what happens", min=0
    )
    price: float = option(0.0, "Dollars per GPU-hour, for the account", min=0)
    failures: str | None = option(
        None, "Rules of your own before the failure table, TOML or YAML", metavar="FILE"
    )
    retries: RetryChoice = option(
        "by-class", "by-class: what a retry can mend; blind: three times whatever it was", metavar="HOW"
    )
    back_off: float = option(
        120.0, "before the first retry after a failure of the infrastructure", unit="s", min=0
    )
    wait_limit: float = option(3600.0, "to wait for nodes", unit="s", min=0)
    collective_timeout: float = option(60.0, "until a collective that hangs is an error", unit="s", above=0)
    grace: float = option(30.0, "to save and leave in", unit="s", above=0)
    save_within: float = option(
        120.0, "in which the save of the run's end is tried again before it is spilled", unit="s", min=0
    )
    spill: str = option(
        "",
        "Folder for a checkpoint that the run's own cannot take, DIR or s3://bucket/prefix",
        unless="/var/tmp, then the temporary folder, of the node that saves",  # noqa: S108  in words
        in_file="for a checkpoint that the run's folder cannot take, local or s3://",
        metavar="DIR",
    )
    cpus: float | None = option(None, "Processors behind one local GPU slot; needs control groups", above=0)
    fault: tuple[str, ...] = option(
        (),
        "Fault to inject, TIME:VERB[:TARGET][:ARGUMENT]: 20s:kill:node-2, 35s:notice:node-1:10s, 40s:pause:node-1, "
        "45s:resume:node-1, 50s:add:1, 60s:remove:1. Repeatable",
        metavar="FAULT",
    )
    json: str | None = option(None, "Write the report as JSON", metavar="FILE")
    report: str | None = option(None, "Write the report as one HTML page", metavar="FILE")

    def __post_init__(self) -> None:
        """Check everything that can be checked without starting anything."""
        from ebbflow.tasks.training.failures import failure_table

        check_script(self.script)
        if self.failures is not None:
            try:
                failure_table(self.failures)
            except OptionError as error:
                raise OptionError(f"failures: {error}") from error
        if self.id:
            names.RUN.check(self.id)
        if not self.folder.strip():
            raise OptionError("folder must name a folder, local or s3://; got an empty text")
        options.check(self)
        self.place  # noqa: B018  a wrong one is refused here
        if self.max_gpus is not None and self.max_gpus < self.min_gpus:
            raise OptionError(f"max_gpus must be >= min_gpus ({self.min_gpus}); got {self.max_gpus}")
        if self.gpus < self.min_gpus:
            raise OptionError(
                f"nodes {self.nodes} have {self.gpus} GPUs; min_gpus asks for {self.min_gpus} to begin with"
            )
        if self.spill:
            StorageLocation(self.spill)
        self.faults  # noqa: B018  parsed here so that a wrong one is refused
        if self.pool and not self.folder.startswith(("s3://", "s3a://")):
            raise OptionError(
                f"folder must be on S3, which all nodes of {self.nodes} reach; got {self.folder}"
            )
        if self.pool and (self.fault or self.cpus is not None):
            raise OptionError(f"fault and cpus are for nodes of this machine; got nodes {self.nodes}")

    @property
    def pool(self) -> str:
        """Return the fleet's pool that it runs on; empty for this machine."""
        found = _NODES.fullmatch(self.nodes.strip())
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
            grace=self.grace,
            checkpoint_every=self.checkpoint_every,
            keep=self.keep,
            running_every=self.running_every,
            running_fraction=self.running_fraction,
            adaptive=self.adaptive,
            collective_timeout=self.collective_timeout,
            save_within=self.save_within,
            spill=self.spill,
            restart=self.restart and resumes,
        )
        return TrainingPlan.of(
            settings,
            failure_table(self.failures),
            placement=placement,
            max_gpus=self.most_gpus,
            hazard=self.hazard,
            canary=self.canary,
            canary_steps=self.canary_steps,
            retries=self.retries,
            back_off=self.back_off,
            free=self.price == 0,  # processes of this machine wait for nobody and cost nothing but time
            resumes=resumes,
            seed=seed,
        )

    @property
    def run_folder(self) -> str:
        """Return the run's own folder, as its user names it."""
        return f"{self.folder.rstrip('/')}/{self.id}"

    @cached_property
    def place(self) -> StorageLocation:
        """Return the run's own folder."""
        return StorageLocation(self.folder).under(self.id)

    @property
    def recorded(self) -> bool:
        """Tell whether there is a run of this id. Raises ``StorageError``."""
        return self._has(_FILE)

    @property
    def launched(self) -> bool:
        """Tell whether a run of this id was ever launched. Raises ``StorageError``."""
        return self._has(_LAUNCHED)

    def _has(self, name: str) -> bool:
        with translated(f"look at {self.place}"):
            return self.place.is_file(name)

    def save(self) -> None:
        """Write the request into the run's folder, for ``--resume``. Raises ``StorageError``."""
        records.save(self.place.under(_FILE), {**asdict(self), "restart": False}, _FORMAT)

    @classmethod
    def load(cls, folder: str, run: str, changes: Mapping[str, Any] | None = None) -> "TrainingRequest":
        """Return the recorded request of ``run``, with ``changes``. Raises ``TrainingError`` or ``OptionError``."""
        names.RUN.check(run)
        where = StorageLocation(folder).under(f"{run}/{_FILE}")
        try:
            data = records.load(where, _FORMAT)
            known = {f.name for f in fields(cls)}
            values = {name: value for name, value in data.items() if name in known}
            values |= {"arguments": tuple(values["arguments"]), "fault": (), "folder": folder}
        except StorageError as error:
            raise TrainingError(f"there is no run {run!r} in {folder} to go on with: {error}") from error
        except records.OtherVersionError:
            raise TrainingError(
                f"run {run} was begun by another version of Ebbflow; go on with that one"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainingError(
                f"{where} is not what was written ({error}); bring it back from a copy, or name the script "
                f"with the options that it was begun with and another --id"
            ) from error
        return cls(**(values | dict(changes or {})))
