"""What no decision about nodes may exceed: the section ``quotas`` of the configuration file.

::

    [quotas]
    dollars_per_hour = 40          # of the whole cluster
    dollars_per_run = 250          # of one query, training or pipeline
    nodes = 60                     # of all pools
    grow = 10                      # nodes that one decision adds to a pool at most
    shrink = 5                     # nodes that one decision takes from a pool at most

    [quotas.pools.gpu]
    min_nodes = 0
    max_nodes = 16
    min_on_demand_nodes = 0
    max_on_demand_nodes = 2

    [quotas.teams.vision]
    gpus = 48                      # that its apps hold together
    dollars_per_hour = 25          # of its apps' leases
    budget = 900                   # dollars of all its apps
    pools = ["gpu"]                # whose nodes are the team's alone: gpus and dollars_per_hour bound them, too
    nodes = 12                     # of these pools
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ebbflow.planners.errors import OptionError
from ebbflow.planners.sections import number, only, table


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Quota of one pool."""

    min_nodes: int = 0
    max_nodes: float = inf
    min_on_demand_nodes: int = 0
    max_on_demand_nodes: float = inf


@dataclass(frozen=True, slots=True)
class Quota:
    """What the apps of one team, and the pools that are its alone, may hold together."""

    pools: tuple[str, ...] = ()
    nodes: float = inf  # of these pools
    gpus: float = inf
    dollars_per_hour: float = inf
    budget: float = inf  # dollars of all its apps


@dataclass(frozen=True, slots=True)
class Limits:
    """All limits; what is not given is unlimited."""

    dollars_per_hour: float = inf
    dollars_per_run: float = inf
    nodes: float = inf
    grow: float = inf  # nodes a decision
    shrink: float = inf  # nodes a decision
    pools: Mapping[str, PoolLimits] = field(default_factory=dict)
    teams: Mapping[str, Quota] = field(default_factory=dict)

    def also(self, other: "Limits") -> "Limits":
        """Return limits that both keep: of each the stricter one.

        Where a pool's minimum is above what the other allows, the maximum wins. Of a team that both
        name, this one's quota counts.
        """
        pools = {
            name: _stricter(self.pools.get(name, PoolLimits()), other.pools.get(name, PoolLimits()))
            for name in {**self.pools, **other.pools}
        }
        return Limits(
            min(self.dollars_per_hour, other.dollars_per_hour),
            min(self.dollars_per_run, other.dollars_per_run),
            min(self.nodes, other.nodes),
            min(self.grow, other.grow),
            min(self.shrink, other.shrink),
            pools,
            {**other.teams, **self.teams},
        )

    @classmethod
    def parse(cls, content: Mapping[str, Any], source: str = "quotas") -> "Limits":
        """Read a section; ``source`` begins every message.

        Raises ``OptionError`` that names the key, the value and the rule: unknown keys, numbers below 0, a
        minimum above its maximum, a pool of two teams.
        """
        top = table(content, source)
        numbers = {
            "dollars_per_hour": _money,
            "dollars_per_run": _money,
            "nodes": _count,
            "grow": _step,
            "shrink": _step,
        }
        only(top, source, (*numbers, "pools", "teams"))
        pools = {
            name: _pool(table(one, f"{source}.pools.{name}"), f"{source}.pools.{name}")
            for name, one in table(top.get("pools", {}), f"{source}.pools").items()
        }
        teams = {
            name: _team(table(one, f"{source}.teams.{name}"), f"{source}.teams.{name}")
            for name, one in table(top.get("teams", {}), f"{source}.teams").items()
        }
        of: dict[str, str] = {}
        for name, quota in teams.items():
            for pool in quota.pools:
                if of.setdefault(pool, name) != name:
                    raise OptionError(
                        f"{source}.teams: a pool has one team; {pool!r} is of {of[pool]} and of {name}"
                    )
        return cls(
            **{key: read(top[key], f"{source}.{key}") for key, read in numbers.items() if key in top},
            pools=pools,
            teams=teams,
        )


def _stricter(one: PoolLimits, other: PoolLimits) -> PoolLimits:
    most = min(one.max_nodes, other.max_nodes)
    on_demand = min(one.max_on_demand_nodes, other.max_on_demand_nodes)
    return PoolLimits(
        int(min(max(one.min_nodes, other.min_nodes), most)),
        most,
        int(min(max(one.min_on_demand_nodes, other.min_on_demand_nodes), on_demand, most)),
        on_demand,
    )


def _pool(content: Mapping[str, Any], where: str) -> PoolLimits:
    only(content, where, ("min_nodes", "max_nodes", "min_on_demand_nodes", "max_on_demand_nodes"))
    found = {key: _count(value, f"{where}.{key}") for key, value in content.items()}
    for least, most in (
        ("min_nodes", "max_nodes"),
        ("min_on_demand_nodes", "max_on_demand_nodes"),
        ("min_on_demand_nodes", "max_nodes"),
    ):
        if found.get(least, 0) > found.get(most, inf):
            raise OptionError(
                f"{where}.{least} must be at most {most}; got {found[least]} above {found[most]}"
            )
    return PoolLimits(**found)


def _team(content: Mapping[str, Any], where: str) -> Quota:
    readers = {"nodes": _count, "gpus": _count, "dollars_per_hour": _money, "budget": _budget}
    only(content, where, ("pools", *readers))
    pools = content.get("pools", ())
    if not (isinstance(pools, list | tuple) and all(isinstance(one, str) and one for one in pools)):
        raise OptionError(f"{where}.pools must be a list of names of pools; got {pools!r}")
    if "nodes" in content and not pools:
        raise OptionError(f"{where}.nodes are those of the team's own pools: name them as pools = [...]")
    found: dict[str, Any] = {
        key: read(content[key], f"{where}.{key}") for key, read in readers.items() if key in content
    }
    return Quota(pools=tuple(pools), **found)


def _money(value: object, where: str) -> float:
    found = number(value, where)
    if not found > 0:
        raise OptionError(f"{where} must be > 0 dollars; got {value!r}")
    return float(found)


def _budget(value: object, where: str) -> float:
    found = number(value, where)
    if not found >= 0:
        raise OptionError(f"{where} must be >= 0 dollars; got {value!r}")
    return float(found)


def _count(value: object, where: str) -> int:
    found = number(value, where)
    if found < 0 or found != int(found):
        raise OptionError(f"{where} must be a whole number >= 0; got {value!r}")
    return int(found)


def _step(value: object, where: str) -> int:
    found = _count(value, where)
    if found < 1:
        raise OptionError(f"{where} must be at least 1 node; got {value!r}")
    return found
