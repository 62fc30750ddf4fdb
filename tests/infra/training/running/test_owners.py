"""Who owns which block, and how blocks come back, of one process alone; with others, ``test_running_checkpoint``."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.running.blocks import BlockCache
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.infra.training.running.folder import RunningFolder
from ebbflow.infra.training.running.live_state import LiveState
from ebbflow.infra.training.running.owners import OwnedBlocks, Owners
from ebbflow.infra.training.running.restoring import Recovery, Restorer
from ebbflow.infra.training.running.segments import STATE
from ebbflow.planners.errors import OptionError


def test_a_process_alone_is_the_first_and_owns_everything() -> None:
    owners = Owners(None, 3)
    assert (owners.owner, owners.first, owners.all_gather("x"), owners.together(lambda: 1)) == (
        3,
        True,
        ["x"],
        [1],
    )
    blocks = OwnedBlocks(owners, LiveState({"w": torch.zeros(8, 2)}, None, 3), "shard", 2, 0)
    assert blocks.placement == (3,) * 4 == (3,) * len(blocks)
    assert blocks.mine([1, 2]) == [1, 2]
    assert blocks.local == range(4)
    assert blocks.sizes.tolist() == [16.0] * 4
    blocks.place([3, 0, 3, 0])
    assert blocks.mine(range(4)) == [0, 2]
    with pytest.raises(OptionError, match="an owner for 4 blocks; got 1"):
        blocks.place([3])
    with pytest.raises(OptionError, match="no parameter to cut into blocks"):
        OwnedBlocks(owners, LiveState({"w": torch.zeros(0, 2)}, None, 3), "shard", 2, 0)


def test_what_goes_wrong_in_work_done_together_is_raised() -> None:
    def work() -> None:
        raise StorageError("full")

    with pytest.raises(StorageError, match="full"):
        Owners(None, None).together(work)


def test_blocks_come_back_from_where_they_were_saved_last(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(16.0).reshape(8, 2)}
    RunningCheckpoint(StorageLocation(tmp_path), tensors, period=4, shard_rows=2).initialize({"epoch": 1})
    again = {"w": torch.zeros(8, 2)}
    live, folder = LiveState(again, None), RunningFolder(StorageLocation(tmp_path))
    blocks = OwnedBlocks(Owners(None, None), live, "shard", 2, 0)
    cache = BlockCache(blocks.specs, blocks.local)
    cache.fill(live.tensors, 0)
    restoring = Restorer(folder, blocks, live, cache)
    moved = np.array([0.0, 3.0, 4.0, 7.0])
    found = restoring.lost(restoring.start(None), [1, 2], moved, 0.0)
    assert (found.blocks, found.bytes, found.oldest, found.perturbation) == (2, 32, 0, 5.0)
    assert moved.tolist() == [0.0, 0.0, 0.0, 7.0]
    assert torch.equal(again["w"][2:6], tensors["w"][2:6])
    assert not again["w"][:2].any()
    with pytest.raises(OptionError, match=r"blocks \[4\] are of shards"):
        restoring.lost("000001", [4], moved, 0.0)
    assert [list(few) for few in folder.records("000001", range(4), 3)] == [[0, 1, 2], [3]]
    start, records, _ = restoring.read(None, 0, [0, STATE])
    assert start == "000001"
    whole, small = restoring.everything(records, 0.0)
    assert (whole.blocks, whole.state, set(small)) == (4, {"epoch": 1}, {"live", "run", "plan", "moved"})
    assert set(records) == {0, 1, 2, 3, STATE}
    assert torch.equal(again["w"], tensors["w"])


def test_a_bound_needs_all_that_it_is_made_of() -> None:
    found = Recovery(1, 8, 0.1, 3, 2, 1.0)
    assert found.bounded(0.9, None) is found
    assert found.bounded(0.9, 2.0).rework is not None
    assert Recovery(1, 8, 0.1, 3, 2, None).bounded(0.9, 2.0).rework is None


def test_where_nothing_was_begun_nothing_comes_back(tmp_path: Path) -> None:
    live = LiveState({"w": torch.zeros(2, 2)}, None)
    blocks = OwnedBlocks(Owners(None, None), live, "layer", None, 0)
    restoring = Restorer(
        RunningFolder(StorageLocation(tmp_path)), blocks, live, BlockCache(blocks.specs, blocks.local)
    )
    with pytest.raises(StorageError, match=f"no running checkpoint in {StorageLocation(tmp_path).uri}"):
        restoring.start(None)
