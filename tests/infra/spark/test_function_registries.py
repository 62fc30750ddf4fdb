"""The lists of functions against the engines' own registries: a new version of an engine may bring what they lack."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

import duckdb
import pytest
from sqlglot import ParseError, exp, parse_one

from ebbflow.planners.query.sql.freezing import freeze, is_volatile
from ebbflow.planners.query.sql.functions import (
    CLOCK_NAMES,
    CODE,
    FILES,
    NETWORK,
    SETTINGS,
    TABLE_FUNCTIONS,
    VOLATILE_NAMES,
    changes,
    names_of,
    refused,
)
from ebbflow.planners.query.sql.parse import parse
from tests.planners.query.statements import NOW

REFUSED = FILES | NETWORK | SETTINGS | CODE
SUSPECT = re.compile(
    r"(^|_)(read|scan|load|file|files|glob|sniff|http|url|ftp|s3|network|secret|secrets|setting|settings|env|getenv|config|"
    r"path|paths|log|logs|logging|exec|execute|java|python|jvm|method|reflect|invoke|script|shell|system|query|sql|attach|"
    r"copy|export|import|install|extension|extensions|avro|protobuf|xml|xpath|server|catalog|conf)(_|$)"
)
# Looked at: they work on their arguments alone, or tell what no secret is.
HARMLESS = {
    "duckdb": {
        "url_decode", "url_encode", "parse_dirpath", "parse_path", "path_join", "json_extract_path",  # texts
        "json_extract_path_text", "json_deserialize_sql", "json_serialize_sql", "has_server_privilege",
        "parse_duckdb_log_message", "log", "list_reduce",  # a logarithm among the logs
        "invoke",  # calls a lambda that the query holds
        "current_catalog", "current_query", "current_query_id", "in_search_path",  # of this query
        "inet_server_addr", "inet_server_port",  # always null
        "error", "__internal_json_copy_to_geojson", "__internal_json_copy_to_json",  # values to text
        "json_copy_strftime_if_date", "json_copy_strftime_if_timestamp", "pg_ts_config_is_visible",
        "pg_conf_load_time",
    },
    "spark": {
        "parse_url", "try_parse_url", "url_decode", "url_encode", "try_url_decode", "to_xml",  # texts
        "xpath", "xpath_boolean", "xpath_double", "xpath_float", "xpath_int", "xpath_long", "xpath_number",
        "xpath_short", "xpath_string",  # external entities are off in Spark's parser
        "log", "input_file_name", "input_file_block_start", "input_file_block_length",  # of this query's tables
        "current_catalog", "current_path",
        "sql_keywords",
    },
}  # fmt: skip


def unclassified(engine: str, scalars: Iterable[str]) -> list[str]:
    return sorted(n for n in scalars if SUSPECT.search(n) and n not in REFUSED and n not in HARMLESS[engine])


def known(kinds: str) -> dict[str, str | None]:
    with duckdb.connect() as connection:
        rows = connection.execute(
            f"SELECT DISTINCT function_name, stability FROM duckdb_functions() WHERE function_type IN ({kinds})"
        ).fetchall()
    return dict(rows)


def test_no_function_of_duckdb_that_may_reach_beyond_a_query_is_unclassified() -> None:
    scalars = known("'scalar', 'aggregate', 'macro', 'window'")
    assert len(scalars) > 700
    assert unclassified("duckdb", scalars) == []


def test_table_functions_of_duckdb_are_refused_but_for_those_that_read_nothing() -> None:
    tables = known("'table', 'table_macro'")  # pragmas are statements
    assert len(tables) > 100
    passed = {n for n in tables if not any(refused(node) for node in _call("SELECT * FROM {}", n).walk())}
    assert passed == TABLE_FUNCTIONS & set(tables)
    assert passed <= {
        "generate_series", "icu_calendar_names", "json_each", "json_tree", "pg_timezone_names", "range", "repeat",
        "repeat_row", "summary", "test_all_types", "test_vector_types", "unnest",
    }  # fmt: skip


def test_what_duckdb_calls_unstable_is_frozen_volatile_or_refused() -> None:
    unstable = {n for n, s in known("'scalar', 'aggregate'").items() if s != "CONSISTENT"}
    assert {"random", "now", "current_setting", "nextval"} <= unstable
    harmless = {"error", "sleep_ms"}  # they give no value
    assert not [n for n in sorted(unstable - harmless) if not _tells(_call("SELECT {} AS v", n))]


def test_duckdbs_macros_of_unstable_functions_are_frozen_volatile_or_refused() -> None:
    with duckdb.connect() as connection:
        macros = dict(
            connection.execute(
                "SELECT function_name, macro_definition FROM duckdb_functions() WHERE function_type = 'macro'"
            ).fetchall()
        )
    unstable = {n for n, s in known("'scalar'").items() if s != "CONSISTENT"} - {"error", "stats", "sleep_ms"}
    words = (*map(re.escape, sorted(unstable | CLOCK_NAMES)), r"duckdb_\w+", r"pragma_\w+")
    found = [n for n, text in macros.items() if re.search(rf"\b({'|'.join(words)})\b", text or "")]
    assert {"ago", "pg_conf_load_time", "pg_get_viewdef"} <= set(found)
    plain = {"format_type", "get_block_size"}  # a type by its number; what no setting of a session changes
    assert not [n for n in found if n not in plain and not _tells(_call("SELECT {} AS v", n))]


def _call(form: str, name: str) -> exp.Query:
    """Return a query that calls ``name`` with as many arguments as sqlglot lets it have."""
    for arguments in ("'x'", "", "1, 2", "1, 2, 3"):
        with suppress(ParseError):
            return cast("exp.Query", parse_one(form.format(f"{name}({arguments})"), dialect="duckdb"))
    raise AssertionError(f"{name} cannot be called")


def _tells(tree: exp.Query) -> bool:
    """Tell whether a query is volatile, or frozen, or refused."""
    return is_volatile(tree) or any("is fixed at" in note for note in freeze(tree, NOW)[1])


@pytest.mark.parametrize(
    ("dialect", "call"),
    [
        ("duckdb", "today()"), ("duckdb", "get_current_time()"), ("duckdb", "current_localtime()"),
        ("duckdb", "current_localtimestamp()"), ("duckdb", "pg_postmaster_start_time()"), ("duckdb", "ago(x)"),
        ("duckdb", "age(x)"), ("spark", "unix_timestamp()"), ("spark", "curdate()"), ("spark", "localtimestamp()"),
        ("spark", "current_time()"), ("spark", "now()"),
    ],
)  # fmt: skip
def test_clocks_are_frozen_or_volatile(dialect: str, call: str) -> None:
    assert _tells(parse(f"SELECT {call} AS v", dialect))


@pytest.mark.parametrize(
    "sql", ["SELECT age(x, y) AS v", "SELECT unix_timestamp(x) AS v", "SELECT upper('Today') AS v"]
)
def test_what_reads_no_clock_stays_as_it_is(sql: str) -> None:
    assert _tells(parse(sql)) is ("Today" in sql)  # that word might be compared with a date


def test_functions_of_sqlglot_that_may_reach_beyond_a_query_are_refused() -> None:
    names = {name.lower(): kind for kind in exp.ALL_FUNCTIONS for name in kind.sql_names() if name}
    looked_at = {
        "parse_url", "net_func", "search", "to_file", "xmlelement", "xmlget", "xmltable", "check_xml",
        "current_account_name", "current_catalog", "log", "xml_element", "xml_get", "xml_table", "open_json",
        "j_s_o_n_b_delete_at_path", "j_s_o_n_b_path_exists",
    }  # fmt: skip
    found = [n for n in sorted(names) if SUSPECT.search(n) and not refused(names[n]()) and n not in looked_at]
    assert found == []


def test_every_kind_of_call_has_its_names() -> None:
    found, waiting = set(), [exp.Func]
    while waiting:
        waiting += (more := waiting.pop().__subclasses__())
        found |= set(more)
    assert len(found) > 500
    unnamed = {kind.__name__ for kind in found if kind is not exp.Anonymous and not names_of(kind())}
    assert unnamed == {"AggFunc", "And", "Or", "Xor"}  # none of them stands in a tree as a call


def test_every_name_is_in_lower_case_and_in_one_list() -> None:
    lists = (FILES, NETWORK, SETTINGS, CODE, TABLE_FUNCTIONS)
    assert all(n == n.lower() for names in lists for n in names)
    assert sum(map(len, lists)) == len(frozenset().union(*lists))
    assert not VOLATILE_NAMES & CLOCK_NAMES


# --- Spark --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="spark")
def _spark() -> Iterable[Any]:
    from ebbflow.infra.spark.engine import SparkEngine

    with SparkEngine.start("local[2]", memory="1g") as engine:
        yield engine._session


@pytest.mark.spark(shared=True)
def test_no_function_of_spark_that_may_reach_beyond_a_query_is_unclassified(spark: Any) -> None:
    found = {row[0].lower() for row in spark.sql("SHOW FUNCTIONS").collect()}
    assert len(found) > 500
    assert {"java_method", "reflect", "try_reflect"} <= found
    assert unclassified("spark", found - {"python_worker_logs"}) == []  # a table function


@pytest.mark.spark(shared=True)
def test_table_functions_of_spark_are_refused_but_for_those_that_read_nothing(spark: Any) -> None:
    registry = spark._jsparkSession.sessionState().tableFunctionRegistry()
    names = registry.listFunction().mkString(" ").lower().split()
    found = {name.rpartition(".")[2] for name in names}
    assert {"explode", "range", "python_worker_logs"} <= found
    assert found - TABLE_FUNCTIONS == {"python_worker_logs"}


@pytest.mark.spark(shared=True)
@pytest.mark.slow  # changes with Spark only
def test_what_spark_calls_not_deterministic_is_frozen_volatile_or_refused(spark: Any) -> None:
    telling = re.compile(
        r"random|i\.i\.d|current (date|time|user|catalog|database|schema|path)|start of query|partition id|file|"
        r"session (local )?time ?zone|current session|method with reflection",
        re.I,
    )
    # Looked at: of their arguments and of the session's time zone, which is part of a checkpoint's meaning.
    plain = {"make_timestamp", "make_timestamp_ltz", "time_bucket", "try_make_timestamp_ltz"}
    names = [row[0] for row in spark.sql("SHOW FUNCTIONS").collect()]
    found = []
    for name in (n for n in names if re.fullmatch(r"\w+", n) and n not in plain):
        rows = spark.sql(f"DESCRIBE FUNCTION `{name}`").collect()
        usage = " ".join(row[0] for row in rows if row[0].startswith("Usage"))
        call = exp.Anonymous(this=name)
        if (
            telling.search(usage)
            and not changes(call)
            and name not in CLOCK_NAMES
            and names_of(call)[0] not in REFUSED
        ):
            found.append((name, usage[:120]))
    assert found == []
