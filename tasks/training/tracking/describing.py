"""What trackers are told of a training beside its values: what was asked for, what it is made of, what came of it."""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.names import MANIFEST, NAME
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest

CHECKPOINTS = "checkpoints"  # in a run's directory
_ASKED = (
    "script", "workdir", "requirements", "nodes", "min_gpus", "max_gpus", "replica_gpus", "adaptive", "communication",
    "sync", "aggregators", "mirrors", "mirror_every", "aggregation_cluster",
    "own_checkpoints", "preflight", "checkpoint_interval", "partial_checkpoint_interval",
    "interruption_rate", "price",
)  # fmt: skip
_PACKAGES = {"ebbflow": "prefect-ebbflow", "torch": "torch", "numpy": "numpy"}
_SECRET = ("token", "password", "passwd", "secret", "api-key", "api_key", "apikey", "credential")


def params_of(request: TrainingRequest) -> dict[str, str]:
    """Return what was asked for, and with which versions; values of secrets among the arguments are left out."""
    found = {
        f"ebbflow/{name}": str(value)
        for name in _ASKED
        if (value := getattr(request, name)) not in (None, "")
    }
    found["arguments"] = " ".join(without_secrets(request.arguments))
    found |= dict(_options(without_secrets(request.arguments)))
    found["versions/python"] = platform.python_version()
    for name, package in _PACKAGES.items():
        try:
            found[f"versions/{name}"] = version(package)
        except PackageNotFoundError:
            continue
    return found


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a script with ``...`` for what may be a secret.

    That is the value of an option such as ``--api-token`` or ``db.password=``, and user and password of an address.
    """
    found, hide = list[str](), False
    for text in arguments:
        name, given, _ = text.partition("=")
        secret = (bool(given) or text.startswith("-")) and any(word in name.lower() for word in _SECRET)
        if hide and not text.startswith("--"):  # a value may begin with one dash
            found.append("...")
        else:
            found.append(f"{name}=..." if secret and given else re.sub(r"//[^/\s]*@", "//...@", text))
        hide = secret and not given
    return found


def _options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options of a script and their values, as ``--lr 0.1`` and ``--lr=0.1`` name them."""
    found = []
    for at, text in enumerate(arguments):
        if not text.startswith("--") or text == "--":
            continue
        name, given, value = text.removeprefix("--").partition("=")
        following = arguments[at + 1] if at + 1 < len(arguments) else "--"
        found.append((name, value if given else "true" if following.startswith("--") else following))
    return [(f"arguments/{name}", value) for name, value in found if name]


def lineage_tags(lineage: Mapping[str, Any]) -> dict[str, str]:
    """Return where the training's data come from as tags: a text as it is, else JSON."""
    return {
        f"ebbflow.{key}": value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for key, value in lineage.items()
    }


def model_tags(request: TrainingRequest, report: TrainingReport) -> dict[str, str]:
    """Return where the newest whole checkpoint is and the digest of its manifest, which has those of its files.

    Raises ``StorageError``.
    """
    if request.own_checkpoints or report.saved_step is None:
        return {}
    place = request.place.under(CHECKPOINTS)
    for name in sorted(_names(place), reverse=True):
        if (found := NAME.fullmatch(name)) is None:
            continue
        with translated(f"read {place}"):
            if not place.is_file(f"{name}/{MANIFEST}"):
                continue
            digest = str(json.loads(place.read(f"{name}/{MANIFEST}"))["sha256"])
        return {
            "ebbflow.model.uri": place.uri_of(name),
            "ebbflow.model.sha256": digest,
            "ebbflow.model.step": str(int(found[1])),
        }
    return {}


def _names(place: StorageLocation) -> list[str]:
    with translated(f"read {place}"):
        return [one.base_name for one in place.entries()]
