"""Terraform without AWS: a copy of ``terraform/`` and a provider that knows names and types only."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROVIDER = ROOT / "tests/fixtures/terraform/terraform-provider-aws"
COOKIE = "d602bf8f470bc67ca7faa0386276bbdd4330efaf76d1a219cb4d6991ca9872b2"  # terraform's, for every provider
MISSING = "terraform is missing: scripts/tools.sh terraform says where to get it"
LIMIT = 240  # seconds for one command; it takes one to five


@dataclass(frozen=True)
class Terraform:
    """The program, run in a copy of ``terraform/``."""

    folder: Path
    environment: Mapping[str, str]

    def run(self, *arguments: str, folder: str = ".") -> subprocess.CompletedProcess[str]:
        """Run one command in ``folder`` of the copy."""
        return subprocess.run(
            ["terraform", f"-chdir={self.folder / folder}", *arguments],
            env=dict(self.environment),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    def ready(self, folder: str) -> None:
        """Let Terraform find the modules that ``folder`` calls."""
        done = self.run("get", folder=folder)
        assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Applied:
    """What an example makes: resources as AWS would get them, and outputs."""

    resources: list[dict[str, Any]]  # address, type, name, values
    outputs: dict[str, Any]  # as terraform output -json writes them

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the values of the resources of one type, by address."""
        return {r["address"]: r["values"] for r in self.resources if r["type"] == kind}


@pytest.fixture(scope="session")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terraform]:
    """Return Terraform with one provider that serves all commands."""
    assert shutil.which("terraform") is not None, MISSING
    folder = tmp_path_factory.mktemp("terraform")
    shutil.copytree(
        ROOT / "terraform", folder / "terraform", ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*")
    )
    for lock in ("requirements.lock", "requirements-torch.lock"):
        shutil.copy(ROOT / lock, folder)
    (folder / "empty.tfrc").touch()
    provider = subprocess.Popen(
        [sys.executable, str(PROVIDER)],
        env=os.environ | {"TF_PLUGIN_MAGIC_COOKIE": COOKIE},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert provider.stdout is not None
        address = provider.stdout.readline().strip().split("|")[3]
        reattach = {
            "hashicorp/aws": {
                "Protocol": "grpc",
                "ProtocolVersion": 6,
                "Pid": provider.pid,
                "Test": True,
                "Addr": {"Network": "tcp", "String": address},
            }
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "AWS_"))}
        yield Terraform(
            folder / "terraform",
            kept
            | {
                "TF_REATTACH_PROVIDERS": json.dumps(reattach),
                "TF_CLI_CONFIG_FILE": str(folder / "empty.tfrc"),
                "TF_IN_AUTOMATION": "1",
                "CHECKPOINT_DISABLE": "1",
                "GOGC": "400",  # a short-lived process gains nothing from collecting often
            },
        )
    finally:
        provider.kill()
        provider.wait(150)


def _applied(terraform: Terraform, example: str) -> Applied:
    folder = f"examples/{example}"
    terraform.ready(folder)
    done = terraform.run("test", "-json", "-verbose", folder=folder)
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, [m for m in messages if m["type"] == "diagnostic"]
    state = next(m["test_state"] for m in messages if m["type"] == "test_state")
    resources: list[dict[str, Any]] = []
    modules = [state["root_module"]]
    while modules:
        module = modules.pop()
        resources += [r for r in module.get("resources", ()) if r["mode"] == "managed"]
        modules += module.get("child_modules", ())
    return Applied(resources, state["outputs"])


@pytest.fixture(scope="session")
def complete(terraform: Terraform) -> Applied:
    """Return what ``examples/complete`` makes."""
    return _applied(terraform, "complete")


@pytest.fixture(scope="session")
def minimal(terraform: Terraform) -> Applied:
    """Return what ``examples/minimal`` makes."""
    return _applied(terraform, "minimal")


@pytest.fixture(scope="session")
def rendered(complete: Applied) -> dict[str, Any]:
    """Return by role what cloud-init gets."""
    from tests.terraform.user_data import rendered_for

    return rendered_for(complete)
