"""The user's code of a training: packed into the run's directory when it is launched, and what its processes get."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ebbflow.infra.protocols.trainings import PACKED, TrainingJob
from ebbflow.infra.storage import user_files
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.workspace import package
from ebbflow.infra.training.workspace.packing import PackedCode, pack
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.request import TrainingRequest


class CodeRequest(Protocol):
    """What a request says of its code: that of a training, or of a tuning run for all its trials."""

    @property
    def script(self) -> str: ...
    @property
    def workdir(self) -> str: ...
    @property
    def requirements(self) -> str: ...
    @property
    def setup(self) -> str: ...
    @property
    def place(self) -> StorageLocation: ...


def has_code(request: CodeRequest) -> bool:
    """Return whether nodes have something to prepare before the script runs."""
    return bool(request.workdir or request.requirements or request.setup)


def packed_code(request: CodeRequest) -> tuple[package.CodePackage, PackedCode | None]:
    """Return the code of a request, and what was packed of its working directory.

    Raises ``OptionError`` for a working directory or requirements file that cannot be used.
    """
    packed = pack(request.workdir, request.script) if request.workdir else None
    text, inside = "", ""
    if request.requirements:
        text = user_files.read_text(request.requirements)
        if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
            raise OptionError(f"requirements must name a package at least; {request.requirements} names none")
        inside = _within(request.requirements, request.workdir)
    code = package.CodePackage(
        digest=packed.digest if packed else "",
        requirements=text,
        requirements_file=inside,
        setup=request.setup,
        source=request.workdir,
        commit=packed.commit if packed else "",
    )
    return code, packed


def store_code(request: CodeRequest) -> PackedCode | None:
    """Write the code of a request into its run's directory; return what was packed of a working directory.

    Raises ``OptionError`` as ``packed_code``, and ``StorageError``.
    """
    code, packed = packed_code(request)
    package.put(request.place, code, packed)
    return packed


def _within(path: str, folder: str) -> str:
    """Return a file's path relative to the working directory that holds it; empty where none does."""
    root = user_files.expanded(folder) if folder else None
    if root is None or not root.is_dir():
        return ""
    full = user_files.expanded(path).resolve()
    return full.relative_to(root.resolve()).as_posix() if full.is_relative_to(root.resolve()) else ""


def job_of(request: TrainingRequest, folder: str = package.FOLDER, **fields: object) -> TrainingJob:
    """Return the job of a request, whose code is in ``folder``; ``fields`` are others of ``TrainingJob``."""
    script = f"{PACKED}{Path(request.script).as_posix()}" if request.workdir else request.script
    code = folder if has_code(request) else ""
    return TrainingJob(
        request.run_id,
        script,
        request.arguments,
        request.run_directory,
        code=code,
        **fields,  # type: ignore[arg-type]
    )


def variables_of(request: TrainingRequest) -> Mapping[str, str]:
    """Return the variables that the script's processes get. Raises ``OptionError`` for one that has no value here."""
    found = {}
    for text in request.env:
        name, given, value = text.partition("=")
        if not given and name not in os.environ:
            raise OptionError(
                f"env {name} takes its value from the environment, which has none; set it first"
            )
        found[name] = value if given else os.environ[name]
    return found
