"""Advantages: how much better a response was than its baseline.

A baseline b that does not depend on the response leaves the policy gradient unbiased, and a good one lowers
its variance. Here b comes from the responses of the group (GRPO, RLOO) or from a critic (GAE).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from course_lib._tensors import (
    as_tensor,
    compute_dtype,
    number_ids,
    read_tokens,
    require,
    require_choice,
    require_count,
    require_finite,
    require_number,
    require_shape,
)

Rewards = Tensor | Sequence[float | None]
Ids = Tensor | Sequence[Hashable]
Missing = Literal["error", "ignore"]

# Rewards closer than this, relative to the largest of their group, differ by rounding only.
EQUAL_WITHIN = 1e-6


def group_relative_advantages(
    rewards: Rewards,
    group_ids: Ids,
    *,
    scale: Literal["std", "none"] = "std",
    ddof: int = 0,
    eps: float = 0.0,
    missing: Missing = "error",
) -> Tensor:
    """A_i = (r_i − mean(r)) / (std(r) + eps), mean and std over the group of response i.

    With binary rewards and success fraction p̂ a success gets √((1−p̂)/p̂) and a failure −√(p̂/(1−p̂)). A
    group of one, or one whose rewards are all equal (max − min ≤ 1e-6 · max|r|), says nothing and gets
    exactly 0.

    Args:
        rewards: (N,) one reward a response, list or tensor.
        group_ids: (N,) integers or hashables. Rows of a group may stand anywhere, groups may differ in size.
        scale: "std" divides by the group's standard deviation (GRPO), "none" does not (Dr. GRPO).
        ddof: 0 for the population std, 1 for the sample std. ddof=1, eps=1e-4 is what TRL computes.
        eps: added to the std.
        missing: what a None or NaN reward does: "error" raises, "ignore" leaves the row out of mean and std
            and gives it 0.

    Returns:
        (N,) advantages.

    Raises:
        ValueError: lengths differ, a reward is missing or infinite, or an option is out of range.

    Source:
        Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), section 4.1;
        Liu et al. 2025, Dr. GRPO (arXiv 2503.20783).

    Example:
        >>> group_relative_advantages([1.0, 0.0, 0.0, 0.0, 0.0], ["question"] * 5)  # p̂ = 1/5
        tensor([ 2.0000, -0.5000, -0.5000, -0.5000, -0.5000])
        >>> group_relative_advantages([3.0, 1.0, 1.0], [0, 0, 1], scale="none")
        tensor([ 1., -1.,  0.])
    """
    require_choice("scale", scale, ("std", "none"))
    ddof = require_number("ddof", ddof, "0 (population std) or 1 (sample std)", lambda d: d in (0, 1))
    eps = require_number("eps", eps, "a finite number ≥ 0", lambda e: 0 <= e < float("inf"))
    groups = _group(rewards, group_ids, missing)
    deviation = groups.deviation
    if scale == "std":
        # In units of the group's range, squares can neither underflow nor overflow.
        span = torch.where(groups.informative, groups.span, 1)
        deviation = groups.in_units(span).deviation
        variance = groups.total(deviation.square()) / (groups.size - ddof).clamp(min=1)
        std = torch.where(groups.informative, variance, 1).sqrt()
        # eps as a tensor: a Python number over a tensor is taken as eps · (1 / span), and 0 · inf is NaN.
        deviation = deviation / (std + span.new_tensor(eps) / span)
    return groups.to_rows(torch.where(groups.informative, deviation, 0))


def leave_one_out_advantages(rewards: Rewards, group_ids: Ids, *, missing: Missing = "error") -> Tensor:
    """A_i = r_i − mean of the *other* rewards of its group = G/(G−1) · (r_i − mean(r)).

    The baseline does not contain r_i, so the gradient is unbiased without a factor. A group of one, or one of
    equal rewards, gets exactly 0.

    Args:
        rewards: (N,) one reward a response, list or tensor.
        group_ids: (N,) integers or hashables.
        missing: "error" raises on a None or NaN reward, "ignore" leaves the row out and gives it 0.

    Returns:
        (N,) advantages.

    Raises:
        ValueError: lengths differ, or a reward is missing or infinite.

    Source:
        Ahmadian et al. 2024, RLOO (arXiv 2402.14740).

    Example:
        >>> leave_one_out_advantages([1.0, 2.0, 6.0], [0, 0, 0]).tolist()
        [-3.0, -1.5, 4.5]
    """
    groups = _group(rewards, group_ids, missing)
    advantages = groups.deviation * groups.size / (groups.size - 1).clamp(min=1)
    return groups.to_rows(torch.where(groups.informative, advantages, 0))


def informative_groups(rewards: Rewards, group_ids: Ids, *, missing: Missing = "error") -> Tensor:
    """Which rows belong to a group that carries a signal: at least two rewards, not all equal.

    Dynamic sampling keeps these and draws again for the rest.

    Args:
        rewards: (N,) one reward a response, list or tensor.
        group_ids: (N,) integers or hashables.
        missing: "error" raises on a None or NaN reward, "ignore" leaves the row out and gives it False.

    Returns:
        (N,) bool.

    Raises:
        ValueError: lengths differ, or a reward is missing or infinite.

    Source:
        Yu et al. 2025, DAPO (arXiv 2503.14476), section 3.2.

    Example:
        >>> informative_groups([1.0, 1.0, 0.0, 1.0], ["a", "a", "b", "b"]).tolist()
        [False, False, True, True]
    """
    groups = _group(rewards, group_ids, missing)
    return groups.to_rows(groups.informative)


def efficiency_advantages(costs: Rewards, successes: Tensor | Sequence[float | bool], group_ids: Ids) -> Tensor:
    """A_i = clip((c̄ − c_i) / c̄, −1, 1) for a success, c̄ the mean cost of its group's successes; 0 for a failure.

    Among the trajectories that solved a problem the cheaper ones get more; failing cheaply earns nothing. A group with
    fewer than two successes, or whose successes all cost the same, gets exactly 0. Add it to the advantage of the
    outcome once that is normalised: A = A_outcome + ω · A_eff. In large groups and unclipped its expected gradient is
    −J ∇log c̄. What that lowers is the price of a success, not the number of failures: keep ω small.

    Args:
        costs: (N,) cost of each trajectory, ≥ 0, in any unit: tokens, calls, seconds. A failure's may be missing.
        successes: (N,) true or 1 where the problem was solved, false or 0 where not.
        group_ids: (N,) integers or hashables.

    Returns:
        (N,) advantages in [−1, 1].

    Raises:
        ValueError: lengths differ, a success has a missing, infinite or negative cost, or successes are not 0 or 1.

    Source:
        Context Language Models (arXiv 2609.37725).

    Example:
        >>> efficiency_advantages([100.0, 300.0, 50.0], [True, True, False], ["q", "q", "q"]).tolist()
        [0.5, -0.5, 0.0]
    """
    costs, solved = _present("costs", costs), as_tensor("successes", successes)
    require_shape("successes", solved, costs.shape, "(N,), one for each of costs")
    require(bool(((solved == 0) | (solved == 1)).all()), "successes", "true or false, 1 or 0", solved.tolist())
    solved = solved.to(costs.device) == 1
    wrong = solved & ~((costs >= 0) & costs.isfinite())
    require(not wrong.any(), "costs", "a finite number ≥ 0 for every success", costs[wrong][:1].tolist())
    groups = _group(torch.where(solved, costs, float("nan")), group_ids, "ignore", "costs")
    # In units of about the dearest, so that the mean of tiny costs does not become 0; a power of two costs no digit.
    dearest = torch.where(groups.informative, groups.extreme("amax"), 1)
    scaled = groups.in_units(torch.ldexp(torch.ones_like(dearest), dearest.frexp().exponent - 1))
    mean = torch.where(groups.informative, scaled.total(scaled.rewards) / groups.size, 1)
    saved = (-scaled.deviation / mean).clamp(-1, 1)
    return groups.to_rows(torch.where(groups.informative, saved, 0))


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the active tokens; masked ones are skipped, not treated as steps.

    A_k = δ_k + γλ A_{k+1} with δ_k = r_k + γ V_{k+1} − V_k, where k+1 is the next *active* token, however
    many tool tokens stand between, and A and V are 0 after the last. Both results are constants of a loss:
    compute them under `torch.no_grad()`.

    Args:
        rewards: (B, T) reward at each token.
        values: (B, T) the critic's V at each token.
        mask: (B, T) 1 where the policy produced the token. Rewards and values elsewhere are ignored.
        gamma: discount γ in [0, 1], a token.
        lam: λ in [0, 1]: 0 trusts the critic (one-step TD), 1 the sampled return.

    Returns:
        advantages (B, T) and returns = advantages + values (B, T), both 0 under the mask.

    Raises:
        ValueError: shapes differ, a value at an active token is not finite, or γ or λ is outside [0, 1].

    Source:
        Schulman et al. 2016, GAE (arXiv 1506.02438).

    Example:
        >>> r, v = torch.tensor([[0.0, 0, 0, 1]]), torch.tensor([[0.5, 9, 9, 0.6]])
        >>> generalized_advantages(r, v, torch.tensor([[1, 0, 0, 1]]))
        (tensor([[0.4800, 0.0000, 0.0000, 0.4000]]), tensor([[0.9800, 0.0000, 0.0000, 1.0000]]))
    """
    gamma = require_number("gamma", gamma, "a number in [0, 1]", lambda g: 0 <= g <= 1)
    lam = require_number("lam", lam, "a number in [0, 1]", lambda w: 0 <= w <= 1)
    active, rewards, values = read_tokens(mask, rewards=rewards, values=values)
    advantage = next_value = values.new_zeros(len(values))
    columns = []
    for now, reward, value in zip(active.T.flip(0), rewards.T.flip(0), values.T.flip(0), strict=True):
        step = reward + gamma * next_value - value + gamma * lam * advantage
        advantage = torch.where(now, step, advantage)
        next_value = torch.where(now, value, next_value)
        columns.append(torch.where(now, step, 0))
    advantages = torch.stack(columns[::-1], dim=1) if columns else values
    return advantages, require_finite("rewards, values", advantages + values)


@dataclass(frozen=True)
class _Groups:
    """The M rewards that are present, and statistics over the group of each, one value a reward."""

    rewards: Tensor  # (M,)
    index: Tensor  # (M,) the number of each reward's group
    present: Tensor  # (N,) bool, which rows the M rewards come from

    def total(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(self.present)).index_add(0, self.index, values)[self.index]

    def extreme(self, which: Literal["amin", "amax"]) -> Tensor:
        start = self.rewards.new_zeros(len(self.present))
        return start.scatter_reduce(0, self.index, self.rewards, which, include_self=False)[self.index]

    @cached_property
    def size(self) -> Tensor:
        return self.total(torch.ones_like(self.rewards))

    @cached_property
    def span(self) -> Tensor:
        return self.extreme("amax") - self.extreme("amin")

    @cached_property
    def informative(self) -> Tensor:
        largest = torch.maximum(self.extreme("amax").abs(), self.extreme("amin").abs())
        return self.span > EQUAL_WITHIN * largest

    @cached_property
    def deviation(self) -> Tensor:
        """r − mean(r), measured from the smallest reward so that a large common offset costs no digits."""
        above = self.rewards - self.extreme("amin")
        return above - self.total(above) / self.size

    def in_units(self, unit: Tensor) -> "_Groups":
        """The same groups, each reward divided by the unit of its group."""
        return replace(self, rewards=self.rewards / unit)

    def to_rows(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(self.present)).masked_scatter(self.present, values)


def _present(name: str, values: Rewards) -> Tensor:
    """(N,) numbers, NaN for None."""
    if isinstance(values, list | tuple):
        values = [float("nan") if v is None else v for v in values]
    values = as_tensor(name, values)
    require(values.ndim == 1, name, "shape (N,)", tuple(values.shape))
    return values.to(compute_dtype(values))


def _group(rewards: Rewards, group_ids: Ids, missing: Missing, name: str = "rewards") -> _Groups:
    require_choice("missing", missing, ("error", "ignore"))
    rewards = _present(name, rewards)
    numbers = number_ids("group_ids", group_ids)
    require_count(name, rewards, len(numbers), "of group_ids")
    present = ~rewards.isnan()
    if missing == "error" and not present.all():
        row = (~present).nonzero()[0].item()
        raise ValueError(f'rewards: expected a number or missing="ignore", got None or NaN in row {row}')
    index = torch.tensor(numbers, device=rewards.device, dtype=torch.long)
    # Sums over a group have to be finite too, hence the factor.
    huge = present & ~(rewards * 2 * len(rewards)).isfinite()
    require(not huge.any(), name, "finite values", rewards[huge][:1].tolist())
    return _Groups(rewards[present], index[present], present)
