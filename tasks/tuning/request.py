"""What a user asks of a search: parameters, trials, nodes; checked before anything starts."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ebbflow.infra.errors import StorageError, TrainingError
from ebbflow.infra.storage import records, user_files
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names, options
from ebbflow.planners.model.options import option, option_like
from ebbflow.tasks.training.request import TrainingRequest, default_folder, slots_of

Pruner = Literal["halving", "curve", "none"]

_FILE = "search.json"
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_FORM = "a parameter is {float: [low, high]}, {log: [low, high]}, {int: [low, high]} or {choice: [a, b]}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One hyper-parameter; the script gets it as ``--NAME VALUE``."""

    name: str
    kind: Literal["float", "log", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str | int | float | bool, ...] = ()

    @classmethod
    def parse(cls, name: str, data: Any) -> "Parameter":
        """Return what one entry of the file says. Raises ``OptionError``."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionError(
                f"a parameter's name begins with a letter and holds A-Z a-z 0-9 _ -; got {name!r}"
            )
        if not isinstance(data, Mapping) or len(data) != 1:
            raise OptionError(f"{name}: {_FORM}; got {data!r:.80}")
        kind, values = next(iter(data.items()))
        if not isinstance(values, list):
            raise OptionError(f"{name}: {_FORM}; got {data!r:.80}")
        if kind == "choice":
            plain = all(isinstance(v, str | int | float | bool) for v in values)
            if not values or not plain or len(set(map(repr, values))) != len(values):
                raise OptionError(f"{name}: choices are different texts or numbers; got {values!r:.80}")
            return cls(name, "choice", choices=tuple(values))
        if kind not in ("float", "log", "int"):
            raise OptionError(f"{name}: {_FORM}; got {data!r:.80}")
        whole = int if kind == "int" else (int, float)
        right = len(values) == 2 and all(isinstance(v, whole) and not isinstance(v, bool) for v in values)
        if not right or not values[0] < values[1] or not all(map(math.isfinite, values)):
            raise OptionError(f"{name}: {kind} takes two numbers, the smaller first; got {values!r:.80}")
        if kind == "log" and not values[0] > 0:
            raise OptionError(f"{name}: log takes numbers > 0; got {values!r:.80}")
        return cls(name, kind, float(values[0]), float(values[1]))


def read_space(path: Path | str) -> tuple[Parameter, ...]:
    """Return the parameters that a YAML file names. Raises ``OptionError``."""
    data = user_files.read_yaml(path, error=lambda said: OptionError(f"the space: {said}"))
    if not isinstance(data, Mapping) or not data:
        raise OptionError(f"{path} must name parameters, such as `lr: {{log: [0.001, 1]}}`; got {data!r:.60}")
    try:
        return tuple(Parameter.parse(name, entry) for name, entry in data.items())
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error


@dataclass(frozen=True)
class TuningRequest:
    """One search. Raises ``OptionError`` for a value that breaks its rule."""

    script: str
    space: tuple[Parameter, ...]
    metric: str = option("accuracy", "That the script reports")  # run.report(METRIC=...)
    arguments: tuple[str, ...] = ()  # of the script, the same for all trials
    maximise: bool = option(
        True,
        "Which way is better",
        unless="more",
        in_file="whether more is better",
        flags="--maximise/--minimise",
    )
    trials: int = option(20, in_file="in all", min=1, max=100_000)
    nodes: str = option("local:1x1", "local:NODESxGPUS, shared by all trials", unless=None, metavar="NODES")
    gpus: int = option(1, "Of each trial", min=1)
    max_gpus: int | None = option(None, "Of a trial when there are some to spare", unless="no more")
    epochs: int | None = option(
        None,
        "Of a whole trial: for --pruner curve and the work left",
        in_file="of a whole trial",
        min=1,
        max=1e9,
    )
    pruner: Pruner = option(
        "halving",
        "halving (asynchronous, the default), curve, or none",
        in_file="who is stopped",
        metavar="HOW",
    )
    factor: int = option(3, "One trial in so many goes on", min=2, max=1000)
    min_epochs: int = option(1, "Before a trial may be stopped", min=1, max=1e9, command=False)
    sampler: Literal["tpe", "random"] = option(
        "tpe", "tpe or random", in_file="that draws parameters", metavar="HOW"
    )
    seed: int = option(0, "Of the sampler", min=0, max=2**32 - 1)
    id: str = option("", "Of the search", unless="made up")
    folder: str = option(default_folder, "Where searches and runs live, a local folder", metavar="DIR")
    checkpoint_every: float | None = option_like(TrainingRequest, "checkpoint_every")
    adaptive: bool = option_like(TrainingRequest, "adaptive")
    grace: float = option_like(TrainingRequest, "grace")
    save_within: float = option_like(TrainingRequest, "save_within")
    spill: str = option_like(TrainingRequest, "spill")
    restart: bool = option(  # holds for one launch
        False,
        "With --resume: let trials begin again none of whose checkpoints can be used",
        flags="--restart",
    )
    json: str | None = option_like(TrainingRequest, "json", command=True)

    def __post_init__(self) -> None:
        """Check everything that can be checked without starting anything."""
        if self.id:
            names.RUN.check(self.id)
        if not self.space:
            raise OptionError("a search needs a parameter at least")
        if not _NAME.fullmatch(self.metric):
            raise OptionError(f"metric must be a name that the script reports; got {self.metric!r}")
        options.check(self)
        if self.pruner == "curve" and self.epochs is None:
            raise OptionError("pruner curve needs to know the epochs of a whole trial (--epochs)")
        if self.most_gpus < self.gpus:
            raise OptionError(f"max_gpus must be >= gpus ({self.gpus}); got {self.max_gpus}")
        there = sum(slots_of(self.nodes).values())
        if there < self.gpus:
            raise OptionError(f"nodes {self.nodes} have {there} GPUs; a trial needs {self.gpus}")
        self.trial("probe", self.arguments)  # which checks the rest

    @property
    def most_gpus(self) -> int:
        """Return the most GPUs of one trial."""
        return self.gpus if self.max_gpus is None else self.max_gpus

    @property
    def search_folder(self) -> str:
        """Return the search's own folder, as its user names it; its trials' runs are in it."""
        return f"{self.folder.rstrip('/')}/{self.id}"

    @cached_property
    def place(self) -> StorageLocation:
        """Return the search's own folder."""
        return StorageLocation(self.folder).under(self.id)

    @property
    def recorded(self) -> bool:
        """Tell whether there is a search of this id."""
        return self.place.local and self.place.is_file(_FILE)

    @property
    def placement(self) -> dict[str, int]:
        """Return the slots of each node."""
        return slots_of(self.nodes)

    def trial(self, run: str, arguments: tuple[str, ...]) -> TrainingRequest:
        """Return the training of one trial."""
        return TrainingRequest(
            self.script,
            arguments,
            id=run,
            folder=self.search_folder,
            nodes=self.nodes,
            min_gpus=self.gpus,
            max_gpus=self.most_gpus,
            adaptive=self.adaptive,
            checkpoint_every=self.checkpoint_every,
            keep=1,
            grace=self.grace,
            save_within=self.save_within,
            spill=self.spill,
            restart=self.restart,
            canary="never",
        )

    def save(self) -> None:
        """Write the request into the search's folder, for ``--resume``. Raises ``StorageError``."""
        records.save(self.place.under(_FILE), {**asdict(self), "restart": False}, _FORMAT)

    @classmethod
    def load(cls, folder: str, id: str, changes: Mapping[str, Any] | None = None) -> "TuningRequest":
        """Return the recorded request of search ``id``, with ``changes``. Raises ``TrainingError``."""
        names.RUN.check(id)
        where = StorageLocation(folder).under(f"{id}/{_FILE}")
        try:
            data = records.load(where, _FORMAT)
            space = tuple(Parameter(**{**p, "choices": tuple(p["choices"])}) for p in data["space"])
            values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
            values |= {"space": space, "arguments": tuple(data["arguments"]), "folder": folder}
        except StorageError as error:
            raise TrainingError(f"there is no search {id!r} in {folder} to go on with: {error}") from error
        except records.OtherVersionError:
            raise TrainingError(
                f"search {id} was begun by another version of Ebbflow; go on with that one"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainingError(
                f"{where} is not what was written ({error}); bring it back from a copy, or start the search "
                f"anew"
            ) from error
        return cls(**(values | dict(changes or {})))
