import pytest

from ebbflow.planners.query.plan.trees import (
    Join,
    Leaf,
    algebra,
    is_linear,
    joins,
    leaves,
    logical_key,
    same_logical,
)

A, B, C, D = (Leaf(i) for i in range(4))
NAMES = ["lineitem", "orders", "nation", "region"]


def test_algebra_reads_as_people_write_it():
    tree = Join(Join(A, B, "sort_merge"), C, "broadcast")
    assert algebra(tree, NAMES) == "((lineitem ⋈ orders) ⋈ᵇ nation)"
    assert algebra(Join(A, B, "shuffle_hash"), NAMES) == "(lineitem ⋈ʰ orders)"


def test_joins_come_children_first_and_leaves_from_the_left():
    tree = Join(Join(A, B, "sort_merge"), Join(C, D, "broadcast"), "sort_merge")
    assert [j.mask for j in joins(tree)] == [0b0011, 0b1100, 0b1111]
    assert list(leaves(tree)) == [A, B, C, D]


def test_swapped_sides_and_methods_do_not_change_the_logical_tree():
    one = Join(Join(A, B, "sort_merge"), C, "broadcast")
    other = Join(C, Join(B, A, "shuffle_hash"), "sort_merge")
    assert same_logical(one, other)
    assert not same_logical(one, Join(Join(A, C, "sort_merge"), B, "broadcast"))
    assert logical_key(A) != logical_key(B)


def test_a_tree_is_linear_when_every_join_has_a_single_relation():
    assert is_linear(Join(C, Join(A, B, "sort_merge"), "sort_merge"))
    assert not is_linear(Join(Join(A, B, "sort_merge"), Join(C, D, "sort_merge"), "sort_merge"))


def test_a_join_refuses_children_that_share_relations_and_a_wrong_mask():
    with pytest.raises(ValueError, match="must not share"):
        Join(A, Join(A, B, "sort_merge"), "sort_merge")
    with pytest.raises(ValueError, match="union"):
        Join(A, B, "sort_merge", 0b111)
