"""Three tables, and queries over them as they are read."""

from ebbflow.planners.query.sql.parse import parse_query
from tests.planners.query.statements import NOW, catalogue

TABLES = catalogue(
    {
        "orders": "o_key int, o_total double, o_date date",
        "lines": "l_key int, l_part int, l_tags array<string>",
        "Mixed": "Id int, Full Name string",
    }
)


def parsed(text, **options):
    return parse_query(text, TABLES, now=NOW, **options)
