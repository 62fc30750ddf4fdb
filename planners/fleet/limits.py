"""What no decision about nodes may exceed, as a person writes it down: a section ``limits`` of TOML or JSON.

::

    [limits]
    dollars_per_hour = 40          # of the whole cluster
    dollars_per_run = 250          # of one query, training or pipeline
    nodes = 60                     # of all pools
    grow = 10                      # nodes that one decision adds to a pool at most
    shrink = 5                     # nodes that one decision takes from a pool at most

    [limits.pools.gpu]
    least = 0
    most = 16
    on_demand_least = 0
    on_demand_most = 2

    [limits.teams.vision]
    pools = ["gpu"]
    nodes = 12
    gpus = 48
    dollars_per_hour = 25
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ebbflow.planners.errors import OptionError
from ebbflow.planners.sections import number, only, table


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Nodes of one pool."""

    least: int = 0
    most: float = inf
    on_demand_least: int = 0
    on_demand_most: float = inf


@dataclass(frozen=True, slots=True)
class Quota:
    """What the pools of one team may hold together."""

    pools: tuple[str, ...]
    nodes: float = inf
    gpus: float = inf
    dollars_per_hour: float = inf


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

        Where a pool's least is above what the other allows, the most wins. Of a team that both name, this one's quota
        counts.
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
    def parse(cls, content: Mapping[str, Any], source: str = "limits") -> "Limits":
        """Read a section; ``source`` begins every message.

        Raises ``OptionError`` that names the key, the value and the rule: unknown keys, numbers below 0, a least
        above a most, a pool of two teams.
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
    most, on_demand = min(one.most, other.most), min(one.on_demand_most, other.on_demand_most)
    return PoolLimits(
        int(min(max(one.least, other.least), most)),
        most,
        int(min(max(one.on_demand_least, other.on_demand_least), on_demand, most)),
        on_demand,
    )


def _pool(content: Mapping[str, Any], where: str) -> PoolLimits:
    only(content, where, ("least", "most", "on_demand_least", "on_demand_most"))
    found = {key: _count(value, f"{where}.{key}") for key, value in content.items()}
    for least, most in (
        ("least", "most"),
        ("on_demand_least", "on_demand_most"),
        ("on_demand_least", "most"),
    ):
        if found.get(least, 0) > found.get(most, inf):
            raise OptionError(
                f"{where}.{least} must be at most {most}; got {found[least]} above {found[most]}"
            )
    return PoolLimits(**found)


def _team(content: Mapping[str, Any], where: str) -> Quota:
    only(content, where, ("pools", "nodes", "gpus", "dollars_per_hour"))
    pools = content.get("pools")
    if not (isinstance(pools, list | tuple) and pools and all(isinstance(one, str) and one for one in pools)):
        raise OptionError(f"{where}.pools must be a list of names of pools; got {pools!r}")
    found: dict[str, Any] = {
        key: (_money if key == "dollars_per_hour" else _count)(value, f"{where}.{key}")
        for key, value in content.items()
        if key != "pools"
    }
    return Quota(pools=tuple(pools), **found)


def _money(value: object, where: str) -> float:
    found = number(value, where)
    if not found > 0:
        raise OptionError(f"{where} must be > 0 dollars; got {value!r}")
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
