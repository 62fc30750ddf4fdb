"""What a running checkpoint is made of: blocks of parameters, their records and the store of these."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage.manifest import UnusableError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.running import segments
from ebbflow.infra.training.running.blocks import (
    block_distances,
    partition_by_layer,
    partition_by_shard,
    place_blocks,
)
from ebbflow.infra.training.running.segments import Record
from ebbflow.infra.training.running.store import BlockStore
from ebbflow.planners.errors import OptionError
from tests.infra.training.running import tensors

pytestmark = pytest.mark.usefixtures("no_sync")


# --- blocks -----------------------------------------------------------------------------------------------


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=5),
    rows=st.none() | st.integers(1, 4),
)
def test_shards_hold_every_row_once_in_order(shapes: list[list[int]], rows: int | None) -> None:
    made = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    blocks = partition_by_shard(made, rows)
    for name, tensor in made.items():
        own = [block for block in blocks if block.tensor == name]
        covered = [row for block in own for row in range(block.start, block.stop)]
        count = (tensor.shape[0] if tensor.dim() else 1) if tensor.numel() else 0
        assert covered == list(range(count))
        assert sum(block.nbytes for block in own) == tensor.numel() * 4
        assert sum(block.of(tensor).numel() for block in own) == tensor.numel()
    layers = partition_by_layer(made)
    assert [block.tensor for block in layers] == [name for name, t in made.items() if t.numel()]


def test_shards_are_of_about_16_kib_unless_told() -> None:
    (size,) = {block.nbytes for block in partition_by_shard({"w": torch.empty(1024, 1024)})}
    assert size == 16 << 10
    with pytest.raises(OptionError, match="rows of a block must be >= 1; got 0"):
        partition_by_shard({"w": torch.empty(4, 4)}, 0)


def test_placement_is_random_by_seed_and_even() -> None:
    placed = place_blocks(103, [3, 5, 9, 11], seed=1)
    counts = [placed.count(owner) for owner in (3, 5, 9, 11)]
    assert sorted(counts) == [25, 26, 26, 26]
    assert placed == place_blocks(103, [3, 5, 9, 11], seed=1)
    assert placed != place_blocks(103, [3, 5, 9, 11], seed=2)
    with pytest.raises(OptionError, match="at least one owner"):
        place_blocks(3, [], 0)


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16", "float64"]),
)
def test_distances_are_the_norms_of_the_blocks_changes(seed: int, rows: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    before = {**tensors(seed), "s": torch.tensor(1.5)}
    after = {**tensors(seed + 1), "s": torch.tensor(-1.0)}
    before, after = ({k: v.to(kind) for k, v in each.items()} for each in (before, after))
    blocks = partition_by_shard(before, rows)
    found = block_distances(after, before, blocks).double().numpy()
    true = [
        float((block.of(after[block.tensor]).double() - block.of(before[block.tensor]).double()).norm())
        for block in blocks
    ]
    np.testing.assert_allclose(found, true, rtol=2e-2 if dtype == "bfloat16" else 1e-6)


# --- records and their store ------------------------------------------------------------------------------


def record(block: int, iteration: int, size: int = 5) -> Record:
    return Record(block, iteration, (("param", torch.full((size,), float(iteration))),))


@settings(deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "int64", "bool", "float16", "complex64"]),
    shape=st.lists(st.integers(0, 4), max_size=3),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_a_record_comes_back_and_no_flipped_bit_goes_unseen(
    dtype: str, shape: list[int], where: float, bit: int
) -> None:
    value = (torch.randn(shape) * 3).to(getattr(torch, dtype))
    data = bytearray(b"".join(segments.encode(Record(4, 9, (("param", value), ("state.x", torch.ones(2)))))))
    found = segments.decode(bytes(data))
    assert (found.block, found.iteration) == (4, 9)
    parts = dict(found.parts)
    assert parts["param"].dtype == value.dtype
    assert torch.equal(parts["param"], value)
    data[int(where * len(data))] ^= 1 << bit
    with pytest.raises(UnusableError):
        segments.decode(bytes(data))


def test_the_store_keeps_the_newest_of_each_block_and_its_size_is_bounded(place: str) -> None:
    store = BlockStore(StorageLocation(place))
    rng = np.random.default_rng(0)
    newest: dict[int, int] = {}
    for iteration in range(1, 21):
        chosen = rng.choice(20, 4, replace=False).tolist()
        store.commit([record(block, iteration) for block in chosen])
        newest |= dict.fromkeys(chosen, iteration)
        assert store.contents.live >= store.contents.total / 2
    again = BlockStore(StorageLocation(place))
    assert again.iterations() == store.iterations() == newest
    for block, found in again.read(newest).items():
        assert dict(found.parts)["param"][0] == newest[block]

    there = [i.size for i in StorageLocation(place).entries() if i.base_name.endswith(".seg")]
    assert sum(there) == again.contents.total
    with pytest.raises(StorageError, match="has no block 77"):
        again.read([77])


def test_a_commit_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore(StorageLocation(tmp_path))
    store.commit([record(0, 1), record(1, 1)])

    def broken() -> Iterator[Record]:
        yield record(0, 2)
        raise PermissionError("gone")

    with pytest.raises(StorageError, match="permission denied"):
        store.commit(broken())
    assert store.iterations() == BlockStore(StorageLocation(tmp_path)).iterations() == {0: 1, 1: 1}
    assert len(list(tmp_path.glob("*.seg"))) == 1
    store.commit([record(0, 3)])
    assert BlockStore(StorageLocation(tmp_path)).iterations() == {0: 3, 1: 1}


def test_damage_is_named(tmp_path: Path) -> None:
    store = BlockStore(StorageLocation(tmp_path))
    store.commit([record(0, 1), record(1, 1)])
    (segment,) = tmp_path.glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[-3] ^= 4
    segment.write_bytes(data)
    store.read([0])
    with pytest.raises(StorageError, match=r"segment-0000000001\.seg has a damaged record of block 1"):
        store.read([1])
    segment.write_bytes(data[:20])
    with pytest.raises(StorageError, match=r"segment-0000000001\.seg has a"):
        store.read([0])
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(StorageError, match="damaged manifest"):
        BlockStore(StorageLocation(tmp_path))
