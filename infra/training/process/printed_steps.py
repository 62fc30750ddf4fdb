"""The steps that a script prints: how far one goes that tells its launcher nothing."""

import re
from pathlib import Path

from ebbflow.planners.errors import OptionError

# In this order: "Epoch 3:  20%|#  | 12/60 [00:01" (Lightning), "| 12/600 [00:01" (tqdm, Hugging Face), "step: 12",
# "global_step=12", "iter 12", "iteration [12/600]", "'step': 12".
DEFAULT = (
    r"Epoch\s+(?P<epoch>\d+):[^|]*\|[^|]*\|\s*(?P<batch>\d+)/(?P<batches>\d+)\s+\["
    r"|\|\s*(?P<done>\d+)/\d+\s+\[\d"
    r"|\b(?:global[_ ]?)?(?:step|iter(?:ation)?)s?\b['\"]?\s*[:=#]?\s*\[?\s*(?P<step>\d+)(?!\d|\.\d)"
)
_CHUNK = 1 << 20  # bytes that are read of a log at a time; of more only the end
_LINE = 4096  # bytes kept of a line that has not ended


def checked_pattern(text: str) -> str:
    """Return a pattern of one's own; "" stands for ``DEFAULT``. Raises ``OptionError``."""
    try:
        found = re.compile(text)
    except re.error as error:
        raise OptionError(f"step_pattern must be a regular expression; got {text!r}: {error}") from error
    if text and found.groups < 1:
        raise OptionError(
            f"step_pattern must have a group that holds the step, such as 'it (\\d+)'; got {text!r}"
        )
    return text


class PrintedSteps:
    """Follows the output of one process.

    Args:
        logs: the files that its output and its errors go to, which need not be there yet.
        pattern: whose first group holds the step; "": the common ones.
    """

    def __init__(self, logs: tuple[Path, ...], pattern: str = "") -> None:
        self._offsets = dict.fromkeys(logs, 0)
        self._rests = dict.fromkeys(logs, "")
        self._pattern = re.compile(pattern or DEFAULT, re.IGNORECASE)
        self.first = self.last = -1  # the first step that was printed and the highest; -1: none

    def look(self) -> None:
        """Read what has been written since the last look."""
        for path, at in self._offsets.items():
            try:
                with path.open("rb") as file:
                    end = file.seek(0, 2)
                    file.seek(max(at, end - _CHUNK))
                    text = file.read(_CHUNK).decode(errors="replace")
            except OSError:
                continue
            self._offsets[path] = end
            *lines, self._rests[path] = re.split(r"[\r\n]", self._rests[path] + text)
            self._rests[path] = self._rests[path][-_LINE:]
            for line in lines:
                self._read(line)

    def _read(self, line: str) -> None:
        found = self._pattern.search(line)
        if found is None:
            return
        named = found.groupdict()
        if named.get("epoch") is not None:
            step = int(named["epoch"]) * int(named["batches"]) + int(named["batch"])
        else:
            digits = next((group for group in found.groups() if group is not None), "")
            if not digits.isdecimal():
                return
            step = int(digits)
            if step == 0 and named.get("done") is not None:
                return  # Hugging Face draws an empty bar first, wherever it resumes
        if self.first < 0:
            self.first = step
        self.last = max(self.last, step)
