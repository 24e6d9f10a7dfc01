"""The token tree holds every distinct prefix once, in the right place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.tree import build_tree, split_rows, tree_size

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


def prefixes(batch):
    return {tuple(sequence[: k + 1]) for sequence in batch for k in range(len(sequence))}


@given(sequences)
def test_each_prefix_is_one_node(batch):
    tree = build_tree(batch)
    assert len(tree.tokens) == tree_size(batch) == len(prefixes(batch))


@given(sequences)
def test_paths_spell_the_sequences_with_depth_as_position(batch):
    tree = build_tree(batch)
    for sequence, path in zip(batch, tree.paths, strict=True):
        nodes = path[path >= 0]
        assert tree.tokens[nodes].tolist() == sequence
        assert tree.positions[nodes].tolist() == list(range(len(sequence)))
        assert tree.parents[nodes].tolist() == [-1, *nodes[:-1].tolist()]
        assert (path[len(sequence) :] == -1).all()


@given(sequences)
def test_a_node_sees_its_ancestors_and_itself_only(batch):
    tree = build_tree(batch)
    expected = torch.zeros(len(tree.tokens), len(tree.tokens), dtype=torch.bool)
    for node in range(len(tree.tokens)):
        ancestor = node
        while ancestor >= 0:
            expected[node, ancestor] = True
            ancestor = int(tree.parents[ancestor])
    assert torch.equal(tree.attention_mask(), expected)


@given(sequences, st.integers(1, 20))
def test_rows_partition_the_batch_within_the_budget(batch, budget):
    rows = split_rows(batch, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(batch)))
    for row in rows:
        members = [batch[index] for index in row]
        assert tree_size(members) <= budget or len(row) == 1


def test_groups_stay_whole_where_they_fit():
    groups = [[prompt, prompt, 10 * prompt + reply] for prompt in range(1, 5) for reply in range(3)]
    rows = split_rows(groups, max_tokens=10)
    assert sorted(map(sorted, rows)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_a_common_preamble_costs_once_a_row():
    batch = [[0] * 50 + [group, reply] for group in range(1, 5) for reply in range(4)]
    assert tree_size(batch) == 50 + 4 * (1 + 4)
    assert len(split_rows(batch, 70)) == 1
    assert len(split_rows(batch, 60)) == 2


@pytest.mark.parametrize("batch", [[], [[1], []]])
def test_empty_input_is_refused(batch):
    with pytest.raises(ValueError, match="sequences: expected one or more"):
        build_tree(batch)


def test_a_budget_must_be_positive():
    with pytest.raises(ValueError, match="max_tokens: expected a positive"):
        split_rows([[1]], 0)
