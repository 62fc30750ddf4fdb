"""What snippets find in their folder, and what is done with the data formats among them."""

import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.docs.snippets import ROOT, Snippet, snippets
from tests.tpch_tables import tpch_tables

Given = Callable[[Path, Path, Snippet], None]
"""Called with the folder, the home and the snippet, before it is run."""


def _shop(folder: Path, home: Path, snippet: Snippet) -> None:
    page = "docs/getting-started.md"
    begun = next(s for s in snippets() if s.page == page and s.text.startswith("from pathlib"))
    exec(compile(begun.text, str(begun), "exec"), {"__name__": "snippet"})
    query = next(s for s in snippets() if s.page == page and s.text.startswith("cat > revenue.sql"))
    (folder / "revenue.sql").write_text(query.text.split("<<'SQL'\n")[1].split("SQL\n")[0])


def _tpch(folder: Path, home: Path, snippet: Snippet) -> None:
    """Lay smaller TPC-H tables where ``ebbflow data`` would put those of scale factor 0.1."""
    tables = home / ".cache" / "ebbflow" / "tpch" / "sf0.1"
    shutil.copytree(tpch_tables(0.01), tables)
    (folder / "flows").symlink_to(ROOT / "flows")


def _examples(folder: Path, home: Path, snippet: Snippet) -> None:
    (folder / "examples").symlink_to(ROOT / "examples")


def _decides(folder: Path, home: Path, snippet: Snippet) -> None:
    """Let the policy of the snippet decide: the newest app gets what it wants, the one before it what is left."""
    import numpy as np

    from ebbflow.planners.model.capacity import Capacity, Node
    from ebbflow.planners.model.scheduling import App, View

    names: dict[str, Any] = {"__name__": "snippet_policy"}
    sys.modules["snippet_policy"] = type(sys)("snippet_policy")  # dataclasses look their module up
    try:
        exec(compile(snippet.text, str(snippet), "exec"), names)
        policy = names["LastCome"]()
        nodes = (Node("a", 4, 8.0, gpus=2), Node("b", 4, 8.0, gpus=2))
        apps = (App("old", 1, gpus=3), App("new", 2, gpus=3), App("small", 0, gpus=1))
        decision = policy.decide(View(0.0, apps, Capacity(1, nodes)), None, np.random.default_rng(0))
    finally:
        del sys.modules["snippet_policy"]
    assert decision.grants["new"].placement == (("a", 2), ("b", 1))
    assert decision.grants["small"].placement == (("b", 1),)
    assert not decision.grants["old"].placement


def _loop_rules(folder: Path, home: Path, snippet: Snippet) -> None:
    from ebbflow.tasks.capacity.request import LoopRules

    LoopRules.parse(tomllib.loads(snippet.text), "fleet.toml")


def _fleet_rules(folder: Path, home: Path, snippet: Snippet) -> None:
    from ebbflow.tasks.fleet.request import FleetRules

    FleetRules.parse(tomllib.loads(snippet.text), "fleet.toml")


def _offered_policies(folder: Path, home: Path, snippet: Snippet) -> None:
    """Make the policies that the entry points of the snippet offer, from the module that the page shows."""
    from ebbflow.tasks.capacity.own_policies import GROUP, policy_of

    page = "docs/own-policy.md"
    begins = "from ebbflow import App"
    (folder / "mine.py").write_text(
        next(s.text for s in snippets() if s.page == page and s.text.startswith(begins))
    )
    (offered,) = tomllib.loads(snippet.text)["project"]["entry-points"].items()
    assert offered[0] == GROUP
    sys.path.insert(0, str(folder))
    try:
        for name, value in offered[1].items():
            assert policy_of(value, allowed=[value]).name == name
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("mine", None)


def _failure_table(folder: Path, home: Path, snippet: Snippet) -> None:
    from ebbflow.tasks.training.failures import failure_table

    (folder / "mine.toml").write_text(snippet.text)
    failure_table(folder / "mine.toml")


def _on_demand_prices(folder: Path, home: Path, snippet: Snippet) -> None:
    from ebbflow.infra.aws.prices.listed import ListedPrices

    (folder / "agreed.toml").write_text(snippet.text)
    ListedPrices.read(folder / "agreed.toml")


def _ledger(folder: Path, home: Path, snippet: Snippet) -> None:
    """Make the ledger that the pages speak of."""
    from ebbflow.infra.ledger import Ledger
    from ebbflow.planners.model.ledger import AppEntered, AppSpec

    (home / ".cache" / "ebbflow").mkdir(parents=True, exist_ok=True)
    with Ledger.open(str(home / ".cache" / "ebbflow" / "ledger.db"), cluster="lab") as ledger:
        ledger.write([AppEntered(AppSpec("digits", "training", gpus=2))])


def _pipeline(folder: Path, home: Path, snippet: Snippet) -> None:
    """Read the pipeline of the snippet, beside the files that it names."""
    from ebbflow.tasks.pipeline.file.read import parse_pipeline

    _shop(folder, home, snippet)
    (folder / "fit.py").write_text("")
    pipeline = parse_pipeline(snippet.text, "pipeline.yaml", str(folder))
    assert pipeline.steps


GIVEN: dict[str, Given] = {
    "shop": _shop,
    "tpch": _tpch,
    "examples": _examples,
    "decides": _decides,
    "loop rules": _loop_rules,
    "fleet rules": _fleet_rules,
    "offered policies": _offered_policies,
    "failure table": _failure_table,
    "on-demand prices": _on_demand_prices,
    "ledger": _ledger,
    "pipeline": _pipeline,
}
