"""What a capacity loop is asked for: which ledger, which nodes, by which policy, within which limits."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from ebbflow.infra.storage import user_files
from ebbflow.planners.capacity.values import Scaling, Settings, Team
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names
from ebbflow.planners.sections import number, only, table
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.own_policies import policy_of
from ebbflow.tasks.fleet.request import LIMITS, FleetRules

_TIMES = tuple(f.name for f in fields(Settings) if f.name.endswith("_s"))
_SCALING = tuple(f.name for f in fields(Scaling) if f.name not in ("pools", "fallback"))


@dataclass(frozen=True)
class LoopRules:
    """What a file of limits says to a loop, beyond what it says to ``ebbflow fleet``.

    ::

        [policy]
        name = "rho-bounded"           # or one of an installed package, or "mymodule:MyPolicy" with --allow-policy
        options = { rho = 1.5 }

        [loop]                         # seconds; ``planners.capacity.values`` has all
        lease_s = 300
        interval_s = 60

        [scaling]                      # when nodes are rented and given back; enabled = false leaves them alone
        idle_s = 300
        pools = { etl = "cores", gpu = "gpus" }

        [teams.vision]                 # beside [limits.teams.vision], which is about pools
        weight = 2
        gpus = 48

        [pace]                         # seconds; ``LoopIntervals`` has them all
        source = 0.3
    """

    fleet: FleetRules = field(default_factory=FleetRules)
    policy: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    scaling: Scaling | None = field(default_factory=Scaling)
    teams: Mapping[str, Team] = field(default_factory=dict)
    pace: LoopIntervals = field(default_factory=LoopIntervals)

    @classmethod
    def read(cls, path: str | Path) -> "LoopRules":
        """Read a TOML file. Raises ``OptionError`` that names file, key, value and rule."""
        return cls.parse(user_files.read_toml(path), str(path))

    @classmethod
    def parse(cls, content: Mapping[str, Any], source: str) -> "LoopRules":
        """Return the rules that ``content`` holds; ``source`` begins every message. Raises ``OptionError``."""
        rules = FleetRules.parse(content, source)
        policy = table(content.get("policy", {}), f"{source}: policy")
        only(policy, f"{source}: policy", ("name", "options"))
        name = policy.get("name", "")
        if not isinstance(name, str):
            raise OptionError(f"{source}: policy.name must be a name; got {name!r}")
        return cls(
            rules,
            name,
            dict(table(policy.get("options", {}), f"{source}: policy.options")),
            _numbers(content.get("loop", {}), f"{source}: loop", _TIMES),
            _scaling(content.get("scaling", {}), f"{source}: scaling", rules),
            {
                name: Team(**_numbers(team, f"{source}: teams.{name}", tuple(f.name for f in fields(Team))))
                for name, team in table(content.get("teams", {}), f"{source}: teams").items()
            },
            LoopIntervals(
                **_numbers(
                    content.get("pace", {}), f"{source}: pace", tuple(f.name for f in fields(LoopIntervals))
                )
            ),
        )


@dataclass(frozen=True)
class CapacityRequest:
    """One loop. ``settings`` and ``rules`` read what is named, and nothing else; nothing is opened."""

    ledger: str | None = field(
        default=None, repr=False
    )  # default: $EBBFLOW_LEDGER, or ledger.db in our own folder
    cluster: str = "local"
    source: str = "local"  # local[:NAME], aws[:CONFIG], spark://HOST:PORT or cluster[:NAME]
    policy: str = ""  # a name, or "MODULE:NAME"; default: the file's, else rho-bounded
    options: Mapping[str, Any] = field(default_factory=dict)  # of the policy
    limits: str | None = None  # default: $EBBFLOW_LIMITS
    lease: float | None = None  # s, instead of the file's
    interval: float | None = None  # s, instead of the file's
    take_over: bool = False
    seed: int = 0
    prices: str | None = None  # file of on-demand prices, for aws
    allow_policies: tuple[str, ...] = ()  # MODULE:NAME of policies that may be imported, whoever names them

    def __post_init__(self) -> None:
        names.CLUSTER.check(self.cluster)
        if self.seed < 0:
            raise OptionError(f"seed must be >= 0; got {self.seed}")

    def rules(self) -> LoopRules:
        """Read the limits. Raises ``OptionError``."""
        given = self.limits or os.environ.get(LIMITS)
        return LoopRules.read(given) if given else LoopRules()

    def settings(self, rules: LoopRules) -> Settings:
        """Return how the loop decides; imports the policy. Raises ``OptionError``."""
        times = dict(rules.times)
        times |= {"lease_s": self.lease} if self.lease is not None else {}
        times |= {"interval_s": self.interval} if self.interval is not None else {}
        named = self.policy or rules.policy
        options = self.options or (rules.options if named == rules.policy else {})
        policy = policy_of(named, options, lease_s=times.get("lease_s"), allowed=self.allow_policies)
        given: dict[str, Any] = {**times, "policy": policy}
        return Settings(limits=rules.fleet.limits, teams=rules.teams, scaling=rules.scaling, **given)


def _scaling(content: object, where: str, rules: FleetRules) -> Scaling | None:
    given = dict(table(content, where))
    enabled = given.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise OptionError(f"{where}.enabled must be true or false; got {enabled!r}")
    pools = table(given.pop("pools", {}), f"{where}.pools")
    numbers = _numbers(given, where, _SCALING)
    return Scaling(pools=dict(pools), fallback=rules.fallback, **numbers) if enabled else None


def _numbers(content: object, where: str, names: tuple[str, ...]) -> dict[str, float]:
    given = table(content, where)
    only(given, where, names)
    return {
        name: value if value == inf else float(number(value, f"{where}.{name}"))
        for name, value in given.items()
    }
