"""Prefect's user interface in a real browser, as somebody who runs Ebbflow sees it."""

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from flowcases import JOINED, eventually
from prefect_home import HEAVY, LONG, Home, processes

from ebbflow.infra.ledger import Ledger
from tests.browser import Tab, browser

pytestmark = [
    pytest.mark.prefect,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

TITLE = "orders by nation"


def said(text: str) -> str:
    """Return an expression that is true once the page says ``text``."""
    return f"document.body.innerText.includes({text!r})"


def labelled(text: str, kind: str = "button, a, [role=menuitem], [role=tab], li, span, div") -> str:
    """Return an expression for the last, and so the innermost, element that says just ``text``."""
    return f"[...document.querySelectorAll({kind!r})].filter(e => e.innerText?.trim() === {text!r}).at(-1)"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(Path(tmp_path_factory.mktemp("browser"))) as found:
        yield found


@pytest.fixture(scope="module")
def pages(prefect: Home) -> str:
    return prefect.url.removesuffix("/api")


@pytest.fixture(scope="module")
def finished(prefect: Home, tables: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a run of a query of several stages."""
    run = prefect.run(
        "run-query/query",
        sql=JOINED,
        tables=tables,
        title=TITLE,
        engine="duckdb",
        materialize="every-join",
        store=str(tmp_path_factory.mktemp("store")),
    )
    assert prefect.ended(run) == "COMPLETED", prefect.log()
    return run


def test_a_run_s_page_shows_its_stages_as_a_graph_and_by_name(
    tab: Tab, prefect: Home, pages: str, finished: str
) -> None:
    tab.open(f"{pages}/runs/flow-run/{finished}", 1400, 1100)
    tab.until(said(f"query {TITLE}"))
    tab.until(said("Completed"))
    tab.until("!!document.querySelector('canvas')")
    eventually(lambda: tab.colours("document.querySelector('canvas')") > 20, LONG)
    tab.press(labelled("Task Runs"))
    stages = [run["name"] for run in prefect.task_runs(finished) if run["name"] != "resource-feedback"]
    assert len(stages) >= 2
    for name in (*stages, "resource-feedback"):
        tab.until(said(name))


def test_decisions_and_the_picture_are_artifacts_of_the_run(
    tab: Tab, prefect: Home, pages: str, finished: str
) -> None:
    tab.open(f"{pages}/runs/flow-run/{finished}", 1400, 1100)
    tab.until(said(f"query {TITLE}"))
    tab.until("!!document.querySelector('canvas')")
    tab.press(labelled("Artifacts"))
    for key in ("ebbflow-decisions", "ebbflow-stages", "ebbflow-timeline"):
        tab.until(said(key))
    found = {one["key"]: one for one in prefect.artifacts(finished)}
    tab.open(f"{pages}/artifacts/artifact/{found['ebbflow-decisions']['id']}", 1400, 1100)
    for row in json.loads(found["ebbflow-decisions"]["data"]):
        tab.until(said(row["reason"]))
    tab.open(f"{pages}/artifacts/artifact/{found['ebbflow-timeline']['id']}", 1400, 1100)
    tab.until("[...document.images].some(one => one.src.startsWith('data:') && one.naturalWidth > 100)")


def test_the_button_that_cancels_a_run_ends_it(tab: Tab, prefect: Home, pages: str, tmp_path: Path) -> None:
    file = str(tmp_path / "ledger.db")
    with Ledger.open(file, cluster="lab") as ledger:
        run = prefect.run(
            "run-query/query",
            sql=HEAVY,
            tables=str(prefect.folder / "tables"),
            engine="duckdb",
            store=str(tmp_path / "store"),
            ledger=file,
            cluster="lab",
            app="heavy",
        )
        eventually(lambda: (app := ledger.state().apps.get("heavy")) and app.phase == "running", LONG)
        tab.open(f"{pages}/runs/flow-run/{run}", 1400, 1100)
        tab.until(said("Running"))
        tab.press(labelled("Cancel", "button"))
        tab.press(labelled("Confirm", "button"))
        eventually(lambda: not processes(run), LONG)
        assert prefect.ended(run) == "CANCELLED", prefect.log()
        assert ledger.state().apps["heavy"].phase == "stopped"
    tab.until(said("Cancelled"))


def test_a_cluster_s_block_shows_no_password(tab: Tab, prefect: Home, pages: str) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from ebbflow.flows.blocks import EbbflowCluster

    name = f"b-{uuid4().hex[:6]}"
    with temporary_settings({PREFECT_API_URL: prefect.url}):
        id_ = EbbflowCluster(ledger="postgresql://ebbflow:pw-q7x2@db/ebbflow", cluster="lab-7").save(name)
    tab.open(f"{pages}/blocks/block/{id_}", 1400, 1100)
    tab.until(said("lab-7"))
    assert "pw-q7x2" not in tab.ask("document.documentElement.outerHTML")
