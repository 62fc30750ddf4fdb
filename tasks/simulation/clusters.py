"""The cluster that a user describes: NODESxGPUS, or a YAML file of groups of nodes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.traces.cluster import Cluster, gpu_node
from ebbflow.infra.simulation.traces.prices import moment
from ebbflow.infra.storage import user_yaml
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node

_GROUP = {
    "count": "nodes of this kind",
    "gpus": "GPUs of each",
    "type": "instance or GPU type",
    "zone": "availability zone",
    "rack": "rack of all",
    "per_rack": "nodes to a rack",
    "price": "$/h of a node on demand",
    "market": "spot or on-demand",
    "name": "what node names begin with",
}


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Nodes that are there at the start, what nodes of a spot trace are like, and when the simulation begins."""

    text: str
    cluster: Cluster
    template: Node
    begin: float | None = None  # s since the Unix epoch, for spot prices

    @property
    def per_node(self) -> int:
        """Return the GPUs of the largest node."""
        return max([node.gpus for node in self.cluster.nodes] + [self.template.gpus])

    def by_type(self, default: str) -> dict[str, int]:
        """Return the GPUs of each type; nodes without one are of ``default``."""
        found: dict[str, int] = {}
        for node in self.cluster.nodes:
            kind = default if node.instance_type == "local" else node.instance_type
            found[kind] = found.get(kind, 0) + node.gpus
        return found


def read_cluster(text: str, *, spot: bool = False) -> ClusterSpec:
    """Return the cluster of ``NODESxGPUS`` or of a YAML file.

    With ``spot`` nodes come by a trace, so that there may be none at the start.

    Raises:
        OptionError: neither of the two.
        WorkloadError: an unreadable file, or one that breaks the format.
    """
    match = re.fullmatch(r"\s*([0-9]{1,6})\s*[xX×]\s*([0-9]{1,4})\s*", text)
    if match:
        count, gpus = int(match[1]), int(match[2])
        if gpus < 1 or (count < 1 and not spot):
            raise OptionError(f"a cluster needs at least one node and one GPU on each; got {text}")
        cluster = Cluster.grid(count, gpus) if count else Cluster(())
        return ClusterSpec(text.strip(), cluster, gpu_node("spot", gpus, market="spot"))
    path = Path(text)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise OptionError(f"a cluster is written NODESxGPUS, such as 16x4, or is a .yaml file; got {text!r}")
    return _of_yaml(path, spot)


def _of_yaml(path: Path, spot: bool) -> ClusterSpec:
    found = user_yaml.read_yaml(path, error=WorkloadError)
    if not isinstance(found, dict):
        raise WorkloadError(f"{path}: must be a mapping with nodes, and spot and start if wanted")
    _known(path, "the file", found, {"nodes": "", "spot": "", "start": ""})
    groups = found.get("nodes") or []
    if not isinstance(groups, list) or not (groups or (spot and found.get("spot"))):
        raise WorkloadError(f"{path}: nodes must be a list of groups, each with count and gpus")
    nodes: list[Node] = []
    for number, group in enumerate(groups, 1):
        nodes += _group(path, f"nodes, group {number}", group, number if len(groups) > 1 else 0)
    ids = [node.id for node in nodes]
    twice = sorted({id_ for id_ in ids if ids.count(id_) > 1})
    if twice:
        raise WorkloadError(f"{path}: two nodes are called {twice[0]}; give the groups different names")
    template = nodes[0] if nodes else gpu_node("spot", 1)
    template = replace(template, id="spot", market="spot")
    if found.get("spot") is not None:
        given = dict(found["spot"]) if isinstance(found["spot"], dict) else found["spot"]
        if isinstance(given, dict):
            given = {"count": 1, "market": "spot", **given}
        template = replace(_group(path, "spot", given, 0)[0], id="spot")
    begin = None
    if found.get("start") is not None:
        begin = _moment(path, found["start"])
    return ClusterSpec(path.name, Cluster(tuple(nodes)), template, begin)


def _moment(path: Path, value: Any) -> float:
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    try:
        return moment(str(value))
    except ValueError as error:
        raise WorkloadError(f"{path}: start {error}") from None


def _known(path: Path, where: str, found: Mapping[Any, Any], known: Mapping[str, str]) -> None:
    for key in found:
        if key not in known:
            close = get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise WorkloadError(f"{path}: {where} has an unknown key {key!r}; the nearest is {close!r}")


def _group(path: Path, where: str, group: Any, number: int) -> list[Node]:
    if not isinstance(group, dict):
        raise WorkloadError(f"{path}: {where} must be a mapping; got {group!r}")
    _known(path, where, group, _GROUP)
    count, gpus = _whole(path, where, group, "count"), _whole(path, where, group, "gpus")
    per_rack = _whole(path, where, group, "per_rack") if "per_rack" in group else 0
    price = group.get("price", 0.0)
    if isinstance(price, bool) or not isinstance(price, int | float) or not isfinite(price) or price < 0:
        raise WorkloadError(f"{path}: {where}: price must be a number >= 0, $/h; got {price!r}")
    market = group.get("market", "on-demand")
    if market not in ("spot", "on-demand"):
        raise WorkloadError(f"{path}: {where}: market must be spot or on-demand; got {market!r}")
    if per_rack and group.get("rack"):
        raise WorkloadError(f"{path}: {where}: give rack or per_rack, not both")
    name = str(group.get("name") or (f"node-{number}" if number else "node"))
    width = len(str(count - 1))
    made = []
    for index in range(count):
        rack = f"{name}-rack-{index // per_rack:03}" if per_rack else str(group.get("rack") or "")
        node = gpu_node(f"{name}-{index:0{width}}", gpus, rack=rack, price=float(price), market=market)
        made.append(
            replace(node, instance_type=str(group.get("type") or "local"), zone=str(group.get("zone") or ""))
        )
    return made


def _whole(path: Path, where: str, group: Mapping[str, Any], key: str) -> int:
    value = group.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WorkloadError(f"{path}: {where}: {key} must be a whole number >= 1; got {value!r}")
    return value
