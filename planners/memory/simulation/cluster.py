"""The simulated cluster: each second containers grow and page, daemons adjust, and slabs are placed and evicted.

Daemons decide by ``HeadroomPolicy`` and ``choose_victims``, clients by ``place_slab``. A page that is missing costs a
container its tier's latency; the container's speed, and so the activity of its slabs, follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator as Rng
from numpy.typing import NDArray

from ebbflow.planners.memory.eviction import MappedSlab, choose_victims
from ebbflow.planners.memory.headroom import Allocate, Evict, HeadroomPolicy, Hold, MemorySample, Release
from ebbflow.planners.memory.placement import MapRequest, Offer, Probe, Reply, place_slab
from ebbflow.planners.memory.simulation.policies import ALL, SharingPolicy
from ebbflow.planners.memory.simulation.scenario import PAGE, Floats, Scenario, draw_containers
from ebbflow.planners.memory.slab_pool import SlabPool
from ebbflow.planners.memory.slab_table import FIRST_RETRY_S, MAX_RETRY_S

ALPHA, HOT = 0.2, 20.0  # the source's: weight of the newest activity; requests/s above which a slab is mapped
_HALF = 0.5  # of the requests for pages that are missing, one takes a page in and one another page out


@dataclass(slots=True)
class Daemon:
    """What lends a machine's memory."""

    policy: HeadroomPolicy
    pool: SlabPool = field(default_factory=SlabPool)
    settled: tuple[int, int] | None = None  # bytes used and slabs at which it last had nothing to do
    down_until: float = -1.0


@dataclass(slots=True)
class Counters:
    """What happened so far.

    Args:
        attempts: to place a slab.
        failed: of those that found no host.
        first_failed: of those that were a slab's first.
        placed: slabs that found a host.
        evictions: rounds of eviction.
        evicted: slabs.
        evicted_activity: of each the activity over the mean of its machine's mapped slabs, summed.
        lost: slabs of daemons that died.
        messages: control messages.
        remote_bytes: pages read from and written to peers.
    """

    attempts: int = 0
    failed: int = 0
    first_failed: int = 0
    placed: int = 0
    evictions: int = 0
    evicted: int = 0
    evicted_activity: float = 0.0
    lost: int = 0
    messages: int = 0
    remote_bytes: float = 0.0


class Cluster:
    """A cluster under a policy.

    Args:
        scenario: the load.
        policy: of sharing.
        rng: draws containers, hosts and samples.
    """

    def __init__(self, scenario: Scenario, policy: SharingPolicy, rng: Rng) -> None:
        self.scenario, self.policy, self._rng = scenario, policy, rng
        self.containers = draw_containers(scenario, rng)
        self.counters = Counters()
        self.now = 0.0
        n = scenario.containers
        deficit = scenario.occupancy * (self.containers.working_set - self.containers.limit)
        self._slabs = np.ceil(deficit / scenario.slab).astype(np.int64)
        self._of = np.repeat(np.arange(n), self._slabs)  # container of each slab
        self._nth = np.concatenate([np.arange(k) for k in self._slabs])
        size = len(self._of)
        self._host = np.full(size, -1)
        self._handle = np.full(size, -1)
        self._activity = np.zeros(size)
        self._pages, self._held = (
            np.zeros(size),
            np.zeros(size),
        )  # on disk, and those of them at the host, too
        self._retry_at, self._retry_s = np.zeros(size), np.full(size, FIRST_RETRY_S)
        self._tried = np.zeros(size, dtype=bool)
        self._where: dict[tuple[int, int], int] = {}  # slab by machine and handle
        self.done, self.finished_s = np.zeros(n), np.full(n, np.inf)
        self.speed, self.local, self._missing = np.zeros(n), np.zeros(n), np.zeros(n)
        self.alive = np.zeros(n, dtype=bool)
        self._touched, self._count = np.zeros(size, dtype=bool), np.zeros(n)
        self.daemons = [
            Daemon(HeadroomPolicy(scenario.slab, scenario.headroom)) for _ in range(scenario.machines)
        ]
        self._faults = sorted(scenario.faults, key=lambda one: one.at_s)

    # the state

    @property
    def used(self) -> Floats:
        """Return the bytes that each machine's containers and its slabs in use take; may exceed its memory."""
        mapped = np.array([one.pool.counts.mapped for one in self.daemons])
        total: Floats = self._own() + mapped * self.scenario.slab
        return total

    @property
    def wanted(self) -> int:
        """Return the slabs that running containers have touched."""
        return int(self._touched.sum())

    @property
    def unplaced(self) -> int:
        """Return those of them that have no host."""
        return int((self._touched & (self._host < 0)).sum())

    @property
    def tried(self) -> int:
        """Return the slabs that clients have tried to place."""
        return int(self._tried.sum())

    @property
    def running(self) -> bool:
        """Tell whether a container has not finished."""
        return bool(np.isinf(self.finished_s).any())

    def _own(self) -> Floats:
        return _sums(self.containers.machine, self.local, self.scenario.machines) + self.scenario.system

    # a second

    def step(self) -> None:
        """Let a second pass."""
        self._inject_faults()
        growth = self._grow()
        self._page(growth)
        if self.policy.choices:
            self._adjust()
            self._place()
        self.now += 1.0
        self._finish()

    def _grow(self) -> Floats:
        """Let working sets grow and return the pages that each container writes out for it."""
        all_ = self.containers
        self.alive = np.isinf(self.finished_s) & (all_.start_s <= self.now)
        age = np.maximum(self.now + 1.0 - all_.start_s, 0.0)
        grown = np.minimum(age / all_.grow_s, 1.0) * all_.working_set * self.alive
        before = self._missing
        self.local = np.minimum(grown, all_.limit)
        self._missing = grown - self.local
        bytes_ = self.scenario.occupancy * self._missing
        self._touched = self._nth * self.scenario.slab < bytes_[self._of]
        self._count = _sums(self._of, self._touched, len(grown))
        return np.maximum(self._missing - before, 0.0) / PAGE

    def _page(self, growth: Floats) -> None:
        """Let containers page, and compute their speed and the activity of their slabs."""
        all_, scenario = self.containers, self.scenario
        # what is lost on disk, over computing time, gives the requests for a second of computing
        short = self._missing / all_.working_set
        lost = all_.loss * (short / 0.5) ** all_.exponent
        requests = lost / scenario.disk.latency_s
        share = _sums(self._of, self._held, len(lost)) / np.maximum(
            _sums(self._of, self._pages, len(lost)), 1.0
        )
        cost = share * scenario.peer.latency_s + (1 - share) * scenario.disk.latency_s
        self.speed = self.alive / (1 + requests * cost)
        self.done += self.speed
        rate = requests * self.speed
        each = (rate / np.maximum(self._count, 1))[self._of] * self._touched
        # a growing container writes to the slab that it has touched last
        last = self._touched & (self._nth == self._count[self._of] - 1)
        new, again = growth[self._of] * last, each * _HALF
        self._activity += ALPHA * (each + new - self._activity)
        mapped = self._host >= 0
        present = self._held / np.maximum(self._pages, 1.0)
        renewed = (self._pages - self._held) * -np.expm1(-again / np.maximum(self._pages, 1.0))
        self._pages += new
        self._held += mapped * (new + renewed)
        self.counters.remote_bytes += PAGE * float((each * _HALF * present + (new + again) * mapped).sum())

    # daemons

    def _adjust(self) -> None:
        own = self._own()
        for machine, daemon in enumerate(self.daemons):
            if daemon.down_until > self.now:
                continue
            for handle in daemon.pool.evicting:
                self._unmap(machine, handle, keep=False)
            counts = daemon.pool.counts
            state = int(own[machine]), counts.unmapped + counts.mapped
            if daemon.settled == state:
                continue
            sample = MemorySample(self.scenario.memory, state[0])
            action = daemon.policy.step(sample, counts)
            drifting = abs(daemon.policy.smoothed_used - state[0]) > self.scenario.slab / 100
            daemon.settled = state if isinstance(action, Hold) and not drifting else None
            while not isinstance(action, Hold):
                if isinstance(action, Allocate):
                    daemon.pool.allocate(action.n)
                    break
                if isinstance(action, Release):
                    daemon.pool.release(action.n)
                else:
                    self._evict(machine, action)
                action = daemon.policy.decide(daemon.pool.counts)

    def _evict(self, machine: int, action: Evict) -> None:
        pool = self.daemons[machine].pool
        extra = min(self.policy.extra * action.n, ALL)
        mapped = pool.evictable
        mean = float(np.mean([self._active(machine, one) for one in mapped])) if mapped else 0.0
        search = choose_victims(mapped, action.n, extra, self._rng)
        asked = next(search)
        activities = {
            handle: float(self._activity[self._where[machine, handle]])
            for own in asked.slabs.values()
            for handle in own
        }
        try:
            search.send(activities)
        except StopIteration as end:
            decision = end.value
        pool.start_eviction(one.slab for one in decision.victims)
        self.counters.messages += decision.messages
        self.counters.evictions += 1
        self.counters.evicted += len(decision.victims)
        active = sum(self._active(machine, one) for one in decision.victims)
        self.counters.evicted_activity += active / mean if mean else 0.0

    def _active(self, machine: int, slab: MappedSlab) -> float:
        return float(self._activity[self._where[machine, slab.slab]])

    def _unmap(self, machine: int, handle: int, *, keep: bool) -> None:
        slab = self._where.pop((machine, handle))
        self._host[slab] = self._handle[slab] = -1
        self._held[slab] = 0.0
        self.daemons[machine].pool.unmap(handle, keep=keep)

    def _inject_faults(self) -> None:
        while self._faults and self._faults[0].at_s <= self.now:
            fault = self._faults.pop(0)
            daemon = self.daemons[fault.machine]
            for machine, handle in [key for key in self._where if key[0] == fault.machine]:
                self._unmap(machine, handle, keep=False)
                self.counters.lost += 1
            daemon.pool, daemon.settled = SlabPool(), None
            daemon.down_until = fault.at_s + fault.down_s

    # clients

    def _place(self) -> None:
        hot = self._touched & (self._host < 0) & (self._activity > HOT) & (self._retry_at <= self.now)
        for slab in np.flatnonzero(hot)[np.argsort(-self._activity[hot], kind="stable")]:
            self._place_slab(int(slab))

    def _place_slab(self, slab: int) -> None:
        container = int(self._of[slab])
        own = int(self.containers.machine[container])
        peers = [str(m) for m in range(self.scenario.machines) if m != own]
        held = (
            {str(m) for m in self._host[self._of == container] if m >= 0} if self.policy.new_first else set()
        )
        new = [host for host in peers if host not in held]
        old = [host for host in peers if host in held]
        search = place_slab(new, old, self._rng, self.policy.choices)
        reply: Reply = None
        try:
            while True:
                request = search.send(reply)
                reply = self._answer(request, container)
        except StopIteration as end:
            decision = end.value
        self.counters.attempts += 1
        self.counters.messages += decision.messages
        if decision.host is not None:
            machine = int(decision.host)
            self._host[slab], self._handle[slab] = machine, decision.handle
            self._where[machine, decision.handle] = slab
            self._held[slab], self._retry_s[slab] = 0.0, FIRST_RETRY_S
            self.counters.placed += 1
        else:
            self.counters.failed += 1
            self.counters.first_failed += not self._tried[slab]
            self._retry_at[slab] = self.now + self._retry_s[slab] if self.policy.retry else np.inf
            self._retry_s[slab] = min(2 * self._retry_s[slab], MAX_RETRY_S)
        self._tried[slab] = True

    def _answer(self, request: Probe | MapRequest, container: int) -> Reply:
        if isinstance(request, Probe):
            return {host: Offer(self.daemons[int(host)].pool.counts.unmapped) for host in request.hosts}
        granted = self.daemons[int(request.host)].pool.grant(str(container), self.now)
        return None if granted is None else granted.handle

    def _finish(self) -> None:
        ended = self.alive & (self.done >= self.containers.compute_s)
        self.finished_s[ended] = self.now
        self.alive &= ~ended
        self.local[ended] = self._missing[ended] = 0.0
        self._touched &= self.alive[self._of]
        for slab in np.flatnonzero(ended[self._of] & (self._host >= 0)):
            self._unmap(int(self._host[slab]), int(self._handle[slab]), keep=True)


def _sums(groups: NDArray[np.int64], values: NDArray[np.float64] | NDArray[np.bool_], n: int) -> Floats:
    return np.bincount(groups, values, n).astype(np.float64)


def seconds(cluster: Cluster) -> Iterator[float]:
    """Let seconds pass until the scenario ends or all containers have, and yield the time after each."""
    while cluster.now < cluster.scenario.until_s and cluster.running:
        cluster.step()
        yield cluster.now
