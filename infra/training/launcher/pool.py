"""Where nodes come from: what the launcher asks of a machine room, local or in a cloud."""

from collections.abc import Callable
from typing import Protocol

from ebbflow.infra.training.channel.wire import Entry

Admit = Callable[[str], None]
"""What a pool tells a node's public key, once it knows it: the node is listened to from then on."""


def admit_none(_public: str) -> None:
    """Admit no key: for nodes that no launcher listens to."""


class NodePool(Protocol):
    """Nodes by name. A name may be used again once its node is gone. Safe for several threads."""

    host: str  # address at which nodes reach the launcher
    uid: str  # by which these nodes, and no others ever, can be recognised

    def start(self, name: str, slots: int, entry: Entry, admit: Admit = admit_none) -> None:
        """Start ``infra.training.launcher.node`` there and return at once; it reports to the launcher.

        The pool fills in the entry's ``address`` and ``folder``, sees to it that the node has a key pair of its own
        (``infra.training.channel.keys``), and calls ``admit`` with the public half, now or later, from any thread.
        Raises ``ClusterError``.
        """
        ...

    def lost(self, name: str) -> str:
        """Return in a few words how a node went that is gone (killed, revoked); empty while it is there."""
        ...

    def paused(self, name: str) -> bool:
        """Return whether a node is known to be paused; a pool that cannot know says no."""
        ...

    def end(self, name: str) -> None:
        """End a node and everything on it at once; nothing happens when it is gone. Raises ``ClusterError``."""
        ...

    def quiet(self, name: str) -> bool:
        """Return whether no process is left of a node that was ended or lost: only then is its GPU free."""
        ...

    def log(self, name: str) -> str:
        """Return the last lines of what the node itself wrote."""
        ...

    def gone(self, uid: str) -> bool:
        """Return whether nothing is left of the nodes of an earlier pool, known by its ``uid``."""
        ...

    def close(self) -> None:
        """End all nodes and leave nothing behind but logs. May be called twice."""
        ...
