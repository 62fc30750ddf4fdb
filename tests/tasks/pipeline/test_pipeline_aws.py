"""A pipeline on a fleet of AWS, emulated over HTTP; Systems Manager really runs nodes, on this machine."""

import io
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
import pytest
import yaml
from rented import Interrupting, shop, until

from ebbflow.infra.elastic.apps.kmeans import KMeans
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.channel.wire import Entry
from ebbflow.infra.training.launcher.journal import Journal
from ebbflow.planners.capacity.leases import SERVICE
from ebbflow.planners.capacity.values import Scaling, Settings
from ebbflow.planners.errors import PipelineFileError
from ebbflow.planners.model.ledger import AppEntered, AppMoved, AppSpec, Decided, Ended, Recalled
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.tasks.apps.agent import AgentIntervals, AppAgent
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.loop import CapacityLoop
from ebbflow.tasks.capacity.node_sources import opened_nodes
from ebbflow.tasks.capacity.release import give_back
from ebbflow.tasks.capacity.request import CapacityRequest
from ebbflow.tasks.pipeline.checking import check_surroundings
from ebbflow.tasks.pipeline.file.read import read_pipeline
from ebbflow.tasks.pipeline.file.requests import engine_of
from ebbflow.tasks.pipeline.file.spec import AwsSpec, Pipeline
from ebbflow.tasks.pipeline.outcome import PipelineOutcome
from ebbflow.tasks.pipeline.run import PipelineRequest, run_steps
from ebbflow.tasks.training.leased.aws import opened_pools
from ebbflow.tasks.training.leased.enforcer import LeaseEnforcer
from ebbflow.tasks.training.leased.site import LeasedSite
from ebbflow.tasks.training.request import TrainingRequest
from tests.code_projects import write_project
from tests.elastic_own import write_application
from tests.elastic_results import undisturbed
from tests.infra.aws.torch_hosts import NODE, Hosts
from tests.tasks.apps.toy_trainings import Script, ToyTrainer

if TYPE_CHECKING:
    from tests.aws.cluster import Cluster
    from tests.infra.aws.systems_manager import SystemsManager

ASLEEP = ("-c", "import time; time.sleep(600)")  # a node that trains nothing


class ToyOnS3(ToyTrainer):
    """Counts steps in place of training, and saves where instances can go on from."""

    def _save(self) -> None:
        self._saved = self._step
        StorageLocation(self._job.folder).write("step", json.dumps(self._step).encode())
        self._say("checkpoint", uri=f"{self._job.folder}/step", stalled=0.0, reason="stop")

    def resume(self, folder: str, placement: Mapping[str, int], settings: RunSettings) -> None:
        job, _, _, _, uid = Journal(StorageLocation(folder)).read_run()
        assert self._pool.gone(uid)
        self._step = self._saved = json.loads(StorageLocation(folder).read("step"))
        self.launch(replace(job, settings=settings, folder=folder), placement)


@pytest.mark.slow
@pytest.mark.processes
def test_a_pipeline_trains_on_rented_nodes_one_of_which_is_taken_and_gives_them_back(
    lab: "Cluster", ssm: "SystemsManager", tmp_path: Path
) -> None:
    outcome = moved(lab, ssm, tmp_path, NODE)
    assert abs(float(outcome.step("fit").results["metrics.slope"]) - 2) < 0.2


@pytest.mark.processes
def test_a_pipeline_moves_from_a_rented_node_that_is_taken_to_another_and_gives_both_back(
    lab: "Cluster", ssm: "SystemsManager", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same without torch, which takes most of its time: nodes are started and ended, and train nothing."""

    def toy(pool: Any, region: str, **options: Any) -> ToyOnS3:
        assert region == lab.settings.region
        script = Script(steps=250, pause=0.02)
        return ToyOnS3(script, pool, options["decide"], options["on_report"], options["node_timeout"])

    monkeypatch.setattr("ebbflow.tasks.training.aws.ShippingTrainer", toy)
    outcome = moved(lab, ssm, tmp_path, ASLEEP)
    assert outcome.step("fit").details["steps"] == 250


@pytest.mark.slow
@pytest.mark.processes
def test_a_project_with_its_packages_is_prepared_on_rented_nodes(
    lab: "Cluster", ssm: "SystemsManager", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_COLOR", "s3cret-red")
    write_project(tmp_path)
    fit = {
        "script": "train.py",
        "workdir": "project",
        "requirements": "project/requirements.txt",
        "arguments": ["120"],
        "environment": {"COLOR": "${env:A_COLOR}"},
    }
    outcome = moved(lab, ssm, tmp_path, NODE, fit)
    assert outcome.step("fit").details["steps"] == 480
    cache = tmp_path / "node-work" / "cache"
    assert len([path for path in (cache / "environments").iterdir() if path.is_dir()]) == 1
    assert "s3cret" not in json.dumps(ssm.sent, default=str), "no command that AWS logs holds it"
    place = StorageLocation(outcome.step("fit").results["directory"])
    printed = [place.read(one.path.removeprefix(f"{place.root}/")) for one in files_below(place, "logs")]
    assert any(b"runs hello s3cret-red" in text for text in printed)


@pytest.mark.processes
def test_a_search_of_a_pipeline_runs_on_rented_nodes_with_its_study_in_the_ledger_s_database(
    lab: "Cluster", ssm: "SystemsManager", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(steps=40, pause=0.02, metric="accuracy")

    def toy(pool: Any, region: str, **options: Any) -> ToyOnS3:
        assert options["variables"]["COLOR"] == "red"
        return ToyOnS3(script, pool, options["decide"], options["on_report"], options["node_timeout"])

    monkeypatch.setattr("ebbflow.tasks.training.aws.ShippingTrainer", toy)
    monkeypatch.setenv("A_COLOR", "red")
    ssm.script = hosts = Hosts(ASLEEP)
    plain = shop(tmp_path, lab)
    del plain["trainings"]
    plain["tunings"] = {
        "rates": {
            "script": "fit.py",
            "arguments": ["--data", "${queries.pairs.file}"],
            "space": {"lr": {"log": [0.001, 1]}},
            "trials": 3,
            "parallel": 1,
            "sampler": "random",
            "pruner": "none",
            "environment": {"COLOR": "${env:A_COLOR}"},
        }
    }
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(plain, sort_keys=False))
    try:
        outcome = run_steps(PipelineRequest(str(file), run_id="one", runs_dir=str(tmp_path / "runs")))
    finally:
        hosts.close()
    assert outcome.state == "finished", outcome
    rates = outcome.step("rates")
    assert rates.details["trials"] == 3
    assert rates.results["directory"].startswith(lab.settings.store)
    study = optuna.load_study(study_name="one.rates", storage=f"sqlite:///{tmp_path / 'ledger.db'}")
    assert [one.state.name for one in study.trials] == ["COMPLETE"] * 3
    assert str(study.best_trial.params["lr"]) == rates.results["best.lr"]
    with Ledger.open(str(tmp_path / "ledger.db"), cluster="lab", create=False) as ledger:
        assert ledger.verify() == []
        assert not ledger.state().leases
    assert not lab.nodes("gpu")


@pytest.mark.slow
@pytest.mark.processes
def test_an_elastic_job_runs_on_rented_nodes_one_of_which_is_taken(
    lab: "Cluster", ssm: "SystemsManager", tmp_path: Path
) -> None:
    plain = shop(tmp_path, lab)
    del plain["trainings"]
    plain["elastic_jobs"] = {
        "fit": {
            "app": "kmeans",
            "input": "${queries.pairs.file}",
            "classes": 3,
            "executors": 4,
            "iterations": 300,
            "workers": 2,
            "termination_grace": "5s",
        },
        "cells": {
            "app": "histogram.py:Histogram",
            "workdir": str(tmp_path / "code"),
            "input": f"{lab.settings.store.rstrip('/')}/numbers.npz",
            "parameters": {"cells": 4},
            "executors": 4,
            "iterations": 5,
            "termination_grace": "5s",
        },
    }
    write_application(tmp_path / "code")
    numbers, packed = np.random.default_rng(5).random(4000), io.BytesIO()
    np.savez(packed, x=numbers)
    StorageLocation(lab.settings.store).write("numbers.npz", packed.getvalue())
    ssm.script = hosts = Hosts(NODE)
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(plain, sort_keys=False))
    heard = Interrupting(lab)
    try:
        request = PipelineRequest(
            str(file), run_id="one", runs_dir=str(tmp_path / "runs"), allow_workdirs=(str(tmp_path / "code"),)
        )
        outcome = run_steps(request, heard)
    finally:
        hosts.close()
    assert outcome.state == "finished", (outcome, heard.lines)
    counts = np.histogram(numbers, 4, (0.0, 1.0))[0]
    own = StorageLocation(outcome.step("cells").results["directory"])
    with np.load(io.BytesIO(own.read("parameters.npz"))) as found:
        assert [int(found[str(cell)]) for cell in range(4)] == counts.tolist()
    place = StorageLocation(outcome.step("fit").results["directory"])
    assert str(place).startswith(lab.settings.store)
    (tmp_path / "input.npz").write_bytes(place.read("input.npz"))
    app = KMeans(str(tmp_path / "input.npz"), 3, 4, 300)
    with np.load(io.BytesIO(place.read("parameters.npz"))) as found:
        assert np.array_equal(found["centres"], app.centres(undisturbed(app, 300)))
    with Ledger.open(str(tmp_path / "ledger.db"), cluster="lab", create=False) as ledger:
        assert ledger.verify() == []
        assert not ledger.state().leases
    assert heard.taken
    assert not lab.nodes("gpu")


def test_queries_are_on_the_spark_pools_that_the_file_names(lab: "Cluster", tmp_path: Path) -> None:
    plain = shop(tmp_path, lab)
    del plain["trainings"]
    aws = plain["cluster"]["aws"]
    del aws["pools"]
    file = tmp_path / "shop.yaml"

    def read() -> Pipeline:
        file.write_text(yaml.safe_dump(plain))
        return read_pipeline(file, further=check_surroundings)

    pipeline = read()
    assert engine_of(pipeline.steps["pairs"], pipeline) == "duckdb"
    aws["spark_pools"] = ["etl", "gpu"]
    with pytest.raises(PipelineFileError) as error:
        read()
    assert "cluster.aws.spark_pools: there is no pool 'etl'" in str(error.value)
    assert "cluster.aws.spark_pools: the pool 'gpu' is of kind gpu" in str(error.value)
    assert "names no Spark master" in str(error.value)
    outputs = dict(lab.outputs)
    pools = outputs["pools"]["value"]
    outputs["pools"] = {"value": {**pools, "etl": {**pools["gpu"], "kind": "spark"}}}
    outputs["spark_master"] = {"value": "spark://10.0.0.4:7077"}
    (tmp_path / "ebbflow.json").write_text(json.dumps(outputs))
    aws["spark_pools"] = ["etl"]
    pipeline = read()
    assert engine_of(pipeline.steps["pairs"], pipeline) == "spark"
    aws["pools"] = ["etl"]
    with pytest.raises(PipelineFileError, match=r"cluster\.aws\.pools: the pool 'etl' is of kind spark"):
        read()
    del aws["pools"]
    plain["elastic_jobs"] = {"fit": {"app": "kmeans", "input": "${queries.pairs.file}"}}
    with pytest.raises(PipelineFileError, match=r"pools is missing: .*elastic_jobs\.fit can run on"):
        read()


def files_below(place: StorageLocation, name: str) -> list[Any]:
    found = []
    for one in place.entries(name):
        inner = one.path.removeprefix(f"{place.root}/")
        found += [one] if one.is_file else files_below(place, inner)
    return found


def moved(
    lab: "Cluster",
    ssm: "SystemsManager",
    folder: Path,
    runs: Sequence[str],
    fit: Mapping[str, Any] | None = None,
) -> PipelineOutcome:
    """Run a pipeline whose training has to leave its node, and check what became of it; ``runs``: see ``Hosts``.

    ``fit`` are keys of the training in place of others.
    """
    ssm.script = hosts = Hosts(runs)
    file = folder / "shop.yaml"
    plain = shop(folder, lab)
    plain["trainings"]["fit"] |= fit or {}
    file.write_text(yaml.safe_dump(plain, sort_keys=False))
    heard = Interrupting(lab)
    try:
        outcome = run_steps(PipelineRequest(str(file), run_id="one", runs_dir=str(folder / "runs")), heard)
    finally:
        hosts.close()
    assert outcome.state == "finished", (outcome, heard.lines)
    assert outcome.step("pairs").results["path"] == f"{lab.settings.store}/pipelines/one/results/pairs"
    assert outcome.step("fit").results["directory"].startswith(lab.settings.store)

    # the notice moved the lease, and another node was there before the noticed one was gone
    with Ledger.open(str(folder / "ledger.db"), cluster="lab", create=False) as ledger:
        assert ledger.verify() == []
        state, events = ledger.state(), [event.change for event in ledger.events()]
    assert {app.phase for app in state.apps.values()} == {"finished"}
    assert {app.spec.pipeline_budget for app in state.apps.values()} == {50.0}
    assert not state.leases
    assert not state.nodes
    assert any(isinstance(change, Recalled) for change in events)
    decided = [change for change in events if isinstance(change, Decided)]
    assert any(f"launches a replacement node for {heard.taken}" in one.reason for one in decided), decided
    log = lab.account.state()["log"]
    times = {(one["kind"], one["instance"]): one["at"] for one in log if "instance" in one}
    warned, ended = times["warned", heard.taken], times["ended", heard.taken]
    launched = [at for (kind, _), at in times.items() if kind == "launched" and at > warned]
    assert min(launched) < ended, "there was no node beside the one that was taken"

    # what was rented was given back, although the pool may idle for a minute
    assert any("are terminated" in line for line in heard.lines), heard.lines
    assert lab.group("gpu")["DesiredCapacity"] == 0
    assert not lab.nodes("gpu")
    assert lab.account.state()["errors"] == []

    # money is in the report: prices of spot, and what the same would have cost on-demand
    page = json.loads((folder / "runs" / "one" / "cluster.json").read_text())
    money = page["money"]
    assert money["unpriced"] == 0
    assert money["leased_dollars"] > 0
    assert money["total"]["dollars"] < money["total"]["list_dollars"]
    assert len({lease["node"] for lease in page["leases"]}) >= 2
    assert heard.taken in {node["id"] for node in page["nodes"]}
    return outcome


@pytest.mark.processes
def test_what_an_app_that_falls_silent_left_on_a_node_is_really_ended(
    lab: "Cluster", ssm: "SystemsManager", tmp_path: Path
) -> None:
    ssm.script = hosts = Hosts(ASLEEP)
    place = {"terraform_output": str(tmp_path / "ebbflow.json"), "prices": str(tmp_path / "prices.toml")}
    request = CapacityRequest(source=f"aws:{place['terraform_output']}", prices=place["prices"])
    settings = Settings(
        heartbeat_timeout_s=8.0,
        termination_grace_s=60.0,
        lease_s=600.0,
        debounce_s=0.0,
        scaling=Scaling(scale_out_after_s=0.2, scale_in_idle_s=600.0),
    )
    pace = LoopIntervals(
        poll_interval=0.05,
        capacity_poll_interval=0.2,
        fleet_poll_interval=0.5,
        batch_delay=0.02,
        leader_lease=5.0,
    )
    stop = threading.Event()
    with (
        Ledger.open(str(tmp_path / "ledger.db")) as ledger,
        opened_nodes(request, ledger, ledger.clock) as nodes,
        opened_pools(("gpu",), place["terraform_output"], place["prices"], ledger.clock) as room,
    ):
        assert room.listed() == {"g5.xlarge": 1.006}
        loop = nodes.loop(ledger, settings, pace=pace)
        thread = threading.Thread(target=loop.run, args=(stop,), daemon=True)
        thread.start()
        spec = AppSpec("a", "training", gpus=1, min_gpus=1, max_gpus=1)
        agent = AppAgent(ledger, spec, pace=AgentIntervals(look=0.05, report=0.2))
        with agent, LeaseEnforcer(agent, ledger.clock) as warden:
            site = LeasedSite(
                room.pools("a", 30.0, {}),
                agent,
                warden,
                lambda _: None,
                ledger.clock,
                make=lambda pool, **_: pool,
            )
            (lease,) = until(lambda: agent.standing.leases, "lease")
            script = tmp_path / "fit.py"
            script.write_text("")
            asked = TrainingRequest(str(script), run_id="a", runs_dir=str(tmp_path))
            pool: Any = site.trainer(asked, lambda _: None, lambda _: None)  # type: ignore[arg-type,return-value]
            pool.start(lease.node, 1, Entry("127.0.0.1:1", "00" * 32, "a", lease.node, "key", "", ""))
            (left,) = until(lambda: list(hosts.processes.values()), "process on the node")
            assert left.poll() is None
            assert ledger.reports()["a"].pools == (pool.uid,)
            agent._stop.set()  # its process is gone, and says nothing any more
            until(lambda: left.poll() is not None, "end of what it left behind")
            until(lambda: not ledger.state().held("a"), "end of its lease")
            until(lambda: ledger.state().apps["a"].phase == "lost", "loss of the app")
            ended = [e.change for e in ledger.events(kinds=[Ended])]
            assert [one.reason for one in ended if isinstance(one, Ended)] == [
                "terminated by the lease enforcer"
            ]
            stops = [one for one in ssm.sent if one["Parameters"]["action"] == ["stop"]]
            assert {one["Parameters"]["name"][0] for one in stops} == {pool.uid}
        stop.set()
        thread.join(150)
    hosts.close()
    assert not thread.is_alive()


def test_what_cannot_work_on_aws_is_refused_before_anything_is_rented(
    lab: "Cluster", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shop.yaml"
    plain = shop(tmp_path, lab)
    file.write_text(yaml.safe_dump(plain))
    monkeypatch.chdir("/")
    cluster = read_pipeline(file).cluster
    assert isinstance(cluster, AwsSpec)
    assert (cluster.terraform_output, cluster.prices) == (
        str(tmp_path / "ebbflow.json"),
        str(tmp_path / "prices.toml"),
    )
    space = {"lr": {"log": [0.1, 1]}}
    plain["tunings"] = {"tune": {"script": "fit.py", "space": space, "environment": {"KEY": "${env:KEY}"}}}
    plain["cluster"]["aws"]["terraform_output"] = "gone.json"
    file.write_text(yaml.safe_dump(plain))
    with pytest.raises(PipelineFileError) as error:
        read_pipeline(file)
    said = str(error.value)
    assert f"cluster.aws.terraform_output: there is no file {tmp_path / 'gone.json'}" in said
    assert "tunings" not in said


def test_nodes_that_others_may_need_are_not_given_back(tmp_path: Path) -> None:
    said: list[str] = []
    fleet: Any = SimpleNamespace()  # nothing is asked of it

    def made(_: Settings) -> CapacityLoop:
        raise AssertionError("no loop is to be made")

    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        ledger.write([AppEntered(AppSpec("other", "training"))])
        give_back(ledger, fleet, Settings(), made, said.append, ledger.clock)
        assert said == ["nodes stay, since other may need them; start a capacity loop to manage the cluster"]
        ledger.write([AppMoved("other", "finished"), AppEntered(AppSpec(SERVICE, "aggregation"))])
        lead = ledger.lead("a loop elsewhere", 600.0)
        give_back(ledger, fleet, Settings(), made, said.append, ledger.clock)
        assert said[1:] == ["nodes stay: a capacity loop is the leader of the cluster and manages them"]
        lead.resign()
        give_back(ledger, fleet, Settings(scaling=None), made, said.append, ledger.clock)
        assert len(said) == 2
        fleet.observe = lambda: SimpleNamespace(pools=())
        give_back(ledger, fleet, Settings(), made, said.append, ledger.clock)  # aggregators keep no node
    assert len(said) == 2
