"""Flow runs that somebody in this process watches (the command line), and what flow runs are called."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prefect.runtime import flow_run

from ebbflow.tasks.drawing.wording import shorten

Given = TypeVar("Given")
Outcome = TypeVar("Outcome")

_NAME = 60  # characters of what tells a run from others


@dataclass
class Attachment(Generic[Given, Outcome]):
    """What the watcher gives to the flow run beside its parameters, and the outcome that the run leaves for him."""

    given: Given
    outcome: Outcome | None = None


class Attached(Generic[Given, Outcome]):
    """The watchers of one flow's runs."""

    def __init__(self, flow: str) -> None:
        self._present: ContextVar[Attachment[Given, Outcome] | None] = ContextVar(
            f"ebbflow_{flow}", default=None
        )

    def get(self) -> Attachment[Given, Outcome] | None:
        """Return what is attached to the present run, if its caller is in this process."""
        return self._present.get()

    def run(
        self, given: Given, call: Callable[[], object], *, handled: type[Exception] | tuple[()] = ()
    ) -> Outcome:
        """Call the flow by ``call`` with ``given`` attached, and return the outcome.

        An error of kind ``handled`` is dropped where the run has left an outcome, which says as much.
        """
        attachment: Attachment[Given, Outcome] = Attachment(given)
        token = self._present.set(attachment)
        try:
            call()
        except handled:
            if attachment.outcome is None:
                raise
        finally:
            self._present.reset(token)
        assert attachment.outcome is not None
        return attachment.outcome


def run_name(what: str, *keys: str) -> Callable[[], str]:
    """Return what names a run: ``what`` and the first of the parameters ``keys`` that says something."""

    def name() -> str:
        parameters: dict[str, Any] = flow_run.parameters
        return f"{what} {shorten(next((str(parameters[k]) for k in keys if parameters.get(k)), ''), _NAME)}"

    return name
