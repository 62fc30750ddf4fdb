"""Parameter shards: reads, exactly-once increments, and moves that nothing waits for (Litz, section 3.5)."""

from zlib import crc32

from ebbflow.infra.elastic.application import Application, Key, Value
from ebbflow.infra.elastic.wire import codec
from ebbflow.infra.elastic.wire.actor import Now, RoutingActor, Send
from ebbflow.infra.elastic.wire.messages import (
    MASTER,
    ActorFailure,
    Address,
    AwaitFarewells,
    Capture,
    CaptureResult,
    Depart,
    DrainAck,
    Exit,
    Farewell,
    Install,
    MoveAck,
    MoveShard,
    Place,
    Read,
    Ready,
    Relocated,
    SaveRunning,
    ShardContents,
    ShardRecord,
    Update,
    UpdateAck,
    Values,
    Welcome,
)
from ebbflow.infra.elastic.wire.snapshot import attempt, find
from ebbflow.infra.elastic.worker.running import RunningCopy
from ebbflow.infra.errors import ElasticError


def shard_of(key: Key, shards: int) -> int:
    """Return the shard that holds ``key``; the same in every process."""
    return crc32(repr(key).encode()) % shards


class Shard:
    """A part of the parameters."""

    def __init__(self, application: Application, record: ShardRecord) -> None:
        self._combine = application.combine
        self._isolated = application.isolated
        self.record = record

    def read(self, key: Key, version: int) -> Value:
        """Return the value for a task of ``version``. Raises ``KeyError`` for a parameter that there is not."""
        record = self.record
        if (hidden := record.waiting.get(key)) and hidden[0] < version:
            self._reveal(key)
        return record.values[key]

    def apply(self, key: Key, version: int, increment: Value) -> None:
        """Add an increment by a task of ``version``."""
        record = self.record
        if key not in record.values:
            raise KeyError(key)
        hidden = record.waiting.get(key)
        if hidden and hidden[0] < version:
            self._reveal(key)
            hidden = None
        if not self._isolated or (hidden and hidden[0] > version):
            record.values[key] = self._combine(key, record.values[key], increment)
        elif hidden:
            record.waiting[key] = (version, self._combine(key, hidden[1], increment))
        else:
            record.waiting[key] = (version, increment)

    def _reveal(self, key: Key) -> None:
        _, increment = self.record.waiting.pop(key)
        self.record.values[key] = self._combine(key, self.record.values[key], increment)

    def final(self) -> dict[Key, Value]:
        """Return the values with every increment."""
        for key in list(self.record.waiting):
            self._reveal(key)
        return self.record.values


class Server(RoutingActor):
    """Holds some shards, and forwards what is meant for shards that it held before."""

    def __init__(self, address: Address, send: Send, now: Now) -> None:
        super().__init__(address, send, now)
        self._application: Application
        self.shards: dict[int, Shard] = {}
        self._held: dict[int, list[Read | Update]] = {}  # for shards that are on their way here
        self._leaving: dict[int, Place] = {}  # moves of shards that are on their way here
        self._awaited: frozenset[Address] | None = None
        self._farewells: set[Address] = set()
        self._running: dict[int, RunningCopy] = {}
        self._handlers = {
            Welcome: self._welcome,
            Read: self._read,
            Update: self._update,
            MoveShard: self._move,
            ShardContents: self._contents,
            Depart: self._depart,
            AwaitFarewells: self._await_farewells,
            Farewell: self._farewell,
            Capture: self._capture,
            Install: self._install,
            Relocated: self._relocated,
            SaveRunning: self._save_running,
            Exit: self._exit,
        }

    def _welcome(self, _: Address, message: Welcome) -> None:
        self._application = message.application
        self.directory = dict(message.directory)
        self.send(MASTER, Ready())

    def _exit(self, _: Address, __: Exit) -> None:
        self.done = True

    # --- reads and increments

    def _elsewhere(self, message: Read | Update) -> bool:
        """Pass on a message for a shard that is not here, or keep it if the shard is about to come."""
        if message.shard in self.shards:
            return False
        place = self.directory[message.shard]
        if place.server == self.address:
            self._held.setdefault(message.shard, []).append(message)
        else:
            self.send(place.server, message)
        return True

    def _read(self, _: Address, message: Read) -> None:
        if self._elsewhere(message):
            return
        shard = self.shards[message.shard]
        try:
            values = {key: shard.read(key, message.version) for key in message.keys}
        except KeyError as error:
            self._unknown(error.args[0], "read")
            return
        place = self.directory[message.shard]
        self.send(message.reply_to, Values(message.shard, values, message.version, place))

    def _update(self, _: Address, message: Update) -> None:
        if self._elsewhere(message):
            return
        shard = self.shards[message.shard]
        if message.number > shard.record.applied.get(message.reply_to, 0):
            shard.record.applied[message.reply_to] = message.number
            try:
                for (key, version), increment in message.increments.items():
                    shard.apply(key, version, increment)
            except KeyError as error:
                self._unknown(error.args[0], "updated")
                return
        place = self.directory[message.shard]
        self.send(message.reply_to, UpdateAck(message.shard, message.number, place))

    def _unknown(self, key: Key, what: str) -> None:
        text = f"parameter {key!r} was {what}, but Application.parameters() has none of that name"
        self.send(MASTER, ActorFailure(text, application=True))

    # --- moves

    def _move(self, _: Address, message: MoveShard) -> None:
        if message.shard not in self.shards:
            self._leaving[message.shard] = message.place
            return
        shard = self.shards.pop(message.shard)
        self._running.pop(message.shard, None)
        contents = ShardContents(message.shard, message.place.moves, shard.record)
        self.send(message.place.server, contents)
        self.learn(message.shard, message.place)

    def _contents(self, _: Address, message: ShardContents) -> None:
        self.shards[message.shard] = Shard(self._application, message.record)
        self.learn(message.shard, Place(self.address, message.moves))
        size = codec.size(codec.encode(message.record.values))
        self.send(MASTER, MoveAck("shard", message.shard, size))
        self._answer_held(message.shard)
        if place := self._leaving.pop(message.shard, None):
            self._move(MASTER, MoveShard(message.shard, place))

    def _answer_held(self, shard: int) -> None:
        for message in self._held.pop(shard, []):
            handle = self._read if isinstance(message, Read) else self._update
            handle(self.address, message)  # type: ignore[arg-type]

    def _depart(self, _: Address, message: Depart) -> None:
        self.learn_all(message.directory)
        self.send(message.server, Farewell())

    def _await_farewells(self, _: Address, message: AwaitFarewells) -> None:
        self._awaited = message.actors
        self._check_farewells()

    def _farewell(self, sender: Address, _: Farewell) -> None:
        self._farewells.add(sender)
        self._check_farewells()

    def _check_farewells(self) -> None:
        if self._awaited is not None and self._awaited <= self._farewells:
            self.send(MASTER, DrainAck())

    # --- snapshots and recovery

    def _capture(self, _: Address, message: Capture) -> None:
        if message.path is None and not message.records:
            values = {number: shard.final() for number, shard in self.shards.items()}
            self.send(MASTER, CaptureResult(sorted(values), values))
            return
        records = {number: shard.record for number, shard in self.shards.items()}
        if message.path is None:
            self.send(MASTER, CaptureResult(sorted(records), records))
            return
        error = attempt(message.path, records)
        self.send(MASTER, CaptureResult(sorted(self.shards), None, error))

    def _install(self, _: Address, message: Install) -> None:
        if message.reset:
            self.shards, self._held, self._leaving, self._running = {}, {}, {}, {}
            self._awaited, self._farewells, self.directory = None, set(), {}
        found = find(message.files, message.items) if message.contents is None else message.contents
        for number in message.items:
            record = found.get(number) or ShardRecord(dict((message.initial or {})[number]), {}, {})
            record.applied.clear()  # flushes of the past; a new process may have the name of an old one
            self.shards[number] = Shard(self._application, record)
        self.learn_all(message.directory)
        sizes = {n: codec.size(codec.encode(self.shards[n].record.values)) for n in message.items}
        self.send(MASTER, Ready(sizes))
        for number in message.items:
            self._answer_held(number)

    def _relocated(self, _: Address, message: Relocated) -> None:
        self.learn_all(message.directory)

    def _save_running(self, _: Address, message: SaveRunning) -> None:
        for number, shard in self.shards.items():
            if number not in self._running:
                self._running[number] = RunningCopy.open(message.folder, number)
            try:
                self._running[number].refresh(shard.record.values, message.fraction)
            except ElasticError:
                return  # what was saved before still serves, only older
