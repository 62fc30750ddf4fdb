"""Decisions of scaling rules with all that they were based on, so that they can be made again later."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf, isinf
from typing import Any

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.band import UtilityBand
from ebbflow.planners.fleet.scaling.deadline import DeadlineScaling
from ebbflow.planners.fleet.scaling.limits import Curve, Rule
from ebbflow.planners.fleet.scaling.per_gpu import PerGpuScaling
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.fleet import PoolState, Target

RULES: Mapping[str, type[Rule]] = {rule.name: rule for rule in (PerGpuScaling, UtilityBand, DeadlineScaling)}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One decision: what a rule was told, what it asked of its curve, and what it decided."""

    rule: Rule
    pool: PoolState
    revision: int
    asked: Mapping[int, float]  # value of the curve by nodes
    target: Target

    def again(self) -> Target:
        """Return what the rule decides from the same inputs now.

        Raises ``OptionError`` where it asks for what it has not asked for before: then the code has changed.
        """

        def curve(nodes: int) -> float:
            if nodes not in self.asked:
                raise OptionError(
                    f"the record lacks what {nodes} nodes are worth: rule {self.rule.name} never asked"
                )
            return self.asked[nodes]

        return self.rule.decide(self.pool, self.revision, curve)

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON has; infinite seconds become ``null``."""
        return {
            "rule": self.rule.name,
            "settings": asdict(self.rule),  # type: ignore[call-overload]
            "pool": asdict(self.pool),
            "revision": self.revision,
            "asked": [
                [nodes, None if isinf(value) else value] for nodes, value in sorted(self.asked.items())
            ],
            "target": asdict(self.target),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Recorded":
        """Return the record that ``to_json`` made ``data`` of. Raises ``OptionError`` for an unknown rule."""
        kind = RULES.get(data["rule"])
        if kind is None:
            raise OptionError(f"rule must be one of {', '.join(sorted(RULES))}; got {data['rule']!r}")
        pool = _frozen(data["pool"])
        pool["nodes"] = tuple(Node(**node) for node in pool["nodes"])
        return cls(
            kind(**_frozen(data["settings"])),
            PoolState(**pool),
            data["revision"],
            {nodes: inf if value is None else value for nodes, value in data["asked"]},
            Target(**_frozen(data["target"])),
        )


def recorded(rule: Rule, pool: PoolState, revision: int, curve: Curve) -> Recorded:
    """Return what ``rule`` decides, with all that it asked; no count is asked for twice."""
    asked: dict[int, float] = {}

    def noted(nodes: int) -> float:
        if nodes not in asked:
            asked[nodes] = curve(nodes)
        return asked[nodes]

    target = rule.decide(pool, revision, noted)
    return Recorded(rule, pool, revision, asked, target)


def _frozen(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
