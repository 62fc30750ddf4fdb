import pytest

from tests.planners.query.statements import analyse, catalogue

TABLES = catalogue(
    {
        "a": "k int, x int, s string, tags array<int>",
        "b": "k bigint, j int, y double, s string",
        "c": "j int, z int, s string",
        "d": "k decimal(10,2), w int",
    }
)
FROM = "SELECT a.x FROM"


def block(text, known=TABLES):
    (found,) = analyse(text, known).blocks.values()
    return found


def notes(text):
    found = analyse(text, TABLES)
    assert not found.blocks
    return " ".join(found.notes)


def classes(text):
    return [[f"{a}.{c}" for a, c in cls.columns] for cls in block(text).graph.classes]


def predicates(text, *, implied=False):
    return [p.text for p in block(text).graph.predicates if p.implied is implied]


def test_equality_classes_are_closed_under_transitivity():
    text = f"{FROM} a, b, c, d WHERE a.k = b.k AND c.j = d.k AND b.k = c.j"
    assert classes(text) == [["a.k", "b.k", "c.j", "d.k"]]


@pytest.mark.parametrize("kind", ["void", "mood"])
def test_a_column_of_a_type_that_is_not_known_is_in_no_class_and_fails_nobody(kind):
    known = catalogue({"p": f"k int, n {kind}", "q": "k int", "other": f"n {kind}"})
    (cls,) = block("SELECT p.k FROM p JOIN q ON p.k = q.k AND p.n = q.k", known).graph.classes
    assert cls.columns == (("p", "k"), ("q", "k"))


def test_padded_texts_share_a_class_with_their_like_only():
    known = catalogue({"p": "c char(5), d char(5)", "q": "c char(5), v varchar(5)", "r": "s string"})
    text = "SELECT 1 FROM p JOIN q ON p.c = q.c JOIN r ON r.s = q.v AND p.d = r.s"
    found = [cls.columns for cls in block(text, known).graph.classes]
    assert found == [(("p", "c"), ("q", "c")), (("q", "v"), ("r", "s"))]


def test_equalities_between_types_that_are_converted_are_not_closed():
    text = f"{FROM} a, b, c WHERE a.s = b.j AND b.j = c.s"
    assert classes(text) == []
    assert predicates(text) == ["a.s = b.j", "b.j = c.s"]


def test_types_of_views_are_known_too():
    text = f"{FROM} a JOIN (SELECT j, max(s) AS s FROM c GROUP BY j) v ON v.j = a.k AND v.s = a.x"
    assert classes(text) == [["a.k", "v.j"]]


@pytest.mark.parametrize(
    "text",
    [
        f"{FROM} a JOIN b ON a.k = b.k AND a.x > 1 JOIN c ON c.j = b.j AND b.y < c.z",
        f"{FROM} a JOIN b ON a.x > 1 JOIN c ON b.y < c.z WHERE a.k = b.k AND c.j = b.j",
        f"{FROM} a, b CROSS JOIN c WHERE 1 < a.x AND b.j = c.j AND b.k = a.k AND c.z > b.y",
    ],
)
def test_where_a_condition_of_inner_joins_stands_is_no_matter(text):
    assert classes(text) == [["a.k", "b.k"], ["b.j", "c.j"]]
    assert set(predicates(text)) == {"1 < a.x", "b.y < c.z"} or set(predicates(text)) == {
        "a.x > 1",
        "b.y < c.z",
    }


@pytest.mark.parametrize(
    ("join", "movable"),
    [("LEFT", True), ("LEFT SEMI", True), ("LEFT ANTI", True), ("RIGHT", False), ("FULL", False)],
)
def test_only_joins_that_preserve_the_block_let_where_move_below_them(join, movable):
    found = block(f"{FROM} a JOIN b ON a.k = b.k {join} JOIN c ON c.j = b.j WHERE coalesce(a.x, 2) > 1")
    assert [j.this.name for j in found.barriers] == ["c"]
    assert bool(found.graph.predicates) is movable
    assert bool(found.top) is not movable


def test_a_where_over_the_outer_joined_table_stays_on_top():
    found = block(f"{FROM} a JOIN b ON a.k = b.k LEFT JOIN c ON c.j = b.j WHERE c.z IS NULL AND a.x > 1")
    assert [p.sql() for p in found.top] == ["c.z IS NULL"]
    assert ("b", "j") in found.top_columns


def test_a_condition_without_columns_must_not_rise_above_an_outer_join():
    assert "must stay below the right join" in notes(
        f"{FROM} a JOIN b ON a.k = b.k AND 1 = 0 RIGHT JOIN c ON c.j = b.j"
    )


def test_on_true_is_no_condition():
    assert block(f"{FROM} a JOIN b ON TRUE RIGHT JOIN c ON c.j = b.j").graph.predicates == ()


@pytest.mark.parametrize(
    ("joins", "inside", "above"),
    [
        ("JOIN b ON a.k = b.k LEFT JOIN c ON c.j = b.j JOIN d ON d.k = a.k", ["a", "b", "d"], ["c"]),
        ("LEFT JOIN c ON c.j = a.k JOIN d ON d.k = a.k", ["a", "d"], ["c"]),
        ("LEFT SEMI JOIN c ON c.j = a.k JOIN d ON d.k = a.k", ["a", "d"], ["c"]),
        ("LEFT ANTI JOIN c ON c.j = a.k JOIN d ON d.k = a.k JOIN b ON b.k = d.k", ["a", "d", "b"], ["c"]),
        (
            "LEFT JOIN c ON c.j = a.k JOIN d ON d.k = coalesce(c.z, 1) JOIN b ON b.k = a.k",
            ["a", "b"],
            ["c", "d"],
        ),
        (
            "LEFT JOIN c ON c.j = a.k JOIN b ON coalesce(c.z, 1) = b.k JOIN d ON d.k = b.k",
            [],
            ["c", "b", "d"],
        ),
        ("JOIN b ON a.k = b.k RIGHT JOIN c ON c.j = b.j JOIN d ON d.k <=> a.k", ["a", "b"], ["c", "d"]),
        ("JOIN b ON a.k = b.k LEFT JOIN c ON c.j = b.j CROSS JOIN d", ["a", "b"], ["c", "d"]),
        ("JOIN b ON a.k = b.k LEFT JOIN c ON c.j = b.j JOIN d ON rand() < d.k", ["a", "b"], ["c", "d"]),
    ],
)
def test_an_inner_join_goes_before_an_outer_one_whose_columns_it_leaves_alone(joins, inside, above):
    found = analyse(f"{FROM} a {joins}", TABLES).blocks
    assert [list(b.graph.aliases(b.graph.everything)) for b in found.values()] == ([inside] if inside else [])
    assert [[j.this.name for j in b.barriers] for b in found.values()] == ([above] if inside else [])


def test_a_where_connects_what_stands_behind_an_outer_join():
    found = block(f"{FROM} a LEFT JOIN c ON c.j = a.k, b, d WHERE a.k = b.k AND d.k = b.k AND d.w > 1")
    assert found.graph.aliases(found.graph.everything) == ("a", "b", "d")
    assert [j.this.name for j in found.barriers] == ["c"]


def test_a_condition_on_nothing_may_rise_above_a_left_join():
    found = block(f"{FROM} a JOIN b ON a.k = b.k AND 1 = 0 LEFT JOIN c ON c.j = b.j")
    assert [p.sql() for p in found.top] == ["1 = 0"]


def test_order_by_an_output_in_another_case_is_no_reason_to_leave_joins():
    assert block("SELECT a.x AS Best FROM a JOIN b ON a.k = b.k ORDER BY Best")


def test_an_outer_join_at_the_beginning_is_told_as_the_reason():
    assert "left join cannot be reordered" in notes(f"{FROM} a LEFT JOIN b ON a.k = b.k")


def test_using_is_an_equality():
    assert classes(f"{FROM} a JOIN b USING (k)") == [["a.k", "b.k"]]


def test_a_natural_join_is_reordered_or_left_but_never_a_cross_product():
    found = analyse(f"{FROM} a NATURAL JOIN c", TABLES)
    assert all(b.graph.classes for b in found.blocks.values())


def test_self_joins_are_told_apart_by_alias():
    found = block("SELECT p.x FROM a p JOIN a q ON p.k = q.x JOIN a r ON q.k = r.k")
    assert [(r.alias, r.source) for r in found.graph.relations] == [("p", "a"), ("q", "a"), ("r", "a")]


def test_a_lateral_view_stays_above_and_its_columns_are_handed_up():
    found = block(
        f"{FROM} a JOIN b ON a.k = b.k LATERAL VIEW explode(a.tags) e AS v WHERE e.v > 1 AND b.y > 2"
    )
    assert [p.sql() for p in found.top] == ["e.v > 1"]
    assert ("a", "tags") in found.top_columns


def test_the_users_own_hints_keep_the_joins_as_written():
    assert "hints are kept" in notes("SELECT /*+ BROADCAST(b) */ a.x FROM a JOIN b ON a.k = b.k")


@pytest.mark.parametrize(
    "text",
    [
        "SELECT count(a.*) AS n FROM a JOIN b ON a.k = b.k",
        "SELECT * FROM a JOIN b ON a.k = b.k JOIN explode(array(1)) r ON r.col = a.x",
    ],
)
def test_a_star_that_cannot_be_expanded_keeps_the_joins_as_written(text):
    assert "star" in notes(text)


def test_columns_that_would_share_a_name_in_a_checkpoint_keep_the_joins_as_written():
    known = catalogue({"a": "k int, b__c int", "t": "k int, c int"})
    found = analyse("SELECT a.b__c, a__b.c FROM a JOIN t AS a__b ON a.k = a__b.k", known)
    assert not found.blocks
    assert "share a name" in found.notes[0]


def test_a_sampled_table_is_no_relation_of_a_block():
    assert not analyse(f"{FROM} a JOIN b TABLESAMPLE (10 PERCENT) ON a.k = b.k", TABLES).blocks


def test_a_table_with_other_names_for_its_columns_is_a_relation_of_a_block():
    width = len(TABLES.tables["c"].columns)
    names = ", ".join("pqrst"[:width])
    (found,) = analyse(f"{FROM} a JOIN c AS o({names}) ON a.k = o.p", TABLES).blocks.values()
    assert len(found.graph.relations) == 2
    assert not analyse(f"{FROM} a JOIN c AS o(p) ON a.k = o.p", TABLES).blocks  # Spark refuses fewer names


def test_volatile_conditions_stay_on_top():
    found = block(f"{FROM} a JOIN b ON a.k = b.k WHERE rand() < 0.5 AND a.x + rand() > b.y")
    assert len(found.top) == 2


def test_predicates_on_equal_columns_are_implied():
    assert predicates(f"{FROM} a, b WHERE a.k = b.k AND a.k IN (1, 2)", implied=True) == ["b.k IN (1, 2)"]


def test_predicates_are_not_implied_across_conversions():
    assert predicates(f"{FROM} a, b WHERE a.s = b.j AND a.s > '5'", implied=True) == []


def test_an_inline_disjunction_over_two_relations_implies_one_on_each():
    text = f"{FROM} a, c WHERE a.k = c.j AND ((a.x = 1 AND c.z = 2) OR (a.x = 2 AND c.z = 1))"
    assert len(predicates(text, implied=True)) == 2


def test_a_correlated_subquery_in_where_stays_above_the_joins():
    found = block(
        f"{FROM} a JOIN b ON a.k = b.k WHERE EXISTS (SELECT 1 FROM c WHERE c.j = b.j AND c.z > a.s)"
    )
    assert not found.graph.predicates
    assert len(found.top) == 1
    assert found.top_columns == {("a", "x"), ("b", "j"), ("a", "s")}


def test_an_uncorrelated_subquery_is_a_predicate_of_the_relation_it_judges():
    found = block(f"{FROM} a JOIN b ON a.k = b.k WHERE b.j IN (SELECT z FROM c)")
    (predicate,) = found.graph.predicates
    assert predicate.subquery
    assert predicate.columns == {("b", "j")}
    assert predicate.relations == 1 << found.graph.index["b"]


def test_what_a_set_hands_up_is_what_is_used_above_or_outside():
    found = block("SELECT a.x FROM a JOIN b ON a.k = b.k JOIN c ON c.j = b.j AND c.z > b.y WHERE a.s = 'q'")
    index = found.graph.index
    ab = 1 << index["a"] | 1 << index["b"]
    assert found.output(ab) == (("a", "x"), ("b", "j"), ("b", "y"))
    assert found.output(found.graph.everything) == (("a", "x"),)


def test_taking_apart_changes_nothing_in_the_view():
    found = analyse(f"{FROM} a, b WHERE (a.k = b.k AND a.x = 1) OR (a.k = b.k AND a.x = 2)", TABLES)
    assert "OR" in found.chain.root.query.sql()
