"""Puts executors and shards in place: at the start, from a snapshot, or only those of a node that died."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from ebbflow.infra.elastic.application import Key
from ebbflow.infra.elastic.master.job_state import JobState, Ledger
from ebbflow.infra.elastic.master.moves import Membership, Rebalancer
from ebbflow.infra.elastic.master.placement import Node
from ebbflow.infra.elastic.master.snapshots import SnapshotCoordinator
from ebbflow.infra.elastic.wire.messages import Address, Install, Relocated
from ebbflow.infra.elastic.wire.snapshot import find, whole
from ebbflow.infra.elastic.worker.running import path_of
from ebbflow.infra.elastic.worker.server import shard_of
from ebbflow.infra.errors import ElasticError


class Recovery:
    """Installs what nodes are to hold. ``go_on`` is called when all of it is in place."""

    def __init__(
        self,
        job_state: JobState,
        membership: Membership,
        moves: Rebalancer,
        captures: SnapshotCoordinator,
        go_on: Callable[[], None],
    ) -> None:
        self._job_state, self._membership, self._moves = job_state, membership, moves
        self._captures, self._go_on = captures, go_on
        self.losses = 0  # of nodes that held something
        self._dead: frozenset[Address] = frozenset()  # servers that are being patched over
        self._since = 0.0

    def dissolve(self) -> None:
        """Start a new revision, in which nothing of the old one counts; nodes that were about to leave may go."""
        job_state = self._job_state
        job_state.revision += 1
        self._moves.forget()
        job_state.awaited = set()
        for node in job_state.nodes.state("leaving", "departing"):
            self._membership.dismiss(node)

    def restore(self) -> None:
        """Put everything back to the last snapshot, or to the beginning, on the nodes that there are."""
        self.dissolve()
        job_state = self._job_state
        snapshot = self._captures.reload()
        job_state.driver, job_state.ledger = job_state.application.driver(), Ledger(job_state.executors)
        job_state.enter("installing")
        self._since = job_state.now()
        if snapshot:
            saved = snapshot.master()
            shape = (saved["executors"], saved["shards"])
            own = (job_state.executors, job_state.application.shards)
            if shape != own:
                text = f"the snapshot has {shape[0]} executors and {shape[1]} shards, the application {own}"
                job_state.fail(ElasticError(text))
                return
            job_state.driver.load_state_dict(saved["driver"])
            job_state.ledger.load_state_dict(saved["ledger"])
        names = [node.name for node in job_state.nodes.state("active")]
        for kind in ("executor", "shard"):
            for move in job_state.held.plan(kind, names):
                job_state.held.assign(kind, move)
        self._moves.wanted = False
        files = (snapshot.executors, snapshot.shards) if snapshot else ((), ())
        self._install(job_state.held.owner, files[0], job_state.held.places, files[1], reset=True)
        self._membership.welcome_joined()

    def patch(self, lost: Node) -> None:
        """Replace only what ``lost`` held (SCAR's partial recovery); everything else stays as it is.

        Shards come back as the running checkpoint has them, executors as the last snapshot has them, and the tasks
        of those are dispatched again.
        """
        job_state = self._job_state
        job_state.enter("patching")
        self._since = job_state.now()
        self._dead = frozenset({lost.server})
        names = [node.name for node in job_state.nodes.state("active")]
        executors, shards = (
            job_state.held.items("executor", lost.name),
            job_state.held.items("shard", lost.name),
        )
        for move in job_state.held.plan("executor", names, only=executors):
            job_state.held.assign("executor", move)
        for move in job_state.held.plan("shard", names, only=shards):
            job_state.held.assign("shard", move)
        copies = {shard: path_of(job_state.running_folder, shard) for shard in shards}
        running = [path for path in copies.values() if whole(path)]
        newest = self._captures.newest
        older: tuple[str, ...] = ()
        if damaged := [shard for shard, path in copies.items() if path not in running]:
            older = newest.shards if newest else ()
            since = "the last snapshot" if newest else "the beginning"
            job_state.log("running-copy-lost", shards=damaged, taken_from=since)
        files = newest.executors if newest else ()
        self._install(executors, files, shards, [*older, *running], reset=False)
        job_state.ledger.again(set(executors))
        self._moves.wanted = True

    def installed(self, sender: Address) -> None:
        """Note that an actor has what it is to hold; after the last one, continue."""
        job_state = self._job_state
        if sender not in job_state.awaited:
            return
        job_state.awaited.discard(sender)
        if not job_state.awaited:
            self._all_installed()

    def _all_installed(self) -> None:
        job_state = self._job_state
        seconds = job_state.now() - self._since
        if job_state.phase == "patching":
            job_state.broadcast(job_state.nodes.workers(), Relocated(self._dead, dict(job_state.held.places)))
            job_state.log("patched", seconds=seconds, holds=job_state.holds())
            self._go_on()
            return
        again = self.losses or self._captures.newest
        job_state.log("restored" if again else "started", seconds=seconds, holds=job_state.holds())
        fresh = job_state.ledger.clock.version == 0 and not job_state.ledger.outstanding
        self._go_on()
        if fresh:
            job_state.drive(job_state.driver.start)

    def _install(
        self,
        executors: Collection[int],
        executor_files: Iterable[str],
        shards: Collection[int],
        shard_files: Iterable[str],
        *,
        reset: bool,
    ) -> None:
        job_state = self._job_state
        initial: dict[int, dict[Key, Any]] = {shard: {} for shard in shards}
        for key, value in job_state.application.parameters().items():
            if (number := shard_of(key, job_state.application.shards)) in initial:
                initial[number][key] = value
        places = dict(job_state.held.places)
        for node in job_state.nodes.state("active"):
            mine = [e for e in job_state.held.items("executor", node.name) if e in executors]
            parts = [q for q in job_state.held.items("shard", node.name) if q in shards]
            job_state.awaited |= set(node.actors)
            # beside a reset, workers learn of new places only when the servers there are ready
            self._send(node.worker, Install(mine, list(executor_files), reset, places if reset else {}))
            values = {shard: initial[shard] for shard in parts}
            self._send(node.server, Install(parts, list(shard_files), reset, places, values))

    def _send(self, to: Address, install: Install) -> None:
        """Send what an actor is to hold, with the contents of files that it cannot read."""
        if not self._job_state.shared:
            install.contents, install.files = find(install.files, install.items), []
        self._job_state.send(to, install)
