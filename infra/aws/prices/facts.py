"""Answers of AWS that are kept: in memory, and in a cache that the next process reads, and used in an outage."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import AwsError, AwsUnavailableError, StorageError
from ebbflow.infra.storage.jsonstore import JsonStore

T = TypeVar("T")

PAUSE = 60.0
"""s; after a failure nothing is asked for so long, for a loop must not wait for every timeout anew."""
OUTAGE = 10.0
"""In an outage facts are used up to so many times the age after which they are asked for again."""
_DAY = 86400.0
_FORM = 1  # of what is kept; another form is another key


class Facts:
    """Facts by name, each with the time at which it was learnt. Not safe for several threads: its owner locks."""

    def __init__(self, scope: str, cache: JsonStore | None, clock: Clock) -> None:
        self._scope = scope
        self._cache = cache
        self._clock = clock
        self._known: dict[str, tuple[float, Any]] = {}
        self._quiet: dict[str, float] = {}
        self._problems: dict[str, None] = {}  # a set that keeps its order

    def get(
        self,
        name: str,
        what: str,
        fresh: float,
        ask: Callable[[], T],
        forgive: type[AwsError] = AwsUnavailableError,
    ) -> T:
        """Return a fact that is at most ``fresh`` s old, or an older one where ``ask`` raises ``forgive``.

        ``what`` names the call, for people and for the pause after a failure. Raises what ``ask`` raises.
        """
        now = self._clock.now()
        known = self._known.get(name) or self._recalled(name, now)
        if known is not None and now - known[0] <= fresh:
            return known[1]  # type: ignore[no-any-return]
        try:
            value = self.asked(what, ask, forgive)
        except forgive as error:
            if known is None or now - known[0] > OUTAGE * fresh:
                raise
            self.say(f"{name} is {(now - known[0]) / _DAY:.1f} days old: {error}")
            return known[1]  # type: ignore[no-any-return]
        self.keep(name, value)
        return value

    def asked(self, what: str, ask: Callable[[], T], forgive: type[AwsError] = AwsUnavailableError) -> T:
        """Return what ``ask`` returns, and ask no more for ``PAUSE`` s once it has raised ``forgive``.

        Raises ``AwsUnavailableError`` during the pause.
        """
        now = self._clock.now()
        until = self._quiet.get(what, now)
        if now < until:
            raise AwsUnavailableError(f"{what} not available; retry in {until - now:.0f} s")
        try:
            return ask()
        except forgive:
            # the clock again: timeouts may have taken a while
            self._quiet[what] = self._clock.now() + PAUSE
            raise

    def keep(self, name: str, value: object) -> None:
        """Learn a fact now."""
        now = self._clock.now()
        self._known[name] = now, value
        self.remember(name, {"at": now, "value": value})

    def recall(self, name: str) -> Any:
        """Return what the cache holds under ``name``, or ``None``."""
        return self._cache.get(self._key(name)) if self._cache is not None else None

    def remember(self, name: str, content: Mapping[str, object]) -> None:
        """Put ``content`` into the cache; a cache that cannot be written is a problem, no error."""
        if self._cache is None:
            return
        try:
            self._cache.put(self._key(name), content)
        except StorageError as error:
            self.say(f"prices are not kept: {error}")

    def say(self, problem: str) -> None:
        """Note a sentence for people, once."""
        self._problems[problem] = None

    def problems(self) -> list[str]:
        """Return and forget what was noted."""
        found, self._problems = list(self._problems), {}
        return found

    def _recalled(self, name: str, now: float) -> tuple[float, Any] | None:
        content = self.recall(name)
        if not isinstance(content, dict) or not isinstance(content.get("at"), int | float):
            return None
        # a fact from the future, by a clock that was wrong, would never be asked for again
        if content["at"] > now or "value" not in content:
            return None
        self._known[name] = float(content["at"]), content["value"]
        return self._known[name]

    def _key(self, name: str) -> str:
        return f"{self._scope} {_FORM} {name}"
