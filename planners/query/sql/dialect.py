"""Spark 4's SQL for sqlglot: what its own Spark dialect reads otherwise, or does not write as it was read."""

import re
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any, ClassVar, cast

import sqlglot.parser
from sqlglot import ErrorLevel, exp
from sqlglot.dialects.dialect import Dialect, UsingColumnOrder
from sqlglot.dialects.duckdb import DuckDB
from sqlglot.dialects.spark import Spark
from sqlglot.generator import Generator
from sqlglot.generators.duckdb import DuckDBGenerator
from sqlglot.generators.spark import SparkGenerator
from sqlglot.parsers.spark import SparkParser
from sqlglot.tokenizer_core import Token

from ebbflow.planners.errors import UnsupportedQueryError
from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.calls import (
    CUT_IF_ANY,
    FOR_DUCKDB,
    FOR_SPARK,
    OrderedPercentile,
    Percentile,
    cut_for_duckdb,
    cut_if_any_for_duckdb,
    of_group,
    rounded_for_spark,
    value_of,
    whole_units_for_duckdb,
)
from ebbflow.planners.query.sql.duckdbreader import BEHIND_AS, DuckDBReader, respelled, typed

_KEYED = re.compile(
    r"\b(map|json|variant)\b", re.IGNORECASE
)  # types by whose case of keys values are told apart
# their trees lose an argument, the type of the result, or its last digits: log10(1000) is 3, log(10, 1000) is not
_VERBATIM = ("LOG10", "PARSE_JSON", "TO_CHAR")


def _of_two(name: str, known: type[exp.Func]) -> Callable[[list[Any]], exp.Expr]:
    """Return a builder of calls that keeps a third argument, for which ``known`` has no place or Spark no words."""

    def build(args: list[Any]) -> exp.Expr:
        if len(args) == 2:
            return known.from_arg_list(args)
        return exp.AnonymousAggFunc(this=name, expressions=args)

    return build


_COUNTED = {"MAX_BY": exp.ArgMax, "MIN_BY": exp.ArgMin, "PERCENTILE": Percentile}


def _instant(args: list[Any], dialect: Dialect) -> exp.Expr:
    """Build a time with its zone, which sqlglot takes for one without."""
    if len(args) != 1:
        return cast("exp.Expr", SparkParser.FUNCTIONS["TO_TIMESTAMP"](args, dialect=dialect))
    return exp.cast(args[0], exp.DType.TIMESTAMPTZ)


def _to_date(writer: Generator, call: exp.TsOrDsToDate) -> str:
    """Keep the format ``yyyy-MM-dd``, which sqlglot leaves to a cast: one takes ``2020-1-1`` too."""
    form = writer.format_time(call)
    if form is None:
        return SparkGenerator.TRANSFORMS[exp.TsOrDsToDate](writer, call)
    return writer.func("TO_DATE", call.this, form)


def _map(writer: Generator, call: exp.ToMap) -> str:
    """Write DuckDB's ``MAP {key: value}``, whose keys are any expressions, not names of a struct's fields."""
    pairs = [part for one in call.this.expressions for part in (one.this, one.expression)]
    return writer.func("MAP", *pairs)


def _tokens(tokenize: Callable[[str], list[Token]], sql: str, *, duckdb: bool) -> list[Token]:
    """Return what ``tokenize`` makes of ``sql`` as an engine would."""
    tokens = tokenize(sql)
    while (again := respelled(sql, tokens, duckdb=duckdb)) != sql:
        sql, tokens = again, tokenize(again)
    return tokens


class Spark4(Spark):
    """Spark 4's SQL, where ``'O''Brien'`` has a quote in it and is not two strings in a row."""

    class Tokenizer(Spark.Tokenizer):
        STRING_ESCAPES: ClassVar = ["\\", "'", '"']

        def tokenize(self, sql: str) -> list[Token]:
            return _tokens(super().tokenize, sql, duckdb=False)

    class Parser(SparkParser):
        FUNCTIONS: ClassVar = {
            **{name: build for name, build in SparkParser.FUNCTIONS.items() if name not in _VERBATIM},
            **{name: _of_two(name, known) for name, known in _COUNTED.items()},
            "TO_TIMESTAMP": _instant,
            "TIMESTAMP": lambda args: exp.cast(args[0], exp.DType.TIMESTAMPTZ),
        }
        FUNCTION_PARSERS: ClassVar = {
            name: parse for name, parse in SparkParser.FUNCTION_PARSERS.items() if name not in _COUNTED
        }

        def _parse_type(
            self, parse_interval: bool = True, fallback_to_identifier: bool = False
        ) -> exp.Expr | None:
            start = self._index
            return typed(self, start, super()._parse_type(parse_interval, fallback_to_identifier))

    class Generator(SparkGenerator):
        TRANSFORMS: ClassVar = {
            **SparkGenerator.TRANSFORMS,
            **FOR_SPARK,
            exp.TsOrDsToDate: _to_date,
            exp.ToMap: _map,
            exp.DayOfWeekIso: lambda writer, call: f"EXTRACT(DAYOFWEEK_ISO FROM {writer.sql(call, 'this')})",
        }
        TYPE_MAPPING: ClassVar = {
            **SparkGenerator.TYPE_MAPPING,
            exp.DType.TIME: "TIME",
            exp.DType.TIMETZ: "TIME",
        }

        def cast_sql(self, expression: exp.Cast, safe_prefix: str | None = None) -> str:
            return super().cast_sql(rounded_for_spark(expression), safe_prefix)


class UsingInPlace(Spark):
    """Spark's rules for names, but ``*`` has the columns of USING and NATURAL at their places, as DuckDB's has."""

    USING_COLUMN_ORDER = UsingColumnOrder.IN_PLACE


_DIGITS: dict[str, tuple[int, ...]] = {
    "duckdb": (18, 3),
    "spark": (10, 0),
}  # of DECIMAL alone: all, and those behind the point
_DIVISOR = "divisor"  # marks a cast that DuckDB needs no word of
# what a word of DuckDB's may follow that sqlglot takes for an alias
_CALLS = (exp.AggFunc, exp.Anonymous, exp.Filter, exp.IgnoreNulls, exp.WithinGroup)
_ATOMS = (exp.Column, exp.Literal, exp.Paren, exp.Cast)  # what can stand behind a sign as it is


def divisor(tree: exp.Expr) -> exp.Cast:
    """Return what DuckDB's ``/`` divides by as other engines must be told: as a double."""
    found = exp.cast(tree, exp.DType.DOUBLE)
    found.meta[_DIVISOR] = True
    return found


def _view(writer: Generator, node: exp.Lateral) -> str:
    """Return LATERAL VIEW with all rows of OUTER, numbers of elements, and keys and values of maps."""
    held, alias = node.this, node.args.get("alias")
    names = [one.name for one in alias.columns] if alias else []
    known = isinstance(held, exp.Explode | exp.ExplodeOuter | exp.Posexplode | exp.PosexplodeOuter)
    numbered = isinstance(held, exp.Posexplode | exp.PosexplodeOuter)
    if not node.args.get("view") or not known or len(names) > 2 + numbered:
        return DuckDBGenerator.TRANSFORMS[exp.Lateral](writer, node)
    items = writer.sql(held, "this")
    names = names or (["pos", "col"] if numbered else ["col"])
    one = f"UNNEST({items})"
    if len(names) == 2 + numbered:  # of a map
        items = f"MAP_ENTRIES({items})"
        one = f"UNNEST({items}, max_depth := 2)"
    if numbered:
        one = f"UNNEST(RANGE(LEN({items}))), {one}"
    outer = bool(node.args.get("outer")) or isinstance(held, exp.ExplodeOuter | exp.PosexplodeOuter)
    table = exp.TableAlias(
        this=exp.to_identifier(alias.name if alias and alias.name else "_view"),
        columns=[exp.to_identifier(name) for name in names],
    )
    join = f"LATERAL (SELECT {one}) AS {writer.sql(table)}"
    return f" LEFT JOIN {join} ON TRUE" if outer else f" CROSS JOIN {join}"


class QuantileDuckDB(DuckDB):
    """DuckDB's SQL with its names for Spark's percentiles, and calls whose trees would lose their meaning as they
    are written."""

    def to_json_path(self, path: exp.Expr | None) -> exp.Expr | None:
        """Take for one key what begins neither as a path nor as a pointer, as DuckDB does; leave what sqlglot cannot
        read or would write as what it stands for: escapes and ``..``."""
        if isinstance(path, exp.Literal) and path.is_string and path.name:
            text = path.name
            if text[0] not in "$/" and not set(text) & set('*"\\') and "[#" not in text:
                return exp.JSONPath(expressions=[exp.JSONPathRoot(), exp.JSONPathKey(this=text)])
            if text[0] != "$" or ".." in text or "\\" in text:
                return path
        return super().to_json_path(path)

    INDEX_OFFSET = 0  # what is in brackets stays: of a map it is a key. See ``kept``

    class Tokenizer(DuckDB.Tokenizer):
        def tokenize(self, sql: str) -> list[Token]:
            return _tokens(super().tokenize, sql, duckdb=True)

    class Parser(DuckDBReader):
        pass

    class Generator(DuckDBGenerator):
        TRANSFORMS: ClassVar = {
            **DuckDBGenerator.TRANSFORMS,
            **FOR_DUCKDB,
            exp.Lateral: _view,
            exp.TimestampDiff: whole_units_for_duckdb,
            exp.UnixSeconds: lambda writer, call: f"CAST(FLOOR(EPOCH({writer.sql(call, 'this')})) AS BIGINT)",
            Percentile: lambda writer, call: writer.func("QUANTILE_CONT", call.this, call.expression),
        }
        IGNORE_NULLS_BEFORE_ORDER = False

        def bracket_offset_expressions(
            self, expression: exp.Bracket, index_offset: int | None = None
        ) -> list[exp.Expr]:
            return super().bracket_offset_expressions(expression, 1)

        def limitoptions_sql(self, expression: exp.LimitOptions) -> str:
            """Write ``%``: behind what is no number DuckDB does not read PERCENT."""
            return " %" if expression.args.get("percent") else super().limitoptions_sql(expression)

        def tablesample_sql(self, expression: exp.TableSample, tablesample_keyword: str | None = None) -> str:
            """Keep the method of a sample of so many rows, for which sqlglot would write another."""
            whole = isinstance(expression.parent, exp.Select)
            return Generator.tablesample_sql(
                self, expression, tablesample_keyword if whole else "TABLESAMPLE"
            )

        def ignorenulls_sql(self, expression: exp.IgnoreNulls) -> str:
            """Keep IGNORE NULLS of FIRST and LAST, which sqlglot's own generator leaves out."""
            call = of_group(expression.this)
            behind = isinstance(expression.parent, exp.Window) and expression.arg_key == "this"
            if isinstance(call, exp.First | exp.Last) and behind:
                return Generator.ignorenulls_sql(self, expression)
            if isinstance(call, exp.Last):
                return f"{self.sql(call)} FILTER (WHERE {self.sql(value_of(call))} IS NOT NULL)"
            return super().ignorenulls_sql(
                expression if call is expression.this else exp.IgnoreNulls(this=call)
            )

        def filter_sql(self, expression: exp.Filter) -> str:
            """Return an aggregate with its filter, which nulls that LAST ignores become a part of."""
            ignoring = expression.this
            call = of_group(ignoring.this) if isinstance(ignoring, exp.IgnoreNulls) else None
            if not isinstance(call, exp.Last):
                return super().filter_sql(expression)
            there = value_of(call).copy().is_(exp.null()).not_()
            kept = exp.and_(there, expression.expression.this.copy())
            return self.sql(exp.Filter(this=call.copy(), expression=exp.Where(this=kept)))

        def firstvalue_sql(self, expression: exp.FirstValue) -> str:
            return self.function_fallback_sql(of_group(expression))

        def lastvalue_sql(self, expression: exp.LastValue) -> str:
            return self.function_fallback_sql(of_group(expression))

        def reduce_sql(self, expression: exp.Reduce) -> str:
            """Return a reduction with what Spark applies to its result, for which DuckDB's has no place."""
            finish = expression.args.get("finish")
            if finish is None:
                return super().reduce_sql(expression)
            whole = expression.copy()
            whole.set("finish", None)
            finished = f"LIST_TRANSFORM([{self.sql(whole)}], {self.sql(finish)})[1]"
            return f"CASE WHEN {self.sql(expression, 'this')} IS NOT NULL THEN {finished} END"

        def cast_sql(self, expression: exp.Cast, safe_prefix: str | None = None) -> str:
            """Return a cast; of a divisor what is divided by."""
            if expression.meta_get(CUT_IF_ANY):
                return cut_if_any_for_duckdb(self, expression, safe_prefix or "")
            if not expression.meta_get(_DIVISOR):
                return super().cast_sql(cut_for_duckdb(expression), safe_prefix)
            divisor = self.sql(expression, "this")
            return divisor if isinstance(expression.this, _ATOMS) else f"({divisor})"


def spark_sql(tree: exp.Expr, **options: Any) -> str:
    """Return ``tree`` as Spark 4's SQL, without comments; ``options`` are those of sqlglot's generator."""
    return tree.sql(Spark4, **{"comments": False, "unsupported_level": ErrorLevel.IGNORE, **options})


def duckdb_sql(tree: exp.Expr, **options: Any) -> str:
    """Return ``tree`` as DuckDB's SQL, without comments; ``options`` are those of sqlglot's generator."""
    return tree.sql(QuantileDuckDB, **{"comments": False, "unsupported_level": ErrorLevel.IGNORE, **options})


def check_interpreted() -> None:
    """Raise ``UnsupportedQueryError`` where sqlglot runs compiled: no class of Python can extend its parsers then."""
    where = sqlglot.parser.__file__
    if where.endswith(tuple(EXTENSION_SUFFIXES)):
        raise UnsupportedQueryError(
            f"SQL cannot be read with sqlglot's compiled form ({where}): its dialects cannot be extended. "
            f"Run: pip uninstall sqlglotc"
        )


def kept(tree: exp.Expr, dialect: str) -> exp.Expr:
    """Return ``tree``, as parsed from ``dialect``, such that it can be written without a change of meaning.

    Raises ``UnsupportedQueryError`` for words that sqlglot takes for names.
    """
    for group in list(tree.find_all(exp.WithinGroup)):
        if isinstance(group.this, exp.PercentileCont | exp.PercentileDisc):
            group.replace(OrderedPercentile(this=group.this, expression=group.expression))
    for hint in tree.find_all(exp.JoinHint):  # names of tables or aliases: none is read for them
        hint.set("expressions", [exp.to_identifier(one.name) for one in hint.expressions])
    digits = _DIGITS.get(dialect.lower(), ())
    for kind in tree.find_all(exp.DataType):
        if digits and kind.this == exp.DType.DECIMAL and not kind.expressions:
            kind.set("expressions", [exp.DataTypeParam(this=exp.Literal.number(n)) for n in digits])
    if dialect.lower() == "spark":
        for place, table in enumerate(tree.find_all(exp.Table)):
            of_numbers = isinstance(table.this, exp.Anonymous) and table.this.name.lower() == "range"
            if of_numbers and not table.alias_column_names:  # to DuckDB its column has another name
                alias = table.args.get("alias") or exp.TableAlias(this=exp.to_identifier(f"range_{place}"))
                alias.set("columns", [exp.to_identifier("id")])
                table.set("alias", alias)
        for call in tree.find_all(exp.GroupConcat):
            if call.args.get("separator") is None:  # else sqlglot writes a comma
                call.set("separator", exp.Literal.string(""))
    if dialect.lower() == "duckdb":
        for bracket in tree.find_all(exp.Bracket):
            bracket.set("offset", 1)
        for alias in tree.find_all(exp.Alias):
            name = alias.args["alias"]
            bare = isinstance(name, exp.Identifier) and not name.quoted and not alias.meta.get(BEHIND_AS)
            if alias.alias.upper() == "EXPORT_STATE" and bare and isinstance(alias.this, _CALLS):
                raise UnsupportedQueryError(
                    f"EXPORT_STATE behind an aggregate cannot be read; a column may be called so behind AS: "
                    f"{duckdb_sql(alias)[:80]!r}"
                )
        fields = [node.this for node in tree.find_all(exp.PropertyEQ) if isinstance(node.parent, exp.Struct)]
        fields += [node.this for kind in tree.find_all(exp.DataType) for node in kind.find_all(exp.ColumnDef)]
        fields += [node.expression for node in tree.find_all(exp.Dot)]
        unpivots = [pivot for pivot in tree.find_all(exp.Pivot) if pivot.unpivot]
        fields += [one.args["alias"] for pivot in unpivots for one in pivot.find_all(exp.PivotAlias)]
        for field in fields:
            field.meta["case_sensitive"] = (
                True  # names in rows, and those that are values, are data: no pass turns them to lower case
            )
    for column in tree.find_all(exp.Column):
        for part in column.parts[1:]:  # keys of maps and JSON look like columns until names are resolved
            part.meta["written"] = part.name
    for dot in tree.find_all(exp.Dot):
        if isinstance(dot.expression, exp.Identifier):
            dot.expression.meta["written"] = dot.expression.name
    return tree


def restored(tree: exp.Query, catalogue: Catalogue, *, one_spelling: bool) -> exp.Query:
    """Give what follows columns behind dots in ``tree``, qualified after ``kept``, the case that it was written in:
    to a map or to JSON another case is another key. With ``one_spelling`` fields of structs have one, as Spark takes
    them, while DuckDB does not take two spellings of a grouped field for the same. Changes ``tree``."""
    structs = {
        column.lower()
        for table in catalogue.tables.values()
        for column, kind in table.columns
        if kind.lower().startswith("struct") and not _KEYED.search(kind)
    }
    for dot in tree.find_all(exp.Dot):
        root = dot.this
        while isinstance(root, exp.Dot | exp.Paren):
            root = root.this
        if one_spelling and isinstance(root, exp.Column) and root.name.lower() in structs:
            continue
        if written := dot.expression.meta.get("written"):
            dot.expression.set("this", written)
    return tree
