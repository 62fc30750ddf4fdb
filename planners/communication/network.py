"""A flow-level simulator of a network: flows share links max-min fairly, rates change at every event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link.

    Args:
        capacity: bytes per second.
        latency: s.
        buffer: bytes that the receiving port holds; 0: no incast.
        incast: how much senders that overflow the buffer slow the link down.
        window: bytes of a flow that are under way at once.
    """

    capacity: float
    latency: float = 0.0
    buffer: float = 0.0
    incast: float = 1.0
    window: float = 64 * 2**10

    def __post_init__(self) -> None:
        if not (isfinite(self.capacity) and self.capacity > 0):
            raise OptionError(
                f"capacity of a link must be > 0 and finite, bytes per second; got {self.capacity}"
            )
        if not (isfinite(self.latency) and self.latency >= 0):
            raise OptionError(f"latency of a link must be >= 0 s and finite; got {self.latency}")

    def usable(self, sizes: Sequence[float]) -> float:
        """Return bytes per second that are left of the capacity by flows of these sizes."""
        if not self.buffer or len(sizes) < 2:
            return self.capacity
        waiting = sum(min(size, self.window) for size in sizes)
        return self.capacity / (1 + self.incast * max(0.0, (waiting - self.buffer) / self.buffer))


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes over a path of links, from ``start`` (s) on, or when the flows ``after`` have ended if that is later."""

    path: tuple[str, ...]
    bytes: float
    start: float = 0.0
    after: tuple[int, ...] = ()


def fair_rates(paths: Sequence[tuple[str, ...]], capacities: Mapping[str, float]) -> list[float]:
    """Return the max-min fair rate of each flow by progressive filling; infinite for a path without links.

    Args:
        paths: the links of each flow.
        capacities: of each link, bytes per second.
    """
    rates = [inf] * len(paths)
    open_flows = {i for i, path in enumerate(paths) if path}
    left = dict(capacities)
    users: dict[str, set[int]] = {}
    for i in open_flows:
        for link in paths[i]:
            users.setdefault(link, set()).add(i)
    while open_flows:
        share, link = min((left[link] / len(flows), link) for link, flows in users.items() if flows)
        for i in sorted(users[link]):
            rates[i] = share
            open_flows.discard(i)
            for other in paths[i]:
                left[other] = max(left[other] - share, 0.0)
                if other != link:
                    users[other].discard(i)
        users[link].clear()
    return rates


def flow_ends(flows: Sequence[Flow], links: Mapping[str, Link]) -> list[float]:
    """Return when each flow has arrived, s.

    Args:
        flows: what is sent; ``after`` are positions of earlier ones.
        links: name -> link.

    Raises ``OptionError`` for a path over an unknown link, or flows that wait for each other.
    """
    for k, flow in enumerate(flows):
        if missing := [link for link in flow.path if link not in links]:
            raise OptionError(f"flow {k} goes over the link {missing[0]!r}, which the network does not have")
        if any(not 0 <= i < k for i in flow.after):
            raise OptionError(f"flow {k} must wait for earlier flows only; got {flow.after}")
        if not (isfinite(flow.bytes) and flow.bytes >= 0):
            raise OptionError(f"bytes of flow {k} must be >= 0 and finite; got {flow.bytes}")
    ends: dict[int, float] = {}
    left = [flow.bytes for flow in flows]
    active: set[int] = set()
    now = 0.0
    while True:
        starts = {
            k: max([flow.start, *(ends[i] for i in flow.after)])
            for k, flow in enumerate(flows)
            if k not in ends and k not in active and all(i in ends for i in flow.after)
        }
        active |= {k for k, start in starts.items() if start <= now}
        order = sorted(active)
        sizes: dict[str, list[float]] = {}
        for k in order:
            for link in flows[k].path:
                sizes.setdefault(link, []).append(flows[k].bytes)
        usable = {link: links[link].usable(some) for link, some in sizes.items()}
        rates = fair_rates([flows[k].path for k in order], usable)
        next_start = min((start for start in starts.values() if start > now), default=inf)
        done = [(left[k] / rate if rate < inf else 0.0, k) for k, rate in zip(order, rates, strict=True)]
        step = min(min((seconds for seconds, _ in done), default=inf), next_start - now)
        if step == inf:
            break
        now += step
        for (seconds, k), rate in zip(done, rates, strict=True):
            if seconds <= step * (1 + 1e-12):
                left[k] = 0.0
                active.discard(k)
                ends[k] = now + sum(links[link].latency for link in flows[k].path)
            else:
                left[k] -= rate * step
    return [ends[k] for k in range(len(flows))]


def motif_seconds(flows: Sequence[Flow], links: Mapping[str, Link], launch: float = 0.0) -> float:
    """Return the seconds of a motif that is these flows; ``launch`` is what starting it costs."""
    return launch + max(flow_ends(flows, links), default=0.0)
