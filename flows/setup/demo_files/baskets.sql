-- What an order holds, known when it is placed, and what it will cost in the end.
SELECT
  count(*) AS lines,
  sum(l_quantity) AS pieces,
  avg(l_quantity * p_retailprice) AS value,
  avg(p_size) AS size,
  avg(l_discount) AS discount,
  avg(l_tax) AS tax,
  max(c_acctbal) AS balance,
  max(n_regionkey) AS region,
  max(o_totalprice) AS total
FROM lineitem
JOIN orders ON l_orderkey = o_orderkey
JOIN part ON l_partkey = p_partkey
JOIN customer ON o_custkey = c_custkey
JOIN nation ON c_nationkey = n_nationkey
WHERE o_orderdate >= DATE '1995-01-01' AND o_orderdate < DATE '1996-07-01'
GROUP BY o_orderkey
