"""Where a training's processes listen, and how nodes on other machines than the launcher's reach torch's store."""

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ebbflow.infra.protocols import TrainingJob
from ebbflow.infra.training.channel.wire import Entry, is_loopback
from ebbflow.infra.training.launcher import agent
from ebbflow.infra.training.launcher.pool import Admit, admit_none
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes

PRELOAD = ("torch.distributed", "ebbflow.infra.training.process.world")
LONG = 120.0  # seconds: a bound for a busy machine, not an expectation
SIZE = 6 << 20  # bytes: more than a stream may have under way

SCRIPT = """
import hashlib, json, os, sys, time
from pathlib import Path

import psutil, torch
import torch.distributed as dist
from ebbflow.infra.training.process.channel import Channel, Report
from ebbflow.infra.training.process.world import World

folder, size = Path(sys.argv[1]), int(sys.argv[2])
world = World.join(60.0)
total = 0.0
for turn in range(5):
    total += world.sum([world.rank + turn])[0]
store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
if world.rank == 0:
    store.set("big", bytes(range(256)) * (size // 256))
digest = hashlib.sha256(store.get("big")).hexdigest()
listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
said = {
    "total": total,
    "digest": digest,
    "listening": listening,
    "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    "nccl": os.environ.get("NCCL_SOCKET_IFNAME"),
    "store": [os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])],
    "tunnels": [c.pid for c in psutil.Process().parent().parent().children()
                if "ebbflow.infra.training.launcher.tunnel" in c.cmdline()],
}
(folder / f"rank-{world.rank}.json").write_text(json.dumps(said))
dist.barrier()
if world.rank == 0:
    Channel.connect().post(Report("finished", 0, time.time(), 1, {"saved": True}))
world.leave()
"""


class Elsewhere(LocalNodes):
    """Nodes of this machine that go the way of those on other machines."""

    def start(self, name: str, slots: int, entry: Entry, admit: Admit = admit_none) -> None:
        super().start(name, slots, replace(entry, tunnel=True), admit)


def train(
    folder: Path, nodes: LocalNodes, environment: dict[str, str] | None = None
) -> list[dict[str, object]]:
    """Run the script on two nodes and return what its ranks found."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    job = TrainingJob(
        "net", str(script), (str(folder), str(SIZE)), str(folder / "run"), environment=environment or {}
    )
    with TorchTrainer(nodes, preload=PRELOAD) as trainer:
        trainer.launch(job, {"node-1": 1, "node-2": 1})
        status = trainer.wait(LONG)
        assert status.state == "finished", status
        assert trainer._exchange.refusals.total == 0
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def check(found: list[dict[str, object]]) -> None:
    assert [one["total"] for one in found] == [5 * 1 + 2 * sum(range(5))] * 2
    assert found[0]["digest"] == found[1]["digest"]


def loopback() -> str:
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(a.address == "127.0.0.1" for a in addresses)
    )


def test_processes_of_this_machine_listen_on_its_loopback_interface_only(tmp_path: Path) -> None:
    found = train(tmp_path, LocalNodes(tmp_path / "nodes"))
    check(found)
    for one in found:
        assert one["listening"], "gloo listens for the other process"
        assert all(is_loopback(str(address)) for address in one["listening"])  # type: ignore[attr-defined]
        assert one["interface"] == one["nccl"] == loopback()
    assert found[0]["store"] == found[1]["store"], "the launcher's own"
    assert not any(one["tunnels"] for one in found)


def test_nodes_of_other_machines_reach_the_store_by_a_tunnel(tmp_path: Path) -> None:
    found = train(tmp_path, Elsewhere(tmp_path / "nodes"))
    check(found)
    assert len({tuple(one["store"]) for one in found}) == 2, "each node's own"  # type: ignore[arg-type]
    assert all(len(one["tunnels"]) == 1 for one in found)  # type: ignore[arg-type]


def test_an_interface_that_the_user_has_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"GLOO_SOCKET_IFNAME": "ib0"}
    agent.bind_collectives(named, "127.0.0.1")
    assert named == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": loopback()}
    unknown: dict[str, str] = {}
    agent.bind_collectives(unknown, "192.0.2.7")
    assert unknown == {}


def test_a_node_shares_the_launchers_loopback_interface_where_the_launcher_is_reached_there() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "localhost", "::1")))
    assert not any(
        map(
            is_loopback,
            ("10.0.0.1", "192.0.2.7", "node-1", "2001:db8::1", "127.0.0.1.example.org"),
        )
    )
