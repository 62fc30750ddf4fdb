"""``Aggregator``: holds master copies of tensors of many trainings, sums their gradients and updates them.

The front takes messages; threads update, and a tensor is updated by one of them at a time. What arrives for a tensor
while it is updated waits. Rounds, and who is waited for, are those of ``planners.aggregation.migration``.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ebbflow.infra.aggregation.frames import Kind, TensorFrame, decode, encode
from ebbflow.infra.aggregation.front import AggregatorFront, Peer
from ebbflow.infra.aggregation.rules import (
    Adam,
    Floats,
    OptimizerState,
    Sgd,
    as_float32,
    mean_gradient,
    rule_from,
)
from ebbflow.infra.errors import AggregationError
from ebbflow.planners.aggregation.messages import Left, Message, Parameters, Pull, Push, Sends
from ebbflow.planners.aggregation.migration import TensorHost
from ebbflow.planners.errors import OptionError

_MAX_TENSORS = 1 << 16  # of a training on an aggregator
_MAX_WAITING = 16  # requests of one worker for one tensor while it is updated; an agent sends two

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tensor:
    """A master copy; only the front's thread changes it, but for ``parameters`` and ``state`` during an update."""

    job_id: str
    name: str
    host: TensorHost
    rule: Sgd | Adam
    parameters: Floats
    state: OptimizerState = field(default_factory=OptimizerState)
    encoded: bytes = b""  # parameters of the round, as they are sent
    gradients: dict[str, Floats] = field(default_factory=dict)  # of the round, by worker
    busy: bool = False  # an update runs
    waiting: list[tuple[Peer, TensorFrame | None]] = field(
        default_factory=list
    )  # meanwhile; nothing: a worker left


class Aggregator:
    """An aggregator that listens from the start.

    Args:
        name: unique among the service's aggregators.
        host: address of the interface to listen on.
        port: number; 0: any free one.
        threads: that update tensors, at most one for each core.
        max_bytes: maximum bytes of parameters of one training.

    Raises ``AggregationError`` when the port is not available.
    """

    def __init__(
        self, name: str, host: str = "127.0.0.1", port: int = 0, *, threads: int = 1, max_bytes: int = 1 << 34
    ) -> None:
        self.name = name
        self._max_bytes = max_bytes
        self._tensors: dict[tuple[str, str], _Tensor] = {}
        self._workers: dict[str, set[str]] = {}  # by training
        self._connections: dict[Peer, bytes] = {}  # last one of each worker
        self._threads = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="ebbflow-aggregation")
        self._front = AggregatorFront(host, port, self._receive)
        self.address, self.public = self._front.address, self._front.public

    @property
    def refused(self) -> int:
        """Return how many messages have ended their connection."""
        return self._front.refused

    def admit(self, job_id: str, workers: dict[str, str]) -> None:
        """Admit a training's workers before it begins.

        Args:
            job_id: of the training.
            workers: public key of each.

        Raises ``AggregationError`` for what is no key, or for one of another worker.
        """
        for worker, public in workers.items():
            self._front.admit(Peer(job_id, worker), public)
        self._workers[job_id] = set(workers)

    def dismiss(self, job_id: str, worker: str) -> None:
        """Take nothing more from a worker, and let no round wait for it."""
        peer = Peer(job_id, worker)
        self._front.dismiss(peer)
        self._front.call(lambda: self._leave(peer))

    def remove(self, job_id: str) -> None:
        """Forget a training and its tensors."""
        for worker in self._workers.pop(job_id, set()):
            self._front.dismiss(Peer(job_id, worker))
        self._front.call(lambda: self._forget(job_id))

    def close(self) -> None:
        """End all connections and threads; master copies are gone. May be called twice."""
        self._front.close()
        self._threads.shutdown(cancel_futures=True)

    # --- in the front's thread ----------------------------------------------------------------------------

    def _receive(self, peer: Peer, connection: bytes, parts: list[memoryview]) -> None:
        frames = decode(parts)
        self._connections[peer] = connection
        for frame in frames:
            if frame.kind is Kind.INIT:
                self._init(peer, frame)
                continue
            if frame.kind not in (Kind.PUSH, Kind.PULL):
                raise AggregationError(f"an aggregator must not be sent {frame.kind.name}")
            tensor = self._tensors.get((peer.job_id, frame.tensor))
            if tensor is None:
                self._refuse(
                    peer, frame, f"this training has no tensor {frame.tensor!r} on aggregator {self.name}"
                )
            elif tensor.busy:
                if sum(one == peer for one, _ in tensor.waiting) >= _MAX_WAITING:
                    raise AggregationError(
                        f"a worker must send at most {_MAX_WAITING} requests for a tensor at once"
                    )
                tensor.waiting.append((peer, frame))
            else:
                self._take(tensor, peer, frame)

    def _init(self, peer: Peer, frame: TensorFrame) -> None:
        key = (peer.job_id, frame.tensor)
        try:
            rule = rule_from(frame.options)
        except OptionError as exc:
            self._refuse(peer, frame, str(exc))
            return
        present = self._tensors.get(key)
        if present is None:
            held = [one.parameters.nbytes for one in self._tensors.values() if one.job_id == peer.job_id]
            if (
                not frame.payload
                or sum(held) + len(frame.payload) > self._max_bytes
                or len(held) >= _MAX_TENSORS
            ):
                self._refuse(
                    peer, frame,
                    f"a training must have at most {_MAX_TENSORS} tensors on an aggregator, none of them empty, with"
                    f" at most {self._max_bytes} bytes together",
                )  # fmt: skip
                return
            values = as_float32(frame.payload, frame.dtype).astype(np.float32, copy=True)
            workers = frozenset(self._workers.get(peer.job_id, ()))
            host = TensorHost(self.name, "serving", workers)
            self._tensors[key] = _Tensor(
                peer.job_id, frame.tensor, host, rule, values, encoded=values.tobytes()
            )
        elif (present.rule, present.parameters.nbytes) != (rule, len(frame.payload)):
            self._refuse(peer, frame, f"tensor {frame.tensor!r} is there with another rule or length")
            return
        self._answer(peer, [TensorFrame(Kind.READY, frame.tensor, request=frame.request)])

    def _take(self, tensor: _Tensor, peer: Peer, frame: TensorFrame) -> None:
        if frame.kind is Kind.PULL:
            self._step(tensor, Pull(peer.worker, frame.round))
            return
        gradient = as_float32(frame.payload, frame.dtype)
        if len(gradient) != len(tensor.parameters):
            said = f"a gradient of {frame.tensor!r} must have {len(tensor.parameters)} elements, not {len(gradient)}"
            self._refuse(peer, frame, said)
            return
        if frame.round == tensor.host.round and peer.worker not in tensor.gradients:
            tensor.gradients[peer.worker] = gradient
        self._step(tensor, Push(peer.worker, frame.round))

    def _step(self, tensor: _Tensor, message: Message) -> None:
        tensor.host, sends, updates = tensor.host.receive(message)
        if not updates:
            self._send(tensor, sends)
            return
        # in the order of workers, whatever that of arrival: the sum is the same in each run
        gradients = [tensor.gradients[worker] for worker in sorted(tensor.gradients)]
        tensor.gradients = {}
        tensor.busy = True
        self._threads.submit(self._update, tensor, gradients, sends)

    def _updated(self, tensor: _Tensor, encoded: bytes, sends: Sends) -> None:
        tensor.encoded, tensor.busy = encoded, False
        self._send(tensor, sends)
        while tensor.waiting and not tensor.busy:
            peer, frame = tensor.waiting.pop(0)
            if frame is None:
                self._step(tensor, Left(peer.worker))
            else:
                self._take(tensor, peer, frame)

    def _send(self, tensor: _Tensor, sends: Sends) -> None:
        for one in sends:
            if isinstance(one.message, Parameters):
                frame = TensorFrame(Kind.PARAMETERS, tensor.name, one.message.round, tensor.encoded)
                self._answer(Peer(tensor.job_id, one.to), [frame])

    def _refuse(self, peer: Peer, frame: TensorFrame, why: str) -> None:
        said = {"error": why[:1000]}
        self._answer(peer, [TensorFrame(Kind.ERROR, frame.tensor, request=frame.request, options=said)])

    def _answer(self, peer: Peer, frames: Iterable[TensorFrame]) -> None:
        connection = self._connections.get(peer)
        if connection is not None:  # an agent that has reconnected asks again
            self._front.send(connection, *encode(frames), copy=False)

    def _leave(self, peer: Peer) -> None:
        self._workers.get(peer.job_id, set()).discard(peer.worker)
        self._connections.pop(peer, None)
        for tensor in [one for one in self._tensors.values() if one.job_id == peer.job_id]:
            if tensor.busy:
                tensor.waiting.append((peer, None))
            else:
                self._step(tensor, Left(peer.worker))

    def _forget(self, job_id: str) -> None:
        self._tensors = {key: one for key, one in self._tensors.items() if one.job_id != job_id}
        self._connections = {peer: one for peer, one in self._connections.items() if peer.job_id != job_id}

    # --- in a thread of its own ---------------------------------------------------------------------------

    def _update(self, tensor: _Tensor, gradients: list[Floats], sends: Sends) -> None:
        try:
            tensor.rule.update(tensor.parameters, mean_gradient(gradients), tensor.state)
            encoded = tensor.parameters.tobytes()
        except Exception:  # the training notices that its round does not end
            log.exception("tensor %s of %s could not be updated", tensor.name, tensor.job_id)
            return
        self._front.call(lambda: self._updated(tensor, encoded, sends))
