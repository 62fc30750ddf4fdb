"""Tables of a made-up film archive whose columns depend on each other across joins, and queries that fall for it.

After the join-order benchmark (Leis et al., "How Good Are Query Optimizers, Really?", VLDB 2015) and JCC-H (Boncz et
al., TPCTC 2017): each filter alone is estimated right, but one film in a hundred is a blockbuster, with a fifth of
all roles, tags, credits and ratings and with people, tags and companies of its own. An estimate that takes joined
tables to be independent is off by orders of magnitude. The rows are drawn by DuckDB's hash of their numbers: the same
for a scale with one version of DuckDB.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import duckdb

from ebbflow.infra.storage import private

_FILMS, _PEOPLE, _TAGS, _COMPANIES = 500_000, 400_000, 10_000, 50_000  # at scale 1; of tags always
_ROLES, _TAGGED, _CREDITS, _RATINGS = 6_000_000, 3_000_000, 1_500_000, 4_000_000
_SHARE = 0.2  # of the rows of a table that blockbusters have
_THEIRS = 0.95  # of those, how many refer to people, tags and companies of their own
_THREADS = 2

Say = Callable[[str], None]


def generate(scale: float, folder: Path, say: Say) -> None:
    """Write ``TABLE.parquet`` for each of the eight tables and ``queries/qN.sql`` for each query into ``folder``.

    ``say`` is called with a line for each table. Raises ``OSError``, and ``duckdb.Error`` where memory or disk do
    not suffice.
    """
    with duckdb.connect(config={"threads": _THREADS}) as connection:
        for name, statement in _statements(scale).items():
            target = str(folder / f"{name}.parquet").replace("'", "''")
            connection.execute(f"COPY ({statement}) TO '{target}' (FORMAT parquet)")
            found = connection.execute(f"SELECT count(*) FROM '{target}'").fetchone()
            say(f"{name}: {found[0] if found else 0:,} rows")
    queries = folder / "queries"
    private.make_folder(queries)
    for number, text in enumerate(QUERIES, 1):
        private.write_text(queries / f"q{number}.sql", text.strip() + "\n")


@dataclass(frozen=True, slots=True)
class _Draws:
    """SQL for what is drawn for row ``i`` of the ``table``-th table."""

    table: int

    def number(self, salt: int) -> str:
        """In [0, 1). Hashed is one number: DuckDB's hashes of several differ in some bits only."""
        return f"((hash(i * 64 + {8 * self.table + salt}) >> 11)::DOUBLE / 9007199254740992)"

    def one_of(self, count: int, salt: int, step: int = 1) -> str:
        """One of 1 ... ``count``, or of the multiples of ``step`` among them."""
        return f"((floor({self.number(salt)} * {max(count // step, 1)})::BIGINT + 1) * {step})"

    def country(self, first: int, last: int) -> str:
        number = f"({self.one_of(last - first + 1, 3)} + {first - 1})"
        return f"'c' || lpad({number}::VARCHAR, 2, '0')"


def _statements(scale: float) -> dict[str, str]:
    films, people, companies = (max(round(n * scale), 1000) for n in (_FILMS, _PEOPLE, _COMPANIES))
    film, person, company = _Draws(0), _Draws(1), _Draws(2)
    # stars are of five countries of fifty, and the big companies of one that has few others
    stars = f"CASE WHEN (i + 1) % 200 = 0 THEN {person.country(1, 5)} ELSE {person.country(1, 50)} END"
    big = f"CASE WHEN (i + 1) % 500 = 0 THEN 'c01' ELSE {company.country(2, 50)} END"
    return {
        "films": f"SELECT i + 1 AS f_id, {film.one_of(76, 1)}::INTEGER + 1949 AS year, "
        "CASE WHEN (i + 1) % 100 = 0 THEN 'high' WHEN (i + 1) % 3 = 0 THEN 'middle' ELSE 'low' END AS budget, "
        f"{film.one_of(20, 2)}::INTEGER AS genre FROM range({films}) AS _(i)",
        "people": f"SELECT i + 1 AS p_id, {stars} AS country, {person.one_of(75, 1)}::INTEGER + 1929 AS born, "
        f"(i + 1) % 200 = 0 AS awarded FROM range({people}) AS _(i)",
        "tags": "SELECT i + 1 AS t_id, 'topic-' || lpad(((i + 1) % 100)::VARCHAR, 2, '0') AS topic, "
        f"'tag ' || i AS name FROM range({_TAGS}) AS _(i)",
        "companies": f"SELECT i + 1 AS c_id, {big} AS country, 'company ' || i AS name "
        f"FROM range({companies}) AS _(i)",
        "roles": _of_films(3, "person_id", people, 200, "kind", 12, films, _ROLES * scale),
        "film_tags": _of_films(4, "tag_id", _TAGS, 100, "weight", 5, films, _TAGGED * scale),
        "credits": _of_films(5, "company_id", companies, 500, "kind", 4, films, _CREDITS * scale),
        "ratings": _of_films(6, "day", 9000, 9, "stars", 10, films, _RATINGS * scale),
    }


def _of_films(
    table: int, key: str, count: int, step: int, other: str, values: int, films: int, rows: float
) -> str:
    """Return SQL for a table that refers to films: blockbusters, and what is theirs, have more than their share."""
    draws = _Draws(table)
    hot = f"{draws.number(1)} < {_SHARE}"
    return (
        f"SELECT CASE WHEN {hot} THEN {draws.one_of(films, 2, 100)} ELSE {draws.one_of(films, 2)} END AS film_id, "
        f"CASE WHEN {hot} AND {draws.number(3)} < {_THEIRS} THEN {draws.one_of(count, 4, step)} "
        f"ELSE {draws.one_of(count, 4)} END AS {key}, {draws.one_of(values, 5)}::INTEGER AS {other} "
        f"FROM range({max(round(rows), 1)}) AS _(i)"
    )


# Each names two things that blockbusters have, of which estimates know few, and one that they hardly have, of which
# estimates know more: begun with the first two, a query makes a multiple of the rows that it has to.
QUERIES = (
    """
SELECT o.country, count(*) AS n, max(p.born) AS youngest
FROM film_tags ft, tags t, roles r, people p, credits c, companies o
WHERE ft.tag_id = t.t_id AND r.person_id = p.p_id AND c.company_id = o.c_id
  AND r.film_id = ft.film_id AND c.film_id = ft.film_id
  AND t.topic = 'topic-00' AND p.awarded AND o.country IN ('c17', 'c18', 'c19')
GROUP BY o.country ORDER BY o.country
""",
    """
SELECT p.country, count(*) AS n, count(DISTINCT t.name) AS tags
FROM film_tags ft, tags t, roles r, people p, credits c, companies o
WHERE ft.tag_id = t.t_id AND r.person_id = p.p_id AND c.company_id = o.c_id
  AND r.film_id = ft.film_id AND c.film_id = ft.film_id
  AND t.topic = 'topic-00' AND o.country = 'c01' AND p.country IN ('c40', 'c41')
GROUP BY p.country ORDER BY p.country
""",
    """
SELECT t.topic, count(*) AS n, min(p.born) AS oldest
FROM film_tags ft, tags t, roles r, people p, credits c, companies o
WHERE ft.tag_id = t.t_id AND r.person_id = p.p_id AND c.company_id = o.c_id
  AND r.film_id = ft.film_id AND c.film_id = ft.film_id
  AND p.awarded AND o.country = 'c01' AND t.topic IN ('topic-31', 'topic-32', 'topic-33')
GROUP BY t.topic ORDER BY t.topic
""",
    """
SELECT f.year, count(*) AS n
FROM films f, film_tags ft, tags t, roles r, people p, credits c, companies o
WHERE ft.tag_id = t.t_id AND r.person_id = p.p_id AND c.company_id = o.c_id
  AND ft.film_id = f.f_id AND r.film_id = f.f_id AND c.film_id = f.f_id
  AND t.topic = 'topic-00' AND p.awarded AND p.born < 1960 AND o.country IN ('c20', 'c21', 'c22')
GROUP BY f.year ORDER BY f.year
""",
    """
SELECT a.stars, count(*) AS n
FROM ratings a, film_tags ft, tags t, roles r, people p
WHERE ft.tag_id = t.t_id AND r.person_id = p.p_id AND ft.film_id = a.film_id AND r.film_id = a.film_id
  AND p.awarded AND t.topic IN ('topic-11', 'topic-12') AND a.stars >= 9
GROUP BY a.stars ORDER BY a.stars
""",
    """
SELECT q.country, count(*) AS n, max(p.born) AS youngest
FROM film_tags ft, tags t, roles r, people p, roles s, people q
WHERE ft.tag_id = t.t_id AND r.person_id = p.p_id AND s.person_id = q.p_id
  AND r.film_id = ft.film_id AND s.film_id = ft.film_id
  AND t.topic = 'topic-00' AND p.awarded AND r.kind = 1 AND q.country = 'c45' AND s.kind = 2
GROUP BY q.country ORDER BY q.country
""",
    """
SELECT a.stars, count(*) AS n, max(o.name) AS last
FROM ratings a, film_tags ft, tags t, credits c, companies o
WHERE ft.tag_id = t.t_id AND c.company_id = o.c_id AND ft.film_id = a.film_id AND c.film_id = a.film_id
  AND o.country = 'c01' AND a.stars >= 7 AND t.topic IN ('topic-55', 'topic-56', 'topic-57')
GROUP BY a.stars ORDER BY a.stars
""",
    """
SELECT f.genre, count(*) AS n
FROM films f, film_tags ft, tags t, roles r, people p, credits c, companies o, ratings a
WHERE ft.tag_id = t.t_id AND r.person_id = p.p_id AND c.company_id = o.c_id
  AND ft.film_id = f.f_id AND r.film_id = f.f_id AND c.film_id = f.f_id AND a.film_id = f.f_id
  AND t.topic = 'topic-00' AND p.awarded AND r.kind = 3 AND a.stars = 1 AND o.country IN ('c33', 'c34') AND c.kind = 1
GROUP BY f.genre ORDER BY f.genre
""",
)
