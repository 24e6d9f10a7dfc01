"""Exercises of lesson 07: agent trajectories."""

import math

from .exercise import Case, Exercise, Mistake


def _loss_case(label, logits, tokens, mask, advantage):
    loss = 0.0
    for t in range(1, len(tokens)):
        if mask[t]:
            row = logits[t - 1]
            loss -= advantage * (row[tokens[t]] - math.log(math.fsum(math.exp(z) for z in row)))
    return Case((logits, tokens, mask, advantage), loss, label)


EXERCISES = (
    Exercise(
        id="07.1",
        title="The mask of a transcript",
        minutes=8,
        difficulty=2,
        kind="code",
        stub='''
def transcript_mask(contexts, outputs):
    """Which tokens of an append-only agent's transcript the policy wrote.

    contexts: n tensors of token ids, c_1 to c_n; each is the one before + its output + the tool's answer
    outputs: n tensors of token ids, y_1 to y_n
    returns: tensor (T,) for the transcript c_n + y_n, 1 where the policy sampled the token, 0 elsewhere
    """
    raise NotImplementedError
''',
        hints=(
            "Every context is a prefix of the transcript. So where in the transcript does the output of call j begin?",
            "Output j begins in place len(c_j) and has len(y_j) tokens. The ids themselves are not needed.",
        ),
        solution="""
def transcript_mask(contexts, outputs):
    mask = torch.zeros(len(contexts[-1]) + len(outputs[-1]), dtype=torch.long)
    for context, output in zip(contexts, outputs):
        mask[len(context):len(context) + len(output)] = 1  # y_j stands right behind c_j
    return mask
""",
        explanation="Because every context is a prefix of the transcript, output j stands in the places from len(c_j) "
        "to len(c_j) + len(y_j). Only lengths matter. Whoever looks for token ids instead marks a tool that repeats "
        "the policy's words.",
        cases=(
            Case(([[1, 2], [1, 2, 3, 4, 8, 9]], [[3, 4], [5]]), [0, 0, 1, 1, 0, 0, 1], "two calls"),
            Case(
                ([[7, 1], [7, 1, 2, 5, 5], [7, 1, 2, 5, 5, 3, 4, 6]], [[2], [3, 4], [2, 2, 9]]),
                [0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1],
                "three calls",
            ),
            Case(([[1, 2, 3]], [[4, 5]]), [0, 0, 0, 1, 1], "one call"),
            Case(([[1], [1, 2, 2, 2]], [[2], [2]]), [0, 1, 0, 0, 1], "a tool that repeats the policy's words"),
            Case(([[1], [1, 2]], [[2], [3, 3]]), [0, 1, 1, 1], "a tool that says nothing"),
            Case(([[1, 2], [1, 2, 9]], [[], [3]]), [0, 0, 0, 1], "an empty output"),
        ),
        mistakes=(
            Mistake(
                """
def transcript_mask(contexts, outputs):
    mask = torch.zeros(len(contexts[-1]) + len(outputs[-1]))
    mask[len(contexts[0]):] = 1
    return mask
""",
                "Everything behind the prompt is 1, the tool's answers too. The policy did not sample those.",
            ),
            Mistake(
                """
def transcript_mask(contexts, outputs):
    mask = torch.zeros(len(contexts[-1]) + len(outputs[-1]))
    mask[len(contexts[-1]):] = 1
    return mask
""",
                "Only the last output is 1. The earlier calls were sampled too, and share in the reward.",
            ),
            Mistake(
                """
def transcript_mask(contexts, outputs):
    return torch.ones(len(contexts[-1]) + len(outputs[-1]))
""",
                "Everything is 1. The prompt and the tool's answers were given, not sampled.",
            ),
            Mistake(
                """
def transcript_mask(contexts, outputs):
    mask = torch.ones(len(contexts[-1]) + len(outputs[-1]))
    for c, y in zip(contexts, outputs):
        mask[len(c):len(c) + len(y)] = 0
    return mask
""",
                "The mask is turned round: 1 on what was given, 0 on what was sampled.",
            ),
            Mistake(
                """
def transcript_mask(contexts, outputs):
    mask = torch.zeros(len(contexts[-1]) + len(outputs[-1]))
    for c, y in zip(contexts, outputs):
        mask[len(c) - 1:len(c) + len(y) - 1] = 1
    return mask
""",
                "The mask is one place early. It marks the places whose logits predict the output; asked for are the "
                "places of the output itself.",
            ),
            Mistake(
                """
def transcript_mask(contexts, outputs):
    transcript = torch.cat([contexts[-1], outputs[-1]])
    return torch.isin(transcript, torch.cat([y for y in outputs])).long()
""",
                "You look the ids up. A token that the policy said once may also come from the tool or the prompt.",
            ),
            Mistake(
                """
def transcript_mask(contexts, outputs):
    mask = torch.zeros(len(contexts[-1]) + len(outputs[-1]))
    for j in range(len(contexts) - 1):
        mask[len(contexts[j]):len(contexts[j]) + len(outputs[j])] = 1
    return mask
""",
                "The last output is missing. It stands behind the last context.",
            ),
            Mistake(
                """
def transcript_mask(contexts, outputs):
    mask = torch.zeros(len(contexts[-1]) + len(outputs[-1]))
    for c, y in zip(contexts, outputs):
        mask[len(c) + 1:len(c) + len(y)] = 1
    return mask
""",
                "The first token of every output is left out. It was sampled like the others.",
            ),
            Mistake(
                """
def transcript_mask(contexts, outputs):
    mask = torch.zeros(len(contexts[-1]) + len(outputs[-1]))
    for c, y in zip(contexts, outputs):
        mask[len(c):len(c) + max(len(y) - 1, 0)] = 1
    return mask
""",
                "The last token of every output is left out. The token that ends a reply was sampled too: without it "
                "the policy never learns to stop.",
            ),
        ),
        alternatives=(
            """
def transcript_mask(contexts, outputs):
    mask = []
    for context, output in zip(contexts, outputs):
        mask += [0] * (len(context) - len(mask)) + [1] * len(output)
    return mask
""",
            """
def transcript_mask(contexts, outputs):
    place = np.arange(len(contexts[-1]) + len(outputs[-1]))
    inside = [(place >= len(c)) & (place < len(c) + len(y)) for c, y in zip(contexts, outputs)]
    return np.any(inside, axis=0)
""",
            """
def transcript_mask(contexts, outputs):
    edges = torch.zeros(len(contexts[-1]) + len(outputs[-1]) + 1)
    for c, y in zip(contexts, outputs):
        edges[len(c)] += 1
        edges[len(c) + len(y)] -= 1
    return edges.cumsum(0)[:-1]
""",
        ),
    ),
    Exercise(
        id="07.2",
        title="Find the bug: one place off",
        minutes=6,
        difficulty=2,
        kind="find-the-bug",
        stub='''
def transcript_loss(logits, tokens, mask, advantage):
    """−A Σ log π(token | tokens before it) over the tokens that the policy wrote. One line is wrong.

    logits: tensor (T, V), row t is computed from tokens 0 … t and predicts token t + 1
    tokens: tensor (T,), the transcript
    mask: tensor (T,), 1 where the policy wrote the token in this place
    advantage: number A, the trajectory's
    returns: one number
    """
    log_probs = torch.log_softmax(logits[:-1], dim=-1)
    chosen = log_probs.gather(1, tokens[1:, None])[:, 0]
    return -advantage * (chosen * mask[:-1]).sum()
''',
        hints=(
            "chosen has T − 1 entries. Which token of the transcript does its first entry belong to?",
            "Entry t of chosen belongs to token t + 1. Which part of the mask speaks of tokens 1 to T − 1?",
        ),
        solution="""
def transcript_loss(logits, tokens, mask, advantage):
    log_probs = torch.log_softmax(logits[:-1], dim=-1)
    chosen = log_probs.gather(1, tokens[1:, None])[:, 0]
    return -advantage * (chosen * mask[1:]).sum()
""",
        explanation="The mask belongs to the token, the logits to the place before it. mask[:-1] pairs token t + 1 "
        "with the mask of token t: it trains the first token of every tool answer and leaves out the first token "
        "of every output. Shapes fit, nothing fails, the policy learns to begin the tool's answer by itself.",
        cases=(
            _loss_case(
                "two calls and a tool's answer",
                [
                    [0.5, -1.0, 0.0],
                    [1.0, 0.0, 2.0],
                    [0.0, 0.3, -0.7],
                    [2.0, 1.0, 0.0],
                    [-1.0, 0.5, 0.2],
                    [0.0, 0.0, 1.0],
                ],
                [0, 2, 1, 0, 2, 1],
                [0, 1, 0, 0, 1, 1],
                1.0,
            ),
            _loss_case(
                "one call, worse than expected",
                [[1.0, 0.0], [0.2, -0.4], [2.0, 3.0], [0.0, 1.5]],
                [0, 1, 0, 0],
                [0, 0, 1, 1],
                -0.5,
            ),
            _loss_case(
                "a transcript that ends with a tool's answer",
                [[0.1, 0.2, 0.9], [1.0, -1.0, 0.0], [0.4, 0.0, -2.0], [0.0, 1.0, 1.0], [3.0, 0.0, 0.0]],
                [2, 0, 1, 2, 2],
                [0, 1, 1, 0, 0],
                2.0,
            ),
            Case(
                ([[0.0] * 4] * 5, [3, 0, 1, 2, 3], [0, 1, 0, 1, 1], 1.0),
                3 * math.log(4),
                "uniform over four tokens: each of three costs log 4",
            ),
            Case(([[1.0, 2.0], [0.5, 0.5]], [1, 0], [0, 0], 1.0), 0.0, "nothing that the policy wrote"),
        ),
        mistakes=(
            Mistake(
                """
def transcript_loss(logits, tokens, mask, advantage):
    chosen = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
    return -advantage * (chosen * mask).sum()
""",
                "Each token is scored with a row of logits that has already read it. The row before predicts it.",
            ),
            Mistake(
                """
def transcript_loss(logits, tokens, mask, advantage):
    return -advantage * torch.log_softmax(logits[:-1], dim=-1).gather(1, tokens[1:, None]).sum()
""",
                "Without the mask the prompt and the tool's answers are trained too.",
            ),
            Mistake(
                """
def transcript_loss(logits, tokens, mask, advantage):
    chosen = torch.log_softmax(logits[:-1], dim=-1).gather(1, tokens[1:, None])[:, 0]
    return -advantage * (chosen * (1 - mask[1:])).sum()
""",
                "The mask is turned round: what was given is trained, what was sampled is not.",
            ),
            Mistake(
                """
def transcript_loss(logits, tokens, mask, advantage):
    chosen = torch.log_softmax(logits[:-1], dim=-1).gather(1, tokens[1:, None])[:, 0]
    return -advantage * (chosen * mask[1:]).sum() / mask.sum().clamp(min=1)
""",
                "You divide by the number of tokens. The log-probability of a trajectory is a sum.",
            ),
            Mistake(
                """
def transcript_loss(logits, tokens, mask, advantage):
    chosen = torch.log_softmax(logits[:-1], dim=-1).gather(1, tokens[1:, None])[:, 0]
    return advantage * (chosen * mask[1:]).sum()
""",
                "The minus sign is gone. A loss is minimised, so a step down must make a good trajectory likelier.",
            ),
            Mistake(
                """
def transcript_loss(logits, tokens, mask, advantage):
    chosen = torch.log_softmax(logits[:-1], dim=-1).gather(1, tokens[1:, None])[:, 0]
    return -advantage * (chosen * mask[1:] * mask[:-1]).sum()
""",
                "With both shifts at once the first token of every output is left out.",
            ),
            Mistake(
                """
def transcript_loss(logits, tokens, mask, advantage):
    chosen = torch.softmax(logits[:-1], dim=-1).gather(1, tokens[1:, None])[:, 0]
    return -advantage * (chosen * mask[1:]).sum()
""",
                "You add up probabilities. The loss is made of their logarithms.",
            ),
        ),
        alternatives=(
            """
def transcript_loss(logits, tokens, mask, advantage):
    total = 0.0
    for t in range(1, len(tokens)):
        if mask[t]:
            total = total + torch.log_softmax(logits[t - 1], dim=-1)[tokens[t]]
    return -advantage * total
""",
            """
def transcript_loss(logits, tokens, mask, advantage):
    targets = torch.where(mask[1:] > 0, tokens[1:], -100)
    return advantage * torch.nn.functional.cross_entropy(logits[:-1], targets, ignore_index=-100, reduction="sum")
""",
            """
def transcript_loss(logits, tokens, mask, advantage):
    z, y = np.asarray(logits)[:-1], np.asarray(tokens)[1:]
    log_probs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    return -advantage * (log_probs[np.arange(len(y)), y] * np.asarray(mask)[1:]).sum()
""",
        ),
    ),
    Exercise(
        id="07.3",
        title="The ratio of a text encoded again",
        minutes=4,
        difficulty=2,
        kind="predict",
        tolerance=0.004,
        stub="""
# The policy answered "hello" with two tokens: "he" with probability 0.4, then "llo" with probability 0.5.
# The rollout was stored as text, with the log-probability it was sampled with. The trainer encodes the text,
# gets the single token "hello", and the policy gives that token probability 0.05. No update has been made
# yet. What ratio π_θ / π_old does the trainer find for this answer?
ratio = None
""",
        hints=(
            "π_old of the answer is what the sampler recorded for the two tokens that were drawn. Multiply them.",
            "π_θ is what the trainer computes for the tokens it was given: other tokens, of the same text.",
        ),
        solution=0.25,
        explanation="0.05 / (0.4 · 0.5) = 0.25. Before the first update every ratio must be 1: nothing has changed. A "
        "ratio that is not 1 says that the trainer scores other tokens, in another context or at another temperature, "
        "than the sampler drew. It is the cheapest test of all this bookkeeping.",
        mistakes=(
            Mistake(1.0, "So it would be if the trainer scored the tokens that were sampled."),
            Mistake(4.0, "Upside down: the trainer's probability stands above the sampler's."),
            Mistake(0.125, 'You divided by the probability of "he" alone. Two tokens were sampled.'),
            Mistake(0.1, 'You divided by the probability of "llo" alone; "he" was sampled before it.'),
            Mistake(0.2, "This is π_old, the probability of the two sampled tokens. Divide by it."),
            Mistake(0.05, "This is π_θ, the probability that the trainer finds. Divide it by the sampler's."),
            Mistake(0.01, "You multiplied the two probabilities of the answer. A ratio divides them."),
        ),
    ),
    Exercise(
        id="07.4",
        title="The broken prefix",
        minutes=10,
        difficulty=3,
        kind="code",
        returns=("call", "place"),
        stub='''
def first_break(contexts, outputs):
    """Find the first call that does not continue the one before: c_j must begin with c_(j−1) + y_(j−1).

    contexts: n tensors of token ids, the context of each call
    outputs: n tensors of token ids, the output of each call
    returns: (j, k), both counted from 0: the index of that call, and the first place where its context
        has another token than c_(j−1) + y_(j−1), or ends too soon; (-1, -1) if there is no such call
    """
    raise NotImplementedError
''',
        hints=(
            "For each call but the first: what must its context begin with? Go through it place by place.",
            "Two things break a prefix: another token in place k, or no token there because the context is too short.",
            "What comes behind c_(j−1) + y_(j−1) is the tool's answer. It may be anything, or nothing.",
        ),
        solution="""
def first_break(contexts, outputs):
    for j in range(1, len(contexts)):
        expected = [*contexts[j - 1], *outputs[j - 1]]
        for k, token in enumerate(expected):
            if k >= len(contexts[j]) or contexts[j][k] != token:
                return j, k
    return -1, -1
""",
        explanation="This comparison is all that decides whether calls may share a row. It needs ids, not texts: two "
        "texts can be equal where the ids are not. The output belongs to what must come back, its last token included; "
        "a chat template that drops the end-of-turn token breaks every prefix.",
        cases=(
            Case(([[1, 2], [1, 2, 3, 8], [1, 2, 3, 8, 4]], [[3], [4], [5]]), (-1, -1), "an append-only agent"),
            Case(([[0], [0, 3, 9]], [[1, 2], [4]]), (1, 1), '"he" + "llo" came back as "hello"'),
            Case(
                ([[1, 2, 3], [1, 2, 3, 4, 9], [1, 7, 3, 4, 9, 5]], [[4], [5], [6]]), (2, 1), "a prompt that was edited"
            ),
            Case(
                ([[1], [1, 2, 8], [1, 2, 7, 3, 9]], [[2], [3], [4]]), (2, 2), "a tool's answer that was rewritten later"
            ),
            Case(([[1, 2, 3], [1, 2]], [[4], [5]]), (1, 2), "a context that was cut short"),
            Case(([[1], [1, 2, 9]], [[2, 3], [4]]), (1, 2), "an output whose end token was dropped"),
            Case(([[1, 2], [1, 5], [2, 5, 6]], [[3], [6], [7]]), (1, 1), "two breaks"),
            Case(([[1], [1, 2]], [[2], [3]]), (-1, -1), "a tool that says nothing"),
            Case(([[4, 5]], [[6]]), (-1, -1), "one call"),
        ),
        mistakes=(
            Mistake(
                """
def first_break(contexts, outputs):
    for j in range(1, len(contexts)):
        for k, token in enumerate(contexts[j - 1]):
            if k >= len(contexts[j]) or contexts[j][k] != token:
                return j, k
    return -1, -1
""",
                "You compare with the context before, without its output. What the policy wrote must come back too.",
            ),
            Mistake(
                """
def first_break(contexts, outputs):
    for j in range(1, len(contexts)):
        for k, (a, b) in enumerate(zip([*contexts[j - 1], *outputs[j - 1]], contexts[j])):
            if a != b:
                return j, k
    return -1, -1
""",
                "A context that ends too soon passes, since zip stops at the shorter of the two.",
            ),
            Mistake(
                """
def first_break(contexts, outputs):
    for j in range(1, len(contexts)):
        for k, token in enumerate([*contexts[j - 1], *outputs[j - 1]]):
            if k >= len(contexts[j]) or contexts[j][k] != token:
                return j + 1, k
    return -1, -1
""",
                "The place is right, the call is one too high: calls are counted from 0.",
            ),
            Mistake(
                """
def first_break(contexts, outputs):
    for j in range(1, len(contexts)):
        for k, token in enumerate([*contexts[j - 1], *outputs[j - 1]]):
            if k >= len(contexts[j]) or contexts[j][k] != token:
                return j, k - len(contexts[j - 1])
    return -1, -1
""",
                "You count the place from the start of the output. Count it from the start of the context.",
            ),
            Mistake(
                """
def first_break(contexts, outputs):
    found = -1, -1
    for j in range(1, len(contexts)):
        for k, token in enumerate([*contexts[j - 1], *outputs[j - 1]]):
            if k >= len(contexts[j]) or contexts[j][k] != token:
                found = j, k
                break
    return found
""",
                "With several breaks you return the last one; asked for is the first.",
            ),
            Mistake(
                """
def first_break(contexts, outputs):
    for j in range(1, len(contexts)):
        old, new = [*contexts[j - 1], *outputs[j - 1]], contexts[j]
        for k in range(max(len(old), len(new))):
            if k >= len(old) or k >= len(new) or old[k] != new[k]:
                return j, k
    return -1, -1
""",
                "You ask for equality. A context may go on behind c_(j−1) + y_(j−1): that is the tool's answer.",
            ),
            Mistake(
                """
def first_break(contexts, outputs):
    for j in range(1, len(contexts)):
        for k, token in enumerate([*contexts[0], *outputs[0]]):
            if k >= len(contexts[j]) or contexts[j][k] != token:
                return j, k
    return -1, -1
""",
                "You compare every call with the first one. Each must continue the call right before it.",
            ),
        ),
        alternatives=(
            """
def first_break(contexts, outputs):
    for j in range(1, len(contexts)):
        old = torch.cat([torch.as_tensor(contexts[j - 1]), torch.as_tensor(outputs[j - 1])])
        new = torch.as_tensor(contexts[j])
        size = min(len(old), len(new))
        different = (old[:size] != new[:size]).nonzero().flatten()
        if len(different):
            return j, int(different[0])
        if len(new) < len(old):
            return j, len(new)
    return -1, -1
""",
            """
def first_break(contexts, outputs):
    for j in range(1, len(contexts)):
        old = [int(t) for t in contexts[j - 1]] + [int(t) for t in outputs[j - 1]]
        new = [int(t) for t in contexts[j]]
        place = next((k for k in range(len(old)) if old[k:k + 1] != new[k:k + 1]), None)
        if place is not None:
            return j, place
    return [-1, -1]
""",
            """
def first_break(contexts, outputs):
    transcript = []
    for j, (context, output) in enumerate(zip(contexts, outputs)):
        seen = tuple(int(t) for t in context)
        k = 0
        while k < len(transcript) and k < len(seen) and transcript[k] == seen[k]:
            k += 1
        if k < len(transcript):
            return j, k
        transcript = [*seen, *(int(t) for t in output)]
    return -1, -1
""",
        ),
    ),
)
