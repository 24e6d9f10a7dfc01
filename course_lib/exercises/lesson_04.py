"""Exercises of lesson 04: PPO clipping."""

import math

from .exercise import Case, Exercise, Mistake


def _token_loss(ratio, advantage, low, high):
    kept = ratio
    if advantage > 0 and ratio > 1 + high:
        kept = 1 + high
    if advantage < 0 and ratio < 1 - low:
        kept = 1 - low
    return -kept * advantage


def _clipped_case(label, ratios, advantages, low, high):
    """Ratios as the learner meets them: as two tensors of log-probabilities."""
    old = [[-0.5 - 0.25 * k - 0.125 * i for k in range(len(row))] for i, row in enumerate(ratios)]
    new = [[o + math.log(r) for o, r in zip(*rows, strict=True)] for rows in zip(old, ratios, strict=True)]
    expected = [[_token_loss(r, a, low, high) for r in row] for row, a in zip(ratios, advantages, strict=True)]
    return Case((new, old, advantages, low, high), expected, label)


def _loss_case(label, ratios, advantages, low, high):
    expected = [_token_loss(r, a, low, high) for r, a in zip(ratios, advantages, strict=True)]
    return Case((ratios, advantages, low, high), expected, label)


def _gae_case(label, rewards, values, mask, gamma, lam):
    expected = [0.0] * len(rewards)
    active = [t for t, m in enumerate(mask) if m]
    deltas = [
        rewards[t] + (gamma * values[active[n + 1]] if n + 1 < len(active) else 0.0) - values[t]
        for n, t in enumerate(active)
    ]
    for n, t in enumerate(active):
        expected[t] = math.fsum((gamma * lam) ** (m - n) * deltas[m] for m in range(n, len(active)))
    return Case((rewards, values, mask, gamma, lam), expected, label)


EXERCISES = (
    Exercise(
        id="04.1",
        title="The first step: loss 0, gradient not",
        minutes=6,
        difficulty=3,
        kind="predict",
        tolerance=0.005,
        stub="""
# The first step on a fresh batch: π_θ = π_old, so every ratio is 1. Four tokens, all with probability ¼.
# Two responses of one token: token 0 with A = +1 and token 1 with A = −1. The loss, the mean of
# −min(ρA, clip(ρ)A), is −½ (1 − 1) = 0. What is its derivative with respect to the logit of token 0?
derivative = None
""",
        hints=(
            "The ratio is 1, but it is not a constant: ρ = exp(log π_θ − log π_old), so ∇ρ = ρ ∇log π_θ = ∇log π_θ.",
            "So the gradient is REINFORCE's: −½ [ (+1) ∇log π(0) + (−1) ∇log π(1) ].",
            "∂ log π(0)/∂θ_0 = 1 − ¼ and ∂ log π(1)/∂θ_0 = −¼.",
        ),
        solution=-0.5,
        explanation="−½ [¾ + ¼] = −0.5: descent raises logit 0. The loss is 0 because advantages of a "
        "group sum to 0; its value says nothing, its gradient is exactly REINFORCE's.",
        mistakes=(
            Mistake(
                0.0,
                "A loss of 0 need not have a gradient of 0. The two terms cancel in value, yet pull "
                "on different tokens.",
            ),
            Mistake(0.5, "This is the derivative of the objective. The loss is its negative."),
            Mistake(-1.0, "The mean over the two responses is missing: a factor ½."),
            Mistake(-0.375, "This is the first response's share, −½ · ¾. Lowering token 1 raises token 0 as well."),
            Mistake(-0.25, "The second term has the wrong sign: A = −1 times −¼ is +¼, so the two add up."),
            Mistake(-0.125, "This is the second response's share. The first adds −½ · ¾."),
            Mistake(-0.75, "This is the first response alone, and without the ½ of the mean."),
        ),
    ),
    Exercise(
        id="04.2",
        title="The clipped surrogate",
        minutes=10,
        difficulty=3,
        kind="code",
        stub='''
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    """PPO's loss of each token, −min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high) A), to be minimised.

    log_probs: tensor (B, T), log π_θ of the sampled tokens
    old_log_probs: tensor (B, T), log π_old of the same tokens
    advantages: tensor (B,), one a response
    clip_low, clip_high: numbers ≥ 0
    returns: tensor (B, T)
    """
    raise NotImplementedError
''',
        hints=(
            "The ratio of two probabilities is exp of the difference of their logs.",
            "Compute ρA and clip(ρ)A, take the smaller of the two in each place, then put the minus in front.",
            "advantages[:, None] has shape (B, 1): one value for every token of its row.",
        ),
        solution="""
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    ratio = torch.exp(log_probs - old_log_probs)          # (B, T)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantages = advantages[:, None]                      # (B, 1)
    return -torch.minimum(ratio * advantages, clipped * advantages)
""",
        explanation="The minimum is a pessimistic bound: clipping may only take away what looks like a "
        "gain. For A > 0 it acts above 1 + clip_high, for A < 0 below 1 − clip_low, and "
        "nowhere else.",
        cases=(
            _clipped_case(
                "all six regions: ratio 0.5, 1, 2 with A = 1 and A = −1",
                [[0.5, 1.0, 2.0], [0.5, 1.0, 2.0]],
                [1.0, -1.0],
                0.2,
                0.2,
            ),
            _clipped_case(
                "clip-higher: 0.2 below, 0.28 above",
                [[0.7, 1.25, 1.4], [0.7, 0.85, 1.4]],
                [2.0, -0.5],
                0.2,
                0.28,
            ),
            _clipped_case("as many rows as tokens", [[0.6, 1.5], [0.6, 1.5]], [1.5, -3.0], 0.1, 0.3),
            _clipped_case("ratio 1 everywhere: minus the advantage", [[1.0, 1.0]], [0.75], 0.2, 0.28),
            _clipped_case("advantage 0", [[0.4, 2.5]], [0.0], 0.2, 0.2),
        ),
        mistakes=(
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    r, a = (log_probs - old_log_probs).exp(), advantages[:, None]
    return -torch.maximum(r * a, r.clamp(1 - clip_low, 1 + clip_high) * a)
""",
                "You keep the larger of the two gains, exactly what clipping is there to remove. (With the minus "
                "inside, the smaller loss is the larger gain.)",
            ),
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    r, a = (log_probs - old_log_probs).exp(), advantages[:, None]
    return torch.minimum(r * a, r.clamp(1 - clip_low, 1 + clip_high) * a)
""",
                "The minus sign is missing: this is the objective to maximise, not the loss.",
            ),
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    return -(log_probs - old_log_probs).exp() * advantages[:, None]
""",
                "Nothing is clipped: this is the plain importance-weighted loss.",
            ),
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    r = (log_probs - old_log_probs).exp()
    return -r.clamp(1 - clip_low, 1 + clip_high) * advantages[:, None]
""",
                "You clip but do not take the minimum. A token that moved the wrong way then gets no "
                "gradient to come back.",
            ),
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    r, a = (log_probs - old_log_probs).exp(), advantages[:, None]
    return -torch.minimum(r * a, r.clamp(1 - clip_low, 1 + clip_low) * a)
""",
                "You use clip_low on both sides. The upper bound is 1 + clip_high.",
            ),
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    r, a = (old_log_probs - log_probs).exp(), advantages[:, None]
    return -torch.minimum(r * a, r.clamp(1 - clip_low, 1 + clip_high) * a)
""",
                "The ratio is upside down: π_θ stands above, π_old below.",
            ),
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    d, a = log_probs - old_log_probs, advantages[:, None]
    return -torch.minimum(d.exp() * a, d.clamp(-clip_low, clip_high).exp() * a)
""",
                "You clip the logarithm of the ratio. PPO clips the ratio itself: log 1.2 is not 0.2.",
            ),
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    r, a = log_probs - old_log_probs, advantages[:, None]
    return -torch.minimum(r * a, r.clamp(1 - clip_low, 1 + clip_high) * a)
""",
                "You use the difference of the logs as the ratio; the exp is missing.",
            ),
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    r, a = log_probs / old_log_probs, advantages[:, None]
    return -torch.minimum(r * a, r.clamp(1 - clip_low, 1 + clip_high) * a)
""",
                "You divide log-probabilities. The ratio is of probabilities: exp of the difference of their logs.",
            ),
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    r = (log_probs - old_log_probs).exp()
    return -torch.minimum(r, r.clamp(1 - clip_low, 1 + clip_high)) * advantages[:, None]
""",
                "You take the minimum of the ratios and multiply by A afterwards. A negative A turns that into a "
                "maximum: multiply first.",
            ),
            Mistake(
                """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    r, a = (log_probs - old_log_probs).exp(), advantages[:, None]
    return -torch.minimum(r * a, r.clamp(1 - clip_high, 1 + clip_low) * a)
""",
                "The two bounds have changed places: clip_low belongs below 1, clip_high above.",
            ),
        ),
        alternatives=(
            """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    ratio = torch.exp(log_probs - old_log_probs)
    positive = advantages[:, None] >= 0
    kept = torch.where(positive, ratio.clamp(max=1 + clip_high), ratio.clamp(min=1 - clip_low))
    return -kept * advantages[:, None]
""",
            """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    loss = []
    for new_row, old_row, a in zip(log_probs, old_log_probs, advantages):
        row = []
        for new, old in zip(new_row, old_row):
            ratio = math.exp(new - old)
            clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
            row.append(max(-ratio * float(a), -clipped * float(a)))
        loss.append(row)
    return loss
""",
            """
def clipped_surrogate(log_probs, old_log_probs, advantages, clip_low, clip_high):
    ratio = np.exp(np.asarray(log_probs) - np.asarray(old_log_probs))
    a = np.asarray(advantages).reshape(-1, 1)
    return np.maximum(-ratio * a, -np.clip(ratio, 1 - clip_low, 1 + clip_high) * a)
""",
        ),
    ),
    Exercise(
        id="04.3",
        title="Where the gradient is zero",
        minutes=8,
        difficulty=3,
        kind="code",
        stub='''
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    """Which tokens get no gradient from the clipped surrogate?

    ratios: tensor (N,), ρ of each token, none exactly on a clip boundary
    advantages: tensor (N,), A of each token
    clip_low, clip_high: numbers ≥ 0
    returns: tensor (N,) of bool, True where the gradient is exactly 0
    """
    raise NotImplementedError
''',
        hints=(
            "Where the minimum picks the clipped term and the ratio lies outside the range, the loss is constant in θ.",
            "For A > 0 the minimum picks the clipped term only above the range. For A < 0 it is the other side.",
            "A token with A = 0 contributes nothing, wherever its ratio is.",
        ),
        solution="""
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    pushed_up_enough = (advantages > 0) & (ratios > 1 + clip_high)
    pushed_down_enough = (advantages < 0) & (ratios < 1 - clip_low)
    return pushed_up_enough | pushed_down_enough | (advantages == 0)
""",
        explanation="Of the six regions two are flat: a good token that is already likely enough, and a "
        "bad one that is already rare enough. A token that moved against its advantage keeps "
        "its full gradient.",
        cases=(
            Case(
                ([0.5, 1.0, 2.0, 0.5, 1.0, 2.0], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0], 0.2, 0.2),
                [False, False, True, True, False, False],
                "the six regions",
            ),
            Case(
                ([1.25, 1.3, 1.25, 0.75, 0.85, 0.75], [0.5, 0.5, -0.5, -0.5, -0.5, 0.5], 0.2, 0.28),
                [False, True, False, True, False, False],
                "clip-higher: 0.2 below, 0.28 above",
            ),
            Case(([0.5, 1.0, 2.0], [0.0, 0.0, 0.0], 0.2, 0.2), [True, True, True], "advantage 0"),
            Case(([1.0, 1.0], [2.0, -2.0], 0.2, 0.28), [False, False], "the first step: all ratios are 1"),
            Case(
                ([0.4, 0.95, 1.05, 3.0], [-2.0, -0.1, 0.1, 4.0], 0.5, 0.01),
                [True, False, True, True],
                "a narrow upper and a wide lower range",
            ),
        ),
        mistakes=(
            Mistake(
                """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    return (ratios > 1 + clip_high) | (ratios < 1 - clip_low) | (advantages == 0)
""",
                "You call every ratio outside the range flat. The minimum brings the gradient back "
                "where the token moved against its advantage: A < 0 above the range, A > 0 below.",
            ),
            Mistake(
                """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    flat = ((advantages < 0) & (ratios > 1 + clip_high)) | ((advantages > 0) & (ratios < 1 - clip_low))
    return flat | (advantages == 0)
""",
                "The two sides are exchanged: these are the regions of a maximum, where the "
                "correcting gradient is lost.",
            ),
            Mistake(
                """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    return ((advantages > 0) & (ratios > 1 + clip_high)) | ((advantages < 0) & (ratios < 1 - clip_low))
""",
                "Tokens with advantage 0 are forgotten: 0 times anything has gradient 0.",
            ),
            Mistake(
                """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    flat = ((advantages > 0) & (ratios > 1 + clip_low)) | ((advantages < 0) & (ratios < 1 - clip_low))
    return flat | (advantages == 0)
""",
                "You use clip_low on both sides. With clip-higher the upper bound is 1 + clip_high.",
            ),
            Mistake(
                """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    return ((advantages > 0) & (ratios > 1 + clip_high)) | (advantages == 0)
""",
                "For negative advantages nothing is flat in your answer. A bad token that is already "
                "rare enough gets no gradient either.",
            ),
            Mistake(
                """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    flat = ((advantages > 0) & (ratios > 1 + clip_high)) | ((advantages < 0) & (ratios < 1 - clip_low))
    return ~(flat | (advantages == 0))
""",
                "You return where the gradient is not zero.",
            ),
            Mistake(
                """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    flat = ((advantages > 0) & (ratios > 1 + clip_high)) | ((advantages < 0) & (ratios < 1 - clip_low))
    return ~flat
""",
                "You return where the gradient is not zero, and forget that A = 0 has none.",
            ),
            Mistake(
                """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    return (ratios > 1 + clip_high) | (advantages == 0)
""",
                "Your answer does not look at the sign of A. For A < 0 the flat side is the lower one.",
            ),
            Mistake(
                """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    return ratios > 1 + clip_high
""",
                "Your answer does not look at A. For A < 0 the lower side is flat, for A = 0 everything is.",
            ),
        ),
        alternatives=(
            """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    ratios = ratios.clone().requires_grad_()
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    torch.minimum(ratios * advantages, clipped * advantages).sum().backward()
    return ratios.grad == 0
""",
            """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    result = []
    for ratio, a in zip(ratios, advantages):
        if a > 0:
            result.append(bool(ratio > 1 + clip_high))
        elif a < 0:
            result.append(bool(ratio < 1 - clip_low))
        else:
            result.append(True)
    return result
""",
            """
def gradient_is_zero(ratios, advantages, clip_low, clip_high):
    ratios, a = np.asarray(ratios), np.asarray(advantages)
    beyond = np.where(a > 0, ratios - (1 + clip_high), (1 - clip_low) - ratios)
    return np.logical_or(a == 0, beyond > 0)
""",
        ),
    ),
    Exercise(
        id="04.4",
        title="Find the bug: clipping reversed",
        minutes=6,
        difficulty=3,
        kind="find-the-bug",
        stub='''
def policy_loss(ratios, advantages, clip_low, clip_high):
    """PPO's clipped loss of each token, to be minimised. One word is wrong.

    ratios: tensor (N,), ρ of each token
    advantages: tensor (N,), A of each token
    clip_low, clip_high: numbers ≥ 0
    returns: tensor (N,)
    """
    unclipped = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    return torch.minimum(unclipped, clipped)
''',
        hints=(
            "Take A = 1 and ρ = 2. Which of the two losses should count if a further rise is to bring nothing?",
            "The formula has min of ρA and clip(ρ)A, with the minus in front of it. Here the minus has moved inside.",
            "−min(a, b) = max(−a, −b).",
        ),
        solution="""
def policy_loss(ratios, advantages, clip_low, clip_high):
    unclipped = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped)
""",
        explanation="With the minus inside, the pessimistic bound is the larger loss. The minimum kept "
        "pushing tokens that had moved too far already and stopped pushing those that had "
        "moved the wrong way, and the loss curve showed neither.",
        cases=(
            Case(
                ([0.5, 1.0, 2.0, 0.5, 1.0, 2.0], [1.0, 1.0, 1.0, -1.0, -1.0, -1.0], 0.2, 0.2),
                [-0.5, -1.0, -1.2, 0.8, 1.0, 2.0],
                "the six regions",
            ),
            _loss_case("clip-higher", [0.7, 1.25, 1.4, 0.7, 0.85, 1.4], [2.0, 2.0, 2.0, -0.5, -0.5, -0.5], 0.2, 0.28),
            _loss_case("inside the range nothing is clipped", [0.9, 1.1], [1.0, -1.0], 0.2, 0.2),
            _loss_case("advantage 0", [0.2, 5.0], [0.0, 0.0], 0.2, 0.2),
        ),
        mistakes=(
            Mistake(
                """
def policy_loss(ratios, advantages, clip_low, clip_high):
    return torch.minimum(advantages * ratios, advantages * ratios.clamp(1 - clip_low, 1 + clip_high))
""",
                "Now the minimum is right, but the minus is gone: minimising this pushes every token the wrong way.",
            ),
            Mistake(
                """
def policy_loss(ratios, advantages, clip_low, clip_high):
    return -torch.minimum(-advantages * ratios, -advantages * ratios.clamp(1 - clip_low, 1 + clip_high))
""",
                "Two minus signs cancel, one inside and one in front, and what is left is not even pessimistic.",
            ),
            Mistake(
                """
def policy_loss(ratios, advantages, clip_low, clip_high):
    return -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
""",
                "Only the clipped term is left. A token that moved the wrong way then has no gradient to come back.",
            ),
            Mistake(
                """
def policy_loss(ratios, advantages, clip_low, clip_high):
    return -advantages * ratios
""",
                "Only the unclipped term is left: nothing keeps a ratio from running away.",
            ),
            Mistake(
                """
def policy_loss(ratios, advantages, clip_low, clip_high):
    u, c = -advantages * ratios, -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    return torch.where(advantages > 0, torch.maximum(u, c), torch.minimum(u, c))
""",
                "You treat positive advantages rightly and take the minimum for negative ones. The "
                "sign of A is in both terms already: one rule serves for both.",
            ),
            Mistake(
                """
def policy_loss(ratios, advantages, clip_low, clip_high):
    u, c = -advantages * ratios, -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    return torch.where(advantages > 0, torch.minimum(u, c), torch.maximum(u, c))
""",
                "You treat negative advantages rightly and take the minimum for positive ones. The "
                "same rule holds for both signs.",
            ),
            Mistake(
                """
def policy_loss(ratios, advantages, clip_low, clip_high):
    u, c = -advantages * ratios, -advantages * ratios.clamp(1 - clip_high, 1 + clip_low)
    return torch.maximum(u, c)
""",
                "The bounds have changed places: clip_low belongs to the lower one, clip_high to the "
                "upper. They were right before.",
            ),
        ),
        alternatives=(
            """
def policy_loss(ratios, advantages, clip_low, clip_high):
    objective = advantages * ratios
    clipped = advantages * torch.clamp(ratios, 1 - clip_low, 1 + clip_high)
    return -torch.minimum(objective, clipped)
""",
            """
def policy_loss(ratios, advantages, clip_low, clip_high):
    loss = []
    for ratio, a in zip(ratios, advantages):
        bounded = min(float(ratio), 1 + clip_high) if a >= 0 else max(float(ratio), 1 - clip_low)
        loss.append(-bounded * float(a))
    return loss
""",
            """
def policy_loss(ratios, advantages, clip_low, clip_high):
    ratios, a = np.asarray(ratios), np.asarray(advantages)
    return np.maximum(-a * ratios, -a * np.clip(ratios, 1 - clip_low, 1 + clip_high))
""",
        ),
    ),
    Exercise(
        id="04.5",
        title="GAE that skips tool tokens",
        minutes=15,
        difficulty=4,
        kind="code",
        stub='''
def gae(rewards, values, mask, gamma, lam):
    """Generalised advantages of one trajectory, in which tokens under a zero mask are no steps.

    With t' the next token that has mask 1 after t:
        δ_t = r_t + γ V_t' − V_t,   A_t = δ_t + γ λ A_t'
    and V_t' = A_t' = 0 if there is none.

    rewards, values: tensors (T,); what stands under a zero mask is ignored
    mask: tensor (T,) of 0 and 1, 1 on the tokens the policy produced
    gamma, lam: numbers in [0, 1]
    returns: tensor (T,), 0 under a zero mask
    """
    raise NotImplementedError
''',
        hints=(
            "Walk from the last token to the first and carry two numbers along: the value and the "
            "advantage of the next step.",
            "At a masked token do nothing at all: neither of the two numbers you carry changes.",
            "At a step: delta = r + gamma · next_value − value; advantage = delta + gamma · lam · "
            "next_advantage. Then both carried numbers become this step's.",
        ),
        solution="""
def gae(rewards, values, mask, gamma, lam):
    advantages = torch.zeros_like(values)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(values))):
        if mask[t] == 0:
            continue
        delta = rewards[t] + gamma * next_value - values[t]
        advantages[t] = delta + gamma * lam * next_advantage
        next_value, next_advantage = values[t], advantages[t]
    return advantages
""",
        explanation="What a tool wrote is no decision of the policy, so it is no step: neither is it "
        "discounted nor is its value used. The value after a model token is that of the next "
        "model token.",
        cases=(
            Case(
                ([0.0, 0.0, 0.0, 1.0], [0.5, 9.0, 9.0, 0.6], [1, 0, 0, 1], 1.0, 0.95),
                [0.48, 0.0, 0.0, 0.4],
                "two tool tokens between two of the model",
            ),
            Case(([0.0, 1.0], [0.25, 0.5], [1, 1], 0.5, 0.5), [0.125, 0.5], "no tool tokens"),
            _gae_case(
                "discounted, rewards along the way",
                [0.5, 3.0, -1.0, 2.0, 4.0, 1.0],
                [0.3, 8.0, 0.7, -0.4, 6.0, 1.1],
                [1, 0, 1, 1, 0, 1],
                0.9,
                0.8,
            ),
            _gae_case(
                "tool tokens at both ends",
                [7.0, 1.0, 0.0, 5.0],
                [4.0, 0.2, 0.1, 3.0],
                [0, 1, 1, 0],
                0.9,
                0.95,
            ),
            _gae_case("lam 1: return minus value", [0.0, 0.0, 2.0], [0.5, 0.4, 1.5], [1, 1, 1], 1.0, 1.0),
            Case(([1.0, 1.0], [0.5, 0.5], [0, 0], 0.9, 0.9), [0.0, 0.0], "no model token at all"),
        ),
        mistakes=(
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    out, nv, na = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        na = rewards[t] + gamma * nv - values[t] + gamma * lam * na
        nv = values[t]
        out[t] = na * mask[t]
    return out
""",
                "Tool tokens count as steps: their values and rewards flow into the advantages. Skip them.",
            ),
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    out, nv, na = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        na = rewards[t] + gamma * nv - values[t] + gamma * lam * na
        nv = values[t]
        out[t] = na
    return out
""",
                "The mask is not used. Tokens under a zero mask are no steps and have advantage 0.",
            ),
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    rewards, values = rewards * mask, values * mask
    out, nv, na = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        na = rewards[t] + gamma * nv - values[t] + gamma * lam * na
        nv = values[t]
        out[t] = na * mask[t]
    return out
""",
                "You set values under the mask to 0 and still count these tokens as steps. A 0 is a "
                "value too: it says that nothing is to come.",
            ),
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    out, nv, na = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            na = rewards[t] + gamma * nv - values[t] + gamma * lam * na
            nv = values[t]
            out[t] = na
        else:
            na = gamma * lam * na
            nv = gamma * nv
    return out
""",
                "Each tool token discounts what comes after it. No step, no discount.",
            ),
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    out, nv = torch.zeros_like(values), 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            out[t] = rewards[t] + gamma * nv - values[t]
            nv = values[t]
    return out
""",
                "You return δ, which is the case lam = 0. The term γ λ A_t' is missing.",
            ),
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    out, nv, na = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            na = rewards[t] + gamma * nv - values[t] + gamma * na
            nv = values[t]
            out[t] = na
    return out
""",
                "lam is not used: this is the return minus the value, the case lam = 1.",
            ),
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    out, nv, na = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            na = rewards[t] + gamma * nv - values[t] + lam * na
            nv = values[t]
            out[t] = na
    return out
""",
                "The later advantage is multiplied by lam only; it must be discounted by gamma as well.",
            ),
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    out, nv, na = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            na = rewards[t] + gamma * nv - values[t] + gamma * lam * na
            nv = values[t]
            out[t] = na + values[t]
    return out
""",
                "You return A + V, the target of the critic. Asked for are the advantages.",
            ),
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    out, nv, na = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            na = rewards[t] + gamma * nv - values[t] + gamma * lam * na
            nv = values[t]
        out[t] = na
    return out
""",
                "Tool tokens get the advantage of the step after them. Under a zero mask the result is 0.",
            ),
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    out, nv, na, carried = torch.zeros_like(values), 0.0, 0.0, 0.0
    for t in reversed(range(len(values))):
        carried = carried + rewards[t]
        if mask[t]:
            na = carried + gamma * nv - values[t] + gamma * lam * na
            nv, carried = values[t], 0.0
            out[t] = na
    return out
""",
                "Rewards under the mask are added to the step before them. They are to be ignored.",
            ),
            Mistake(
                """
def gae(rewards, values, mask, gamma, lam):
    out, nv, na = torch.zeros_like(values), None, 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            nv = values[t] if nv is None else nv
            na = rewards[t] + gamma * nv - values[t] + gamma * lam * na
            nv = values[t]
            out[t] = na
    return out
""",
                "After the last step you use its own value as the next one. The episode is over "
                "there: the next value is 0.",
            ),
        ),
        alternatives=(
            """
def gae(rewards, values, mask, gamma, lam):
    steps = torch.nonzero(mask).flatten()
    r, v = rewards[steps], values[steps]
    deltas = r + gamma * torch.cat([v[1:], v[:0] if len(v) == 0 else v.new_zeros(1)]) - v
    distance = torch.arange(len(v))[None, :] - torch.arange(len(v))[:, None]
    weights = torch.where(distance >= 0, (gamma * lam) ** distance.clamp(min=0).to(v), 0.0)
    return torch.zeros_like(values).index_put((steps,), weights @ deltas)
""",
            """
def gae(rewards, values, mask, gamma, lam):
    result, value_after, advantage_after = [], 0.0, 0.0
    for r, v, m in reversed(list(zip(rewards, values, mask))):
        if m:
            advantage_after = float(r) + gamma * value_after - float(v) + gamma * lam * advantage_after
            value_after = float(v)
            result.append(advantage_after)
        else:
            result.append(0.0)
    return result[::-1]
""",
            """
def gae(rewards, values, mask, gamma, lam):
    rewards, values = np.asarray(rewards), np.asarray(values)
    active = np.flatnonzero(np.asarray(mask))
    out = np.zeros(len(values))
    for n, t in enumerate(active):
        weight = 1.0
        for m in range(n, len(active)):
            after = values[active[m + 1]] if m + 1 < len(active) else 0.0
            out[t] += weight * (rewards[active[m]] + gamma * after - values[active[m]])
            weight *= gamma * lam
    return out
""",
        ),
    ),
)
