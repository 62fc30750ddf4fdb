"""All interleavings of a migration: messages late, lost, repeated, out of order; workers that leave; cancellations.

A message that was sent once may be delivered at any later time, any number of times, or never: so the explored states
are those of the machines with the set of all messages ever sent. In each of them everything that is under way is also
lost at once, and the machines alone must bring the migration to its end.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pytest

from ebbflow.planners.aggregation.messages import (
    MANAGER,
    Cancel,
    CopyBegin,
    CopyData,
    CopyDone,
    CopyReceived,
    Finish,
    Left,
    MigrateInit,
    Noted,
    Parameters,
    Pull,
    Push,
    Redirected,
    Sends,
    Sent,
    WorkersDone,
)
from ebbflow.planners.aggregation.migration import MigrationManager, TensorHost, Worker
from ebbflow.planners.errors import OptionError

HOSTS = ("A", "B")


_MESSAGES: dict[Sent, int] = {}  # all that was ever sent in any state, with its bit


def _bits(sends: Iterable[Sent]) -> int:
    bits = 0
    for one in sends:
        bits |= 1 << _MESSAGES.setdefault(one, len(_MESSAGES))
    return bits


def _messages(bits: int) -> list[Sent]:
    return [one for one, bit in _MESSAGES.items() if bits >> bit & 1]


@dataclass(frozen=True)
class State:
    """All machines, what was ever sent, and what really happened."""

    workers: tuple[Worker, ...]
    hosts: tuple[TensorHost, ...]
    manager: MigrationManager
    sent: int = 0  # a bit for each message
    copies: tuple[int, ...] = (0, -1)  # updates in the copy of each host; -1: none
    applied: tuple[tuple[str, frozenset[str]], ...] = ()  # host and workers of each update, by round
    moves: int = 0  # that are still to begin
    gone: str = ""  # the worker that has left
    may_cancel: bool = False

    def send(self, sends: Sends) -> "State":
        return replace(self, sent=self.sent | _bits(sends)) if sends else self


def _begin(workers: int, moves: int, may_cancel: bool = False) -> State:
    _MESSAGES.clear()
    names = [f"w{i}" for i in range(workers)]
    state = State(
        tuple(Worker(name, "A") for name in names),
        (TensorHost("A", "serving", frozenset(names)), TensorHost("B")),
        MigrationManager(), moves=moves, may_cancel=may_cancel,
    )  # fmt: skip
    for worker in state.workers:
        state = state.send(worker.outstanding())
    return state


def _deliver(state: State, sent: Sent) -> State:
    """Return the state after a delivery; what the protocol must not do fails here."""
    message = sent.message
    if sent.to == MANAGER:
        manager, sends = state.manager.receive(message)
        return replace(state, manager=manager).send(sends)
    if sent.to in HOSTS:
        at = HOSTS.index(sent.to)
        host, sends, updates = state.hosts[at].receive(message)
        if host is state.hosts[at] and not updates:
            return state.send(sends)
        copies, applied = list(state.copies), state.applied
        if isinstance(message, CopyData) and (state.hosts[at].status, host.status) == (
            "receiving",
            "serving",
        ):
            copies[at] = state.copies[HOSTS.index(message.source)]
            assert copies[at] == state.hosts[at].round, "the copy is of the round that was announced"
        if updates:
            assert copies[at] == len(applied) == host.round - 1, (
                "each round is updated once, on the newest copy"
            )
            counted = state.hosts[at].pushes
            if isinstance(message, Push):
                counted |= {message.worker}
            alive = {one.name for one in state.workers} - {state.gone}
            assert counted >= alive, "an update has the gradients of all workers"
            copies[at] += 1
            applied = (*applied, (sent.to, counted))
        if host.status == "absent":
            copies[at] = -1
        for one in sends:
            if isinstance(one.message, Parameters):
                assert copies[at] == one.message.round, "workers get the parameters of their round"
        state = replace(
            state, hosts=tuple(host if i == at else one for i, one in enumerate(state.hosts)),
            copies=tuple(copies), applied=applied,
        )  # fmt: skip
        return state.send(sends)
    workers, sends = [], ()
    for one in state.workers:
        if one.name == sent.to and one.name != state.gone:
            after, sends = one.receive(message)
            workers.append(after)
        else:
            workers.append(one)
    return replace(state, workers=tuple(workers)).send(sends)


def _own_steps(state: State, rounds: int) -> Iterator[State]:
    """Return what machines do by themselves: gradients computed, a migration begun or cancelled."""
    for i, worker in enumerate(state.workers):
        if worker.computes and worker.round < rounds and worker.name != state.gone:
            after, sends = worker.pushed()
            workers = tuple(after if i == j else one for j, one in enumerate(state.workers))
            yield replace(state, workers=workers).send(sends)
    if state.manager.phase == "idle" and state.moves:
        source = max(HOSTS, key=lambda name: state.copies[HOSTS.index(name)])
        manager, sends = state.manager.start(source, HOSTS[1 - HOSTS.index(source)])
        yield replace(state, manager=manager, moves=state.moves - 1).send(sends)
    if state.may_cancel:
        manager, sends = state.manager.cancel()
        if manager != state.manager:
            yield replace(state, manager=manager, may_cancel=False).send(sends)


def _leave(state: State) -> Iterator[State]:
    if not state.gone:
        name = state.workers[-1].name
        yield replace(state, gone=name).send(tuple(Sent(host, Left(name)) for host in HOSTS))


def _ended(state: State, rounds: int) -> bool:
    workers = all(one.round >= rounds and one.computes for one in state.workers if one.name != state.gone)
    return workers and state.manager.phase == "idle" and not state.moves


def _explore(begin: State, rounds: int, leaves: bool = False) -> set[State]:
    """Return all states that can be reached while no worker goes beyond so many rounds; each of them is checked."""
    seen, front, machines = {begin}, [begin], set[State]()
    while front:
        state = front.pop()
        _check(state)
        alone = replace(state, sent=0)
        if alone not in machines:
            _recover(alone, rounds, machines)
        following = [_deliver(state, sent) for sent in _messages(state.sent)]
        following += _own_steps(state, rounds)
        if leaves:
            following += _leave(state)
        for one in following:
            if one not in seen:
                seen.add(one)
                front.append(one)
    return seen


def _check(state: State) -> None:
    assert len(state.applied) == max(state.copies), "the newest copy is never lost"
    if state.manager.phase == "finishing":
        number, source, target = state.manager.migration, state.manager.source, state.manager.target
        both = _bits([Sent(MANAGER, CopyDone(number, source)), Sent(MANAGER, WorkersDone(number, target))])
        assert state.sent & both == both, "both notifications end a migration"
    if state.manager.phase == "idle":
        assert sum(host.status == "serving" for host in state.hosts) == 1, "one master copy"
        assert all(host.target is None for host in state.hosts)


def _recover(state: State, rounds: int, good: set[State]) -> None:
    """Repeat what is outstanding where nothing is under way any more: that must bring all to the end."""
    left = tuple(Sent(host, Left(state.gone)) for host in HOSTS) if state.gone else ()
    path = [state]
    state = replace(state, may_cancel=False)
    for _ in range(60):
        if state in good or _ended(state, rounds):
            good.update(path)
            return
        path.append(state)
        sends = [*left, *state.manager.outstanding()]
        for machine in (*state.workers, *state.hosts):
            if machine.name != state.gone:
                sends += machine.outstanding()
        for sent in sends:
            state = _deliver(state, sent)
        for sent in _messages(state.sent):
            state = _deliver(state, sent)
        # the training continues until the migration has ended; the last step of its own is that of the manager
        own = list(_own_steps(state, rounds + 20)) or [state]
        state = replace(own[-1 if state.moves else 0], sent=0)
    pytest.fail(f"nothing brings this to its end: {state}")


def _hosts_of_updates(states: set[State], rounds: int) -> set[tuple[str, ...]]:
    return {tuple(host for host, _ in one.applied) for one in states if _ended(one, rounds)}


def test_every_interleaving_of_a_migration() -> None:
    states = _explore(_begin(workers=2, moves=1), rounds=2)
    assert len(states) > 3000
    # begun before the first pull or after it; begun later it ends in a round that is not explored
    assert _hosts_of_updates(states, 2) == {("B", "B"), ("A", "B")}


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_interleaving_with_a_cancellation(rounds: int) -> None:
    states = _explore(_begin(workers=2, moves=1, may_cancel=True), rounds)
    assert {("B",) * rounds, ("A",) * rounds} <= _hosts_of_updates(states, rounds)


@pytest.mark.parametrize("rounds", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_interleaving_of_a_move_and_a_move_back(rounds: int) -> None:
    states = _explore(_begin(workers=1, moves=2), rounds)
    assert ("B", "A", "A")[:rounds] in _hosts_of_updates(states, rounds)


def test_every_interleaving_with_a_worker_that_leaves() -> None:
    states = _explore(_begin(workers=2, moves=1), rounds=1, leaves=True)
    ended = [one for one in states if one.gone and _ended(one, 1)]
    assert {workers for one in ended for _, workers in one.applied} >= {
        frozenset({"w0"}),
        frozenset({"w0", "w1"}),
    }


def test_a_migration_ends_before_another_begins() -> None:
    manager, _ = MigrationManager().start("A", "B")
    with pytest.raises(OptionError, match="migration 1 must have ended before another begins"):
        manager.start("A", "B")
    with pytest.raises(OptionError, match="must differ, and both are 'A'"):
        MigrationManager().start("A", "A")
    with pytest.raises(OptionError, match="worker 'w' must have parameters before it pushes"):
        Worker("w", "A").pushed()


@pytest.mark.parametrize("first", [CopyDone(1, "A"), WorkersDone(1, "B")])
def test_both_notifications_end_a_migration_in_either_order(first: CopyDone | WorkersDone) -> None:
    manager, _ = MigrationManager().start("A", "B")
    manager, sends = manager.receive(first)
    assert (manager.phase, [one.message for one in sends]) == ("running", [Noted(1)])
    second = WorkersDone(1, "B") if isinstance(first, CopyDone) else CopyDone(1, "A")
    manager, sends = manager.receive(second)
    assert (manager.phase, [one.message for one in sends]) == ("finishing", [Noted(1), Finish(1)])


def test_a_redirect_waits_for_the_next_round_once_a_worker_has_pulled() -> None:
    host = TensorHost("A", "serving", frozenset({"w0", "w1"}))
    host, sends, _ = host.receive(Pull("w0", 0))
    assert sends == (Sent("w0", Parameters(0, "A")),)
    host, _, _ = host.receive(MigrateInit(1, "B"))
    host, sends, _ = host.receive(Pull("w1", 0))
    assert sends == (Sent("w1", Parameters(0, "A")),)
    host, _, _ = host.receive(Push("w0", 0))
    host, _, updates = host.receive(Push("w1", 0))
    assert updates
    host, sends, _ = host.receive(Pull("w0", 1))
    assert sends == (Sent("w0", Parameters(1, "B")),)
    assert host.receive(Cancel(1))[1] == (Sent(MANAGER, Redirected(1)),)


def test_pushes_that_come_before_the_copy_wait_for_it() -> None:
    host = TensorHost("B")
    for worker in ("w0", "w1"):
        host, sends, updates = host.receive(Push(worker, 4))
        assert (sends, updates) == ((), False)
    host, sends, updates = host.receive(CopyBegin(1, "A", 4, frozenset({"w0", "w1"})))
    assert (sends, updates) == ((Sent(MANAGER, WorkersDone(1, "B")),), False)
    host, sends, updates = host.receive(CopyData(1, "A"))
    assert updates
    assert (host.round, sends[0]) == (5, Sent("A", CopyReceived(1)))
