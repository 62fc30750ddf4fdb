"""``Aggregator``: holds master copies of tensors of many trainings, sums their gradients and updates them.

The front takes messages; threads sum and update, and a tensor is worked on by one of them at a time. What arrives
for a tensor meanwhile waits. A sum is complete when every worker of a view has pushed. It changes parameters only
once the workers have agreed on the step, which one of them says (``COMMIT``): so a round that lost a worker can be
repeated.
"""

import collections
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ebbflow.infra.aggregation.frames import AggregatorAddress, Kind, TensorFrame, decode, encode
from ebbflow.infra.aggregation.front import AggregatorFront, Peer
from ebbflow.infra.aggregation.master_copy import TRAINING, MasterCopy
from ebbflow.infra.aggregation.moves import TensorMoves
from ebbflow.infra.aggregation.same_machine import AggregatorMemory
from ebbflow.infra.aggregation.timing import HeldTensor
from ebbflow.infra.errors import AggregationError
from ebbflow.planners.aggregation.messages import Parameters, Pull, Push, Sends

_MAX_TENSORS = 1 << 16  # of a training on an aggregator
_MAX_WAITING = 32  # requests of one connection for one tensor while it is worked on
_INLINE = 1 << 14  # elements up to which a tensor is worked on at once: a thread would take longer
_BATCH = 256  # frames of a message
SERVICE = ""  # in place of a training: the other aggregators of a service

log = logging.getLogger(__name__)


class Aggregator:
    """An aggregator that listens from the start.

    Args:
        name: unique among the service's aggregators.
        host: address of the interface to listen on.
        port: number; 0: any free one.
        threads: that sum and update, at most one for each core.
        max_bytes: maximum bytes of parameters and moments of one training.

    Raises ``AggregationError`` when the port is not available.
    """

    def __init__(
        self, name: str, host: str = "127.0.0.1", port: int = 0, *, threads: int = 1, max_bytes: int = 1 << 36
    ) -> None:
        self.name = name
        self._max_bytes = max_bytes
        self._tensors: dict[tuple[str, str], MasterCopy] = {}
        self._memory = AggregatorMemory()
        self._peers: dict[str, set[str]] = {}  # by training
        self._answers: dict[bytes, list[TensorFrame]] = collections.defaultdict(list)  # by connection
        self.rounds = 0  # updates of tensors
        self._threads = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="ebbflow-aggregation")
        self._front = AggregatorFront(host, port, self._receive, self._flush)
        self.address, self.public = self._front.address, self._front.public
        self._moves = TensorMoves(
            name, self._tensors, self._answer, self._apart, self._front.call, self._take_waiting, self._send,
            self._give_up, self._memory.slots,
        )  # fmt: skip
        self.peer = self._moves.public

    @property
    def refused(self) -> int:
        """Return how many messages have ended their connection."""
        return self._front.refused

    def admit(self, job_id: str, peers: dict[str, str]) -> None:
        """Admit peers of a training, now or later.

        Args:
            job_id: of the training; ``SERVICE`` for aggregators that may give it tensors.
            peers: public key of each.

        Raises ``AggregationError`` for what is no key, or for one of another peer.
        """
        for name, public in peers.items():
            self._front.admit(Peer(job_id, name), public)
            self._peers.setdefault(job_id, set()).add(name)

    def dismiss(self, job_id: str, peer: str) -> None:
        """Take nothing more from a peer."""
        self._front.dismiss(Peer(job_id, peer))
        self._peers.get(job_id, set()).discard(peer)

    def remove(self, job_id: str) -> None:
        """Forget a training and its tensors. Raises ``AggregationError`` where that does not end."""
        for peer in self._peers.pop(job_id, set()):
            self._front.dismiss(Peer(job_id, peer))
        if not self._front.complete(lambda: self._forget(job_id)):
            raise AggregationError(f"aggregator {self.name} is stuck: training {job_id!r} is not removed")

    def status(self) -> dict[str, int]:
        """Return counts: messages refused, tensors held, their bytes with moments, updates so far."""
        held = list(self._tensors.values())
        return {
            "refused": self.refused,
            "tensors": len(held),
            "bytes": sum(one.nbytes for one in held),
            "updates": self.rounds,
        }

    def held(self) -> list[MasterCopy]:
        """Return the tensors that it has."""
        return list(self._tensors.values())

    def summaries(self) -> dict[str, dict[str, HeldTensor]]:
        """Return what is told of its tensors to others, by training and name."""
        found: dict[str, dict[str, HeldTensor]] = {}
        for one in self.held():
            found.setdefault(one.job_id, {})[one.name] = one.summary
        return found

    @property
    def moved(self) -> int:
        """Return how many tensors it has given to others."""
        return self._moves.done

    @property
    def waited(self) -> float:
        """Return the seconds for which rounds have waited for copies of tensors that moved here."""
        return self._moves.waited

    def move(
        self,
        targets: Mapping[tuple[str, str], tuple[str, AggregatorAddress]],
        within_s: float | None = None,
    ) -> None:
        """Give tensors to other aggregators while they are trained; call again until they are gone.

        Args:
            targets: name and address of the aggregator of each tensor, by training and tensor.
            within_s: see ``TensorMoves.want``.
        """

        def begin() -> None:
            self._moves.want(targets, within_s)
            self._moves.repeat()

        self._front.call(begin)

    def keep_from(self, aggregator: str) -> None:
        """Keep what an aggregator was to get that is lost, as far as no worker was told of it.

        What was to come from it does not come any more.
        """
        self._front.call(lambda: self._moves.abandon(aggregator))

    def close(self) -> None:
        """End all connections and threads; master copies are gone. May be called twice."""
        self._moves.close()
        self._front.close()
        self._threads.shutdown(cancel_futures=True)

    # --- in the front's thread ----------------------------------------------------------------------------

    def _receive(self, peer: Peer, connection: bytes, parts: list[memoryview]) -> None:
        for found in decode(parts):
            frame = found
            if (peer.job_id == SERVICE) != (frame.kind is Kind.MOVE):
                raise AggregationError(f"{peer.worker} must not send {frame.kind.name}")
            if frame.kind is Kind.MOVE:
                self._moves.receive(peer.worker, connection, frame)
                continue
            if frame.kind is Kind.INIT:
                self._init(peer, connection, frame)
                continue
            if frame.kind not in _REQUESTS:
                raise AggregationError(f"an aggregator must not be sent {frame.kind.name}")
            tensor = self._tensors.get((peer.job_id, frame.tensor))
            if frame.kind is Kind.PUSH and frame.options:
                try:
                    frame = self._memory.gradient(peer.job_id, frame)
                except AggregationError as exc:
                    self._refuse(connection, frame, str(exc), memory=True)
                    continue
            if tensor is None:
                self._refuse_gone(connection, frame)
            elif tensor.busy:
                if sum(one == connection for one, _ in tensor.waiting) >= _MAX_WAITING:
                    raise AggregationError(
                        f"a worker must send at most {_MAX_WAITING} requests for a tensor at once"
                    )
                tensor.waiting.append((connection, frame))
                if frame.kind is Kind.PUSH:
                    self._moves.note_early(tensor, frame)
            else:
                self._take(tensor, connection, frame)

    def _init(self, peer: Peer, connection: bytes, frame: TensorFrame) -> None:
        key = (peer.job_id, frame.tensor)
        if (there := self._tensors.get(key)) is not None and not there.busy:
            try:
                there.renew(self.name, frame)
            except AggregationError as exc:
                self._refuse(connection, frame, str(exc))
                return
        if key not in self._tensors:
            held = [one.nbytes for one in self._tensors.values() if one.job_id == peer.job_id]
            if sum(held) + len(frame.payload) > self._max_bytes or len(held) >= _MAX_TENSORS:
                self._refuse(
                    connection, frame,
                    f"a training must have at most {_MAX_TENSORS} tensors on an aggregator, with at most"
                    f" {self._max_bytes} bytes together",
                )  # fmt: skip
                return
            try:
                self._tensors[key] = MasterCopy.of(self.name, peer.job_id, frame)
            except AggregationError as exc:
                self._refuse(connection, frame, str(exc))
                return
        self._answer(connection, TensorFrame(Kind.READY, frame.tensor, frame.round, request=frame.request))

    def _take(self, tensor: MasterCopy, connection: bytes, frame: TensorFrame) -> None:
        number = tensor.host.round
        match frame.kind:
            case Kind.PULL:
                tensor.mirror = False
                self._find_near(tensor, connection, frame)
                self._step(tensor, Pull(connection.hex(), frame.round))
            case Kind.PULL_STATE if frame.round == number:
                self._answer(connection, tensor.described(frame))
            case Kind.PULL_SUM if (frame.round, frame.view) == (number, tensor.view):
                if tensor.total is not None:
                    answer = TensorFrame(Kind.SUM, tensor.name, number, tensor.total.data, request=frame.request,
                                         view=frame.view)  # fmt: skip
                    self._answer(connection, answer)
            case Kind.COMMIT:
                if frame.round == number and frame.view == tensor.view and tensor.total is not None:
                    self._work(tensor, frame)
                if frame.round < tensor.host.round or tensor.busy:
                    self._committed(tensor, connection, frame)
            case Kind.PUSH:
                try:
                    complete = tensor.push(connection, frame)
                except AggregationError as exc:
                    self._refuse(connection, frame, str(exc))
                    return
                if complete:
                    self._work(tensor, None)
                elif tensor.total is not None:
                    self._send_summed(tensor)

    def _committed(self, tensor: MasterCopy, connection: bytes, frame: TensorFrame) -> None:
        if tensor.busy:
            tensor.waiting.append((connection, frame))
        else:
            options = {"memory": True} if self._memory.reads(tensor.job_id, frame.options) else {}
            answer = TensorFrame(
                Kind.COMMITTED, tensor.name, frame.round, request=frame.request, options=options
            )
            self._answer(connection, answer)

    def _find_near(self, tensor: MasterCopy, connection: bytes, pull: TensorFrame) -> None:
        """Take note of whether a worker is on this machine, and reads parameters from its memory."""
        near = self._memory.reads(tensor.job_id, pull.options)
        if near and not tensor.slots:
            tensor.slots = self._memory.slots(tensor.job_id, tensor.parameters.nbytes)
        if near and tensor.slots:
            tensor.near.add(connection)
        else:
            tensor.near.discard(connection)

    def _work(self, tensor: MasterCopy, commit: TensorFrame | None) -> None:
        """Sum, or update where there is a commit: a small tensor at once, another in a thread."""
        if len(tensor.parameters) <= _INLINE:
            self._do(tensor, commit)
            self._done(tensor, commit)
            return
        tensor.busy = True
        self._apart(lambda: self._do(tensor, commit), lambda: self._done(tensor, commit))

    def _done(self, tensor: MasterCopy, commit: TensorFrame | None) -> None:
        tensor.busy = False
        if commit is None:
            self._send_summed(tensor)
        else:
            self.rounds += 1
            tensor.forget()
            tensor.view = tensor.age = 0
            tensor.timing.end_round(time.monotonic())
            self._step(tensor, Push(TRAINING, commit.round))
            self._moves.begin_round(tensor)
        self._take_waiting(tensor)

    def _take_waiting(self, tensor: MasterCopy) -> None:
        waiting, tensor.waiting = tensor.waiting, []
        while waiting:
            connection, frame = waiting.pop(0)
            if tensor.busy:
                tensor.waiting.append((connection, frame))
            else:
                self._take(tensor, connection, frame)

    def _step(self, tensor: MasterCopy, message: Pull | Push) -> None:
        tensor.host, sends, _ = tensor.host.receive(message)
        self._send(tensor, sends)
        self._moves.carry(tensor, sends)

    def _send(self, tensor: MasterCopy, sends: Sends) -> None:
        for one in sends:
            if not isinstance(one.message, Parameters) or one.to == TRAINING:
                continue
            options: dict[str, Any] = {"age": tensor.age} if tensor.age else {}
            if one.message.host != self.name and (where := self._moves.address(tensor)) is not None:
                options |= {"host": one.message.host, "address": where.address, "public": where.public}
            connection, payload = bytes.fromhex(one.to), b""
            if connection in tensor.near:
                options |= tensor.show(one.message.round)
            else:
                payload = tensor.encoded
            frame = TensorFrame(Kind.PARAMETERS, tensor.name, one.message.round, payload, options=options)
            self._answer(connection, frame)

    def _send_summed(self, tensor: MasterCopy) -> None:
        for connection, frame in tensor.summed():
            self._answer(connection, frame)

    def _refuse(self, connection: bytes, frame: TensorFrame, why: str, **more: bool) -> None:
        said = {"error": why[:1000], **more}
        self._answer(connection, TensorFrame(Kind.ERROR, frame.tensor, request=frame.request, options=said))

    def _refuse_gone(self, connection: bytes, frame: TensorFrame) -> None:
        said = {
            "error": f"this training has no tensor {frame.tensor!r} on aggregator {self.name}",
            "gone": True,
        }
        self._answer(connection, TensorFrame(Kind.ERROR, frame.tensor, request=frame.request, options=said))

    def _give_up(self, tensor: MasterCopy) -> None:
        """Do not wait for a tensor's copy any more: workers have to do without this aggregator."""
        self._tensors.pop((tensor.job_id, tensor.name), None)
        for connection, frame in tensor.waiting:
            self._refuse_gone(connection, frame)

    def _answer(self, connection: bytes, frame: TensorFrame) -> None:
        self._answers[connection].append(frame)

    def _flush(self) -> None:
        """Send the answers of a turn, those to a connection together. An agent that has reconnected asks again."""
        answers, self._answers = self._answers, collections.defaultdict(list)
        for connection, frames in answers.items():
            for at in range(0, len(frames), _BATCH):
                self._front.send(connection, *encode(frames[at : at + _BATCH]), copy=False)

    def _forget(self, job_id: str) -> None:
        for key in [key for key in self._tensors if key[0] == job_id]:
            del self._tensors[key]
        self._memory.remove(job_id)

    # --- in a thread of its own ---------------------------------------------------------------------------

    def _apart(self, act: Callable[[], object], then: Callable[[], None]) -> None:
        """Do ``act`` in a thread, then the other in the front's."""

        def work() -> None:
            try:
                act()
            except Exception:  # the training notices that its round does not end
                log.exception("aggregator %s could not work on a tensor", self.name)
                return
            self._front.call(then)

        self._threads.submit(work)

    def _do(self, tensor: MasterCopy, commit: TensorFrame | None) -> None:
        begun = time.monotonic()
        if commit is None:
            tensor.sum()
        else:
            tensor.update(commit.options)
        tensor.timing.work(time.monotonic() - begun)


_REQUESTS = {Kind.PUSH, Kind.PULL, Kind.PULL_SUM, Kind.COMMIT, Kind.PULL_STATE}
