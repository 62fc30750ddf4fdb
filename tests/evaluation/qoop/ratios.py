"""The competitive algorithm: ratios over many instances, and the lower-bound adversary (QOOP, section 6)."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from tests.evaluation.qoop.adversary import PLANS, STEPS, measure
from tests.evaluation.qoop.competitive import lower_bound_adversary

MOST_PHASES = 8


def run_competitive(seed: int, instances: int, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Measure at least ``instances`` random and adversarial instances, half of them with separated plans."""
    per_kind = -(-instances // 8)
    ratios = []
    for number, separated in enumerate((True, False)):
        progress("random and adversarial instances", number, 2)
        found = measure(np.random.default_rng([seed, number]), per_kind, separated=separated)
        ratios += [asdict(r) | {"bound": r.bound, "kept": r.kept} for r in found]
    adversary = []
    for m in range(1, MOST_PHASES + 1):
        progress(f"lower-bound adversary, {m} plans", m, MOST_PHASES)
        played = lower_bound_adversary(m)
        adversary.append(
            {
                "plans": m,
                "copies": played.copies,
                "limit": 2 - 2.0 ** -(m - 1),
                "steps": len(played.allocations),
            }
        )
    return {
        "settings": {"seed": seed, "most_plans": PLANS, "steps": STEPS, "unit": 64.0},
        "instances": sum(r["count"] for r in ratios),
        "ratios": ratios,
        "adversary": adversary,
    }
