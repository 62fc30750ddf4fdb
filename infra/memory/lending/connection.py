"""A client's connection, as its daemon sees it: the handshake, frames both ways, answers that are waited for."""

import asyncio
import itertools
import os
from collections.abc import Iterable
from contextlib import suppress

from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory import protocol
from ebbflow.infra.memory.protocol import Frame, Kind

HANDSHAKE_TIMEOUT = 10.0  # s
STALL_TIMEOUT = 30.0  # s in which the rest of a frame must come, and an answer must be taken


class ClientConnection:
    """One client. Used by the daemon's event loop alone.

    Args:
        reader: what it sends.
        writer: what it is sent.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Frame]] = {}
        self.client = ""  # what it calls itself, for people

    async def greet(self, token: bytes, daemon: str, slab_bytes: int) -> None:
        """Have the client prove that it holds the token. Raises ``MemoryTierError``."""
        hello = await self.receive(only=(Kind.HELLO,))
        said = protocol.unpack_json(hello.payload)
        self.client = str(said.get("client", ""))[:64]
        try:
            theirs = bytes.fromhex(str(said.get("nonce", "")))
        except ValueError:
            theirs = b""
        if len(theirs) != protocol.NONCE_BYTES:
            raise MemoryTierError(
                f"HELLO must carry {protocol.NONCE_BYTES} random bytes in hexadecimal digits"
            )
        own = os.urandom(protocol.NONCE_BYTES)
        await self.send(Frame(Kind.CHALLENGE, payload=own + protocol.proof(token, "daemon", theirs, own)))
        answer = await self.receive(only=(Kind.PROOF,))
        protocol.check_proof(answer.payload, token, "client", own, theirs)
        welcome = protocol.pack_json({"daemon": daemon, "slab_bytes": slab_bytes})
        await self.send(Frame(Kind.WELCOME, payload=welcome))

    async def receive(self, *, only: Iterable[Kind] | None = None) -> Frame:
        """Return the next frame. Raises ``MemoryTierError``, and what asyncio raises at the connection's end."""
        header = await self._reader.readexactly(protocol.HEADER_BYTES)
        length = protocol.payload_length(header, only=only)
        async with asyncio.timeout(STALL_TIMEOUT):
            return protocol.decode(header, await self._reader.readexactly(length))

    async def send(self, frame: Frame) -> None:
        """Send a frame; a client that does not take it in time is disconnected. Raises ``OSError``."""
        header, payload = protocol.encode(frame)
        self._writer.write(header)
        if payload:
            self._writer.write(payload)
        try:
            async with asyncio.timeout(STALL_TIMEOUT):
                await self._writer.drain()
        except TimeoutError:
            self.abort()
            raise

    async def refuse(self, why: str, request: int = 0) -> None:
        """Tell why a request, or the connection (0), is refused; never raises for one that is gone."""
        with suppress(OSError):
            await self.send(Frame(Kind.ERROR, request, payload=why.encode()[: protocol.MAX_CONTROL]))

    async def ask(self, kind: Kind, payload: bytes, timeout: float) -> Frame | None:
        """Send a request and return its answer; ``None`` where none comes within ``timeout`` seconds."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.Future()
        try:
            async with asyncio.timeout(timeout):
                await self.send(Frame(kind, number, payload=payload))
                return await answer
        except (OSError, TimeoutError):
            return None
        finally:
            del self._asked[number]

    def answered(self, frame: Frame) -> None:
        """Hand an answer to whoever waits for it; one that comes late is dropped."""
        waiting = self._asked.get(frame.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(frame)

    def abort(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """End the connection after what was sent has left."""
        self._writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                await self._writer.wait_closed()
