"""How a worker, or another aggregator, connects to an aggregator."""

from zmq import constants
from zmq.sugar.context import Context
from zmq.sugar.socket import Socket

from ebbflow.infra.aggregation.frames import MAX_PAYLOAD, AggregatorAddress
from ebbflow.infra.machine.encrypted_router import CurveKeys

_HEARTBEAT = 2000  # milliseconds between ZeroMQ's own heartbeats, so that a cut link is noticed
_RECONNECT = 50, 1000  # milliseconds before the first attempt, and at most


def connect(context: "Context[Socket[bytes]]", keys: CurveKeys, where: AggregatorAddress) -> "Socket[bytes]":
    """Return a socket that connects to an aggregator, and again whenever the connection ends.

    Args:
        context: that the socket belongs to.
        keys: by which the caller proves itself.
        where: the aggregator listens.
    """
    one = context.socket(constants.DEALER)
    one.curve_serverkey = bytes.fromhex(where.public)
    one.curve_publickey = bytes.fromhex(keys.public)
    one.curve_secretkey = bytes.fromhex(keys.secret)
    one.linger = 0
    one.maxmsgsize = MAX_PAYLOAD
    one.reconnect_ivl, one.reconnect_ivl_max = _RECONNECT
    one.heartbeat_ivl = _HEARTBEAT
    one.connect(f"tcp://{where.address}")
    return one
