"""Three processes that own the blocks of one model together; the last is killed, the others adopt what it held."""

import os
import signal
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.planners.training.saving.partial import assign_lost_blocks
from tests.infra.training.worlds import EXCHANGE

ITERATIONS = 9


def survivors_of(rank: int, place: str, meeting: str) -> None:
    dist.init_process_group("gloo", f"file://{meeting}/first", rank=rank, world_size=3, timeout=EXCHANGE)
    torch.manual_seed(0)
    now = {"w": torch.randn(30, 5)}
    made = RunningCheckpoint(
        StorageLocation(place), now, period=8, fraction=0.25, shard_rows=1, group=dist.group.WORLD, seed=5
    )
    made.initialize()
    past = [now["w"].clone()]
    chosen: list[list[int]] = []
    for iteration in range(1, ITERATIONS + 1):
        torch.manual_seed(iteration)
        now["w"] += torch.randn(30, 5) * torch.rand(30, 1)
        if iteration % 2 == 0:  # what others own is not known here, and must not matter
            for block, owner in enumerate(made.placement):
                if owner != rank:
                    made._cache._saved["w"][block] += 100.0
        past.append(now["w"].clone())
        saved = made.step(iteration)
        made.wait()
        gathered: list[list[int]] = [[], [], []]
        dist.all_gather_object(gathered, saved)
        chosen.append([block for part in gathered for block in part])
        if chosen[-1]:
            assert abs(len(chosen[-1]) - 30 / 4) <= 1, "a quarter of all blocks, over all processes"
            far = (past[iteration] - torch.stack([past[at][b] for b, at in enumerate(known(made))])).norm(
                dim=1
            )
            assert set(chosen[-1]) == set(far.argsort(descending=True)[: len(chosen[-1])].tolist())
            remember(made, chosen[-1], iteration)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{meeting}/second", rank=rank, world_size=2, timeout=EXCHANGE)
    lost = [block for block, owner in enumerate(made.placement) if owner == 2]
    adopted = assign_lost_blocks({block: made.sizes[block] for block in lost}, {0: 10.0, 1: 10.0})
    made.regroup(dist.group.WORLD, [adopted.get(b, owner) for b, owner in enumerate(made.placement)])
    now["w"][lost] = 0.0
    kept = now["w"].clone()
    found = made.recover(lost)
    at = known(made)
    for block in range(30):
        expected = past[at[block]][block] if block in lost else kept[block]
        assert torch.equal(now["w"][block], expected), (block, at[block])
    assert found.oldest == min(at[block] for block in lost)
    then = {}
    for iteration in (10, 12, 14, 16):
        now["w"] += 1.0
        saved = made.step(iteration)
        made.wait()
        assert len(saved) > 0
        then[iteration] = now["w"].clone()
        both: list[list[int]] = [[], []]
        dist.all_gather_object(both, saved)
        remember(made, both[0] + both[1], iteration)
    assert any(at[block] >= 10 for block in lost), "an adopted block is in the folders of both its owners"
    made.recover(range(30))
    for block in range(30):
        if at[block] >= 10:
            assert torch.equal(now["w"][block], then[at[block]][block]), (block, at[block])
    print("recovered", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def known(made: RunningCheckpoint) -> list[int]:
    return _at.setdefault(id(made), [0] * 30)


def remember(made: RunningCheckpoint, blocks: list[int], iteration: int) -> None:
    for block in blocks:
        known(made)[block] = iteration


_at: dict[int, list[int]] = {}

if __name__ == "__main__":
    assert timedelta(0) < EXCHANGE
    with tempfile.TemporaryDirectory() as meeting:
        children = []
        for rank in range(3):
            child = os.fork()
            if not child:
                status = 1
                try:
                    survivors_of(rank, sys.argv[1], meeting)
                    status = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert ends == [0, 0, -signal.SIGKILL], ends
