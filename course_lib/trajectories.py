"""Trajectories of many model calls, and the segments they are trained as.

The environment's answers do not depend on θ, so ∇log p_θ(τ) = Σ_j ∇log π_θ(y_j | c_j): train every output
y_j in the context c_j it was produced in, and give all of them the trajectory's advantage. A single-turn
response is a trajectory of one call; nothing here treats it apart.
"""

import math
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from course_lib._tensors import (
    as_tensor,
    compute_dtype,
    require,
    require_choice,
    require_count,
    require_finite,
    require_shape,
)
from course_lib.advantages import Missing, group_relative_advantages, leave_one_out_advantages


@dataclass(frozen=True)
class Call:
    """One model call: the token ids the model saw and those it produced, never decoded and encoded again.

    The lists are copied, so an agent may go on appending to the ones it passed.

    Args:
        context: c_j, token ids as the model saw them.
        output: y_j, token ids as they were sampled, end-of-sequence token included. May be empty; trains
            nothing then.
        log_probs: log-probability of each output token when it was drawn, or None if nobody kept them.
        truncated: the length limit ended the output, and no token that ends one.

    Raises:
        ValueError: something is no token id, or log_probs do not match output.

    Example:
        >>> Call(context=[1, 2], output=[3], log_probs=[-0.5])
        Call(context=[1, 2], output=[3], log_probs=[-0.5])
    """

    context: list[int]
    output: list[int]
    log_probs: list[float] | None = None
    truncated: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", _token_ids("context", self.context))
        object.__setattr__(self, "output", _token_ids("output", self.output))
        if self.log_probs is not None:
            try:
                log_probs = [float(p) for p in self.log_probs]
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"log_probs: expected numbers, got {self.log_probs!r:.80}") from error
            require_count("log_probs", log_probs, len(self.output), "of output")
            require(all(map(math.isfinite, log_probs)), "log_probs", "finite values", log_probs)
            object.__setattr__(self, "log_probs", log_probs)


@dataclass(frozen=True)
class Trajectory:
    """The calls of one attempt in order, its reward, and the group (usually the prompt) it belongs to."""

    calls: Sequence[Call]
    reward: float | None
    group_id: Hashable


@dataclass(frozen=True)
class Segment:
    """One training row. `mask[t]` is 1 where the policy produced `tokens[t]`; `log_probs[t]` belongs to that
    token.

    `log_probs` is 0 where the mask is 0, and NaN for an output whose call kept none: a loss that is given it
    as `old_log_probs` refuses it.
    """

    tokens: list[int]
    mask: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class SegmentBatch:
    """Segments padded on the right to one width T.

    Args:
        tokens: (B, T) token ids.
        attention_mask: (B, T) 1 on the tokens of the segment, whatever their ids, 0 on padding.
        mask: (B, T) bool, where the policy produced the token in this column.
        log_probs: (B, T) log-probability of the token in this column when it was drawn, 0 elsewhere.
        advantages: (B,) advantage of the trajectory the row belongs to.
        owners: (B,) index of that trajectory.
    """

    tokens: Tensor
    attention_mask: Tensor
    mask: Tensor
    log_probs: Tensor
    advantages: Tensor
    owners: Tensor

    def inputs(self, rows: Iterable[int] | None = None) -> list[list[int]]:
        """Token ids that a model reads to score the given rows, by default all: each without padding and without its
        last token, which is only predicted."""
        sizes = (self.attention_mask.sum(1) - 1).tolist()
        return [self.tokens[i, : sizes[i]].tolist() for i in (range(len(sizes)) if rows is None else rows)]

    def to(self, device: torch.device | str) -> "SegmentBatch":
        """The same batch on another device."""
        return SegmentBatch(*(getattr(self, field.name).to(device) for field in fields(self)))


def segments(trajectory: Trajectory, *, merge_prefixes: bool = True) -> list[Segment]:
    """The rows a trajectory is trained as: every sampled token once, each in the context it was sampled in.

    A call whose context starts with the preceding call's context + output goes on with that call's segment,
    and what the environment added stands between the two under a zero mask. Any other call starts a new
    segment. An append-only agent gives one segment, its transcript; an agent that edits its context gives
    several. Merging saves work and changes no gradient: each token still has the same tokens before it.

    Args:
        trajectory: the calls in the order they were made.
        merge_prefixes: False gives one segment a call.

    Returns:
        the segments, in the order of the calls.

    Source:
        Stepwise GRPO as in Context Language Models (arXiv 2609.37725).

    Example:
        >>> calls = [Call([1], [2]), Call([1, 2, 9], [3]), Call([1, 8], [4])]
        >>> [(s.tokens, s.mask) for s in segments(Trajectory(calls, reward=1.0, group_id=0))]
        [([1, 2, 9, 3], [0, 1, 0, 1]), ([1, 8, 4], [0, 0, 1])]
    """
    rows: list[Segment] = []
    for call in trajectory.calls:
        if not (merge_prefixes and rows and call.context[: len(rows[-1].tokens)] == rows[-1].tokens):
            rows.append(Segment([], [], []))
        row = rows[-1]
        seen = call.context[len(row.tokens) :]
        recorded = [math.nan] * len(call.output) if call.log_probs is None else call.log_probs
        row.tokens.extend(seen + call.output)
        row.mask.extend([0] * len(seen) + [1] * len(call.output))
        row.log_probs.extend([0.0] * len(seen) + recorded)
    return rows


def trajectory_advantages(
    trajectories: Sequence[Trajectory],
    *,
    baseline: Literal["mean", "leave-one-out"] = "mean",
    scale: Literal["std", "none"] = "std",
    ddof: int = 0,
    eps: float = 0.0,
    missing: Missing = "error",
) -> Tensor:
    """One advantage a trajectory, relative to the *trajectories* of its group.

    A mean over steps would count a trajectory once for each of its calls: a 3-call success and a 1-call
    failure would get +1/4 and −3/4 instead of ±1/2, and long failures would lower the baseline of everybody.

    Args:
        trajectories: any order; groups may differ in size.
        baseline: "mean" is `group_relative_advantages`, "leave-one-out" is `leave_one_out_advantages`.
        scale: with "mean" only, as are ddof and eps: see `group_relative_advantages`.
        ddof: 0 or 1.
        eps: added to the std.
        missing: "error" raises on a reward of None or NaN, "ignore" leaves the trajectory out and gives it 0.

    Returns:
        (number of trajectories,) advantages.

    Raises:
        ValueError: a reward is missing or infinite, or an option is out of range.

    Example:
        >>> long = Trajectory([Call([1], [2]), Call([3], [4]), Call([5], [6])], reward=1.0, group_id="q")
        >>> short = Trajectory([Call([1], [7])], reward=0.0, group_id="q")
        >>> trajectory_advantages([long, short], scale="none").tolist()
        [0.5, -0.5]
    """
    require_choice("baseline", baseline, ("mean", "leave-one-out"))
    rewards = [t.reward for t in trajectories]
    group_ids = [t.group_id for t in trajectories]
    if baseline == "leave-one-out":
        return leave_one_out_advantages(rewards, group_ids, missing=missing)
    return group_relative_advantages(rewards, group_ids, scale=scale, ddof=ddof, eps=eps, missing=missing)


def stepwise_batch(
    trajectories: Sequence[Trajectory],
    *,
    pad_token_id: int,
    merge_prefixes: bool = True,
    advantages: Tensor | Sequence[float] | None = None,
) -> SegmentBatch:
    """All segments of all trajectories as one padded batch, each row with its trajectory's advantage.

    Args:
        trajectories: in any order.
        pad_token_id: any valid id; what is padding is told by `attention_mask` alone.
        merge_prefixes: see `segments`.
        advantages: (number of trajectories,); by default `trajectory_advantages(trajectories)`.

    Returns:
        SegmentBatch of B segments, T tokens wide, on the CPU.

    Raises:
        ValueError: pad_token_id is no token id, or advantages do not match the trajectories.

    Example:
        >>> right = Trajectory([Call([1], [2], [-0.1]), Call([1, 2, 9], [3], [-0.2])], reward=1.0, group_id=0)
        >>> wrong = Trajectory([Call([1], [5], [-0.3])], reward=0.0, group_id=0)
        >>> batch = stepwise_batch([right, wrong], pad_token_id=0)
        >>> batch.tokens.tolist(), batch.advantages.tolist(), batch.owners.tolist()
        ([[1, 2, 9, 3], [1, 5, 0, 0]], [1.0, -1.0], [0, 1])
    """
    (pad_token_id,) = _token_ids("pad_token_id", [pad_token_id])
    if advantages is None:
        advantages = trajectory_advantages(trajectories)
    advantages = as_tensor("advantages", advantages).cpu()
    require_shape("advantages", advantages, [len(trajectories)], "(number of trajectories,)")
    require_finite("advantages", advantages)
    owned = [(i, s) for i, t in enumerate(trajectories) for s in segments(t, merge_prefixes=merge_prefixes)]
    rows = [s for _, s in owned]
    owners = torch.tensor([i for i, _ in owned], dtype=torch.long)
    return SegmentBatch(
        tokens=_pad([s.tokens for s in rows], pad_token_id, torch.long),
        attention_mask=_pad([[1] * len(s.tokens) for s in rows], 0, torch.long),
        mask=_pad([s.mask for s in rows], 0, torch.bool),
        log_probs=_pad([s.log_probs for s in rows], 0.0, torch.float32),
        advantages=advantages.to(compute_dtype(advantages))[owners],
        owners=owners,
    )


def _pad(rows: list[list], fill: float, dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows), default=0)
    padded = [row + [fill] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=dtype).reshape(len(rows), width)


def _token_ids(name: str, ids: Iterable[Any]) -> list[int]:
    try:
        found = list(map(operator.index, ids.tolist() if isinstance(ids, Tensor) else ids))
    except TypeError as error:
        raise ValueError(f"{name}: expected token ids (integers), got {ids!r:.80}") from error
    require(min(found, default=0) >= 0, name, "token ids ≥ 0", min(found, default=0))
    require(max(found, default=0) < 2**63, name, "token ids that int64 holds", f"{max(found, default=0)!r:.30}")
    return found
