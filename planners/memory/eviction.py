"""Which mapped slabs a daemon takes back: the least active of a random sample (Infiniswap)."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from numpy.random import Generator as Rng

from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class MappedSlab:
    """A slab of a daemon that a client uses.

    Args:
        slab: its handle.
        owner: the client.
        mapped_at: seconds on the daemon's clock.
    """

    slab: int
    owner: str
    mapped_at: float = 0.0


def lightly_active_probability(needed: int, extra: int, busy: float) -> float:
    """Return the probability that a sample has as many slabs that are not busy as are needed.

    Args:
        needed: slabs to be evicted (E), at least 0.
        extra: slabs sampled beyond them (E'), at least 0; 0 is random eviction.
        busy: probability that a slab is busy.

    Raises ``OptionError`` for numbers outside their ranges.
    """
    _check(needed, extra)
    if not 0 <= busy <= 1:
        raise OptionError(f"busy must be a probability, not {busy}")
    n = needed + extra
    total = sum(comb(n, i) * (1 - busy) ** i * busy ** (n - i) for i in range(needed, n + 1))
    return min(total, 1.0)


def sample_candidates(
    mapped: Iterable[MappedSlab], needed: int, extra: int, rng: Rng
) -> tuple[MappedSlab, ...]:
    """Return a uniform sample without replacement: all slabs where there are no more than asked for.

    Args:
        mapped: slabs of the daemon that may be evicted.
        needed: slabs to be evicted, at least 0.
        extra: slabs sampled beyond them, at least 0.
        rng: draws the sample.

    Raises ``OptionError`` for negative numbers.
    """
    _check(needed, extra)
    slabs = list(mapped)
    drawn = rng.choice(len(slabs), min(len(slabs), needed + extra), replace=False) if slabs else ()
    return tuple(slabs[i] for i in drawn)


def select_victims(
    candidates: Iterable[MappedSlab], activities: Mapping[int, float], needed: int
) -> tuple[MappedSlab, ...]:
    """Return the least active of a sample; of equals those mapped longest, then by handle.

    Args:
        candidates: the sample.
        activities: of slabs by handle; one that is missing counts as inactive: an owner that does not answer loses
            nothing.
        needed: slabs to be evicted.
    """
    ranked = sorted(candidates, key=lambda one: (activities.get(one.slab, 0.0), one.mapped_at, one.slab))
    return tuple(ranked[: max(needed, 0)])


@dataclass(frozen=True, slots=True)
class CheckActivity:
    """Ask owners, each with one message and a timeout, for activities (CHECK_ACTIVITY).

    The answer is a mapping of handles to activities; a handle that is missing was not answered for.
    """

    slabs: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class EvictionDecision:
    """The slabs that are evicted.

    Args:
        victims: in the order in which they were chosen.
        reason: in words.
        messages: control messages of the round, DONEs included.
    """

    victims: tuple[MappedSlab, ...]
    reason: str
    messages: int


def choose_victims(
    mapped: Iterable[MappedSlab], needed: int, extra: int, rng: Rng
) -> Generator[CheckActivity, Mapping[int, float], EvictionDecision]:
    """Yield the question for activities, receive the answers, and return the decision of one round.

    Args:
        mapped: slabs that may be evicted.
        needed: slabs to be evicted, at least 0.
        extra: slabs sampled beyond them, at least 0.
        rng: draws the sample.

    Raises ``OptionError`` for negative numbers.
    """
    sample = sample_candidates(mapped, needed, extra, rng)
    if not sample:
        return EvictionDecision((), "no mapped slab can be evicted", 0)
    asked = by_owner(sample)
    activities = yield CheckActivity(asked)
    answered = sum(1 for slabs in asked.values() if any(slab in activities for slab in slabs))
    victims = select_victims(sample, activities, needed)
    highest = max((activities.get(one.slab, 0.0) for one in victims), default=0.0)
    reason = (
        f"{len(victims)} least active of {len(sample)} sampled slabs of {len(asked)} clients "
        f"({answered} answered), at most {highest:.3g} blocks/s"
    )
    return EvictionDecision(victims, reason, len(asked) + answered + 2 * len(victims))


def by_owner(slabs: Sequence[MappedSlab]) -> dict[str, tuple[int, ...]]:
    """Return the handles of slabs by their owners."""
    found: dict[str, list[int]] = {}
    for one in slabs:
        found.setdefault(one.owner, []).append(one.slab)
    return {owner: tuple(handles) for owner, handles in found.items()}


def _check(needed: int, extra: int) -> None:
    if needed < 0 or extra < 0:
        raise OptionError(f"needed and extra must not be negative, not {needed} and {extra}")
