"""What of a query one engine answers otherwise than the other, whichever of them it was written for."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sqlglot import exp

UNLIKE = "unlike"  # marks what the other engine answers otherwise, with the reason
SAID = "texts of such values are others"
Rules: TypeAlias = Mapping[type[exp.Expr], tuple[Callable[[Any], bool], str]]
Rewrites: TypeAlias = Mapping[type[exp.Expr], Callable[[Any], exp.Expr | None]]

_KEY = re.compile(r"[^'?*\\]+")  # what both find in a path
_FORMAT = re.compile(r"(%(-[dmHIMSj]|[mdHMS]strict|[YymdHMSfbBaAIp%])|[^\w%'\[\]{}#])*")


def unlike(tree: exp.Expr, rules: Rules, names: Mapping[str, str]) -> tuple[exp.Expr, str] | None:
    """Return the first call in ``tree`` that ``rules``, ``names`` of functions or a mark tell of, and the reason."""
    for node in tree.walk():
        odd, said = rules.get(type(node), (never, ""))
        if isinstance(node, exp.Anonymous):
            said = names.get(node.name.lower(), "")
        elif not odd(node):
            said = node.meta_get(UNLIKE, "")
        if said:
            return node, said
    return None


def rewritten(tree: exp.Expr, rewrites: Rewrites) -> exp.Expr:
    """Return ``tree`` with what ``rewrites`` has for its nodes, inner ones first. Changes ``tree``."""
    for node in reversed(list(tree.walk())):
        rewrite = rewrites.get(type(node))
        found = rewrite(node) if rewrite is not None else None
        if found is not None:
            node.replace(found)
            tree = found if node is tree else tree
    return tree


def escaped(node: exp.Like | exp.ILike, by: str) -> exp.Expr | None:
    """Return ``node`` with the character that its dialect escapes by, where its pattern has a backslash."""
    pattern = node.expression
    if isinstance(node.parent, exp.Escape) or not pattern.is_string or "\\" not in pattern.name:
        return None
    return exp.Escape(this=node.copy(), expression=exp.Literal.string(by))


def always(_: exp.Expr) -> bool:
    """Be true of every node."""
    return True


def never(_: exp.Expr) -> bool:
    """Be true of no node."""
    return False


def whole_number(node: exp.Expr | None) -> int | None:
    """Return the whole number that ``node`` is, if it is one."""
    if isinstance(node, exp.Neg):
        found = whole_number(node.this)
        return None if found is None else -found
    known = isinstance(node, exp.Literal) and not node.is_string and node.name.isdigit()
    return int(node.name) if known and node is not None else None


def odd_path(node: exp.JSONExtract | exp.JSONExtractScalar) -> bool:
    """Tell whether a path into JSON has more than keys and places from the start."""
    path = node.expression
    for part in path.expressions if isinstance(path, exp.JSONPath) else (path,):
        if isinstance(part, exp.JSONPathKey) and isinstance(part.this, str) and _KEY.fullmatch(part.this):
            continue
        at = part.this if isinstance(part, exp.JSONPathSubscript) else None
        if not isinstance(part, exp.JSONPathRoot) and not (isinstance(at, int) and at >= 0):
            return True
    return False


def odd_end(node: exp.Left | exp.Right) -> bool:
    """Tell whether a count of characters is negative."""
    count = whole_number(node.expression)
    return count is not None and count < 0


def odd_start(node: exp.Substring) -> bool:
    """Tell whether a part of a text begins at a place below 1, or has a negative length."""
    start, length = whole_number(node.args.get("start")), node.args.get("length")
    if length is None:
        return False
    return (start is not None and start < 1) or (whole_number(length) or 0) < 0


def odd_character(node: exp.Chr) -> bool:
    """Tell whether a character may have a number of more than seven bits."""
    code = whole_number(node.expressions[0]) if len(node.expressions) == 1 else None
    return code is None or not 0 < code < 128


def odd_format(node: exp.Expr) -> bool:
    """Tell whether a format of times has words that the other engine may have no word for."""
    form = node.args.get("format")
    return form is not None and not (form.is_string and _FORMAT.fullmatch(form.name))


def odd_reading(node: exp.Expr) -> bool:
    """Tell whether a format that times are read by is such a one, or has years of two digits, which are of this
    century to Spark alone."""
    return odd_format(node) or "%y" in node.text("format")


def numbered(node: exp.Transform | exp.ArrayFilter) -> bool:
    """Tell whether a lambda takes the number of an element."""
    return isinstance(node.expression, exp.Lambda) and len(node.expression.expressions) > 1


# whichever engine the query was written for
BOTH: Rules = {
    exp.JSONExtractScalar: (odd_path, "it has other paths than keys and places from the start"),
    exp.JSONKeys: (always, "of what is no object, DuckDB has no keys and Spark NULL"),
    exp.Left: (odd_end, "of a negative count, DuckDB leaves so many characters out and Spark has none"),
    exp.Right: (odd_end, "of a negative count, DuckDB leaves so many characters out and Spark has none"),
    exp.Substring: (odd_start, "places below 1 and negative lengths are others"),
    exp.Chr: (odd_character, "Spark has 256 characters"),
    exp.TimeToStr: (odd_format, "it has other formats"),
    exp.StrToTime: (odd_reading, "it has other formats"),
    exp.AtTimeZone: (always, "DuckDB converts from the time zone, Spark to it"),
    exp.FromTimeZone: (always, "DuckDB converts from the time zone, Spark to it"),
    exp.Transform: (numbered, "DuckDB numbers elements from 1, Spark from 0"),
    exp.ArrayFilter: (numbered, "DuckDB numbers elements from 1, Spark from 0"),
    exp.ArrayDistinct: (always, "DuckDB leaves a NULL and the order out"),
    exp.Flatten: (always, "Spark has NULL where a list is NULL"),
    exp.Skewness: (always, "it is the sample's on DuckDB, the population's on Spark"),
    exp.Kurtosis: (always, "it is the sample's on DuckDB, the population's on Spark"),
    exp.Typeof: (always, "types have other names"),
}
NAMES = {
    "hash": "it has other values",
    "json_array_length": "of what is no array, DuckDB has 0 and Spark NULL",
    "map_concat": "Spark has NULL where a map is NULL",
    "printf": "Spark writes NULL as null",
    "time_bucket": "buckets begin elsewhere",
    "to_json": "Spark leaves out fields that are NULL",
    "url_decode": "to Spark, + is a blank",
    "url_encode": "Spark writes a blank as +",
}
