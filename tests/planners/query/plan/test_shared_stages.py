"""One stage for a join that several blocks of a query have."""

from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.render import checkpoint_name
from ebbflow.planners.query.plan.retention import sharing
from ebbflow.planners.query.plan.staging import Choice, Staging
from ebbflow.planners.query.plan.trees import Join, Leaf, joins
from tests.planners.query.test_planner import planner

PARTS = {"lineitem", "part"}
ONE_CORE = Share.uniform(1, 8)
# all three join lineitem with part and then with orders; a tree of the third is best without that join's cut
SMALL_PARTS = (
    "FROM lineitem, part, orders{} WHERE l_partkey = p_partkey AND p_size = 7 AND o_orderkey = l_orderkey"
)
CUSTOMERS = f"{SMALL_PARTS.format(', customer{}')} AND o_custkey = c_custkey"
BLOCKS = (
    f"{SMALL_PARTS.format('')} AND o_orderpriority = '1-URGENT'",
    f"{CUSTOMERS.format('')} AND c_acctbal > 5",
    f"{CUSTOMERS.format(', nation')} AND c_nationkey = n_nationkey AND n_name = 'CANADA'",
)
TEXT = "SELECT a.n, b.n, c.n FROM {}".format(
    ", ".join(f"(SELECT count(*) AS n {block}) AS {name}" for name, block in zip("abc", BLOCKS, strict=True))
)


def test_a_join_of_several_blocks_is_made_once_where_that_costs_least():
    found = planner(TEXT).candidates(ONE_CORE, contrasts=False)
    best = min(found, key=lambda plan: plan.total_work)
    assert best is found[0]
    assert [stage.name for stage in best.stages] == ["lineitem ⋈ part", "Result"]
    assert best.stages[1].statement.spark.count(checkpoint_name(best.stages[0].output_fp)) == 3, (
        "of each block"
    )
    alone = next(plan for plan in found if len(plan.stages) == 1)
    assert best.total_work < 0.6 * alone.total_work


def test_plans_differ_where_another_block_computes_the_same_join_itself():
    query = planner(TEXT)
    blocks = query.analysis.blocks
    plan = query.candidates(ONE_CORE, contrasts=False)[0]
    trees = query._choices[plan.id].trees
    (mask,) = query._choices[plan.id].cuts["a", 0]
    key = query.analysis.fingerprints.subset(blocks["a", 0], mask)
    assert key == query.analysis.fingerprints.subset(blocks["b", 0], mask) == plan.stages[0].output_fp
    forms = set()
    for cut in (["a"], ["b"], ["a", "b"]):
        choice = Choice(trees, {(name, 0): frozenset({mask}) for name in cut})
        *_, result = Staging(query.analysis, choice).units
        assert result.inputs == (key,)
        forms.add(result.shape)
    assert len(forms) == 3


def test_plans_differ_where_a_view_inside_the_statement_is_cut_and_where_the_statement_itself_is():
    query = planner(
        f"WITH v AS (SELECT count(*) AS n {BLOCKS[0]}) SELECT v.n, count(*) AS m "
        f"{BLOCKS[0].replace('orders', 'orders, v')} GROUP BY v.n"
    )
    trees = {key: query._trees(key, query._sizes(None), ONE_CORE)[0] for key in query.analysis.blocks}
    outputs = query.analysis.fingerprints.subset
    cuts = {
        key: next(
            j.mask for j in joins(tree) if set(query.analysis.blocks[key].graph.aliases(j.mask)) == PARTS
        )
        for key, tree in trees.items()
    }
    assert len(trees) == 2
    assert len({outputs(query.analysis.blocks[key], mask) for key, mask in cuts.items()}) == 1
    forms = {
        Staging(query.analysis, Choice(trees, {key: frozenset({cuts[key]}) for key in cut})).units[-1].shape
        for cut in ([*trees][:1], [*trees][1:], [*trees])
    }
    assert len(forms) == 3


def leaf_join(left: int, right: int) -> Join:
    return Join(Leaf(left), Leaf(right), "broadcast")


def test_blocks_that_have_a_join_are_cut_there_alone_and_the_others_are_as_they_are_best_or_whole():
    ab, abc = leaf_join(0, 1), Join(leaf_join(0, 1), Leaf(2), "broadcast")
    other = Join(leaf_join(1, 2), Leaf(0), "broadcast")
    none, low, all_three = frozenset(), frozenset({0b011}), frozenset({0b111})
    options = {
        "x": [(ab, none), (ab, low)],
        "y": [(other, none), (abc, all_three)],  # no cut of it is at 0b011, but a tree has that join
        "z": [(other, all_three), (other, none)],
    }
    named = {("x", 0b011): "P", ("y", 0b011): "P"}
    found = sharing(options, lambda key, mask: named.get((key, mask), f"{key}{mask}"))
    assert found == [
        {"x": (ab, low), "y": (abc, low), "z": (other, all_three)},
        {"x": (ab, low), "y": (abc, low), "z": (other, none)},
    ]
    assert [join.mask for join in joins(found[0]["y"][0])] == [0b011, 0b111]


def test_a_single_block_shares_nothing():
    assert sharing({"x": [(leaf_join(0, 1), frozenset({0b011}))]}, lambda key, mask: "P") == []
