"""Which averages can be put together from the sums and counts of parts."""

from collections.abc import Callable

from sqlglot import exp
from sqlglot.errors import SqlglotError

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.views.column_types import Families
from ebbflow.planners.query.views.views import View

# Spark keeps ten digits more for a sum. Divided by a count, whose type has 20, one of more than 34 digits leaves
# fewer digits after the point than Spark's own average has, which divides without a type between.
_DIGITS = 24
# Spark averages integers in floating point: sums of these take 2^32 rows to overflow, of bigints perhaps two.
_NARROW = (exp.DType.TINYINT, exp.DType.SMALLINT, exp.DType.INT, exp.DType.FLOAT, exp.DType.DOUBLE)
_INTEGERS = 2**31  # literals from here on are bigints
_ARITHMETIC = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Neg, exp.Abs)

_Kind = Callable[[exp.Column], exp.DataType | None]


def averages_add_up(view: View, catalogue: Catalogue, families: Families) -> bool:
    """Tell whether each average of ``view`` itself may be a sum over a count: with all digits, without overflow."""
    for select in view.selects():
        sources = {t.alias_or_name: t.name for t in select.find_all(exp.Table) if t.parent_select is select}

        def kind(column: exp.Column, sources: dict[str, str] = sources) -> exp.DataType | None:
            return _kind(view, catalogue, families, sources.get(column.table, ""), column.name)

        calls = [call for call in select.find_all(exp.Avg) if call.parent_select is select]
        if not all(_narrow(call.this, kind) for call in calls):
            return False
    return True


def _kind(
    view: View, catalogue: Catalogue, families: Families, source: str, column: str
) -> exp.DataType | None:
    if source in view.reads_views:  # of its types only the families are sure
        return exp.DataType.build("double") if families.get(source, {}).get(column) == "real" else None
    table = catalogue.get(source)
    written = next((t for n, t in table.columns if n.lower() == column), None) if table is not None else None
    try:
        return exp.DataType.build(written, dialect="spark") if written is not None else None
    except SqlglotError:
        return None


def _narrow(node: exp.Expr | None, kind: _Kind, digits: int = _DIGITS) -> bool:
    """Tell whether a value of ``node`` is a number, but no bigint and no decimal of more than ``digits`` digits."""
    node = node.unnest() if node is not None else exp.Null()
    if isinstance(node, exp.Literal | exp.Null):
        return not node.is_int or int(node.name) < _INTEGERS
    if isinstance(node, exp.Column | exp.Cast):
        found = kind(node) if isinstance(node, exp.Column) else node.to
        if found is None or found.this != exp.DType.DECIMAL:
            return found is not None and found.this in _NARROW
        return bool(found.expressions) and int(found.expressions[0].name) <= digits
    if isinstance(node, exp.Case):
        values = [node.args.get("default"), *(branch.args["true"] for branch in node.args["ifs"])]
    elif isinstance(node, exp.If):
        values = [node.args["true"], node.args.get("false")]
    elif isinstance(node, exp.Coalesce):
        values = [node.this, *node.expressions]
    elif isinstance(node, _ARITHMETIC):  # with decimals, more digits than either operand has
        values, digits = [node.this, node.args.get("expression")], 0
    else:
        return False
    return all(_narrow(value, kind, digits) for value in values)
