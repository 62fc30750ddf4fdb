"""What went wrong inside Spark, in one line and as one of our errors."""

import re
from collections.abc import Sequence

from ebbflow.infra.errors import (
    BroadcastTooLargeError,
    EngineError,
    EngineUnavailableError,
    StageFailedError,
    StorageError,
    StorageFullError,
)

# A condition such as [DIVIDE_BY_ZERO] that Spark puts before messages for people.
_CONDITION = re.compile(r"\[[A-Z][A-Z0-9_]+(\.[A-Z0-9_]+)*\]")
_THROWABLE = re.compile(r"^(?:Caused by: )?((?:[a-z_][\w$]*\.)+[A-Z][\w$]*)(?:: (.*))?$")
_WRAPPERS = ("SparkException", "Py4JJavaError", "ExecutionException", "RuntimeException")
_HINTED = re.compile(r"/\*\+[^*]*\b(BROADCAST|BROADCASTJOIN|MAPJOIN)\b", re.IGNORECASE)
_TOO_LARGE = (
    "Cannot broadcast the table",
    "Not enough memory to build and broadcast",
    "Could not execute broadcast in",
    "is bigger than spark.driver.maxResultSize",  # stages collect nothing but broadcasts
)
# These name no cause of their own: only a statement that broadcasts is better run without.
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "not enough memory to build hash map",
    "Could not allocate memory to grow BytesToBytesMap",
    "UNABLE_TO_ACQUIRE_MEMORY",
    "exited with code 52",  # Spark's exit code of an executor that ran out of memory
)
S3_JARS = (
    "Spark has no client for s3://: give it org.apache.hadoop:hadoop-aws:{version}, with the bundle of "
    "software.amazon.awssdk that it asks for, by --conf spark.jars.packages=org.apache.hadoop:hadoop-aws:{version} "
    "where a Maven repository can be reached, else both jars by --conf spark.jars=FILE,FILE"
)
_NO_S3 = ("S3AFileSystem not found", "NoClassDefFoundError: software/amazon/awssdk")
_UNREACHABLE = (
    "SparkContext was shut down",
    "stopped SparkContext",
    "SparkContext has been shutdown",
    "Answer from Java side is empty",
    "Error while sending or receiving",
    "An error occurred while trying to connect to the Java server",
    "All masters are unresponsive",
    "Master removed our application",
)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; py4j asks the JVM for it, which may be gone."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def chain(error: BaseException) -> list[tuple[str, str]]:
    """Return (class name, message) of an exception and its causes, outermost first, Java's included."""
    found: list[tuple[str, str]] = []
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if java is None:
        found.append((type(error).__name__, str(error)))
    seen = 0  # a cause may be its own
    while java is not None and seen < 20:
        try:
            found.append((str(java.getClass().getSimpleName()), str(java.getMessage() or "")))
            java = java.getCause()
        except Exception:  # the JVM has gone away meanwhile: what is known must do
            found.append(("Py4JNetworkError", first_line(error)))
            break
        seen += 1
    return found


def parse(text: str) -> list[tuple[str, str]]:
    """Return (class name, message) of the exceptions in a Java stack trace, outermost first.

    >>> parse("java.io.IOException: no\\n\\tat x.Y.z(Y.java:1)\\nCaused by: a.b.C: why")
    [('IOException', 'no'), ('C', 'why')]
    """
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        match = _THROWABLE.match(line.strip())
        if match:
            found.append((match.group(1).rsplit(".", 1)[-1], match.group(2) or ""))
    if found:
        return found
    line = next((line.strip() for line in text.splitlines() if line.strip()), "unknown failure")
    return [("", line)]


def headline(links: Sequence[tuple[str, str]]) -> str:
    """Return the line that tells a person most: the innermost with a Spark condition, else the innermost."""
    lines = [(name, _first_line(message)) for name, message in links]
    for name, line in reversed(lines):
        condition = _CONDITION.search(line)
        if condition and "SPARK_JOB_CANCELLED" not in line:
            told = f"{name}: {line[condition.start() :]}" if name else line[condition.start() :]
            # names the file; what is wrong with it stands in the cause
            return (
                f"{told} ({lines[-1][1]})"
                if "[FAILED_READ_FILE" in line and lines[-1][1] not in told
                else told
            )
    for name, line in reversed(lines):
        if line and name not in _WRAPPERS:
            return f"{name}: {line}" if name else line
    return next((line for _, line in reversed(lines) if line), "Spark gave no reason")


def is_driver_gone(links: Sequence[tuple[str, str]]) -> bool:
    """Tell whether an error, as ``chain`` or ``parse`` has it, means that there is no driver any more."""
    everything = "\n".join(message for _, message in links)
    return any(name in ("Py4JNetworkError", "ConnectionRefusedError") for name, _ in links) or any(
        text in everything for text in _UNREACHABLE
    )


def translate(links: Sequence[tuple[str, str]], *, stage: str, sql: str) -> EngineError | StorageError:
    """Return our error for the failed statement of ``stage``; ``links`` are ``chain``'s or ``parse``'s."""
    everything = "\n".join(f"{name}: {message}" for name, message in links)
    reason = headline(links)
    if is_driver_gone(links):
        return EngineUnavailableError(f"Spark's driver or master went away during {stage}: {reason}")
    if "No space left on device" in everything:
        return StorageFullError(f"no space left while writing {stage}: {reason}")
    if any(text in everything for text in _NO_S3):
        return EngineUnavailableError(f"{S3_JARS.format(version='VERSION of its Hadoop')} ({reason})")
    if any(name == "StackOverflowError" for name, _ in links):
        return StageFailedError(
            f"{stage}: the statement is nested too deeply for Spark (StackOverflowError): name parts of the query by "
            f"WITH, write long chains of OR as IN (...)"
        )
    if any(text in everything for text in _TOO_LARGE):
        return BroadcastTooLargeError(f"{stage}: {reason}")
    if _HINTED.search(sql) and any(text.lower() in everything.lower() for text in _OUT_OF_MEMORY):
        return BroadcastTooLargeError(f"{stage} ran out of memory while it broadcast: {reason}")
    return StageFailedError(f"{stage}: {reason}")


def is_own(message: str) -> bool:
    """Tell whether a task failed by itself, and not because a machine or its files went away."""
    if "exited with code 52" in message:
        return True
    lost = (
        "ExecutorLostFailure",
        "FetchFailed",
        "TaskKilled",
        "TaskResultLost",
        "Resubmitted",
        "TaskCommitDenied",
    )
    return not message.startswith(lost)


def _first_line(message: str) -> str:
    for line in message.splitlines():
        cleaned = line.strip()
        if cleaned.startswith("Job aborted due to stage failure") and "): " in cleaned:
            cleaned = cleaned.rsplit("): ", 1)[1]
        if cleaned:
            return cleaned[:500]
    return ""
