"""Exercises of lesson 01: policies and objectives."""

import math

from .exercise import Case, Exercise, Mistake


def _log_softmax(row, temperature=1.0):
    row = [z / temperature for z in row]
    top = max(row)
    log_total = top + math.log(math.fsum(math.exp(z - top) for z in row))
    return [z - log_total for z in row]


def _response_case(label, logits, tokens):
    expected = math.fsum(_log_softmax(row)[token] for row, token in zip(logits, tokens, strict=True))
    return Case((logits, tokens), expected, label)


def _temperature_case(label, logits, temperature):
    return Case((logits, temperature), [_log_softmax(row, temperature) for row in logits], label)


def _objective_case(label, first, second, rewards):
    p_first = [math.exp(v) for v in _log_softmax(first)]
    expected = math.fsum(
        p_first[a] * math.exp(_log_softmax(second[a])[b]) * rewards[a][b]
        for a in range(len(first))
        for b in range(len(first))
    )
    return Case((first, second, rewards), expected, label)


EXERCISES = (
    Exercise(
        id="01.1",
        title="Log-probability of a response",
        minutes=8,
        difficulty=2,
        kind="code",
        stub='''
def response_log_prob(logits, tokens):
    """log π(y|x) = Σ_k log π(y_k | x, y_<k) of one response.

    logits: tensor (T, V), row k scores every token that could stand at place k
    tokens: tensor (T,) of integers, the tokens that were sampled
    returns: one number
    """
    raise NotImplementedError
''',
        hints=(
            "A softmax over the vocabulary turns each row of logits into probabilities; the log of a product is a sum.",
            "torch.log_softmax(logits, dim=-1) stays finite where the log of a softmax is log 0.",
            "Pick entry tokens[k] from row k, for instance with gather(-1, tokens[:, None]), then sum over the rows.",
        ),
        solution="""
def response_log_prob(logits, tokens):
    log_probs = torch.log_softmax(logits, dim=-1)               # (T, V)
    chosen = log_probs.gather(-1, tokens[:, None]).squeeze(-1)  # (T,)
    return chosen.sum()
""",
        explanation="The probability of the whole response is the product of its tokens' conditional "
        "probabilities, so its log is the sum of theirs. Staying in logs matters: after a few "
        "hundred tokens the product itself underflows.",
        cases=(
            Case(([[0.0, 0.0], [0.0, 0.0]], [0, 1]), -2 * math.log(2), "two fair coin tosses: −2 log 2"),
            _response_case(
                "three tokens out of four",
                [[2.0, 0.0, 1.0, -1.0], [0.5, 0.5, 3.0, 0.0], [0.0, -2.0, 1.0, 1.5]],
                [0, 2, 1],
            ),
            _response_case("a response of one token", [[2.0, 0.0]], [0]),
            _response_case(
                "as many tokens as the vocabulary has",
                [[1.0, 0.0, 2.0], [0.0, 3.0, 1.0], [2.0, 2.0, 0.5]],
                [2, 0, 1],
            ),
            _response_case("unlikely tokens: the product of probabilities underflows", [[-80.0, 0.0]] * 12, [0] * 12),
            _response_case("logits of −1000 and 1000", [[-1000.0, 0.0], [1000.0, 0.0]], [0, 0]),
        ),
        mistakes=(
            Mistake(
                """
def response_log_prob(logits, tokens):
    return torch.log_softmax(logits, -1).gather(-1, tokens[:, None]).mean()
""",
                "You average over the tokens. The log-probability of a response is the sum: a longer "
                "response is less likely, and the mean hides that.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    return logits.gather(-1, tokens[:, None]).sum()
""",
                "You add up raw logits. A logit is not a log-probability until the row is normalised.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    return logits.softmax(-1).gather(-1, tokens[:, None]).sum()
""",
                "You add up probabilities. Probabilities multiply; it is their logs that add.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    return logits.softmax(-1).gather(-1, tokens[:, None]).prod()
""",
                "You return the probability of the response, not its log.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    return logits.softmax(-1).gather(-1, tokens[:, None]).prod().log()
""",
                "You multiply the probabilities and take the log at the end. Right on paper, but the "
                "product underflows to 0 and its log is −inf: take logs first and add.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    return logits.softmax(-1).log().gather(-1, tokens[:, None]).sum()
""",
                "You take the log of a softmax. Where a probability underflows to 0 this is −inf; "
                "log_softmax does both in one step and stays finite.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    weights = logits.exp()
    return (weights / weights.sum(-1, keepdim=True)).log().gather(-1, tokens[:, None]).sum()
""",
                "You exponentiate the raw logits: exp(1000) is inf and inf/inf is NaN. Subtract the "
                "row's maximum first, or use log_softmax.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    return torch.log_softmax(logits, 0).gather(-1, tokens[:, None]).sum()
""",
                "Your softmax runs over the places of the response. It must run over the vocabulary, "
                "the last dimension.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    return torch.log_softmax(logits, -1)[:-1].gather(-1, tokens[1:, None]).sum()
""",
                "You shift the tokens by one against the logits. Here row k already scores token k; "
                "the shift belongs to raw model outputs.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    return -torch.log_softmax(logits, -1).gather(-1, tokens[:, None]).sum()
""",
                "The sign is turned round: you return the cross-entropy loss, −log π(y|x). A "
                "log-probability is never positive.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    return torch.log_softmax(logits, -1)[:, tokens].sum()
""",
                "[:, tokens] takes every sampled token's column from every row, T² values. Only entry "
                "tokens[k] of row k belongs to the sum.",
            ),
            Mistake(
                """
def response_log_prob(logits, tokens):
    return torch.log_softmax(logits, -1)[:-1].gather(-1, tokens[:-1, None]).sum()
""",
                "You leave out the last token. The policy chose it too, and it is often the one that "
                "ends the response: it belongs to the sum.",
            ),
        ),
        alternatives=(
            """
def response_log_prob(logits, tokens):
    total = 0.0
    for row, token in zip(logits, tokens):
        row = [float(z) for z in row]
        top = max(row)
        total += row[int(token)] - top - math.log(sum(math.exp(z - top) for z in row))
    return total
""",
            """
def response_log_prob(logits, tokens):
    return -torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")
""",
            """
def response_log_prob(logits, tokens):
    logits, tokens = np.asarray(logits), np.asarray(tokens)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_probs[np.arange(len(tokens)), tokens].sum()
""",
            """
def response_log_prob(logits, tokens):
    return torch.distributions.Categorical(logits=logits).log_prob(tokens).sum()
""",
        ),
    ),
    Exercise(
        id="01.2",
        title="Temperature",
        minutes=6,
        difficulty=2,
        kind="code",
        stub='''
def temperature_log_probs(logits, temperature):
    """Log-probabilities of the distribution one samples from at a temperature.

    logits: tensor (T, V)
    temperature: number > 0
    returns: tensor (T, V), log-probabilities; exp of every row sums to 1
    """
    raise NotImplementedError
''',
        hints=(
            "The temperature changes the distribution before it is normalised.",
            "Divide the logits, then normalise each row with a log-softmax over the vocabulary.",
        ),
        solution="""
def temperature_log_probs(logits, temperature):
    return torch.log_softmax(logits / temperature, dim=-1)
""",
        explanation="Sampling at temperature τ draws from softmax(z/τ), so these are the "
        "log-probabilities of what was sampled. With logits [2, 0] and τ = 0.6 the first "
        "token has −0.0351; scoring it at τ = 1 gives −0.1269, and a ratio of the two is "
        "wrong before any training has happened.",
        cases=(
            Case(
                ([[2.0, 0.0]], 0.6),
                [[-math.log1p(math.exp(-2 / 0.6)), -2 / 0.6 - math.log1p(math.exp(-2 / 0.6))]],
                "logits [2, 0] at temperature 0.6",
            ),
            _temperature_case("temperature 1 changes nothing", [[1.0, 0.0, -1.0], [0.0, 2.0, 2.0]], 1.0),
            _temperature_case(
                "temperature 2, three rows of three",
                [[3.0, 1.0, 0.0], [0.0, 0.0, 4.0], [-1.0, 2.0, 1.0]],
                2.0,
            ),
            _temperature_case("equal logits stay uniform", [[0.7, 0.7, 0.7, 0.7]], 0.25),
            _temperature_case("large logits, low temperature", [[1000.0, 500.0], [-1000.0, -995.0]], 0.5),
        ),
        mistakes=(
            Mistake(
                """
def temperature_log_probs(logits, temperature):
    return torch.log_softmax(logits, -1)
""",
                "You ignore the temperature. With logits [2, 0] this gives −0.1269 where the sampler used −0.0351.",
            ),
            Mistake(
                """
def temperature_log_probs(logits, temperature):
    return torch.log_softmax(logits, -1) / temperature
""",
                "You divide the log-probabilities. The result is not normalised: exp of a row no "
                "longer sums to 1. Divide the logits, then normalise.",
            ),
            Mistake(
                """
def temperature_log_probs(logits, temperature):
    return torch.log_softmax(logits * temperature, -1)
""",
                "You multiply by the temperature. A low temperature must sharpen the distribution, so "
                "the logits are divided.",
            ),
            Mistake(
                """
def temperature_log_probs(logits, temperature):
    return torch.softmax(logits / temperature, -1)
""",
                "You return probabilities; asked for are their logs.",
            ),
            Mistake(
                """
def temperature_log_probs(logits, temperature):
    return torch.log_softmax(logits / temperature, 0)
""",
                "You normalise over the places of the response. Every row must be normalised over the vocabulary.",
            ),
            Mistake(
                """
def temperature_log_probs(logits, temperature):
    return logits / temperature
""",
                "You return scaled logits. They become log-probabilities only once each row is normalised.",
            ),
            Mistake(
                """
def temperature_log_probs(logits, temperature):
    return torch.log_softmax(torch.softmax(logits, -1) / temperature, -1)
""",
                "You apply a softmax before dividing, so the softmax is taken twice. Divide the raw logits.",
            ),
            Mistake(
                """
def temperature_log_probs(logits, temperature):
    return torch.softmax(logits / temperature, -1).log()
""",
                "The log of a softmax is −inf where a probability underflows to 0. log_softmax does "
                "both in one step and stays finite.",
            ),
        ),
        alternatives=(
            """
def temperature_log_probs(logits, temperature):
    scaled = logits / temperature
    return scaled - torch.logsumexp(scaled, dim=-1, keepdim=True)
""",
            """
def temperature_log_probs(logits, temperature):
    result = []
    for row in logits:
        row = [float(z) / temperature for z in row]
        top = max(row)
        log_total = top + math.log(sum(math.exp(z - top) for z in row))
        result.append([z - log_total for z in row])
    return result
""",
            """
def temperature_log_probs(logits, temperature):
    scaled = np.asarray(logits) / temperature
    scaled = scaled - scaled.max(-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
""",
        ),
    ),
    Exercise(
        id="01.3",
        title="Exact J by enumeration",
        minutes=12,
        difficulty=3,
        kind="code",
        stub='''
def exact_objective(first_logits, second_logits, rewards):
    """J = Σ_y π(y) R(y) over all responses y = (a, b) of two tokens.

    first_logits: tensor (V,), scores of the first token a
    second_logits: tensor (V, V), row a scores the second token b after first token a
    rewards: tensor (V, V), rewards[a, b] = R((a, b))
    returns: one number
    """
    raise NotImplementedError
''',
        hints=(
            "The probability of a response is π(a) · π(b|a). There are V² of them, few enough to visit all.",
            "π(b|a) is a softmax over row a of second_logits: each row sums to 1.",
            "As tensors: first (V, 1) times second (V, V) is the table of all π(y); multiply by rewards and sum.",
        ),
        solution="""
def exact_objective(first_logits, second_logits, rewards):
    first = torch.softmax(first_logits, dim=-1)    # (V,)    π(a)
    second = torch.softmax(second_logits, dim=-1)  # (V, V)  π(b|a) in row a
    return (first[:, None] * second * rewards).sum()
""",
        explanation="Each reward is weighted with the probability of its response, π(a) π(b|a). For a "
        "real model the sum has V^T terms; that is why the rest of the course samples.",
        cases=(
            Case(
                ([0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]]),
                0.25,
                "uniform, one response of four right",
            ),
            Case(
                ([0.0, math.log(3)], [[0.0, 0.0], [math.log(4), 0.0]], [[1.0, 0.0], [0.0, 10.0]]),
                0.125 + 0.15 * 10,
                "¼·½·1 + ¾·⅕·10",
            ),
            _objective_case(
                "three tokens",
                [1.0, 0.0, -0.5],
                [[0.0, 1.0, 2.0], [1.5, 0.0, 0.5], [0.0, 0.0, -1.0]],
                [[1.0, 0.0, 0.5], [0.0, 2.0, 0.0], [-1.0, 0.0, 3.0]],
            ),
            _objective_case(
                "every response scores 1, so J is 1",
                [0.3, -0.2, 0.9],
                [[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [0.5, 0.5, 0.0]],
                [[1.0] * 3] * 3,
            ),
            _objective_case(
                "a nearly deterministic policy",
                [40.0, 0.0],
                [[0.0, 40.0], [40.0, 0.0]],
                [[5.0, 7.0], [1.0, 2.0]],
            ),
        ),
        mistakes=(
            Mistake(
                """
def exact_objective(first_logits, second_logits, rewards):
    return rewards.mean()
""",
                "You average all responses with the same weight. Likely responses must count more: "
                "weight each with π(y).",
            ),
            Mistake(
                """
def exact_objective(first_logits, second_logits, rewards):
    return (first_logits.softmax(-1)[:, None] * second_logits.softmax(0) * rewards).sum()
""",
                "Your second softmax normalises columns. Row a is the distribution of b after a, so "
                "rows must sum to 1.",
            ),
            Mistake(
                """
def exact_objective(first_logits, second_logits, rewards):
    return (first_logits.softmax(-1)[None, :] * second_logits.softmax(-1) * rewards).sum()
""",
                "You multiply row a of the table by π(b) instead of π(a): the first token's "
                "probabilities run along the wrong axis.",
            ),
            Mistake(
                """
def exact_objective(first_logits, second_logits, rewards):
    return (second_logits.softmax(-1) * rewards).sum()
""",
                "The probability of the first token is missing: you sum π(b|a) R where π(a) π(b|a) R is needed.",
            ),
            Mistake(
                """
def exact_objective(first_logits, second_logits, rewards):
    first = first_logits.softmax(-1)
    second = first @ second_logits.softmax(-1)
    return first @ rewards @ second
""",
                "You treat the two tokens as independent, using the average distribution of b. After "
                "each a it is a different one.",
            ),
            Mistake(
                """
def exact_objective(first_logits, second_logits, rewards):
    a = first_logits.argmax()
    return rewards[a, second_logits[a].argmax()]
""",
                "You return the reward of the most likely response. J is the mean over all responses, "
                "not the greedy one's.",
            ),
            Mistake(
                """
def exact_objective(first_logits, second_logits, rewards):
    log_probs = first_logits.log_softmax(-1)[:, None] + second_logits.log_softmax(-1)
    return (log_probs * rewards).sum()
""",
                "You weight with log-probabilities. The weights of an expectation are the probabilities themselves.",
            ),
            Mistake(
                """
def exact_objective(first_logits, second_logits, rewards):
    table = first_logits[:, None] + second_logits
    return (table.flatten().softmax(0) * rewards.flatten()).sum()
""",
                "You add the logits and take one softmax over all responses. Each step is normalised "
                "by itself, over its own vocabulary.",
            ),
            Mistake(
                """
def exact_objective(first_logits, second_logits, rewards):
    return (first_logits.softmax(-1)[:, None] * second_logits.softmax(-1) * rewards).mean()
""",
                "You divide by the number of responses. The probabilities sum to 1 already: weighted with "
                "them, the sum is the mean.",
            ),
            Mistake(
                """
def exact_objective(first_logits, second_logits, rewards):
    return ((first_logits.softmax(-1)[:, None] + second_logits.softmax(-1)) * rewards).sum()
""",
                "You add π(a) and π(b|a). Probabilities multiply; it is their logs that add.",
            ),
        ),
        alternatives=(
            """
def exact_objective(first_logits, second_logits, rewards):
    total = 0.0
    first = torch.softmax(first_logits, 0)
    for a in range(len(first)):
        second = torch.softmax(second_logits[a], 0)
        for b in range(len(second)):
            total += first[a] * second[b] * rewards[a, b]
    return total
""",
            """
def exact_objective(first_logits, second_logits, rewards):
    first = torch.log_softmax(first_logits, -1)
    second = torch.log_softmax(second_logits, -1)
    return torch.einsum("a,ab,ab->", first.exp(), second.exp(), rewards)
""",
            """
def exact_objective(first_logits, second_logits, rewards):
    def softmax(z):
        e = np.exp(z - z.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)
    value_of_first = (softmax(np.asarray(second_logits)) * np.asarray(rewards)).sum(axis=1)
    return float(softmax(np.asarray(first_logits)) @ value_of_first)
""",
        ),
    ),
    Exercise(
        id="01.4",
        title="Monte Carlo error of J",
        minutes=4,
        difficulty=2,
        kind="predict",
        tolerance=0.0005,
        stub="""
# A policy answers 20 % of the questions correctly (reward 1, otherwise 0). You estimate J as the mean
# reward of 100 independent responses. What is the standard error of this estimate?
standard_error = None
""",
        hints=(
            "A reward that is 1 with probability p and 0 otherwise has variance p(1 − p).",
            "The mean of N independent rewards has variance p(1 − p)/N; the standard error is its square root.",
        ),
        solution=0.04,
        explanation="√(0.2 · 0.8 / 100) = 0.04: a fifth of J itself. Halving it takes four times as many responses.",
        mistakes=(
            Mistake(0.4, "This is the standard deviation of one reward, √(p(1 − p)). The mean of 100 varies less."),
            Mistake(0.0016, "This is the variance of the mean, p(1 − p)/N. The standard error is its square root."),
            Mistake(0.004, "You divide the standard deviation by N. The error of a mean shrinks with √N only."),
            Mistake(0.16, "This is the variance of one reward, p(1 − p): divide by N, then take the root."),
            Mistake(0.05, "You used p = ½, the worst case. Here p = 0.2 is known."),
            Mistake(0.0784, "This is half the width of a 95 % interval, 1.96 standard errors. Asked for is one."),
            Mistake(0.0447, "You used √(p/N). The variance of a 0/1 reward is p(1 − p), not p."),
            Mistake(0.08, "This is two standard errors, about half the width of a 95 % interval. Asked for is one."),
            Mistake(0.02, "You divide the mean by √N. Divide the standard deviation of one reward, √(p(1 − p))."),
            Mistake(4.0, "This is in percentage points. Rewards and J run from 0 to 1: give the error on that scale."),
        ),
    ),
    Exercise(
        id="01.5",
        title="Why sampling blocks back-propagation",
        minutes=3,
        difficulty=1,
        kind="choose",
        stub="""
# tokens = sample(softmax(logits)); reward = R(tokens); J_hat = reward.mean() over 1000 draws.
# What does autograd say about the gradient of J_hat with respect to the logits?
#   A  it equals the gradient of J up to sampling noise
#   B  nothing: no path leads from J_hat back to the logits
#   C  it would be right if R were a differentiable reward model
#   D  it is the gradient of log J
#   E  it is right if the most likely token is taken instead of a sampled one
choice = None
""",
        hints=(
            "Follow the graph backwards from J_hat. Which operation in it returns integers?",
            "Moving a logit a little leaves the drawn tokens, hence their rewards, exactly as they were.",
        ),
        solution="B",
        explanation="The draw returns integers, and nothing can be differentiated through them. Moving "
        "the logits changes how often each token is drawn, and that is what J feels; the "
        "draws at hand do not know it. Lesson 02 puts this knowledge back.",
        mistakes=(
            Mistake(
                "A",
                "The value of J_hat is J up to noise; its gradient is not, for the graph ends at the drawn integers.",
            ),
            Mistake("C", "However smooth R is, its input is a drawn integer, and that is where the graph ends."),
            Mistake("D", "No gradient reaches the logits at all, of neither J nor log J."),
            Mistake(
                "E",
                "argmax returns an integer too, and it is constant almost everywhere: its gradient is 0 or undefined.",
            ),
        ),
    ),
)
