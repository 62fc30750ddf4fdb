"""Find Java and Spark on this machine."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.errors import EngineUnavailableError

MINIMUM = 17  # Spark 4's oldest Java
INSTALL = "on Debian or Ubuntu: apt-get install openjdk-17-jre-headless"
_VECTOR = "jdk.incubator.vector"  # Spark 4.3 starts every JVM with this module
_TIMEOUT = 30.0  # seconds for one `java -version`, on a busy machine


@dataclass(frozen=True, slots=True)
class JavaInstall:
    """A Java that can run Spark."""

    path: Path  # of the `java` program
    version: str  # as it reports itself, such as "17.0.15"

    @property
    def major(self) -> int:
        """Return the feature release: 17 of "17.0.15", 8 of "1.8.0_392"."""
        return major_version(self.version)

    @property
    def home(self) -> Path:
        """Return what ``JAVA_HOME`` should be for this Java."""
        return self.path.resolve().parent.parent


def major_version(version: str) -> int:
    """Return the feature release of a Java version string; 0 when it is none.

    >>> major_version("17.0.15"), major_version("1.8.0_392"), major_version("25-ea")
    (17, 8, 25)
    """
    found = re.match(r"(?:1\.)?(\d+)", version)
    return int(found.group(1)) if found else 0


def parse_version(text: str) -> str:
    """Return the version in the output of ``java -version``; empty when there is none."""
    found = re.search(r'version "([^"]+)"', text)
    return found.group(1) if found else ""


def find_java(environment: Mapping[str, str] | None = None) -> JavaInstall:
    """Return the first Java, of ``JAVA_HOME`` and then ``PATH``, that can run Spark.

    Raises ``EngineUnavailableError`` with what is wrong with those found, and what to install.
    """
    environment = os.environ if environment is None else environment
    candidates = []
    if home := environment.get("JAVA_HOME"):
        candidates.append(Path(home) / "bin" / "java")
    if found := shutil.which("java", path=environment.get("PATH", "")):
        candidates.append(Path(found))
    problems = []
    for path in candidates:
        install, problem = _probe(path)
        if install is not None:
            return install
        problems.append(problem)
    seen = "; ".join(dict.fromkeys(problems)) or "there is none in JAVA_HOME or PATH"
    raise EngineUnavailableError(f"Spark needs Java {MINIMUM} or later ({seen}); {INSTALL}")


@functools.lru_cache(maxsize=8)
def _probe(path: Path) -> tuple[JavaInstall | None, str]:
    code, text = _ask(path, "-version")
    version = parse_version(text)
    if code != 0 or not version:
        return None, f"{path} does not run"
    if major_version(version) < MINIMUM:
        return None, f"{path} is Java {version}"
    code, _ = _ask(path, f"--add-modules={_VECTOR}", "-version")
    if code != 0:
        return None, f"{path} is a reduced Java {version} without the module {_VECTOR}"
    return JavaInstall(path, version), ""


def _ask(path: Path, *options: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [str(path), *options], capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 1, ""
    return done.returncode, done.stderr + done.stdout


def spark_home() -> Path:
    """Return the directory of the installed ``pyspark`` package, which is a whole Spark distribution.

    Raises ``EngineUnavailableError`` when the package, or its jars, are missing.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise EngineUnavailableError("Spark is not installed; pip install 'prefect-ebbflow[spark]'")
    home = Path(spec.origin).parent
    if not (home / "jars").is_dir():
        raise EngineUnavailableError(
            f"the pyspark package in {home} has no jars (a client-only build?); pip install 'prefect-ebbflow[spark]'"
        )
    return home
