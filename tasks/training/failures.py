"""The failure table on disk: ours, which is shipped, and a user's own before it."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ebbflow.infra.storage import user_files, user_yaml
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.failures.failures import FailureTable


@cache
def built_in() -> FailureTable:
    """Return the table that is shipped (``planners/training/failures/failures.toml``)."""
    text = (files("ebbflow.planners.training.failures") / "failures.toml").read_text(encoding="utf-8")
    return FailureTable.parse(tomllib.loads(text))


def failure_table(path: Path | str | None = None) -> FailureTable:
    """Return our table, with the rules of a TOML or YAML file before its own.

    Raises ``OptionError`` when the file cannot be read or breaks the table's rules.
    """
    if path is None:
        return built_in()
    content = _read(Path(path))
    try:
        return built_in().extended(FailureTable.parse(content))
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix.lower() in (".yaml", ".yml"):
        return user_yaml.read_yaml(path) or {}
    if path.suffix.lower() == ".toml":
        return user_files.read_toml(path)
    raise OptionError(f"{path} is no failure table: that is a .toml, .yaml or .yml file")
