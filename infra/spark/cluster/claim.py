"""Lay out a new local cluster and take its name."""

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine import cgroups, processes
from ebbflow.infra.spark.cluster import authentication, options, teardown
from ebbflow.infra.spark.cluster.state import ClusterState, StateFile

Ports = tuple[int | None, int | None]  # asked for, of the master and of its pages


def lay_out(
    file: StateFile,
    *,
    cores: int,
    memory: int,
    directory: Path | str | None,
    host: str,
    ports: Ports,
    network: float = 0.0,
) -> ClusterState:
    """Return a new cluster without processes and CPU quota. ``memory`` is in MiB, ``host`` the master's,
    ``network`` in MB/s of each node's link (0: not limited).

    ``ports`` are those asked for, of the master and of its pages. Raises ``OptionError`` or ``ClusterError``
    for a port that cannot be had.
    """
    port, ui_port = _ports(host, ports)
    return ClusterState(
        name=file.folder.name,
        uid=secrets.token_hex(6),
        directory=str(Path(directory).absolute() if directory else file.folder),
        host=host,
        port=port,
        ui_port=ui_port,
        cores=cores,
        memory=memory,
        owner=os.getpid(),
        secret=authentication.new_secret(),
        network=network,
    )


def with_other_ports(state: ClusterState, ports: Ports) -> ClusterState:
    """Choose the ports that were not asked for anew. Raises ``ClusterError`` where none can be had."""
    port, ui_port = _ports(state.host, ports)
    return replace(state, port=port, ui_port=ui_port)


def _ports(host: str, asked: Ports) -> tuple[int, int]:
    port = options.choose_port(host, asked[0])
    return port, options.choose_port(host, asked[1], avoid=port)


def with_quota(
    state: ClusterState, workers: int, wanted: bool | None, share: float | None = None
) -> ClusterState:
    """Fix each node's CPU quota for the cluster's whole life: a node lost or added always weighs the same.

    ``wanted``: ``None`` where the machine allows, ``True`` or fail, ``False`` not. ``share`` is the quota in
    CPUs; ``None``: an equal part of the machine for each of ``workers``. Raises ``ClusterError``.
    """
    controller = None if wanted is False else cgroups.find_controller()
    if controller is None:
        if wanted:
            raise ClusterError("no writable control group with a CPU quota here; start without cpu_limit")
        why = "not asked for" if wanted is False else "no writable control group"
        return replace(state, cap=f"no CPU cap: {why}")
    machine = len(os.sched_getaffinity(0))
    cpus = share
    if cpus is None:
        cpus = round(state.cores * cgroups.per_core_quota(machine, workers * state.cores), 3)
    return replace(
        state,
        cpus=cpus,
        cap=f"each node is held to {cpus:.2f} of {machine} CPUs (cgroup v{controller.version})",
        cap_version=controller.version,
        cap_folder=str(controller.folder),
    )


def claim(file: StateFile, state: ClusterState, clock: Clock) -> None:
    """Take the name, after clearing what a dead cluster left under it. Raises ``ClusterError``."""
    with file.lock():
        old = file.read()
        if old is not None and _lives(old):
            raise ClusterError(
                f"cluster {state.name!r} runs already ({old.master_url}); stop it, or choose another name"
            )
        file.write(state)
        file.write_properties(authentication.properties_text(authentication.daemon_properties(state.secret)))
    if old is not None:
        for node in old.nodes:
            if node.cgroup:
                cgroups.remove(Path(node.cgroup), clock)
        shutil.rmtree(teardown.scratch(old), ignore_errors=True)


def _lives(state: ClusterState) -> bool:
    """Tell whether a cluster has processes, or is about to."""
    return bool(processes.members(state.mark)) or (state.master_pid == 0 and psutil.pid_exists(state.owner))


def hold(state: ClusterState, node_id: str, pid: int, note: Callable[[str], object]) -> None:
    """Put a worker that is starting into its node's control groups; ``note`` is told of one before it is used.

    It starts with whole cores, because that is no work of an application. Executors, which a master may start in the
    same instant in which the worker registers, are born into the group. A worker whose memory group has no CPU to
    limit is in that alone. Raises ``ClusterError``.
    """
    memory = state.node(node_id).memory_group
    if memory:
        cgroups.join(Path(memory), [pid])
    if state.cpus is not None:
        controller = cgroups.inside(state.controller, Path(memory) if memory else None)
        if controller is None:
            return
        group = cgroups.create(controller, f"ebbflow-{state.uid}-{node_id}", float(state.cores))
        note(str(group))
        cgroups.join(group, [pid])
