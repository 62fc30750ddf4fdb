"""Spot traces: the public simulator's figures to the digit, and our own recovery beside them."""

import csv
from pathlib import Path

import pytest

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.traces.rows import SpotRow, read_spot_rows
from ebbflow.planners.training.saving.checkpointing import HazardAware
from tests.benchmarks.spot.models import MODELS
from tests.benchmarks.spot.policy import PolicyReplay
from tests.benchmarks.spot.recovery import CheckpointRestart, Event, InPlace, SpotOutcome
from tests.benchmarks.spot.replicas import RecoveryCosts, ReplicaReplay, shards_of
from tests.benchmarks.spot.sensitivity import BEHIND, sensitivity
from tests.benchmarks.spot.table import recovery_table

FOLDER = Path(__file__).parents[2] / "fixtures/training/oobleck"
PUBLISHED = list(csv.DictReader((FOLDER / "published.csv").open(encoding="utf-8")))
WAYS = {"checkpoint-restart": CheckpointRestart, "in-place": InPlace}
TRACES = ("6h", "1h", "10m", "g4dn-trace")
SOME = (pytest.param("6h", marks=pytest.mark.slow), *TRACES[1:])  # the longest is among the published figures


@pytest.fixture(scope="module")
def rows() -> dict[str, list[SpotRow]]:
    return {trace: read_spot_rows(FOLDER / f"{trace}.csv") for trace in TRACES}


def printed(outcome: SpotOutcome) -> dict[str, str]:
    def short(value: float) -> str:
        return f"{value:.1f}".removesuffix(".0")

    return {
        "effective_ms": short(outcome.effective),
        "checkpoint_ms": short(outcome.checkpoint),
        "restart_ms": short(outcome.restart),
        "fallback_ms": short(outcome.fallback),
        "idle_ms": short(outcome.idle),
        "share": f"{outcome.share:.4f}",
        "kept_samples_per_s": f"{outcome.kept_rate:.4f}",
        "kept_share": f"{outcome.kept_share:.4f}",
        "steps": str(outcome.steps),
    }


def test_forty_rows_are_listed() -> None:
    assert len(PUBLISHED) == 40


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda r: f"{r['recovery']}-{r['model']}-{r['trace']}")
def test_every_published_figure_to_the_digit(row: dict[str, str], rows: dict[str, list[SpotRow]]) -> None:
    got = printed(WAYS[row["recovery"]](MODELS[row["model"]], rows[row["trace"]]).run())
    want = {key: row[key] for key in got if row[key]}
    if row["recovery"] == "in-place" and not row["share"]:  # it does not fit: the page gives no components
        want = {key: row[key] for key in ("kept_samples_per_s", "kept_share", "steps")}
    assert {key: got[key] for key in want} == want


@pytest.mark.parametrize("trace", SOME)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("notice", [0, 120_000])
def test_our_recovery_beats_checkpoint_restart_on_every_row(
    model: str, trace: str, notice: int, rows: dict[str, list[SpotRow]]
) -> None:
    theirs = CheckpointRestart(MODELS[model], rows[trace]).run()
    ours = PolicyReplay(MODELS[model], rows[trace], HazardAware(), notice).run()
    assert ours.share > theirs.share
    assert ours.kept_rate > theirs.kept_rate
    assert ours.kept_share > theirs.kept_share


@pytest.mark.parametrize("trace", SOME)
@pytest.mark.parametrize("model", MODELS)
def test_nothing_trains_while_restarting_if_strict(
    model: str, trace: str, rows: dict[str, list[SpotRow]]
) -> None:
    loose = PolicyReplay(MODELS[model], rows[trace], HazardAware()).run()
    strict = PolicyReplay(MODELS[model], rows[trace], HazardAware(), strict=True).run()
    assert strict.kept_share < loose.kept_share
    wall = rows[trace][-1].at
    lost_to_restarts = strict.restart / wall
    assert strict.kept_share <= 1 - lost_to_restarts + 0.05


def test_the_table_holds_every_way_to_recover(rows: dict[str, list[SpotRow]]) -> None:
    table = recovery_table([MODELS["GPT-2"]], {"10m": rows["10m"]}, [HazardAware()])
    assert [row["recovery"] for row in table] == [
        "checkpoint-restart", "in-place", "hazard-aware", "hazard-aware, strict",
    ]  # fmt: skip
    assert table[0]["steps"] == 717
    assert f"{table[1]['share']:.4f}" == "0.9785"
    assert table[2]["kept_rate"] > table[3]["kept_rate"]  # type: ignore[operator]


def nodes(count: int, at: int = 0) -> list[SpotRow]:
    return [SpotRow(at, "add", f"n{i}") for i in range(count)]


def test_losses_of_one_moment_cost_one_restart() -> None:
    model = MODELS["GPT-2"]
    rows = [*nodes(30), *(SpotRow(3_600_000, "remove", f"n{i}") for i in range(5))]
    rows.append(SpotRow(7_200_000, "remove", "n9"))
    ours = PolicyReplay(model, rows, HazardAware()).run()
    assert ours.restarts == 2  # the first start and one for the five
    assert CheckpointRestart(model, rows).run().restarts > 5


def test_nodes_that_became_ready_are_used_before_the_next_loss() -> None:
    model = MODELS["GPT-2"]
    rows = [*nodes(15), *(SpotRow(3_600_000, "add", f"late{i}") for i in range(15))]
    rows.append(SpotRow(40_000_000, "remove", "n0"))
    ours = PolicyReplay(model, rows, HazardAware()).run()
    waiting = CheckpointRestart(model, rows).run()
    assert ours.restarts == 2
    assert ours.kept_rate > 1.5 * waiting.kept_rate


def test_a_notice_saves_what_would_be_lost() -> None:
    model = MODELS["GPT-3 2.7B"]
    rows = [*nodes(30), SpotRow(2_000_000, "remove", "n0"), SpotRow(4_000_000, "remove", "n1")]
    told = PolicyReplay(model, rows, HazardAware(), notice=180_000, strict=True).run()
    surprised = PolicyReplay(model, rows, HazardAware(), strict=True).run()
    assert told.fallback < surprised.fallback
    assert told.kept_rate > surprised.kept_rate


def test_too_few_nodes_train_nothing() -> None:
    rows = [*nodes(11), SpotRow(4_000_000, "remove", "n0")]
    for replay in (CheckpointRestart, InPlace):
        assert replay(MODELS["BERT-large"], rows).run().steps == 0
    ours = PolicyReplay(MODELS["BERT-large"], rows, HazardAware()).run()
    assert (ours.steps, ours.restart) == (0, 0)


@pytest.mark.parametrize("trace", ["10m", "g4dn-trace"])
@pytest.mark.parametrize("model", MODELS)
def test_replicas_are_at_oobleck_s_column_or_little_behind(
    model: str, trace: str, rows: dict[str, list[SpotRow]]
) -> None:
    theirs = InPlace(MODELS[model], rows[trace]).run()
    ours = ReplicaReplay(MODELS[model], rows[trace]).run()
    behind = 0.0 if shards_of(MODELS[model]) == 1 else BEHIND
    assert ours.share >= theirs.share - behind
    total = rows[trace][-1].at
    assert ours.kept_share * total + ours.restart <= total, "nothing trains while it recovers"


def test_a_model_is_sharded_over_as_few_nodes_as_hold_it() -> None:
    assert [shards_of(model) for model in MODELS.values()] == [1, 1, 1, 2, 3]


def test_losses_of_one_moment_pause_replicas_once_and_repeat_one_step() -> None:
    model, costs = MODELS["GPT-2"], RecoveryCosts(loss=0.5, restart=4.0)
    rows = [*nodes(30), *(SpotRow(3_600_000, "remove", f"n{i}") for i in range(5))]
    rows.append(SpotRow(7_200_000, "remove", "n9"))
    ours = ReplicaReplay(model, rows, costs).run()
    start = 4000 + round(8 * 12 * model.parameters / costs.link / 1e6)
    assert (ours.restarts, ours.restart) == (2, start + 500)
    assert ours.fallback == int(model.samples / model.in_place[0] * 1000)


def test_a_node_that_joins_costs_its_state_over_the_link() -> None:
    model = MODELS["GPT-2"]
    rows = [*nodes(15), SpotRow(3_600_000, "add", "late"), SpotRow(7_200_000, "remove", "n0")]
    fast, slow = (
        ReplicaReplay(model, rows, RecoveryCosts(restart=0.0, link=link)).run().restart
        for link in (100.0, 10.0)
    )
    # the start of all reads it once, and the node that joins gets it once
    assert slow - fast == pytest.approx(2 * 8 * 12 * model.parameters * (1 / 10 - 1 / 100) / 1e6, abs=2)


def test_a_notice_loses_no_step_of_replicas() -> None:
    model = MODELS["GPT-2"]
    rows = [*nodes(30), SpotRow(3_600_000, "remove", "n0"), SpotRow(7_200_000, "remove", "n1")]
    told = ReplicaReplay(model, rows, notice=120_000).run()
    assert told.fallback == 0
    assert ReplicaReplay(model, rows).run().fallback > 0


def test_sharded_replicas_leave_nodes_idle_that_make_no_whole_one() -> None:
    model = MODELS["GPT-3 6.7B"]
    rows = [*nodes(30), SpotRow(3_600_000, "remove", "n0"), SpotRow(36_000_000, "remove", "n1")]
    ours = ReplicaReplay(model, rows).run()
    assert ours.idle == pytest.approx((36_000_000 - 3_600_000) * 2 / 29, rel=0.02)


def test_replicas_save_more_seldom_where_state_survives_a_lost_node() -> None:
    rows = [*nodes(30), *(SpotRow(at * 3_600_000, "remove", f"n{at}") for at in range(1, 12))]
    saves = {
        counts: ReplicaReplay(MODELS["GPT-2"], rows, every=None, counts=counts).run().checkpoints
        for counts in ("nodes", "state", "no floor")
    }
    assert saves["nodes"] > 1.5 * saves["state"] > 1.5 * saves["no floor"] > 0


def test_a_shard_that_is_lost_everywhere_takes_the_work_since_the_last_checkpoint() -> None:
    model = MODELS["GPT-3 2.7B"]

    def lose(numbers: list[int]) -> list[SpotRow]:
        rows = [*nodes(24), *(SpotRow(9_000_000, "remove", f"n{i}") for i in numbers)]
        return [*rows, SpotRow(18_000_000, "remove", next(f"n{i}" for i in range(24) if i not in numbers))]

    holders: dict[int, int] = {}

    class Watched(ReplicaReplay):
        def on_rendezvous(self, event: Event) -> None:
            super().on_rendezvous(event)
            holders.update({} if holders else self.parts)

    Watched(model, lose(list(range(12)))).run()
    rows = lose([node for node, part in holders.items() if part == 0])
    held, lost = (ReplicaReplay(model, rows, every=every).run() for every in (600.0, 1e9))
    assert lost.fallback > held.fallback > 0


def test_the_table_of_costs_tells_rows_that_meet_the_goal(rows: dict[str, list[SpotRow]]) -> None:
    found = sensitivity([MODELS["GPT-2"], MODELS["GPT-3 6.7B"]], {"10m": rows["10m"]}, ("none", ""))
    by_name = {row["variant"]: row for row in found}
    assert by_name["as in the table"]["whole"]["met"] == by_name["as in the table"]["sharded"]["met"] == 1
    assert by_name["pause in place 30 s"]["whole"]["met"] == 0
    assert by_name["pause in place 30 s"]["sharded"] == by_name["as in the table"]["sharded"]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("0,add,a\n5,add\n", 2, "time_ms,add|remove,node"),
        ("0,add,a\n5,lose,a\n", 2, "time_ms,add|remove,node"),
        ("0.5,add,a\n", 1, "time_ms,add|remove,node"),
        ("9,add,a\n5,add,b\n", 2, "time goes back"),
        ("0,add,a\n5,add,a\n", 2, "added while present"),
        ("0,remove,a\n", 1, "removed while absent"),
    ],
)
def test_malformed_rows_name_file_line_and_reason(text: str, line: int, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError, match=f"trace.csv, line {line}: .*{reason.split('|', maxsplit=1)[0]}"):
        read_spot_rows(path)


def test_an_empty_or_missing_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("\n", encoding="utf-8")
    with pytest.raises(WorkloadError, match="no events"):
        read_spot_rows(tmp_path / "empty.csv")
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_spot_rows(tmp_path / "missing.csv")
