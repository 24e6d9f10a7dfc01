"""Policy-gradient losses, built from one per-token loss and one weight per token.

Σ weights · per-token loss covers every normalisation in the literature. Weights are computed once over a
whole batch and sliced with it, so cutting the batch into micro-batches, padding it wider or spreading it over
processes cannot change a gradient. In every function only `log_probs` receives a gradient; what stands under
a zero mask is never looked at.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from course_lib._tensors import (
    as_mask,
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
    within,
)

Level = Literal["token", "sequence"]
Estimator = Literal["k1", "k2", "k3"]
Mode = Literal["token-mean", "sequence-mean", "sequence-sum", "fixed-length", "trajectory-mean"]
LEVELS = ("token", "sequence")
ESTIMATORS = ("k1", "k2", "k3")
MODES = ("token-mean", "sequence-mean", "sequence-sum", "fixed-length", "trajectory-mean")

# Where k3 turns from e^x − 1 − x into its tangent.
K3_KNEE = 20.0


@dataclass(frozen=True)
class LossReport:
    """A scalar to call `.backward()` on, and what to log about it."""

    loss: Tensor
    metrics: dict[str, float]


def clipped_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_level: Level = "token",
) -> Tensor:
    """PPO's per-token loss −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A), with ρ = π_θ / π_old.

    The first step on a batch has ρ = 1: the loss is −A, its gradient is that of REINFORCE. The log-ratio is
    capped at half the dtype's exponent range (44 in float32, 354 in float64): exp beyond it would overflow,
    and 0 · inf is NaN in the backward pass. Past the cap ρ is constant and passes no gradient.

    Args:
        log_probs: (B, T) log π_θ of the sampled tokens.
        old_log_probs: (B, T) log π_old, of the policy that sampled them.
        advantages: (B,) one a response, or (B, T).
        mask: (B, T) 1 where the policy produced the token.
        clip_low: ε_low ≥ 0, unitless. `float("inf")` switches a side off.
        clip_high: ε_high ≥ 0; larger than ε_low is DAPO's clip-higher.
        dual_clip: c > 1 bounds the loss by −cA where A < 0; None leaves it unbounded.
        ratio_level: "token", or "sequence" for GSPO: ρ = exp(mean of the row's log-ratios) at every token,
            with the gradient through that mean.

    Returns:
        (B, T) loss, to be minimised; 0 under the mask.

    Raises:
        ValueError: shapes differ, an active value is not finite, or an option is out of range.

    Source:
        Schulman et al. 2017, PPO (arXiv 1707.06347); Ye et al. 2020, dual clip (arXiv 1912.09729); Yu et al.
        2025, DAPO (arXiv 2503.14476); Zheng et al. 2025, GSPO (arXiv 2507.18071).

    Example:
        >>> old, new = torch.zeros(1, 2), torch.tensor([[2.0, 0.5]]).log()
        >>> clipped_surrogate(new, old, torch.tensor([1.0]), torch.ones(1, 2))
        tensor([[-1.2000, -0.5000]])
    """
    clip_low = require_number("clip_low", clip_low, "a number ≥ 0", lambda c: c >= 0)
    clip_high = require_number("clip_high", clip_high, "a number ≥ 0", lambda c: c >= 0)
    if dual_clip is not None:
        dual_clip = require_number("dual_clip", dual_clip, "a finite number > 1 or None", lambda c: 1 < c < math.inf)
    active, new, old, advantages = _read_policy(log_probs, old_log_probs, advantages, mask)
    ratio = _policy_ratio(new, old, active, ratio_level)
    clipped = ratio.clamp(within(ratio.dtype, 1 - clip_low), within(ratio.dtype, 1 + clip_high))
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if dual_clip is not None:
        bound = -within(ratio.dtype, dual_clip) * advantages
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return require_finite("log_probs, old_log_probs, advantages", torch.where(active, loss, 0))


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, estimator: Estimator = "k3") -> Tensor:
    """Per-token estimate of KL(π_θ ‖ π_ref) from one sample; x = log π_ref − log π_θ.

    k1 = −x and k3 = e^x − 1 − x are unbiased as *values*, k2 = x²/2 is not. As *losses* on samples of π_θ, k1
    has expected gradient 0, k2 that of KL(π_θ ‖ π_ref), k3 that of KL(π_ref ‖ π_θ). k3 is exact for x ≤ 20
    and goes on along its tangent, so value and gradient stay finite.

    Args:
        log_probs: (B, T) log π_θ of the sampled tokens.
        ref_log_probs: (B, T) log π_ref of the same tokens.
        mask: (B, T) 1 where the policy produced the token.
        estimator: "k1", "k2" or "k3".

    Returns:
        (B, T) estimates in nats; 0 under the mask.

    Raises:
        ValueError: shapes differ, an active value is not finite, or the estimator is unknown.

    Source:
        Schulman 2020, Approximating KL divergence (joschu.net/blog/kl-approx.html).

    Example:
        >>> new, ref = torch.tensor([[-1.0]]), torch.tensor([[-2.0]])
        >>> k1, k2, k3 = (kl_estimate(new, ref, torch.ones(1, 1), estimator=k) for k in ("k1", "k2", "k3"))
        >>> k1.item(), k2.item(), round(k3.item(), 4)
        (1.0, 0.5, 0.3679)
    """
    require_choice("estimator", estimator, ESTIMATORS)
    active, log_probs, ref = read_tokens(mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    x = ref.detach() - log_probs
    estimate = {"k1": torch.neg, "k2": lambda x: x.square() / 2, "k3": _k3}[estimator](x)
    return require_finite("log_probs, ref_log_probs", torch.where(active, estimate, 0))


def truncated_importance_weights(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    cap: float = 2.0,
    level: Level = "token",
) -> Tensor:
    """min(π_trainer / π_rollout, cap): corrects for an inference engine whose probabilities are slightly off.

    Args:
        trainer_log_probs: (B, T) log-probabilities by the trainer's model, before any update.
        rollout_log_probs: (B, T) the same tokens' log-probabilities as the engine drew them.
        mask: (B, T) 1 where the policy produced the token.
        cap: > 0, the largest weight.
        level: "token", or "sequence": the product of the row's ratios, then capped.

    Returns:
        (B, T) weights without gradient; 0 under the mask.

    Raises:
        ValueError: shapes differ, an active value is not finite, cap ≤ 0, or the level is unknown.

    Source:
        Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training
        (fengyao.notion.site/off-policy-rl); Ionides 2008, Truncated Importance Sampling.

    Example:
        >>> trainer, rollout = torch.tensor([[0.5, 0.9]]).log(), torch.tensor([[0.4, 0.1]]).log()
        >>> truncated_importance_weights(trainer, rollout, torch.ones(1, 2)).tolist()
        [[1.25, 2.0]]
    """
    cap = require_number("cap", cap, "a number > 0", lambda c: c > 0)
    require_choice("level", level, LEVELS)
    active, trainer, rollout = read_tokens(
        mask, trainer_log_probs=trainer_log_probs, rollout_log_probs=rollout_log_probs
    )
    log_ratio = (trainer - rollout).detach()
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    return torch.where(active, _bounded_exp(log_ratio).clamp(max=within(log_ratio.dtype, cap)), 0)


def effective_sample_size(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """(Σ w)² / Σ w²: how many unweighted samples an importance-weighted average is about as precise as.

    n if all n weights are equal, 1 if one of them outweighs all others. Divided by n it is the share of the rollouts
    that is not wasted.

    Args:
        weights: ≥ 0, any shape: one a token, or one a sequence.
        mask: of the same shape, 1 where a weight counts; all count where None.

    Returns:
        a scalar without gradient; 0 if no weight is above 0.

    Raises:
        ValueError: shapes differ, or a weight is negative or not finite.

    Source:
        Kish 1965, Survey Sampling; Kong 1992, A Note on Importance Sampling Using Standardized Weights.

    Example:
        >>> effective_sample_size(torch.tensor([1.0, 1.0, 1.0, 1.0])), effective_sample_size(torch.tensor([3.0, 1.0]))
        (tensor(4.), tensor(1.6000))
    """
    weights = as_tensor("weights", weights).detach()
    w = weights.to(compute_dtype(weights)).reshape(-1)
    if mask is not None:
        mask = as_tensor("mask", mask)
        require_shape("mask", mask, weights.shape, "that of weights")
        w = w[mask.reshape(-1).to(w.device) != 0]
    require(
        bool((w.isfinite() & (w >= 0)).all()),
        "weights",
        "finite numbers ≥ 0",
        w[~(w >= 0) | ~w.isfinite()][:1].tolist(),
    )
    # Divided by the largest one first: the squares of large ratios would overflow.
    w = w / w.max().clamp(min=torch.finfo(w.dtype).tiny) if len(w) else w
    total = w.square().sum()
    return torch.where(total > 0, w.sum().square() / total, 0)


def token_weights(
    mask: Tensor,
    mode: Mode,
    *,
    max_length: int | None = None,
    owners: Tensor | Sequence[Hashable] | None = None,
) -> Tensor:
    """The weight of each token in the loss Σ weights · per-token loss.

    ====================  ======================================  =========================
    mode                  weight of an active token               used by
    ====================  ======================================  =========================
    "token-mean"          1 / active tokens                       DAPO
    "sequence-mean"       1 / (tokens of its row · rows)          the GRPO paper
    "sequence-sum"        1 / rows                                REINFORCE
    "fixed-length"        1 / (max_length · rows)                 Dr. GRPO
    "trajectory-mean"     1 / (tokens of its owner · owners)      one vote a trajectory
    ====================  ======================================  =========================

    Rows and owners count only if they have an active token. Compute the weights once over the whole batch,
    then slice them with it.

    Args:
        mask: (B, T) 1 where the policy produced the token.
        mode: one of the above.
        max_length: tokens, for "fixed-length".
        owners: (B,) integers or hashables, for "trajectory-mean": rows with the same owner are one
            trajectory.

    Returns:
        (B, T) weights, of the mask's dtype if that is floating, else float32.

    Raises:
        ValueError: the mode is unknown, or what it needs is missing or does not fit the mask.

    Source:
        Shao et al. 2024 (arXiv 2402.03300); Yu et al. 2025 (arXiv 2503.14476);
        Liu et al. 2025 (arXiv 2503.20783).

    Example:
        >>> token_weights(torch.tensor([[1, 0], [1, 1]]), "sequence-mean").tolist()
        [[0.5, 0.0], [0.25, 0.25]]
    """
    require_choice("mode", mode, MODES)
    mask = as_tensor("mask", mask)
    active = as_mask(mask)
    lengths = active.sum(dim=1, keepdim=True)
    rows = (lengths > 0).sum()
    match mode:
        case "token-mean":
            share = lengths.sum()
        case "sequence-mean":
            share = lengths * rows
        case "sequence-sum":
            share = rows
        case "fixed-length":
            whole = "a whole number of tokens ≥ 1 (fixed-length divides by it)"
            max_length = require_number("max_length", max_length, whole, lambda n: 1 <= n <= 2**40 and n.is_integer())
            share = rows * int(max_length)
        case "trajectory-mean":
            share = _trajectory_share(lengths, owners)
    weights = active.to(compute_dtype(mask)) / share.clamp(min=1)
    return weights.to(mask.dtype) if mask.is_floating_point() else weights


def aggregate(per_token: Tensor, weights: Tensor) -> Tensor:
    """Σ weights · per_token: the loss. Nothing active gives 0, with zero gradient.

    Args:
        per_token: (B, T) losses; what has weight 0 is not looked at.
        weights: (B, T) from `token_weights`, or a slice of them.

    Returns:
        scalar.

    Raises:
        ValueError: shapes differ, or a value that counts is not finite.

    Example:
        >>> weights = token_weights(torch.tensor([[1, 0, 0], [1, 1, 1]]), "token-mean")
        >>> aggregate(torch.tensor([[6.0, float("nan"), 0.0], [1.0, 2.0, 3.0]]), weights).item()
        3.0
    """
    weights = as_tensor("weights", weights)
    per_token = as_tensor("per_token", per_token)
    require_shape("per_token", per_token, weights.shape, "(B, T), that of weights")
    return _weighted_sum("per_token", per_token, weights)


def reinforce_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    mode: Mode = "sequence-sum",
    max_length: int | None = None,
    owners: Tensor | Sequence[Hashable] | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """−Σ weights · A · log π_θ. Its gradient is the policy gradient; its value means nothing.

    With the default mode the gradient is −(1/B) Σ_i A_i Σ_k ∇log π_θ(y_ik | x_i, y_i,<k).

    Args:
        log_probs: (B, T) log π_θ of the sampled tokens.
        advantages: (B,) one a response, or (B, T).
        mask: (B, T) 1 where the policy produced the token.
        mode: see `token_weights`, as for max_length and owners.
        max_length: tokens, for "fixed-length".
        owners: (B,), for "trajectory-mean".
        weights: (B, T), used instead of a mode.

    Returns:
        scalar loss, to be minimised.

    Raises:
        ValueError: shapes differ, an active value is not finite, or the mode lacks what it needs.

    Source:
        Williams 1992, Simple statistical gradient-following algorithms for connectionist reinforcement
        learning.

    Example:
        >>> log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> reinforce_loss(log_probs, torch.tensor([0.5]), torch.ones(1, 2)).backward()
        >>> log_probs.grad.tolist()
        [[-0.5, -0.5]]
    """
    mask = as_mask(mask)
    active, log_probs, advantages = read_tokens(mask, log_probs=log_probs, advantages=_spread(advantages, mask))
    weights = _own_or_given(weights, active.to(log_probs.dtype), mode, max_length, owners)
    return _weighted_sum("log_probs, advantages", -advantages.detach() * log_probs, weights)


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_log_probs: Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: Estimator = "k3",
    rollout_log_probs: Tensor | None = None,
    importance_cap: float = 2.0,
    importance_level: Level = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    ratio_level: Level = "token",
    mode: Mode = "token-mean",
    max_length: int | None = None,
    owners: Tensor | Sequence[Hashable] | None = None,
    weights: Tensor | None = None,
) -> LossReport:
    """Σ weights · (w · clipped surrogate + β · KL estimate).

    w is the truncated importance weight min(π_old / π_rollout, cap), or 1 without `rollout_log_probs`. It
    multiplies the policy term, not the KL term.

    Args:
        log_probs: (B, T) log π_θ of the sampled tokens.
        old_log_probs: (B, T) log π_old by the trainer's model before the first update.
        advantages: (B,) one a response, or (B, T).
        mask: (B, T) 1 where the policy produced the token.
        ref_log_probs: (B, T) log π_ref; needed where beta is not 0.
        beta: β ≥ 0, weight of the KL term.
        kl_estimator: see `kl_estimate`.
        rollout_log_probs: (B, T) log-probabilities by the engine that sampled.
        importance_cap: see `truncated_importance_weights`, as for importance_level.
        importance_level: "token" or "sequence".
        clip_low: see `clipped_surrogate`, as for the next three.
        clip_high: ε_high.
        dual_clip: c, or None.
        ratio_level: "token" or "sequence".
        mode: see `token_weights`, as for the next two.
        max_length: tokens, for "fixed-length".
        owners: (B,), for "trajectory-mean".
        weights: (B, T), used instead of a mode: the slice of the whole batch's weights for a micro-batch.

    Returns:
        LossReport. Its metrics are means over the active tokens: `ratio_mean`; `clip_fraction_low`, tokens
        with A < 0 and ρ < 1 − ε_low; `clip_fraction_high`, tokens with A > 0 and ρ > 1 + ε_high; `kl`, 0
        without `ref_log_probs`; `sampler_mismatch` = |log π_old − log π_rollout|, 0 without
        `rollout_log_probs`; and the number of `active_tokens`.

    Raises:
        ValueError: shapes differ, an active value is not finite, β ≠ 0 without `ref_log_probs`, or the mode
            lacks what it needs.

    Source:
        Shao et al. 2024, DeepSeekMath (arXiv 2402.03300); Yu et al. 2025, DAPO (arXiv 2503.14476).

    Example:
        >>> new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
        >>> report = grpo_loss(new, new.detach(), torch.tensor([1.0]), torch.ones(1, 2))
        >>> report.loss.item(), report.metrics["ratio_mean"], report.metrics["active_tokens"]
        (-1.0, 1.0, 2.0)
    """
    beta = require_number("beta", beta, "a finite number ≥ 0", lambda b: 0 <= b < math.inf)
    require_number("importance_cap", importance_cap, "a number > 0", lambda c: c > 0)
    require_choice("importance_level", importance_level, LEVELS)
    require_choice("kl_estimator", kl_estimator, ESTIMATORS)
    require(beta == 0 or ref_log_probs is not None, "ref_log_probs", "a tensor, because beta is not 0", None)
    active, new, old, advantages = _read_policy(log_probs, old_log_probs, advantages, mask)
    policy = clipped_surrogate(
        new,
        old,
        advantages,
        active,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        ratio_level=ratio_level,
    )
    kl = mismatch = torch.zeros_like(old)
    if rollout_log_probs is not None:
        _, rollout = read_tokens(active, rollout_log_probs=rollout_log_probs)
        mismatch = (old - rollout).abs()
        policy = policy * truncated_importance_weights(old, rollout, active, cap=importance_cap, level=importance_level)
    if ref_log_probs is not None:
        kl = kl_estimate(new, ref_log_probs, active, estimator=kl_estimator)
    weights = _own_or_given(weights, active.to(policy.dtype), mode, max_length, owners)
    penalty = within(kl.dtype, beta) * kl if beta else 0
    loss = _weighted_sum("log_probs, advantages, beta", policy + penalty, weights)
    ratio = _policy_ratio(new, old, active, ratio_level)
    metrics = _active_means(
        active,
        ratio_mean=ratio,
        clip_fraction_low=((advantages < 0) & (ratio < within(ratio.dtype, 1 - clip_low))).to(ratio.dtype),
        clip_fraction_high=((advantages > 0) & (ratio > within(ratio.dtype, 1 + clip_high))).to(ratio.dtype),
        kl=kl,
        sampler_mismatch=mismatch,
    )
    return LossReport(loss, metrics)


def _own_or_given(
    weights: Any, active: Tensor, mode: Mode, max_length: int | None, owners: Any
) -> Tensor:
    """The weights of the mode, or those that a caller has computed over a larger batch."""
    if weights is None:
        return token_weights(active, mode, max_length=max_length, owners=owners)
    weights = as_tensor("weights", weights)
    require_shape("weights", weights, active.shape, "(B, T), that of mask")
    return weights


def _weighted_sum(name: str, per_token: Tensor, weights: Tensor) -> Tensor:
    """`name` is the argument to blame where a value or the sum is not finite."""
    _, per_token, weights = read_tokens(weights != 0, **{name: per_token}, weights=weights)
    return require_finite(name, (per_token * weights.detach()).sum())


@torch.no_grad()
def _active_means(active: Tensor, **per_token: Tensor) -> dict[str, float]:
    """Means over the active tokens, and their number, in one transfer from the device."""
    count = active.sum()
    means = [torch.where(active, t, 0).sum() / count.clamp(min=1) for t in per_token.values()]
    values = torch.stack([*means, count.float()]).tolist()
    return dict(zip((*per_token, "active_tokens"), values, strict=True))


def _read_policy(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> tuple[Tensor, ...]:
    """Mask, log π_θ, log π_old and advantages, all (B, T); the last two are constants."""
    mask = as_mask(mask)
    active, new, old, spread = read_tokens(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=_spread(advantages, mask)
    )
    return active, new, old.detach(), spread.detach()


def _policy_ratio(log_probs: Tensor, old_log_probs: Tensor, active: Tensor, level: Level) -> Tensor:
    """ρ (B, T); arguments are 0 under the mask."""
    require_choice("ratio_level", level, LEVELS)
    log_ratio = log_probs - old_log_probs
    if level == "sequence":
        mean = log_ratio.sum(dim=1, keepdim=True) / active.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand_as(log_ratio)
    return _bounded_exp(log_ratio)


def _bounded_exp(x: Tensor) -> Tensor:
    """exp that cannot overflow; half the exponent range is left for what it is multiplied with."""
    return x.clamp(max=math.log(torch.finfo(x.dtype).max) / 2).exp()


def _k3(x: Tensor) -> Tensor:
    """expm1(x) − x up to the knee, then its tangent; constant where a sum over a million tokens would overflow."""
    slope = math.expm1(K3_KNEE)
    end = torch.finfo(x.dtype).max / slope / 2**21
    x = x.clamp(max=end)
    bent, beyond = x.clamp(max=K3_KNEE), (x - K3_KNEE).relu()  # at the knee clamp has slope 1, relu 0
    # No slope · (x − bent): below the knee its two gradients cancel, and float32 keeps no digit of the rest.
    return bent.expm1() - bent + slope * beyond


def _trajectory_share(lengths: Tensor, owners: Any) -> Tensor:
    """(tokens of the row's owner) · (owners with any), (B, 1)."""
    require(owners is not None, "owners", 'one id a row, because mode is "trajectory-mean"', None)
    numbers = number_ids("owners", owners)
    require_count("owners", numbers, len(lengths), "row of mask")
    index = torch.tensor(numbers, device=lengths.device, dtype=torch.long)
    tokens = torch.zeros_like(lengths).index_add(0, index, lengths)
    return tokens[index] * (tokens > 0).sum()


def _spread(advantages: Any, mask: Tensor) -> Tensor:
    """(B,) advantages to every token of their row; (B, T) as they are."""
    advantages = as_tensor("advantages", advantages)
    if advantages.ndim != 1:
        return advantages
    require_shape("advantages", advantages, mask.shape[:1], "(B,), the rows of mask")
    return advantages[:, None].expand(mask.shape)
