"""Progress of running stages: bars on a terminal, plain lines anywhere else."""

from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ebbflow.flows.query.summary import STYLES
from ebbflow.flows.runs.screen import Screen
from ebbflow.tasks.drawing.wording import shorten
from ebbflow.tasks.query.report import MARKS, StageStatus

_NAME = 34


class StageBars(Screen[Progress]):
    """Shows stages while they run. Its methods may be called from any thread.

    On a terminal each running stage has a bar, and finished ones become lines above. Elsewhere (a pipe, a log
    file) starts and ends are lines of their own and ``progress`` says nothing.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console, lambda: _progress(console))
        self._lock = Lock()
        self._names: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}
        self._opening: TaskID | None = None

    def opening(self, text: str) -> None:
        """Show what happens before the first stage: on a terminal a bar that lasts until that one starts."""
        with self._lock:
            if self._drawing is None:
                self._say(text)
            else:
                self._opening = self._drawing.add_task(text, total=None)

    def started(self, fp: str, name: str) -> None:
        """Show that the stage with fingerprint ``fp`` has started. Starting it again restarts its bar."""
        with self._lock:
            self._names[fp] = name
            if self._drawing is None:
                self._say(f"▸ {name} started")
                return
            if self._opening is not None:
                self._drawing.remove_task(self._opening)
                self._opening = None
            if (old := self._bars.pop(fp, None)) is not None:
                self._drawing.remove_task(old)
            self._bars[fp] = self._drawing.add_task(f"{shorten(name, _NAME):<{_NAME}}", total=None)

    def progress(self, fp: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` tasks; an unknown stage or a ``total`` of 0 is ignored."""
        with self._lock:
            if self._drawing is not None and fp in self._bars and total > 0:
                self._drawing.update(self._bars[fp], completed=min(done, total), total=total)

    def finished(self, fp: str, status: StageStatus, detail: str = "") -> None:
        """Show how the stage ended; one that never started (a reused one) is named by its fingerprint.

        ``detail`` adds a few words, such as rows and seconds.
        """
        with self._lock:
            name = self._names.pop(fp, fp)
            if self._drawing is not None and (bar := self._bars.pop(fp, None)) is not None:
                self._drawing.remove_task(bar)
            words = f"{MARKS[status]} {name} {status}" + (f": {detail}" if detail else "")
            self._say(words, STYLES[status])

    def note(self, text: str) -> None:
        """Show a line among the bars, such as a decision or a change of capacity."""
        with self._lock:
            self._say(text)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)
