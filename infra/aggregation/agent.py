"""``AggregationAgent``: a worker's connections to the aggregators that hold its training's tensors.

Gradients of a round are pushed in one message for each aggregator, and the next parameters are pulled with it. What
is not answered is sent again: aggregators know by worker and round what they have.
"""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zmq import constants
from zmq.error import Again
from zmq.sugar.context import Context
from zmq.sugar.poll import Poller
from zmq.sugar.socket import Socket

from ebbflow.infra.aggregation.frames import MAX_PAYLOAD, Buffer, Kind, TensorFrame, decode, encode
from ebbflow.infra.aggregation.rules import Adam, Floats, Sgd, as_float32, rule_values
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.machine.encrypted_router import CurveKeys


@dataclass(frozen=True, slots=True)
class AggregatorAddress:
    """Where an aggregator listens.

    Args:
        address: host:port.
        public: its key, which no other process can prove.
    """

    address: str
    public: str


class AggregationAgent:
    """Pushes a worker's gradients and pulls parameters. Used by one thread.

    Args:
        keys: of this worker, whose public half its aggregators have admitted.
        aggregators: by name.
        table: the aggregator of each tensor.
        timeout_s: seconds after which an aggregator that does not answer is an error.
        retry_s: seconds after which a request is sent again.
    """

    def __init__(
        self,
        keys: CurveKeys,
        aggregators: Mapping[str, AggregatorAddress],
        table: Mapping[str, str],
        *,
        timeout_s: float = 60.0,
        retry_s: float = 2.0,
    ) -> None:
        self._timeout, self._retry = timeout_s, retry_s
        self._table = dict(table)
        self._request = 0
        self._context = Context(io_threads=1)
        self._poller = Poller()
        self._sockets: dict[str, Socket[bytes]] = {}
        for name, where in aggregators.items():
            self._sockets[name] = self._connected(keys, where)

    def init(self, tensors: Mapping[str, Floats], rule: Sgd | Adam) -> None:
        """Hand over the first parameters of tensors; where they are there already, theirs count.

        Args:
            tensors: flat float32.
            rule: by which they are updated.

        Raises ``AggregationError`` where an aggregator refuses one or does not answer in time.
        """
        frames = {
            name: [TensorFrame(Kind.INIT, name, payload=values.data, options=rule_values(rule))]
            for name, values in tensors.items()
        }
        self._exchange(frames, Kind.READY, 0)

    def pull(self, tensors: Mapping[str, int]) -> dict[str, Floats]:
        """Return parameters.

        Args:
            tensors: the round of each, which begins once all workers have pushed the one before.

        Raises ``AggregationError`` where an aggregator refuses one or does not answer in time.
        """
        frames = {name: [TensorFrame(Kind.PULL, name, number)] for name, number in tensors.items()}
        return self._exchange(frames, Kind.PARAMETERS, tensors)

    def push(
        self, gradients: Mapping[str, Buffer], number: int, *, dtype: str = "float32"
    ) -> dict[str, Floats]:
        """Push the gradients of a round and return the parameters of the next, once all workers have pushed.

        Args:
            gradients: elements of each tensor, little-endian.
            number: of the round.
            dtype: of the elements: float32, float16 or bfloat16.

        Raises ``AggregationError`` where an aggregator refuses one or does not answer in time.
        """
        frames = {
            name: [
                TensorFrame(Kind.PUSH, name, number, memoryview(data), dtype),
                TensorFrame(Kind.PULL, name, number + 1),
            ]
            for name, data in gradients.items()
        }
        return self._exchange(frames, Kind.PARAMETERS, dict.fromkeys(gradients, number + 1))

    def close(self) -> None:
        """End the connections. May be called twice."""
        if not self._context.closed:
            self._context.destroy(linger=0)

    def _connected(self, keys: CurveKeys, where: AggregatorAddress) -> "Socket[bytes]":
        one = self._context.socket(constants.DEALER)
        one.curve_serverkey = bytes.fromhex(where.public)
        one.curve_publickey = bytes.fromhex(keys.public)
        one.curve_secretkey = bytes.fromhex(keys.secret)
        one.linger = 0
        one.maxmsgsize = MAX_PAYLOAD
        one.sndtimeo = max(round(self._retry * 1000), 1)
        one.reconnect_ivl, one.reconnect_ivl_max = 50, 1000
        one.connect(f"tcp://{where.address}")
        self._poller.register(one, constants.POLLIN)
        return one

    def _exchange(
        self, frames: Mapping[str, list[TensorFrame]], kind: Kind, rounds: Mapping[str, int] | int
    ) -> dict[str, Floats]:
        if unknown := frames.keys() - self._table.keys():
            raise AggregationError(f"tensor {min(unknown)!r} has no aggregator")
        self._request = (self._request + 1) % (1 << 32)
        frames = {
            name: [replace(one, request=self._request) for one in some] for name, some in frames.items()
        }
        got: dict[str, Floats] = {}
        end = time.monotonic() + self._timeout
        again = 0.0
        while len(got) < len(frames):
            now = time.monotonic()
            missing = [name for name in frames if name not in got]
            if now >= end:
                raise AggregationError(
                    f"aggregator {self._table[missing[0]]} must answer for tensor {missing[0]!r} within"
                    f" {self._timeout:g} s, and did not; {len(missing)} of {len(frames)} tensors are missing"
                )
            if now >= again:
                self._send(frames, missing)
                again = now + self._retry
            for ready, _ in self._poller.poll(max(min(end, again) - now, 0) * 1000 + 1):
                for answer in decode([memoryview(one.buffer) for one in ready.recv_multipart(copy=False)]):
                    wanted = rounds if isinstance(rounds, int) else rounds.get(answer.tensor, -1)
                    current = answer.kind is Kind.PARAMETERS or answer.request == self._request
                    if answer.tensor not in frames or not current:
                        continue
                    if answer.kind is Kind.ERROR:
                        raise AggregationError(
                            str(answer.options.get("error", "an aggregator refused a request"))
                        )
                    if answer.kind is kind and answer.round == wanted:
                        got[answer.tensor] = as_float32(answer.payload, answer.dtype)
        return got

    def _send(self, frames: Mapping[str, list[TensorFrame]], names: list[str]) -> None:
        batches: dict[str, list[TensorFrame]] = {}
        for name in names:
            batches.setdefault(self._table[name], []).extend(frames[name])
        for aggregator, batch in batches.items():
            with contextlib.suppress(Again):  # it takes no more now; what is missing is sent again
                self._sockets[aggregator].send_multipart(encode(batch), copy=False)
