"""Values other implementations print for the same inputs: equal where ours means the same, explained where it differs.

tests/data/peer_values.json holds, for each entry, the peer's file and commit, inputs, options and results. Every key
of every result is compared, or stands in DIFFERENCES with the reason why ours is another number, what ours is
instead, and how the peer's number follows from ours.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from course_lib import (
    aggregate,
    clipped_surrogate,
    generalized_advantages,
    group_relative_advantages,
    grpo_loss,
    kl_estimate,
    leave_one_out_advantages,
    reinforce_loss,
    response_mask,
    token_entropy,
    token_log_probs,
    token_weights,
)

DATA = Path(__file__).parent / "data" / "peer_values.json"
ENTRIES = json.loads(DATA.read_text().replace('"nan"', "NaN"))

# Their name of a normalisation → ours.
MODES = {
    "token-mean": "token-mean",
    "mean": "token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "seq-mean-token-mean": "sequence-mean",
    "grpo": "sequence-mean",
    "seq-mean-token-sum": "sequence-sum",
    "seq-mean-token-sum-norm": "fixed-length",
    "dr_grpo": "fixed-length",
}


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def rows(values):
    """(B, T): some peers work on one row and leave B out."""
    tensor = double(values)
    return tensor if tensor.ndim == 2 else tensor[None]


def value(entry: dict[str, Any], key: str = "value"):
    """A result of the peer; the ones without a name are called "value"."""
    expected = entry["expected"]
    return expected[key] if isinstance(expected, dict) else expected


def seeded(recipe):
    """The two inputs that are given as a recipe for torch's CPU generator."""
    torch.manual_seed(42)
    x = torch.randn(2, 10, 100)
    torch.manual_seed(42)
    return x, torch.rand_like(x) > 0.5


# --- ours: one function for each function of the peers, returning results by the peers' keys ------------------


def aggregate_loss(inputs, kwargs):
    loss, mask = rows(inputs["loss"]), rows(inputs["mask"])
    weights = token_weights(mask, MODES[kwargs["mode"]], max_length=loss.shape[1])
    return {"value": aggregate(loss, weights)}


def masked_mean(inputs, kwargs):
    x, mask = (t.reshape(-1, 100) for t in seeded(inputs["recipe"]))
    return {"value": aggregate(x, token_weights(mask, "token-mean"))}


def entropy(inputs, kwargs):
    logits = seeded(inputs["recipe"])[0] if "recipe" in inputs else double(inputs["logits"])
    return {"value": token_entropy(logits)}


def policy_log_probs(inputs, kwargs):
    temperature = kwargs.get("temperature", 1.0)
    if "bigram_logits" not in inputs:
        logits, tokens = double(inputs["logits"]), torch.tensor(inputs["labels"])
        return {"value": token_log_probs(logits, tokens, temperature=temperature)}
    tokens, mask = torch.tensor(inputs["input_ids"]), torch.tensor(inputs["labels_mask"])[:, 1:]
    logits = double(inputs["bigram_logits"])[tokens[:, :-1]]
    return {"value": token_log_probs(logits, tokens[:, 1:], temperature=temperature) * mask}


def first_stop(inputs, kwargs):
    tokens = torch.tensor(inputs["sequences"])
    mask = response_mask(tokens, kwargs["stop_tokens"])
    return {"padding_mask": ~mask, "sequences": torch.where(mask, tokens, kwargs["fill_value"])}


def discounted_returns(inputs, kwargs):
    rewards = double(inputs["rewards"])
    returns, _ = generalized_advantages(
        rewards, torch.zeros_like(rewards), torch.ones_like(rewards), gamma=kwargs["gamma"], lam=1.0
    )
    return {"value": returns}


def gae(inputs, kwargs):
    values = double(inputs["values"])
    mask = torch.ones_like(values) if inputs.get("mask") is None else double(inputs["mask"])
    if "terminal_reward" in inputs:
        rewards = torch.zeros_like(values)
        rewards[:, -1] = double(inputs["terminal_reward"])
    else:
        rewards = double(inputs["rewards"])
    advantages, returns = generalized_advantages(rewards, values, mask, **kwargs)
    return {
        "advantages": advantages,
        "advantages_masked": advantages,
        "advantages_whitened": advantages,
        "advantages_whitened_masked": advantages,
        "returns": returns,
        "returns_masked": returns,
    }


def group_ids(inputs, kwargs):
    return inputs.get("group_index") or [i // kwargs["group_size"] for i in range(len(inputs["rewards"]))]


def group_normalized_advantages(inputs, kwargs):
    scale = "std" if kwargs.get("normalize_by_std", True) else "none"
    ids = group_ids(inputs, kwargs)
    advantages = group_relative_advantages(double(inputs["rewards"]), ids, scale=scale, ddof=1, eps=kwargs["eps"])
    return {"value": advantages}


def group_baseline_std(inputs, kwargs):
    rewards, ids = double(inputs["rewards"]), inputs["group_index"]
    if kwargs["leave_one_out"]:
        advantages = leave_one_out_advantages(rewards, ids)
    else:
        advantages = group_relative_advantages(rewards, ids, scale="none")
    return {"baseline": rewards - advantages}


def kl_estimator(inputs, kwargs):
    dtype = getattr(torch, kwargs.get("dtype", "float64"))
    log_probs, ref = rows(inputs["logp"]).to(dtype).requires_grad_(), rows(inputs["ref"]).to(dtype)
    estimate = kl_estimate(log_probs, ref, torch.ones_like(ref), estimator=kwargs["estimator"])
    (grad,) = torch.autograd.grad(estimate.sum(), log_probs)
    return {"value": estimate[0], "grad": grad[0]}


def read_policy(inputs):
    """log_probs, old, advantages and mask of any of the peers' policy losses."""
    log_probs = rows(inputs["logp"] if "logp" in inputs else [math.log(r) for r in inputs["ratio"]])
    old = rows(inputs["old_logp"]) if "old_logp" in inputs else torch.zeros_like(log_probs)
    mask = rows(inputs["mask"]) if "mask" in inputs else torch.ones_like(log_probs)
    advantages = double(inputs["advantages"])
    if advantages.ndim == 2 and advantages.shape[1] == 1:  # (B, 1) there, (B,) here
        advantages = advantages[:, 0]
    elif advantages.ndim == 1 and len(log_probs) == 1:
        advantages = advantages[None]
    return log_probs.requires_grad_(), old, advantages, mask


def clip_options(kwargs):
    """Their names of the clip range → ours."""
    both = next(kwargs[k] for k in ("eps", "cliprange", "clip_eps_low") if k in kwargs)
    return {
        "clip_low": kwargs.get("cliprange_low", both),
        "clip_high": kwargs.get("cliprange_high", kwargs.get("clip_eps_high", both)),
        "dual_clip": kwargs.get("clip_ratio_c", kwargs.get("dual_clip")),
        "ratio_level": kwargs.get("importance_sampling_level", "token"),
    }


def clipped_policy_loss(inputs, kwargs):
    log_probs, old, advantages, mask = read_policy(inputs)
    options = clip_options(kwargs)
    kl_options = {
        "ref_log_probs": rows(inputs["ref_logp"]) if "ref_logp" in inputs else None,
        "beta": kwargs.get("beta", 0.0),
        "kl_estimator": kwargs.get("kl_estimator") or "k3",
    }
    mode = MODES[kwargs.get("loss_type") or kwargs.get("mode", "mean")]
    report = grpo_loss(
        log_probs,
        old,
        advantages,
        mask,
        **options,
        **kl_options,
        mode=mode,
        max_length=kwargs.get("max_completion_length", mask.shape[1]),
    )
    (grad,) = torch.autograd.grad(report.loss, log_probs)
    per_token = clipped_surrogate(log_probs, old, advantages, mask, **options)
    free = clipped_surrogate(log_probs, old, advantages, mask, **options | {"dual_clip": None})
    ratio, spread = (log_probs - old).exp(), advantages if advantages.ndim == 2 else advantages[:, None]
    low, high = report.metrics["clip_fraction_low"], report.metrics["clip_fraction_high"]
    return {
        "loss": report.loss,
        "policy_loss": report.loss,
        "grad": grad,
        "per_token_loss": per_token[0],
        "value": per_token,
        "clipped": (free != -ratio * spread)[0],
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "clipfrac": low + high,
        "clipfrac_lower": ((per_token != free) * mask).sum() / mask.sum(),
        "mean_ratio": report.metrics["ratio_mean"],
        "kl": report.metrics["kl"],
        # the divergence of π_old from π_θ, on tokens of π_old
        "approx_kl_k1": aggregate(kl_estimate(old, log_probs, mask, estimator="k1"), token_weights(mask, "token-mean")),
    }


def policy_gradient_loss(inputs, kwargs):
    log_probs, _, advantages, mask = read_policy(inputs)
    if "mode" not in kwargs:  # the peer stops before the sum: ours, one token at a time
        unit = torch.eye(log_probs.numel(), dtype=torch.float64).reshape(-1, *log_probs.shape)
        losses = [reinforce_loss(log_probs, advantages, mask, weights=w) for w in unit]
        return {"value": torch.stack(losses).reshape(log_probs.shape)}
    loss = reinforce_loss(log_probs, advantages, mask, mode=MODES[kwargs["mode"]])
    return {"loss": loss, "grad": torch.autograd.grad(loss, log_probs)[0]}


def sft_loss(inputs, kwargs):
    """Supervised fine-tuning is REINFORCE with every advantage 1."""
    log_probs, mask = rows(inputs["logp"]).requires_grad_(), rows(inputs["mask"])
    loss = reinforce_loss(
        log_probs, torch.ones(len(mask)), mask, mode="fixed-length", max_length=int(kwargs["normalize_constant"])
    )
    return {"loss": loss, "grad": torch.autograd.grad(loss, log_probs)[0]}


OURS: dict[str, Callable] = {
    "aggregate_loss": aggregate_loss,
    "discounted_returns": discounted_returns,
    "entropy": entropy,
    "gae": gae,
    "group_baseline_std": group_baseline_std,
    "group_normalized_advantages": group_normalized_advantages,
    "grpo_loss": clipped_policy_loss,
    "kl_estimator": kl_estimator,
    "masked_mean": masked_mean,
    "policy_gradient_loss": policy_gradient_loss,
    "ppo_clip_loss": clipped_policy_loss,
    "response_mask": first_stop,
    "sft_loss": sft_loss,
    "token_log_probs": policy_log_probs,
}


# --- where ours is another number -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    reason: str
    relation: Callable  # (ours, entry) → the peer's number
    tolerance: float | None = None


def halved(key):
    return lambda ours, entry: ours[key] / entry["kwargs"]["gradient_accumulation_steps"]


def whitened(ours, entry):
    """(A − mean) / std over the active tokens of the whole batch, sample variance + 1e-8."""
    advantages, mask = ours["advantages"], entry["inputs"].get("mask")
    mask = torch.ones_like(advantages) if mask is None else double(mask)
    active = advantages[mask.bool()]
    return (advantages - active.mean()) / (active.var() + 1e-8).sqrt() * mask


def std_of_others(ours, entry):
    rewards, ids = entry["inputs"]["rewards"], entry["inputs"]["group_index"]
    others = [[r for k, r in enumerate(rewards) if ids[k] == ids[i] and k != i] for i in range(len(ids))]
    return torch.stack([double(o).std() for o in others])


def std_of_group(ours, entry):
    """(r − mean) / ((r − mean) / std), from a row of the group that is not at its mean."""
    rewards, ids = double(entry["inputs"]["rewards"]), entry["inputs"]["group_index"]
    centred = group_relative_advantages(rewards, ids, scale="none")
    std = centred / group_relative_advantages(rewards, ids, ddof=1)
    known = {i: s for i, s in zip(ids, std, strict=True) if not s.isnan()}
    return torch.stack([known[i] for i in ids])


ACCUMULATION = "The peer divides by its accumulation steps inside the loss; our weights count the whole batch."
WHITENING = "The peer whitens over the batch after GAE; ours returns the estimator itself, in units of reward."
WHITENED = 1e-7  # the peers count tokens in float32, or add 1e-8 to the count

DIFFERENCES: dict[tuple[int, str], Difference] = {
    (6, "value"): Difference(
        "The peer divides by the length alone, so its loss grows with the batch; our fixed-length weights divide "
        "by the rows too, as Dr. GRPO does.",
        lambda ours, entry: ours["value"] * len(entry["inputs"]["mask"]),
    ),
    (66, "std"): Difference(
        "The peer's leave-one-out std is over the other responses; ours has no std with leave-one-out (RLOO).",
        std_of_others,
    ),
    (67, "std"): Difference("The peer hands out the std; ours divides by it and returns no statistics.", std_of_group),
    (60, "advantages_whitened"): Difference(
        "The peer divides by the batch's std and keeps its mean; ours returns the estimator itself.",
        lambda ours, entry: whitened(ours, entry) + ours["advantages"].mean(),
        WHITENED,
    ),
    **{(i, key): Difference(ACCUMULATION, halved(key)) for i in (98, 251) for key in ("loss", "grad")},
    **{(i, "advantages_whitened"): Difference(WHITENING, whitened, WHITENED) for i in (55, 57, 58)},
    **{(i, "advantages_whitened_masked"): Difference(WHITENING, whitened, WHITENED) for i in (63, 65)},
}


# --- the comparison -------------------------------------------------------------------------------------------


def keys(entry):
    return list(entry["expected"]) if isinstance(entry["expected"], dict) else ["value"]


COMPARISONS = [(entry, key) for entry in ENTRIES for key in keys(entry)]


def close(ours, expected, tolerance=None):
    """By default to the last digits of the peer's own dtype, which shows in its numbers."""
    ours, expected = torch.as_tensor(ours, dtype=torch.float64), double(expected)
    single = torch.equal(expected.float().double(), expected)
    tolerance = tolerance or (2e-6 if single else 1e-12)
    return torch.allclose(ours, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize(
    "entry, key", COMPARISONS, ids=[f"{entry['id']}-{entry['function']}-{key}" for entry, key in COMPARISONS]
)
def test_equal_or_explained(entry, key):
    ours, expected = OURS[entry["function"]](entry["inputs"], entry["kwargs"]), value(entry, key)
    difference = DIFFERENCES.get((entry["id"], key))
    if difference is None:
        result, tolerance = ours[key], None
    else:
        assert key not in ours or not close(ours[key], expected), "no longer a difference"
        result, tolerance = difference.relation(ours, entry), difference.tolerance
    assert close(result, expected, tolerance)
    result = torch.as_tensor(result, dtype=torch.float64)
    assert not result.any() or not close(result * 1.001, expected), "the comparison would pass anything"


def test_every_entry_is_accounted_for():
    compared = {(entry["id"], key) for entry, key in COMPARISONS}
    assert len({entry["id"] for entry in ENTRIES}) == len(ENTRIES) == 59
    assert {entry["id"] for entry in ENTRIES} == {i for i, _ in compared}
    assert {entry["function"] for entry in ENTRIES} == set(OURS)
    assert set(DIFFERENCES) <= compared
    assert all(difference.reason.endswith(".") for difference in DIFFERENCES.values())
