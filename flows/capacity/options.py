"""Options that all commands about a cluster share, and how a policy's own are read."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ebbflow.planners.errors import OptionError

LEDGER_HELP = (
    "Address of the ledger: a file, or postgresql://user@host/database; a password goes into $EBBFLOW_LEDGER or "
    "~/.pgpass, not on a command line. Default: $EBBFLOW_LEDGER, else ledger.db in ~/.cache/ebbflow."
)
LedgerAt = Annotated[str | None, typer.Option(help=LEDGER_HELP, metavar="URL")]
Cluster = Annotated[str, typer.Option(help="Name of the cluster in the ledger.", metavar="NAME")]


def options_of(given: list[str]) -> Mapping[str, Any]:
    """Return the options of a policy from ``name=value``. Raises ``OptionError``."""
    found: dict[str, Any] = {}
    for one in given:
        name, sign, value = one.partition("=")
        if not sign or not name.strip():
            raise OptionError(f"--policy-option must be NAME=VALUE, such as rho=1.5; got {one!r}")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value  # a word
    return found
