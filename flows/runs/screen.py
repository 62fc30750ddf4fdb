"""What is drawn anew while something runs, on a real terminal only; elsewhere there are plain lines."""

from collections.abc import Callable
from typing import Generic, Self, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress import Progress
from rich.text import Text

from ebbflow.tasks.drawing.wording import printable

Drawing = TypeVar("Drawing", Live, Progress)


class Screen(Generic[Drawing]):
    """Draws while it is entered. A context manager.

    ``_drawing`` is ``None`` where nothing is drawn: in a pipe, a log file or a dumb terminal, or if quiet.
    """

    def __init__(self, console: Console, drawing: Callable[[], Drawing]) -> None:
        self._console = console
        real = console.is_terminal and not console.is_dumb_terminal and not console.quiet
        self._drawing: Drawing | None = drawing() if real else None

    def __enter__(self) -> Self:
        if self._drawing:
            self._drawing.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._drawing:
            self._drawing.stop()

    def _say(self, words: str, style: str = "", *, time: str = "") -> None:
        """Print a line, which Rich puts above what is drawn on the same console."""
        line = Text(printable(time + " ".join(words.split())), style=style)
        self._console.print(line, soft_wrap=not self._console.is_terminal)
