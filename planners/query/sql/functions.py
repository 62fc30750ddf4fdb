"""What is known of the engines' functions: which reach beyond a query's tables, and which change from run to run.

The lists cover the registries of Spark 4 and DuckDB 2 entirely (the tests compare them) and the extensions of
DuckDB that others' SQL is likely to name. Names are in lower case.
"""

from functools import lru_cache

from sqlglot import exp

from ebbflow.planners.query.sql.calls import OrderedPercentile, Percentile


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


# --- refused unless allowed ---------------------------------------------------------------------------------

FILES = _words(
    # DuckDB: whatever its file systems reach, http:// and s3:// among them
    "glob parquet_bloom_probe parquet_file_metadata parquet_full_metadata parquet_kv_metadata parquet_metadata",
    "parquet_scan parquet_schema read_avro read_blob read_csv read_csv_auto read_duckdb read_json read_json_auto",
    "read_json_objects read_json_objects_auto read_ndjson read_ndjson_auto read_ndjson_objects read_parquet",
    "read_single_csv_file read_single_json_file read_single_parquet_file read_text read_xlsx sniff_csv st_read",
    "st_read_meta",
    # its databases and lakes
    "delta_scan iceberg_metadata iceberg_scan iceberg_snapshots mysql_attach mysql_query mysql_scan",
    "postgres_attach postgres_query postgres_scan postgres_scan_pushdown sqlite_attach sqlite_query sqlite_scan",
    # Spark: schemas and descriptors that an argument or an option names by its path
    "from_avro from_protobuf from_xml read_files schema_of_avro schema_of_xml to_avro to_protobuf",
    # other systems', in case an engine or a package brings them
    "load_file pg_ls_dir pg_read_binary_file pg_read_file",
)
NETWORK = _words("http_get http_head http_post http_request")
SETTINGS = _words(
    "current_setting getenv list_secrets pg_get_constraintdef pg_get_viewdef secret set_config try_secret",
    "which_secret write_log",
)
CODE = _words(
    # methods of Java, functions of Python
    "arrow_scan arrow_scan_dumb java_method pandas_scan python_arrow_scan python_map_function reflect try_reflect",
    # SQL or names in a text, which nobody has checked
    "identifier json_execute_serialized_sql json_serialize_plan query query_table seq_scan table",
)
_MODELS = ("ai_", "ml_")  # functions that ask a model somewhere
REASONS = (
    (FILES, "reads files of the machine or of a network"),
    (NETWORK, "speaks to a network"),
    (SETTINGS, "reads or changes settings, secrets or logs"),
    (CODE, "runs code, or SQL that is given as text"),
)

# --- table functions: all others are refused ----------------------------------------------------------------

TABLE_FUNCTIONS = _words(
    "collations explode explode_outer flatten generate_date_array generate_series generate_subscripts",
    "generate_timestamp_array generator icu_calendar_names inline inline_outer json_each json_tree json_tuple",
    "pg_timezone_names posexplode posexplode_outer range regexp_split_to_table repeat repeat_row sequence",
    "split_to_table sql_keywords stack strtok_split_to_table summary test_all_types test_vector_types unnest",
    "variant_explode variant_explode_outer",
)

# --- what changes from run to run ---------------------------------------------------------------------------

# Replaced by a literal once per run, as a date, a time, a timestamp without a zone, or an instant.
CLOCK_DATES = frozenset({"curdate", "current_date", "today"})
CLOCK_TIMES = frozenset({"current_localtime", "current_time", "get_current_time", "localtime"})
CLOCK_ZONED = frozenset({"current_time", "get_current_time"})  # of these, DuckDB's with a time zone
CLOCK_LOCAL = frozenset({"current_localtimestamp", "localtimestamp"})
CLOCK_INSTANTS = _words(
    "current_timestamp get_current_timestamp now pg_conf_load_time pg_postmaster_start_time",
    "transaction_timestamp",
)
CLOCK_NAMES = CLOCK_DATES | CLOCK_TIMES | CLOCK_LOCAL | CLOCK_INSTANTS
CLOCKS = (
    exp.CurrentDate, exp.CurrentTimestamp, exp.CurrentDatetime, exp.CurrentTime, exp.Localtime,
    exp.Localtimestamp,
)  # fmt: skip

# What differs from row to row, run to run or user to user.
VOLATILE_NAMES = _words(
    # random numbers
    "gen_random_uuid rand randn random randstr reservoir_quantile setseed shuffle uniform uuid uuidv4 uuidv7",
    "aes_encrypt",
    # where a row lies, and how the engine runs a statement
    "input_file_block_length input_file_block_start input_file_name monotonically_increasing_id",
    "spark_partition_id stats vector_type",
    # the session and its user
    "current_catalog current_connection_id current_database current_path current_query current_query_id",
    "current_role current_schema current_schemas current_timezone current_transaction_id current_user getvariable",
    "in_search_path session_user txid_current user version",
    # sequences
    "currval nextval setval",
    # clocks that take arguments
    "ago",
)
_CLOCK_WITHOUT = {"age": 2, "unix_timestamp": 1}  # with fewer arguments than this they read the clock
VOLATILE: tuple[type[exp.Expr], ...] = (
    exp.Rand, exp.Randn, exp.Randstr, exp.Uniform, exp.Shuffle, exp.Uuid, exp.TableSample, exp.SessionUser,
    exp.NextValueFor, exp.Normal, exp.Zipf, exp.Seq1, exp.Seq2, exp.Seq4, exp.Seq8, exp.UtcDate, exp.UtcTime,
    exp.UtcTimestamp, exp.Systimestamp, exp.ReadCSV, exp.ReadParquet, exp.QueryTransform,
    *(c for c in exp.ALL_FUNCTIONS if c.__name__.startswith("Current") and c not in CLOCKS),
)  # fmt: skip
# The kinds of nodes that ``changes`` may say yes of.
CALLS: tuple[type[exp.Expr], ...] = (exp.Func, exp.TableSample, exp.QueryTransform)
# Words that either engine calls as functions, without parentheses, where no column is called so.
BARE = _words(
    "current_catalog current_database current_date current_role current_schema current_time current_timestamp",
    "current_user localtime localtimestamp session_user user",
)


def names_of(node: exp.Expr) -> tuple[str, ...]:
    """Return by which names, in lower case, ``node`` is called; none if it is no function call.

    A qualified name counts by its last part: ``system.main.read_text`` is ``read_text``.
    """
    if isinstance(node, exp.Anonymous | exp.AnonymousAggFunc):
        return (node.name.strip().lower().rpartition(".")[2],)
    return _NAMES.get(type(node), ())


_NAMES: dict[type[exp.Expr], tuple[str, ...]] = {
    kind: tuple(name.lower() for name in kind.sql_names())
    for kind in (*exp.ALL_FUNCTIONS, Percentile, OrderedPercentile)
    if issubclass(kind, exp.Func) and not issubclass(kind, exp.Connector)
}


def is_table_function(node: exp.Expr) -> bool:
    """Tell whether the call ``node`` stands where a table would."""
    above = node.parent
    return (
        isinstance(above, exp.Table | exp.Lateral | exp.TableFromRows | exp.From | exp.Join | exp.Pivot)
        and above.this is node
        and not isinstance(node, exp.UDTF)
    )


def refused(node: exp.Expr) -> tuple[str, str] | None:
    """Return the name of the call ``node`` and why it is refused; ``None`` for what anybody may call."""
    found = names_of(node)
    if not found:
        return None
    listed = _listed(found)
    if listed is None and is_table_function(node) and not TABLE_FUNCTIONS.intersection(found):
        return found[0], "is not among the table functions that are known to read nothing"
    return listed


@lru_cache(maxsize=4096)
def _listed(names: tuple[str, ...]) -> tuple[str, str] | None:
    for name in names:
        for known, reason in REASONS:
            if name in known:
                return name, reason
        if name.startswith(_MODELS):
            return name, "asks a model over a network"
    return None


def reaches_out(allowed: frozenset[str]) -> bool:
    """Tell whether functions of these names may need files or a network, so that an engine must not hold them off."""
    return bool(allowed - SETTINGS - CODE)


def changes(node: exp.Expr) -> bool:
    """Tell whether the call ``node`` may give another value in the next run, or for the next row."""
    if isinstance(node, VOLATILE) or refused(node) is not None:
        return True
    if isinstance(node, exp.StrToUnix):
        return node.args.get("this") is None
    if isinstance(node, exp.Anonymous):
        (name,) = names_of(node)
        return name in VOLATILE_NAMES or len(node.expressions) < _CLOCK_WITHOUT.get(name, 0)
    return False
