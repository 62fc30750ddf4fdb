"""The launcher's end of a training's conversations, for tests, and the keys of those that it speaks with."""

from collections.abc import Mapping

from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.exchange import Exchange, GenerationChannel
from ebbflow.infra.training.channel.keys import KeyPair
from ebbflow.infra.training.process import channel
from ebbflow.infra.training.process.channel import Channel


class Speakers:
    """An exchange with nodes that nothing runs on; ``environment`` is what processes of one of them are given."""

    def __init__(self, *nodes: str) -> None:
        self.exchange = Exchange("127.0.0.1", 0)
        self.pairs = {}
        for node in nodes or ("n",):
            self.pairs[node] = KeyPair.make()
            self.exchange.wire(node)
            self.exchange.admit(node, self.pairs[node].public)

    def open(self, generation: int, ranks: Mapping[str, range] | int = 1, port: int = 1) -> GenerationChannel:
        """Begin a generation; ``ranks``: of each node, or how many the first one has."""
        if isinstance(ranks, int):
            ranks = {next(iter(self.pairs)): range(ranks)}
        return self.exchange.open(generation, ranks, port)

    def environment(self, generation: int, node: str = "") -> dict[str, str]:
        pair = self.pairs[node or next(iter(self.pairs))]
        return {
            channel.RUN_ID: "t",
            channel.GENERATION: str(generation),
            channel.CHANNEL: self.exchange.address,
            keys.SERVER_KEY: self.exchange.public,
            keys.NODE_SECRET: pair.secret,
        }

    def process(self, generation: int, node: str = "") -> Channel:
        """Return the end of a process of a node."""
        found = Channel.connect(self.environment(generation, node))
        assert found is not None
        return found

    def close(self) -> None:
        self.exchange.close()
