"""What stages wait for where their outputs are kept: peers' memory, a local disk, or an object store.

The rates of a cost model hold what cores do to write and read an output; this is the tier's own time beyond it.
"""

from collections.abc import Sequence

from ebbflow.planners.memory.tiers import Tier, tier_cost
from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.qep import Stage

_TYPICAL = 100e6  # bytes of an output
_NOTABLE = 1.5  # times as long: a measurement that varies less changes no plan


def output_seconds(size: float, tier: Tier | None, share: Share) -> float:
    """Return the seconds in which a stage's output is written, or read, by all nodes at once.

    Args:
        size: bytes of the output as stored.
        tier: where it is kept, with a node's bandwidth; ``None``: the rates hold all that it takes.
        share: the nodes.
    """
    return 0.0 if tier is None else tier_cost(size / max(share.nodes, 1), tier)


def tier_changed(before: Tier | None, after: Tier | None) -> bool:
    """Tell whether stage outputs are kept in another tier, or take a multiple of the time there."""
    if before is None or after is None or before.name != after.name:
        return before != after
    times = sorted(tier_cost(_TYPICAL, one) for one in (before, after))
    return times[1] > _NOTABLE * times[0]


def tier_note(stages: Sequence[Stage], tier: Tier, share: Share) -> str:
    """Return a sentence that says where a plan's stage outputs are kept and what that takes.

    Args:
        stages: of the plan; the last one's output is the result.
        tier: where they are kept.
        share: the nodes.
    """
    readers = [fp for stage in stages for fp in stage.inputs]
    seconds = sum(
        (1 + readers.count(one.output_fp)) * output_seconds(one.bytes, tier, share) for one in stages[:-1]
    )
    count = len(stages) - 1
    speed = f"{tier.latency_s * 1e3:.3g} ms to the first byte, {tier.bytes_per_second / 1e6:,.0f} MB/s a node"
    if not count:
        return f"no stage output is kept in {tier.name} ({speed})"
    kept = "1 stage output is" if count == 1 else f"{count} stage outputs are"
    return f"{kept} kept in {tier.name} ({speed}): {seconds:.2g} s to write and read"
