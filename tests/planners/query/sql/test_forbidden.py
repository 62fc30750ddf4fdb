"""What SQL may not do, by each way to write it, and that what queries do need is left alone."""

import pytest

from ebbflow.planners.errors import ForbiddenSqlError, OptionError, PlanningError, UnknownTableError
from ebbflow.planners.query.sql.forbidden import checked_functions
from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.functions import CODE, FILES, NETWORK, SETTINGS, reaches_out
from ebbflow.planners.query.sql.parse import parse, parse_query
from tests.planners.query.statements import NOW, catalogue

TABLES = catalogue({"t": "a bigint, b string, l array<int>", "book": "a bigint"})

REFUSED = {
    "duckdb": [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM READ_CSV('/etc/passwd')",
        "SELECT * FROM read_csv_auto('/etc/passwd')",
        "SELECT * FROM \"read_csv\"('/etc/passwd')",
        "SELECT * FROM main.read_csv('/etc/passwd')",
        "SELECT * FROM system.main.read_text('/etc/passwd')",
        "SELECT * FROM read_text(['/etc/passwd'])",
        "SELECT * FROM read_blob('/etc/passwd')",
        "SELECT * FROM read_parquet('/secret/*.parquet')",
        "SELECT * FROM parquet_scan('/secret/a.parquet')",
        "SELECT * FROM parquet_metadata('/secret/a.parquet')",
        "SELECT * FROM read_json('/etc/x.json')",
        "SELECT * FROM read_ndjson_objects('/etc/x.json')",
        "SELECT * FROM sniff_csv('/etc/passwd')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM /* nothing */ read_text /* here */ ('/etc/passwd')",
        "SELECT * FROM read_csv('http://192.0.2.1/x.csv')",
        "SELECT * FROM read_csv('https://192.0.2.1/x.csv', header = true)",
        "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
        "SELECT * FROM sqlite_scan('/x.db', 'secrets')",
        "SELECT * FROM postgres_scan('host=192.0.2.1', 'public', 'x')",
        "SELECT * FROM iceberg_scan('/x')",
        "SELECT * FROM function_of_some_extension('/x')",
        "SELECT * FROM query('SELECT * FROM read_text(''/etc/passwd'')')",
        "SELECT * FROM query_table('/etc/passwd')",
        "SELECT * FROM json_execute_serialized_sql('{}')",
        "SELECT json_serialize_plan('SELECT * FROM read_csv(''/etc/passwd'')')",
        "SELECT * FROM histogram('/etc/passwd', 'a')",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM duckdb_settings()",
        "SELECT * FROM duckdb_views()",
        "SELECT * FROM which_secret('s3://x', 's3')",
        "SELECT * FROM pragma_database_size()",
        "SELECT * FROM enable_logging(storage = 'file')",
        "SELECT current_setting('s3_secret_access_key')",
        "SELECT getenv('HOME')",
        "SELECT ('/etc/passwd').read_text()",
        "SELECT {'a': [read_text('/etc/passwd')]}",
        "SELECT list_transform(l, x -> getenv(x)) FROM t",
        "SELECT a FROM t WHERE b IN (SELECT content FROM read_text('/etc/passwd'))",
        "SELECT (SELECT max(content) FROM read_text('/etc/passwd'))",
        "WITH x AS (SELECT * FROM read_text('/etc/passwd')) SELECT * FROM x",
        "WITH RECURSIVE x AS (SELECT 1 AS n UNION ALL SELECT n FROM x, read_text('/etc/passwd')) SELECT * FROM x",
        "SELECT a FROM t UNION ALL SELECT size FROM read_text('/etc/passwd')",
        "SELECT * FROM t, LATERAL read_text(t.b)",
        "SELECT * FROM t LEFT JOIN read_text('/etc/passwd') ON true",
        "SELECT * FROM t JOIN (SELECT * FROM read_text('/etc/passwd')) AS f ON true",
        "SELECT a FROM t ORDER BY (SELECT max(size) FROM read_text('/etc/passwd'))",
        "SELECT a, sum(a) OVER (ORDER BY getenv('HOME')) FROM t",
        "FROM read_text('/etc/passwd')",
        "SELECT * FROM (PIVOT read_csv('/etc/passwd') ON a)",
        "SELECT * FROM (SUMMARIZE '/etc/passwd.csv')",
        "FROM (SHOW databases) AS d",
        "SELECT * FROM (DESCRIBE SELECT * FROM read_csv('/etc/passwd'))",
    ],
    "spark": [
        "SELECT java_method('java.lang.System', 'getenv', 'HOME')",
        "SELECT reflect('java.lang.System', 'getenv', 'HOME')",
        "SELECT Try_Reflect('java.lang.System', 'getenv', 'HOME')",
        "SELECT `java_method`('java.lang.System', 'getenv', 'HOME')",
        "SELECT system.builtin.reflect('java.lang.System', 'exit', 1)",
        "SELECT transform(l, x -> java_method('java.lang.Runtime', 'getRuntime')) FROM t",
        "SELECT TRANSFORM(a) USING 'cat /etc/passwd' AS (x) FROM t",
        "FROM t SELECT TRANSFORM(a, b) USING 'sh' AS (x)",
        "SELECT * FROM csv.`/etc/passwd`",
        "SELECT * FROM text.`/etc/passwd`",
        "SELECT * FROM `text`.`/etc/passwd`",
        "SELECT * FROM TEXT.`file:///etc/passwd`",
        "SELECT * FROM parquet.`s3a://bucket/x`",
        "SELECT * FROM binaryFile.`/etc`",
        "SELECT * FROM json.`http://192.0.2.1/x`",
        "SELECT a FROM t UNION SELECT value FROM text.`/etc/passwd`",
        "SELECT * FROM identifier('text.`/etc/passwd`')",
        "SELECT * FROM IDENTIFIER('te' || 'xt.`/etc/passwd`')",
        "SELECT * FROM read_files('/etc/passwd')",
        "SELECT * FROM udtf_of_the_session(1)",
        "SELECT * FROM t, LATERAL udtf_of_the_session(a)",
        "SELECT * FROM t LATERAL VIEW udtf_of_the_session(l) x AS y",
        "SELECT * FROM python_worker_logs()",
        "SELECT from_protobuf(b, 'Message', '/etc/passwd') FROM t",
        "SELECT from_avro(b, '{}', map('avroSchemaUrl', 'file:///etc/passwd')) FROM t",
        "SELECT from_xml(b, 'a int', map('rowValidationXSDPath', '/etc/passwd')) FROM t",
        "SELECT ai_query('model', b) FROM t",
        "WITH x AS (INSERT INTO t SELECT 1) SELECT * FROM x",
    ],
    "snowflake": ["SELECT * FROM @stage/file"],
    "bigquery": ["SELECT AI.GENERATE('x')"],
    "clickhouse": ["SELECT * FROM file('/etc/passwd')", "SELECT * FROM url('http://192.0.2.1/')"],
    "postgres": ["SELECT pg_read_file('/etc/passwd')", "SELECT 1 INTO copied"],
    "mysql": ["SELECT load_file('/etc/passwd')"],
    "tsql": ["SELECT * FROM openrowset('a', 'b', 'c')"],
}
NO_QUERIES = {
    "duckdb": [
        "COPY (SELECT 1) TO '/tmp/x.csv'",
        "COPY t FROM '/etc/passwd'",
        "ATTACH '/x.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "CREATE MACRO f(x) AS TABLE SELECT * FROM read_text(x)",
        "EXPORT DATABASE '/tmp/x'",
        "SELECT 1; SELECT * FROM read_text('/etc/passwd')",
        "PIVOT '/etc/passwd.csv' ON a",
    ],
    "spark": [
        "ADD JAR '/x.jar'",
        "ADD FILE '/etc/passwd'",
        "CREATE FUNCTION f AS 'a.B' USING JAR '/x.jar'",
        "SET spark.sql.variable.substitute = true",
        "INSERT OVERWRITE DIRECTORY '/tmp/x' SELECT 1",
        "EXECUTE IMMEDIATE 'SELECT 1'",
        "LOAD DATA INPATH '/etc/passwd' INTO TABLE t",
        "DESCRIBE FUNCTION reflect",
        "CACHE TABLE t",
        "REFRESH TABLE t",
    ],
}
FILES_AS_TABLES = [
    "SELECT * FROM '/etc/passwd'",
    'SELECT * FROM "/etc/passwd"',
    "FROM 'x.csv'",
    "SELECT * FROM 'http://192.0.2.1/x.parquet'",
    "SELECT * FROM 's3://bucket/x.parquet'",
    "SELECT * FROM '/data/*.parquet'",
    "SELECT * FROM (PIVOT 'x.csv' ON a)",
    'WITH "x.csv" AS (SELECT * FROM "x.csv") SELECT * FROM "x.csv"',
    'SELECT * FROM "x.csv", (WITH "x.csv" AS (SELECT 1) SELECT * FROM "x.csv")',
    'WITH "/data/boo\u212a.csv" AS (SELECT 1) SELECT * FROM "/data/book.csv"',  # the sign of Kelvin
]
LEFT_ALONE = {
    "spark": [
        "SELECT explode(l) AS x FROM t",
        "SELECT x FROM t LATERAL VIEW OUTER explode(l) e AS x",
        "SELECT x FROM t, LATERAL explode(l) AS e(x)",
        "SELECT * FROM range(5)",
        "SELECT * FROM stack(2, 1, 2)",
        "SELECT transform(l, x -> x + 1) AS y FROM t",
        "SELECT input_file_name() AS f FROM t",
        "SELECT from_json(b, 'a int') AS j FROM t",
        "SELECT `table`.a FROM t AS `table`",
        "SELECT * FROM VALUES (1) AS v(x)",
        "SELECT histogram_numeric(a, 5) AS h FROM t",
    ],
    "duckdb": [
        "SELECT * FROM range(5)",
        "SELECT * FROM generate_series(1, 5) AS g(x)",
        "SELECT unnest(l) AS x FROM t",
        "SELECT * FROM unnest([1, 2])",
        "SELECT * FROM json_each('{}')",
        "SELECT histogram(a) AS h FROM t",
        "SELECT repeat(b, 3) AS r FROM t",
        "SELECT parse_path(b) AS p FROM t",
    ],
}  # fmt: skip


def each(cases):
    return [pytest.param(d, sql, id=f"{d}: {sql[:70]}") for d, texts in cases.items() for sql in texts]


@pytest.mark.parametrize(("dialect", "sql"), each(REFUSED))
def test_what_reaches_beyond_the_tables_is_refused_and_told(dialect, sql):
    with pytest.raises(ForbiddenSqlError) as caught:
        parse_query(sql, TABLES, now=NOW, dialect=dialect)
    said = str(caught.value)
    assert "--allow-functions" in said or "may not contain" in said or "table" in said


@pytest.mark.parametrize(("dialect", "sql"), each(NO_QUERIES))
def test_what_is_no_query_is_refused(dialect, sql):
    with pytest.raises(PlanningError):
        parse_query(sql, TABLES, now=NOW, dialect=dialect)
    with pytest.raises(PlanningError):  # whatever is allowed
        parse_query(sql, TABLES, now=NOW, dialect=dialect, allowed=FILES | CODE | SETTINGS | NETWORK)


@pytest.mark.parametrize("sql", FILES_AS_TABLES)
def test_a_file_is_no_table(sql):
    with pytest.raises((UnknownTableError, ForbiddenSqlError)):
        parse_query(sql, TABLES, now=NOW, dialect="duckdb")


@pytest.mark.parametrize(("dialect", "sql"), each(LEFT_ALONE))
def test_what_reads_nothing_is_left_alone(dialect, sql):
    parse_query(sql, TABLES, now=NOW, dialect=dialect)


def test_the_message_names_function_reason_and_option():
    with pytest.raises(ForbiddenSqlError) as caught:
        parse("SELECT * FROM read_text('/etc/passwd')", "duckdb")
    assert str(caught.value) == (
        "READ_TEXT('/etc/passwd') is refused: the function read_text reads files of the machine or of a network. SQL "
        "may call it only if the user who runs it allows it (--allow-functions read_text; allow_functions in "
        "Python or in a deployment's own parameters)"
    )


def test_what_is_allowed_may_be_called_and_nothing_else():
    sql = "SELECT * FROM read_csv('x.csv'), read_text('y')"
    with pytest.raises(ForbiddenSqlError, match="the function read_text"):
        parse(sql, "duckdb", ["read_csv"])
    assert is_volatile(parse(sql, "duckdb", ["read_csv", "read_text"]))


@pytest.mark.parametrize("name", sorted(FILES | NETWORK | SETTINGS | CODE))
def test_what_had_to_be_allowed_is_never_reused(name):
    query = parse(f"SELECT {name}('x', 'y') AS v FROM t", "duckdb", [name])
    assert is_volatile(query)


def test_a_table_function_that_nobody_knows_can_be_allowed_and_is_never_reused():
    assert is_volatile(parse("SELECT * FROM delta_of_mine('x')", "duckdb", ["delta_of_mine"]))
    assert not is_volatile(parse("SELECT * FROM range(3)", "duckdb"))


def test_a_word_that_stands_for_another_day_each_day_is_never_reused():
    assert is_volatile(parse("SELECT a FROM t WHERE d < 'today'"))
    assert is_volatile(parse("SELECT a FROM t WHERE d = ' Now '"))
    assert not is_volatile(parse("SELECT a FROM t WHERE b = 'todays'"))


def test_words_that_engines_call_as_functions_are_frozen_or_volatile_where_the_query_runs_whole():
    whole = parse_query("SELECT x, localtimestamp AS n FROM t, LATERAL explode(l) AS e(x)", TABLES, now=NOW)
    assert not whole.qualified
    assert any("localtimestamp() is fixed" in note.lower() for note in whole.notes)
    named = parse_query("SELECT x, current_catalog AS n FROM t, LATERAL explode(l) AS e(x)", TABLES, now=NOW)
    assert is_volatile(named.expression)
    column = catalogue({"t": "user string, l array<int>"})
    own = parse_query("SELECT x, user AS n FROM t, LATERAL explode(l) AS e(x)", column, now=NOW)
    assert not is_volatile(own.expression)


def test_names_that_are_allowed_are_checked():
    assert checked_functions(["READ_CSV, read_text", "glob"]) == ("glob", "read_csv", "read_text")
    assert checked_functions(None) == checked_functions(()) == ()
    for wrong in ("", "read csv", "a.b", "*", "read_csv,", "x;y"):
        with pytest.raises(OptionError, match=r"must be names of functions such as read_csv"):
            checked_functions([wrong])


def test_only_functions_that_need_places_open_them():
    assert reaches_out(frozenset({"read_csv"}))
    assert reaches_out(frozenset({"unknown_scan"}))
    assert not reaches_out(frozenset({"current_setting", "query", "reflect"}))
    assert not reaches_out(frozenset())
