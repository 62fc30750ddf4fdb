"""Options that all commands about a cluster share, and how a policy's own are read; what starting a loop says."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ebbflow.planners.errors import OptionError

START_HELP = """Start the capacity loop of a cluster; it runs until Ctrl-C, SIGTERM or ebbflow capacity stop.

[b]Examples[/b]

    ebbflow capacity start

    ebbflow capacity start --source aws:prod.json --config ebbflow.toml

    ebbflow capacity start --policy themis --policy-option knob=0.5 \\
        --lease-duration 10m --auction-interval 1m

    ebbflow capacity start --policy mymodule:MyPolicy     (docs/own-policy.md)

[b]The configuration file[/b] (--config or $EBBFLOW_CONFIG; docs/operations.md) holds

    \\[quotas]            dollars_per_hour = 40, nodes = 60

    \\[quotas.teams.vision] gpus = 48

    \\[teams.vision]      weight = 2

    \\[scaling]           scale_in_idle = "5m", pools = { etl = "cores" }

    \\[policy]            name = "rho-bounded", options = { rho = 1.5 }

While another loop is the leader, this one waits as a standby and takes over when the leader fails.
--take-over does not wait; the fencing token of the other loop becomes invalid.

Exit status: 0 stopped, 1 failed, 2 usage error, 4 the ledger was unavailable for too long, 5 another loop took over.
"""
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
