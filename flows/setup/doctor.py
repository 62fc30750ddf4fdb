"""Checks of this machine: installed packages and programs, their versions, and remedies for what is missing."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ebbflow.infra.machine.granted import granted_cores
from ebbflow.infra.query.local import machine_memory
from ebbflow.infra.storage import private
from ebbflow.infra.storage.files import home
from ebbflow.planners.errors import EbbflowError

_PACKAGES = ("prefect", "fastapi", "sqlglot", "duckdb", "pyarrow", "numpy", "scipy")
_EXTRAS = {
    "pyspark": "spark",
    "grpcio-status": "connect",
    "tpchgen-cli": "demo",
    "torch": "train",
    "pyzmq": "train",
    "optuna": "tune",
    "boto3": "aws",
    "psycopg": "postgres",
    "pyroute2": "local-network",
    "deltalake": "lake",
    "pyiceberg": "lake",
    "mlflow-skinny": "mlflow",
    "wandb": "wandb",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was found, whether that is enough, and what to do where it is not."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = True


def examine(store: str | None = None) -> list[Check]:
    """Check this machine and return all checks.

    Args:
        store: that nodes' memory is compared with; ``None``: it is not.

    Raises ``OptionError`` for a store that is no place.
    """
    checks = [_python()]
    checks += [_package(name, f"pip install {name}", True) for name in _PACKAGES]
    checks += [
        _package(name, f"pip install 'prefect-ebbflow[{extra}]'", False) for name, extra in _EXTRAS.items()
    ]
    checks += [_java(), _spark_s3(), _prefect_server(), _machine(), _folder(), _cgroups()]
    if store is not None:
        checks.append(_memory_tier(store))
    return checks


def is_ready(checks: Iterable[Check]) -> bool:
    """Return whether everything required is there."""
    return all(check.ok or not check.required for check in checks)


def print_checks(checks: list[Check], console: Console) -> None:
    """Print the checks as a table, remedies below."""
    table = Table("", "what", "found", box=None, header_style="bold")
    for check in checks:
        mark = "[green]ok[/]" if check.ok else ("[red]missing[/]" if check.required else "[yellow]absent[/]")
        table.add_row(mark, check.name, check.found)
    console.print(table)
    for check in checks:
        if not check.ok and check.remedy:
            console.print(f"{check.name}: {check.remedy}", markup=False)
    if is_ready(checks):
        console.print("\nready: ebbflow demo", style="green")


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    return Check("python", ok, platform.python_version(), "Python 3.11 or later is needed")


def _package(name: str, remedy: str, required: bool) -> Check:
    try:
        found, ok = version(name), True
    except PackageNotFoundError:
        found, ok = "not installed", False
    if name == "fastapi" and ok and tuple(int(p) for p in found.split(".")[:2]) >= (0, 151):
        remedy = "pip install 'fastapi>=0.139,<0.151' (later ones break the Prefect server)"
        return Check(name, False, found, remedy)
    return Check(name, ok, found, remedy, required)


def _java() -> Check:
    from ebbflow.infra.spark.java import find_java

    return _tried("java (for Spark)", lambda: f"{find_java().version} at {find_java().path}")


def _spark_s3() -> Check:
    from ebbflow.infra.spark.object_storage import installed_client

    spec = find_spec("pyspark")
    home = os.environ.get("SPARK_HOME") or (Path(spec.origin).parent if spec and spec.origin else None)
    if home is None:
        return Check("S3 (for Spark)", False, "no Spark", required=False)
    found, remedy = installed_client(Path(home))
    return Check(
        "S3 (for Spark)",
        not remedy,
        found or "no client in Spark's JVM: only native stages reach it",
        remedy,
        required=False,
    )


def _tried(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except EbbflowError as error:
        return Check(name, False, "not usable", str(error))


def _prefect_server() -> Check:
    url = os.environ.get("PREFECT_API_URL", "")
    found = url or "none configured: flows start a temporary one (or: prefect server start)"
    return Check("prefect server", True, found, required=False)


def _machine() -> Check:
    cores, memory = granted_cores(), machine_memory()
    ok = memory >= 4.0
    remedy = "ebbflow demo needs about 8 GiB of memory"
    return Check("machine", ok, f"{cores:g} cores, {memory:.1f} GiB", remedy, required=False)


def _folder() -> Check:
    folder = home()
    try:
        private.make_folder(folder)
    except OSError as error:
        return Check(
            "checkpoints", False, f"{folder}: {error.strerror}", "set EBBFLOW_HOME to a writable directory"
        )
    free = shutil.disk_usage(folder).free / 2**30
    remedy = f"checkpoints and demo data go to {folder}; set EBBFLOW_HOME to a directory with more free space"
    return Check("checkpoints", free >= 2.0, f"{folder}, {free:.0f} GiB free", remedy, required=False)


def _memory_tier(store: str) -> Check:
    from ebbflow.infra.storage.places import StorageLocation
    from ebbflow.tasks.memory.tier import look

    place = StorageLocation(store)
    try:
        found = look(place)
    except EbbflowError as error:
        return Check("memory tier", False, "not usable", str(error), False)
    remedy = "" if found.peer is not None else "to lend memory: ebbflow memory lend"
    text = f"{'on' if found.decision.enabled else 'off'} for {store}: {found.decision.reason}"
    return Check("memory tier", not remedy, text, remedy, False)


def _cgroups() -> Check:
    from ebbflow.infra.machine import cgroups

    found = cgroups.find_controller()
    text = "CPU caps of local nodes are enforced" if found else "no CPU caps for local nodes"
    return Check(
        "cgroups",
        found is not None,
        text,
        "needs root, or a delegated cgroup; everything works without",
        False,
    )
