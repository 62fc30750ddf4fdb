"""Puts executors and shards in place: at the start, from a snapshot, or only those of a node that died."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from ebbflow.infra.elastic.application import Key
from ebbflow.infra.elastic.master.job_state import JobState, Ledger
from ebbflow.infra.elastic.master.moves import Membership, Moves
from ebbflow.infra.elastic.master.placement import Node
from ebbflow.infra.elastic.master.snapshots import SnapshotCoordinator
from ebbflow.infra.elastic.wire.messages import Address, Install, Relocated
from ebbflow.infra.elastic.wire.snapshot import whole
from ebbflow.infra.elastic.worker.running import path_of
from ebbflow.infra.elastic.worker.server import shard_of
from ebbflow.infra.errors import ElasticError


class Recovery:
    """Installs what nodes are to hold. ``go_on`` is called when all of it is in place."""

    def __init__(
        self,
        board: JobState,
        membership: Membership,
        moves: Moves,
        captures: SnapshotCoordinator,
        go_on: Callable[[], None],
    ) -> None:
        self._board, self._membership, self._moves = board, membership, moves
        self._captures, self._go_on = captures, go_on
        self.losses = 0  # of nodes that held something
        self._dead: frozenset[Address] = frozenset()  # servers that are being patched over
        self._since = 0.0

    def dissolve(self) -> None:
        """Start a new epoch, in which nothing of the old one counts; whoever was about to leave may go."""
        board = self._board
        board.epoch += 1
        self._moves.forget()
        board.awaited = set()
        for node in board.nodes.state("leaving", "departing"):
            self._membership.dismiss(node)

    def restore(self) -> None:
        """Put everything back to the last snapshot, or to the beginning, on the nodes that there are."""
        self.dissolve()
        board = self._board
        snapshot = self._captures.reload()
        board.driver, board.ledger = board.application.driver(), Ledger(board.executors)
        board.enter("installing")
        self._since = board.now()
        if snapshot:
            saved = snapshot.master()
            shape = (saved["executors"], saved["shards"])
            own = (board.executors, board.application.shards)
            if shape != own:
                text = f"the snapshot has {shape[0]} executors and {shape[1]} shards, the application {own}"
                board.fail(ElasticError(text))
                return
            board.driver.load_state_dict(saved["driver"])
            board.ledger.load_state_dict(saved["ledger"])
        names = [node.name for node in board.nodes.state("active")]
        for kind in ("executor", "shard"):
            for move in board.held.plan(kind, names):
                board.held.assign(kind, move)
        self._moves.wanted = False
        files = (snapshot.executors, snapshot.shards) if snapshot else ((), ())
        self._install(board.held.owner, files[0], board.held.places, files[1], reset=True)
        self._membership.greet()

    def patch(self, lost: Node) -> None:
        """Replace only what ``lost`` held (SCAR's partial recovery); everything else stays as it is.

        Shards come back as the running checkpoint has them, executors as the last snapshot has them, and the tasks
        of those are dispatched again.
        """
        board = self._board
        board.enter("patching")
        self._since = board.now()
        self._dead = frozenset({lost.server})
        names = [node.name for node in board.nodes.state("active")]
        executors, shards = board.held.items("executor", lost.name), board.held.items("shard", lost.name)
        for move in board.held.plan("executor", names, only=executors):
            board.held.assign("executor", move)
        for move in board.held.plan("shard", names, only=shards):
            board.held.assign("shard", move)
        copies = {shard: path_of(board.running_folder, shard) for shard in shards}
        running = [path for path in copies.values() if whole(path)]
        newest = self._captures.newest
        older: tuple[str, ...] = ()
        if damaged := [shard for shard, path in copies.items() if path not in running]:
            older = newest.shards if newest else ()
            since = "the last snapshot" if newest else "the beginning"
            board.log("running-copy-lost", shards=damaged, taken_from=since)
        files = newest.executors if newest else ()
        self._install(executors, files, shards, [*older, *running], reset=False)
        board.ledger.again(set(executors))
        self._moves.wanted = True

    def installed(self, sender: Address) -> None:
        """Note that an actor has what it is to hold; after the last one, go on."""
        board = self._board
        if sender not in board.awaited:
            return
        board.awaited.discard(sender)
        if not board.awaited:
            self._all_installed()

    def _all_installed(self) -> None:
        board = self._board
        seconds = board.now() - self._since
        if board.phase == "patching":
            board.tell(board.nodes.workers(), Relocated(self._dead, dict(board.held.places)))
            board.log("patched", seconds=seconds, holds=board.holds())
            self._go_on()
            return
        again = self.losses or self._captures.newest
        board.log("restored" if again else "started", seconds=seconds, holds=board.holds())
        fresh = board.ledger.clock.version == 0 and not board.ledger.outstanding
        self._go_on()
        if fresh:
            board.drive(board.driver.start)

    def _install(
        self,
        executors: Collection[int],
        executor_files: Iterable[str],
        shards: Collection[int],
        shard_files: Iterable[str],
        *,
        reset: bool,
    ) -> None:
        board = self._board
        initial: dict[int, dict[Key, Any]] = {shard: {} for shard in shards}
        for key, value in board.application.parameters().items():
            if (number := shard_of(key, board.application.shards)) in initial:
                initial[number][key] = value
        places = dict(board.held.places)
        for node in board.nodes.state("active"):
            mine = [e for e in board.held.items("executor", node.name) if e in executors]
            parts = [q for q in board.held.items("shard", node.name) if q in shards]
            board.awaited |= set(node.actors)
            # beside a reset, workers learn of new places only when the servers there are ready
            board.send(node.worker, Install(mine, list(executor_files), reset, places if reset else {}))
            values = {shard: initial[shard] for shard in parts}
            board.send(node.server, Install(parts, list(shard_files), reset, places, values))
