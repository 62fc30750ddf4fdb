"""A drawing is there on a real terminal only; lines are printed everywhere."""

import io

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ebbflow.flows.runs.screen import Screen


class Shown(Screen[Live]):
    def __init__(self, console: Console) -> None:
        super().__init__(console, lambda: Live(Text("drawn"), console=console, auto_refresh=False))

    def tell(self, words: str) -> None:
        self._say(words, time="  1.0 s  ")


@pytest.mark.parametrize(
    ("terminal", "kind", "drawn"),
    [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)],
)
def test_a_drawing_is_for_real_terminals(terminal: bool, kind: str, drawn: bool) -> None:
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=20, color_system=None, _environ={"TERM": kind}
    )
    with Shown(console) as screen:
        screen.tell("many\n words\x1b that are longer than a line")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("drawn" in text) is drawn
    assert "  1.0 s  many words" in text
    assert ("many words\ufffd that are longer than a line\n" in text) is (not drawn)  # a dumb one is 80 wide
