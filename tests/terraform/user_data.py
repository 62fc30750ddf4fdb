"""What cloud-init gets, by role."""

import base64
import gzip
import os
import subprocess

import yaml

ROLES = {
    "ebbflow-prod-etl": "spark-worker",
    "ebbflow-prod-trainers": "gpu-trainer",
    "ebbflow-prod-sums": "aggregator",
    "ebbflow-prod-prefect-server": "prefect-server",
    "ebbflow-prod-prefect-worker": "prefect-worker",
}


def rendered_for(complete):
    """Return by role the files and commands that cloud-init gets, of which EC2 gets no more than it takes."""
    found = {ROLES[v["name"]]: v["user_data"] for v in complete.of("aws_launch_template").values()}
    (master,) = complete.of("aws_instance").values()
    found["spark-master"] = master["user_data_base64"]
    configurations = {}
    for role, encoded in found.items():
        raw = base64.b64decode(encoded)
        text = gzip.decompress(raw).decode()
        assert text.startswith("#cloud-config\n")
        assert len(raw) <= 16384
        configurations[role] = yaml.safe_load(text)
    return configurations


def files_of(configuration):
    return {entry["path"]: entry["content"] for entry in configuration["write_files"]}


def environment_of(rendered, role):
    """Return the values as bash reads them."""
    done = subprocess.run(
        ["bash", "-euc", "set -a; . /dev/stdin; env -0"],
        input=files_of(rendered[role])["/etc/ebbflow/node.env"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(field.split("=", 1) for field in done.stdout.split("\0") if field.startswith("EBBFLOW_"))
