"""Reads the transaction log of a W&B run (``run-ID.wandb``): LevelDB's log format with protobuf records of ``wandb``.

Format: LevelDB, doc/log_format.md; the file begins with ``:W&B``, 0xBEE1 and a version. A log that was torn, as by a
kill, ends at its last whole record.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEAD = struct.Struct("<4sHB")
_CHUNK = struct.Struct("<IHB")  # checksum, length, type
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the records (``wandb.proto.wandb_internal_pb2.Record``) of a log. Raises ``OSError``."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    for data in _payloads(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        try:
            record.ParseFromString(data)
        except DecodeError:
            return
        yield record


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the step and the values of each row of a run's history. Raises ``OSError``."""
    for record in records(path):
        if record.WhichOneof("record_type") != "history":
            continue
        values = {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
        }
        step = values.pop("_step", record.history.step.num)
        yield int(step), {key: value for key, value in values.items() if not key.startswith("_")}


def _payloads(data: bytes) -> Iterator[bytes]:
    if len(data) < _HEAD.size or data[:4] != b":W&B":
        return
    at, parts = _HEAD.size, b""
    while True:
        if (left := _BLOCK - at % _BLOCK) < _CHUNK.size:
            at += left
        if at + _CHUNK.size > len(data):
            return
        _, length, kind = _CHUNK.unpack_from(data, at)
        at += _CHUNK.size
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or at + length > len(data):
            return
        parts = data[at : at + length] if kind in (_FULL, _FIRST) else parts + data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            yield parts
