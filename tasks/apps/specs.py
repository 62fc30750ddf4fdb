"""What apps ask the ledger for, made from requests; and what starts one of them again."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppKind, AppSpec

_KINDS = ("query", "training", "tuning")


class Resume(NamedTuple):
    """What starts an app again. It stands in the ledger, so there is no secret in it."""

    kind: Literal["query", "training", "tuning"]
    folder: str  # of all runs, or of a query's store
    id: str  # of the run in it
    deployment: str = ""  # of the orchestrator, "flow/name"; empty: whoever started it

    def to_dict(self) -> dict[str, str]:
        """Return plain values, for ``AppSpec.resume``."""
        return dict(self._asdict())

    @classmethod
    def of(cls, spec: AppSpec) -> "Resume | None":
        """Return what starts the app of ``spec`` again; ``None`` where it does not say. Raises ``OptionError``."""
        if not spec.resume:
            return None
        said: Mapping[str, Any] = spec.resume
        values = {name: said.get(name, "") for name in cls._fields}
        wrong = [name for name, value in values.items() if not isinstance(value, str)]
        if wrong or values["kind"] not in _KINDS or not values["folder"] or not values["id"]:
            raise OptionError(
                f"resume must name a kind ({', '.join(_KINDS)}), a directory and an id; got {dict(said)!r:.200}"
            )
        return cls(**values)


def app_spec(kind: AppKind, given: dict[str, Any], fields: dict[str, Any]) -> AppSpec:
    """Return what an app registers as: ``fields`` over what the user ``given``. Raises ``OptionError``."""
    spec = AppSpec(kind=kind, **{**given, **fields})
    if not spec.id:
        raise OptionError("an app needs an id, by which it is found again; got none")
    return spec
