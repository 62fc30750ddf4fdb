"""Messages and states as bytes: a typed encoding whose large arrays stay outside, so that they are copied once.

The head is MessagePack. Beyond its own types (numbers, text, bytes, lists, dictionaries with any hashable keys) it
holds what ``registry`` knows; everything else is an error when it is encoded. Decoding makes only instances of
registered classes and calls no other code, so neither a socket nor a file can name something to run.
"""

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgpack
import numpy as np

from ebbflow.infra.elastic import registry
from ebbflow.infra.errors import ElasticError

Frames = list[bytes | memoryview]

_MAGIC = b"EBBFLOW2"
_DIGEST = 16  # bytes
_HEAD = struct.Struct(
    f"<8sQ{_DIGEST}s"
)  # magic, number of frames, digest of the number and of all that follows
HEAD_SIZE = _HEAD.size
_LENGTH = struct.Struct("<Q")
_SMALL = 4096  # bytes of an array that travels in the head: a frame of its own would cost more
_BUFFER = 1024  # bytes with which a packer begins
_DEEPEST = 100  # levels of nesting
_VALUE, _ARRAY, _OUTSIDE = 1, 2, 3  # MessagePack's extension types


def encode(content: Any) -> Frames:
    """Return the head and the large arrays' buffers, which share memory with ``content``.

    Raises ``ElasticError`` for a type that is not registered, and says where in ``content`` it is.
    """
    encoder = _Encoder()
    try:
        return [encoder.pack(content), *encoder.buffers]
    except (ValueError, OverflowError, RecursionError) as error:  # msgpack's own, such as nesting too deep
        raise ElasticError(f"{type(content).__name__} cannot be sent or kept: {error}") from error


def decode(frames: Sequence[Any]) -> Any:
    """Return what was encoded, with memory of its own, so that arrays can be written to.

    Raises ``ElasticError`` for anything that ``encode`` does not write.
    """
    head, *buffers = frames
    decoder = _Decoder(buffers)
    try:
        content = decoder.unpack(head)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ElasticError(f"a message or state cannot be read: {error}") from error
    if decoder.taken != len(buffers):
        raise ElasticError(f"a message or state cannot be read: {len(buffers)} buffers, {decoder.taken} used")
    return content


def size(frames: Sequence[Any]) -> int:
    """Return the bytes in ``frames``."""
    return sum(memoryview(frame).nbytes for frame in frames)


def pack(content: Any) -> bytes:
    """Return ``content`` as one checksummed block, for a file."""
    body: list[bytes | memoryview] = []
    frames = encode(content)
    for frame in frames:
        body += [_LENGTH.pack(memoryview(frame).nbytes), frame]
    digest = blake2b(_LENGTH.pack(len(frames)), digest_size=_DIGEST)
    for part in body:
        digest.update(part)
    return b"".join([_HEAD.pack(_MAGIC, len(frames), digest.digest()), *body])


def claimed(head: bytes, name: str) -> str:
    """Return the digest that a block's first ``HEAD_SIZE`` bytes name. Raises ``ElasticError`` if it is no block."""
    if len(head) < _HEAD.size or head[: len(_MAGIC)] != _MAGIC:
        raise ElasticError(f"{name} is no snapshot file of this version of Ebbflow")
    return bytes(_HEAD.unpack_from(head)[2]).hex()


def check(data: bytes, name: str) -> str:
    """Return a block's digest. Raises ``ElasticError``, which says ``name``, if it is not whole."""
    digest = claimed(data[: _HEAD.size], name)
    body = memoryview(data)[_HEAD.size :]
    counted = blake2b(data[len(_MAGIC) : len(_MAGIC) + _LENGTH.size], digest_size=_DIGEST)
    counted.update(body)
    if counted.hexdigest() != digest:
        raise ElasticError(f"{name} is damaged: its checksum does not match")
    return digest


def unpack(data: bytes, name: str) -> Any:
    """Return what was packed. Raises ``ElasticError``, which says ``name``, if ``data`` is not whole."""
    check(data, name)
    _, count, _ = _HEAD.unpack_from(data)
    frames, place = [], _HEAD.size
    for _ in range(count):
        if place + _LENGTH.size > len(data):
            break
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        frames.append(memoryview(data)[place : place + length])
        place += length
    if len(frames) != count or place != len(data) or not frames:
        raise ElasticError(f"{name} is damaged: its parts are not as long as it says")
    try:
        return decode(frames)
    except ElasticError as error:
        raise ElasticError(f"{name} cannot be read: {error}") from error


def _extension(code: int, data: bytes) -> msgpack.ExtType:
    return tuple.__new__(msgpack.ExtType, (code, data))  # its own constructor checks both again, at a price


class _Encoder:
    """One encoding. MessagePack calls ``_convert`` for whatever it does not know."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self._within: list[str] = []  # what is being encoded, from the outside in

    def pack(self, content: Any) -> bytes:
        # one packer a level: a packer cannot be entered again, and its usual buffer is a quarter of a megabyte
        packer = msgpack.Packer(
            default=self._convert, strict_types=True, unicode_errors="surrogatepass", buf_size=_BUFFER
        )
        packed: bytes = packer.pack(content)
        return packed

    def _convert(self, value: Any) -> msgpack.ExtType:
        kind = type(value)
        if kind is np.ndarray:
            return self._array(value)
        found = registry.entry_of(kind)
        if found is None or len(self._within) >= _DEEPEST:
            self._refuse(value)
        assert found is not None
        self._within.append(found.name)
        packed = self.pack([found.name, found.take(value)])
        self._within.pop()
        return _extension(_VALUE, packed)

    def _array(self, array: np.ndarray[Any, Any]) -> msgpack.ExtType:
        if array.dtype.hasobject or not array.dtype.itemsize:
            self._refuse(array)
        dtype, flags = array.dtype, array.flags
        fortran = flags.f_contiguous and not flags.c_contiguous
        descr = dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)
        if array.nbytes <= _SMALL:
            data = array.tobytes("F" if fortran else "C")
            return _extension(_ARRAY, self.pack([descr, list(array.shape), fortran, data]))
        flat = (array.T if fortran else np.ascontiguousarray(array)).reshape(-1).view(np.uint8)
        self.buffers.append(flat.data)
        return _extension(_OUTSIDE, self.pack([descr, list(array.shape), fortran, len(self.buffers) - 1]))

    def _refuse(self, value: Any) -> None:
        kind = type(value)
        what = f"{kind.__module__}.{kind.__qualname__}"
        if kind is np.ndarray:
            what = f"an array of {value.dtype}"
        within = " in ".join(reversed(self._within))
        raise ElasticError(
            f"{what}{f' in {within}' if within else ''} cannot be sent or kept. Numbers, text, bytes, lists, tuples, "
            "sets, dictionaries, NumPy arrays of numbers and text can; for a class of your own, call "
            "ebbflow.infra.elastic.register(CLASS) in the module that defines it"
            + ("" if len(self._within) < _DEEPEST else f" (and {_DEEPEST} levels at most)")
        )


class _Decoder:
    """One decoding; every buffer must be used once, in order."""

    def __init__(self, buffers: Sequence[Any]) -> None:
        self._buffers = buffers
        self._depth = 0
        self.taken = 0

    def unpack(self, packed: Any) -> Any:
        # its limits on lengths are what the bytes can hold
        return msgpack.unpackb(
            packed, ext_hook=self._convert, strict_map_key=False, unicode_errors="surrogatepass"
        )

    def _convert(self, code: int, packed: bytes) -> Any:
        self._depth += 1
        if self._depth > _DEEPEST + 1:
            raise ValueError("it is nested too deeply")
        fields = self.unpack(packed)
        self._depth -= 1
        if code == _VALUE:
            name, content = fields
            return registry.entry_called(name).make(content)
        if code not in (_ARRAY, _OUTSIDE):
            raise ValueError(f"it holds an extension {code}, which is not known")
        descr, shape, fortran, data = fields
        if code == _OUTSIDE:
            if data != self.taken or data >= len(self._buffers):
                raise ValueError(f"buffer {data} is named where {self.taken} is due")
            data, self.taken = self._buffers[data], self.taken + 1
        dtype = np.dtype(descr) if isinstance(descr, str) else np.lib.format.descr_to_dtype(_described(descr))
        if dtype.hasobject:
            raise ValueError("an array holds objects")
        length = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        if min(shape, default=0) < 0 or length != dtype.itemsize * math.prod(shape):
            raise ValueError(f"{length} bytes are no array of {dtype} with shape {shape}")
        array = np.frombuffer(bytearray(data), dtype)
        return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def _described(descr: Any) -> Any:
    """Return what ``descr_to_dtype`` takes: lists of tuples, which MessagePack has made lists of lists."""
    if isinstance(descr, str):
        return descr
    if not isinstance(descr, list):
        raise TypeError(f"{descr!r} describes no array")
    return [(field[0], _described(field[1]), *map(tuple, field[2:])) for field in descr]
