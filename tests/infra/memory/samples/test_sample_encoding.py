"""Samples as bytes: what comes back is the same bit by bit, and what is no sample is refused."""

import json
import struct
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ebbflow.infra.errors import DatasetError, MemoryTierError
from ebbflow.infra.memory.samples.encoding import decode, encode

NUMBERS = st.sampled_from(
    ["?", "<i1", ">i4", "<u8", "<f2", ">f4", "<f8", "<c16", "<M8[ns]", "<m8[s]", "S3", "<U2"]
)
ARRAYS = NUMBERS.flatmap(
    lambda kind: arrays.arrays(kind, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | ARRAYS
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
SAMPLES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Tell whether two samples are of the same types and have the same bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype.str, one.shape, one.tobytes()) == (other.dtype.str, other.shape, other.tobytes())
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@given(SAMPLES)
def test_a_sample_comes_back_bit_by_bit(sample: Any) -> None:
    assert same(decode(encode(sample)), sample)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64,
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_a_tensor_comes_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    (found,) = decode(encode((tensor,)))
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found, tensor)
    assert torch.equal(
        decode(encode(tensor.t() if len(shape) == 2 else tensor)), tensor.t() if len(shape) == 2 else tensor
    )
    found.zero_()  # it is its reader's own


def test_bits_that_are_no_number_are_kept() -> None:
    odd = np.array([0x7FC00001, 0xFF800002, 0x80000000], np.uint32).view(np.float32)
    assert decode(encode(odd)).tobytes() == odd.tobytes()
    tensor = torch.from_numpy(odd)
    assert decode(encode(tensor)).numpy().tobytes() == odd.tobytes()
    assert same(decode(encode(np.float32(1.5))), np.float32(1.5))


class _Own(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        (object(), "builtins.object"), (_Own(), "_Own"), ([{"a": {1, 2}}], "builtins.set"),
        (np.array([None]), "numpy.ndarray"), (np.zeros(2, "i4,f8"), "numpy.ndarray"),
        (torch.ones(2, requires_grad=True), "with gradients"), (torch.eye(2).to_sparse(), "tensor of"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"), (1j, "builtins.complex"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_named(sample: Any, named: str) -> None:
    with pytest.raises(DatasetError, match=f"must consist of tensors .*{named}"):
        encode(sample)


def test_containers_are_not_deep_without_end() -> None:
    deep: list[Any] = []
    for _ in range(40):
        deep = [deep]
    with pytest.raises(DatasetError, match="at most 32 containers"):
        encode(deep)


@given(SAMPLES, st.data())
def test_damaged_bytes_are_refused(sample: Any, data: st.DataObject) -> None:
    good = bytearray(encode(sample))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(MemoryTierError, match="must"):
        decode(bytes(good))
    with pytest.raises(MemoryTierError, match="must"):
        decode(encode(sample)[:at])


def _made(tree: Any, parts: bytes = b"", sizes: Any = None) -> bytes:
    """Return bytes with a right checksum, as a peer could make them."""
    header = json.dumps({"tree": tree, "sizes": [len(parts)] if sizes is None else sizes}).encode()
    rest = struct.pack("<I", len(header)) + header + parts
    return b"EBS1" + struct.pack("<I", crc32(rest)) + rest


def test_what_a_peer_makes_up_is_refused() -> None:
    assert decode(_made(["array", 0, "<i4", [2]], b"12345678")).tobytes() == b"12345678"
    for tree in (
        ["object", "os.system"], ["array", 0, "O", [1]], ["array", 0, "<i4", [2**62]], ["array", 0, "<i4", [-2]],
        ["array", 0, "<i4,<i4", [1]], ["array", 0, "U0", [10**15]], ["array", 7, "<i4", [2]], ["float", "00"],
        ["tensor", 0, "load", [8]], ["tensor", 0, "float64", [2]], ["int", "x"],
        ["dict", [[["list", []], ["none"]]]], "none", {}, [],
    ):  # fmt: skip
        with pytest.raises(MemoryTierError, match="must describe its bytes"):
            decode(_made(tree, b"12345678"))
    for sizes in ([9], [-1], ["8"], [True], 3):
        with pytest.raises(MemoryTierError, match="must describe its bytes"):
            decode(_made(["bytes", 0], b"12345678", sizes))
