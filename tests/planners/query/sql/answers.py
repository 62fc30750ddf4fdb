"""Calls that both engines are to answer alike, and such as are not passed to the one that answers them otherwise."""

ROWS = """
SELECT * FROM (VALUES
  (1, 5, 10::BIGINT, 1.5::DOUBLE, 2.55::DECIMAL(9, 2), 'a_b ab', DATE '2024-01-31', DATE '2024-03-01',
   TIMESTAMP '2024-01-31 23:59:58.75', TIMESTAMP '2024-02-01 00:00:01', [1, 3, NULL, 3], [3, 4], MAP {'a': 1},
   '{"a":"x","b":[1,{"c":2}],"a.b":1.5}'),
  (2, -3, 1000::BIGINT, -2.5::DOUBLE, -2.50::DECIMAL(9, 2), 'a\\_B', DATE '2023-12-31', DATE '2024-02-29',
   TIMESTAMP '1969-12-31 10:20:30.5', TIMESTAMP '2024-12-29 05:06:07', [], [NULL]::INTEGER[], MAP {'b': 2},
   '{"a":{"b":"deep"}}'),
  (-7, 2, 7::BIGINT, 0.5::DOUBLE, 0.05::DECIMAL(9, 2), 'axb', DATE '2024-12-29', DATE '2021-01-03',
   TIMESTAMP '2024-12-30 00:00:00', TIMESTAMP '2021-01-03 12:00:00', NULL, [5], NULL, '[1]'),
  (NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)
) AS t(i, i2, b, d, m, s, dt, dt2, ts, ts2, l, l2, mp, j)
"""
COLUMNS = (
    ("i", "int"), ("i2", "int"), ("b", "bigint"), ("d", "double"), ("m", "decimal(9,2)"), ("s", "string"),
    ("dt", "date"), ("dt2", "date"), ("ts", "timestamp_ntz"), ("ts2", "timestamp_ntz"), ("l", "array<int>"),
    ("l2", "array<int>"), ("mp", "map<string,int>"), ("j", "string"),
)  # fmt: skip

# that sqlglot alone would have the other engine answer otherwise, by dialect; "agg" are of all rows
ALIKE = {
    "duckdb": (
        "j->>'$.a'", "j->>'$.\"a.b\"'", "CAST(j->'$.b[0]' AS INT)", "j->'$.b'->>'$[1].c'",
        "log(b)", "log(2, b)", "CAST(d AS INT)", "CAST(m AS INT)", "CAST(2.5 AS INT)", "CAST(i / 2 AS BIGINT)",
        "dayofweek(dt)", "weekday(dt)", "isodow(dt)", "extract(dow FROM dt)", "date_part('dow', ts)", "dayname(dt)",
        "monthname(ts)", "extract(second FROM ts)", "date_part('second', ts)", "dt - dt2", "dt + INTERVAL 1 MONTH",
        "date_diff('day', ts, ts2)", "date_diff('month', dt, dt2)", "date_diff('year', dt, dt2)",
        "date_diff('quarter', dt, dt2)", "date_diff('week', dt, dt2)", "date_diff('hour', ts, ts2)",
        "date_diff('minute', ts, ts2)", "date_diff('second', ts, ts2)", "strftime(dt, '%A %d.%m.%y')",
        "l[1]", "l[-1]", "l[9]", "mp['a']", "list_contains(l, 3)", "list_contains(l, 9)", "array_position(l, 3)",
        "array_position(l, 9)", "range(2, 5)", "range(3, 1)",
        "regexp_matches(s, 'A', 'i')", "regexp_replace(s, 'A', 'z', 'gi')", "regexp_replace(s, 'a', 'z', 'g')",
        "s LIKE 'a\\_b'", "s LIKE 'a_b%'", "concat(s, NULL, s)", "string_split(s, '_')",
        "s || i || m", "to_timestamp(d)", "greatest(dt, ts) - dt2", "coalesce(ts, dt) - dt2",
        "(dt + INTERVAL 1 DAY) - dt2", "dt - (dt2 + INTERVAL 1 DAY)", "dt + INTERVAL 36 HOURS",
    ),
    "spark": (
        "CAST(d AS INT)", "CAST(m AS INT)", "CAST(2.5 AS INT)", "dayofweek(dt)", "weekday(dt)", "dayname(dt)",
        "monthname(dt)", "extract(DOW FROM dt)", "extract(DAYOFWEEK_ISO FROM dt)", "date_part('dow', dt)",
        "datediff(HOUR, ts, ts2)", "datediff(DAY, ts, ts2)", "datediff(WEEK, dt, dt2)", "datediff(ts, ts2)",
        "timestampdiff(MINUTE, ts, ts2)", "timestampdiff(SECOND, ts, ts2)", "date_add(dt, 3)", "add_months(dt, 1)",
        "dt + INTERVAL 1 DAY", "trunc(dt, 'MM')", "date_trunc('MM', ts)", "unix_seconds(CAST(ts AS TIMESTAMP))",
        "sequence(1, 3)", "date_format(dt, 'EEEE d.MM.yy')",
        "array_contains(l, 3)", "array_contains(l, 9)", "array_position(l, 3)", "array_position(l, 9)",
        "s LIKE 'a\\\\_b'", "substring(s, 0, 2)", "regexp_replace(s, 'a', 'z')",
        "get_json_object(j, '$.a')", "try_element_at(l, 1)", "coalesce(dt, ts) + INTERVAL 1 DAY",
        "CASE WHEN size(l) > 0 THEN l[size(l) - 1] END",
        "mp[s]", "concat('EUR ', round(m, 1))", "CAST(round(m * 1.19, 1) AS STRING)", "CAST(floor(d) AS STRING)",
        "CAST(now() AS STRING)", "transform(l, x -> CAST(x AS STRING))",
        "CAST(aggregate(l, 0, (a, x) -> a + x) AS STRING)", "CAST(array_position(l, 3) AS STRING)",
        "CAST((SELECT max(i2) FROM t) AS STRING)", "CAST(max_by(i, b) OVER () AS STRING)",
    ),
}  # fmt: skip
ALIKE_OF_ALL = {
    "duckdb": ("arg_max(nullif(s, 'a\\_B'), i)", "arg_min(i2, b) FILTER (i < 5)"),
    "spark": (
        "max_by(nullif(i, 2), b)", "min_by(nullif(i, -7), b)", "collect_list(i) FILTER (WHERE i > 99)",
        "sort_array(collect_set(i2))", "percentile(b, 0.5)",
    ),
}  # fmt: skip
NOT_TOLD = {  # a call in the first dialect that the other one's engine is not told of, and what the reason says
    "duckdb": {
        "j->'$[*]'": "text", "j->'*'": "text", "j->>'/a/b'": "paths", "j->>'$..x'": "paths", "j->>'$[#-1]'": "paths",
        "j->>'$.b[-1]'": "paths", "j->>s": "paths", "j->'$.a'": "text, not JSON", "j->'$.*'": "wildcard",
        "json(j)": "as it is", "json_keys(j)": "no keys", "j::JSON": "JSON", "to_json(l)": "fields that are NULL",
        "json_array_length(j)": "no array", "list(i)": "nulls", "array_agg(i ORDER BY s)": "order",
        "list_distinct(l)": "NULL", "list_concat(l, l2)": "NULL", "flatten([l, l2])": "NULL",
        "list_transform(l, lambda x, n: x + n)": "from 1", "list_filter(l, lambda x, n: n > 1)": "from 1",
        "generate_series(1, i)": "counts down", "range(1, 10, 2)": "counts down",
        "i = ANY(l)": "list is NULL", "time_bucket(INTERVAL 1 DAY, ts)": "buckets",
        "regexp_replace(s, 'a', 'b')": "all matches",
        "regexp_replace(s, '(a)', '\\1', 'g')": "groups", "regexp_matches(s, 'a', 's')": "options",
        "regexp_extract(s, '(a)(b)', ['x', 'y'])": "one group", "regexp_extract(s, 'a', 0, 'i')": "parameters",
        "string_split(s, i::VARCHAR)": "pattern", "split_part(s, '_', 0)": "part 0", "left(s, -1)": "negative",
        "substring(s, 0, 2)": "below 1", "chr(i)": "256", "unicode(s)": "empty", "hash(s)": "values",
        "url_encode(s)": "blank", "epoch(ts)": "whole seconds", "ts AT TIME ZONE 'Asia/Tokyo'": "time zone",
        "date_trunc('decade', ts)": "unit", "date_diff('decade', ts, ts2)": "unit", "strftime(ts, '%U')": "formats",
        "approx_quantile(i, 0.5)": "one of the values", "strptime(s, '%y-%m-%d')": "formats",
        "trunc(d, 1)": "decimals", "quantile(i, 0.5)": "interpolates", "skewness(d)": "population",
        "kurtosis(d)": "population", "max(i, 2)": "count", "typeof(i)": "names", "element_at(mp, 'a')": "list",
        "sum(i) OVER (ORDER BY i ROWS BETWEEN 1 PRECEDING AND CURRENT ROW EXCLUDE CURRENT ROW)": "EXCLUDE",
        "CAST(d AS VARCHAR)": "texts", "CAST(l AS VARCHAR)": "texts",
        "s || d": "texts", "concat(s, d)": "texts", "CAST(now() AS VARCHAR)": "texts", "'at ' || now()": "texts",
        "CAST(ceil(d) AS VARCHAR)": "texts", "CAST(list_avg(l) AS INT)": "type of what is cast",
    },
    "spark": {
        "hash(s)": "values", "format_string('%s', s)": "null", "printf('%d', i)": "null",
        "url_decode(s)": "blank", "l[CAST(s AS STRING)]": "places from 1",
        "typeof(i)": "names",
        "transform(l, (x, n) -> x + n)": "from 0", "array_distinct(l)": "NULL", "array_remove(l, 3)": "nulls",
        "flatten(array(l, l2))": "NULL", "regexp_replace(s, '(a)', '$1')": "groups",
        "date_format(ts, 'SSS')": "formats",
        "to_date(s, \"yyyy'T'\")": "formats", "datediff(MONTH, dt, dt2)": "months", "skewness(i)": "population",
        "get_json_object(j, '$.b[*]')": "paths", "to_json(mp)": "NULL", "left(s, -1)": "negative",
        "from_utc_timestamp(ts, 'Asia/Tokyo')": "time zone", "bit_count(i)": "64 bits",
        "CAST(d AS STRING)": "texts", "CAST(mp AS STRING)": "texts", "concat_ws('-', s, d)": "texts",
        "listagg(d, ',')": "texts",
        "dt - dt2": "interval", "concat(round(d, 1), '%')": "texts", "CAST(m / 3 AS STRING)": "texts",
        "CAST(transform(l, x -> x + 1)[0] AS STRING)": "type of what is cast",
        "CAST(b AS TIMESTAMP)": "no time", "CAST(s AS BINARY)": "bytes", "date_trunc('DECADE', ts)": "unit",
        "array_except(l, l2)": "order", "array_insert(l, 9, 9)": "fills", "map_concat(mp, mp)": "map is NULL",
        "sequence(1, i)": "counts down", "months_between(dt, dt2)": "rounds", "extract(SECOND FROM ts)": "fractions",
        "date_part('seconds', ts)": "fractions", "to_date(s, 'yy-MM-dd')": "formats", "trunc(dt, 'DD')": "unit",
        "max(struct(i, s))": "the least", "sort_array(collect_set(struct(d, i)))": "the least",
        "max_by(i, struct(d, i))": "the least", "row_number() OVER (ORDER BY l)": "the least",
        "CAST(CAST(ts AS TIMESTAMP) AS DOUBLE)": "no number",
    },
}  # fmt: skip
