"""What aggregators hold, and of whom: the values of a cluster's report and of a training's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.infra.aggregation.registry import ServiceView
    from ebbflow.infra.aggregation.timing import HeldTensor


@dataclass(frozen=True, slots=True)
class TrainingShare:
    """What one training has of one aggregator.

    Args:
        training: its ID.
        tensors: of it, mirrors included.
        bytes: of their parameters and moments.
        mirror_bytes: of them, those of mirrors.
        fraction: of what all trainings use of the aggregator, 0 to 1: of its time where all was measured, else of
            bytes.
    """

    training: str
    tensors: int
    bytes: int
    mirror_bytes: int
    fraction: float


@dataclass(frozen=True, slots=True)
class AggregatorRow:
    """One aggregator; ``moved`` and ``updates`` count tensors, so far.

    ``waited_s``: seconds for which whole rounds of gradients waited for copies of tensors that came here, so far.
    """

    name: str
    node: str
    state: str  # serving or draining
    bytes: int
    updates: int
    moved: int
    shares: tuple[TrainingShare, ...] = ()
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AggregatedTraining:
    """One training.

    Args:
        training: its ID.
        aggregators: that answer its pulls.
        servers: private servers that it would have.
        tensors: of it, mirrors left out.
        bytes: of their parameters and moments.
        mirror_bytes: that its mirrors hold.
        mirrored_bytes: that were sent to its mirrors so far.
        mirror_age: rounds by which its oldest mirror is behind; ``None``: no mirror, or it is not known.
        iteration_s: seconds between two rounds, as measured; ``None``: not measured yet.
        update_s: seconds that aggregators work in a round; ``None`` as before.
        dollars: of aggregators' nodes, so far.
    """

    training: str
    aggregators: tuple[str, ...]
    servers: int
    tensors: int
    bytes: int
    mirror_bytes: int
    mirrored_bytes: int
    mirror_age: int | None
    iteration_s: float | None = None
    update_s: float | None = None
    dollars: float = 0.0


@dataclass(frozen=True, slots=True)
class AggregationReport:
    """A cluster's aggregation service as it is now.

    Args:
        aggregators: that serve.
        trainings: that they serve.
        private_servers: that the trainings would have.
        used: aggregators with tensors.
        manager: the aggregator whose process is in charge; empty: none.
        unused_dollars: of nodes that no training used.
        finished_dollars: of trainings that are over for a quarter of an hour.
    """

    aggregators: tuple[AggregatorRow, ...] = ()
    trainings: tuple[AggregatedTraining, ...] = ()
    private_servers: int = 0
    used: int = 0
    manager: str = ""
    unused_dollars: float = 0.0
    finished_dollars: float = 0.0


def aggregation_report(view: "ServiceView") -> AggregationReport | None:
    """Return the report of a service; ``None`` where no aggregator and no training is there."""
    from ebbflow.infra.aggregation.registry import ACCOUNTS, DEMAND, MANAGER, plain_name, savings
    from ebbflow.planners.aggregation.accounts import SharedAccounts
    from ebbflow.planners.model.ledger import REMEMBERED

    there = view.aggregators()
    if not there and not view.trainings():
        return None
    accounts = SharedAccounts.of(view.kind(ACCOUNTS.kind).get(ACCOUNTS.name, {}))
    apps = {run: str(body.get("app", run)) for run, body in view.kind(DEMAND).items()}
    rows = []
    for name, one in sorted(there.items()):
        held = [(job, tensor) for job, own in one.held.items() for tensor in own.values()]
        draining = one.leaving is not None or view.drain_of(name) is not None
        state = "draining" if draining else "serving"
        size = sum(tensor.bytes for _, tensor in held)
        shares = _shares({job: list(own.values()) for job, own in one.held.items()})
        rows.append(
            AggregatorRow(
                plain_name(name), one.node, state, size, one.updates, one.moved, tuple(shares), one.waited
            )
        )
    hosts, profiles, trainings = view.hosts(), view.profiles(), []
    for job, training in sorted(view.trainings().items()):
        own = [tensor for one in there.values() for tensor in one.held.get(job, {}).values()]
        mirrors = [tensor for tensor in own if tensor.mirror]
        profile = profiles.get(job)
        run = job.rpartition("/")[0] or job
        trainings.append(
            AggregatedTraining(
                job,
                tuple(sorted({plain_name(host) for (mine, _), host in hosts.items() if mine == job})),
                training.servers,
                len(own) - len(mirrors),
                sum(tensor.bytes for tensor in own) - sum(tensor.bytes for tensor in mirrors),
                sum(tensor.bytes for tensor in mirrors),
                sum(tensor.mirrored for tensor in mirrors),
                _mirror_age(view, job),
                profile.iteration_us / 1e6 if profile else None,
                profile.execution_us / 1e6 if profile else None,
                float(accounts.dollars.get(apps.get(run, run), 0.0)),
            )
        )
    saved = savings(view)
    return AggregationReport(
        tuple(rows),
        tuple(trainings),
        saved["private"],
        saved["used"],
        plain_name(str(view.kind(MANAGER.kind).get(MANAGER.name, {}).get("holder", ""))),
        float(accounts.dollars.get("", 0.0)),
        accounts.forgotten + sum(accounts.finished(view.now - REMEMBERED).values()),
    )


def _shares(held: "dict[str, list[HeldTensor]]") -> list[TrainingShare]:
    tensors = [tensor for own in held.values() for tensor in own]
    measured = all(tensor.execution_us and tensor.iteration_us for tensor in tensors)

    def use(own: "list[HeldTensor]") -> float:
        if measured:
            return sum(tensor.execution_us / tensor.iteration_us for tensor in own)
        return float(sum(tensor.bytes for tensor in own))

    total = use(tensors) or 1.0
    return [
        TrainingShare(
            job,
            len(own),
            sum(tensor.bytes for tensor in own),
            sum(tensor.bytes for tensor in own if tensor.mirror),
            use(own) / total,
        )
        for job, own in sorted(held.items())
    ]


def _mirror_age(view: "ServiceView", job: str) -> int | None:
    """Return how many rounds a training's oldest mirror is behind.

    A mirror that gets each push is not: no worker has parameters before it has applied their step. Of a spare the
    rounds are those of the last records, which are a second old at most.
    """
    held = [one.held.get(job, {}) for one in view.aggregators().values()]
    rounds = {name: one.round for own in held for name, one in own.items() if not one.mirror}
    ages = [
        max(rounds[name] - one.round, 0) if one.spare else 0
        for own in held
        for name, one in own.items()
        if one.mirror and name in rounds
    ]
    return max(ages, default=None)


def private_report(aggregators: Mapping[str, Mapping[str, Any]], servers: int) -> AggregationReport | None:
    """Return the report of the aggregators that a training has to itself; ``None`` where they hold nothing.

    Args:
        aggregators: plain values of the ``AggregatorRecord`` of each, by name.
        servers: number of them that the training asks for.
    """
    if not any(body["held"] for body in aggregators.values()):
        return None
    from ebbflow.infra.aggregation.manager import private_view

    return aggregation_report(private_view(aggregators, servers))
