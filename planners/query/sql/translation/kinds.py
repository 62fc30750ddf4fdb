"""The types of what a query computes, as far as they are known."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.annotate_types import annotate_types

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.calls import OrderedPercentile, Percentile

_FAILURES = (AssertionError, AttributeError, LookupError, TypeError, ValueError)  # sqlglot's own, on some SQL
_LOCAL = exp.DType.TIMESTAMP  # a time without a zone: to sqlglot's coercions TIMESTAMP_NTZ is none
_UNKNOWN = exp.DType.UNKNOWN
_OF_NAMES = {  # of functions that sqlglot does not know
    **dict.fromkeys(
        ("now", "current_timestamp", "get_current_timestamp", "transaction_timestamp"), exp.DType.TIMESTAMPTZ
    ),
    **dict.fromkeys(("current_date", "curdate", "today"), exp.DType.DATE),
    **dict.fromkeys(("localtimestamp", "current_localtimestamp"), _LOCAL),
    **dict.fromkeys(("conv", "current_user", "user", "session_user", "uuid"), exp.DType.TEXT),
    **dict.fromkeys(("bin", "format_number", "input_file_name", "json_tuple", "version"), exp.DType.TEXT),
    **dict.fromkeys(("every", "isnotnull", "isnull", "luhn_check"), exp.DType.BOOLEAN),
    **dict.fromkeys(("crc32", "monotonically_increasing_id"), exp.DType.BIGINT),
    **dict.fromkeys(("cardinality", "json_array_length", "regexp_count", "width_bucket"), exp.DType.INT),
}


def annotated(query: exp.Query, catalogue: Catalogue, dialect: str) -> bool:
    """Give the nodes of ``query`` their types; tell whether that was possible. Changes ``query``, whose columns need
    not be under their tables: then they have the type that all tables' columns of their name have."""
    types = {
        table: {column: _type(kind) for column, kind in columns.items()}
        for table, columns in catalogue.schema().items()
    }
    schema: Any = types
    for literal in list(query.find_all(exp.Literal)):
        if literal.is_number and "." in literal.name and "e" not in literal.name.lower():
            literal.replace(exp.cast(literal.copy(), exp.DType.DECIMAL))  # to sqlglot it is a double
    for one in query.find_all(exp.DataType):
        if one.this == exp.DType.TIMESTAMPNTZ:
            one.set("this", _LOCAL)
    named: dict[str, list[exp.DataType]] = {}
    for columns in types.values():
        for name, kind in columns.items():
            named.setdefault(name.lower(), []).append(kind)
    for column in list(query.find_all(exp.Column)):
        found = [] if column.table else named.get(column.name.lower(), [])
        if found and all(one == found[0] for one in found):
            column.replace(exp.cast(column.copy(), found[0].copy()))
    of_dialect = _of_spark() if dialect.lower() == "spark" else _of_duckdb()
    rules: Any = {**Spark.EXPRESSION_METADATA, **of_dialect}
    try:
        annotate_types(query, schema=schema, expression_metadata=rules, dialect="spark")
    except (SqlglotError, *_FAILURES):
        return False
    return True


def kind_of(value: exp.Expr) -> exp.DType:
    """Return the type of an annotated node; of a lambda's parameter that of the list's elements."""
    while isinstance(value, exp.Paren):
        value = value.this
    found = value.type
    if isinstance(value, exp.Column) and value.table:
        views = (
            one for one in value.root().find_all(exp.Lateral) if one.alias.lower() == value.table.lower()
        )
        view = next(views, None)
        if view is not None and isinstance(view.this, exp.Explode | exp.Posexplode):
            found = _exploded(value, view)  # sqlglot takes the first column for all of the list or map
    elif isinstance(value, exp.Column | exp.Identifier) and (found is None or found.this == _UNKNOWN):
        found = _of_parameter(value)
    return found.this if found is not None else _UNKNOWN


def element_of(value: exp.Expr) -> exp.DType:
    """Return the type of the elements of an annotated node, a list."""
    found = _element(value.type)
    return found.this if found is not None else _UNKNOWN


def is_parameter(value: exp.Expr) -> bool:
    """Tell whether ``value`` is a parameter of a lambda."""
    name, node = value.name.lower(), value.parent
    while node is not None and not isinstance(node, exp.Query):
        if isinstance(node, exp.Lambda) and name in {one.name.lower() for one in node.expressions}:
            return True
        node = node.parent
    return False


def _of_parameter(value: exp.Expr) -> exp.DataType | None:
    node = value.find_ancestor(exp.Lambda)
    if node is None or not isinstance(
        node.parent, exp.Transform | exp.ArrayFilter | exp.ArrayAny | exp.ArrayAll
    ):
        return None
    if not node.expressions or node.expressions[0].name.lower() != value.name.lower():
        return None
    return _element(node.parent.this.type)


def _exploded(column: exp.Column, view: exp.Lateral) -> exp.DataType | None:
    """Return the type of a column of LATERAL VIEW, whose last ones are the elements, or keys and values."""
    kind = view.this.this.type
    of_map = kind is not None and kind.this == exp.DType.MAP
    held = kind.expressions if kind is not None and of_map else [_element(kind)]
    names = [name.lower() for name in view.alias_column_names]
    place = names.index(column.name.lower()) - len(names) if column.name.lower() in names else 0
    if not -len(held) <= place < 0:
        return exp.DType.INT.into_expr() if place else None  # the number of an element
    return held[place]


def _element(kind: exp.DataType | None) -> exp.DataType | None:
    held = kind.expressions if kind is not None and kind.this in (exp.DType.ARRAY, exp.DType.LIST) else []
    return held[0] if held and isinstance(held[0], exp.DataType) else None


def _type(kind: str) -> exp.DataType:
    try:
        found = exp.DataType.build(kind, dialect="spark")
    except (SqlglotError, *_FAILURES):
        return _UNKNOWN.into_expr()
    for one in found.find_all(exp.DataType):
        if one.this == exp.DType.TIMESTAMPNTZ:
            one.set("this", _LOCAL)
    return found


# --- what sqlglot has otherwise -------------------------------------------------------------------------------


def _like_first(self: Any, node: exp.Expr) -> exp.Expr:
    self._set_type(node, node.this.type or _UNKNOWN)
    return node


def _like_element(self: Any, node: exp.Expr) -> exp.Expr:
    self._set_type(node, _element(node.this.type) or _UNKNOWN)
    return node


def _list(self: Any, node: exp.Expr) -> exp.Expr:
    self._annotate_by_args(node, "this", array=True)
    return node


def _ordered(self: Any, node: OrderedPercentile) -> exp.Expr:
    key = node.expression.expressions[0].this if node.expression.expressions else node
    exact = isinstance(node.this, exp.PercentileDisc)
    self._set_type(node, key.type or _UNKNOWN if exact else exp.DType.DOUBLE)
    return node


def _looked_up(self: Any, node: exp.Bracket) -> exp.Expr:
    kind, keys = node.this.type, node.expressions
    held = kind.expressions if kind is not None else []
    if kind is not None and kind.this == exp.DType.MAP and len(held) == 2:
        self._set_type(node, held[1])
    elif kind is not None and kind.this == exp.DType.STRUCT and len(keys) == 1 and keys[0].is_string:
        kinds = [one.kind for one in held if one.name.lower() == keys[0].name.lower()]
        self._set_type(node, kinds[0] if kinds and kinds[0] is not None else _UNKNOWN)
    else:
        self._annotate_bracket(node)
    return node


def _like_start(self: Any, node: exp.Reduce) -> exp.Expr:
    start = node.args.get("initial") if node.args.get("finish") is None else None
    self._set_type(node, start.type or _UNKNOWN if start is not None else _UNKNOWN)
    return node


def _called(self: Any, node: exp.Anonymous) -> exp.Expr:
    self._set_type(node, _OF_NAMES.get(node.name.lower(), _UNKNOWN))
    return node


def _quotient(self: Any, node: exp.Div) -> exp.Expr:
    """DuckDB divides decimals as doubles, and Spark's quotients of them have other digits."""
    self._annotate_div(node)
    if node.type is not None and node.type.this == exp.DType.DECIMAL:
        self._set_type(node, exp.DType.DOUBLE)
    return node


def _whole(self: Any, node: exp.Floor | exp.Ceil) -> exp.Expr:
    known = node.this.type is not None and node.this.type.this == exp.DType.DECIMAL
    self._set_type(node, node.this.type if known or node.args.get("decimals") else exp.DType.BIGINT)
    return node


def _whole_of_duckdb(self: Any, node: exp.Floor | exp.Ceil) -> exp.Expr:
    known = node.this.type is not None and node.this.type.this in (exp.DType.DECIMAL, _UNKNOWN)
    self._set_type(node, node.this.type if known else exp.DType.DOUBLE)
    return node


def _moved(self: Any, node: exp.Expr) -> exp.Expr:
    """To DuckDB a date that an interval is added to is a time."""
    if isinstance(node, exp.Binary):
        self._annotate_binary(node)
    else:
        self._set_type(node, node.this.type or _UNKNOWN)
    parts = (node.this, node.expression)
    moved = any(one.is_type(exp.DType.INTERVAL) or isinstance(one, exp.Interval) for one in parts)
    if moved and node.is_type(exp.DType.DATE):
        self._set_type(node, _LOCAL)
    return node


_Rules: TypeAlias = dict[Any, dict[str, Any]]


def _annotating(rules: Mapping[Any, Callable[..., exp.Expr]]) -> _Rules:
    return {kind: {"annotator": rule} for kind, rule in rules.items()}


def _of_both() -> _Rules:
    return {
        Percentile: {"returns": exp.DType.DOUBLE},
        exp.Median: {"returns": exp.DType.DOUBLE},
        exp.SplitPart: {"returns": exp.DType.TEXT},
        exp.Uuid: {"returns": exp.DType.TEXT},
        exp.RegexpCount: {"returns": exp.DType.INT},
        exp.ArrayPosition: {"returns": exp.DType.BIGINT},
        exp.EqualNull: {"returns": exp.DType.BOOLEAN},
    } | _annotating({
        OrderedPercentile: _ordered,
        exp.Round: _like_first,
        exp.ArgMax: _like_first,
        exp.ArgMin: _like_first,
        exp.Mode: _like_first,
        exp.Reduce: _like_start,
        exp.ArrayMax: _like_element,
        exp.ArrayMin: _like_element,
        exp.ArrayUniqueAgg: _list,
        exp.Anonymous: _called,
        exp.Bracket: _looked_up,
        exp.Div: _quotient,
    })  # fmt: skip


def _of_spark() -> _Rules:
    times = (exp.CurrentTimestamp, exp.DateTrunc, exp.TimestampTrunc, exp.UnixToTime)
    known: _Rules = {kind: {"returns": exp.DType.TIMESTAMPTZ} for kind in times}
    return _of_both() | known | _annotating({exp.Floor: _whole, exp.Ceil: _whole})


def _of_duckdb() -> _Rules:
    rules: dict[Any, Any] = {
        exp.Floor: _whole_of_duckdb,
        exp.Ceil: _whole_of_duckdb,
        exp.Add: _moved,
        exp.Sub: _moved,
    }
    return _of_both() | {exp.UnixToTime: {"returns": exp.DType.TIMESTAMPTZ}} | _annotating(rules)
