"""``AggregationAgent``: a worker's connections to the aggregators that hold its training's tensors.

Gradients are pushed while backward goes, small ones together, and each is answered with the norm of the sum once all
workers have pushed. After a commit parameters are pulled, and waited for where they are needed. What is not answered
is sent again: aggregators know by round, view and place what they have.

A tensor may have mirrors: aggregators that get the same pushes and commits, and so hold the same master copy. No
worker gets parameters before all mirrors of a tensor have applied the step.

Spares are mirrors of earlier rounds, which ``refresh`` brings up to date. Where a tensor's aggregator is lost, each
worker offers the parameters that it has to the spare, which keeps its moments; the first of the newest round count.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ebbflow.infra.aggregation.connections import ExpectedAnswer, Offer, Watch, WorkerLinks
from ebbflow.infra.aggregation.frames import AggregatorAddress, Buffer, Kind, TensorFrame
from ebbflow.infra.aggregation.same_machine import WorkerMemory
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.machine.encrypted_router import CurveKeys

_LOOK = 0.02  # seconds between two calls of ``watch``

_Key = tuple[str, Kind, str]  # aggregator, kind of the answer, tensor


class AggregationAgent:
    """Pushes a worker's gradients and pulls parameters. Safe for several threads.

    Args:
        keys: whose public half the aggregators have admitted.
        aggregators: by name.
        table: the aggregators of each tensor, of which the first is pulled from and the others are mirrors.
        timeout_s: seconds after which an aggregator that does not answer is an error; waiting for other workers'
            pushes has no end but that of ``watch``.
        retry_s: seconds after which a request is sent again.
        watch: see ``Watch``.
        spares: aggregators that hold copies of earlier rounds of a tensor.
        share_memory: whether gradients and parameters pass through memory where an aggregator is on this machine.
    """

    def __init__(
        self,
        keys: CurveKeys,
        aggregators: Mapping[str, AggregatorAddress],
        table: Mapping[str, Sequence[str]],
        *,
        timeout_s: float = 60.0,
        retry_s: float = 5.0,
        watch: Watch = lambda others: None,
        spares: Mapping[str, Sequence[str]] | None = None,
        share_memory: bool = True,
    ) -> None:
        self._timeout, self._retry, self._watch = timeout_s, retry_s, watch
        self._table = {name: list(hosts) for name, hosts in table.items()}
        self._spares = {name: list(hosts) for name, hosts in (spares or {}).items()}
        self._adopted: dict[str, int] = {}  # that continue on a spare: the round in which none was pushed
        self.offer: Offer | None = None  # what spares continue with
        self.mirrored_bytes = 0  # of payloads that went to mirrors and spares
        self._request = 0
        self._lock = threading.RLock()
        self._memory = WorkerMemory(share_memory)
        self._links = WorkerLinks(keys, retry_s, self._memory)
        self._expected: dict[_Key, ExpectedAnswer] = {}
        self._dropped: set[str] = set()  # aggregators that are done without
        for name, where in aggregators.items():
            self._links.connect(name, where)

    @property
    def table(self) -> dict[str, tuple[str, ...]]:
        """Return the aggregators of each tensor."""
        with self._lock:
            return {name: tuple(hosts) for name, hosts in self._table.items()}

    @property
    def spares(self) -> dict[str, tuple[str, ...]]:
        """Return the aggregators that hold copies of earlier rounds of each tensor."""
        with self._lock:
            return {name: tuple(hosts) for name, hosts in self._spares.items() if hosts}

    @property
    def adopted(self) -> set[str]:
        """Return the tensors that continue on a spare and were not pushed since."""
        with self._lock:
            return set(self._adopted)

    @property
    def addresses(self) -> dict[str, AggregatorAddress]:
        """Return where its aggregators listen."""
        with self._lock:
            return {name: self._links.where[name] for name in self._links.sockets}

    # --- what a worker does -------------------------------------------------------------------------------

    def init(
        self, tensors: Mapping[str, Buffer], options: Mapping[str, Mapping[str, Any]], number: int = 0
    ) -> None:
        """Hand over the first parameters of tensors; where they are there already, theirs count.

        Args:
            tensors: float32 parameters, followed by the moments that ``options`` name.
            options: of each: ``rule``, ``step`` and ``moments``.
            number: of the round that they begin.

        Raises ``AggregationError`` where an aggregator refuses one or does not answer in time.
        """
        with self._lock:
            for name, data in tensors.items():
                for place, host in enumerate(self._hosts(name)):
                    values = {**options[name], "mirror": place > 0}
                    frame = TensorFrame(Kind.INIT, name, number, data, options=values)
                    self._ask(host, Kind.READY, name, (frame,), number)
        self.refresh(tensors, options, number)

    def refresh(
        self, tensors: Mapping[str, Buffer], options: Mapping[str, Mapping[str, Any]], number: int
    ) -> None:
        """Bring the spares of tensors to a round; arguments as of ``init``. Raises ``AggregationError``."""
        with self._lock:
            for name, data in tensors.items():
                values = {**options[name], "mirror": True, "spare": True}
                frame = TensorFrame(Kind.INIT, name, number, data, options=values)
                for host in self._spares.get(name, ()):
                    self.mirrored_bytes += len(data)
                    self._ask(host, Kind.READY, name, (frame,), number)
        self._take(Kind.READY, tensors)

    def push(
        self,
        tensor: str,
        data: Buffer,
        number: int,
        view: int,
        place: int,
        places: int,
        *,
        dtype: str = "float32",
    ) -> None:
        """Push a gradient; it is sent with others, or by ``flush``.

        Args:
            tensor: its name.
            data: elements, little-endian; must not change before the step is over.
            number: of the round.
            view: number of the workers' view.
            place: of this worker in it.
            places: number of workers in it.
            dtype: of the elements: float32, float16 or bfloat16.

        Raises ``AggregationError`` for a tensor without an aggregator.
        """
        with self._lock:
            self._adopted.pop(tensor, None)
            hosts = self._hosts(tensor)
            payload, options = self._memory.keep(tensor, memoryview(data).cast("B"), hosts)
            frame = TensorFrame(
                Kind.PUSH, tensor, number, payload, dtype, 0, options, view=view, place=place, places=places
            )
            for place_, host in enumerate(hosts):
                self.mirrored_bytes += len(frame.payload) if place_ else 0
                self._ask(host, Kind.SUMMED, tensor, (frame,), number, view)

    def flush(self) -> None:
        """Send what has been pushed."""
        with self._lock:
            self._links.flush()

    def norms(self, tensors: Iterable[str]) -> dict[str, float]:
        """Return the squared norm of the sum of each tensor's gradients, once all workers have pushed.

        Raises ``AggregationError`` where an aggregator refuses one, and what ``watch`` raises.
        """
        found = self._take(Kind.SUMMED, tensors, everywhere=True, patient=True)
        return {name: float(one.options["norm"]) for name, one in found.items()}

    def sums(self, tensors: Iterable[str], number: int, view: int) -> dict[str, TensorFrame]:
        """Return the sums of tensors' gradients, after ``norms``. Raises ``AggregationError``, and of ``watch``."""
        return self._take(Kind.SUM, self._query(Kind.PULL_SUM, Kind.SUM, tensors, number, view))

    def commit(self, options: Mapping[str, Mapping[str, Any]], number: int, view: int) -> None:
        """Let tensors be updated by the sums of a round, and ask for their parameters.

        Args:
            options: of each tensor: see ``MasterCopy.update``.
            number: of the round.
            view: in which it was agreed on.
        """
        with self._lock:
            for name, values in options.items():
                if name in self._adopted:  # its sum is lost with the aggregator that had it
                    self._adopt(name, number + 1)
                    continue
                commit = TensorFrame(Kind.COMMIT, name, number, options=values, view=view)
                pull = TensorFrame(Kind.PULL, name, number + 1)
                first, *mirrors = self._hosts(name)
                self._ask(first, Kind.PARAMETERS, name, (commit, pull), number + 1)
                for host in mirrors:
                    self._ask(host, Kind.COMMITTED, name, (commit,), number)
        self.flush()

    def pull(self, tensors: Iterable[str], number: int) -> None:
        """Ask for the parameters of a round."""
        self._query(Kind.PULL, Kind.PARAMETERS, tensors, number)
        self.flush()

    def parameters(self, tensors: Iterable[str]) -> dict[str, TensorFrame]:
        """Return parameters that were asked for, once their mirrors have them, too.

        Raises ``AggregationError`` where an aggregator refuses one or does not answer in time.
        """
        names = list(tensors)
        found = self._take(Kind.PARAMETERS, names)
        self._take(Kind.COMMITTED, names, everywhere=True)
        return found

    def states(self, tensors: Iterable[str], number: int) -> dict[str, TensorFrame]:
        """Return moments and step counts of tensors. Raises ``AggregationError``."""
        return self._take(Kind.STATE, self._query(Kind.PULL_STATE, Kind.STATE, tensors, number))

    def abandon(self) -> None:
        """Forget the pushes of a round that is repeated."""
        with self._lock:
            self._links.forget()
            for key in [key for key in self._expected if key[1] in (Kind.SUMMED, Kind.SUM)]:
                del self._expected[key]

    def drop(self, aggregator: str) -> None:
        """Do without an aggregator: its tensors are pulled from their mirrors, or continue on spares, from now on.

        Raises ``AggregationError`` for a tensor that has none.
        """
        with self._lock:
            self._dropped.add(aggregator)
            if aggregator not in self._links.sockets:
                return
            self._links.disconnect(aggregator)
            asked = {key[2] for key in self._expected if key[0] == aggregator}
            for name, hosts in self._table.items():
                if aggregator in self._spares.get(name, ()):
                    self._spares[name].remove(aggregator)
                if aggregator in hosts or name in asked:
                    self._without(aggregator, name)
        self.flush()

    def close(self) -> None:
        """End the connections. May be called twice."""
        with self._lock:
            self._links.close()

    # --- how ----------------------------------------------------------------------------------------------

    def _hosts(self, tensor: str) -> list[str]:
        if not (hosts := self._table.get(tensor)):
            raise AggregationError(f"tensor {tensor!r} has no aggregator")
        return hosts

    def _query(self, kind: Kind, due: Kind, tensors: Iterable[str], number: int, view: int = 0) -> list[str]:
        names = list(tensors)
        with self._lock:
            for name in names:
                frames = (TensorFrame(kind, name, number, view=view),)
                self._ask(self._hosts(name)[0], due, name, frames, number, view)
        return names

    def _ask(
        self, host: str, kind: Kind, tensor: str, frames: tuple[TensorFrame, ...], number: int, view: int = 0
    ) -> None:
        self._request = (self._request + 1) % (1 << 32)
        frames = tuple(replace(one, request=self._request) for one in frames)
        self._expected[host, kind, tensor] = ExpectedAnswer(frames, number, view, time.monotonic())
        self._links.queue(host, frames)

    def _take(
        self, kind: Kind, tensors: Iterable[str], *, everywhere: bool = False, patient: bool = False
    ) -> dict[str, TensorFrame]:
        """Wait for answers about tensors, of one host or ``everywhere``; ``patient``: as long as ``watch`` lets."""
        names = list(tensors)
        self.flush()
        end = time.monotonic() + self._timeout
        while missing := self._missing(kind, names):
            self._watch(patient)
            if time.monotonic() > end and not patient:
                host, _, tensor = missing[0]
                raise AggregationError(
                    f"aggregator {host} must answer for tensor {tensor!r} within {self._timeout:g} s, and did"
                    f" not; {len(missing)} of {len(names)} tensors are missing"
                )
            self._pump(_LOOK)
            self._again(missing)
        with self._lock:
            found: dict[str, TensorFrame] = {}
            for name in names:
                for host in self._holding(kind, name):
                    due = self._expected.pop((host, kind, name), None)
                    if due is not None and due.answer is not None:
                        found.setdefault(name, due.answer)
            return found

    def _missing(self, kind: Kind, names: Iterable[str]) -> list[_Key]:
        with self._lock:
            keys = ((host, kind, name) for name in names for host in self._holding(kind, name))
            return [
                key for key in keys if (due := self._expected.get(key)) is not None and due.answer is None
            ]

    def _holding(self, kind: Kind, tensor: str) -> list[str]:
        """Return the aggregators that may answer."""
        return [*self._table[tensor], *(self._spares.get(tensor, ()) if kind is Kind.READY else ())]

    def _again(self, missing: Iterable[_Key]) -> None:
        now = time.monotonic()
        with self._lock:
            for key in missing:
                due = self._expected.get(key)
                if due is not None and due.answer is None and now - due.sent > self._retry:
                    due.sent = now
                    self._links.queue(key[0], due.frames)
        self.flush()

    def _pump(self, timeout: float) -> None:
        """Take what has arrived, after ``timeout`` seconds at most. Raises ``AggregationError`` for a refusal."""
        with self._lock:
            for name, frame in self._links.received(timeout):
                self._hear(name, frame)

    def _without(self, host: str, tensor: str) -> None:
        """Do without an aggregator for a tensor. Raises ``AggregationError`` where it has no mirror."""
        hosts = self._table[tensor]
        if host in hosts:
            hosts.remove(host)
        if not hosts and self._spares.get(tensor) and self.offer is not None:
            due = self._expected.get((host, Kind.PARAMETERS, tensor))
            for key in [key for key in self._expected if key[0] == host and key[2] == tensor]:
                del self._expected[key]
            hosts.append(self._spares[tensor].pop(0))
            self._adopt(tensor, self.offer(tensor)[2] if due is None else due.round)
            return
        if not hosts:
            raise AggregationError(f"aggregator {host} is gone, and {tensor!r} has no mirror")
        for key in [key for key in self._expected if key[0] == host and key[2] == tensor]:
            due = self._expected.pop(key)
            if key[1] not in (Kind.PARAMETERS, Kind.STATE, Kind.SUM):
                continue
            if due.answer is None:
                self._ask(hosts[0], key[1], tensor, due.frames, due.round, due.view)
            else:
                self._expected[hosts[0], key[1], tensor] = due

    def _adopt(self, tensor: str, number: int) -> None:
        """Let a spare continue with this worker's parameters from a round on, unless it has another's."""
        assert self.offer is not None
        data, options, _ = self.offer(tensor)
        values = {**options, "moments": [], "adopt": True}
        adopt = TensorFrame(Kind.INIT, tensor, number, data, options=values)
        pull = TensorFrame(Kind.PULL, tensor, number)
        self._adopted[tensor] = number
        self._ask(self._hosts(tensor)[0], Kind.PARAMETERS, tensor, (adopt, pull), number)

    def _hear(self, host: str, answer: TensorFrame) -> None:
        frame = self._memory.incoming(host, answer)
        if frame is None or (frame.kind is Kind.ERROR and frame.options.get("memory")):
            if self._memory.refuse(host):  # and sent what it could not read, once
                for key, waiting in self._expected.items():
                    if key[0] == host and waiting.answer is None:
                        self._links.queue(host, waiting.frames)
            return
        if frame.kind is Kind.ERROR:
            asked = any(
                key[0] == host and key[2] == frame.tensor and due.frames[0].request == frame.request
                for key, due in self._expected.items()
            )
            if asked and frame.options.get("gone") and len(self._table[frame.tensor]) > 1:
                self._without(host, frame.tensor)  # its copy has never come
            elif asked:
                raise AggregationError(str(frame.options.get("error", "an aggregator refused a request")))
            return
        due = self._expected.get((host, frame.kind, frame.tensor))
        if due is not None and frame.round == due.round and frame.view == due.view:
            due.answer = due.answer or frame
            if frame.kind is Kind.PARAMETERS and "host" in frame.options:
                self._follow(host, frame)

    def _follow(self, host: str, frame: TensorFrame) -> None:
        """Take note that a tensor's gradients go to another aggregator from this round on."""
        name, values = str(frame.options["host"]), frame.options
        hosts = self._table[frame.tensor]
        if name in hosts or host not in hosts:
            return
        if name in self._dropped:  # on its way to an aggregator that is lost meanwhile
            self._without(host, frame.tensor)
            return
        if name not in self._links.sockets:
            self._links.connect(name, AggregatorAddress(str(values["address"]), str(values["public"])))
        hosts[hosts.index(host)] = name
        self._expected[name, frame.kind, frame.tensor] = self._expected.pop((host, frame.kind, frame.tensor))
