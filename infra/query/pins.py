"""Which versions of tables with a log a query began with, kept in its store until the query has ended.

Stages are reused only of the same versions of their tables. A table that others append to has another by the time
that a lost query is run again: with a pin it continues with the version, and the stages, that it began with.
"""

import hashlib
import uuid
from collections.abc import Mapping
from contextlib import suppress

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import StorageError
from ebbflow.infra.storage.jsonstore import JsonStore

LONGEST = 86_400.0  # seconds for which an unfinished query's versions are kept


class Pins:
    """The versions of one query's tables, by lower-case name.

    A pin is a convenience, as the stages are: without it the query starts from scratch, with the newest versions.

    Args:
        cache: keeps them.
        query: what makes a later run the same query.
        clock: tells how old they are.
    """

    def __init__(self, cache: JsonStore, query: str, clock: Clock) -> None:
        self._cache, self._clock = cache, clock
        self._key = hashlib.sha256(query.encode()).hexdigest()

    def known(self) -> dict[str, str]:
        """Return what an earlier run that has not ended began with within the last day; nothing without one."""
        return self._kept()[0]

    def keep(self, versions: Mapping[str, str], *, anew: bool = False, durable: bool = False) -> str:
        """Keep what the query begins with, for the day after its first run began; return the id of that run.

        A run that continues one that has not ended has its id, unless it begins ``anew``. A query without such tables
        is only kept where that must be ``durable``; then ``StorageError`` is raised if it cannot be.
        """
        before, run = self._kept()
        if run and not anew and before == dict(versions):
            return run
        if anew or not run:
            run = uuid.uuid4().hex
        if versions or durable:
            with suppress(*(() if durable else (StorageError,))):
                self._cache.put(self._key, [self._clock.now(), dict(versions), run])
        return run

    def forget(self) -> None:
        """Let the next run begin with the newest versions."""
        with suppress(StorageError):
            self._cache.remove(self._key)

    def _kept(self) -> tuple[dict[str, str], str]:
        match self._cache.get(self._key):
            case [float(began), dict(versions), str(run)] if 0 <= self._clock.now() - began < LONGEST:
                return {str(name): str(version) for name, version in versions.items()}, run
        return {}, ""
