SELECT n.name, count(*) AS orders
FROM orders AS o JOIN customer AS c ON o.customer = c.id JOIN nation AS n ON c.nation = n.id
GROUP BY n.name ORDER BY n.name
