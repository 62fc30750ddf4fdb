"""The files of a checkpoint of sharded state, written and read through ``torch.distributed.checkpoint``.

That library keeps its index and plain values as pickles, and would run what they say. Here both are read with the
few types that they need. While files are written and read it exchanges plans between processes, as pickles again,
over their collectives: that is torch's own, and cannot be turned off.
"""

import builtins
import collections
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.manifest import Payload
from ebbflow.infra.training.process import agreeing

Value = TypeVar("Value")

_INDEX = ".metadata"
_SAFE = {
    builtins: {"getattr", "set", "frozenset", "list", "dict", "tuple", "int", "str", "slice"},
    collections: {"OrderedDict", "defaultdict"},
    torch: {
        "Size",
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    },
}
_SAFE_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def agree(value: Value, group: Any) -> Value:
    """Return the first process' value, on all of them."""
    found: Value = agreeing.from_first(value, group)
    return found


def on_first(function: Callable[[], Value], group: Any) -> Value:
    """Return on all processes what ``function`` returns on the first, or raise its error there and here."""
    outcome: tuple[Any, Exception | None] = (None, None)
    if dist.get_rank(group) == 0:
        try:
            outcome = (function(), None)
        except Exception as exc:
            outcome = (None, exc)
    value, error = agree(outcome, group)
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def write(place: StorageLocation, name: str, state: dict[str, Any], group: Any) -> tuple[Payload, ...]:
    """Write all processes' parts below ``name`` and return all files, on every process. Raises ``StorageError``."""
    scratch = nullcontext(place.path(name)) if place.local else tempfile.TemporaryDirectory()
    with scratch as folder:
        ours: list[Payload] = []
        error: Exception | None = None
        try:
            with translated(f"save the checkpoint {place.uri_of(name)}"):
                _dcp_save(state, folder, group)
                ours = _deliver(place, name, Path(folder), dist.get_rank(group))
        except StorageError as exc:
            error = exc
        gathered = agreeing.from_all((ours, error), group)
    for _, failed in gathered:
        if failed is not None:
            raise failed
    return tuple(file for part, _ in gathered for file in part)


def read_into(folder: str, state: dict[str, Any], group: Any) -> None:
    """Fill ``state`` from the files; collective. Raises ``StorageError``."""
    try:
        dcp.load(state, storage_reader=_SafeReader(folder), planner=_SafePlanner(), process_group=group)
    except dcp.CheckpointException as exc:
        raise StorageError(f"cannot read the checkpoint in {folder}: {_first(exc)}") from exc


def read_whole(folder: str, map_location: Any) -> dict[str, Any]:
    """Return the whole state in this process alone, tensors unsharded. Raises ``StorageError``."""
    state: dict[str, Any] = {}
    try:
        _load_state_dict(state, storage_reader=_SafeReader(folder), planner=_SafeEmptyPlanner(), no_dist=True)
    except dcp.CheckpointException as exc:
        raise StorageError(f"cannot read the checkpoint in {folder}: {_first(exc)}") from exc
    return _moved(state, map_location)  # type: ignore[no-any-return]


def _dcp_save(state: dict[str, Any], folder: str, group: Any) -> None:
    private.make_folder(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=FileSystemWriter(folder, sync_files=True), process_group=group)
    except dcp.CheckpointException as exc:
        cause = _first(exc)
        raise cause if isinstance(cause, OSError) else OSError(str(cause)) from exc


def _deliver(place: StorageLocation, name: str, folder: Path, rank: int) -> list[Payload]:
    """Return this process' files, taken to storage where they are not there yet."""
    ours = sorted(folder.glob(f"__{rank}_*")) + ([folder / _INDEX] if rank == 0 else [])
    found = []
    for path in ours:
        data = path.read_bytes()
        if not place.local:
            with place.writing(f"{name}/{path.name}") as sink:
                sink.write(data)
        found.append(Payload(path.name, len(data), sha256(data).hexdigest()))
    return found


def _first(exc: dcp.CheckpointException) -> BaseException:
    failures: list[tuple[BaseException, Any]] = list(exc.failures.values())
    return failures[0][0] if failures else exc


def _moved(value: Any, map_location: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(map_location)
    if isinstance(value, dict):
        return {key: _moved(item, map_location) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, map_location) for item in value)
    return value


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = any(module == safe.__name__ and name in names for safe, names in _SAFE.items())
        if known or module in _SAFE_MODULES or (module == "pathlib" and name in ("PosixPath", "Path")):
            if name == "getattr":
                return _enum_member
            return super().find_class(module, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the index of a checkpoint may not hold {module}.{name}")


def _enum_member(owner: Any, name: str) -> Any:
    import enum

    if not (isinstance(owner, type) and issubclass(owner, enum.Enum)):
        raise pickle.UnpicklingError("the index of a checkpoint may only name members of enumerations")
    return owner[name]


class _SafeReader(FileSystemReader):  # type: ignore[misc]
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        path = Path(self.path) / _INDEX
        try:
            found = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as exc:
            raise StorageError(f"cannot read {path}: {exc}") from exc
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _SafeBytes:
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        data = value.read()
        torch.load(io.BytesIO(data), weights_only=True)  # refuses whatever would run code
        super().load_bytes(read_item, io.BytesIO(data))  # type: ignore[misc]


class _SafePlanner(_SafeBytes, DefaultLoadPlanner):  # type: ignore[misc]
    pass


class _SafeEmptyPlanner(_SafeBytes, _EmptyStateDictLoadPlanner):  # type: ignore[misc]
    pass
