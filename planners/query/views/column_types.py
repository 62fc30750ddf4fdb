"""Types of columns, as far as equality needs them: which columns may share an equality class."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias, cast

from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.annotate_types import annotate_types

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.dialect import spark_sql
from ebbflow.planners.query.views.views import View, ViewChain

# Per table or view, per column, the family of the column's type. Within a family equality is transitive,
# whatever an engine converts to compare; between families it is not: '1' = 1 and 1 = '01', but '1' <> '01'.
Families: TypeAlias = Mapping[str, Mapping[str, str]]

_MEMBERS = {
    "exact": (*exp.DataType.INTEGER_TYPES, exp.DType.DECIMAL),
    "real": (exp.DType.FLOAT, exp.DType.DOUBLE),
    # not CHAR: it equals literals that its padded value does not equal in another column
    "text": (exp.DType.TEXT, exp.DType.VARCHAR, exp.DType.NVARCHAR),
}
_FAMILY = {member: family for family, members in _MEMBERS.items() for member in members}
_UNKNOWN = (exp.DType.UNKNOWN, exp.DType.NULL)


def families(chain: ViewChain, catalogue: Catalogue) -> Mapping[str, Families]:
    """Return per view the families of the tables and views that it reads; unknown types are left out."""
    schema = {
        table: {column.lower(): kind for column, kind in columns.items()}
        for table, columns in catalogue.schema().items()
    }
    found = {
        table: {c: family for c, kind in columns.items() if (family := _named_family(kind)) is not None}
        for table, columns in schema.items()
    }
    out: dict[str, Families] = {}
    for view in chain.views:
        reads = (*view.reads_tables, *view.reads_views)
        out[view.name] = {name: found[name] for name in reads if name in found}
        # from here on its name means the view, even if there is a table of that name
        kinds = _output(view, schema) if view is not chain.root else {}
        found[view.name] = {name: _family(kind) for name, kind in kinds.items()}
        schema[view.name] = {name: spark_sql(kind) for name, kind in kinds.items()}
        if not kinds:
            del schema[view.name]
    return out


def _output(view: View, schema: Mapping[str, Mapping[str, str]]) -> dict[str, exp.DataType]:
    """Return the types of a view's columns, of set operations where all arms agree on the family."""
    try:
        query = annotate_types(view.query.copy(), schema=cast("dict[str, Any]", schema), dialect="spark")
    except SqlglotError:
        return {}
    arms = [[item.type for item in select.selects] for select in View("", query, (), (), False).selects()]
    out = {}
    for name, *kinds in zip(view.columns, *arms, strict=False):
        known = [k for k in kinds if isinstance(k, exp.DataType) and k.this not in _UNKNOWN]
        if len(known) == len(arms) and len({_family(k) for k in known}) == 1:
            out[name] = known[0]
    return out


@lru_cache(maxsize=1024)
def _named_family(kind: str) -> str | None:
    try:
        return _family(exp.DataType.build(kind, dialect="spark"))
    except SqlglotError:  # a view's ``void`` column, a type of the user's own
        return None


def _family(kind: exp.DataType) -> str:
    return _FAMILY.get(cast("exp.DType", kind.this), spark_sql(kind))
