"""What the failures of many jobs say about a node, or about a version of a program (Jeon et al., ATC 2019)."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ebbflow.planners.errors import OptionError

HOUR = 3600.0  # s


@dataclass(frozen=True, slots=True)
class FailedJob:
    """One failure of one job."""

    job: str
    user: str
    code: str  # version of its program
    node: str
    signature: str
    at: float  # s


def nodes_to_blame(
    failed: Iterable[FailedJob], now: float, users: int = 3, window: float = HOUR
) -> frozenset[str]:
    """Return the nodes to quarantine: one signature failed jobs of ``users`` users there within ``window`` s.

    Raises ``OptionError`` for fewer than one user and a window that is not positive.
    """
    if users < 1 or not window > 0:
        raise OptionError(f"users must be >= 1 and the window > 0 s; got {users}, {window}")
    seen: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for one in failed:
        if one.node and 0 <= now - one.at <= window:
            seen[one.node, one.signature].add(one.user)
    return frozenset(node for (node, _), of in seen.items() if len(of) >= users)


def versions_to_hold(failed: Iterable[FailedJob], jobs: int = 3) -> frozenset[tuple[str, str]]:
    """Return (user, code version) of which ``jobs`` jobs failed alike: further ones are held at the canary.

    Raises ``OptionError`` for fewer than one job.
    """
    if jobs < 1:
        raise OptionError(f"jobs must be >= 1; got {jobs}")
    seen: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for one in failed:
        seen[one.user, one.code, one.signature].add(one.job)
    return frozenset((user, code) for (user, code, _), of in seen.items() if len(of) >= jobs)
