"""The user's code of a tuning run: packed once, so that all trials train the same, whoever runs them and whenever."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict

from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.training.workspace import package
from ebbflow.infra.training.workspace.packing import PackedCode
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.code import has_code, packed_code, variables_of
from ebbflow.tasks.tuning.request import TuningRequest

FOR_TRIALS = f"../{package.FOLDER}"
"""Directory of the code, relative to that of a trial's run."""

_SHARED = {
    "digest": "the working directory",
    "requirements": "the requirements",
    "setup": "the setup command",
}


class TuningCode:
    """The code of one tuning run, as its directory has it, or packed from what the request names.

    Raises ``OptionError`` for what cannot be packed, and for a variable without a value.
    """

    def __init__(self, request: TuningRequest, *, fresh: bool = False) -> None:
        """Read or pack the code; ``fresh``: pack it even where the directory has some."""
        self._request = request
        self._code: package.CodePackage | None = None
        self._packed: PackedCode | None = None
        self._stored = True
        variables_of(request.trial("probe", ()))
        if not has_code(request):
            return
        if not fresh and self._is_stored():
            self._code = package.get(f"{request.run_directory}/{package.FOLDER}")
            return
        self._stored = False
        self._code, self._packed = packed_code(request)

    def _is_stored(self) -> bool:
        with translated(f"read {self._request.place}"):
            return self._request.place.is_file(f"{package.FOLDER}/{package.RECORD}")

    @property
    def digests(self) -> dict[str, str]:
        """Return what tells codes apart: SHA-256 of the archive, of the requirements, of the setup command."""
        if self._code is None:
            return {}
        found = {name: str(asdict(self._code)[name]) for name in _SHARED}
        return {name: text if name == "digest" else _digest(text) for name, text in found.items()}

    def check(self, there: Mapping[str, str]) -> None:
        """Raise ``OptionError`` where this differs from ``digests`` of the process that began the study."""
        own = self.digests
        for name, what in _SHARED.items():
            here, other = own.get(name, ""), there.get(name, "")
            if here != other:
                raise OptionError(
                    f"{what} of tuning run {self._request.run_id} is the same in all its processes: SHA-256 "
                    f"{other[:16] or 'of none'}; got {here[:16] or 'none'}"
                )

    def store(self) -> None:
        """Write the code into the tuning run's directory unless it is there. Raises ``StorageError``."""
        if self._code is not None and not self._stored:
            package.put(self._request.place, self._code, self._packed)
        self._packed, self._stored = None, True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest() if text else ""
