"""The formulas of course_lib once more, each as the loop that its definition says, on Python's floats.

Slow, plain, and read to be believed: `test_fuzz` holds the library's functions against them. Where a function's
documentation says what happens near the largest number of its dtype, `top` is the logarithm of that.
"""

import math
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch


class Near(NamedTuple):
    """What the loop found, and how large the numbers were that it was added up from. NaN: any finite number will do."""

    value: Any
    scale: Any = 1.0


def flat(value):
    """Every number of a result, in order."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return torch.as_tensor(value).detach().double().flatten().tolist()
    if isinstance(value, dict):
        return [number for name in sorted(value) for number in flat(value[name])]
    if isinstance(value, list | tuple):
        return [number for part in value for number in flat(part)]
    if hasattr(value, "__dataclass_fields__"):
        return [number for f in fields(value) for number in flat(getattr(value, f.name))]
    return [value]


def largest(value):
    """The largest size of a number in it, infinities aside."""
    return max((abs(n) for n in flat(value) if isinstance(n, int | float) and math.isfinite(n)), default=0.0)


def total(numbers):
    """The sum, without rounding; NaN if it is none."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return math.nan


def spread(advantages, mask):
    return [a if isinstance(a, list) else [a] * len(m) for a, m in zip(advantages, mask, strict=True)]


def per_token(mask, function, *values):
    """function(values...) at active tokens, 0 elsewhere."""
    rows = zip(mask, *values, strict=True)
    return [[function(*xs) if m else 0.0 for m, *xs in zip(*row, strict=True)] for row in rows]


def mates(rewards, group_ids, row):
    same = [r for r, g in zip(rewards, group_ids, strict=True) if g == group_ids[row] and r == r]
    informative = len(same) > 1 and max(same) - min(same) > 1e-6 * max(map(abs, same))
    return same if informative and rewards[row] == rewards[row] else []


def group_relative(rewards, group_ids, scale="std", ddof=0, eps=0.0, missing="error"):
    found = []
    for row, reward in enumerate(rewards):
        same = mates(rewards, group_ids, row)
        mean = math.fsum(same) / max(1, len(same))
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in same) / (len(same) - ddof)) if same else 1.0
        found.append(0.0 if not same else reward - mean if scale == "none" else (reward - mean) / (std + eps))
    sizes = [largest(mates(rewards, group_ids, row)) for row in range(len(found))]
    return Near(found, sizes if scale == "none" else 1.0)


def leave_one_out(rewards, group_ids, missing="error"):
    groups = [mates(rewards, group_ids, row) for row in range(len(rewards))]
    others = [(math.fsum(same) - reward) / max(1, len(same) - 1) for same, reward in zip(groups, rewards, strict=True)]
    found = [r - other if same else 0.0 for r, other, same in zip(rewards, others, groups, strict=True)]
    return Near(found, [largest(same) for same in groups])


def informative(rewards, group_ids, missing="error"):
    return [float(bool(mates(rewards, group_ids, row))) for row in range(len(rewards))]


def efficiency(costs, successes, group_ids):
    costs, found = [c if s else math.nan for c, s in zip(costs, successes, strict=True)], []
    for row, cost in enumerate(costs):
        same = mates(costs, group_ids, row)
        mean = math.fsum(same) / max(1, len(same))
        found.append(max(-1.0, min(1.0, (mean - cost) / mean)) if same else 0.0)
    return found


def generalized(rewards, values, mask, gamma, lam):
    advantage, scale = [], 8 * largest(per_token(mask, lambda r, v: largest([r, v]), rewards, values))
    for r, v, m in zip(rewards, values, mask, strict=True):
        row, after, value = [0.0] * len(m), 0.0, 0.0
        for k in reversed(range(len(m))):
            if m[k]:
                after = r[k] + gamma * value - v[k] + gamma * lam * after
                row[k], value = after, v[k]
        advantage.append(row)
    return Near([advantage, per_token(mask, lambda a, v: a + v, advantage, values)], scale)


def bounded_exp(x, top):
    return math.exp(min(x, top / 2)) if x > -700 else 0.0


def log_ratios(new, old, mask, level, whole=False):
    """log ρ at each token, and NaN where float32 may well lose it."""
    ratios = per_token(mask, lambda a, b: a - b, new, old)
    if level == "sequence":
        counts = [1 if whole else max(1, sum(map(bool, row))) for row in mask]
        sums = [math.fsum(row) / count for row, count in zip(ratios, counts, strict=True)]
        rough = [sum(map(abs, row)) > 100 for row in ratios]
        ratios = [[math.nan if bad else x] * len(row) for row, x, bad in zip(ratios, sums, rough, strict=True)]
    return ratios


def clipped(log_probs, old_log_probs, advantages, mask, clip_low=0.2, clip_high=0.2, dual_clip=None,
                  ratio_level="token", *, top):  # fmt: skip
    def loss(x, a):
        ratio = bounded_exp(x, top) if x == x else math.nan
        value = max(-ratio * a, -min(max(ratio, 1 - clip_low), 1 + clip_high) * a)
        return min(value, -dual_clip * a) if dual_clip is not None and a < 0 else value

    ratios = log_ratios(log_probs, old_log_probs, mask, ratio_level)
    return Near(per_token(mask, loss, ratios, spread(advantages, mask)), 0.0)


def kl_estimate(log_probs, ref_log_probs, mask, estimator="k3"):
    def estimate(a, b):
        x = b - a
        if estimator == "k1":
            return -x
        if estimator == "k2":
            return x * x / 2
        return math.expm1(min(x, 20)) - min(x, 20) + math.expm1(20) * max(0.0, x - 20)

    sizes = per_token(mask, lambda a, b: min(abs(b - a), 20.0), log_probs, ref_log_probs)
    return Near(per_token(mask, estimate, log_probs, ref_log_probs), sizes)


def truncated(trainer_log_probs, rollout_log_probs, mask, cap=2.0, level="token", *, top):
    ratios = log_ratios(trainer_log_probs, rollout_log_probs, mask, level, whole=True)
    return Near(per_token(mask, lambda x: min(bounded_exp(x, top), cap) if x == x else x, ratios), 0.0)


def effective_size(weights):
    most = largest(weights)
    share = [w / most for w in flat(weights)] if most else []
    return math.fsum(share) ** 2 / math.fsum(x * x for x in share) if share else 0.0


def token_weights(mask, mode, max_length=None, owners=None):
    lengths = [sum(map(bool, row)) for row in mask]
    rows = sum(length > 0 for length in lengths)
    owners = list(range(len(mask))) if owners is None else [str(o) for o in owners]
    tokens = [sum(n for n, o in zip(lengths, owners, strict=True) if o == owner) for owner in owners]
    living = len({o for o, n in zip(owners, tokens, strict=True) if n})
    share = {
        "token-mean": lambda row: sum(lengths),
        "sequence-mean": lambda row: lengths[row] * rows,
        "sequence-sum": lambda row: rows,
        "fixed-length": lambda row: max_length * rows,
        "trajectory-mean": lambda row: tokens[row] * living,
    }[mode]
    return [[1.0 / share(row) if m else 0.0 for m in active] for row, active in enumerate(mask)]


def aggregate(per_token, weights):
    terms = [x * w for x, w in zip(flat(per_token), flat(weights), strict=True) if w]
    return Near([total(terms)], total(map(abs, terms)))


def reinforce(log_probs, advantages, mask, mode="sequence-sum", max_length=None, owners=None, weights=None):
    weights = token_weights(mask, mode, max_length, owners) if weights is None else weights
    losses = per_token(mask, lambda p, a: -a * p, log_probs, spread(advantages, mask))
    return aggregate(losses, weights)


def grpo(log_probs, old_log_probs, advantages, mask, ref_log_probs=None, beta=0.0, kl_estimator="k3",
               rollout_log_probs=None, importance_cap=2.0, importance_level="token", clip_low=0.2, clip_high=0.28,
               dual_clip=None, ratio_level="token", mode="token-mean", max_length=None, owners=None, weights=None,
               *, top):  # fmt: skip
    a = spread(advantages, mask)
    clips = (clip_low, clip_high, dual_clip, ratio_level)
    policy = clipped(log_probs, old_log_probs, a, mask, *clips, top=top).value
    zero = per_token(mask, lambda x: 0.0, a)
    kl, mismatch = zero, zero
    if rollout_log_probs is not None:
        mismatch = per_token(mask, lambda x, y: abs(x - y), old_log_probs, rollout_log_probs)
        cut = truncated(old_log_probs, rollout_log_probs, mask, importance_cap, importance_level, top=top).value
        policy = per_token(mask, lambda x, w: x * w, policy, cut)
    if ref_log_probs is not None:
        kl = kl_estimate(log_probs, ref_log_probs, mask, kl_estimator).value
    weights = token_weights(mask, mode, max_length, owners) if weights is None else weights
    loss, scale = aggregate(per_token(mask, lambda x, k: x + beta * k if beta else x, policy, kl), weights)
    x = log_ratios(log_probs, old_log_probs, mask, ratio_level)
    ratio = per_token(mask, lambda x: bounded_exp(x, top) if x == x else x, x)
    edge = [r for r in flat(ratio) if r != r or min(abs(r - 1 + clip_low), abs(r - 1 - clip_high)) < 1e-5]
    count = sum(map(bool, flat(mask)))

    def mean(values):
        return total(flat(values)) / max(1, count)

    def fraction(function):
        return math.nan if edge else mean(per_token(mask, function, ratio, a))

    metrics = {
        "ratio_mean": mean(ratio),
        "clip_fraction_low": fraction(lambda r, a: float(a < 0 and r < 1 - clip_low)),
        "clip_fraction_high": fraction(lambda r, a: float(a > 0 and r > 1 + clip_high)),
        "kl": mean(kl),
        "sampler_mismatch": mean(mismatch),
        "active_tokens": float(count),
    }
    sizes = [scale, *(largest(flat(kl)) if name == "kl" else 1.0 for name in sorted(metrics))]
    return Near([loss, metrics], sizes)


def token_log_probs(logits, tokens, temperature=1.0):
    def one(row, token):
        scaled = [x / temperature for x in row]
        most = max(scaled)
        if any(x != x for x in row) or math.isinf(most):
            return None  # no distribution
        return scaled[token] - most - math.log(math.fsum(math.exp(x - most) for x in scaled))

    return logit_rows(one, logits, tokens, temperature)


def token_entropy(logits, temperature=1.0):
    def one(row, _):
        most = max(row)
        if any(x != x for x in row) or math.isinf(most):
            return None
        weights = [math.exp((x - most) / temperature) for x in row]
        total = math.fsum(weights)
        return -math.fsum(w / total * math.log(w / total) for w in weights if w)

    return logit_rows(one, logits, [[0] * len(row) for row in logits], temperature)


def logit_rows(one, logits, tokens, temperature):
    found, sizes = [], []
    for rows, ids in zip(logits, tokens, strict=True):
        for row, token in zip(rows, ids, strict=True):
            found.append(one(row, int(token)))
            sizes.append(1.0 + largest(row) / temperature)
    return Near(found, sizes)


def response_mask(tokens, eos_token_ids):
    ends = {float(e) for e in flat(eos_token_ids)}
    found = []
    for row in tokens:
        first = next((t for t, token in enumerate(row) if float(token) in ends), len(row))
        found.append([float(t <= first) for t in range(len(row))])
    return found


def build_tree(sequences):
    prefixes = sorted({tuple(row[: k + 1]) for row in sequences for k in range(len(row))})
    place = {prefix: node for node, prefix in enumerate(prefixes)}
    below = [max(n for p, n in place.items() if p[: len(prefix)] == prefix) + 1 for prefix in prefixes]
    width = max(map(len, sequences))
    paths = [[place[tuple(r[: k + 1])] if k < len(r) else -1 for k in range(width)] for r in sequences]
    tokens, depths = [p[-1] for p in prefixes], [len(p) - 1 for p in prefixes]
    return [tokens, depths, [place.get(p[:-1], -1) for p in prefixes], below, paths]


def segments(trajectory, merge_prefixes=True):
    rows = []
    for call in trajectory.calls:
        before = rows[-1][0] if rows and merge_prefixes else None
        if before is None or call.context[: len(before)] != before:
            rows.append(([], [], []))
        tokens, mask, log_probs = rows[-1]
        for token in call.context[len(tokens) :]:
            tokens.append(token), mask.append(0), log_probs.append(0.0)
        for k, token in enumerate(call.output):
            tokens.append(token), mask.append(1)
            log_probs.append(None if call.log_probs is None else call.log_probs[k])
    return rows


def batch(trajectories, pad_token_id, merge_prefixes=True, advantages=None):
    given = advantages is not None
    advantages = advantages if given else flat(trajectory_advantages(trajectories).value)
    rows = [(i, *row) for i, t in enumerate(trajectories) for row in segments(t, merge_prefixes)]
    width = max((len(row[1]) for row in rows), default=0)
    pad = lambda row, fill: [*row, *[fill] * (width - len(row))]  # noqa: E731
    value = [
        [pad(tokens, int(pad_token_id)) for _, tokens, _, _ in rows],
        [pad([1] * len(tokens), 0) for _, tokens, _, _ in rows],
        [pad(mask, 0) for _, _, mask, _ in rows],
        [pad(log_probs, 0.0) for _, _, _, log_probs in rows],
        [float(advantages[i]) for i, *_ in rows],
        [i for i, *_ in rows],
    ]
    return Near(value, largest(advantages) if given else 1.0)


def trajectory_advantages(trajectories, baseline="mean", scale="std", ddof=0, eps=0.0, missing="error"):
    rewards = [math.nan if t.reward is None else float(torch.tensor(float(t.reward))) for t in trajectories]
    ids = [t.group_id for t in trajectories]
    if baseline == "leave-one-out":
        return leave_one_out(rewards, ids)
    return group_relative(rewards, ids, scale, ddof, eps)


def wilson(successes, total, z=1.959963984540054):
    """The two bounds solve (p̂ − p)² n = z² p (1 − p)."""
    p, a = successes / total, 1 + z * z / total
    b, c = -(2 * p + z * z / total), p * p
    root = math.sqrt(max(0.0, b * b - 4 * a * c))
    return [(-b - root) / (2 * a), (-b + root) / (2 * a)]


def draw(logits, uniforms, temperature):
    tokens, log_probs = [], []
    for row, u in zip(logits, uniforms, strict=True):
        if temperature == 0:
            tokens.append(row.index(max(row))), log_probs.append(0.0)
            continue
        (values, _) = token_log_probs([[row] * len(row)], [range(len(row))], temperature)
        total, token = 0.0, None
        for k, value in enumerate(values):
            total += math.exp(value)
            if token is None and total > u:
                token = k
        tokens.append(token), log_probs.append(values[token])
    return Near([tokens, log_probs], [0] * len(tokens) + [1.0 + largest(row) / (temperature or 1) for row in logits])
