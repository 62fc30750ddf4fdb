"""Where a training is tracked: ``mlflow:URI_OR_DIR#EXPERIMENT`` or ``wandb:PROJECT``."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from ebbflow.infra.packages import require
from ebbflow.infra.storage import user_files
from ebbflow.planners.errors import OptionError

TrackerKind = Literal["mlflow", "wandb"]

EXPERIMENT = "ebbflow"
"""MLflow experiment of runs that name none."""

_MODULES = {"mlflow": "mlflow", "wandb": "wandb"}
_SERVERS = {"http", "https", "databricks", "databricks-uc"}
_DATABASES = {"sqlite", "postgresql", "mysql", "mssql"}
_PROJECT = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}/)?[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_NAME = re.compile(r"[^\x00-\x1f\x7f/:.\"'%#][^\x00-\x1f\x7f/:\"'%#]{0,199}")


@dataclass(frozen=True, slots=True)
class TrackTarget:
    """One tracker.

    Args:
        kind: which.
        place: MLflow's tracking URI, empty for that of ``MLFLOW_TRACKING_URI``; W&B's project, ``ENTITY/PROJECT``
            or ``PROJECT``.
        experiment: of MLflow; empty for W&B.
    """

    kind: TrackerKind
    place: str
    experiment: str = ""

    @classmethod
    def parse(cls, text: str) -> "TrackTarget":
        """Return what ``text`` names. A directory becomes the SQLite database ``mlflow.db`` in it.

        Raises ``OptionError`` for what names no tracker, and for a place with a password, which would be recorded.
        """
        kind, _, place = text.strip().partition(":")
        if kind == "mlflow":
            return cls("mlflow", *_mlflow(place))
        if kind == "wandb":
            if not _PROJECT.fullmatch(place):
                raise OptionError(
                    "track must be wandb:PROJECT or wandb:ENTITY/PROJECT, of letters, digits, _, - and .; got "
                    f"{text!r:.160}"
                )
            return cls("wandb", place)
        raise OptionError(
            f"track must be mlflow:URI_OR_DIR[#EXPERIMENT] or wandb:PROJECT; got {_shown(text)!r:.160}"
        )

    def __str__(self) -> str:
        if self.kind == "wandb":
            return f"wandb:{self.place}"
        return f"mlflow:{self.place}#{self.experiment}"

    def check_ready(self) -> None:
        """Raise ``EngineUnavailableError`` without the package, ``OptionError`` where nothing says which server."""
        name = "MLflow" if self.kind == "mlflow" else "W&B"
        require(_MODULES[self.kind], f"tracking with {name}", self.kind)
        if self.kind == "mlflow" and not self.place and not os.environ.get("MLFLOW_TRACKING_URI"):
            raise OptionError("track mlflow names no place, and the environment has no MLFLOW_TRACKING_URI")


def _mlflow(text: str) -> tuple[str, str]:
    """Return the tracking URI and the experiment."""
    place, marked, experiment = text.partition("#")
    if marked and not _NAME.fullmatch(experiment):
        raise OptionError(f"track must name an MLflow experiment after #; got {experiment!r:.120}")
    experiment = experiment or EXPERIMENT
    if not place.isprintable():
        raise OptionError(f"track must name a directory or address; got {place!r:.160}")
    if not place or place == "databricks":
        return place, experiment
    if "://" not in place:
        folder = user_files.expanded(place).absolute()
        if "?" in str(folder):
            raise OptionError(
                f"track mlflow:DIR must be a directory without ? in its path; got {place!r:.160}"
            )
        if folder.exists() and not folder.is_dir():
            raise OptionError(f"track mlflow:DIR must be a directory; got the file {folder}")
        return f"sqlite:///{folder}/mlflow.db", experiment
    scheme = place.partition("://")[0].partition("+")[0]
    if scheme not in _SERVERS | _DATABASES:
        known = ", ".join(sorted(_SERVERS | _DATABASES))
        raise OptionError(f"track mlflow:URI must begin with one of {known}; got {_shown(place)!r:.160}")
    try:
        parts = urlsplit(place)
        parts.port  # noqa: B018  a wrong one is refused here
    except ValueError as error:
        raise OptionError(f"track mlflow:URI must be an address: {error}") from None
    if parts.username or parts.password or parts.query:
        raise OptionError(
            "track must hold no user, password or query, since it is recorded: set MLFLOW_TRACKING_USERNAME, "
            "MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN, or the whole address as MLFLOW_TRACKING_URI "
            f"with --track mlflow; got {_shown(place)!r:.160}"
        )
    if scheme in ("http", "https") and not parts.hostname:
        raise OptionError(f"track mlflow:URI must name a host; got {place!r:.160}")
    return place, experiment


def _shown(place: str) -> str:
    """Return an address without what may be a secret."""
    return re.sub(r"//[^/]*@", "//...@", place).partition("?")[0]


def checked(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the targets as they are recorded: with absolute places, each once. Raises ``OptionError``."""
    found = [str(TrackTarget.parse(text)) for text in texts]
    if twice := next((one for at, one in enumerate(found) if one in found[:at]), None):
        raise OptionError(f"track names {twice} twice")
    return tuple(found)
