"""Frames of the aggregation service: what is not exactly of their form is refused before it is used."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.aggregation import frames
from ebbflow.infra.aggregation.frames import Kind, TensorFrame, decode, encode
from ebbflow.infra.errors import AggregationError

PUSH = TensorFrame(Kind.PUSH, "layer.weight", 7, np.arange(4, dtype="<f4").tobytes(), request=3)
INIT = TensorFrame(Kind.INIT, "ß", payload=b"\0" * 8, dtype="bfloat16", options={"name": "adam", "lr": 0.1})


def _bytes(parts: list[Any]) -> list[bytes]:
    return [bytes(one) for one in parts]


def test_frames_come_as_they_were_sent() -> None:
    found = decode(_bytes(encode([PUSH, INIT])))
    assert found == [PUSH, INIT]


@given(st.data())
def test_no_changed_byte_is_taken(data: st.DataObject) -> None:
    parts = _bytes(encode([PUSH, INIT]))
    which = data.draw(st.integers(0, 3))
    at = data.draw(st.integers(0, len(parts[which]) - 1))
    changed = bytearray(parts[which])
    changed[at] ^= data.draw(st.integers(1, 255))
    parts[which] = bytes(changed)
    with pytest.raises(AggregationError):
        decode(parts)


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_noise_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(AggregationError):
        decode(parts)


def test_parts_that_are_cut_or_too_many() -> None:
    head, payload = _bytes(encode([PUSH]))
    for parts in (
        [head],
        [head[:-1], payload],
        [head, payload[:-1]],
        [head + b"x", payload],
        [payload, head],
        [],
    ):
        with pytest.raises(AggregationError):
            decode(parts)
    with pytest.raises(AggregationError, match="tensors of a message must be at most 4096, not 5000"):
        decode([head, payload] * 5000)


def test_what_is_sent_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_PAYLOAD", 8)
    with pytest.raises(AggregationError, match="payload of a message must be at most 8, not 16"):
        encode([PUSH])
    with pytest.raises(AggregationError, match="name of a message must be at most 512, not 600"):
        encode([TensorFrame(Kind.PULL, "x" * 600)])
    with pytest.raises(AggregationError, match="options of a message must be at most 4096"):
        encode([TensorFrame(Kind.ERROR, "x", options={"error": "y" * 5000})])


def test_options_are_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", lambda value: "[1]")
    parts = _bytes(encode([INIT]))
    with pytest.raises(AggregationError, match="options of a frame must be a JSON object"):
        decode(parts)
