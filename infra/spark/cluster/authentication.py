"""How the processes of a Spark cluster know each other: one secret per cluster, and encrypted connections.

Whoever may speak to a standalone master can run code as the user of its workers, and whoever may speak to a driver
or an executor sends it serialized Java objects, which is the same. So no process of Spark that Ebbflow starts
takes a connection without proof of the secret. A standalone cluster shares one among its daemons and applications
(Spark has no finer distinction there); in local mode Spark makes up its own for each application.
"""

import re
import secrets
from collections.abc import Mapping

from ebbflow.infra.spark.cluster.state import find_cluster
from ebbflow.infra.spark.settings import is_local

SECRET = "spark.authenticate.secret"  # noqa: S105 - a name

# The cipher authenticates each message (Spark's default, AES/CTR, does not), and nobody may fall back to SASL's
# DIGEST-MD5.
PROTECTED: Mapping[str, str] = {
    "spark.authenticate": "true",
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.authEngineVersion": "2",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
    "spark.network.crypto.saslFallback": "false",
}

# Spark's pages and status APIs know no users. Those of a cluster of ours are on loopback and only to be read.
READ_ONLY: Mapping[str, str] = {
    "spark.ui.killEnabled": "false",  # /app/kill, /driver/kill, and jobs and stages in a driver
    "spark.ui.heapHistogramEnabled": "false",  # a look at it makes an executor collect garbage
    "spark.master.ui.decommission.allow.mode": "DENY",  # /workers/kill; the default lets everybody on this machine
    "spark.master.rest.enabled": "false",  # starts drivers for whoever asks; its port, 6066, is fixed, too
}

_SENSITIVE = re.compile(r"secret|password|passwd|token|credential|access\.?key|private", re.IGNORECASE)


def new_secret() -> str:
    """Return a secret for one cluster: 256 bits, in hexadecimal."""
    return secrets.token_hex(32)


def daemon_properties(secret: str) -> dict[str, str]:
    """Return what master, workers and applications of a cluster have in common, with its secret."""
    return {**PROTECTED, **READ_ONLY, SECRET: secret}


def properties_text(properties: Mapping[str, str]) -> str:
    """Return a file of Spark's properties, for ``--properties-file``: Java's notation."""
    return "".join(f"{_escaped(name)}={_escaped(value)}\n" for name, value in properties.items())


def _escaped(text: str) -> str:
    """Return text that Java reads as it is: nothing but plain characters, the others by their UTF-16 number."""
    units = memoryview(text.encode("utf-16-be")).cast("B")
    numbers = [units[i] << 8 | units[i + 1] for i in range(0, len(units), 2)]
    return "".join(chr(n) if 48 <= n < 127 and chr(n) not in ":=\\" else f"\\u{n:04x}" for n in numbers)


def authenticated(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return an application's settings with what its master asks for.

    The secret of a local cluster of this user is found by its master's URL. Of other masters the user's own settings
    have to know it.
    """
    master = chosen["spark.master"]
    if is_local(master):
        return {**chosen, **PROTECTED}
    state = find_cluster(master) if master.startswith("spark://") else None
    if state is not None:
        return {**chosen, **PROTECTED, SECRET: state.secret}
    return dict(chosen)


def is_sensitive(name: str) -> bool:
    """Tell whether a setting's name speaks of a secret: it is then in no command line and in no file that stays."""
    return _SENSITIVE.search(name) is not None
