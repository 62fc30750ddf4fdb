"""Which host a slab is mapped to: the power of two choices, among hosts without a slab of the client first.

Source: Infiniswap; M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS, 2001.
"""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass

from numpy.random import Generator as Rng

from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class Offer:
    """A host's answer to a probe.

    Args:
        free_slabs: slabs that it can lend.
        used: fraction of its memory in use, 0 to 1; ties and equal hosts are decided by slabs without it.
    """

    free_slabs: int
    used: float | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask hosts, in parallel and with a timeout, how many slabs they can lend (QUERY_MEM).

    The answer is a mapping of hosts to offers; a host that is missing timed out.
    """

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MapRequest:
    """Ask a host for one slab (MAP). The answer is the slab's handle, or ``None``: refused, or no answer in time."""

    host: str


Request = Probe | MapRequest
Reply = Mapping[str, Offer] | int | None


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Where a slab is mapped.

    Args:
        host: ``None``: nowhere; the slab stays in the store.
        handle: of the slab at the host.
        reason: in words.
        messages: control messages that were sent and received.
    """

    host: str | None
    handle: int | None
    reason: str
    messages: int


def place_slab(
    new_hosts: Iterable[str],
    old_hosts: Iterable[str],
    rng: Rng,
    choices: int = 2,
    *,
    by_usage: bool = False,
    redraws: int = 3,
) -> Generator[Request, Reply, PlacementDecision]:
    """Yield probes and requests, receive their answers, and return the decision.

    Args:
        new_hosts: without a slab of this client; a single one with memory goes before all old ones.
        old_hosts: with at least one.
        rng: draws hosts and breaks ties.
        choices: hosts that are probed in a group, at least 1; 1 is random placement.
        by_usage: whether the host with the smallest fraction of memory in use is chosen instead of the one with most
            slabs, for hosts of unequal size.
        redraws: maximum number of further draws from a group after refusals.

    Raises ``OptionError`` for fewer than one choice or a negative number of redraws.
    """
    if choices < 1 or redraws < 0:
        raise OptionError(f"choices must be at least 1 and redraws at least 0, not {choices} and {redraws}")
    messages = probed = refused = 0
    for hosts, name in ((new_hosts, "new"), (old_hosts, "old")):
        group = list(hosts)
        for _ in range(1 + redraws):
            if not group:
                break
            drawn = [group[i] for i in rng.choice(len(group), min(choices, len(group)), replace=False)]
            replies = yield Probe(tuple(drawn))
            assert isinstance(replies, Mapping), "a probe is answered with offers"
            offers = {host: replies[host] for host in drawn if host in replies}
            messages += len(drawn) + len(offers)
            probed += len(drawn)
            able = {host: one for host, one in offers.items() if one.free_slabs > 0}
            for host in _ranked(able, rng, by_usage=by_usage):
                handle = yield MapRequest(host)
                assert handle is None or isinstance(handle, int), "a request is answered with a handle"
                messages += 2
                if handle is not None:
                    why = _reason(host, able, len(drawn), name, by_usage=by_usage)
                    return PlacementDecision(host, handle, why, messages)
                refused += 1
            group = [host for host in group if host not in drawn]
            if not able:
                break
    return PlacementDecision(None, None, _none(probed, refused), messages)


def _ranked(able: Mapping[str, Offer], rng: Rng, *, by_usage: bool) -> list[str]:
    hosts = [list(able)[i] for i in rng.permutation(len(able))]
    if by_usage:
        return sorted(hosts, key=lambda host: (_used(able[host]), -able[host].free_slabs))
    return sorted(hosts, key=lambda host: -able[host].free_slabs)


def _used(offer: Offer) -> float:
    return 1.0 if offer.used is None else offer.used


def _reason(host: str, able: Mapping[str, Offer], drawn: int, group: str, *, by_usage: bool) -> str:
    kind = (
        "without a slab of this client"
        if group == "new"
        else "with slabs of this client, as no other had memory"
    )
    best = "least memory in use" if by_usage else "most free slabs"
    return f"{host}: {best} ({able[host].free_slabs}) of {drawn} hosts probed {kind}"


def _none(probed: int, refused: int) -> str:
    if not probed:
        return "there is no host"
    return f"none of {probed} hosts probed has a free slab" + (f", {refused} refused" if refused else "")
