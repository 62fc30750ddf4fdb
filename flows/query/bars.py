"""Progress of running stages: bars on a terminal, plain lines anywhere else."""

from threading import Lock
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ebbflow.flows.query.summary import STYLES
from ebbflow.tasks.drawing.wording import printable, shorten
from ebbflow.tasks.query.report import StageStatus
from ebbflow.tasks.report.bars import MARKS

_NAME = 34


class StageBars:
    """Shows stages while they run. A context manager; its methods may be called from any thread.

    On a terminal each running stage has a bar, and finished ones become lines above. Elsewhere (a pipe, a log
    file) starts and ends are lines of their own and ``progress`` says nothing.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = Lock()
        self._names: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._progress = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> "StageBars":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def started(self, fp: str, name: str) -> None:
        """Show that the stage with fingerprint ``fp`` has started. Starting it again restarts its bar."""
        with self._lock:
            self._names[fp] = name
            if self._progress is None:
                self._say(f"▸ {name} started")
                return
            if (old := self._bars.pop(fp, None)) is not None:
                self._progress.remove_task(old)
            self._bars[fp] = self._progress.add_task(f"{shorten(name, _NAME):<{_NAME}}", total=None)

    def progress(self, fp: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` tasks; an unknown stage or a ``total`` of 0 is ignored."""
        with self._lock:
            if self._progress is not None and fp in self._bars and total > 0:
                self._progress.update(self._bars[fp], completed=min(done, total), total=total)

    def finished(self, fp: str, status: StageStatus, detail: str = "") -> None:
        """Show how the stage ended; one that never started (a reused one) is named by its fingerprint.

        ``detail`` adds a few words, such as rows and seconds.
        """
        with self._lock:
            name = self._names.pop(fp, fp)
            if self._progress is not None and (bar := self._bars.pop(fp, None)) is not None:
                self._progress.remove_task(bar)
            words = f"{MARKS[status]} {name} {status}" + (f": {detail}" if detail else "")
            self._say(words, STYLES[status])

    def note(self, text: str) -> None:
        """Show a line among the bars, such as a decision or a change of capacity."""
        with self._lock:
            self._say(text)

    def _say(self, words: str, style: str = "") -> None:
        # Rich draws lines above its live display when both share the console.
        self._console.print(
            Text(printable(" ".join(words.split())), style=style), soft_wrap=not self._console.is_terminal
        )
