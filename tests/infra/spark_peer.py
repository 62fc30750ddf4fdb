"""A peer that speaks Spark's network protocol without knowing any secret."""

import contextlib
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

ENDPOINTS = ("Master", "Worker", "endpoint-verifier", "CoarseGrainedScheduler", "BlockManagerMaster")
_RPC_REQUEST, _ONE_WAY = 3, 9  # types of Spark's messages
_RPC_RESPONSE = 4
_HELLO = b"\xac\xed\x00\x05t\x00\x05hello"  # a String as Java serializes it


def frame(kind: int, rest: bytes) -> bytes:
    return struct.pack(">qb", 9 + len(rest), kind) + rest


def rpc(host: str, port: int, endpoint: str, *, one_way: bool = False) -> bytes:
    """Return a message to an endpoint, such as an application's, which the receiver deserializes."""
    name = endpoint.encode()
    receiver = host.encode()
    body = b"\0\1" + struct.pack(">H", len(receiver)) + receiver + struct.pack(">i", port)
    body += struct.pack(">H", len(name)) + name + _HELLO
    if one_way:
        return frame(_ONE_WAY, struct.pack(">i", len(body)) + body)
    return frame(_RPC_REQUEST, struct.pack(">qi", 7, len(body)) + body)


def sasl(user: str = "sparkSaslUser") -> bytes:
    """Return how a client begins that knows nothing but SASL, Spark's older handshake."""
    name = user.encode()
    body = b"\xea" + struct.pack(">i", len(name)) + name + struct.pack(">i", 0)
    return frame(_RPC_REQUEST, struct.pack(">qi", 7, len(body)) + body)


def say(host: str, port: int, data: bytes, patience: float = 3.0) -> bytes:
    """Send ``data`` and return what comes back until the peer closes or is silent for ``patience`` seconds."""
    found = b""
    with socket.create_connection((host, port), timeout=10) as connection, contextlib.suppress(OSError):
        connection.settimeout(patience)
        connection.sendall(data)
        while part := connection.recv(65536):
            found += part
            if len(found) >= 8 and len(found) >= struct.unpack(">q", found[:8])[0] > 0:
                break  # a whole message of Spark's
    return found


def say_all(said: Sequence[tuple[str, int, bytes]]) -> list[bytes]:
    """Say everything at once, each as host, port and data: most peers answer with silence."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(say, *zip(*said, strict=True)))


def obeyed(answer: bytes) -> bool:
    """Tell whether Spark gave the message to an endpoint, or looked for one: it then deserializes what it gets."""
    return (len(answer) > 8 and answer[8] == _RPC_RESPONSE) or b"Could not find" in answer
