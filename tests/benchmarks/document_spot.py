"""The section of ``docs/benchmarks.md`` on recovery from lost spot nodes."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.spot.sensitivity import BEHIND, DEFAULT_SAVES, EACH_NODE

_OURS, _THEIRS = "replicas", "in-place"
_HEAD = (
    "model",
    "trace",
    "nodes a replica",
    "steps lost",
    "recovery",
    "idle nodes",
    "kept share of the wall clock: ours, `in-place`",
    "kept samples/s over `in-place`",
)

Outcomes = Mapping[str, Mapping[str, Any]]
"""Of one model on one trace, by way to recover."""


def section(found: dict[str, Any]) -> str:
    """Return the section."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in found["rows"]:
        rows.setdefault((row["model"], row["trace"]), {})[row["recovery"]] = row
    ways = list(dict.fromkeys(row["recovery"] for row in found["rows"]))
    table = "\n".join(
        f"| {model} | {trace} | {_shares(of, ways)} | {_met(of)} |" for (model, trace), of in rows.items()
    )
    costs = "\n".join(
        f"| {model} | {trace} | {of[_OURS]['shards']} | {' | '.join(_parts(of[_OURS]))} "
        f"| {of[_OURS]['kept_share']:.3f}, {of[_THEIRS]['kept_share']:.3f} "
        f"| {of[_OURS]['kept_rate'] / of[_THEIRS]['kept_rate']:.3f} |"
        for (model, trace), of in rows.items()
    )
    variants = "\n".join(
        f"| {row['variant']} | {_count(row['whole'])} | {_count(row['sharded'])} |"
        for row in found["sensitivity"]
    )
    strictly = sum(
        of["hazard-aware, strict"]["share"] > of["checkpoint-restart"]["share"] for of in rows.values()
    )
    return f"""## Recovering from lost spot nodes

`python -m tests.benchmarks.spot_recovery --out docs/benchmarks`

Share of effective training in the total of training, checkpoints, restarts, lost work and idling, simulated on
public traces of up to 30 nodes. `checkpoint-restart` and `in-place` are the public simulator's models of Varuna
and Oobleck, reproduced to the digit. The others are ours:

- `hazard-aware` restarts from checkpoints at the costs of the first, without notices: it saves at Daly's interval
  for the hazard it has seen, makes one restart of removals at the same instant, and takes in nodes that have become
  ready. The public engine lets steps continue while a restart is prepared; `strict` does not. It is above
  `checkpoint-restart` in {strictly} of {len(rows)} rows.
- `replicas` is [what a training does](training.md#changes-of-nodes-without-a-restart) with `--recovery in-place`
  where a model fits a node (340 to 350 million parameters): the others make their group anew and repeat the step
  under way. The two larger models are [sharded](sharded-models.md) over as few nodes a replica as hold parameters,
  gradients and AdamW's moments in 80 % of 48 GB (two and three); after a loss the survivors save the last complete
  step, and all start again on as many whole replicas as there are nodes for. Nothing trains meanwhile. Like
  Oobleck's column it has no checkpoints beside.

{_service(rows)}

`replicas` is charged 0.20 s for a loss in place; for a node that joins in place 0.15 s and the state over a node's
link of 25 Gbit/s; for a start of everybody 3.4 s, and a node's part of the state to storage and back. The fixed parts
were measured with small models on a few processes of one machine over gloo, in-place ones in one turn each; nothing
was measured on 30 nodes with GPUs. Lost is the step under way, whole, as in Oobleck's column, but once for losses
of one moment. Speeds are Oobleck's for the nodes that train; whether data-parallel replicas reach those of its
pipelines was not measured.

The goal: at or above `in-place` where replicas are whole, within {100 * BEHIND:.0f} points where they are sharded
(difference in points).

| model | trace | {" | ".join(ways)} | goal |
|---|---|{"---|" * len(ways)}---|
{table}

What `replicas` loses, in per cent of its total, and what is kept, with nothing counted twice:

| {" | ".join(_HEAD)} |
|{"---|" * len(_HEAD)}
{costs}

Sharded replicas are behind for the nodes that make no whole replica, and for the state that goes through storage.
On the real pool's trace (`g4dn-trace`) `replicas` is ahead, since nodes that have become ready are used at once, and
removals of one moment are one loss.

With other costs: rows that meet the goal, and the least difference to `in-place` in points, with its row.

| | whole replicas | sharded replicas |
|---|---|---|
{variants}

{_by_default(found["sensitivity"])}
A run saves at Daly's interval for [losses of state](training.md#how-often-it-saves): here for the whole run's, once a
day, and for a tenth of a node's, which are taken to be all nodes'. No loss of either kind is in these traces, so what
saves cost shows and what they are worth does not. `--checkpoint-interval` says otherwise. Over NCCL a peer's death is
noticed by the collective's timeout only, which is then the pause.

![share of effective training](benchmarks/spot_recovery.svg)
"""


def _service(rows: Mapping[tuple[str, str], Outcomes]) -> str:
    """Return what the column of shared aggregation is, and how far it is from the goal."""
    found = [of for of in rows.values() if "service" in of]
    met = sum(of["service"]["share"] >= of[_THEIRS]["share"] for of in found)
    free = sum(of["service"]["share_free_rounds"] >= of[_THEIRS]["share"] for of in found)
    nodes = sum(of["service"]["share_free_nodes"] >= of[_THEIRS]["share"] for of in found)
    answers = sum(of["service"]["auto"] == "service" for of in found)
    return (
        "- `service` trains [over aggregators](aggregation.md) on nodes of their own, on demand, as many as are best"
        " (2 to 4), each counted like a worker's. A loss costs the step in flight and 0.5 s. A round costs an"
        " aggregator 2.8 ms and a worker 3.2 ms of processor time a megabyte pushed and pulled (measured with 50 MB"
        " and four workers, load 16), on 16 aggregators a node, and crosses links of 25 Gbit/s; nothing of it"
        f" overlaps. The goal is met in {met} of {len(found)} rows: the links of two to four nodes carry what all"
        f" workers push. With rounds that cost nothing it is met in {free}: a single aggregator beside some"
        " 25 workers is 4 % more nodes, and `in-place` loses 0.1 to 5 % but on the real pool's trace. With nodes that"
        f" cost nothing it is met in {nodes}. `--sync auto` answers `service` in {answers}."
    )


def _by_default(variants: Sequence[Mapping[str, Any]]) -> str:
    """Return what checkpoints cost whole replicas, which Oobleck's column does without."""
    found = {row["variant"]: row["whole"] for row in variants}
    whole, before = found[DEFAULT_SAVES], found[EACH_NODE]
    least, model, trace = whole["least"]
    below = f", by {-100 * least:.2f} points at most ({model}, {trace})" if least < 0 else ""
    return (
        f"With the checkpoints that a run makes by default, {whole['met']} of the {whole['rows']} rows with whole "
        f"replicas are at or above `in-place`, which makes none; the others are below{below}. Were each lost node "
        f"taken for lost state, {before['met']} were."
    )


def _shares(of: Outcomes, ways: Sequence[str]) -> str:
    return " | ".join(f"{of[way]['share']:.3f}" if way in of else "" for way in ways)


def _met(of: Outcomes) -> str:
    apart = of[_OURS]["share"] - of[_THEIRS]["share"]
    whole = of[_OURS]["shards"] == 1
    return f"{'met' if apart >= (0 if whole else -BEHIND) else 'missed'} ({100 * apart:+.2f})"


def _parts(row: Mapping[str, Any]) -> Sequence[str]:
    total = row["effective"] + row["checkpoint"] + row["restart"] + row["fallback"] + row["idle"]
    return [f"{100 * row[part] / total:.2f}" for part in ("fallback", "restart", "idle")]


def _count(kind: Mapping[str, Any]) -> str:
    least, model, trace = kind["least"]
    return f"{kind['met']} of {kind['rows']}; {100 * least:+.2f} ({model}, {trace})"
