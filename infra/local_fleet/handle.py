"""``Handle``: what every use of a local fleet rests on: its file, its supervisor, and how it is taken down."""

import atexit
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError, InfraError
from ebbflow.infra.local_fleet import begin
from ebbflow.infra.local_fleet.provider.lending import providers
from ebbflow.infra.local_fleet.provider.life import look, teardown
from ebbflow.infra.local_fleet.provider.provider import NodeProvider
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.clock import MachineClock, shift
from ebbflow.infra.local_fleet.state.fleet_state import LocalFleetState, LocalNode
from ebbflow.infra.local_fleet.state.pools import PoolKind
from ebbflow.infra.local_fleet.state.store import LocalFleetStateFile
from ebbflow.infra.local_fleet.view import NodeView, view
from ebbflow.infra.machine import processes

POLL = 0.05  # s between looks while something is waited for
_DOWN = 30.0  # s for the supervisor to take everything down; beyond, the caller does it


class Handle:
    """One process' hold on one fleet. Safe for several threads."""

    def __init__(
        self,
        file: LocalFleetStateFile,
        uid: str,
        clock: Clock,
        *,
        hazard: Callable[[int, float], float] | None = None,
        own: Mapping[PoolKind, NodeProvider] | None = None,
        supervisor: Callable[[], None] | None = None,
        mine: bool = False,
    ) -> None:
        self._file, self.uid, self._theirs = file, uid, clock
        state = file.read()
        self._clock = MachineClock(state.offset if state is not None else 0.0)
        self._hazard = hazard or (lambda losses, seconds: losses / max(seconds, 3600.0) * 3600.0)
        self._providers = own or providers(file.folder, self._clock)
        self._start_supervisor = supervisor or self._spawn_supervisor
        self._mine, self._pid = mine, os.getpid()
        self._acting = threading.RLock()  # one change at a time of this handle
        self._child: subprocess.Popen[bytes] | None = (
            None  # the supervisor, where this process has started it
        )

    # --- what it is -----------------------------------------------------------------------------------------

    @property
    def state(self) -> LocalFleetState:
        """Return all that is known of the fleet. Raises ``ClusterError`` once it is down."""
        state = self._file.read()
        if state is None or state.uid != self.uid or not state.up:
            raise ClusterError(f"the fleet {self._file.folder.name!r} has been taken down")
        return state

    @property
    def name(self) -> str:
        return self._file.folder.name

    @property
    def folder(self) -> Path:
        """Return where its file, logs and scratch are."""
        return self._file.folder

    @property
    def spark_master(self) -> str:
        """Return the URL of the Spark master; empty before the first Spark node has begun to start."""
        spark = self.state.spark
        return spark.master_url if spark is not None else ""

    @property
    def kept(self) -> bool:
        """Tell whether the supervisor is there; ``repair`` and ``apply`` start another if it is not."""
        return labels.alive(self.state.supervisor)

    def lost(self, id_: str) -> str:
        """Return how a node went that is gone or going; empty while it is there."""
        try:
            state = self.state
        except ClusterError as error:
            return str(error)
        node = state.node(id_)
        if node is not None and node.visible:
            return ""
        return state.ended(id_) or "there is no such node"

    def paused(self, id_: str) -> bool:
        """Tell whether a node stands still."""
        node = self.state.node(id_)
        return node is not None and self._provider(node).paused(node)

    def view(self) -> tuple[NodeView, ...]:
        """Return all nodes, those that start too, with what runs on them."""
        state = look(self._file, self.state, self._providers, self._clock)
        return view(state, self._providers, self._shift())

    def wait(self, reached: Callable[[LocalFleetState], bool], seconds: float) -> LocalFleetState:
        """Return the state once ``reached`` holds of it. Raises ``ClusterError`` when that takes longer."""
        end = self._clock.now() + seconds
        while not reached(state := self.state):
            if self._clock.now() > end:
                short = [pool for pool in state.pools if len(state.seen(pool)) < state.plans[pool.name].nodes]
                why = "; ".join(
                    f"{p.name}: {state.pool_state(p, self._clock.now()).short_why}" for p in short
                )
                raise ClusterError(
                    f"the nodes of the fleet {self.name!r} are not there after {seconds:g} s"
                    + (f" ({why})" if why else "")
                    + f"; logs are in {self.folder / 'logs'}"
                )
            self._clock.sleep(POLL)
        return state

    # --- its end --------------------------------------------------------------------------------------------

    def down(self) -> None:
        """End all nodes and everything that runs on them. May be called twice; logs stay."""
        atexit.unregister(self._at_exit)
        state = self._file.read()
        if state is None or state.uid != self.uid:
            return
        if state.up:
            self._change(lambda current: replace(current, up=False))
        end = self._clock.now() + _DOWN
        while labels.alive(state.supervisor) and state.uid == self.uid and self._clock.now() < end:
            self._clock.sleep(POLL)
            state = self._file.read() or state
        if state.uid != self.uid:
            return
        if labels.alive(state.supervisor):
            processes.destroy(begin.supervisor_label(self.uid), [], self._clock)
        teardown(self._file, self.uid, self._providers, self._clock)
        while processes.members(begin.supervisor_label(self.uid)) and self._clock.now() < end:
            self._clock.sleep(POLL)
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=5)
            self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mine:
            self.down()

    # --- how ------------------------------------------------------------------------------------------------

    def _shift(self) -> float:
        """Return what to add to a time of the state to have it by the clock of whoever uses this handle, s."""
        return shift(self._theirs.now(), self._clock)

    def _change(self, how: Callable[[LocalFleetState], LocalFleetState]) -> LocalFleetState:
        return self._file.change(self.uid, how)

    def _provider(self, node: LocalNode) -> NodeProvider:
        pool = self.state.pool(node.pool)
        assert pool is not None
        return self._providers[pool.kind]

    def _ensure_supervisor(self) -> None:
        if not labels.alive(self.state.supervisor):
            self._start_supervisor()

    def _spawn_supervisor(self) -> None:
        child = begin.spawn_supervisor(self._file, self.uid, self._clock)
        if self._mine:
            self._child = child
        else:
            child.returncode = 0  # Popen warns of children not waited for; this one may outlive us

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:  # not in a forked child, which runs the same handlers
            try:
                self.down()
            except InfraError as error:  # the supervisor sees that we are gone
                sys.stderr.write(f"{error}\n")
