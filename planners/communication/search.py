"""Which option each collective takes: Metropolis-Hastings over plans (Pseudocode 4, lines 1-9), and all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, prod

import numpy as np

from ebbflow.planners.communication.schedule import ExecutionOption, Plan
from ebbflow.planners.errors import OptionError

Options = Mapping[str, Sequence[ExecutionOption]]
"""Name of a collective -> what it may be carried out as."""
Cost = Callable[[Plan], float]
"""Seconds of an iteration of a plan."""

BETA = 50.0  # times 1 / the greedy plan's cost: the inverse temperature
MIN_PROPOSALS = 100
MAX_PLANS = 1_000_000  # that ``brute_force`` goes through


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan that was seen.

    Args:
        plan: an option for each collective.
        cost: s of an iteration.
        greedy_cost: s of an iteration if each collective takes the option that is fastest by itself.
        proposals: plans that were costed, the greedy one not counted.
        improvements: pairs of proposal and cost at which the best became better.
    """

    plan: Plan
    cost: float
    greedy_cost: float
    proposals: int
    improvements: tuple[tuple[int, float], ...] = ()


def acceptance(cost: float, proposed: float, beta: float) -> float:
    """Return the probability with which a plan of cost ``proposed`` replaces one of ``cost``."""
    return 1.0 if proposed <= cost else exp(beta * (cost - proposed))


def greedy_plan(options: Options) -> dict[str, ExecutionOption]:
    """Return the plan in which each collective takes the option that is fastest by itself."""
    _check(options)
    return {name: min(some, key=lambda one: one.seconds) for name, some in options.items()}


def metropolis_search(
    options: Options,
    cost: Cost,
    *,
    rng: np.random.Generator,
    clock: Callable[[], float],
    beta: float | None = None,
    seconds: float = 10.0,
    min_proposals: int = MIN_PROPOSALS,
) -> SearchResult:
    """Search a plan by a random walk that begins with the greedy one; costs are remembered by plan.

    Args:
        options: of each collective.
        cost: of a plan, s.
        rng: what the walk is drawn from.
        clock: s, for the bound.
        beta: inverse temperature, 1/s; 50 over the greedy plan's cost unless given.
        seconds: bound of the search. It ends earlier when the last improvement is longer ago than half of the time
            searched so far.
        min_proposals: that are made in any case.

    Raises ``OptionError`` for a collective without options.
    """
    began = clock()
    plan = greedy_plan(options)
    known: dict[tuple[str, ...], float] = {}

    def costed(some: Plan) -> float:
        key = tuple(some[name].name for name in options)
        if key not in known:
            known[key] = cost(some)
        return known[key]

    current = greedy = costed(plan)
    best, best_cost = dict(plan), current
    inverse = beta if beta is not None else BETA / greedy if greedy > 0 else 0.0
    changeable = [name for name, some in options.items() if len(some) > 1]
    made, improved, history = 0, began, []
    while changeable:
        now = clock()
        spent = now - began
        if made >= min_proposals and (spent > seconds or now - improved > spent / 2):
            break
        name = changeable[int(rng.integers(len(changeable)))]
        others = [one for one in options[name] if one is not plan[name]]
        other = others[int(rng.integers(len(others)))]
        proposed = {**plan, name: other}
        price = costed(proposed)
        made += 1
        if rng.random() < acceptance(current, price, inverse):
            plan, current = proposed, price
        if price < best_cost:
            best, best_cost, improved = proposed, price, clock()
            history.append((made, price))
    return SearchResult(best, best_cost, greedy, made, tuple(history))


def brute_force(options: Options, cost: Cost, *, max_plans: int = MAX_PLANS) -> SearchResult:
    """Return the best of all plans. Raises ``OptionError`` where there are more than ``max_plans``."""
    greedy = cost(greedy_plan(options))
    count = prod(len(some) for some in options.values())
    if count > max_plans:
        raise OptionError(f"brute force goes through {max_plans:,} plans at most; got {count:,}")
    plans = (dict(zip(options, chosen, strict=True)) for chosen in product(*options.values()))
    best = min(((cost(plan), i, plan) for i, plan in enumerate(plans)), key=lambda one: one[:2])
    return SearchResult(best[2], best[0], greedy, count)


def _check(options: Options) -> None:
    if empty := [name for name, some in options.items() if not some]:
        raise OptionError(f"{empty[0]} has no option")
