"""``prefect.yaml``, blocks and automations: what users deploy, as it is and under a server."""

import difflib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from flowcases import TIMEOUT
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from ebbflow.flows import cli
from ebbflow.planners.errors import OptionError

ROOT = Path(__file__).parents[2]
FLOWS = {"query", "train", "tune", "pipeline", "capacity"}


def deployments(path: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in yaml.safe_load(path.read_text())["deployments"]}


def test_the_repository_and_the_package_deploy_the_same_flows() -> None:
    ours, packaged = ROOT / "prefect.yaml", ROOT / "flows" / "setup" / "prefect_files" / "prefect.yaml"
    changed = difflib.unified_diff(
        ours.read_text().splitlines(), packaged.read_text().splitlines(), n=0, lineterm=""
    )
    keys = {line[1:].split(":")[0].strip() for line in list(changed)[2:] if line[0] in "+-"}
    assert keys == {"script", "arguments", "file", "lr", "metric"}  # the repository's name its examples
    assert deployments(ours).keys() == FLOWS
    for one in deployments(ours).values():
        for key in ("script", "file"):
            if key in one["parameters"]:
                assert (ROOT / one["parameters"][key]).is_file()
    automations = packaged.with_name("automations.yaml").read_text()
    assert (ROOT / "examples" / "automations.yaml").read_text() == automations


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_each_deployment_names_a_flow_and_parameters_that_it_has(name: str) -> None:
    from prefect.flows import load_flow_from_entrypoint

    one = deployments(ROOT / "flows" / "setup" / "prefect_files" / "prefect.yaml")[name]
    assert ":" not in one["entrypoint"]  # a module's flow: no code is copied
    flow = load_flow_from_entrypoint(one["entrypoint"], use_placeholder_flow=False)
    flow.validate_parameters(one["parameters"])
    for schedule in one.get("schedules", ()):
        assert schedule["active"] is False


def test_there_is_one_loop_and_it_is_begun_again() -> None:
    loop = deployments(ROOT / "prefect.yaml")["capacity"]
    assert loop["concurrency_limit"]["limit"] == 1
    assert loop["concurrency_limit"]["collision_strategy"] == "CANCEL_NEW"
    (trigger,) = loop["triggers"]
    assert set(trigger["expect"]) == {"prefect.flow-run.Crashed", "prefect.flow-run.Failed"}
    assert trigger["match_related"]["prefect.resource.name"] == loop["name"]
    assert trigger["schedule_after"] > 0


def init(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(cli.app, ["prefect", "init", "--output", str(folder), *options])


@pytest.mark.parametrize("pool", ["gpus", "gpu workers", "123", "yes", "a: b", "it's #1", "- x", "[bold]x"])
def test_init_writes_deployments_for_any_pool(tmp_path: Path, pool: str) -> None:
    done = init(tmp_path, "--pool", pool)
    assert done.exit_code == 0, done.output
    assert f"work-pool create {shlex.quote(pool)} --type process" in done.output
    written = deployments(tmp_path / "prefect.yaml")
    assert written.keys() == FLOWS
    assert {one["work_pool"]["name"] for one in written.values()} == {pool}


def test_init_writes_nothing_over(tmp_path: Path) -> None:
    assert init(tmp_path).exit_code == 0
    mine = tmp_path / "prefect.yaml"
    mine.write_text("mine")
    again = init(tmp_path)
    assert isinstance(again.exception, OptionError)
    assert "--force" in str(again.exception)
    assert init(tmp_path, "--automations").exit_code == 0
    assert (tmp_path / "automations.yaml").is_file()
    assert mine.read_text() == "mine"
    assert init(tmp_path, "--force").exit_code == 0
    assert deployments(mine).keys() == FLOWS


def test_automations_are_what_prefect_takes() -> None:
    from prefect.events.schemas.automations import AutomationCore

    given = yaml.safe_load((ROOT / "examples" / "automations.yaml").read_text())["automations"]
    made = {one["name"]: AutomationCore.model_validate(one) for one in given}
    assert made["ebbflow-failing-training"].trigger.threshold == 3  # type: ignore[union-attr]
    assert all(one.enabled for one in made.values())


def test_events_that_automations_expect_are_emitted_somewhere() -> None:
    given = yaml.safe_load((ROOT / "examples" / "automations.yaml").read_text())["automations"]
    expected = {event for one in given for event in one["trigger"]["expect"] if event.startswith("ebbflow.")}
    from ebbflow.flows.capacity.flow import EVENTS, RESUMED
    from ebbflow.flows.training.flow import _EVENTS

    known = {*EVENTS.values(), RESUMED, *(f"ebbflow.training.{name}" for name in _EVENTS.values())}
    assert expected <= known
    page = (ROOT / "docs" / "prefect.md").read_text()
    told = set(re.findall(r"`(ebbflow\.[a-z]+\.[a-z-]+)`", page))
    assert known - {event for event in known if event.startswith("ebbflow.training.")} <= told


# --- blocks --------------------------------------------------------------------------------------------------


def test_what_a_block_refuses_is_not_shown() -> None:
    from ebbflow.flows.blocks import EbbflowCluster, EbbflowStorage

    with pytest.raises(ValidationError) as caught:
        EbbflowCluster(ledger="mysql://ebbflow:hidden@db/ebbflow")
    assert "hidden" not in str(caught.value)
    assert "SQLite or PostgreSQL" in str(caught.value)
    with pytest.raises(ValidationError, match="without credentials") as caught:
        EbbflowStorage(uri="s3://key:hidden@bucket/x")
    assert "hidden" not in str(caught.value)


def test_a_cluster_s_block_shows_no_password() -> None:
    from ebbflow.flows.blocks import EbbflowCluster

    block = EbbflowCluster(ledger="postgresql://ebbflow:hidden@db/ebbflow", cluster="lab")
    assert block.address == "postgresql://ebbflow:hidden@db/ebbflow"
    assert "hidden" not in repr(block)
    assert "hidden" not in str(block.model_dump())


OUTPUTS: dict[str, Any] = {
    name: {"value": value}
    for name, value in {
        "cluster": "lab", "region": "eu-central-1", "account_id": "1", "bucket": "b", "store": "s3://b/store",
        "kms_key_arn": "k", "notice_queue_url": "q", "dead_letter_queue_url": "d",
        "capacity_role_arn": "arn:aws:iam::2:role/theirs", "settings_parameter": "p", "pools": {}, "documents": {},
    }.items()
}  # fmt: skip


def test_an_account_s_block_is_a_settings_file_and_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbflow.flows.blocks import EbbflowAws
    from ebbflow.infra.aws.settings import Settings

    outputs = tmp_path / "ebbflow.json"
    outputs.write_text(json.dumps(OUTPUTS))
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    block = EbbflowAws(settings_file=str(outputs), profile="prod", role="arn:aws:iam::1:role/mine")
    with block.opened() as path:
        assert Settings.from_terraform(path).capacity_role_arn == "arn:aws:iam::1:role/mine"
        assert os.environ["AWS_REGION"] == "eu-central-1"
        assert os.environ["AWS_PROFILE"] == "prod"
    assert not Path(path).exists()
    assert os.environ["AWS_REGION"] == "eu-west-1"
    assert "AWS_PROFILE" not in os.environ
    with EbbflowAws(settings_file=str(outputs)).opened() as path:
        assert path == str(outputs)
    with EbbflowAws(settings=OUTPUTS).opened() as path:
        assert Settings.from_terraform(path).capacity_role_arn == "arn:aws:iam::2:role/theirs"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "either settings or settings_file"),
        ({"settings": OUTPUTS, "settings_file": "f"}, "either settings or settings_file"),
        ({"settings": OUTPUTS, "profile": "a", "credentials": "b"}, "either profile or credentials"),
        ({"settings": {"cluster": {"value": "lab"}}}, "lacks the output"),
    ],
)
def test_what_is_no_account_is_refused(given: dict[str, Any], said: str) -> None:
    from ebbflow.flows.blocks import EbbflowAws

    with pytest.raises(ValidationError, match=said):
        EbbflowAws(**given)


def test_an_account_s_block_keeps_nothing_that_ebbflow_does_not_read() -> None:
    from ebbflow.flows.blocks import EbbflowAws

    more = {"database_password": {"sensitive": True, "value": "hidden"}}
    block = EbbflowAws(settings=OUTPUTS | more)
    assert "hidden" not in str(block.model_dump())
    assert block.settings == OUTPUTS


@pytest.mark.parametrize("content", ["[1]", "{}", "not JSON", '{"cluster": 1}'])
def test_a_settings_file_that_is_none_is_told(content: str, tmp_path: Path) -> None:
    from ebbflow.flows.blocks import EbbflowAws
    from ebbflow.infra.errors import SettingsError

    (tmp_path / "wrong.json").write_text(content)
    for name in ("wrong.json", "missing.json"):
        block = EbbflowAws(settings_file=str(tmp_path / name), role="arn:aws:iam::1:role/mine")
        with pytest.raises(SettingsError, match=name), block.opened():
            pass


def test_a_cluster_s_block_says_where_its_nodes_come_from() -> None:
    from ebbflow.flows.blocks import EbbflowAws, EbbflowCluster

    account = EbbflowAws(settings=OUTPUTS)
    assert EbbflowCluster(source="aws", aws=account).aws == account
    with pytest.raises(ValidationError, match="has the source aws; got 'local'"):
        EbbflowCluster(aws=account)
    with pytest.raises(ValidationError, match="got 'azure'"):
        EbbflowCluster(source="azure")


@pytest.mark.parametrize("text", ["ebbflow-cluster/", "ebbflow-cluster/a/b"])
def test_a_block_s_name_that_there_cannot_be_is_no_file_of_a_ledger(text: str) -> None:
    from ebbflow.flows.runs.block_refs import found

    with pytest.raises(OptionError, match="ebbflow-cluster/NAME"), found(text):
        pass


def test_what_only_an_app_has_needs_a_ledger() -> None:
    from ebbflow.flows.runs.block_refs import of_a_cluster

    of_a_cluster(None, team="", budget=None)
    of_a_cluster("ebbflow-cluster/lab", team="shop", budget=1.0)
    with pytest.raises(OptionError, match="team, budget need ledger"):
        of_a_cluster(None, team="shop", cluster=None, budget=0.0)


def test_a_password_in_a_parameter_is_refused() -> None:
    from ebbflow.flows.runs.block_refs import found

    with (
        pytest.raises(OptionError, match="ledger=ebbflow-cluster/NAME") as caught,
        found("postgresql://ebbflow:hidden@db/ebbflow"),
    ):
        pass
    assert "hidden" not in str(caught.value)


def test_what_is_given_goes_before_what_a_block_says() -> None:
    from ebbflow.flows.runs.block_refs import found

    with found("/a/ledger.db", "lab", "local:mine") as place:
        assert (place.ledger, place.cluster, place.source) == ("/a/ledger.db", "lab", "local:mine")
        assert place.place.fleet == "local:mine"
    with found() as place:
        assert (place.ledger, place.cluster, place.source, place.master) == (None, "local", "local", "")
    with found(source="spark://here:7077") as place:
        assert place.master == "spark://here:7077"
    with pytest.raises(OptionError, match="either ledger or ledger_secret"), found("/a/b.db", secret="kept"):
        pass


@pytest.mark.prefect
class TestUnderAServer:
    def test_blocks_are_loaded_by_their_names(self, prefect_server: str, tmp_path: Path) -> None:
        from ebbflow.flows.blocks import EbbflowCluster, EbbflowStorage
        from ebbflow.flows.runs.block_refs import found, runs_of, store_of

        name = f"b-{uuid4().hex[:6]}"
        storage = EbbflowStorage(uri="s3://lake/ebbflow/")
        storage.save(name)
        EbbflowCluster(
            ledger=str(tmp_path / "ledger.db"), cluster="lab", source="local:lab", storage=storage
        ).save(name)
        with found(f"ebbflow-cluster/{name}") as place:
            assert (place.ledger, place.cluster) == (str(tmp_path / "ledger.db"), "lab")
            assert place.source == "local:lab"
            assert store_of(None, place.storage) == "s3://lake/ebbflow/store"
        with found(f"ebbflow-cluster/{name}", "other", "local:else") as place:
            assert (place.cluster, place.source) == ("other", "local:else")
        assert runs_of(f"ebbflow-storage/{name}") == "s3://lake/ebbflow/runs"
        assert store_of("/plain") == "/plain"
        with (
            pytest.raises(OptionError, match="no Prefect block ebbflow-cluster/none"),
            found("ebbflow-cluster/none"),
        ):
            pass

    def test_a_flow_in_a_deployed_flow_has_no_deployment_of_its_own(self, prefect_server: str) -> None:
        from prefect import flow
        from prefect.client.orchestration import get_client
        from prefect.flow_engine import run_flow

        from ebbflow.flows.runs.deployed import deployment_name

        @flow(name="inner")
        def inner() -> str:
            return deployment_name()

        @flow(name="outer")
        def outer() -> tuple[str, str]:
            return deployment_name(), inner()

        name = f"d-{uuid4().hex[:6]}"
        assert outer() == ("", "")
        made = outer.to_deployment(name=name).apply()
        with get_client(sync_client=True) as client:
            run = client.create_flow_run_from_deployment(made)  # type: ignore[arg-type]
        assert run_flow(outer, flow_run=run) == (f"outer/{name}", "")

    def test_a_search_keeps_its_journal_on_a_disk(self, prefect_server: str) -> None:
        from ebbflow.flows.blocks import EbbflowStorage
        from ebbflow.flows.tuning.flow import tune

        name = f"s-{uuid4().hex[:6]}"
        EbbflowStorage(uri="s3://lake/ebbflow").save(name)
        with pytest.raises(OptionError, match="runs_dir of a tuning run must be local"):
            tune("fit.py", {"lr": {"log": [0.1, 1]}}, runs_dir=f"ebbflow-storage/{name}")

    def test_a_query_in_a_block_s_cluster_is_an_app_of_it(
        self, prefect_server: str, tables: str, tmp_path: Path
    ) -> None:
        from ebbflow.flows.blocks import EbbflowCluster, EbbflowStorage
        from ebbflow.flows.query.flow import run_query
        from ebbflow.infra.ledger import Ledger

        name = f"q-{uuid4().hex[:6]}"
        file = str(tmp_path / "ledger.db")
        storage = EbbflowStorage(uri=str(tmp_path / "kept"))
        EbbflowCluster(ledger=file, cluster="lab", storage=storage).save(name)
        with Ledger.open(file, cluster="lab") as ledger:
            report = run_query(
                "SELECT count(*) AS n FROM orders",
                tables,
                engine="duckdb",
                ledger=f"ebbflow-cluster/{name}",
                app="counted",
                team="shop",
            )
            record = ledger.state().apps["counted"]
        assert report.rows == 1
        assert (record.phase, record.spec.team, record.spec.kind) == ("finished", "shop", "query")
        assert record.spec.flow_run
        assert (tmp_path / "kept" / "store").is_dir()

    def test_the_package_is_deployed_by_prefects_own_command(
        self, prefect_server: str, tmp_path: Path
    ) -> None:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import WorkPoolCreate

        pool = f"p-{uuid4().hex[:6]}"
        assert init(tmp_path, "--pool", pool).exit_code == 0
        with get_client(sync_client=True) as client:
            client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        done = subprocess.run(
            [str(Path(sys.executable).with_name("prefect")), "--no-prompt", "deploy", "--all"],
            cwd=tmp_path,
            env={**os.environ, "PREFECT_API_URL": prefect_server},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with get_client(sync_client=True) as client:
            loop = client.read_deployment_by_name("capacity-loop/capacity")
            query = client.read_deployment_by_name("run-query/query")
            names = [one["name"] for one in client._client.post("/automations/filter", json={}).json()]
        assert loop.entrypoint == "ebbflow.flows.capacity.capacity_loop"
        assert loop.work_pool_name == pool
        assert loop.concurrency_options is not None
        assert loop.concurrency_options.collision_strategy.value == "CANCEL_NEW"
        assert [schedule.active for schedule in (*loop.schedules, *query.schedules)] == [False, False]
        assert query.parameter_openapi_schema["properties"]["ledger"]["description"]
        assert "ebbflow-capacity-again" in names
