"""Scripts that cloud-init gets do what the units and the Python code expect."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from ebbflow.infra.aws.node_agent import DRAINING
from ebbflow.infra.memory.registry import DIRECTORY
from ebbflow.infra.training.channel import keys
from tests.terraform.user_data import environment_of, files_of


@pytest.fixture
def host(tmp_path):
    """Return a function that runs a node's script with its paths, and programs it calls, in ``tmp_path``."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "run").mkdir()

    def program(name, text):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def run(script, *arguments, environment=""):
        (tmp_path / "node.env").write_text(environment)
        for old, new in (
            ("/run/ebbflow", str(tmp_path / "run")),
            ("/etc/ebbflow", str(tmp_path)),
            ("/var/lib/ebbflow", str(tmp_path)),
            ("home=/opt/ebbflow", f"home={tmp_path / 'home'}"),
            ("/var/cache/ebbflow", str(tmp_path / "cache")),
            ("/dev/console", str(tmp_path / "console")),
            ("/opt/ebbflow/bin/python", sys.executable),
            ("/opt/ebbflow/bin", str(tmp_path / "bin")),
        ):
            script = script.replace(old, new)
        return subprocess.run(
            ["bash", "-s", *arguments],
            input=script,
            env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    run.program = program
    return run


@pytest.fixture
def machine(host, tmp_path):
    """Return ``host`` with a package manager, a Python, AWS and systemd that write down what they are asked."""
    for name in ("dnf", "useradd", "install", "systemctl", "shutdown", "java", "nvidia-smi"):
        host.program(name, f'echo "{name} $@" >> {tmp_path}/calls')
    host.program("aws", f'echo "aws $@" >> {tmp_path}/calls; printf wheel > "${{@: -1}}"')
    host.program("id", "exit 1")
    host.program("sleep", ":")
    (tmp_path / "home/bin").mkdir(parents=True)
    (tmp_path / "spark/bin").mkdir(parents=True)
    host.program("python3.11", "exit 1")  # only asked where there is no environment yet
    for name, text in (
        ("python", f"echo {tmp_path}/spark"),
        (
            "pip",
            f"""echo "pip $TMPDIR $@" >> {tmp_path}/calls
[ ! -e {tmp_path}/no-mirror ] || exit 1""",
        ),
    ):
        (tmp_path / "home/bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "home/bin" / name).chmod(0o755)
    return host


def _install(rendered, machine, tmp_path, role, **changes):
    files = files_of(rendered[role])
    environment = files["/etc/ebbflow/node.env"]
    for name, value in {"EBBFLOW_SHA256": hashlib.sha256(b"wheel").hexdigest(), **changes}.items():
        environment = re.sub(rf"(?m)^{name}=.*$", f'{name}="{value}"', environment)
    (tmp_path / "constraints.txt").write_text(files["/etc/ebbflow/constraints.txt"])
    units = rendered[role]["runcmd"][0][1:]
    done = machine(files["/usr/local/sbin/ebbflow-install"], *units, environment=environment)
    return done, (tmp_path / "calls").read_text().splitlines()


def test_a_worker_is_installed_from_pinned_versions_and_started_last(rendered, machine, tmp_path):
    done, calls = _install(
        rendered,
        machine,
        tmp_path,
        "spark-worker",
        EBBFLOW_PACKAGES="s3://b/packages/prefect_ebbflow-0.1.0.whl pyspark==4.3.0",
    )
    assert done.returncode == 0, done.stderr
    assert calls[0] == "dnf install --assumeyes --quiet python3.11 java-17-amazon-corretto-headless"
    wheel = f"{tmp_path}/cache/package/prefect_ebbflow-0.1.0.whl"
    assert f"aws s3 cp --only-show-errors s3://b/packages/prefect_ebbflow-0.1.0.whl {wheel}" in calls
    (pip,) = (call for call in calls if call.startswith("pip"))
    assert pip.startswith("pip /var/tmp install")
    assert pip.endswith(f"--constraint {tmp_path}/constraints.txt {wheel} pyspark==4.3.0")
    (java,) = (call for call in calls if call.startswith("java"))
    assert "-dependency org.apache.hadoop hadoop-aws 3.5.0" in java
    assert calls[-4:] == [
        "systemctl daemon-reload",
        "systemctl enable --now ebbflow-spark-worker.service",
        "systemctl enable --now ebbflow-agent.service",
        "systemctl enable --now ebbflow-memory.service",
    ]


def test_a_wheel_that_was_exchanged_is_not_installed(rendered, machine, tmp_path):
    package = "s3://b/packages/prefect_ebbflow-0.1.0.whl"
    other = hashlib.sha256(b"the wheel that was pinned").hexdigest()
    done, calls = _install(
        rendered,
        machine,
        tmp_path,
        "prefect-worker",
        EBBFLOW_SHA256=other,
        EBBFLOW_PACKAGES=f"{package} x==1",
    )
    assert done.returncode == 1
    assert f"{package} is not the wheel that ebbflow_sha256 pins" in done.stderr
    assert not any(" install --" in call for call in calls if call.startswith("pip"))
    assert not any("enable" in call for call in calls)


def test_a_trainer_needs_its_drivers_and_no_java(rendered, machine, tmp_path):
    done, calls = _install(rendered, machine, tmp_path, "gpu-trainer")
    assert done.returncode == 0, done.stderr
    assert calls[0] == "dnf install --assumeyes --quiet python3.11"
    assert "nvidia-smi " in calls
    assert not any(call.startswith("java") for call in calls)


@pytest.mark.parametrize(("role", "ends"), [("gpu-trainer", True), ("prefect-server", False)])
def test_a_node_that_cannot_be_installed_says_so_and_starts_nothing(rendered, machine, tmp_path, role, ends):
    (tmp_path / "no-mirror").touch()
    done, calls = _install(rendered, machine, tmp_path, role)
    assert done.returncode != 0
    assert "this node is of no use" in (tmp_path / "console").read_text()
    assert sum(call.startswith("pip") for call in calls) == 5  # the mirror may only be busy
    assert any(call.startswith("shutdown -h +1") for call in calls) == ends
    assert not any("enable" in call for call in calls)


def test_a_node_lends_its_memory_under_its_own_name_where_flows_look_for_it(rendered, host, tmp_path):
    for role in ("spark-worker", "gpu-trainer"):
        files = files_of(rendered[role])
        host.program(
            "curl", 'case "$*" in *local-ipv4) echo 10.0.0.7 ;; *instance-id) echo i-1 ;; *) echo t ;; esac'
        )
        script = files["/usr/local/sbin/ebbflow-memory"].replace("/opt/ebbflow/bin/python", "lend")
        host.program("lend", 'env | grep ^EBBFLOW_MEMORY; echo "$@"')
        done = host(script, environment=files["/etc/ebbflow/node.env"])
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        assert said[-1] == (
            f"-P -m ebbflow.infra.memory.lending.process i-1 --host 10.0.0.7 --max-bytes {2 << 30}"
        )
        place = environment_of(rendered, "prefect-worker")[DIRECTORY]
        assert place.startswith("s3://")
        assert f"{DIRECTORY}={place}" in said
    assert "/usr/local/sbin/ebbflow-memory" not in files_of(rendered["prefect-worker"])


def test_an_aggregator_serves_the_ledgers_cluster_under_its_instances_name(rendered, host):
    files = files_of(rendered["aggregator"])
    host.program(
        "curl", 'case "$*" in *local-ipv4) echo 10.0.0.7 ;; *instance-id) echo i-1 ;; *) echo t ;; esac'
    )
    host.program("aws", 'case "$*" in *"secret:ledger-abcdef"*) echo postgresql://db/e ;; *) exit 1 ;; esac')
    host.program("nproc", "echo 8")
    host.program("serve", 'echo "$EBBFLOW_LEDGER"; echo "$@"')
    script = files["/usr/local/sbin/ebbflow-aggregator"].replace("/opt/ebbflow/bin/python", "serve")
    done = host(script, environment=files["/etc/ebbflow/node.env"])
    assert done.returncode == 0, done.stderr
    address, said = done.stdout.splitlines()
    assert address == "postgresql://db/e"
    assert said.startswith("-P -m ebbflow.infra.aggregation.shared_process i-1 prod 10.0.0.7 8 i-1 ")
    assert said.endswith("/run/draining")
    assert f" {DRAINING}\n" in files["/usr/local/sbin/ebbflow-aggregator"], (
        "where the agent writes the deadline"
    )
    assert "postgresql" not in json.dumps(rendered["aggregator"]), "read when it starts, written nowhere"


def test_a_trainings_node_process_gets_its_entry_unchanged_once(rendered, host, tmp_path):
    script = files_of(rendered["gpu-trainer"])["/usr/local/sbin/ebbflow-torch"]
    host.program(
        "systemctl", f'echo "$@" >> {tmp_path}/calls; [ "$1" != is-active ] || [ -e {tmp_path}/active ]'
    )
    host.program("chown", f'echo "chown $@" >> {tmp_path}/calls')
    entry = {"launcher": "10.0.0.1:29400", "name": 'it\'s "the" \\ first', "folder": "/var/lib/x $HOME"}
    encoded = base64.b64encode(json.dumps(entry).encode()).decode()
    done = host(script, "start", "run-1", encoded)
    assert done.returncode == 0, done.stderr
    file, key = tmp_path / "run/torch-run-1.env", tmp_path / "run/torch-run-1.key"
    first, second = file.read_text().splitlines()
    assert second == f"{keys.NODE_SECRET_FILE}='{key}'"
    pair = keys.own({keys.NODE_SECRET_FILE: str(key)})
    assert keys.announced(done.stdout) == pair.public
    assert pair.secret not in done.stdout + done.stderr + file.read_text()
    assert key.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "calls").read_text().splitlines()[1] == f"chown ebbflow {key}"
    name, _, value = first.partition("=")
    assert name == "EBBFLOW_NODE_ENTRY"
    assert (value[0], value[-1]) == ("'", "'")
    assert "'" not in value[1:-1]  # systemd ends the value there
    assert json.loads(value[1:-1]) == entry
    assert file.stat().st_mode & 0o777 == 0o600
    (tmp_path / "active").touch()
    again = host(script, "start", "run-1", encoded)
    assert again.returncode == 0
    assert keys.announced(again.stdout) == pair.public, "it says again who runs there"
    assert (tmp_path / "calls").read_text().count("start ebbflow-torch-node@run-1.service") == 1


def test_a_trainings_node_process_that_is_stopped_is_killed_first(rendered, host, tmp_path):
    script = files_of(rendered["gpu-trainer"])["/usr/local/sbin/ebbflow-torch"]
    host.program("systemctl", f'echo "$@" >> {tmp_path}/calls; [ "$1" != kill ]')  # nothing runs
    left = [tmp_path / "run" / f"torch-run-1.{name}" for name in ("env", "key", "key.public")]
    for file in left:
        file.touch()
    done = host(script, "stop", "run-1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == [
        "kill --signal=SIGKILL ebbflow-torch-node@run-1.service",
        "stop ebbflow-torch-node@run-1.service",
    ]
    assert not any(file.exists() for file in left)


@pytest.mark.parametrize(("role", "name"), [("spark-worker", "spark"), ("gpu-trainer", "torch")])
def test_nothing_is_started_on_a_node_that_leaves(rendered, host, tmp_path, role, name):
    script = files_of(rendered[role])[f"/usr/local/sbin/ebbflow-{name}"]
    host.program("systemctl", f'echo "$@" >> {tmp_path}/calls; [ "$1" != is-active ]')
    (tmp_path / "run/draining").touch()
    done = host(script, "start", "run-1", "e30=")
    assert done.returncode == 1
    assert "this node is leaving" in done.stderr
    assert "start" not in (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else True


def test_prefects_server_reads_its_secrets_and_makes_up_a_missing_password(rendered, host, tmp_path):
    script = files_of(rendered["prefect-server"])["/usr/local/sbin/ebbflow-prefect"]
    environment = files_of(rendered["prefect-server"])["/etc/ebbflow/node.env"].replace(
        "arn:aws:secretsmanager:us-east-1:123456789012:secret:rds-mock", "database"
    )
    database = json.dumps({"username": "prefect", "password": "p@ss/w:rd'$"})
    (tmp_path / "database").write_text(database)
    host.program(
        "aws",
        f"""
case "$2 $4" in
  "get-secret-value database") cat {tmp_path}/database ;;
  get-secret-value*)
    if [ -e {tmp_path}/throttled ]; then echo "An error occurred (ThrottlingException)" >&2; exit 254; fi
    if [ ! -e {tmp_path}/password ]; then echo "An error occurred (ResourceNotFoundException)" >&2; exit 254; fi
    cat {tmp_path}/password ;;
  put-secret-value*) cat > {tmp_path}/password ;;
esac""",
    )
    host.program("prefect", 'env | grep ^PREFECT_; echo "$@"')
    done = host(script, "server", environment=environment)
    assert done.returncode == 0, done.stderr
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith("PREFECT_"))
    assert seen["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == (
        "postgresql+asyncpg://prefect:p%40ss%2Fw%3Ard%27%24@mock.us-east-1.rds.amazonaws.com:5432/prefect?ssl=require"
    )
    assert re.fullmatch(r"ebbflow:[A-Za-z0-9]{20,}", seen["PREFECT_SERVER_API_AUTH_STRING"])
    assert seen["PREFECT_SERVER_UI_API_URL"] == "https://prefect.example.com/api"
    assert "p@ss" not in done.stderr
    (tmp_path / "throttled").touch()
    throttled = host(script, "server", environment=environment)
    assert throttled.returncode == 1
    assert "ThrottlingException" in throttled.stderr
    (tmp_path / "throttled").unlink()
    again = host(script, "server", environment=environment)
    assert f"PREFECT_SERVER_API_AUTH_STRING={seen['PREFECT_SERVER_API_AUTH_STRING']}\n" in again.stdout


def _spark_host(rendered, host, tmp_path, role):
    """Return a function that runs ``ebbflow-spark`` of ``role``, and the file that stands for its secret."""
    files = files_of(rendered[role])
    (tmp_path / "spark").mkdir(exist_ok=True)
    (tmp_path / "spark/spark-defaults.conf").write_text(files["/etc/ebbflow/spark/spark-defaults.conf"])
    kept = tmp_path / "secret"
    host.program(
        "aws",
        f"""echo "aws $@" >> {tmp_path}/calls
case "$2" in
  get-secret-value)
    if [ -e {tmp_path}/throttled ]; then echo "An error occurred (ThrottlingException)" >&2; exit 254; fi
    if [ ! -e {kept} ]; then echo "An error occurred (ResourceNotFoundException)" >&2; exit 254; fi
    cat {kept} ;;
  put-secret-value) cat > {kept} ;;
esac""",
    )
    host.program("curl", "echo 10.0.0.7")
    host.program("sleep", ":")
    spark_class = tmp_path / "bin/spark-class"
    spark_class.write_text('#!/bin/sh\nenv | grep ^SPARK_; echo "$@"\n')
    spark_class.chmod(0o755)
    script = files["/usr/local/sbin/ebbflow-spark"].replace(
        "SPARK_HOME=/opt/ebbflow/spark", f"SPARK_HOME={tmp_path}"
    )

    def run(action):
        return host(script, action, environment=files["/etc/ebbflow/node.env"])

    return run, kept


def test_the_spark_master_makes_up_a_missing_secret_once_and_everybody_reads_it(rendered, host, tmp_path):
    master, kept = _spark_host(rendered, host, tmp_path, "spark-master")
    done = master("master")
    assert done.returncode == 0, done.stderr
    secret = kept.read_text()
    assert re.fullmatch(r"[0-9a-f]{64}", secret)
    assert (tmp_path / "calls").read_text().count("put-secret-value") == 1
    conf = tmp_path / "spark/conf/spark-defaults.conf"
    assert f"spark.authenticate.secret {secret}\n" in conf.read_text()
    assert (conf.stat().st_mode & 0o777, conf.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert f"SPARK_CONF_DIR={conf.parent}" in done.stdout.splitlines()
    for action in ("history-server", "conf"):
        assert master(action).returncode == 0
    worker, _ = _spark_host(rendered, host, tmp_path, "spark-worker")
    started = worker("worker")
    assert started.returncode == 0, started.stderr
    assert "SPARK_LOCAL_IP=127.0.0.1" in started.stdout.splitlines()  # its pages
    assert "--host 10.0.0.7" in started.stdout
    assert kept.read_text() == secret
    shown = done.stdout + done.stderr + started.stdout + started.stderr + (tmp_path / "calls").read_text()
    assert secret not in shown


def test_a_spark_secret_that_cannot_be_read_now_is_not_replaced(rendered, host, tmp_path):
    master, kept = _spark_host(rendered, host, tmp_path, "spark-master")
    kept.write_text("old")
    (tmp_path / "throttled").touch()
    done = master("master")
    assert done.returncode == 1
    assert "ThrottlingException" in done.stderr
    assert kept.read_text() == "old"
    assert not (tmp_path / "spark/conf").exists()


def test_a_worker_without_the_secret_does_not_start(rendered, host, tmp_path):
    worker, kept = _spark_host(rendered, host, tmp_path, "spark-worker")
    done = worker("worker")
    assert done.returncode != 0
    assert "Worker" not in done.stdout
    assert not kept.exists()
