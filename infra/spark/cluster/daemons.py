"""Commands and environments of Spark's standalone daemons."""

import functools
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.machine import processes
from ebbflow.infra.spark.java import JavaInstall

MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
_TIMEOUT = 60.0  # seconds for the launcher, on a busy machine

# Daemons only pass messages: the first compiler and the serial collector halve their start-up. Executors do
# not inherit these options.
_LIGHT = ("-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")


def environment(java: JavaInstall, home: Path, host: str) -> dict[str, str]:
    """Return a daemon's environment: this process' own, without the user's Spark settings."""
    kept = {k: v for k, v in processes.inherited().items() if not k.startswith(("SPARK_", "PYSPARK_"))}
    return kept | {
        "JAVA_HOME": str(java.home),
        "SPARK_HOME": str(home),
        "SPARK_SCALA_VERSION": _scala_version(home),
        "SPARK_LOCAL_IP": host,
    }


def command(
    java: JavaInstall,
    home: Path,
    daemon: str,
    properties: Mapping[str, str],
    file: Path,
    arguments: Sequence[str],
) -> list[str]:
    """Return the command of ``daemon``, ``MASTER`` or ``WORKER``, with Spark's ``properties`` and those of ``file``.

    ``file`` has those that nobody else may see: everybody can read a command. Raises
    ``EngineUnavailableError`` when Spark's launcher does not answer.
    """
    options = [f"-D{key}={value}" for key, value in properties.items()]
    return [*_java_command(java, home), *_LIGHT, *options, daemon, "--properties-file", str(file), *arguments]


def port_taken(log: Path) -> bool:
    """Tell whether a daemon's log says that one of its ports was in use."""
    try:
        return "java.net.BindException" in log.read_text(errors="replace")
    except OSError:
        return False


@functools.lru_cache(maxsize=4)
def _java_command(java: JavaInstall, home: Path) -> tuple[str, ...]:
    """Ask Spark's launcher, once, how to start a JVM: class path and the options that opened modules need.

    ``bin/spark-class`` asks it before every process, which takes a JVM start each.
    """
    launcher = [str(java.path), "-Xmx128m", "-cp", f"{home}/jars/*", "org.apache.spark.launcher.Main", MASTER]
    try:
        done = subprocess.run(
            launcher,
            env=environment(java, home, "127.0.0.1"),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineUnavailableError(f"Spark's launcher in {home} did not answer: {error}") from error
    words = [word.strip() for word in done.stdout.split("\0") if word.strip()]
    if done.returncode != 0 or MASTER not in words:
        reason = (done.stderr or done.stdout).strip()[-500:]
        raise EngineUnavailableError(f"Spark's launcher in {home} failed: {reason}")
    words = words[: words.index(MASTER)]
    return tuple(word for word in words if not word.startswith("-Xmx"))


def _scala_version(home: Path) -> str:
    for jar in home.glob("jars/spark-core_*.jar"):
        return jar.name.removeprefix("spark-core_").split("-")[0]
    raise EngineUnavailableError(
        f"{home}/jars has no spark-core; pip install --force-reinstall 'prefect-ebbflow[spark]'"
    )
