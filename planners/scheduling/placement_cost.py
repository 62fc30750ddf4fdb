"""What spreading an app over nodes and racks costs it, predicted from its communication and the cluster's links."""

from dataclasses import dataclass, replace
from math import inf, isfinite

import numpy as np

from ebbflow.planners.communication.costs import LinkModel
from ebbflow.planners.communication.placement import CommunicationProfile
from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.locality import Array, Level


@dataclass(frozen=True, slots=True)
class ClusterLinks:
    """Bandwidth between GPUs by how far apart they are, bytes/s each way; 0: not known.

    Args:
        intra_node: on one node.
        intra_rack: of a node's link to others of its rack.
        cross_rack: of a node's link to nodes of other racks; not known: as within a rack.

    Raises ``OptionError``.
    """

    intra_node: float = 0.0
    intra_rack: float = 0.0
    cross_rack: float = 0.0

    def __post_init__(self) -> None:
        for name in ("intra_node", "intra_rack", "cross_rack"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise OptionError(f"{name} must be >= 0 bytes/s and finite; got {value}")

    def with_rack(self, rate: float) -> "ClusterLinks":
        """Return the links with ``rate`` (bytes/s) within a rack where nothing else is known of that."""
        return self if self.intra_rack or not rate > 0 else replace(self, intra_rack=rate)


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """Iteration times of an app by GPUs and level. :func:`placement_cost` makes it.

    Args:
        profile: what the app recorded.
        node: links between GPUs of a node.
        rack: links between nodes of a rack.
        cluster: links between racks.
    """

    profile: CommunicationProfile
    node: LinkModel
    rack: LinkModel
    cluster: LinkModel

    def seconds(self, gpus: int, level: Level) -> float:
        """Return the seconds of an iteration on ``gpus`` GPUs within ``level``: what each computes stays the same."""
        if gpus <= 1 or level is Level.SLOT:
            return self.profile.seconds(1, self.node)
        links = {Level.MACHINE: self.node, Level.RACK: self.rack}.get(level, self.cluster)
        return self.profile.seconds(gpus, links)

    def slowdown(self, gpus: int, level: Level, base: Level = Level.MACHINE) -> float:
        """Return by what an iteration takes longer within ``level`` than within the narrower ``base``, at least 1."""
        least = self.seconds(gpus, base)
        if level <= base or gpus <= 1 or least <= 0:
            return 1.0
        return max(self.seconds(gpus, level) / least, 1.0)

    def slowdowns(self, gpus: Array, level: Level, base: Level = Level.MACHINE) -> Array:
        """Return :meth:`slowdown` for each number of GPUs."""
        counts, where = np.unique(np.asarray(gpus, int), return_inverse=True)
        found = np.array([self.slowdown(int(count), level, base) for count in counts])
        return np.asarray(found[where].reshape(np.shape(gpus)))


def placement_cost(profile: CommunicationProfile, links: ClusterLinks) -> PlacementCost | None:
    """Return what placements cost an app; ``None`` where nothing is known of the links between nodes.

    What the app measured holds for the level that it was measured at, what the cluster says for the others; a wider
    level is never taken for faster than a narrower one. Links of a node of which nothing is known cost nothing.
    """
    known = profile.links
    latency = LinkModel().alpha if known is None else known.alpha
    own_node, own_rack = (known, None) if profile.nodes == 1 else (None, known)
    rack = own_rack or _model(links.intra_rack, latency)
    if rack is None:
        return None
    node = own_node or _model(links.intra_node, latency) or LinkModel(0.0, 0.0, 0.0, 0.0)
    rack = _no_faster(rack, node)
    cluster = _no_faster(_model(links.cross_rack, latency) or rack, rack)
    return PlacementCost(profile, node, rack, cluster)


def _model(rate: float, latency: float) -> LinkModel | None:
    return LinkModel(alpha=latency, per_byte=1 / rate, launch=0.0) if 0 < rate < inf else None


def _no_faster(wide: LinkModel, narrow: LinkModel) -> LinkModel:
    return replace(
        wide,
        alpha=max(wide.alpha, narrow.alpha),
        per_byte=max(wide.per_byte, narrow.per_byte),
        launch=max(wide.launch, narrow.launch),
    )
