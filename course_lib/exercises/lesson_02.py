"""Exercises of lesson 02: REINFORCE."""

import math

from .exercise import Case, Exercise, Mistake, value_and_gradient


def _softmax(row):
    top = max(row)
    weights = [math.exp(z - top) for z in row]
    total = math.fsum(weights)
    return [w / total for w in weights]


def _score_case(label, logits, action):
    probs = _softmax(logits)
    return Case((logits, action), [float(a == action) - p for a, p in enumerate(probs)], label)


def _reinforce_case(label, logits, actions, rewards):
    probs, n = _softmax(logits), len(actions)
    expected = [
        math.fsum(r * ((a == v) - probs[v]) for a, r in zip(actions, rewards, strict=True)) / n
        for v in range(len(logits))
    ]
    return Case((logits, actions, rewards), expected, label)


def _surrogate_case(label, log_probs, rewards, mask):
    rows = range(len(rewards))
    value = -math.fsum(r * lp * m for i, r in enumerate(rewards) for lp, m in zip(log_probs[i], mask[i], strict=True))
    gradient = [[-rewards[i] * m / len(rewards) for m in mask[i]] for i in rows]
    return Case((log_probs, rewards, mask), (value / len(rewards), gradient), label)


def _to_go_case(label, rewards, gamma):
    expected = [
        math.fsum(gamma ** (later - k) * rewards[later] for later in range(k, len(rewards)))
        for k in range(len(rewards))
    ]
    return Case((rewards, gamma), expected, label)


EXERCISES = (
    Exercise(
        id="02.1",
        title="Score function of a softmax",
        minutes=8,
        difficulty=2,
        kind="code",
        stub='''
def score(logits, action):
    """∇_θ log π(action), where π = softmax(θ) and θ are the logits.

    logits: tensor (V,)
    action: integer, the sampled token
    returns: tensor (V,)
    """
    raise NotImplementedError
''',
        hints=(
            "log π(a) = θ_a − log Σ_v exp(θ_v). Differentiate both terms with respect to θ_v.",
            "The first term gives 1 where v = a and 0 elsewhere; the second gives −π(v).",
        ),
        solution="""
def score(logits, action):
    gradient = -torch.softmax(logits, dim=-1)
    gradient[action] += 1
    return gradient
""",
        explanation="One-hot minus probabilities: the sampled token's logit is pushed up by 1 − π(a), "
        "every other is pushed down by its own probability. The entries sum to 0, because "
        "adding a constant to all logits changes nothing.",
        cases=(
            Case(([0.0, 0.0], 0), [0.5, -0.5], "a fair coin"),
            Case(([0.0, math.log(3)], 1), [-0.25, 0.25], "probabilities ¼ and ¾"),
            _score_case("four tokens", [2.0, -1.0, 0.5, 0.0], 2),
            _score_case("the least likely token", [3.0, 0.0, -3.0], 2),
            _score_case("logits around 1000", [1000.0, 1001.0, 999.0], 0),
        ),
        mistakes=(
            Mistake(
                """
def score(logits, action):
    g = torch.softmax(logits, -1)
    g[action] -= 1
    return g
""",
                "The sign is turned round: this is the gradient of the cross-entropy loss, −log π(a).",
            ),
            Mistake(
                """
def score(logits, action):
    return torch.nn.functional.one_hot(torch.tensor(action), len(logits)).double()
""",
                "You differentiated θ_a only. The normaliser log Σ exp θ_v depends on every logit "
                "too, and contributes −π(v).",
            ),
            Mistake(
                """
def score(logits, action):
    p = torch.softmax(logits, -1)
    g = -p * p[action]
    g[action] += p[action]
    return g
""",
                "This is the gradient of π(a), not of log π(a): it has a factor π(a) too many.",
            ),
            Mistake(
                """
def score(logits, action):
    g = torch.full_like(logits, -1 / len(logits))
    g[action] += 1
    return g
""",
                "You subtract 1/V everywhere. The normaliser's derivative is π(v), which is 1/V only "
                "for a uniform policy.",
            ),
            Mistake(
                """
def score(logits, action):
    g = -torch.softmax(logits, -1)
    g[action] *= -1
    return g
""",
                "At the sampled token you have +π(a). It should be 1 − π(a): the more surprising the "
                "token, the larger the push.",
            ),
            Mistake(
                """
def score(logits, action):
    g = torch.zeros_like(logits)
    g[action] = 1 - torch.softmax(logits, -1)[action]
    return g
""",
                "Only the sampled token's entry is set. The logits of all other tokens move too: they are pushed down.",
            ),
            Mistake(
                """
def score(logits, action):
    e = logits.exp()
    g = -e / e.sum()
    g[action] += 1
    return g
""",
                "exp(1000) overflows and inf/inf is NaN. Use torch.softmax, or subtract the maximum first.",
            ),
            Mistake(
                """
def score(logits, action):
    g = -torch.softmax(logits, -1)
    g[action] = 1
    return g
""",
                "At the sampled token you have 1. The normaliser takes π(a) away there too: 1 − π(a).",
            ),
            Mistake(
                """
def score(logits, action):
    g = -torch.softmax(logits, -1)[action].expand(len(logits)).clone()
    g[action] += 1
    return g
""",
                "You subtract π(a), the sampled token's probability, everywhere. Entry v loses its own, π(v).",
            ),
            Mistake(
                """
def score(logits, action):
    return torch.nn.functional.one_hot(torch.tensor(action), len(logits)) - torch.log_softmax(logits, -1)
""",
                "You subtract log π. The derivative of the normaliser log Σ exp θ_v is π(v), a probability.",
            ),
            Mistake(
                """
def score(logits, action):
    return torch.nn.functional.one_hot(torch.tensor(action), len(logits)) / torch.softmax(logits, -1)
""",
                "1/π(a) is the derivative of log π(a) with respect to π(a). Asked for is the one with respect to "
                "the logits: multiply with ∂π(a)/∂θ_v, the chain rule.",
            ),
        ),
        alternatives=(
            """
def score(logits, action):
    logits = logits.clone().requires_grad_()
    torch.log_softmax(logits, -1)[action].backward()
    return logits.grad
""",
            """
def score(logits, action):
    logits = [float(z) for z in logits]
    weights = [math.exp(z - max(logits)) for z in logits]
    return [(1.0 if v == action else 0.0) - w / sum(weights) for v, w in enumerate(weights)]
""",
            """
def score(logits, action):
    z = np.asarray(logits)
    p = np.exp(z - z.max())
    p /= p.sum()
    return np.eye(len(z))[action] - p
""",
        ),
    ),
    Exercise(
        id="02.2",
        title="The REINFORCE estimator",
        minutes=10,
        difficulty=3,
        kind="code",
        stub='''
def reinforce_gradient(logits, actions, rewards):
    """REINFORCE estimate of ∇J from N sampled one-token responses, without a baseline.

    logits: tensor (V,), θ of the policy π = softmax(θ)
    actions: tensor (N,) of integers, the sampled tokens
    rewards: tensor (N,), their rewards
    returns: tensor (V,), the estimate of ∇_θ J
    """
    raise NotImplementedError
''',
        hints=(
            "Each sample contributes its reward times its score, one-hot(a) − π. The estimate is their mean.",
            "The samples were drawn from π, so likely tokens already appear more often: do not weight with π again.",
            "rewards @ (one_hot − probs) / N, where one_hot is (N, V).",
        ),
        solution="""
def reinforce_gradient(logits, actions, rewards):
    probs = torch.softmax(logits, dim=-1)                                  # (V,)
    one_hot = torch.nn.functional.one_hot(actions, len(logits)).to(probs)  # (N, V)
    return rewards @ (one_hot - probs) / len(actions)
""",
        explanation="The mean of R(y) ∇log π(y) over samples from π. Its expectation is exactly ∇J; a "
        "single estimate can point almost anywhere.",
        cases=(
            Case(([0.0, 0.0], [0, 1], [1.0, 0.0]), [0.25, -0.25], "a fair coin, heads rewarded"),
            _reinforce_case("one sample", [1.0, 0.0, -1.0], [2], [2.0]),
            _reinforce_case("five samples, three tokens", [0.5, 0.0, 1.0], [0, 2, 2, 1, 0], [1.0, 0.0, 0.5, 2.0, 0.0]),
            _reinforce_case(
                "every reward is 1, yet the estimate is not 0",
                [0.2, 0.9, 0.0],
                [1, 1, 0, 1],
                [1.0, 1.0, 1.0, 1.0],
            ),
            _reinforce_case("a negative reward", [0.0, 1.0, 2.0], [0, 1, 2], [-1.0, 3.0, 0.5]),
        ),
        mistakes=(
            Mistake(
                """
def reinforce_gradient(logits, actions, rewards):
    p = logits.softmax(-1)
    return rewards @ (torch.eye(len(p)).to(p)[actions] - p)
""",
                "You add up the samples. The estimate of an expectation is their mean: divide by N.",
            ),
            Mistake(
                """
def reinforce_gradient(logits, actions, rewards):
    p = logits.softmax(-1)
    return -rewards @ (torch.eye(len(p)).to(p)[actions] - p) / len(actions)
""",
                "The sign is turned round: this is the gradient of the loss. Asked for is ∇J, the direction of ascent.",
            ),
            Mistake(
                """
def reinforce_gradient(logits, actions, rewards):
    p = logits.softmax(-1)
    return (rewards * p[actions]) @ (torch.eye(len(p)).to(p)[actions] - p) / len(actions)
""",
                "You weight each sample with π(a). Sampling has done that already: likely tokens appear more often.",
            ),
            Mistake(
                """
def reinforce_gradient(logits, actions, rewards):
    p = logits.softmax(-1)
    return rewards.mean() * (torch.eye(len(p)).to(p)[actions] - p).mean(0)
""",
                "You multiply the mean reward by the mean score. Each reward belongs to its own "
                "sample's score: multiply first, then average.",
            ),
            Mistake(
                """
def reinforce_gradient(logits, actions, rewards):
    p = logits.softmax(-1)
    return rewards @ (torch.eye(len(p)).to(p)[actions] - p) / rewards.sum()
""",
                "You divide by the sum of the rewards. The mean divides by the number of samples, "
                "those with reward 0 included.",
            ),
            Mistake(
                """
def reinforce_gradient(logits, actions, rewards):
    p = logits.softmax(-1)
    return (rewards - rewards.mean()) @ (torch.eye(len(p)).to(p)[actions] - p) / len(actions)
""",
                "You subtract the mean reward. That is a baseline and belongs to lesson 03; here the "
                "plain estimator is asked for.",
            ),
            Mistake(
                """
def reinforce_gradient(logits, actions, rewards):
    p = logits.softmax(-1)
    return rewards @ torch.eye(len(p)).to(p)[actions] / len(actions)
""",
                "The score is one-hot minus π; the −π from the normaliser is missing.",
            ),
            Mistake(
                """
def reinforce_gradient(logits, actions, rewards):
    p = logits.softmax(-1)
    return rewards @ (torch.eye(len(p)).to(p)[actions] - p) / len(p)
""",
                "You divide by V, the size of the vocabulary. The mean is over the N samples.",
            ),
            Mistake(
                """
def reinforce_gradient(logits, actions, rewards):
    p = logits.softmax(-1)
    return (torch.eye(len(p)).to(p)[actions] - p).mean(0)
""",
                "The rewards are not used. This is the mean score, whose expectation is 0 for every policy.",
            ),
            Mistake(
                """
def reinforce_gradient(logits, actions, rewards):
    p = logits.softmax(-1)
    return rewards @ (torch.eye(len(p)).to(p)[actions] - p) / (rewards != 0).sum()
""",
                "You divide by the number of rewarded samples. The mean is over all N, those with reward 0 included.",
            ),
        ),
        alternatives=(
            """
def reinforce_gradient(logits, actions, rewards):
    theta = logits.clone().requires_grad_()
    log_probs = torch.log_softmax(theta, -1)[actions]
    (rewards * log_probs).mean().backward()
    return theta.grad
""",
            """
def reinforce_gradient(logits, actions, rewards):
    weights = [math.exp(float(z)) for z in logits]
    probs = [w / sum(weights) for w in weights]
    gradient = [0.0] * len(probs)
    for action, reward in zip(actions, rewards):
        for v in range(len(probs)):
            gradient[v] += float(reward) * ((int(action) == v) - probs[v]) / len(actions)
    return gradient
""",
            """
def reinforce_gradient(logits, actions, rewards):
    logits, actions, rewards = map(np.asarray, (logits, actions, rewards))
    probs = np.exp(logits - logits.max())
    probs = probs / probs.sum()
    pushed = np.bincount(actions, weights=rewards, minlength=len(logits))
    return (pushed - rewards.sum() * probs) / len(actions)
""",
        ),
    ),
    Exercise(
        id="02.3",
        title="The surrogate loss",
        minutes=10,
        difficulty=3,
        kind="code",
        probe=value_and_gradient,
        returns=("loss", "gradient"),
        stub='''
def surrogate_loss(log_probs, rewards, mask):
    """The loss to minimise whose gradient is minus the REINFORCE estimate of ∇J.

    log_probs: tensor (B, T), log π(y_k | x, y_<k), requires grad
    rewards: tensor (B,), one reward a response
    mask: tensor (B, T) of 0 and 1, 1 on the tokens of the response, 0 on padding
    returns: scalar tensor, so that .backward() works
    """
    raise NotImplementedError
''',
        hints=(
            "REINFORCE is the mean over responses of reward times ∇log π(y), and log π(y) is the sum over its tokens.",
            "Optimisers minimise: put a minus sign in front.",
            "rewards[:, None] multiplies every token of a row by the row's reward.",
        ),
        solution="""
def surrogate_loss(log_probs, rewards, mask):
    sequence_log_probs = (log_probs * mask).sum(dim=-1)  # (B,)
    return -(rewards * sequence_log_probs).mean()
""",
        explanation="Its gradient is −mean R ∇log π(y), so a step of gradient descent ascends J. Its "
        "value is not J and means nothing: it depends on how likely the samples were, not on "
        "how good.",
        cases=(
            Case(([[-1.0, -2.0]], [1.0], [[1, 1]]), (3.0, [[-1.0, -1.0]]), "one response of two tokens"),
            _surrogate_case(
                "a short and a long response",
                [[-0.5, -9.0, -9.0], [-1.0, -0.25, -2.0]],
                [1.0, 2.0],
                [[1, 0, 0], [1, 1, 1]],
            ),
            _surrogate_case(
                "three rows of three",
                [[-0.1, -0.2, -0.3], [-1.0, -2.0, -3.0], [-0.7, -0.7, -5.0]],
                [1.0, 0.0, -0.5],
                [[1, 1, 1], [1, 1, 1], [1, 1, 0]],
            ),
            _surrogate_case("no reward, no gradient", [[-0.3, -0.4]], [0.0], [[1, 1]]),
        ),
        mistakes=(
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return (rewards * (log_probs * mask).sum(-1)).mean()
""",
                "The minus sign is missing: minimising this makes rewarded responses less likely.",
            ),
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return -(rewards * (log_probs * mask).sum(-1) / mask.sum(-1)).mean()
""",
                "You divide each response by its own length. Every token then weighs less in a longer "
                "response, and that is no longer the gradient of J.",
            ),
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return -(rewards[:, None] * log_probs * mask).sum() / mask.sum()
""",
                "You average over all tokens. REINFORCE sums over a response's tokens and averages over responses.",
            ),
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return -(rewards[:, None] * log_probs * mask).sum()
""",
                "You add up the responses. Divide by their number: the estimate is a mean.",
            ),
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return -(rewards * log_probs.sum(-1)).mean()
""",
                "The mask is not used: padding is pushed as if it were text.",
            ),
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return -(rewards * (log_probs * mask).sum(-1).exp()).mean()
""",
                "You use π(y) instead of log π(y). Its gradient is π ∇log π: it weights each sample "
                "with its probability once more.",
            ),
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return -(rewards[:, None] * log_probs * mask).mean()
""",
                "You average over B·T places, padding included, so the gradient shrinks when a batch is padded wider.",
            ),
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return -((rewards - rewards.mean()) * (log_probs * mask).sum(-1)).mean()
""",
                "You subtract the mean reward. Baselines come in lesson 03; here the rewards are used as they are.",
            ),
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return -(log_probs * mask).sum(-1).mean()
""",
                "The rewards are not used. This is supervised fine-tuning on the samples, right and wrong ones alike.",
            ),
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return -rewards.mean() * (log_probs * mask).sum(-1).mean()
""",
                "You multiply two means. Each reward belongs to its own response: multiply first, then average.",
            ),
            Mistake(
                """
def surrogate_loss(log_probs, rewards, mask):
    return -(rewards[:, None] * log_probs.exp() * mask).sum(-1).mean()
""",
                "You turn log π back into π. The sum is over the logs, and the log is what is differentiated.",
            ),
        ),
        alternatives=(
            """
def surrogate_loss(log_probs, rewards, mask):
    total = 0.0
    for row, reward, row_mask in zip(log_probs, rewards, mask):
        for log_prob, active in zip(row, row_mask):
            if active:
                total = total - reward * log_prob / len(rewards)
    return total + 0 * log_probs.sum()
""",
            """
def surrogate_loss(log_probs, rewards, mask):
    return -torch.einsum("b,bt,bt->", rewards, log_probs, mask.to(log_probs)) / len(rewards)
""",
            """
def surrogate_loss(log_probs, rewards, mask):
    weights = rewards[:, None] * mask / log_probs.shape[0]
    return (-log_probs * weights.detach()).sum()
""",
        ),
    ),
    Exercise(
        id="02.4",
        title="Reward-to-go",
        minutes=8,
        difficulty=2,
        kind="code",
        stub='''
def rewards_to_go(rewards, gamma):
    """Discounted sum of the rewards that come at step k or later, for every k.

    rewards: tensor (T,), the reward received after each step
    gamma: number in (0, 1], discount for each step of delay
    returns: tensor (T,), entry k is Σ_{l ≥ k} gamma^(l − k) · rewards[l]
    """
    raise NotImplementedError
''',
        hints=(
            "An action cannot change rewards that came before it. What is left for the last step? For the one before?",
            "Walk backwards: what is to come at k is rewards[k] plus gamma times what is to come at k + 1.",
        ),
        solution="""
def rewards_to_go(rewards, gamma):
    to_go = torch.zeros_like(rewards)
    running = 0.0
    for k in reversed(range(len(rewards))):
        running = rewards[k] + gamma * running
        to_go[k] = running
    return to_go
""",
        explanation="Rewards before step k have expectation 0 when multiplied with the score of step k, "
        "so leaving them out keeps the gradient's mean and usually lowers its variance. A language "
        "model that is scored once at the end has rewards [0, …, 0, R], and with gamma = 1 "
        "every token gets R.",
        cases=(
            Case(([0.0, 0.0, 1.0], 1.0), [1.0, 1.0, 1.0], "one reward at the end"),
            Case(([1.0, 2.0, 4.0], 0.5), [3.0, 4.0, 4.0], "gamma ½"),
            _to_go_case("five steps", [1.0, -1.0, 0.5, 0.0, 2.0], 0.9),
            _to_go_case("gamma 1", [3.0, 1.0, 4.0, 1.0, 5.0], 1.0),
            _to_go_case("one step", [0.7], 0.9),
        ),
        mistakes=(
            Mistake(
                """
def rewards_to_go(rewards, gamma):
    return rewards.cumsum(0)
""",
                "You add up the past: rewards up to step k. Asked for is what comes at k or later.",
            ),
            Mistake(
                """
def rewards_to_go(rewards, gamma):
    return rewards.flip(0).cumsum(0).flip(0)
""",
                "gamma is not used: each step of delay multiplies a reward by gamma.",
            ),
            Mistake(
                """
def rewards_to_go(rewards, gamma):
    total = (rewards * gamma ** torch.arange(len(rewards))).sum()
    return total + 0 * rewards
""",
                "Every step gets the return of the whole episode, rewards before the step included.",
            ),
            Mistake(
                """
def rewards_to_go(rewards, gamma):
    discounted = rewards * gamma ** torch.arange(len(rewards))
    return discounted.flip(0).cumsum(0).flip(0)
""",
                "You discount from the start of the episode, gamma^l. Seen from step k the delay is l − k.",
            ),
            Mistake(
                """
def rewards_to_go(rewards, gamma):
    out, running = torch.zeros_like(rewards), 0.0
    for k in reversed(range(len(rewards))):
        out[k] = running
        running = rewards[k] + gamma * running
    return out
""",
                "The step's own reward is left out. It comes after the action of step k, so it counts.",
            ),
            Mistake(
                """
def rewards_to_go(rewards, gamma):
    out, running = torch.zeros_like(rewards), 0.0
    for k in reversed(range(len(rewards))):
        running = gamma * (rewards[k] + running)
        out[k] = running
    return out
""",
                "The step's own reward is discounted too. Its delay is 0, so its factor is 1.",
            ),
            Mistake(
                """
def rewards_to_go(rewards, gamma):
    out, running = torch.zeros_like(rewards), 0.0
    for k in range(len(rewards)):
        running = rewards[k] + gamma * running
        out[k] = running
    return out
""",
                "You walk forwards, which discounts the past. Walk from the last step to the first.",
            ),
            Mistake(
                """
def rewards_to_go(rewards, gamma):
    return rewards.sum() + 0 * rewards
""",
                "Every step gets the sum of all rewards, undiscounted. Rewards before step k do not count, and "
                "later ones are discounted.",
            ),
            Mistake(
                """
def rewards_to_go(rewards, gamma):
    left = len(rewards) - 1 - torch.arange(len(rewards))
    return rewards.flip(0).cumsum(0).flip(0) * gamma ** left
""",
                "You discount the whole sum by the steps that are left. Each reward has a delay of its own, l − k.",
            ),
            Mistake(
                """
def rewards_to_go(rewards, gamma):
    out, running = [], 0.0
    for reward in rewards.flip(0):
        running = reward + gamma * running
        out.append(running)
    return torch.stack(out)
""",
                "Right values in reverse order: you walked backwards and did not turn the result round.",
            ),
        ),
        alternatives=(
            """
def rewards_to_go(rewards, gamma):
    steps = len(rewards)
    return [sum(gamma ** (l - k) * rewards[l] for l in range(k, steps)) for k in range(steps)]
""",
            """
def rewards_to_go(rewards, gamma):
    delay = torch.arange(len(rewards))[None, :] - torch.arange(len(rewards))[:, None]
    weights = torch.where(delay >= 0, gamma ** delay.clamp(min=0).to(rewards), 0.0)
    return weights @ rewards
""",
            """
def rewards_to_go(rewards, gamma):
    rewards = np.asarray(rewards, dtype=float)
    powers = gamma ** np.arange(len(rewards))
    return np.cumsum((rewards * powers)[::-1])[::-1] / powers
""",
        ),
    ),
    Exercise(
        id="02.5",
        title="The push on a token with reward 0",
        minutes=5,
        difficulty=3,
        kind="predict",
        tolerance=0.002,
        stub="""
# Four tokens, all logits 0. Two responses of one token were sampled: token 0 with reward 1 and token 1
# with reward 0. loss = −½ Σ_i r_i log π(y_i). What is the derivative of the loss with respect to the
# logit of token 1, the one that scored 0?
derivative = None
""",
        hints=(
            "The sample with reward 0 contributes nothing. But token 1's logit also appears in log π(token 0).",
            "∂ log π(0)/∂θ_1 = 0 − π(1). Multiply by the reward, by the ½ of the mean, and by the minus of the loss.",
        ),
        solution=0.125,
        explanation="−½ · 1 · (0 − ¼) = 0.125: descent lowers logit 1. It is not the reward of 0 that "
        "pushes it down, for that sample has weight 0: tokens 2 and 3, never sampled, are "
        "pushed just as hard. Raising one probability lowers all others.",
        mistakes=(
            Mistake(
                0.0,
                "The sample of token 1 has weight 0, but the rewarded sample moves logit 1 too: the "
                "softmax normalises.",
            ),
            Mistake(-0.125, "This is the derivative of the estimate of J. The loss is its negative."),
            Mistake(0.25, "The mean over two responses is missing: a factor ½."),
            Mistake(-0.375, "This is the derivative for logit 0, −½ (1 − ¼). Asked for is logit 1."),
            Mistake(0.693, "This is the value of the loss, ½ log 4. Asked for is a derivative."),
            Mistake(-0.25, "Two things: the ½ of the mean is missing, and the loss has a minus sign."),
        ),
    ),
)
