"""``Aggregator``: holds master copies of tensors of many trainings, sums their gradients and updates them.

The front takes messages; threads sum and update, and a tensor is worked on by one of them at a time. What arrives
for a tensor meanwhile waits. A sum is complete when every worker of a view has pushed. It changes parameters only
once the workers have agreed on the step, which one of them says (``COMMIT``): so a round that lost a worker can be
repeated.
"""

import collections
import logging
from concurrent.futures import ThreadPoolExecutor

from ebbflow.infra.aggregation.frames import Kind, TensorFrame, decode, encode
from ebbflow.infra.aggregation.front import AggregatorFront, Peer
from ebbflow.infra.aggregation.master_copy import TRAINING, MasterCopy
from ebbflow.infra.errors import AggregationError
from ebbflow.planners.aggregation.messages import Parameters, Pull, Push, Sends

_MAX_TENSORS = 1 << 16  # of a training on an aggregator
_MAX_WAITING = 32  # requests of one connection for one tensor while it is worked on
_INLINE = 1 << 14  # elements up to which a tensor is worked on at once: a thread would take longer
_BATCH = 256  # frames of a message

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
        self._peers: dict[str, set[str]] = {}  # by training
        self._answers: dict[bytes, list[TensorFrame]] = collections.defaultdict(list)  # by connection
        self.rounds = 0  # updates of tensors
        self._threads = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="ebbflow-aggregation")
        self._front = AggregatorFront(host, port, self._receive, self._flush)
        self.address, self.public = self._front.address, self._front.public

    @property
    def refused(self) -> int:
        """Return how many messages have ended their connection."""
        return self._front.refused

    def admit(self, job_id: str, peers: dict[str, str]) -> None:
        """Admit peers of a training, now or later.

        Args:
            job_id: of the training.
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

    def close(self) -> None:
        """End all connections and threads; master copies are gone. May be called twice."""
        self._front.close()
        self._threads.shutdown(cancel_futures=True)

    # --- in the front's thread ----------------------------------------------------------------------------

    def _receive(self, peer: Peer, connection: bytes, parts: list[memoryview]) -> None:
        for frame in decode(parts):
            if frame.kind is Kind.INIT:
                self._init(peer, connection, frame)
                continue
            if frame.kind not in _REQUESTS:
                raise AggregationError(f"an aggregator must not be sent {frame.kind.name}")
            tensor = self._tensors.get((peer.job_id, frame.tensor))
            if tensor is None:
                said = f"this training has no tensor {frame.tensor!r} on aggregator {self.name}"
                self._refuse(connection, frame, said)
            elif tensor.busy:
                if sum(one == connection for one, _ in tensor.waiting) >= _MAX_WAITING:
                    raise AggregationError(
                        f"a worker must send at most {_MAX_WAITING} requests for a tensor at once"
                    )
                tensor.waiting.append((connection, frame))
            else:
                self._take(tensor, connection, frame)

    def _init(self, peer: Peer, connection: bytes, frame: TensorFrame) -> None:
        key = (peer.job_id, frame.tensor)
        held = [one.nbytes for one in self._tensors.values() if one.job_id == peer.job_id]
        if sum(held) + len(frame.payload) > self._max_bytes or len(held) >= _MAX_TENSORS:
            self._refuse(
                connection, frame,
                f"a training must have at most {_MAX_TENSORS} tensors on an aggregator, with at most"
                f" {self._max_bytes} bytes together",
            )  # fmt: skip
            return
        if key not in self._tensors:
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
            answer = TensorFrame(Kind.COMMITTED, tensor.name, frame.round, request=frame.request)
            self._answer(connection, answer)

    def _work(self, tensor: MasterCopy, commit: TensorFrame | None) -> None:
        """Sum, or update where there is a commit: a small tensor at once, another in a thread."""
        if len(tensor.parameters) <= _INLINE:
            self._do(tensor, commit)
            self._done(tensor, commit)
            return
        tensor.busy = True
        self._threads.submit(self._work_apart, tensor, commit)

    def _done(self, tensor: MasterCopy, commit: TensorFrame | None) -> None:
        tensor.busy = False
        if commit is None:
            self._send_summed(tensor)
        else:
            self.rounds += 1
            tensor.forget()
            tensor.view = 0
            self._step(tensor, Push(TRAINING, commit.round))
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

    def _send(self, tensor: MasterCopy, sends: Sends) -> None:
        for one in sends:
            if isinstance(one.message, Parameters):
                frame = TensorFrame(Kind.PARAMETERS, tensor.name, one.message.round, tensor.encoded)
                self._answer(bytes.fromhex(one.to), frame)

    def _send_summed(self, tensor: MasterCopy) -> None:
        for connection, frame in tensor.summed():
            self._answer(connection, frame)

    def _refuse(self, connection: bytes, frame: TensorFrame, why: str) -> None:
        said = {"error": why[:1000]}
        self._answer(connection, TensorFrame(Kind.ERROR, frame.tensor, request=frame.request, options=said))

    def _answer(self, connection: bytes, frame: TensorFrame) -> None:
        self._answers[connection].append(frame)

    def _flush(self) -> None:
        """Send the answers of a turn, those to a connection together. An agent that has reconnected asks again."""
        answers, self._answers = self._answers, collections.defaultdict(list)
        for connection, frames in answers.items():
            for at in range(0, len(frames), _BATCH):
                self._front.send(connection, *encode(frames[at : at + _BATCH]), copy=False)

    def _forget(self, job_id: str) -> None:
        self._tensors = {key: one for key, one in self._tensors.items() if one.job_id != job_id}

    # --- in a thread of its own ---------------------------------------------------------------------------

    def _work_apart(self, tensor: MasterCopy, commit: TensorFrame | None) -> None:
        if self._do(tensor, commit):
            self._front.call(lambda: self._done(tensor, commit))

    def _do(self, tensor: MasterCopy, commit: TensorFrame | None) -> bool:
        try:
            if commit is None:
                tensor.sum()
            else:
                tensor.update(commit.options)
        except Exception:  # the training notices that its round does not end
            log.exception("tensor %s of %s could not be worked on", tensor.name, tensor.job_id)
            return False
        return True


_REQUESTS = {Kind.PUSH, Kind.PULL, Kind.PULL_SUM, Kind.COMMIT, Kind.PULL_STATE}
