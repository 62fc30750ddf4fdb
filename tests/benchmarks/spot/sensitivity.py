"""Recovery by replicas beside Oobleck's column on every trace, and what of it hangs on which cost."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ebbflow.infra.simulation.traces.rows import SpotRow
from tests.benchmarks.spot.models import SpotModel
from tests.benchmarks.spot.recovery import InPlace
from tests.benchmarks.spot.replicas import RecoveryCosts, ReplicaReplay, shards_of
from tests.benchmarks.spot.table import Row

NCCL = 0.53  # s in which NCCL's process group was ended and made anew, on one H100
DEFAULT_SAVES = "checkpoints as a run chooses by default"
EACH_NODE = "the same, if each lost node lost state"
BEHIND = 0.05  # of the share, that sharded replicas may be behind


_BASE = RecoveryCosts()


@dataclass(frozen=True)
class Variant:
    """Something that is taken otherwise than in the table."""

    name: str
    costs: RecoveryCosts = _BASE
    more: Mapping[str, Any] | None = None
    larger: int = 0  # nodes that a sharded replica has more than it needs

    def replay(self, model: SpotModel, rows: list[SpotRow]) -> ReplicaReplay:
        shards = shards_of(model)
        more = {"shards": shards + self.larger} if self.larger and shards > 1 else {}
        return ReplicaReplay(model, rows, self.costs, **more, **(self.more or {}))


def _in_place(pause: float) -> RecoveryCosts:
    return replace(_BASE, loss=pause, leave=pause, join=pause)


VARIANTS = (
    Variant("as in the table"),
    Variant(
        "NCCL's group made anew on top",
        RecoveryCosts(_BASE.loss + NCCL, _BASE.leave + NCCL, _BASE.join + NCCL, _BASE.restart + NCCL),
    ),
    Variant("pause in place 2 s", _in_place(2.0)),
    Variant("pause in place 5 s", _in_place(5.0)),
    Variant("pause in place 30 s", _in_place(30.0)),
    Variant("restart 0.74 s", replace(_BASE, restart=0.74)),
    Variant("restart 10 s", replace(_BASE, restart=10.0)),
    Variant("restart 30 s", replace(_BASE, restart=30.0)),
    Variant("links of 10 Gbit/s", replace(_BASE, link=10.0)),
    Variant("links of 100 Gbit/s", replace(_BASE, link=100.0)),
    Variant("a checkpoint an hour", more={"every": 3600.0}),
    Variant(DEFAULT_SAVES, more={"every": None}),
    Variant("the same, without the floor for the whole run", more={"every": None, "counts": "no floor"}),
    Variant(EACH_NODE, more={"every": None, "counts": "nodes"}),
    Variant("a notice of two minutes", more={"notice": 120_000}),
    Variant("speeds of checkpoint-restart", more={"piped": True}),
    Variant("sharded replicas of a node more", larger=1),
)


def replica_rows(models: Sequence[SpotModel], traces: Mapping[str, list[SpotRow]]) -> list[Row]:
    """Return a row per model and trace: components in ms, share, kept samples/s and share, nodes of a replica."""
    rows: list[Row] = []
    for model in models:
        for trace, events in traces.items():
            outcome = ReplicaReplay(model, events).run()
            head: Row = {"model": model.name, "trace": trace, "recovery": "replicas"}
            shards: Row = {"share": outcome.share, "shards": shards_of(model)}
            rows.append(head | asdict(outcome) | shards)
    return rows


def sensitivity(
    models: Sequence[SpotModel], traces: Mapping[str, list[SpotRow]], left_out: tuple[str, str]
) -> list[dict[str, Any]]:
    """Return how far each variant is from Oobleck's column, with whole replicas and with sharded ones.

    Each has ``whole`` and ``sharded``: rows, how many of them meet the goal (at or above; at most ``BEHIND`` behind),
    and the least difference of shares with the row in which it is. ``left_out`` is a model and a trace.
    """
    cases = [(model, name) for model in models for name in traces if (model.name, name) != left_out]
    oobleck = {(model.name, name): InPlace(model, traces[name]).run().share for model, name in cases}
    found = []
    for variant in VARIANTS:
        apart: dict[str, list[tuple[float, str, str]]] = {"whole": [], "sharded": []}
        for model, name in cases:
            share = variant.replay(model, traces[name]).run().share
            kind = "whole" if shards_of(model) == 1 else "sharded"
            apart[kind].append((share - oobleck[model.name, name], model.name, name))
        row: dict[str, Any] = {"variant": variant.name}
        for kind, goal in (("whole", 0.0), ("sharded", -BEHIND)):
            met = sum(difference >= goal for difference, *_ in apart[kind])
            row[kind] = {"rows": len(apart[kind]), "met": met, "least": min(apart[kind], default=None)}
        found.append(row)
    return found
