"""Py4J's connections to Spark's driver."""

import io
import socket
from contextlib import suppress
from typing import Any


class _AtOnce(io.RawIOBase):
    """What a connection receives, acknowledged at once.

    The driver writes an answer in pieces of 8 KiB and, by Nagle's algorithm, holds each back until the one before is
    acknowledged, for which a peer that has nothing to send takes 40 ms.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # it does not last
        return self._connection.recv_into(buffer)


def acknowledge_at_once(frame: Any) -> None:
    """Have long answers of a frame's driver to the calling thread come without waiting, where the system and Py4J
    allow it."""
    with suppress(AttributeError, OSError):  # not of Linux, or another Py4J
        connection = frame.sparkSession.sparkContext._gateway._gateway_client.get_thread_connection()
        before = connection.stream
        if not isinstance(before.raw, _AtOnce) and hasattr(socket, "TCP_QUICKACK"):
            connection.stream = io.BufferedReader(_AtOnce(connection.socket))
            before.close()  # between two answers it holds nothing
