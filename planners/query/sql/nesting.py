"""How deep and how long SQL may be: planning follows its tree by calls, of which Python allows a bounded number."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from sqlglot import exp

from ebbflow.planners.errors import UnsupportedQueryError

LONGEST = 1_000_000  # characters of a query: planning takes time in proportion
DEEPEST = 600  # levels of a query's tree, of which a chain of operators makes one each
_RULE = (
    "nesting is bounded (parentheses, function calls, CASE and subqueries within one another at about 40 levels, "
    f"chains such as a + b + ... at {DEEPEST} operators): name parts of the query by WITH, write long chains of OR "
    "as IN (...), put long lists into a table"
)

_NO_SQL = re.compile("[\0\ud800-\udfff]")

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def bounded() -> Iterator[None]:
    """Turn Python's limit on nested calls into ``UnsupportedQueryError``."""
    try:
        yield
    except RecursionError:
        raise UnsupportedQueryError(f"the query is nested too deeply to be planned; {_RULE}") from None


def within_bounds(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function`` raise ``UnsupportedQueryError`` for a query that is nested too deeply."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with bounded():
            return function(*args, **kwargs)

    return call


def check_length(text: str) -> None:
    """Raise ``UnsupportedQueryError`` for text that is longer than ``LONGEST`` or holds what no SQL has."""
    if len(text) > LONGEST:
        raise UnsupportedQueryError(
            f"a query may have {LONGEST:,} characters; got {len(text):,}: put long lists into a table"
        )
    found = _NO_SQL.search(text)
    if found is not None:
        line = text.count("\n", 0, found.start()) + 1
        raise UnsupportedQueryError(
            f"a query is Unicode text without NUL and lone surrogates; got U+{ord(found.group()):04X} in line "
            f"{line}, at character {found.start():,}"
        )


def check_depth(tree: exp.Expr) -> None:
    """Raise ``UnsupportedQueryError`` for a tree with more than ``DEEPEST`` levels."""
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise UnsupportedQueryError(f"the query has more than {DEEPEST} levels; {_RULE}")
        level = [child for node in level for child in node.iter_expressions()]
