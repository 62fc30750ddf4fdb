"""The pools of ``ebbflow local up``."""

from dataclasses import replace

from ebbflow.infra.local_fleet import LocalPool
from ebbflow.infra.spark.cluster.options import parse_memory
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import parse_gib


def pools_of(
    spark: int,
    gpu: int,
    aggregators: int,
    *,
    cores: int,
    memory: str,
    slots: int,
    max_nodes: int,
    price: float,
    provision_time: float,
    cpus_per_slot: float | None,
    aggregation_cluster: str,
    memory_lend: str | None,
    node_memory: str | None,
) -> list[LocalPool]:
    """Return the pools that the options of ``ebbflow local up`` name: those with nodes, or a cluster to serve.

    Raises ``OptionError``.
    """
    lent, limit = _gib("--memory-lend", memory_lend), _gib("--node-memory", node_memory)
    common = LocalPool(
        "gpu",
        "gpu",
        memory=max(limit - lent, 0.0) or 1.0,
        price=price,
        provision_time=provision_time,
        cpus_per_slot=cpus_per_slot,
        memory_limit=limit,
        memory_lend=lent,
    )

    def sized(pool: LocalPool, count: int) -> LocalPool:
        return replace(pool, initial=count, max_nodes=max(max_nodes, count))

    found = []
    if spark:
        gib = parse_memory(memory) / 1024
        found.append(sized(replace(common, name="spark", kind="spark", cores=cores, memory=gib), spark))
    if gpu:
        found.append(sized(replace(common, cores=slots, slots=slots), gpu))
    if aggregation_cluster:
        served = replace(common, name="cpu", kind="cpu", aggregation=aggregation_cluster, memory_lend=0.0)
        found.append(sized(served, aggregators))
    return found


def _gib(option: str, text: str | None) -> float:
    try:
        return 0.0 if text is None else parse_gib(text)
    except OptionError as error:
        raise OptionError(f"{option} {error}") from error
