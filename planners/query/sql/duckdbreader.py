"""DuckDB's SQL for sqlglot: what its own parser reads otherwise than DuckDB."""

import re
from collections.abc import Callable
from typing import Any, ClassVar, cast

from sqlglot import TokenType, exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.parser import Parser
from sqlglot.parsers.duckdb import DuckDBParser
from sqlglot.tokenizer_core import Token

BEHIND_AS = "behind_as"  # marks an alias that is written with AS
# sqlglot compares the names in capitals, drops an argument or takes it for a name
_VERBATIM = ("DECODE", "FORMAT", "JARO_WINKLER_SIMILARITY", "LOG10", "TIME_BUCKET")
_OF_UNIT = ("DATEDIFF", "DATETRUNC", "DATE_DIFF", "DATE_TRUNC")
_ORDERED = ("BOOL_AND", "BOOL_OR")
_OF_OPTIONS = {
    "REGEXP_EXTRACT": "cims",
    "REGEXP_EXTRACT_ALL": "cims",
    "REGEXP_REPLACE": "cgims",
}  # that are kept
_INTERVAL = re.compile(r"\s*-?\d+(\.\d+)?\s*[a-zA-Z]+\s*")  # of one unit


def _of_text(name: str, known: Callable[[list[Any]], exp.Expr]) -> Callable[[list[Any]], exp.Expr]:
    """Return a builder of calls whose unit is a text; a column in its place has a unit's name at most by chance."""

    def build(args: list[Any]) -> exp.Expr:
        literal = bool(args) and isinstance(args[0], exp.Literal)
        return known(args) if literal else exp.Anonymous(this=name, expressions=args)

    return build


def _unordered(name: str, known: Callable[[list[Any]], exp.Expr]) -> Callable[[list[Any]], exp.Expr]:
    """Return a builder of calls of an aggregate that sqlglot would write a cast around, its order or DISTINCT and
    all."""

    def build(args: list[Any]) -> exp.Expr:
        verbatim = any(isinstance(arg, exp.Order | exp.Distinct) for arg in args)
        return exp.AnonymousAggFunc(this=name, expressions=args) if verbatim else known(args)

    return build


def _with_options(name: str, options: str) -> Callable[[list[Any], Dialect], exp.Expr]:
    """Return a builder of calls that keeps what sqlglot would leave out: options of a pattern that only DuckDB has,
    as ``l`` for a text that is no pattern."""
    known: Any = DuckDBParser.FUNCTIONS[name]
    takes_dialect = "dialect" in known.__code__.co_varnames

    def build(args: list[Any], dialect: Dialect) -> exp.Expr:
        if len(args) == 4 and not (args[3].is_string and set(args[3].name) <= set(options)):
            return exp.Anonymous(this=name, expressions=args)
        return cast("exp.Expr", known(args, dialect=dialect) if takes_dialect else known(args))

    return build


def _packed(args: list[Any]) -> exp.Expr:
    """Build a struct; fields without names are called as the columns are that they are of."""
    if args and all(isinstance(arg, exp.PropertyEQ) for arg in args):
        return exp.Struct(expressions=args)
    return exp.Anonymous(this="STRUCT_PACK", expressions=args)


def _reduced(args: list[Any]) -> exp.Expr:
    """Build a call of ``reduce``, whose lambda comes before the initial value, where there is one."""
    if len(args) != 3:
        return exp.Anonymous(this="LIST_REDUCE", expressions=args)
    return exp.Reduce(this=args[0], initial=args[2], merge=args[1])  # in the order in which Spark is told


def _extracted(reader: Any, this: exp.Expr, path: exp.Expr) -> exp.Expr:
    """Build ``this -> path``, whose path takes in what is put behind it by ``||``."""
    while reader._match(TokenType.DPIPE):
        path = reader.expression(exp.DPipe(this=path, expression=reader._parse_term(), safe=True))
    return cast("exp.Expr", DuckDBParser.JSON_OPERATORS[TokenType.ARROW](reader, this, path))


def _positive(reader: Any) -> exp.Expr | None:
    """Build ``+x``, which is called otherwise than ``x``."""
    found = reader._parse_unary()
    return exp.paren(found, copy=False) if isinstance(found, exp.Column) else found


_TAKE_LAMBDAS = frozenset({
    "apply", "array_apply", "array_filter", "array_reduce", "array_transform", "filter", "invoke", "list_apply",
    "list_filter", "list_reduce", "list_transform", "reduce",
})  # fmt: skip
_BEHIND_ROWS = (TokenType.ORDER_BY, TokenType.LIMIT, TokenType.OFFSET)
_OPENING: dict[TokenType, int] = {TokenType.L_PAREN: 1, TokenType.L_BRACKET: 1, TokenType.L_BRACE: 1}
_CLOSING: dict[TokenType, int] = {TokenType.R_PAREN: -1, TokenType.R_BRACKET: -1, TokenType.R_BRACE: -1}


class DuckDBReader(DuckDBParser):
    """DuckDB's parser."""

    FUNCTIONS: ClassVar = {
        **{name: build for name, build in DuckDBParser.FUNCTIONS.items() if name not in _VERBATIM},
        **{name: _of_text(name, DuckDBParser.FUNCTIONS[name]) for name in _OF_UNIT},
        **{name: _unordered(name, DuckDBParser.FUNCTIONS[name]) for name in _ORDERED},
        **{name: _with_options(name, options) for name, options in _OF_OPTIONS.items()},
        "REDUCE": _reduced,
        "STRUCT_PACK": _packed,
    }
    JSON_OPERATORS: ClassVar = {**DuckDBParser.JSON_OPERATORS, TokenType.ARROW: _extracted}
    PLACEHOLDER_PARSERS: ClassVar = {
        kind: parse for kind, parse in DuckDBParser.PLACEHOLDER_PARSERS.items() if kind is not TokenType.COLON
    }  # a colon is a slice's
    UNARY_PARSERS: ClassVar = {**DuckDBParser.UNARY_PARSERS, TokenType.PLUS: _positive}
    NO_PAREN_FUNCTIONS: ClassVar = {}  # a column, where there is one of such a name: see ``valuefunctions``

    def _parse_lambda(self, alias: bool = False) -> exp.Expr | None:
        """Take ``->`` for a lambda only in calls that have one: elsewhere it looks into JSON."""
        arrow = self._next is not None and self._next.token_type is TokenType.ARROW
        if not arrow and self._curr.token_type is not TokenType.L_PAREN:
            return super()._parse_lambda(alias=alias)
        known: Any = self.LAMBDAS
        every: Any = DuckDBReader.LAMBDAS
        named = {kind: build for kind, build in every.items() if kind is not TokenType.ARROW}
        self.LAMBDAS = every if self._called() in _TAKE_LAMBDAS else named  # type: ignore[misc]
        try:
            return super()._parse_lambda(alias=alias)
        finally:
            self.LAMBDAS = known  # type: ignore[misc]

    def _parse_type(
        self, parse_interval: bool = True, fallback_to_identifier: bool = False
    ) -> exp.Expr | None:
        """Take a word such as ``text`` or ``str`` with a subscript for a column, and one such as ``range`` before
        ``<``: no cast begins so."""
        kind = self._curr.token_type if self._curr is not None else None
        after = self._next.token_type if self._next is not None else None
        nested = kind in self.NESTED_TYPE_TOKENS
        if kind in self.TYPE_TOKENS and after is (TokenType.LT if nested else TokenType.L_BRACKET):
            return self._parse_column()
        start = self._index
        return typed(self, start, super()._parse_type(parse_interval, fallback_to_identifier))

    def _parse_types(self, *args: Any, **options: Any) -> exp.Expr | None:
        """Take ``INTEGER ARRAY`` for an array's type; sqlglot does not at a query's end or before a comma."""
        found = super()._parse_types(*args, **options)
        whole = not isinstance(found, exp.DataType) or found.this == exp.DType.ARRAY
        if not whole and (self._prev.token_type is TokenType.ARRAY or self._match(TokenType.ARRAY)):
            return exp.DataType(this=exp.DType.ARRAY, expressions=[found], nested=True)
        return found

    def _parse_primary(self) -> exp.Expr | None:
        """Keep ``.5`` as it is: ``0.5`` has one more digit."""
        if self._match_pair(TokenType.DOT, TokenType.NUMBER):
            return exp.Literal.number(f".{self._prev.text}")
        return super()._parse_primary()

    def _parse_paren(self) -> exp.Expr | None:
        """Take ``(x,)`` for a row; sqlglot would write it as ``(x)``."""
        found = super()._parse_paren()
        if isinstance(found, exp.Tuple) and len(found.expressions) == 1:
            return exp.Anonymous(this="ROW", expressions=found.expressions)
        return found

    def _parse_interval(self, require_interval: bool = True, parse_function_unit: bool = True) -> Any:
        """Take no text behind an interval for a second one."""
        start = self._index
        found = super()._parse_interval(require_interval, parse_function_unit)
        if not isinstance(found, exp.Add):
            return found
        self._retreat(start)
        self._match(TokenType.INTERVAL)
        string = self._match(TokenType.STRING, advance=False)
        this: Any = self._parse_primary() if string else self._parse_term()
        return self._parse_interval_span(this, parse_function_unit=parse_function_unit)

    def _parse_interval_span(self, this: exp.Expr, parse_function_unit: bool = True) -> exp.Interval:
        """Keep a text that says more than a number and a unit, such as ``1 month ago``."""
        found = super()._parse_interval_span(this, parse_function_unit)
        text = this.name if this is not None and this.is_string else ""
        more = bool(re.search("[a-zA-Z]", text)) and not _INTERVAL.fullmatch(text)
        return exp.Interval(this=exp.Literal.string(text)) if more and found.args.get("unit") else found

    def _parse_alias(self, this: exp.Expr | None, explicit: bool = False) -> exp.Expr | None:
        """Mark an alias that stands behind AS, and so is no word of its call."""
        behind = self._curr is not None and self._curr.token_type is TokenType.ALIAS
        found = super()._parse_alias(this, explicit)
        if behind and isinstance(found, exp.Alias) and found is not this:
            found.meta[BEHIND_AS] = True
        return found

    def _parse_simplified_pivot(self, is_unpivot: bool | None = None) -> Any:
        """Take what orders or bounds the rows of PIVOT ... ON, which sqlglot does not.

        Before: ``PIVOT t ON k USING sum(n) LIMIT 1``; after: ``SELECT * FROM (PIVOT ...) LIMIT 1``.
        """
        pivot = super()._parse_simplified_pivot(is_unpivot)
        if self._curr is None or self._curr.token_type not in _BEHIND_ROWS:
            return pivot
        return self._parse_query_modifiers(exp.select("*").from_(exp.Subquery(this=pivot)))

    def _called(self) -> str:
        """Return the name of the call whose arguments are read."""
        depth = 0
        for place in range(self._index - 1, 0, -1):
            kind = self._tokens[place].token_type
            depth -= _OPENING.get(kind, 0) + _CLOSING.get(kind, 0)
            if depth < 0:
                return str(self._tokens[place - 1].text).lower()
        return ""


_BEHIND_LITERALS = (exp.Cast, exp.Bracket, exp.Dot, exp.JSONExtract, exp.JSONExtractScalar)


def typed(reader: Parser, start: int, found: exp.Expr | None) -> exp.Expr | None:
    """Return what ``reader`` has ``found`` from the token at ``start`` on, with a literal behind its type that has
    this type alone: sqlglot gives it to what follows the literal too.

    Before: ``DATE ('2020-01-01'::TIMESTAMP)``; after: ``(DATE '2020-01-01')::TIMESTAMP``.
    """
    after = reader._tokens[start + 1].token_type if start + 1 < len(reader._tokens) else None
    begins = reader._tokens[start].token_type in reader.TYPE_TOKENS if after is not None else False
    if not begins or after is TokenType.L_PAREN or not isinstance(found, exp.Cast):
        return found
    whole: exp.Expr = found.this
    first = whole
    while isinstance(first, _BEHIND_LITERALS):
        first = first.this
    if first is whole or not isinstance(first, exp.Literal):
        return found
    first.replace(exp.Cast(this=first.copy(), to=found.to))
    return whole


_SPACES = re.compile("[\u200b\u2060\ufeff]")  # that are none to Python
_REST = re.compile(r"([\d._]+[eE][+-]?\d+)([+-])")  # a number, and the sign of the next


def respelled(sql: str, tokens: list[Token], *, duckdb: bool) -> str:
    """Return ``sql`` with blanks where sqlglot takes two words or numbers for one: ``1e3+1e3``, and around what only
    ``duckdb`` has for a space."""
    for token in reversed(tokens):
        before = after = sql[token.start : token.end + 1]
        if token.token_type in (TokenType.NUMBER, TokenType.VAR):
            after = _REST.sub(r"\1 \2", before)
            after = _SPACES.sub(" ", after) if duckdb else after
        if after != before:
            sql = sql[: token.start] + after + sql[token.end + 1 :]
    return sql
