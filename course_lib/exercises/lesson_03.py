"""Exercises of lesson 03: baselines."""

import math

from .exercise import Case, Exercise, Mistake


def _loo_case(label, rewards):
    expected = []
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        expected.append(reward - math.fsum(others) / len(others))
    return Case((rewards,), expected, label)


def _optimal_case(label, logits, rewards):
    weights = [math.exp(z) for z in logits]
    probs = [w / math.fsum(weights) for w in weights]
    above = below = 0.0
    for a, (p, reward) in enumerate(zip(probs, rewards, strict=True)):
        norm = math.fsum(((v == a) - q) ** 2 for v, q in enumerate(probs))
        above += p * reward * norm
        below += p * norm
    return Case((logits, rewards), above / below, label)


def _running_case(label, rewards, baseline, decay):
    start, expected = baseline, []
    for reward in rewards:
        expected.append(reward - baseline)
        baseline = decay * baseline + (1 - decay) * reward
    return Case((rewards, start, decay), expected, label)


EXERCISES = (
    Exercise(
        id="03.1",
        title="The optimal baseline",
        minutes=15,
        difficulty=4,
        kind="code",
        stub='''
def optimal_baseline(logits, rewards):
    """The constant b that minimises the total variance of (R(a) − b) ∇ log π(a), summed over the components.

    logits: tensor (V,), θ of the policy π = softmax(θ) over one-token responses a
    rewards: tensor (V,), R(a) of each token
    returns: one number, by enumeration over all tokens
    """
    raise NotImplementedError
''',
        hints=(
            "The mean of the estimate does not depend on b, so minimise E[(R − b)² ‖s‖²], where s "
            "= ∇ log π(a). It is a parabola in b.",
            "Setting the derivative to 0 gives b = E[R ‖s‖²] / E[‖s‖²].",
            "s of token a is one-hot(a) − π. Build the (V, V) matrix of all scores; the squared "
            "norms are its squared entries summed over each row.",
        ),
        solution="""
def optimal_baseline(logits, rewards):
    probs = torch.softmax(logits, dim=-1)              # (V,)
    scores = torch.eye(len(probs)).to(probs) - probs   # (V, V), row a is ∇ log π(a)
    weights = probs * (scores**2).sum(dim=-1)          # (V,)   π(a) ‖s_a‖²
    return (weights * rewards).sum() / weights.sum()
""",
        explanation="A mean of the rewards in which each token counts with its squared score norm. Rare "
        "tokens have long scores and count for more than in J = E[R]; for a uniform policy "
        "the two agree.",
        cases=(
            Case(([math.log(4), 0.0], [1.0, 0.0]), 0.2, "probabilities 0.8 and 0.2: b is 0.2, while J is 0.8"),
            Case(([0.0, 0.0, 0.0], [3.0, 0.0, 0.0]), 1.0, "a uniform policy: b is the mean reward"),
            _optimal_case("three tokens", [1.0, 0.0, -1.0], [1.0, 2.0, -0.5]),
            _optimal_case("four tokens, large rewards", [2.0, 0.5, 0.0, -1.0], [10.0, 11.0, 9.0, 14.0]),
            _optimal_case("every reward is 2", [0.3, 1.2, -0.4], [2.0, 2.0, 2.0]),
        ),
        mistakes=(
            Mistake(
                """
def optimal_baseline(logits, rewards):
    return (logits.softmax(-1) * rewards).sum()
""",
                "You return J = E[R]. That is the usual baseline, but the optimum weights each token "
                "with its squared score norm too.",
            ),
            Mistake(
                """
def optimal_baseline(logits, rewards):
    return rewards.mean()
""",
                "You average the rewards of all tokens alike; neither π nor the scores come in.",
            ),
            Mistake(
                """
def optimal_baseline(logits, rewards):
    p = logits.softmax(-1)
    w = ((torch.eye(len(p)).to(p) - p) ** 2).sum(-1)
    return (w * rewards).sum() / w.sum()
""",
                "The squared norms are there, π is not: an expectation weights each token with its probability.",
            ),
            Mistake(
                """
def optimal_baseline(logits, rewards):
    p = logits.softmax(-1)
    w = p * ((torch.eye(len(p)).to(p) - p) ** 2).sum(-1).sqrt()
    return (w * rewards).sum() / w.sum()
""",
                "You weight with the norm of the score. Variance is quadratic: the norm comes in squared.",
            ),
            Mistake(
                """
def optimal_baseline(logits, rewards):
    p = logits.softmax(-1)
    return (p * ((torch.eye(len(p)).to(p) - p) ** 2).sum(-1) * rewards).sum()
""",
                "This is E[R ‖s‖²]. It still has to be divided by E[‖s‖²].",
            ),
            Mistake(
                """
def optimal_baseline(logits, rewards):
    p = logits.softmax(-1)
    w = p * (1 - p) ** 2
    return (w * rewards).sum() / w.sum()
""",
                "Your score has only the sampled token's entry, 1 − π(a). The entries −π(v) of the "
                "other tokens belong to the norm too.",
            ),
            Mistake(
                """
def optimal_baseline(logits, rewards):
    p = logits.softmax(-1)
    w = (p[:, None] * (torch.eye(len(p)).to(p) - p)).pow(2).sum(-1)
    return (w * rewards).sum() / w.sum()
""",
                "You use the gradient of π(a), so π(a) comes in squared. The score is the gradient of log π(a).",
            ),
            Mistake(
                """
def optimal_baseline(logits, rewards):
    p = logits.softmax(-1)
    w = p * ((torch.eye(len(p)).to(p) - p) ** 2).sum(0)
    return (w * rewards).sum() / w.sum()
""",
                "You add up a column of the matrix of scores: one component, over all tokens. ‖s‖² adds up "
                "the components of one token's score.",
            ),
        ),
        alternatives=(
            """
def optimal_baseline(logits, rewards):
    p = [float(q) for q in torch.softmax(torch.as_tensor(logits), 0)]
    above = below = 0.0
    for a in range(len(p)):
        norm = sum(((v == a) - p[v]) ** 2 for v in range(len(p)))
        above += p[a] * float(rewards[a]) * norm
        below += p[a] * norm
    return above / below
""",
            """
def optimal_baseline(logits, rewards):
    p = torch.softmax(logits, -1)
    norms = 1 - 2 * p + (p**2).sum()
    return (p * norms) @ rewards / (p @ norms)
""",
            """
def optimal_baseline(logits, rewards):
    p = np.exp(np.asarray(logits) - np.max(np.asarray(logits)))
    p = p / p.sum()
    norms = np.linalg.norm(np.eye(len(p)) - p, axis=1) ** 2
    return np.average(np.asarray(rewards), weights=p * norms)
""",
        ),
    ),
    Exercise(
        id="03.2",
        title="Does the mean always help?",
        minutes=8,
        difficulty=4,
        kind="predict",
        tolerance=0.05,
        stub="""
# Two tokens with π = (0.8, 0.2) and rewards (1, 0). From one sample a, the derivative of J with respect
# to θ_0 is estimated by (R(a) − b) (1[a = 0] − 0.8). By what factor does the variance of this estimate
# change when b goes from 0 to the mean reward, b = 0.8? (variance with b = 0.8 over variance with b = 0)
factor = None
""",
        hints=(
            "There are two outcomes. With b = 0 the estimate is 0.2 with probability 0.8 and 0 with probability 0.2.",
            "With b = 0.8 it is 0.04 with probability 0.8 and 0.64 with probability 0.2. Both means are 0.16.",
            "Variance is the mean of the squares minus 0.16²: 0.0064 without a baseline.",
        ),
        solution=9.0,
        explanation="0.0576 / 0.0064 = 9: here the mean baseline makes it nine times worse. The rare "
        "failure has a score four times as long, and the baseline gives this outcome a weight "
        "of −0.8 that it did not have. The optimal baseline, 0.2, brings the variance to 0. "
        "The mean is a good habit and no theorem.",
        mistakes=(
            Mistake(
                0.0,
                "The variance reaches 0 at the optimal baseline, b = 0.2. The mean, 0.8, is not optimal here.",
            ),
            Mistake(1.0, "The baseline leaves the mean of the estimate as it is. The variance does change."),
            Mistake(0.1111, "You have the ratio upside down, perhaps because a baseline is expected to help."),
            Mistake(
                2.6,
                "This is the ratio of the mean squares. Subtract the squared mean, 0.0256, from both first.",
            ),
            Mistake(3.0, "This is the ratio of the standard deviations; variances are their squares."),
        ),
    ),
    Exercise(
        id="03.3",
        title="Find the bug: a running baseline",
        minutes=6,
        difficulty=3,
        kind="find-the-bug",
        stub='''
def running_baseline_advantages(rewards, baseline, decay):
    """Advantage of each response against a running mean of the rewards before it. One line is out of place.

    rewards: tensor (N,), in the order the responses were sampled
    baseline: number, the running mean before the first response
    decay: number in (0, 1), the share of the old mean that an update keeps
    returns: tensor (N,)
    """
    advantages = []
    for reward in rewards:
        baseline = decay * baseline + (1 - decay) * reward
        advantages.append(reward - baseline)
    return torch.stack(advantages)
''',
        hints=(
            "Which rewards does the baseline of the first response contain when it is used? Which may it contain?",
            "Work it out: reward − (decay · old + (1 − decay) · reward) is decay · (reward − "
            "old). All advantages come out short.",
            "Use the baseline first and update it afterwards.",
        ),
        solution="""
def running_baseline_advantages(rewards, baseline, decay):
    advantages = []
    for reward in rewards:
        advantages.append(reward - baseline)
        baseline = decay * baseline + (1 - decay) * reward
    return torch.stack(advantages)
""",
        explanation="The update came before the use, so each baseline held its own response's reward, and "
        "depended on y. Every advantage was decay times what it should be: no error message, "
        "no NaN, only a gradient that is too short. A group mean does the same with (G−1)/G.",
        cases=(
            Case(([1.0, 0.0], 0.0, 0.5), [1.0, -0.5], "start at 0, decay ½"),
            _running_case("start at 0.5, decay 0.9", [1.0, 1.0, 0.0, 1.0], 0.5, 0.9),
            _running_case("rewards equal to the start", [2.0, 2.0, 2.0], 2.0, 0.7),
            _running_case("one response", [3.0], 1.0, 0.8),
            _running_case("five rewards, decay 0.6", [0.5, -1.0, 2.0, 0.0, 1.0], 0.25, 0.6),
        ),
        mistakes=(
            Mistake(
                """
def running_baseline_advantages(rewards, baseline, decay):
    return rewards - baseline
""",
                "The baseline is never updated. It should follow the rewards, one step behind.",
            ),
            Mistake(
                """
def running_baseline_advantages(rewards, baseline, decay):
    out = []
    for reward in rewards:
        out.append(reward - baseline)
        baseline = (1 - decay) * baseline + decay * reward
    return torch.stack(out)
""",
                "decay and 1 − decay have changed places: decay is the share of the old mean that is kept.",
            ),
            Mistake(
                """
def running_baseline_advantages(rewards, baseline, decay):
    return rewards - rewards.mean()
""",
                "You subtract the mean of the whole batch. It contains the response itself; only "
                "earlier rewards may come in.",
            ),
            Mistake(
                """
def running_baseline_advantages(rewards, baseline, decay):
    out = []
    for reward in rewards:
        out.append(reward - baseline)
        baseline = reward
    return torch.stack(out)
""",
                "The baseline is only the reward before. The running mean keeps a share decay of what it knew.",
            ),
            Mistake(
                """
def running_baseline_advantages(rewards, baseline, decay):
    out = []
    for reward in rewards:
        out.append(reward - baseline)
        baseline = decay * baseline + reward
    return torch.stack(out)
""",
                "The factor 1 − decay on the new reward is lost, so the baseline grows far beyond the mean.",
            ),
            Mistake(
                """
def running_baseline_advantages(rewards, baseline, decay):
    out = []
    for reward in rewards:
        out.append(reward - baseline)
        baseline = decay * baseline + (1 - decay) * out[-1]
    return torch.stack(out)
""",
                "You update with the advantage. The running mean is a mean of rewards.",
            ),
            Mistake(
                """
def running_baseline_advantages(rewards, baseline, decay):
    for reward in rewards:
        baseline = decay * baseline + (1 - decay) * reward
    return rewards - baseline
""",
                "You subtract the last running mean from all rewards. Each response has its own baseline: the "
                "running mean just before it.",
            ),
        ),
        alternatives=(
            """
def running_baseline_advantages(rewards, baseline, decay):
    before = [baseline]
    for reward in rewards[:-1]:
        before.append(decay * before[-1] + (1 - decay) * float(reward))
    return np.asarray(rewards) - np.array(before)
""",
            """
def running_baseline_advantages(rewards, baseline, decay):
    out = torch.empty_like(rewards)
    for k, reward in enumerate(rewards):
        out[k] = reward - baseline
        baseline = baseline + (1 - decay) * (reward - baseline)
    return out
""",
            """
def running_baseline_advantages(rewards, baseline, decay):
    def mean_before(k):
        if k == 0:
            return baseline
        return decay * mean_before(k - 1) + (1 - decay) * rewards[k - 1]
    return [rewards[k] - mean_before(k) for k in range(len(rewards))]
""",
        ),
    ),
    Exercise(
        id="03.4",
        title="Leave-one-out advantages",
        minutes=8,
        difficulty=2,
        kind="code",
        stub='''
def leave_one_out(rewards):
    """Advantage of each response against the mean reward of the others in its group.

    rewards: tensor (G,), the rewards of G responses to one prompt
    returns: tensor (G,), r_i − mean of r_j over j ≠ i; a group of one gets 0
    """
    raise NotImplementedError
''',
        hints=(
            "The sum of the others is the sum of all minus the response's own reward. How many others are there?",
            "With one response there are no others: nothing is known, and the advantage is "
            "defined as 0. Treat it first.",
        ),
        solution="""
def leave_one_out(rewards):
    if len(rewards) == 1:
        return torch.zeros_like(rewards)
    others = (rewards.sum() - rewards) / (len(rewards) - 1)  # (G,) mean of the other rewards
    return rewards - others
""",
        explanation="The baseline of response i is made from the other responses only, so it does not "
        "depend on y_i and the estimate stays unbiased.",
        cases=(
            Case(([1.0, 0.0, 0.0, 1.0],), [2 / 3, -2 / 3, -2 / 3, 2 / 3], "two of four right"),
            Case(([3.0, 1.0],), [2.0, -2.0], "a group of two"),
            Case(([1.0, 1.0, 1.0],), [0.0, 0.0, 0.0], "all right"),
            _loo_case("rewards that are not 0 or 1", [0.5, -1.0, 2.0, 4.0, 0.0]),
            Case(([1.0],), [0.0], "a group of one"),
        ),
        mistakes=(
            Mistake(
                """
def leave_one_out(rewards):
    return rewards - rewards.mean()
""",
                "You subtract the mean of the whole group, the response itself included. That shrinks "
                "every advantage by (G−1)/G.",
            ),
            Mistake(
                """
def leave_one_out(rewards):
    return rewards - (rewards.sum() - rewards) / len(rewards)
""",
                "You add up the others but divide by G. There are G − 1 of them.",
            ),
            Mistake(
                """
def leave_one_out(rewards):
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
""",
                "A group of one divides 0 by 0. It has no others to compare with, so its advantage is 0.",
            ),
            Mistake(
                """
def leave_one_out(rewards):
    return rewards - (rewards.sum() - rewards) / max(len(rewards) - 1, 1)
""",
                "A group of one gets its own reward as advantage, as if the baseline were 0. Without "
                "others the advantage is 0.",
            ),
            Mistake(
                """
def leave_one_out(rewards):
    if len(rewards) == 1:
        return 0 * rewards
    return (rewards.sum() - rewards) / (len(rewards) - 1) - rewards
""",
                "The sign is turned round: a response better than the others has a positive advantage.",
            ),
            Mistake(
                """
def leave_one_out(rewards):
    if len(rewards) == 1:
        return 0 * rewards
    return (rewards.sum() - rewards) / (len(rewards) - 1)
""",
                "You return the baseline. The advantage is the reward minus it.",
            ),
            Mistake(
                """
def leave_one_out(rewards):
    if len(rewards) == 1:
        return 0 * rewards
    return rewards - (rewards.sum() - rewards)
""",
                "You subtract the sum of the others; the baseline is their mean.",
            ),
            Mistake(
                """
def leave_one_out(rewards):
    if len(rewards) == 1:
        return 0 * rewards
    return (rewards - rewards.mean()) / (rewards.std() + 1e-9)
""",
                "You subtract the mean of the whole group and divide by its std, as GRPO does in lesson 05. "
                "Here only the others' mean is subtracted.",
            ),
        ),
        alternatives=(
            """
def leave_one_out(rewards):
    size = len(rewards)
    if size == 1:
        return [0.0]
    return (rewards - rewards.mean()) * size / (size - 1)
""",
            """
def leave_one_out(rewards):
    advantages = []
    for i in range(len(rewards)):
        others = [float(r) for j, r in enumerate(rewards) if j != i]
        advantages.append(float(rewards[i]) - sum(others) / len(others) if others else 0.0)
    return advantages
""",
            """
def leave_one_out(rewards):
    rewards = np.asarray(rewards)
    if rewards.size < 2:
        return np.zeros_like(rewards)
    return rewards - np.array([np.delete(rewards, i).mean() for i in range(rewards.size)])
""",
        ),
    ),
    Exercise(
        id="03.5",
        title="The group mean as a baseline",
        minutes=4,
        difficulty=2,
        kind="predict",
        tolerance=0.001,
        stub="""
# A group has G = 4 responses. You weight the score of response i, the derivative of log π(y_i), with
# r_i − mean(r_1, …, r_4) and take the mean over the group. The true derivative of J is 0.16. What is the
# expected value of your estimate?
expected_estimate = None
""",
        hints=(
            "The group mean contains r_i itself, with weight 1/G.",
            "r_i − mean of all = (G−1)/G · (r_i − mean of the others), and the bracket gives an unbiased estimate.",
        ),
        solution=0.12,
        explanation="(G−1)/G · 0.16 = ¾ · 0.16 = 0.12. The direction is right in expectation, the length "
        "is short by a quarter: harmless, since the learning rate makes up for it, but only "
        "while all groups have the same size.",
        mistakes=(
            Mistake(
                0.16,
                "That would hold if the baseline did not depend on y_i. The group mean contains r_i itself.",
            ),
            Mistake(
                0.2133,
                "You multiplied by G/(G−1). The group mean takes part of r_i away, so the estimate gets shorter.",
            ),
            Mistake(0.04, "This is 1/G of the gradient: the part that is lost, not the part that is left."),
            Mistake(
                0.0,
                "Advantages of a group sum to 0, but each multiplies another score; their products do not cancel.",
            ),
            Mistake(0.128, "You used G/(G+1) = 4/5. The mean of four holds a quarter of r_i."),
        ),
    ),
)
