"""The wall clock of a process and of all it starts, moved by libfaketime while it runs; monotonic time stays."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path

_SLEEPING = Path(__file__).with_name("sleeping")


def library() -> str:
    """Return the path of libfaketime, which ``scripts/tools.sh faketime`` installs."""
    found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1") + glob.glob(
        "/usr/lib*/faketime/libfaketime.so.1"
    )
    assert found, "libfaketime is not installed: scripts/tools.sh faketime"
    return found[0]


class FakeTime:
    """A clock that is ``seconds`` ahead of the machine's, for processes that have its ``environment``."""

    def __init__(self, file: Path, seconds: float = 0.0) -> None:
        self._file = file
        self.jump(seconds)

    def jump(self, seconds: float) -> None:
        """Put the clock ``seconds`` ahead of the machine's, or behind, from now on."""
        scratch = self._file.with_suffix(".new")
        scratch.write_text(f"{seconds:+.0f}\n")
        os.replace(scratch, self._file)

    @property
    def environment(self) -> Mapping[str, str]:
        """Return what a process must have in its environment."""
        return {
            "LD_PRELOAD": library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
            "NO_FAKE_STAT": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_SLEEPING), os.environ.get("PYTHONPATH", "")])),
        }
