import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.model import ColumnStatistics, Share
from ebbflow.planners.query.costs.dividing import Divider
from ebbflow.planners.query.estimates.relations import RelationInput
from ebbflow.planners.query.plan.slicing import COUNTS, Grid, aligned_tables, divide, grids, runs
from ebbflow.planners.query.plan.staging import Choice, Staging, Unit
from ebbflow.planners.query.plan.trees import Join, Leaf
from tests.planners.query.statements import analyse, catalogue

EDGES = tuple(float(v) for v in range(10, 160, 10))


def share(hazard=60.0, nodes=3):
    return Share.uniform(float(nodes), 6.0, nodes, hazard=hazard)


def nothing(_slices):
    return 0.0


def table(**columns):
    known = {
        name: ColumnStatistics(edges=edges, reads=(1.0, 1.0, 1.0, 1.1)) for name, edges in columns.items()
    }
    return RelationInput(1e6, 1e8, known)


# --- how many -----------------------------------------------------------------------------------------------


def test_without_losses_nothing_is_divided():
    assert divide(600.0, 0.0, nothing, 0.5, share(hazard=0.0)).slices == 1


def test_a_short_stage_is_not_divided_and_a_long_one_is():
    assert divide(1.0, 0.0, nothing, 0.5, share()).slices == 1
    assert divide(120.0, 0.0, nothing, 0.5, share()).slices == 16


def test_what_is_computed_again_by_every_slice_speaks_against_slices():
    counts = [divide(60.0, repeated, nothing, 0.5, share()).slices for repeated in (0.0, 5.0, 60.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 1


def test_reading_a_table_again_and_again_speaks_against_slices():
    assert divide(60.0, 0.0, lambda m: 60.0 * (m - 1), 0.5, share()).slices == 1


def test_the_formula_by_hand():
    # 3 nodes at 60 losses a node-hour: λ = 0.05/s, ρ + σ = 0.75; 40 s in 4 slices, 2 side by side: L = 20.5
    found = divide(40.0, 0.0, nothing, 0.5, share(), (4,))
    assert found.slices == 4
    assert found.seconds == pytest.approx(40.0 + 2 * (0.5 + 0.05 * 0.75 / 2 * 20.5**2))
    assert found.whole == pytest.approx(40.5 + 0.05 * 0.75 / 2 * 40.5**2)


def test_one_by_one_a_loss_costs_one_slice_and_nothing_hides_the_overhead():
    # 1 node at 60 losses an hour: λ = 1/60/s, ρ + σ = 1.25; 4 slices of 40 s, 1 s each computed again: L = 11.25
    found = divide(40.0, 1.0, nothing, 0.5, share(60.0, 1), (4,), 1)
    assert found.seconds == pytest.approx(43.0 + 4 * (0.5 + 1.25 / 120 * 11.25**2))
    assert found.seconds < divide(40.0, 1.0, nothing, 0.5, share(60.0, 1), (4,), 2).seconds


@given(
    st.floats(0.1, 3600.0), st.floats(0.0, 100.0), st.floats(0.0, 500.0), st.floats(0.01, 5.0), st.integers(1, 2)
)  # fmt: skip
def test_a_division_is_never_expected_to_take_longer(seconds, repeated, hazard, overhead, at_once):
    found = divide(seconds, repeated, nothing, overhead, share(hazard), at_once=at_once)
    assert found.slices in (1, *COUNTS)
    assert found.seconds <= found.whole


# --- which cells --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 16)), max_size=4), st.sampled_from((1, *COUNTS)))
def test_runs_and_what_is_done_make_up_all_cells_once(done, slices):
    done = [(a, min(a + n, 16)) for a, n in done]
    todo = list(runs(done, 16, slices))
    cells = [c for first, last in todo for c in range(first, last)]
    assert len(cells) == len(set(cells))
    assert set(cells) | {c for a, b in done for c in range(a, b)} == set(range(16))
    assert not set(cells) & {c for a, b in done for c in range(a, b)}
    assert all(last - first <= 16 // slices for first, last in todo)


@pytest.mark.parametrize("nulls", [True, False])
@given(st.integers(1, 16), st.lists(st.one_of(st.none(), st.integers(-20, 200)), max_size=30))
def test_every_value_is_in_one_slice(nulls, slices, values):
    grid = Grid((("t", "k"),), frozenset(), EDGES, nulls, {})
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t (k INT)")
    if values:
        connection.executemany("INSERT INTO t VALUES (?)", [[v] for v in values])
    seen = []
    for cells in runs([], grid.cells, slices):
        where = " AND ".join(c.sql("duckdb") for c in grid.conditions(*cells).values()) or "true"
        seen += [v for (v,) in connection.execute(f"SELECT k FROM t WHERE {where}").fetchall()]
    whole = [(v,) for v in values if v is not None or nulls or slices == 1]
    assert sorted(seen, key=repr) == sorted((v for (v,) in whole), key=repr)


def test_dates_are_compared_as_dates():
    grid = Grid((("t", "d"),), frozenset({("t", "d")}), (9131.0, 9496.0), False, {})
    assert grid.conditions(1, 2)["t", "d"].sql("spark") == (
        "t.d >= CAST('1995-01-01' AS DATE) AND t.d < CAST('1996-01-01' AS DATE)"
    )


@pytest.mark.parametrize("cells", [(-1, 2), (2, 2), (3, 2), (0, 17)])
def test_cells_that_are_none_are_refused(cells):
    grid = Grid((("t", "k"),), frozenset(), EDGES, False, {})
    with pytest.raises(ValueError, match="cells must be within 0 to 16"):
        grid.conditions(*cells)


# --- by which column ----------------------------------------------------------------------------------------


def types(kind="int"):
    return lambda column: kind


def test_columns_that_joins_make_equal_are_divided_together_by_the_larger_tables_borders():
    small = RelationInput(10.0, 10.0, {"k": ColumnStatistics(edges=(1.0,), reads=(1.0,) * 4)})
    (found,) = grids({"a": table(k=EDGES), "b": small}, types(), [(("a", "k"), ("b", "k"))])
    assert found.columns == (("a", "k"), ("b", "k"))
    assert found.edges == EDGES
    assert not found.nulls  # a row without a value joins nothing


def test_a_column_that_joins_nothing_keeps_its_rows_without_a_value():
    (found,) = grids({"a": table(k=EDGES)}, types(), [])
    assert found.nulls


def test_a_class_within_one_relation_keeps_its_rows_without_a_value():
    (found,) = grids({"a": table(k=EDGES)}, types(), [(("a", "k"),)])
    assert found.nulls


def test_a_table_in_no_order_is_read_by_every_slice():
    other = RelationInput(5.0, 5.0, {"k": ColumnStatistics()})
    (found,) = grids({"a": table(k=EDGES), "b": other}, types(), [(("a", "k"), ("b", "k"))])
    assert found.times_read("a", 16) == 1.1
    assert found.times_read("b", 16) == 16.0


@pytest.mark.parametrize("kind", ["string", "decimal(9,2)", "double", ""])
def test_columns_of_other_types_divide_nothing(kind):
    assert grids({"a": table(k=EDGES)}, types(kind), []) == []


def test_dates_and_numbers_are_not_divided_together():
    kinds = {("a", "k"): "int", ("b", "k"): "date"}
    pair = (("a", "k"), ("b", "k"))
    assert grids({"a": table(k=EDGES), "b": table(k=EDGES)}, kinds.__getitem__, [pair]) == []


def test_subqueries_tied_to_a_divided_column_are_found():
    known = catalogue({"t": "k int, v int", "u": "k int, v int", "w": "k int, v int"})
    text = (
        "SELECT COUNT(*) AS n FROM t JOIN u ON t.k = u.k WHERE EXISTS (SELECT 1 FROM t AS x WHERE x.k = t.k)"
        " AND NOT EXISTS (SELECT 1 FROM w WHERE w.v = u.v)"
    )
    select = analyse(text, known).chain.root.query
    assert aligned_tables(select, Grid((("t", "k"), ("u", "k")), frozenset(), EDGES, False, {})) == ["t"]


KNOWN = catalogue({"t": "k int, v int", "u": "k int, v int", "w": "k int, v int"})


def unit_grids(text, cuts=(), partial=True):
    analysis = analyse(text, KNOWN)
    key = ("Result", 0)
    trees = {key: Join(Leaf(0), Leaf(1), "broadcast")} if key in analysis.blocks else {}
    partials = frozenset({"Result"}) if partial else frozenset()
    choice = Choice(trees, {key: frozenset(cuts)} if trees else {}, frozenset(), partials)
    divider = Divider(analysis, KNOWN)
    units = Staging(analysis, choice).units
    return {unit: divider.grids(unit, choice, lambda view, name: table(k=EDGES)) for unit in units}


def test_a_result_is_never_divided_but_its_partial_result_is():
    found = unit_grids("SELECT t.v, COUNT(*) AS n FROM t JOIN u ON t.k = u.k GROUP BY t.v")
    assert [(u.partial, bool(g)) for u, g in found.items()] == [(True, True), (False, False)]


def test_what_lies_under_a_cut_is_not_divided_again():
    found = unit_grids("SELECT t.v, COUNT(*) AS n FROM t JOIN u ON t.k = u.k GROUP BY t.v", cuts=(3,))
    kinds = {(u.block is not None, u.partial): bool(g) for u, g in found.items()}
    assert kinds == {(True, False): True, (False, True): False, (False, False): False}


@pytest.mark.parametrize(("side", "divided"), [("LEFT", True), ("RIGHT", False), ("FULL", False)])
def test_an_outer_join_that_adds_rows_forbids_slices(side, divided):
    found = unit_grids(f"SELECT t.v, COUNT(*) AS n FROM t {side} JOIN u ON t.k = u.k GROUP BY t.v")
    partials = [bool(g) for u, g in found.items() if u.partial]
    assert partials == [divided]


def test_what_draws_random_numbers_is_not_divided():
    text = "WITH r AS (SELECT k, rand() AS x FROM t) SELECT r.x, u.v FROM r JOIN u ON r.k = u.k JOIN w ON w.k = u.k"
    analysis = analyse(text, KNOWN)
    (key,) = (k for k in analysis.blocks if k[0] == "Result")
    tree = Join(Join(Leaf(0), Leaf(1), "broadcast"), Leaf(2), "broadcast")
    choice = Choice({**dict.fromkeys(analysis.blocks, tree), key: tree}, {key: frozenset({3})})
    divider = Divider(analysis, KNOWN)
    units = Staging(analysis, choice).units
    assert [u.block is not None for u in units] == [True, False]
    assert [divider.grids(u, choice, lambda view, name: table(k=EDGES)) for u in units] == [[], []]


@pytest.mark.parametrize(
    ("text", "cut", "divided"),
    [
        ("SELECT t.v, COUNT(*) AS n FROM t JOIN u ON t.k = u.k GROUP BY t.v LIMIT 3", (), True),
        ("SELECT COUNT(*) AS n FROM t JOIN (SELECT k FROM u LIMIT 3) q ON t.k = q.k", (), False),
        ("SELECT COUNT(*) AS n FROM t JOIN (SELECT k FROM u LIMIT 3) q ON t.k = q.k", ("q",), True),
        ("SELECT COUNT(*) AS n FROM t JOIN (SELECT k FROM (SELECT k FROM u LIMIT 3) r GROUP BY k) q ON t.k = q.k",
         (), False),
        ("SELECT COUNT(*) AS n FROM t WHERE t.k IN (SELECT k FROM u LIMIT 3)", (), False),
    ],
)  # fmt: skip
def test_what_reads_some_rows_of_many_is_not_divided(text, cut, divided):
    analysis = analyse(text, KNOWN)
    trees = {key: Join(Leaf(0), Leaf(1), "broadcast") for key in analysis.blocks}
    choice = Choice(trees, {}, frozenset(cut), frozenset({"Result"}))
    divider = Divider(analysis, KNOWN)
    units = [u for u in Staging(analysis, choice).units if u.partial]
    assert [bool(divider.grids(u, choice, lambda view, name: table(k=EDGES))) for u in units] == [divided]


def test_tables_that_are_read_twice_are_not_narrowed():
    text = (
        "SELECT COUNT(*) AS n FROM t JOIN u ON t.k = u.k WHERE EXISTS (SELECT 1 FROM t AS x WHERE x.k = t.k)"
    )
    analysis = analyse(text, KNOWN)
    unit = Unit("Result", "", (), (), frozenset(), "", partial=True)
    grid = Grid((("t", "k"), ("u", "k")), frozenset(), EDGES, False, {})
    assert Divider(analysis, KNOWN).read_once(unit, grid) == {"u": "u"}
