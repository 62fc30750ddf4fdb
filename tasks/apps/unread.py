"""Reports that this version of Ebbflow cannot read: they are left out, and named among the problems."""

from collections.abc import Mapping

from ebbflow.infra.ledger import Unread
from ebbflow.tasks.drawing.wording import shorten

_NAMED = 3  # of which the reason is given too
_LONG = 300  # characters of one reason


def problems(unread: Mapping[str, Unread]) -> tuple[str, ...]:
    """Return a sentence for each report that cannot be read; of many only how many more there are."""
    named = sorted(unread.items())
    found = [f"the report of {app} is left out: {shorten(one.why, _LONG)}" for app, one in named[:_NAMED]]
    if len(named) > _NAMED:
        found.append(f"the reports of {len(named) - _NAMED} more cannot be read either")
    return tuple(found)
