"""The token tree: a batch of sequences laid out as a trie, so that each distinct prefix is run once.

In a batch of groups most tokens stand several times: every prompt opens with the same system message, the G
responses of a group share a prompt, the calls of an append-only agent repeat its transcript. A causal model
computes the same thing for the same prefix, so one copy is enough. The trie is flattened depth first into one
row; a node attends to its ancestors and itself, and its position is its depth. What comes out at each node is
what the plain forward gives at that place in every sequence that passes through it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from course_lib._tensors import as_tensor, require, require_number


@dataclass(frozen=True)
class TokenTree:
    """A trie of B sequences with N nodes in depth-first order.

    Attributes:
        tokens: (N,) token id of each node.
        positions: (N,) depth of each node; roots are at 0.
        parents: (N,) index of each node's parent, -1 for a root.
        ends: (N,) one past the last node of each node's subtree.
        paths: (B, T) node of every token of every sequence, in the order given, -1 behind a sequence's end.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    parents: torch.Tensor
    ends: torch.Tensor
    paths: torch.Tensor

    def attention_mask(self) -> torch.Tensor:
        """(N, N) bool: may node i (row) look at node j (column)? Only if j is i itself or an ancestor.

        Depth-first order makes a subtree a contiguous range, so j is an ancestor of i exactly when
        j ≤ i < ends[j].
        """
        node = torch.arange(len(self.tokens), device=self.tokens.device)
        return (node[None, :] <= node[:, None]) & (node[:, None] < self.ends[None, :])

    def to(self, device: torch.device | str) -> "TokenTree":
        """The same tree on another device."""
        return TokenTree(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def build_tree(sequences: Sequence[Sequence[int]]) -> TokenTree:
    """Builds the trie of `sequences`.

    Args:
        sequences: B lists of token ids, none of them empty.

    Returns:
        The tree; `len(tree.tokens)` is the number of distinct prefixes.

    Raises:
        ValueError: there is no sequence, or one is empty.

    Example:
        >>> tree = build_tree([[5, 6, 7], [5, 6, 8, 9], [5, 6]])
        >>> tree.tokens.tolist(), tree.positions.tolist()
        ([5, 6, 7, 8, 9], [0, 1, 2, 2, 3])
        >>> tree.paths.tolist()
        [[0, 1, 2, -1], [0, 1, 3, 4], [0, 1, -1, -1]]
        >>> tree.attention_mask().int().tolist()[4]
        [1, 1, 0, 1, 1]
    """
    order, shared = _sorted_with_shared_prefixes(sequences)
    paths = np.full((len(sequences), max(map(len, sequences))), -1, dtype=np.int64)
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    ends: list[int] = []
    path: list[int] = []
    for index, common in zip(order, shared, strict=True):
        sequence, size = sequences[index], len(tokens)
        for node in path[common:]:
            ends[node] = size
        new = range(size, size + len(sequence) - common)
        tokens.extend(sequence[common:])  # += would add an array's numbers
        positions += range(common, len(sequence))
        parents += [path[common - 1] if common else -1, *new[:-1]] if new else []
        ends += [0] * len(new)
        path = path[:common] + list(new)
        paths[index, : len(path)] = path
    for node in path:
        ends[node] = len(tokens)
    ids = as_tensor("sequences", tokens)
    require(ids.dtype == torch.long, "sequences", "lists of token ids (integers)", ids.dtype)
    return TokenTree(ids, *(torch.as_tensor(column) for column in (positions, parents, ends, paths)))


def tree_size(sequences: Sequence[Sequence[int]]) -> int:
    """Number of distinct prefixes of `sequences`: the tokens a tree runs.

    Example:
        >>> tree_size([[5, 6, 7], [5, 6, 8, 9], [5, 6]])
        5
    """
    order, shared = _sorted_with_shared_prefixes(sequences)
    return sum(len(sequences[index]) - common for index, common in zip(order, shared, strict=True))


def split_rows(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Cuts a batch into rows of at most `max_tokens` tree nodes, keeping subtrees whole where they fit.

    A subtree that is too large is opened and its branches are packed in order; each new row repeats the branches'
    common prefix. A single sequence longer than the budget gets a row of its own.

    Args:
        sequences: B lists of token ids.
        max_tokens: budget of one row, in nodes.

    Returns:
        Lists of indices into `sequences`; every index stands in exactly one.

    Raises:
        ValueError: `max_tokens` is not positive, or a sequence is empty.

    Example:
        >>> split_rows([[1, 2, 3], [7, 8], [1, 2, 4], [7, 9]], max_tokens=4)
        [[0, 2], [1, 3]]
        >>> split_rows([[1, 2, 3], [7, 8], [1, 2, 4], [7, 9]], max_tokens=7)
        [[0, 2, 1, 3]]
    """
    max_tokens = require_number("max_tokens", max_tokens, "a positive number of tokens", lambda n: n > 0)
    order, shared = _sorted_with_shared_prefixes(sequences)
    lengths = [len(sequences[index]) for index in order]
    total = [0, *accumulate(length - common for length, common in zip(lengths, shared, strict=True))]

    def size(start: int, stop: int) -> int:
        return shared[start] + total[stop] - total[start]

    def pack(start: int, stop: int) -> list[tuple[int, int]]:
        if stop - start == 1 or size(start, stop) <= max_tokens:
            return [(start, stop)]
        trunk = min(shared[start + 1 : stop])
        forks = [start, *(i for i in range(start + 1, stop) if shared[i] == trunk), stop]
        rows: list[tuple[int, int]] = []
        for first, last in pairwise(forks):
            if rows and size(rows[-1][0], last) <= max_tokens:
                rows[-1] = (rows[-1][0], last)
            else:
                rows += pack(first, last)
        return rows

    return [order[start:stop] for start, stop in pack(0, len(order))]


def _sorted_with_shared_prefixes(sequences: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Lexicographic order, which is the trie's depth-first order, and the length of the prefix that each
    sequence shares with the one before it (0 for the first)."""
    try:
        lengths = [len(sequence) for sequence in sequences]
    except TypeError:
        raise ValueError(f"sequences: expected lists of token ids, got {sequences!r:.80}") from None
    some = bool(lengths) and min(lengths) > 0
    require(some, "sequences", "one or more, each with at least one token", "none or an empty one")
    order = sorted(range(len(sequences)), key=lambda index: list(sequences[index]))
    shared = [0]
    for left, right in pairwise(order):
        a, b = sequences[left], sequences[right]
        limit = min(len(a), len(b))
        shared.append(next((k for k in range(limit) if a[k] != b[k]), limit))
    return order, shared
