"""The evaluation: its stored workload, its parts, its document."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ebbflow.infra.errors import TableError
from ebbflow.planners.errors import OptionError
from tests.evaluation.__main__ import app
from tests.evaluation.qoop.families import chosen, plan, stored
from tests.evaluation.qoop.micro import Variant, compare, mistaken
from tests.evaluation.qoop.motivation import example, figure_2_4
from tests.evaluation.qoop.run import run_part, write_document
from tests.evaluation.qoop.settings import Settings
from tests.evaluation.qoop.volatility import events
from tests.evaluation.qoop.workloads import decode
from tests.evaluation.qoop.world import build, spot_machines

SMALL = Settings(queries=3, runs=2, cluster_jobs=3000, processes=1)


def quiet(what: str, done: int, total: int) -> None:
    pass


def test_the_stored_families_are_tpcds_and_the_chosen_have_alternatives() -> None:
    families = stored()
    assert len(families) >= 90
    fifty = chosen(families)
    assert len(fifty) == 50
    assert all(len(f.plans) > 1 for f in fifty)
    left = {f.name for f in families} - {f.name for f in fifty}
    assert len(left) == len(families) - 50
    with pytest.raises(OptionError, match="count"):
        chosen(families, 0)


@pytest.mark.slow
def test_families_are_planned_from_a_folder_of_tables_and_queries(tpcds: Path, tmp_path: Path) -> None:
    (tmp_path / "queries").mkdir()
    for path in (*tpcds.glob("*.parquet"), *(tpcds / "queries" / f"q{n}.sql" for n in (3, 25))):
        (tmp_path / path.relative_to(tpcds)).symlink_to(path)
    written = [tmp_path / "one.json.gz", tmp_path / "two.json.gz"]
    for out in written:
        result = CliRunner().invoke(app, ["families", "--tpcds", str(tmp_path), "--out", str(out)])
        assert result.exit_code == 0, result.output
    assert written[0].read_bytes() == written[1].read_bytes()
    found = {f.name: f for f in decode(json.loads(gzip.decompress(written[0].read_bytes())))}
    assert {name: f.joins for name, f in found.items()} == {"q3": 2, "q25": 7}
    assert len(found["q25"].plans) > 1


def test_families_need_queries(tpcds: Path) -> None:
    with pytest.raises(TableError, match="must hold queries/q1"):
        plan(tpcds / "queries")


def test_the_stored_prices_have_the_sources_volatility() -> None:
    levels = spot_machines(SMALL)[0].levels
    assert (min(levels), max(levels)) == (2, 20)
    for least, theirs in ((0.1, 60), (0.15, 53), (0.2, 40)):
        assert events(levels, least) == pytest.approx(theirs, rel=0.1)


def test_figure_2_4() -> None:
    found = example()
    assert found["seconds"] == {"volcano": 9.0, "clarinet": 7.0, "qoop": 6.0}
    assert found["qoop_with_h_20"] == 7.0


def test_both_systems_see_the_same_and_the_same_seed_gives_the_same() -> None:
    variants = [Variant("spot", "spot", ("high",))]
    one, two = compare(variants, SMALL, quiet), compare(variants, SMALL, quiet)
    for record in (*one, *two):
        for row in record["queries"]:
            del row["overhead"]  # processor time
        del record["overhead"]
    assert one == two
    other = compare(variants, Settings(seed=2, queries=3, runs=2, processes=1), quiet)
    assert [r["clarinet"] for r in other[0]["queries"]] != [r["clarinet"] for r in one[0]["queries"]]


def test_two_processes_give_what_one_gives() -> None:
    variants = [
        Variant("spot", "spot", ("low", "high")),
        Variant("h 50%", "spot", ("high",), options={"hysteresis": 0.5}),
    ]
    alone, pair = (
        compare(variants, Settings(queries=2, runs=1, cluster_jobs=3000, processes=n), quiet) for n in (1, 2)
    )
    assert [[q["qoop"] for q in r["queries"]] for r in alone] == [
        [q["qoop"] for q in r["queries"]] for r in pair
    ]


def test_errors_are_the_planners_only() -> None:
    family = figure_2_4()
    believed, true = mistaken(family, 0.25, np.random.default_rng(1))
    assert true == {s.physical_key: s for p in family.plans for s in p.stages}
    for alternative in believed.plans:
        for stage in alternative.stages:
            assert 0.75 <= stage.duration / true[stage.physical_key].duration <= 1.25
    assert believed != family


def test_profiles_stay_within_their_class(tmp_path: Path) -> None:
    world = build("spot", "tpcds", SMALL)
    low = world.profile("low", 0, 0)
    assert low == world.profile("low", 0, 0)
    assert low != world.profile("low", 0, 1)
    assert all(level % 30 == 0 for level in low.levels)


@pytest.mark.slow  # the quick run of a whole evaluation
def test_the_document_is_made_of_the_parts_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="part"):
        run_part("all", SMALL, tmp_path)
    run_part("competitive", SMALL, tmp_path, instances=800)
    run_part("micro", SMALL, tmp_path)
    text = write_document(tmp_path, tmp_path / "evaluation.md").read_text()
    assert "Theorem 2.2" in text
    assert "| TPC-DS | spot | high | 1.47× |" in text
    assert "Many queries on one cluster" not in text
    assert "{" not in text
    for name in ("competitive.svg", "fig-2-6a-spot-tpcds.svg"):
        assert (tmp_path / name).read_text().startswith("<svg")
    assert json.loads((tmp_path / "micro.json").read_text())["settings"]["runs"] == 2


def test_the_command_says_what_it_does() -> None:
    shown = CliRunner().invoke(app, ["qoop", "--help"]).output
    assert "competitive" in shown
    assert "--hysteresis" in shown
