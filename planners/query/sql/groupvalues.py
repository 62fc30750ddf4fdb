"""First and last values of groups, which DuckDB has under other names than those of windows."""

from typing import Any

from sqlglot import exp

_OF_GROUPS: dict[type[exp.Expr], type[exp.Func]] = {exp.FirstValue: exp.First, exp.LastValue: exp.Last}


def of_group(call: exp.Expr) -> Any:
    """Return ``call``; of ``first_value`` and ``last_value`` outside windows, where DuckDB has none, what they are of
    a group."""
    known = _OF_GROUPS.get(type(call))
    node = call
    while isinstance(node.parent, exp.IgnoreNulls | exp.RespectNulls | exp.Filter):
        node = node.parent
    if known is None or (isinstance(node.parent, exp.Window) and node.arg_key == "this"):
        return call
    return known(this=call.this.copy())


def value_of(call: exp.First | exp.Last) -> Any:
    """Return what ``call`` is one value of, without the order of its argument."""
    return call.this.this if isinstance(call.this, exp.Order) else call.this
