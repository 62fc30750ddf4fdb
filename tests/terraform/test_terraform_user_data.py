"""What cloud-init gets is valid, pinned, and means what the Python code expects."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from ebbflow.infra.aws.train_nodes import FOLDER
from ebbflow.tasks.fleet.request import TERRAFORM_OUTPUT
from tests.terraform.user_data import environment_of, files_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("role", "units"),
    [
        ("spark-master", ["ebbflow-spark-master.service", "ebbflow-spark-history.service"]),
        ("spark-worker", ["ebbflow-spark-worker.service", "ebbflow-agent.service", "ebbflow-memory.service"]),
        ("gpu-trainer", ["ebbflow-agent.service", "ebbflow-memory.service"]),
        ("aggregator", ["ebbflow-aggregator.service", "ebbflow-agent.service"]),
        ("prefect-server", ["ebbflow-prefect-server.service"]),
        ("prefect-worker", ["ebbflow-prefect-worker.service"]),
    ],
)
def test_a_node_installs_and_starts_what_its_role_needs(rendered, role, units):
    configuration = rendered[role]
    assert configuration["runcmd"] == [["/usr/local/sbin/ebbflow-install", *units]]
    files = files_of(configuration)
    assert "/usr/local/sbin/ebbflow-install" in files
    assert {f"/etc/systemd/system/{unit}" for unit in units} <= set(files)
    for entry in configuration["write_files"]:
        assert entry["owner"] == "root:root"
        assert entry["permissions"] == ("0755" if "/sbin/" in entry["path"] else "0644")
    assert "prefect==3.8.8" in files["/etc/ebbflow/constraints.txt"]


def test_scripts_are_valid(rendered):
    scripts = {c for files in map(files_of, rendered.values()) for p, c in files.items() if "/sbin/" in p}
    assert len(scripts) == 7
    for script in scripts:
        assert script.startswith("#!/usr/bin/env bash\n")
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_units_are_valid(rendered, tmp_path):
    units = {
        p.rpartition("/")[2]: c
        for f in map(files_of, rendered.values())
        for p, c in f.items()
        if "/systemd/" in p
    }
    assert len(units) == 9
    for name, text in units.items():
        # the programs are not on this machine; what they are given stays
        command = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text)
        (tmp_path / name).write_text(command)
        assert re.search(r"(?m)^ExecStart=/(usr/local/sbin/ebbflow|opt/ebbflow/bin/python)", text), name
    assert shutil.which("systemd-analyze") is not None, "systemd-analyze is missing: scripts/tools.sh systemd"
    named = [str(tmp_path / n.replace("@.", "@run-1.")) for n in units]
    for name in units:
        if "@." in name:
            (tmp_path / name.replace("@.", "@run-1.")).write_text((tmp_path / name).read_text())
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *named],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if "ebbflow" in line]
    assert not complaints


def test_versions_are_exact_and_prefects_server_gets_a_fastapi_that_it_starts_with(rendered):
    for role in rendered:
        wanted = environment_of(rendered, role)["EBBFLOW_PACKAGES"].split()
        assert wanted[0] == "s3://bucket/packages/prefect_ebbflow-0.1.0-py3-none-any.whl"
        assert all("==" in package for package in wanted[1:])
        assert "fastapi==0.150.0" in wanted
        assert ("pyspark==4.3.0" in wanted) == (role in ("spark-master", "spark-worker", "prefect-worker"))
        assert ("pyzmq==27.3.0" in wanted) == (role in ("gpu-trainer", "aggregator", "prefect-worker"))
        assert ("torch==2.13.0" in wanted) == (role in ("gpu-trainer", "prefect-worker"))
        constraints = files_of(rendered[role])["/etc/ebbflow/constraints.txt"].splitlines()
        locked = {line.split(" ; ")[0] for line in constraints}
        assert {re.sub(r"\[.*\]", "", package) for package in wanted[1:]} <= locked


def test_prefects_workers_have_what_every_flow_may_want(rendered):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [r for extra in ("spark", "train", "tune", "aws", "postgres") for r in extras[extra]]
    wanted = {re.split(r"[=<>]", requirement)[0] for requirement in named} - {"prefect-ebbflow[train]"}
    installed = environment_of(rendered, "prefect-worker")["EBBFLOW_PACKAGES"].split()
    assert wanted <= {package.split("==")[0] for package in installed}
    # the node process of a training is for nodes that somebody else tells what to do
    assert "/usr/local/sbin/ebbflow-torch" not in files_of(rendered["prefect-worker"])


def test_torch_comes_from_an_index_of_its_own(rendered):
    indices = {role: environment_of(rendered, role)["EBBFLOW_EXTRA_INDEX"] for role in rendered}
    assert indices.pop("prefect-worker") == "https://packages.example.com/cpu"
    assert set(indices.values()) == {"none"}


def test_workers_know_their_master_their_group_and_what_a_broken_node_does(rendered):
    worker, trainer = (environment_of(rendered, role) for role in ("spark-worker", "gpu-trainer"))
    assert worker["EBBFLOW_SPARK_MASTER"] == "spark://10.64.16.10:7077"
    assert worker["EBBFLOW_GROUP"] == "ebbflow-prod-etl"
    assert worker["EBBFLOW_REBALANCE"] == "note"
    assert trainer["EBBFLOW_DRAIN_SECONDS"] == "300"
    assert trainer["EBBFLOW_JAVA_PACKAGE"] == "none"
    metrics = {role: environment_of(rendered, role)["EBBFLOW_AGENT_METRICS"] for role in rendered}
    come = {"spark-worker", "gpu-trainer", "aggregator"}
    assert {role for role, address in metrics.items() if address == "0.0.0.0:9466"} == come
    assert set(metrics.values()) == {"0.0.0.0:9466", ""}, "elsewhere there is no agent"
    broken = {role: environment_of(rendered, role)["EBBFLOW_TERMINATE_WHEN_BROKEN"] for role in rendered}
    assert {role for role, ends in broken.items() if ends == "yes"} == come


def test_every_node_is_told_the_hash(rendered):
    assert {environment_of(rendered, role)["EBBFLOW_SHA256"] for role in rendered} == {"0123456789abcdef" * 4}


def test_nodes_and_commands_mean_the_same_places(rendered):
    worker, trainer = files_of(rendered["prefect-worker"]), files_of(rendered["gpu-trainer"])
    assert (
        f"export {TERRAFORM_OUTPUT}=/var/lib/ebbflow/ebbflow.json\n"
        in worker["/usr/local/sbin/ebbflow-prefect"]
    )
    unit = trainer["/etc/systemd/system/ebbflow-torch-node@.service"]
    assert f"\nWorkingDirectory={FOLDER}\n" in unit
    assert (
        f"-o ebbflow -g ebbflow /var/lib/ebbflow/spark /var/lib/ebbflow/spark/recovery {FOLDER}\n"
        in (trainer["/usr/local/sbin/ebbflow-install"])
    )


def test_no_secret_is_in_what_a_node_is_configured_by(rendered):
    for configuration in rendered.values():
        # the project's own lock file is let off: names of packages
        text = json.dumps(
            [f for f in configuration["write_files"] if not f["path"].endswith("constraints.txt")]
        )
        assert not re.search(r"AKIA[0-9A-Z]{16}|-----BEGIN|password=", text)


def test_nodes_and_local_clusters_ask_for_the_same(rendered):
    from ebbflow.infra.spark.cluster.authentication import PROTECTED, READ_ONLY

    for role in ("spark-master", "spark-worker", "prefect-worker"):
        text = files_of(rendered[role])["/etc/ebbflow/spark/spark-defaults.conf"]
        lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
        assert {**PROTECTED, **READ_ONLY}.items() <= dict(lines).items()
