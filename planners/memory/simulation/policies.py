"""How simulated machines share memory: the source's way, and what it is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass

ALL = 10**6  # more than there is of anything


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """How slabs are placed and evicted.

    Args:
        choices: hosts that are probed for a slab; 0: memory is not shared.
        new_first: whether hosts without a slab of the client are asked before others.
        retry: whether a slab that found no host is tried again.
        extra: slabs sampled beyond those to be evicted, for each of them: 0 is random eviction.
    """

    choices: int = 2
    new_first: bool = True
    retry: bool = True
    extra: int = 1


POLICIES: Mapping[str, SharingPolicy] = {
    "no-sharing": SharingPolicy(choices=0),
    "random-placement": SharingPolicy(choices=1, new_first=False, retry=False),
    "two-choices": SharingPolicy(),
    "least-loaded": SharingPolicy(choices=ALL, new_first=False),
    "random-eviction": SharingPolicy(extra=0),
    "exact-eviction": SharingPolicy(extra=ALL),
}
"""By name; two choices with batch eviction is the source's way."""
