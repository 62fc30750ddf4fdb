import pytest
from statements import analyse, catalogue

from ebbflow.planners.query.coverage import coverage, sentences

TABLES = catalogue(
    {
        "a": "k int, x int",
        "b": "k int, j int, y int",
        "c": "j int, z int",
        "d": "k int, w int",
    }
)
THREE = "a JOIN b ON a.k = b.k JOIN c ON c.j = b.j"


def found(text):
    return [(b.relations, b.planned) for b in coverage(analyse(text, TABLES))]


@pytest.mark.parametrize(
    "text",
    [
        f"SELECT a.x FROM {THREE}",
        f"WITH v AS (SELECT a.x, count(*) AS n FROM {THREE} GROUP BY a.x) SELECT n FROM v",
        f"SELECT q.n FROM (SELECT DISTINCT a.x AS n FROM {THREE}) q",
        f"SELECT d.w FROM d WHERE d.k IN (SELECT a.x FROM {THREE})",
        f"SELECT d.w FROM d WHERE EXISTS (SELECT * FROM {THREE} WHERE a.x = d.k)",
        f"SELECT d.w FROM d WHERE d.k > (SELECT max(c.z) FROM {THREE} WHERE a.x = d.w)",
        f"SELECT d.w, (SELECT max(c.z) FROM {THREE} WHERE a.x = d.w) AS m FROM d",
        f"SELECT d.w FROM d LEFT JOIN (SELECT a.x, sum(c.z) AS s FROM {THREE} GROUP BY a.x) q ON q.x = d.k",
        f"SELECT d.w FROM d UNION ALL SELECT a.x FROM {THREE}",
        f"SELECT d.w FROM d WHERE d.k IN (SELECT d.w FROM d UNION SELECT a.x FROM {THREE})",
        "SELECT a.x FROM a LEFT JOIN d ON d.k = a.k JOIN b ON a.k = b.k JOIN c ON c.j = b.j",
        "SELECT a.x FROM a LEFT JOIN b ON a.k = b.k JOIN c ON c.j = b.j",
        f"SELECT a.x FROM {THREE} LEFT JOIN d ON d.k = a.k",
        f"SELECT sum(q.z) AS s FROM (SELECT c.z FROM {THREE} ORDER BY c.z LIMIT 10) q GROUP BY q.z",
    ],
)
def test_three_joined_relations_are_planned_wherever_they_stand(text):
    assert (3, 3) in found(text)
    assert all(relations == planned for relations, planned in found(text))


def test_what_stays_as_written_is_counted_with_its_reason():
    (block,) = coverage(analyse("SELECT /*+ MERGE(b) */ a.x FROM a JOIN b ON a.k = b.k", TABLES))
    assert (block.relations, block.planned) == (2, 0)
    assert "hints are kept" in block.reason
    text = f"SELECT a.x FROM {THREE} FULL JOIN d ON d.k = a.k JOIN a AS a2 ON a2.k = d.k WHERE a.x IS NULL"
    (block,) = coverage(analyse(text, TABLES))
    assert (block.relations, block.planned) == (4, 3)
    assert block.reason


def test_a_query_that_runs_whole_hides_no_block():
    text = (
        "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT r.n + 1 FROM r WHERE r.n < 3) "
        f"SELECT r.n, q.x FROM r JOIN (SELECT a.x FROM {THREE}) q ON q.x = r.n"
    )
    blocks = coverage(analyse(text, TABLES))
    assert sorted((b.relations, b.planned) for b in blocks)[-1] == (3, 0)
    assert all("recursive WITH" in b.reason for b in blocks)


def test_the_sentences_count_and_give_reasons():
    assert sentences(()) == ("no inner joins: nothing to reorder",)
    first, *rest = sentences(coverage(analyse(f"SELECT a.x FROM {THREE}", TABLES)))
    assert first == "1 of 1 inner-join block planned (3 relations)"
    assert not rest
    _, told = sentences(coverage(analyse("SELECT /*+ MERGE(b) */ a.x FROM a JOIN b ON a.k = b.k", TABLES)))
    assert told.startswith("Result: 2 of 2 inner-joined relations stay as written: the query's own hints")
