"""Elastic nodes on this machine: pools of Spark workers and of GPU nodes, launched, interrupted, lost as in a cloud.

A process of its own, the supervisor, is the provider: it starts what is planned, ends nodes at their deadlines,
replaces what was lost, and ends everything once the fleet's owner is gone. All others read and change one file.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.infra.local_fleet.begin import list_fleets
    from ebbflow.infra.local_fleet.fleet import LocalFleet
    from ebbflow.infra.local_fleet.nodes import FleetNodes
    from ebbflow.infra.local_fleet.state.labels import Occupant
    from ebbflow.infra.local_fleet.state.pools import LocalPool

__all__ = ["FleetNodes", "LocalFleet", "LocalPool", "Occupant", "list_fleets"]

_PLACES = {
    "FleetNodes": "nodes",
    "LocalFleet": "fleet",
    "LocalPool": "state.pools",
    "Occupant": "state.labels",
    "list_fleets": "begin",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: a node's own process needs next to nothing and is to be up soon."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
