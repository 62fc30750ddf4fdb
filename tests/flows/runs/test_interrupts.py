"""Interrupts of a command."""

import io
import signal
import sys
import time

import pytest
from rich.console import Console

from ebbflow.flows.runs.command import interruptible


class Finalized:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)


def test_an_interrupt_that_a_finalizer_discards_comes_again() -> None:
    before, output = sys.unraisablehook, io.StringIO()
    console = Console(file=output, width=80)

    def work() -> None:
        with interruptible(console, "nothing is left"):
            Finalized()
            time.sleep(200)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work()
    assert time.monotonic() - began < 150
    assert output.getvalue() == "interrupted; nothing is left\n"
    assert sys.unraisablehook is before
