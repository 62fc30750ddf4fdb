"""One process of ``nodes``: trains a model by the plans of all systems in turns, and tells how long iterations took.

Its one argument is a JSON object (``Assignment``). The first rank prints the result as the last line, JSON too.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ebbflow.infra.communication.channels import Channels
from ebbflow.infra.communication.control import PlanningSettings, sweep_of
from ebbflow.infra.communication.enforcer import Enforcer
from ebbflow.infra.communication.measuring import measure
from ebbflow.infra.communication.plain import PlainCollectives
from ebbflow.infra.communication.planned import PlannedCommunication
from ebbflow.infra.communication.profiler import WARM_UP, IterationProfiler
from ebbflow.infra.communication.searching import SearchRequest, search
from ebbflow.infra.communication.switching import PlanSwitch
from ebbflow.planners.communication.baselines import SYSTEMS
from ebbflow.planners.communication.commit import PLAIN, Decision, Prepare
from ebbflow.planners.communication.plan import CommunicationPlan
from ebbflow.planners.communication.recorded import RankProfile, RecordedTraining, merge_profiles
from examples import train_dlrm

TIMEOUT = 300.0  # s
BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)  # of plain DDP, whose best counts
DENSE_WIDTH, DENSE_DEPTH, DENSE_BATCH = 512, 6, 32
TABLES, DIM, DLRM_WIDTH, DLRM_BATCH = 8, 64, 512, 512
LAYER, BOTTOM, TOP, LOOK_UP = (
    0.010,
    0.020,
    0.035,
    0.010,
)  # s of a forward pass on the device; backward takes twice


@dataclass(frozen=True)
class Assignment:
    """What a rank does."""

    rank: int
    ranks: int
    host: str  # of the first rank
    port: int
    model: str  # dense or dlrm
    interfaces: tuple[str, ...]  # one for each channel
    rounds: int  # 0: only the profile
    block: int  # iterations of a system in a round
    search_seconds: float
    measure_seconds: float


@dataclass
class Blocks(PlannedCommunication):
    """Runs given plans one after the other, ``block`` iterations each; nothing is searched meanwhile.

    Args:
        channels: that carry pieces.
        block: iterations of a plan whose times count; one more before them does not.
        versions: of plans, rising.
    """

    channels: Channels
    block: int
    versions: Iterator[int]
    plans: list[tuple[str, CommunicationPlan]] = field(default_factory=list)  # that are left
    recorded: RecordedTraining | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by system

    def __post_init__(self) -> None:
        self.profiler, self._channels = IterationProfiler(), self.channels
        self._names = {PLAIN: "plain"}
        self._count = -WARM_UP
        plain = PlainCollectives().submit
        self.switch = PlanSwitch(
            self.channels.rank, self.channels.ranks, plain, self.profiler, lambda said: None
        )

    def end(self) -> None:
        summed = torch.tensor(self.switch.votes(), dtype=torch.float64)
        dist.all_reduce(summed)
        self.profiler.mark("agreement", shared=True)
        before = self.switch.version
        boundary = self.switch.settle(summed.tolist())
        if self.switch.failure:
            raise RuntimeError(self.switch.failure)
        if self._count > 0:
            self.seconds.setdefault(self._names[before], []).append(boundary.seconds)
        self._count = 0 if boundary.changed else self._count + 1
        if self._count >= self.block and self.plans:
            self._propose(*self.plans.pop(0))

    def _propose(self, name: str, plan: CommunicationPlan) -> None:
        assert self.recorded is not None
        version = next(self.versions)
        self._names[version] = name
        plan = replace(plan, version=version)
        collectives = {op.name: (op.kind, op.bytes) for op in self.recorded.dag.comm}
        vote = self.switch.prepare(Prepare(version, plan.digest), Enforcer(plan, self.channels), collectives)
        if not vote.yes:
            raise RuntimeError(f"{name}: {vote.reason}")
        self.switch.decide(Decision(version, commit=True, activate_at=self.switch.iteration + 1))
        self._count = -(10**6)  # the iteration until it is changed does not count

    def close(self, timeout: float = 5.0) -> None:
        del timeout  # no control plane is to end
        self.switch.close()


class _Device(torch.autograd.Function):
    """A device that computes beside the processor: forward for a time, backward for twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient, None


def on_device(x: Tensor, seconds: float) -> Tensor:
    """Return ``x`` once a device has worked on it."""
    found: Tensor = _Device.apply(x, seconds)  # type: ignore[no-untyped-call]
    return found


class DeviceLayer(torch.nn.Linear):
    """A layer that a device computes."""

    def forward(self, x: Tensor) -> Tensor:
        return on_device(super().forward(x), LAYER)


class DevicePerceptrons(train_dlrm.Perceptrons):
    """Perceptrons that a device computes."""

    def forward(self, dense: Tensor, embedded: Any) -> Tensor:
        below = on_device(self.bottom(dense), BOTTOM)  # embeddings are under way meanwhile
        found: Tensor = self.top(torch.cat([below, embedded()], dim=1)).squeeze(1)
        return on_device(found, TOP)


class DeviceTables(train_dlrm.Tables):
    """Tables that lie on a device."""

    def forward(self, indices: Sequence[Tensor]) -> Tensor:
        return on_device(super().forward(indices), LOOK_UP)


def dense(communication: Blocks, steps: int, bucket_mb: float) -> None:
    """Train a perceptron of equal layers."""
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(DENSE_DEPTH):
        layers += [DeviceLayer(DENSE_WIDTH, DENSE_WIDTH), torch.nn.ReLU()]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=bucket_mb)  # type: ignore[no-untyped-call]
    communication.reduce(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        communication.begin()
        loss = model(torch.randn(DENSE_BATCH, DENSE_WIDTH)).square().mean()
        optimizer.zero_grad()
        communication.forward_done()
        loss.backward()
        communication.reduced()
        optimizer.step()
        communication.end()


def dlrm(communication: Blocks, steps: int, bucket_mb: float) -> None:
    """Train the example's recommendation model, larger."""
    train_dlrm.DIM, train_dlrm.Perceptrons, train_dlrm.Tables = DIM, DevicePerceptrons, DeviceTables  # type: ignore[misc]
    train_dlrm.train(TABLES, DLRM_BATCH, DLRM_WIDTH, steps, communication, bucket_mb=bucket_mb)


MODELS = {"dense": dense, "dlrm": dlrm}
HAND_ORDER = {"dense": (), "dlrm": ("emb-fwd", "emb-bwd")}


def run(given: Assignment) -> dict[str, Any]:
    """Return what was measured; the same on all ranks but for times."""
    channels = Channels(len(given.interfaces), timeout=TIMEOUT, interfaces=given.interfaces)
    train, versions = MODELS[given.model], count(1)
    blocks = Blocks(channels, 0, versions)
    train(blocks, WARM_UP + 12, BUCKETS_MB[0])
    recorded = _merged(blocks.profiler.profile(given.rank, given.ranks))
    blocks.close()
    found: dict[str, Any] = {
        "compute_s": sum(one.seconds for one in recorded.dag.compute),
        "iteration_s": recorded.seconds,
        "sent_bytes": sum(
            op.bytes * (1.0 if op.kind == "all-to-all" else 2.0) * (given.ranks - 1) / given.ranks
            for op in recorded.dag.comm
        ),
        "collectives": {op.name: [op.kind, op.bytes] for op in recorded.dag.comm},
    }
    if not given.rounds:
        return found
    settings = PlanningSettings(channels=len(given.interfaces), measure_seconds=given.measure_seconds)
    links = measure(channels, sweep_of(recorded, settings))
    plans, predicted, choices = _plans(given, recorded, links)
    found |= {"contention": links.contention, "predicted_s": predicted, "choices": choices}
    seconds: dict[str, list[float]] = {}
    for number in range(given.rounds):
        turn = plans[number % len(plans) :] + plans[: number % len(plans)]
        blocks = Blocks(channels, given.block, versions, list(turn), recorded)
        train(blocks, WARM_UP + (given.block + 2) * (len(turn) + 1) + 2, BUCKETS_MB[0])
        blocks.close()
        for name, some in blocks.seconds.items():
            if name != "plain":
                seconds.setdefault(name, []).extend(some)
        for size in BUCKETS_MB:
            plain = Blocks(channels, given.block, versions)
            train(plain, WARM_UP + 1 + given.block, size)
            plain.close()
            seconds.setdefault(f"DDP {size:g} MB", []).extend(plain.seconds["plain"])
    return found | {"seconds": seconds}


def _merged(profile: RankProfile) -> RecordedTraining:
    profiles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(profiles, profile.to_json())
    return merge_profiles(RankProfile.from_json(one) for one in profiles)


def _plans(
    given: Assignment, recorded: RecordedTraining, links: Any
) -> tuple[Sequence[tuple[str, CommunicationPlan]], dict[str, float], dict[str, dict[str, str]]]:
    """Return the plan of each system, made by the first rank."""
    said: list[Any] = [None]
    if given.rank == 0:
        said[0] = []
        for system in SYSTEMS:
            order = HAND_ORDER[given.model] if system == "HO" else ()
            request = SearchRequest(recorded, links, 1, given.search_seconds, 0, system, tuple(order))
            said[0].append((system, search(request).plan.to_json()))
    dist.broadcast_object_list(said)
    plans = [(name, CommunicationPlan.from_json(text)) for name, text in said[0]]
    choices = {name: {op: one.choice.name for op, one in plan.collectives.items()} for name, plan in plans}
    return plans, {name: plan.seconds for name, plan in plans}, choices


def main() -> None:
    """Join the others and measure."""
    values = json.loads(sys.argv[1])
    given = Assignment(**{**values, "interfaces": tuple(values["interfaces"])})
    torch.set_num_threads(1)
    store = dist.TCPStore(given.host, given.port, given.ranks, is_master=given.rank == 0)
    dist.init_process_group("gloo", store=store, rank=given.rank, world_size=given.ranks)
    found = run(given)
    dist.barrier()
    if given.rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
