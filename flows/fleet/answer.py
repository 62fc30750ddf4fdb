"""What the commands of ``ebbflow fleet`` that change something print: lines while they work, or one JSON object."""

from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType

from ebbflow.flows.runs.answers import fail, print_json
from ebbflow.infra.protocols import ApplyResult


class Answer:
    """Lines for a reader, or a JSON object at the end of its block. A context manager.

    Args:
        json: print an object instead of lines: ``dry_run``, ``done`` (whether anything was changed), ``notes``, and
            what ``tell`` was given. A command that fails before it has changed anything prints its error only.
        dry_run: whether nothing is to be changed.
    """

    def __init__(self, *, json: bool, dry_run: bool = False) -> None:
        self._json = json
        self._console = Console(quiet=json)
        self._content: dict[str, Any] = {"dry_run": dry_run, "done": False, "notes": []}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._json and (kind is None or self._content["done"]):
            print_json(self._content)

    def show(self, drawn: RenderableType) -> None:
        """Print what is drawn for a reader."""
        self._console.print(drawn)

    def say(self, text: str) -> None:
        """Print a line for a reader."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print what should be known before the change, and keep it among ``notes``."""
        self._content["notes"].append(text)
        self.say(text)

    def tell(self, *, done: bool = False, **fields: Any) -> None:
        """Add fields to the object; ``done``: something was changed."""
        self._content |= fields
        self._content["done"] = self._content["done"] or done

    def sure(self, yes: bool) -> bool:
        """Return ``yes``. The command ends with status 1 where a prompt would be mixed with the JSON object."""
        if self._json and not yes:
            fail("nothing was done: --json does not prompt; add --yes")
        return yes


def applied_json(applied: ApplyResult) -> dict[str, Any]:
    """Return what was asked of the provider, and what was not, as values that JSON has."""
    return {
        "asked": [asdict(ask) for ask in applied.asked],
        "refused": [asdict(refusal) for refusal in applied.refused],
    }
