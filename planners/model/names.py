"""What names may look like that end up in ledgers, paths, addresses and pages. The one place that decides."""

import re
from dataclasses import dataclass

from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class NameRule:
    """A kind of name: what people call it, which texts it takes, and how an error says so."""

    what: str
    pattern: str  # of the whole text
    rule: str

    def allows(self, text: object) -> bool:
        """Tell whether ``text`` is such a name."""
        return isinstance(text, str) and re.fullmatch(self.pattern, text) is not None

    def check(self, text: str) -> str:
        """Return ``text``. Raises ``OptionError`` that names the value and the rule."""
        if not self.allows(text):
            raise OptionError(f"{self.what} {self.rule}; got {text!r:.120}")
        return text


AGGREGATOR = NameRule(
    "an aggregator's name",
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    "begins with a letter or digit and holds A-Z a-z 0-9 . _ -, 100 at most",
)
CLUSTER = NameRule(
    "a cluster's name",
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    "begins with a letter or digit and holds A-Z a-z 0-9 . _ -, 100 at most",
)
"""Of a cluster in a ledger; also the name of the Spark cluster, of nodes and of directories that belong to it."""

RUN = NameRule(
    "id",
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}",
    "must hold letters, digits, dashes, dots and underscores, 100 at most, and begin with a letter or digit",
)
"""Of a training's or search's run, whose directory it names."""
