-- What is known of a delivery when it leaves, and whether it came later than was promised.
SELECT
  datediff(l_shipdate, o_orderdate) AS days_to_ship,
  datediff(l_commitdate, o_orderdate) AS days_promised,
  l_quantity AS pieces,
  l_extendedprice AS price,
  ps_supplycost AS cost,
  s_acctbal AS balance,
  CASE WHEN n_nationkey = c_nationkey THEN 1 ELSE 0 END AS same_nation,
  CASE WHEN l_receiptdate > l_commitdate THEN 1 ELSE 0 END AS late
FROM lineitem
JOIN orders ON l_orderkey = o_orderkey
JOIN customer ON o_custkey = c_custkey
JOIN supplier ON l_suppkey = s_suppkey
JOIN partsupp ON l_partkey = ps_partkey AND l_suppkey = ps_suppkey
JOIN nation ON s_nationkey = n_nationkey
WHERE l_shipdate >= DATE '1997-01-01' AND l_shipdate < DATE '1997-07-01'
