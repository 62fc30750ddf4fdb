"""A capacity loop in a process of its own: ``python -m tests.chaos.loop_child LEDGER CLUSTER NODES NAME SILENCE``.

It sees the nodes that the file ``NODES`` names, and says on standard output what becomes of it. ``SILENCE``: seconds
after which it gives up a database that says nothing.
"""

import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from ebbflow.infra.errors import EbbflowError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.ledger.database import database
from ebbflow.tasks.capacity.loop import CapacityLoop
from tests.tasks.capacity.loopcases import FAST, settings
from tests.tasks.capacity.loopprocess import FileSource


def main(url: str, cluster: str, nodes: str, name: str, silence: str) -> None:
    database.SILENCE = dict.fromkeys(database.SILENCE, float(silence))
    database.CONNECT = float(silence)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    pace = replace(FAST, leader_lease=1.5, ledger_timeout=120.0)
    try:
        with Ledger.open(url, cluster=cluster) as ledger:
            loop = CapacityLoop(ledger, None, FileSource(Path(nodes)), settings(), pace=pace, holder=name)
            loop.run(stop)
    except EbbflowError as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(1)
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
