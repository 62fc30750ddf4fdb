"""A worker process: one worker, one server in a thread of its own, and a heartbeat.

``python -m ebbflow.infra.elastic.worker.node FOLDER NAME SILENCE MODULE:CLASS``; started by ``ElasticJob``. The class
is the application's; its attributes come with the master's greeting.
"""

import operator
import sys
import threading
from importlib import import_module

from zmq.sugar.context import Context

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.elastic.registry import register
from ebbflow.infra.elastic.wire.actor import serve
from ebbflow.infra.elastic.wire.heartbeats import HeartbeatSender
from ebbflow.infra.elastic.wire.messages import MASTER, Join
from ebbflow.infra.elastic.wire.transport import Transport
from ebbflow.infra.elastic.wire.zeromq import ZmqTransport
from ebbflow.infra.elastic.worker.server import Server
from ebbflow.infra.elastic.worker.worker import Worker

_SWITCH = 5e-4  # seconds after which a computing micro-task lets the server answer


def prepare(application: str) -> None:
    """Register the application's class, ``MODULE:CLASS``, so that it can be received."""
    module, _, path = application.partition(":")
    register(operator.attrgetter(path)(import_module(module)))
    sys.setswitchinterval(_SWITCH)


def run(name: str, clock: Clock, own: Transport, servers: Transport) -> None:
    """Join the master as ``name``, and serve until it says to go."""
    server = Server(f"{name}/server", servers.send, clock.now)
    worker = Worker(f"{name}/worker", own.send, clock.now)
    thread = threading.Thread(target=serve, args=(server, servers), name="server", daemon=True)
    thread.start()
    worker.send(MASTER, Join(name))
    serve(worker, own)
    thread.join(timeout=10.0)


def main(folder: str, name: str, silence: float, application: str) -> None:
    """Serve until the master says to go."""
    prepare(application)
    clock, context = SystemClock(), Context()
    pulse = HeartbeatSender(folder, name, context, clock, silence)
    own = ZmqTransport(folder, f"{name}/worker", context)
    servers = ZmqTransport(folder, f"{name}/server", context)
    run(name, clock, own, servers)
    pulse.close()
    context.term()  # waits for what the sockets still deliver, at most their linger time


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4])
