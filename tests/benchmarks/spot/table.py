"""A recovery policy beside the two of the public simulator, on the same traces."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ebbflow.infra.simulation.traces.rows import SpotRow
from ebbflow.planners.model.recovery import RecoveryPolicy
from tests.benchmarks.spot.models import SpotModel
from tests.benchmarks.spot.policy import PolicyReplay
from tests.benchmarks.spot.recovery import CheckpointRestart, InPlace, Replay

Row = dict[str, str | float]


def recovery_table(
    models: Sequence[SpotModel],
    traces: Mapping[str, list[SpotRow]],
    policies: Sequence[RecoveryPolicy],
    notice: int = 0,
) -> list[Row]:
    """Return one row per model, trace and way to recover: times in ms, share, kept samples/s, kept share.

    Ways are ``checkpoint-restart`` and ``in-place`` (as published), each policy by its name, and by its name with
    ``strict`` where nothing trains during a restart. ``notice`` is how many ms ahead policies hear of removals.
    """
    rows: list[Row] = []
    for model in models:
        for trace, events in traces.items():
            ways: dict[str, Replay] = {
                "checkpoint-restart": CheckpointRestart(model, events),
                "in-place": InPlace(model, events),
            }
            for policy in policies:
                ways[policy.name] = PolicyReplay(model, events, policy, notice)
                ways[f"{policy.name}, strict"] = PolicyReplay(model, events, policy, notice, strict=True)
            for way, replay in ways.items():
                outcome = replay.run()
                head: Row = {"model": model.name, "trace": trace, "recovery": way}
                rows.append(head | asdict(outcome) | {"share": outcome.share})
    return rows
