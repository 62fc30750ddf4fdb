"""What a user asks for: one elastic training, checked before anything starts."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from ebbflow.infra.errors import StorageError, TrainingError
from ebbflow.infra.storage import records
from ebbflow.infra.storage.files import home
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import Place
from ebbflow.infra.storage.scripts import check_script
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.plan import CanaryChoice, RetryChoice, TrainingPlan
from ebbflow.tasks.faults import Fault
from ebbflow.tasks.training.failures import failure_table
from ebbflow.tasks.training.faults import FAULTS

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
    id: str = ""  # of the run; empty: made of the script's name and the time
    title: str = ""  # what people call it
    folder: str = field(default_factory=default_folder)  # of all runs, local or s3://; all nodes reach it
    nodes: str = "local:1x1"  # local:NODESxSLOTS, aws:POOL:NODESxSLOTS or aws:POOL/GANG:NODESxSLOTS
    min_gpus: int = 1
    max_gpus: int | None = None  # None: all there are
    adaptive: bool = True  # whether the batch may change
    checkpoint_every: float | None = None  # s; None: from measured costs and the hazard
    keep: int = 2  # full checkpoints
    running_every: int = 0  # iterations in which a running checkpoint is written once; 0: there is none
    running_fraction: float = 0.125  # of the parameters in each of its saves
    hazard: float | None = None  # losses expected per node-hour; None: learnt from what happens
    collective_timeout: float = 60.0  # s
    grace: float = 30.0  # s to save and leave in after a stop
    canary: CanaryChoice = "auto"
    canary_steps: int = 20
    price: float = 0.0  # dollars per GPU-hour
    failures: str | None = None  # a failure table of one's own, TOML or YAML
    retries: RetryChoice = "by-class"
    back_off: float = 120.0  # s, first delay after a failure of the infrastructure
    wait_limit: float = 3600.0  # s to wait for capacity when fewer than min_gpus are left
    save_within: float = 120.0  # s in which the save of the run's end is tried again before it is spilled
    spill: str = ""  # folder for a checkpoint that the run's folder cannot take; "": of the node's own disk
    restart: bool = False  # begin again where none of the run's checkpoints can be used; holds for one launch
    at: tuple[str, ...] = ()  # scripted faults: 20s:kill:node-2
    cpus: float | None = None  # processors behind one local slot; None: no cap
    json: str | None = None  # whoever asks for the run writes the report here
    report: str | None = None  # and the page here

    def __post_init__(self) -> None:
        """Check everything that can be checked without starting anything."""
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
        self.place  # noqa: B018  a wrong one is refused here
        _within("min_gpus", self.min_gpus, 1)
        if self.max_gpus is not None and self.max_gpus < self.min_gpus:
            raise OptionError(f"max_gpus must be >= min_gpus ({self.min_gpus}); got {self.max_gpus}")
        if self.gpus < self.min_gpus:
            raise OptionError(
                f"nodes {self.nodes} have {self.gpus} GPUs; min_gpus asks for {self.min_gpus} to begin with"
            )
        _within("keep", self.keep, 1)
        _within("canary_steps", self.canary_steps, 1)
        _within("running_every", self.running_every, 0)
        if not 0 < self.running_fraction <= 1:
            raise OptionError(f"running_fraction must be above 0 and at most 1; got {self.running_fraction}")
        _one_of("canary", self.canary, ("auto", "always", "never"))
        _one_of("retries", self.retries, ("by-class", "blind"))
        for name in ("collective_timeout", "grace"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"{name} must be > 0 s and finite; got {getattr(self, name)}")
        for name in ("price", "back_off", "wait_limit", "hazard", "checkpoint_every", "save_within"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise OptionError(f"{name} must be >= 0 and finite; got {value}")
        if self.cpus is not None and not 0 < self.cpus < math.inf:
            raise OptionError(f"cpus must be > 0 and finite; got {self.cpus}")
        if self.spill:
            Place(self.spill)
        self.faults  # noqa: B018  parsed here so that a wrong one is refused
        if self.pool and not self.folder.startswith(("s3://", "s3a://")):
            raise OptionError(
                f"folder must be on S3, which all nodes of {self.nodes} reach; got {self.folder}"
            )
        if self.pool and (self.at or self.cpus is not None):
            raise OptionError(f"at and cpus are for nodes of this machine; got nodes {self.nodes}")

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
        return tuple(sorted((FAULTS.parse(text) for text in self.at), key=lambda fault: fault.after))

    def plan(self, placement: Mapping[str, int], *, resumes: bool, seed: int = 0) -> TrainingPlan:
        """Return what is decided of the run before it begins on ``placement`` (node -> slots).

        Raises ``OptionError`` for a failure table that cannot be read.
        """
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
    def place(self) -> Place:
        """Return the run's own folder."""
        return Place(self.folder).under(self.id)

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
        where = Place(folder).under(f"{run}/{_FILE}")
        try:
            data = records.load(where, _FORMAT)
            known = {f.name for f in fields(cls)}
            values = {name: value for name, value in data.items() if name in known}
            values |= {"arguments": tuple(values["arguments"]), "at": (), "folder": folder}
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


def _within(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} must be a whole number >= {least}; got {value!r}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
