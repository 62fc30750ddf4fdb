"""Whether executors can run native stages. Executors get this module's source, since they may not have it."""

import sys
from collections.abc import Iterator
from typing import Any


def versions(_: int, __: Iterator[Any]) -> Iterator[dict[str, str]]:
    """Yield the versions of what a native stage needs on an executor."""
    from importlib import metadata

    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in ("duckdb", "pyarrow", "prefect-ebbflow"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    yield found


def trouble(context: Any) -> str:
    """Return why the executors of ``context`` cannot run native stages; empty if they can. Raises Spark's errors."""
    from pyspark import cloudpickle

    here = next(versions(0, iter(())))
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        (there,) = context.parallelize([0], 1).mapPartitionsWithIndex(versions).collect()
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    unlike = [f"{name} {there[name]}, here {here[name]}" for name in here if there[name] != here[name]]
    return f"executors have other versions: {', '.join(unlike)}" if unlike else ""
