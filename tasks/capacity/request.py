"""What a capacity loop is asked for: which ledger, which nodes, by which policy, within which quotas."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ebbflow.infra.storage import user_files
from ebbflow.planners.capacity.values import LOOP_KEYS, SCALING_KEYS, Scaling, Settings, Team, teams_of
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import names
from ebbflow.planners.model.numbers import duration_of, parse_bit_rate
from ebbflow.planners.model.options import check_metrics
from ebbflow.planners.scheduling.placement_cost import ClusterLinks
from ebbflow.planners.sections import number, only, table
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.own_policies import policy_of
from ebbflow.tasks.fleet.request import CONFIG, FleetRules

_FACTORS = (
    "deadline_priority_boost_max",
    "scale_tolerance",
    "deadline_safety_factor",
    "min_marginal_goodput",
)


@dataclass(frozen=True)
class LoopRules:
    """What the configuration file says to a loop, beyond what it says to ``ebbflow fleet``.

    ::

        [policy]
        name = "rho-bounded"           # or one of an installed package, or "mymodule:MyPolicy" with --allow-policy
        options = { rho = 1.5 }

        [loop]                         # durations; ``planners.capacity.values.LOOP_KEYS`` has all
        lease_duration = "5m"
        auction_interval = "1m"

        [scaling]                      # when nodes are launched and terminated; enabled = false leaves them alone
        scale_in_idle = "5m"
        pools = { etl = "cores", gpu = "gpus" }

        [teams.vision]                 # what it may hold stands in [quotas.teams.vision]
        weight = 2

        [links]                        # bandwidth each way, for what placements cost a training
        intra_rack = "25gbit"

        [intervals]                    # durations; ``LoopIntervals`` has them all
        capacity_poll_interval = "300ms"
    """

    fleet: FleetRules = field(default_factory=FleetRules)
    policy: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    scaling: Scaling | None = field(default_factory=Scaling)
    teams: Mapping[str, Team] = field(default_factory=dict)
    intervals: LoopIntervals = field(default_factory=LoopIntervals)
    links: ClusterLinks = field(default_factory=ClusterLinks)

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
            _values(content.get("loop", {}), f"{source}: loop", LOOP_KEYS),
            _scaling(content.get("scaling", {}), f"{source}: scaling", rules),
            _teams(content.get("teams", {}), f"{source}: teams", rules),
            LoopIntervals(
                **_values(
                    content.get("intervals", {}),
                    f"{source}: intervals",
                    {f.name: f.name for f in fields(LoopIntervals)},
                )
            ),
            _links(content.get("links", {}), f"{source}: links"),
        )


@dataclass(frozen=True)
class CapacityRequest:
    """One loop. ``settings`` and ``rules`` read what is named, and nothing else; nothing is opened."""

    ledger: str | None = field(
        default=None, repr=False
    )  # default: $EBBFLOW_LEDGER, or ledger.db in our own directory
    cluster: str = "local"
    source: str = "local"  # local[:NAME], aws[:FILE], spark://HOST:PORT or cluster[:NAME]
    policy: str = ""  # a name, or "MODULE:NAME"; default: the file's, else rho-bounded
    options: Mapping[str, Any] = field(default_factory=dict)  # of the policy
    config: str | None = None  # the configuration file; default: $EBBFLOW_CONFIG
    lease_duration: float | None = None  # s, instead of the file's
    auction_interval: float | None = None  # s, instead of the file's
    take_over: bool = False
    seed: int = 0
    prices: str | None = None  # file of on-demand prices, for aws
    metrics: str = ""  # HOST:PORT of /metrics and /healthz for Prometheus; "": not served
    allow_policies: tuple[str, ...] = ()  # MODULE:NAME of policies that may be imported, whoever names them

    def __post_init__(self) -> None:
        names.CLUSTER.check(self.cluster)
        if self.seed < 0:
            raise OptionError(f"seed must be >= 0; got {self.seed}")
        check_metrics(self.metrics)

    def rules(self) -> LoopRules:
        """Read the configuration file. Raises ``OptionError``."""
        given = self.config or os.environ.get(CONFIG)
        return LoopRules.read(given) if given else LoopRules()

    def settings(self, rules: LoopRules) -> Settings:
        """Return how the loop decides; imports the policy. Raises ``OptionError``."""
        times = dict(rules.times)
        times |= {"lease_s": self.lease_duration} if self.lease_duration is not None else {}
        times |= {"interval_s": self.auction_interval} if self.auction_interval is not None else {}
        named = self.policy or rules.policy
        options = self.options or (rules.options if named == rules.policy else {})
        policy = policy_of(named, options, lease_s=times.get("lease_s"), allowed=self.allow_policies)
        given: dict[str, Any] = {**times, "policy": policy}
        return Settings(
            limits=rules.fleet.limits, teams=rules.teams, scaling=rules.scaling, links=rules.links, **given
        )


def _scaling(content: object, where: str, rules: FleetRules) -> Scaling | None:
    given = dict(table(content, where))
    enabled = given.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise OptionError(f"{where}.enabled must be true or false; got {enabled!r}")
    pools = table(given.pop("pools", {}), f"{where}.pools")
    values = _values(given, where, SCALING_KEYS)
    return Scaling(pools=dict(pools), fallback=rules.fallback, **values) if enabled else None


def _teams(content: object, where: str, rules: FleetRules) -> dict[str, Team]:
    weights = {}
    for name, team in table(content, where).items():
        given = table(team, f"{where}.{name}")
        only(given, f"{where}.{name}", ("weight",))
        if "weight" in given:
            weights[name] = float(number(given["weight"], f"{where}.{name}.weight"))
        else:
            weights[name] = 1.0
    return teams_of(weights, rules.limits)


def _links(content: object, where: str) -> ClusterLinks:
    given = table(content, where)
    only(given, where, tuple(f.name for f in fields(ClusterLinks)))
    rates = {key: parse_bit_rate(value, f"{where}.{key}") / 8 for key, value in given.items()}
    return ClusterLinks(**rates)


def _values(content: object, where: str, keys: Mapping[str, str]) -> dict[str, float]:
    """Return the settings of a section by field. All are durations but the factors."""
    given = table(content, where)
    only(given, where, tuple(keys))
    return {
        keys[key]: float(number(value, f"{where}.{key}"))
        if key in _FACTORS
        else duration_of(value, f"{where}.{key}")
        for key, value in given.items()
    }
