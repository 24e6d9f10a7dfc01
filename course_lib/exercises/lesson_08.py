"""Exercises of lesson 08: stepwise GRPO."""

import math
from collections.abc import Callable

from .exercise import Case, Exercise, Mistake, value_and_gradient


def _call_with_lists(function: Callable, contexts: tuple, outputs: tuple):
    """Token ids as lists of lists, whether the rows happen to be of equal length or not."""
    return function(*([list(row) for row in rows] for rows in (contexts, outputs)))


def _advantage_case(label, rewards, group_ids, owners):
    def advantage(i):
        others = [r for k, r in enumerate(rewards) if group_ids[k] == group_ids[i] and k != i]
        return rewards[i] - math.fsum(others) / len(others) if others else 0.0

    return Case((rewards, group_ids, owners), [advantage(i) for i in owners], label)


def _weights_case(label, mask, owners):
    tokens = {}
    for row, owner in zip(mask, owners, strict=True):
        tokens[owner] = tokens.get(owner, 0) + sum(row)
    count = sum(1 for n in tokens.values() if n)
    expected = [[m / (tokens[o] * count) if m else 0.0 for m in row] for row, o in zip(mask, owners, strict=True)]
    return Case((mask, owners), expected, label)


def _loss_case(label, log_probs, mask, rewards, owners):
    mean = math.fsum(rewards) / len(rewards)
    slope = [[-(rewards[o] - mean) * m / len(rewards) for m in row] for row, o in zip(mask, owners, strict=True)]
    value = math.fsum(
        s * p for slopes, row in zip(slope, log_probs, strict=True) for s, p in zip(slopes, row, strict=True)
    )
    return Case((log_probs, mask, rewards, owners), (value, slope), label)


def _efficiency_case(label, costs, successes):
    solved = [c for c, s in zip(costs, successes, strict=True) if s]
    mean = math.fsum(solved) / len(solved) if len(solved) > 1 else 0.0
    expected = [
        max(-1.0, min(1.0, (mean - c) / mean)) if s and mean > 0 else 0.0 for c, s in zip(costs, successes, strict=True)
    ]
    return Case((costs, successes), expected, label)


EXERCISES = (
    Exercise(
        id="08.1",
        title="Split a trajectory into segments",
        minutes=15,
        difficulty=3,
        kind="code",
        probe=_call_with_lists,
        returns=("tokens", "mask", "segment_ids"),
        stub='''
def split(contexts, outputs):
    """The calls of one trajectory as segments: every sampled token once, in the context it was sampled in.

    contexts: list of J lists of token ids, c_j
    outputs: list of J lists of token ids, y_j
    If a context begins with all tokens of the latest segment, its call goes on with that segment: the rest
    of the context is added, then the output. Any other call starts a new segment: context, then output.
    returns: tokens, mask, segment_ids, three lists of equal length with all segments one behind the other;
        mask is 1 where the policy produced the token, segment_ids counts the segments from 0
    """
    raise NotImplementedError
''',
        hints=(
            "Keep the tokens of the latest segment in a list of its own. It starts out empty, so every context "
            "begins with it; is the first call a special case then?",
            "context[: len(latest)] == latest says whether the context begins with the segment. What is new in it is "
            "context[len(latest) :].",
            "If it does not, set latest = [] and raise the number of the segment by one. From there on both cases are "
            "the same: the new part of the context with mask 0, the output with mask 1.",
        ),
        solution="""
def split(contexts, outputs):
    tokens, mask, segment_ids, latest, segment = [], [], [], [], 0
    for context, output in zip(contexts, outputs):
        if context[: len(latest)] != latest:
            latest, segment = [], segment + 1
        new = context[len(latest) :]
        latest = latest + new + output
        tokens += new + output
        mask += [0] * len(new) + [1] * len(output)
        segment_ids += [segment] * (len(new) + len(output))
    return tokens, mask, segment_ids
""",
        explanation="The comparison is of tokens, so that a context in which a single token was rewritten starts a "
        "new segment. An append-only agent gives one segment, an agent that clears its context one for each call.",
        cases=(
            Case((((5, 6),), ((7, 8),)), ([5, 6, 7, 8], [0, 0, 1, 1], [0, 0, 0, 0]), "one call"),
            Case(
                (((1, 2), (1, 2, 3, 9), (1, 2, 3, 9, 4, 8)), ((3,), (4,), (5, 6))),
                ([1, 2, 3, 9, 4, 8, 5, 6], [0, 0, 1, 0, 1, 0, 1, 1], [0] * 8),
                "an append-only agent",
            ),
            Case(
                (((1,), (1, 2, 9), (1, 3)), ((2,), (3,), (4,))),
                ([1, 2, 9, 3, 1, 3, 4], [0, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1, 1]),
                "the third call sees the question and its note only",
            ),
            Case(
                (((1, 2, 3), (1, 2, 3, 4, 6)), ((4, 5), (7,))),
                ([1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 7], [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1], [0] * 5 + [1] * 6),
                "one token of the output was rewritten",
            ),
            Case(
                (((1, 2), (1, 2, 3)), ((3,), (4,))),
                ([1, 2, 3, 4], [0, 0, 1, 1], [0, 0, 0, 0]),
                "the environment added nothing",
            ),
            Case(
                (((1, 2, 3), (1, 2)), ((4,), (5,))),
                ([1, 2, 3, 4, 1, 2, 5], [0, 0, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1, 1]),
                "the context got shorter",
            ),
            Case(
                (((1,), (1, 8), (1, 2, 9)), ((2,), (4,), (3,))),
                ([1, 2, 1, 8, 4, 1, 2, 9, 3], [0, 1, 0, 0, 1, 0, 0, 0, 1], [0, 0, 1, 1, 1, 2, 2, 2, 2]),
                "the third call goes on with the first, but the second stands between",
            ),
            Case(
                (((1,), (1, 2), (1, 2, 3, 7)), ((2,), (3,), (4,))),
                ([1, 2, 3, 7, 4], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0]),
                "two of three calls follow at once",
            ),
        ),
        mistakes=(
            Mistake(
                """
def split(contexts, outputs):
    tokens, mask, ids = [], [], []
    for j, (c, y) in enumerate(zip(contexts, outputs)):
        tokens += c + y
        mask += [0] * len(c) + [1] * len(y)
        ids += [j] * (len(c) + len(y))
    return tokens, mask, ids
""",
                "You start a new segment for every call. That trains the right gradient, but runs the beginning of an "
                "append-only transcript once for each call: go on with the segment where the context allows it.",
            ),
            Mistake(
                """
def split(contexts, outputs):
    tokens, mask, ids, latest, segment, before = [], [], [], [], 0, []
    for c, y in zip(contexts, outputs):
        if c[:len(before)] != before:
            latest, segment = [], segment + 1
        new = c[len(latest):]
        latest, before = latest + new + y, c
        tokens += new + y
        mask += [0] * len(new) + [1] * len(y)
        ids += [segment] * (len(new) + len(y))
    return tokens, mask, ids
""",
                "You ask whether the context begins with the previous *context*. It must begin with the previous "
                "output as well: if what the policy wrote was changed afterwards, the segment holds another text "
                "than this call saw.",
            ),
            Mistake(
                """
def split(contexts, outputs):
    tokens, mask, ids, latest, segment = [], [], [], [], 0
    for c, y in zip(contexts, outputs):
        if len(c) < len(latest):
            latest, segment = [], segment + 1
        new = c[len(latest):]
        latest = latest + new + y
        tokens += new + y
        mask += [0] * len(new) + [1] * len(y)
        ids += [segment] * (len(new) + len(y))
    return tokens, mask, ids
""",
                "You compare lengths, not tokens. A context that is longer than the segment may still have been "
                "rewritten anywhere in it.",
            ),
            Mistake(
                """
def split(contexts, outputs):
    tokens, mask, ids, latest, segment = [], [], [], [], 0
    for c, y in zip(contexts, outputs):
        if c[:len(latest)] != latest:
            latest, segment = [], segment + 1
        tokens += c + y
        mask += [0] * len(c) + [1] * len(y)
        ids += [segment] * (len(c) + len(y))
        latest = c + y
    return tokens, mask, ids
""",
                "When a call goes on with a segment you add its whole context again. The segment holds the beginning "
                "already; only the rest of the context is new.",
            ),
            Mistake(
                """
def split(contexts, outputs):
    tokens, mask, ids, latest, segment = [], [], [], [], 0
    for c, y in zip(contexts, outputs):
        if c[:len(latest)] != latest:
            latest, segment = [], segment + 1
        new = c[len(latest):]
        started = len(latest) > 0
        latest = latest + new + y
        tokens += new + y
        mask += [int(started)] * len(new) + [1] * len(y)
        ids += [segment] * (len(new) + len(y))
    return tokens, mask, ids
""",
                "Where a segment goes on, what the environment added gets mask 1. The policy did not produce these "
                "tokens (lesson 07).",
            ),
            Mistake(
                """
def split(contexts, outputs):
    c, y = contexts[-1], outputs[-1]
    written = set()
    for row in outputs:
        written |= set(row)
    tokens = c + y
    return tokens, [int(t in written) for t in c] + [1] * len(y), [0] * len(tokens)
""",
                "You keep the final transcript and mark in it what looks like an output. What an earlier call saw may "
                "be gone by then: keep every call.",
            ),
            Mistake(
                """
def split(contexts, outputs):
    rows = []
    for c, y in zip(contexts, outputs):
        for row in rows:
            if c[:len(row[0])] == row[0]:
                break
        else:
            row = ([], [])
            rows.append(row)
        new = c[len(row[0]):]
        row[0].extend(new + y)
        row[1].extend([0] * len(new) + [1] * len(y))
    return (sum((r[0] for r in rows), []), sum((r[1] for r in rows), []),
            sum(([i] * len(r[0]) for i, r in enumerate(rows)), []))
""",
                "You look for *any* earlier segment that the context begins with. The gradient would be right, but the "
                "task asks for the latest one only, so that segments keep the order of the calls.",
            ),
            Mistake(
                """
def split(contexts, outputs):
    tokens, mask, ids, latest, segment = [], [], [], [], 0
    for c, y in zip(contexts, outputs):
        k = 0
        while k < min(len(c), len(latest)) and c[k] == latest[k]:
            k += 1
        if k < len(latest):
            segment += 1
        new = c[k:]
        latest = c + y
        tokens += new + y
        mask += [0] * len(new) + [1] * len(y)
        ids += [segment] * (len(new) + len(y))
    return tokens, mask, ids
""",
                "A new segment leaves out the tokens it shares with the one before. Each segment is a row of its own "
                "and has to begin with its whole context, or its tokens are scored behind something they never saw.",
            ),
        ),
        alternatives=(
            """
def split(contexts, outputs):
    rows = []
    for context, output in zip(contexts, outputs):
        if not rows or context[:len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        tokens, mask = rows[-1]
        seen = len(context) - len(tokens)
        tokens += context[len(tokens):] + output
        mask += [0] * seen + [1] * len(output)
    ids = [i for i, (tokens, _) in enumerate(rows) for _ in tokens]
    return [t for tokens, _ in rows for t in tokens], [m for _, mask in rows for m in mask], ids
""",
            """
def split(contexts, outputs):
    tokens, mask, ids, start, segment = [], [], [], 0, 0
    for c, y in zip(contexts, outputs):
        have = len(tokens) - start
        if have > len(c) or any(tokens[start + k] != c[k] for k in range(have)):
            start, have, segment = len(tokens), 0, segment + 1
        for t in c[have:]:
            tokens.append(t); mask.append(0); ids.append(segment)
        for t in y:
            tokens.append(t); mask.append(1); ids.append(segment)
    return np.array(tokens), np.array(mask), np.array(ids)
""",
            """
def split(contexts, outputs):
    whole = [tuple(c) + tuple(y) for c, y in zip(contexts, outputs)]
    new_row = [j == 0 or tuple(contexts[j][:len(whole[j - 1])]) != whole[j - 1] for j in range(len(whole))]
    parts = []
    for j, (c, y) in enumerate(zip(contexts, outputs)):
        seen = list(c) if new_row[j] else list(c[len(whole[j - 1]):])
        segment = sum(new_row[:j + 1]) - 1
        parts += [(t, 0, segment) for t in seen] + [(t, 1, segment) for t in y]
    return tuple(torch.tensor(column) for column in zip(*parts))
""",
        ),
    ),
    Exercise(
        id="08.2",
        title="The advantage of a segment",
        minutes=12,
        difficulty=3,
        kind="code",
        stub='''
def segment_advantages(rewards, group_ids, owners):
    """The advantage of each segment: that of its trajectory, leave-one-out over the trajectories of a group.

    rewards: tensor (N,), one a trajectory
    group_ids: tensor (N,) of integers, the group of each trajectory
    owners: tensor (B,) of integers: segment b is a part of trajectory owners[b]; in any order
    returns: tensor (B,); 0 for the segments of a trajectory that is alone in its group
    """
    raise NotImplementedError
''',
        hints=(
            "Two steps: first one advantage for each of the N trajectories, without looking at `owners`; then hand it "
            "to the segments.",
            "The baseline of trajectory i is (sum of its group's rewards − r_i) / (size of the group − 1). Indexing "
            "with owners turns (N,) into (B,).",
        ),
        solution="""
def segment_advantages(rewards, group_ids, owners):
    same = (group_ids[:, None] == group_ids).to(rewards)      # (N, N): who is in whose group
    others = same.sum(dim=1) - 1
    baseline = (same @ rewards - rewards) / others.clamp(min=1)
    advantages = torch.where(others > 0, rewards - baseline, 0.0)
    return advantages[owners]
""",
        explanation="How many segments a trajectory has plays no part: `owners` is used in the last line only. All "
        "segments of a trajectory carry the same number, because the reward judges all of it.",
        cases=(
            Case(
                ([1.0, 0.0], [0, 0], [0, 0, 0, 1]),
                [1.0, 1.0, 1.0, -1.0],
                "a success of three segments, a failure of one",
            ),
            Case(([1.0, 0.0, 0.0], [3, 3, 3], [0, 1, 2]), [1.0, -0.5, -0.5], "one segment each"),
            _advantage_case(
                "two groups, shuffled",
                [1.0, 0.0, 0.5, 0.0, 1.0],
                [1, 0, 1, 1, 0],
                [2, 0, 4, 4, 1, 3, 2, 0, 0, 4],
            ),
            _advantage_case("a trajectory alone in its group", [1.0, 1.0, 0.0], [5, 2, 2], [0, 0, 1, 2, 2]),
            _advantage_case("all succeed", [1.0, 1.0, 1.0], [0, 0, 0], [0, 1, 1, 2]),
            _advantage_case("rewards between 0 and 1", [0.2, 0.9, 0.4, 0.4], [0, 0, 0, 0], [3, 3, 3, 3, 3, 0, 1, 2]),
        ),
        mistakes=(
            Mistake(
                """
def segment_advantages(rewards, group_ids, owners):
    r, g = rewards[owners], group_ids[owners]
    same = (g[:, None] == g).to(rewards)
    others = same.sum(1) - 1
    a = r - (same @ r - r) / others.clamp(min=1)
    return torch.where(others > 0, a, 0.0)
""",
                "Your baseline is a mean over segments: a trajectory counts once for each of its calls, and a segment "
                "even has its own trajectory among the others. Form the baseline before you hand it to the segments.",
            ),
            Mistake(
                """
def segment_advantages(rewards, group_ids, owners):
    r, g = rewards[owners], group_ids[owners]
    others = ((g[:, None] == g) & (owners[:, None] != owners)).to(rewards)
    count = others.sum(1)
    return torch.where(count > 0, r - others @ r / count.clamp(min=1), 0.0)
""",
                "You leave the trajectory itself out, but take the mean over the *segments* of the others: a long one "
                "counts more than a short one. Each of the other trajectories counts once.",
            ),
            Mistake(
                """
def segment_advantages(rewards, group_ids, owners):
    r, g = rewards[owners], group_ids[owners]
    same = (g[:, None] == g).to(rewards)
    return r - same @ r / same.sum(1)
""",
                "You subtract the mean over all *segments* of the group. A long trajectory then counts more than a "
                "short one; the baseline is over trajectories.",
            ),
            Mistake(
                """
def segment_advantages(rewards, group_ids, owners):
    same = (group_ids[:, None] == group_ids).to(rewards)
    return (rewards - same @ rewards / same.sum(1))[owners]
""",
                "You subtract the mean of the whole group. Leave-one-out takes the mean of the other trajectories.",
            ),
            Mistake(
                """
def segment_advantages(rewards, group_ids, owners):
    n = len(rewards)
    return (rewards - (rewards.sum() - rewards) / (n - 1))[owners]
""",
                "You compare with the other trajectories of the whole batch. Compare within the group: the same "
                "question.",
            ),
            Mistake(
                """
def segment_advantages(rewards, group_ids, owners):
    same = (group_ids[:, None] == group_ids).to(rewards)
    others = same.sum(1) - 1
    a = torch.where(others > 0, rewards - (same @ rewards - rewards) / others.clamp(min=1), 0.0)
    count = torch.bincount(owners, minlength=len(rewards))
    return (a / count)[owners]
""",
                "You share the advantage out among the segments of a trajectory. Each segment gets all of it: the "
                "score of the trajectory is the *sum* over its calls.",
            ),
            Mistake(
                """
def segment_advantages(rewards, group_ids, owners):
    same = (group_ids[:, None] == group_ids).to(rewards)
    others = same.sum(1) - 1
    a = torch.where(others > 0, rewards - (same @ rewards - rewards) / others.clamp(min=1), 0.0)
    return a.repeat_interleave(torch.bincount(owners, minlength=len(rewards)))
""",
                "You assume that segments stand in the order of their trajectories. They may be shuffled: index with "
                "owners.",
            ),
            Mistake(
                """
def segment_advantages(rewards, group_ids, owners):
    same = (group_ids[:, None] == group_ids).to(rewards)
    others = same.sum(1) - 1
    return (rewards - (same @ rewards - rewards) / others.clamp(min=1))[owners]
""",
                "A trajectory that is alone in its group has nobody to be compared with. You give it its raw reward; "
                "it gets 0.",
            ),
        ),
        alternatives=(
            """
def segment_advantages(rewards, group_ids, owners):
    out = []
    for i in owners.tolist():
        others = [float(rewards[k]) for k in range(len(rewards)) if k != i and group_ids[k] == group_ids[i]]
        out.append(float(rewards[i]) - sum(others) / len(others) if others else 0.0)
    return out
""",
            """
def segment_advantages(rewards, group_ids, owners):
    rewards, owners = np.asarray(rewards), np.asarray(owners)
    _, index, size = np.unique(np.asarray(group_ids), return_inverse=True, return_counts=True)
    total = np.bincount(index, rewards)[index]
    size = size[index]
    centred = rewards - total / size
    return (centred * size / np.maximum(size - 1, 1))[owners]
""",
            """
def segment_advantages(rewards, group_ids, owners):
    a = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        n = int(m.sum())
        if n > 1:
            a[m] = rewards[m] - (rewards[m].sum() - rewards[m]) / (n - 1)
    return torch.stack([a[i] for i in owners])
""",
        ),
    ),
    Exercise(
        id="08.3",
        title="A baseline over steps",
        minutes=4,
        difficulty=2,
        kind="predict",
        tolerance=0.005,
        stub="""
# A group of three trajectories: successes (reward 1) in 1 call and in 3 calls, and a failure (reward 0) in
# 6 calls. Somebody puts all 10 calls in one list and subtracts the mean reward of the list. No division by
# a std. Which advantage does a call of a success get?
advantage_of_a_success = None
""",
        hints=(
            "The list of rewards has four ones and six zeros.",
            "1 minus the mean of the list.",
        ),
        solution=0.6,
        explanation="The mean of four ones and six zeros is 0.4, so each call of a success gets +0.6 and each call of "
        "the failure −0.4. Over trajectories the mean is 2/3, and they get +1/3 and −2/3: the long failure has lowered "
        "the baseline.",
        mistakes=(
            Mistake(1 / 3, "This is right for a baseline over trajectories. Here the mean is over the ten calls."),
            Mistake(-0.4, "This is what each call of the failure gets."),
            Mistake(0.4, "This is the baseline. The advantage is the reward minus the baseline."),
            Mistake(2 / 3, "This leaves the call itself out of the mean. Here the mean is over all ten calls."),
            Mistake(0.5, "This leaves the success itself out and counts the other two trajectories once each."),
            Mistake(1.2247, "You divided by the std. Asked for is the difference."),
        ),
    ),
    Exercise(
        id="08.4",
        title="Find the bug in a stepwise loss",
        minutes=8,
        difficulty=2,
        kind="find-the-bug",
        probe=value_and_gradient,
        returns=("loss", "gradient"),
        stub='''
def stepwise_loss(log_probs, mask, rewards, owners):
    """−(1/N) Σ_i A_i Σ log π over the tokens of trajectory i, A_i = r_i − mean reward of the N trajectories.

    log_probs, mask: tensors (B, T), a row for each segment; one group
    rewards: tensor (N,), one a trajectory
    owners: tensor (B,) of integers: row b is a part of trajectory owners[b]
    returns: one number
    """
    r = rewards[owners]                        # (B,): each segment has its trajectory's reward
    advantages = r - r.mean()
    per_segment = (log_probs * mask).sum(dim=1)
    return -(advantages * per_segment).sum() / len(rewards)
''',
        hints=(
            "Take a success of three segments and a failure of one. What should r.mean() be, and what is it?",
            "Form the advantages of the N trajectories first, and hand them to the segments afterwards.",
        ),
        solution="""
def stepwise_loss(log_probs, mask, rewards, owners):
    advantages = (rewards - rewards.mean())[owners]
    per_segment = (log_probs * mask).sum(dim=1)
    return -(advantages * per_segment).sum() / len(rewards)
""",
        explanation="The mean was taken over segments, after the rewards had been copied to them: a baseline over "
        "steps. Now it is over trajectories. It runs without an error either way, and the curves look alike; only the "
        "gradient differs.",
        cases=(
            _loss_case(
                "a success of three segments, a failure of one",
                [[-0.5, -1.0], [-0.25, -2.0], [-1.5, -0.5], [-1.0, -0.75]],
                [[0.0, 1.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]],
                [1.0, 0.0],
                [0, 0, 0, 1],
            ),
            _loss_case(
                "two failures of two segments, shuffled",
                [[-0.5, -1.0], [-0.25, -2.0], [-1.5, -0.5], [-1.0, -0.75], [-0.5, -0.125]],
                [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 1.0]],
                [0.0, 1.0, 0.0],
                [2, 0, 1, 0, 2],
            ),
            _loss_case(
                "one segment each",
                [[-0.5, -1.0], [-0.25, -2.0]],
                [[1.0, 1.0], [0.0, 1.0]],
                [0.25, 0.75],
                [0, 1],
            ),
            _loss_case(
                "all succeed",
                [[-0.5, -1.0], [-0.25, -2.0], [-1.0, -1.0]],
                [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]],
                [1.0, 1.0],
                [0, 1, 1],
            ),
        ),
        mistakes=(
            Mistake(
                """
def stepwise_loss(log_probs, mask, rewards, owners):
    a = (rewards - rewards.mean())[owners]
    return -(a * (log_probs * mask).sum(1)).sum() / len(owners)
""",
                "The advantages are right now, but you divide by the number of segments. Then the step depends on how "
                "the trajectories were cut: divide by the number of trajectories.",
            ),
            Mistake(
                """
def stepwise_loss(log_probs, mask, rewards, owners):
    r = rewards[owners]
    return -((r - r.mean()) * (log_probs * mask).sum(1)).sum() / len(owners)
""",
                "The division by the number of trajectories was right, and the bug is still there: r.mean() counts a "
                "trajectory once for each of its segments.",
            ),
            Mistake(
                """
def stepwise_loss(log_probs, mask, rewards, owners):
    a = (rewards - rewards.mean())[owners]
    return -(a * (log_probs * mask).sum(1)).sum() / mask.sum()
""",
                "The advantages are right now, but you divide by the number of tokens. The stub's docstring asks for "
                "1/N.",
            ),
            Mistake(
                """
def stepwise_loss(log_probs, mask, rewards, owners):
    a = (rewards - rewards.mean())[owners]
    return -(a * (log_probs * mask).sum(1) / mask.sum(1)).sum() / len(rewards)
""",
                "The advantages are right now, but you take the mean over each segment's tokens. log π of a segment "
                "is a sum.",
            ),
            Mistake(
                """
def stepwise_loss(log_probs, mask, rewards, owners):
    a = rewards[owners]
    return -(a * (log_probs * mask).sum(1)).sum() / len(rewards)
""",
                "You dropped the baseline altogether. It should be there, over trajectories.",
            ),
            Mistake(
                """
def stepwise_loss(log_probs, mask, rewards, owners):
    a = (rewards - rewards.mean())[owners] / torch.bincount(owners)[owners]
    return -(a * (log_probs * mask).sum(1)).sum() / len(rewards)
""",
                "You divide the advantage by the number of segments of its trajectory. That is another weighting, not "
                "the repair: every segment gets the whole advantage.",
            ),
            Mistake(
                """
def stepwise_loss(log_probs, mask, rewards, owners):
    a = (rewards - rewards.mean())[owners]
    return (a * (log_probs * mask).sum(1)).sum() / len(rewards)
""",
                "The sign is gone. A loss is minimised, so the objective stands in it with a minus.",
            ),
        ),
        alternatives=(
            """
def stepwise_loss(log_probs, mask, rewards, owners):
    log_pi = torch.zeros(len(rewards), dtype=log_probs.dtype).index_add(0, owners, (log_probs * mask).sum(1))
    return -((rewards - rewards.mean()) * log_pi).mean()
""",
            """
def stepwise_loss(log_probs, mask, rewards, owners):
    total = 0
    for b in range(len(owners)):
        total = total - (rewards[owners[b]] - rewards.mean()) * (log_probs[b] * mask[b]).sum()
    return total / len(rewards)
""",
            """
def stepwise_loss(log_probs, mask, rewards, owners):
    weights = (rewards - rewards.mean())[owners][:, None] * mask / rewards.shape[0]
    return -torch.einsum("bt,bt->", weights.to(log_probs), log_probs)
""",
        ),
    ),
    Exercise(
        id="08.5",
        title="One vote a trajectory",
        minutes=12,
        difficulty=3,
        kind="code",
        stub='''
def trajectory_mean_weights(mask, owners):
    """The weight of each token if every trajectory has one vote, shared evenly by its tokens.

    mask: tensor (B, T) of 0 and 1, a row for each segment
    owners: tensor (B,) of integers: row b is a part of trajectory owners[b]
    returns: tensor (B, T): 1 / (tokens of the trajectory · number of trajectories) where the mask is 1,
        else 0; tokens count over all rows of the trajectory, and a trajectory counts if it has a token
    """
    raise NotImplementedError
''',
        hints=(
            "mask.sum(1) are the tokens of each row. Add up those of rows with the same owner, then hand the sum back "
            "to each row.",
            "torch.zeros(n).index_add(0, owners, lengths) adds up by owner; indexing the result with owners hands it "
            "back. (owners[:, None] == owners) @ lengths does both at once.",
            "How many owners have a sum above 0? All weights together must add up to 1.",
        ),
        solution="""
def trajectory_mean_weights(mask, owners):
    lengths = mask.sum(dim=1)
    tokens = torch.zeros(int(owners.max()) + 1, dtype=lengths.dtype).index_add(0, owners, lengths)
    share = tokens[owners] * (tokens > 0).sum()
    return mask / share.clamp(min=1)[:, None]
""",
        explanation="The weights of a trajectory add up to 1/N however many segments and tokens it has. That sounds "
        "fair; section 5 shows what it does to the gradient.",
        cases=(
            _weights_case("a trajectory of two segments, one of one", [[0, 1, 1], [0, 1, 0], [1, 1, 0]], [0, 0, 1]),
            _weights_case("one segment each", [[1, 0, 0, 0], [1, 1, 1, 1]], [0, 1]),
            _weights_case("rows of a trajectory apart", [[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0]], [2, 0, 2, 2]),
            _weights_case("a row without a token", [[1, 1], [0, 0], [1, 0]], [0, 0, 1]),
            _weights_case("a trajectory without a token", [[1, 1, 1], [0, 0, 0], [0, 0, 1], [1, 0, 0]], [0, 1, 2, 2]),
            _weights_case("one trajectory", [[1, 0], [1, 1]], [4, 4]),
        ),
        mistakes=(
            Mistake(
                """
def trajectory_mean_weights(mask, owners):
    return mask / mask.sum()
""",
                "This is token-mean: every token weighs the same, and a long trajectory more than a short one.",
            ),
            Mistake(
                """
def trajectory_mean_weights(mask, owners):
    lengths = mask.sum(1, keepdim=True)
    return mask / (lengths.clamp(min=1) * (lengths > 0).sum())
""",
                "This is sequence-mean over segments: each *segment* has one vote, so a trajectory with more segments "
                "has more.",
            ),
            Mistake(
                """
def trajectory_mean_weights(mask, owners):
    return mask / (mask.sum(1, keepdim=True).clamp(min=1) * len(mask))
""",
                "This is sequence-mean over segments, and it counts rows without a token as well: each *segment* has "
                "one vote, so a trajectory with more segments has more.",
            ),
            Mistake(
                """
def trajectory_mean_weights(mask, owners):
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return mask / (lengths * len(owners.unique()))
""",
                "You divide by the tokens of the row. A trajectory's tokens count over all its rows, or each of its "
                "segments gets a whole vote.",
            ),
            Mistake(
                """
def trajectory_mean_weights(mask, owners):
    lengths = mask.sum(1)
    tokens = torch.zeros(int(owners.max()) + 1, dtype=lengths.dtype).index_add(0, owners, lengths)
    return mask / (tokens[owners] * len(tokens)).clamp(min=1)[:, None]
""",
                "You count every number up to the largest in owners, trajectories without a token among them. They "
                "cannot vote, and your weights do not add up to 1.",
            ),
            Mistake(
                """
def trajectory_mean_weights(mask, owners):
    lengths = mask.sum(1)
    same = (owners[:, None] == owners).to(lengths)
    rows = (lengths > 0).sum()
    return mask / ((same @ lengths) * rows).clamp(min=1)[:, None]
""",
                "You divide by the number of segments in the batch. The last factor is the number of trajectories.",
            ),
            Mistake(
                """
def trajectory_mean_weights(mask, owners):
    lengths = mask.sum(1)
    same = (owners[:, None] == owners).to(lengths)
    return mask / ((same @ lengths) * len(owners.unique())).clamp(min=1)[:, None]
""",
                "You count a trajectory that has no token at all. It cannot vote, and your weights do not add up to 1.",
            ),
            Mistake(
                """
def trajectory_mean_weights(mask, owners):
    lengths = mask.sum(1)
    same = (owners[:, None] == owners).to(lengths)
    counts = (same @ (lengths > 0).to(lengths)).clamp(min=1)
    n = len(owners[lengths > 0].unique())
    return mask / (lengths.clamp(min=1) * counts * n)[:, None]
""",
                "You give every segment of a trajectory an equal part of its vote, so that a token of a short segment "
                "weighs more than one of a long segment. Share by tokens.",
            ),
            Mistake(
                """
def trajectory_mean_weights(mask, owners):
    lengths = mask.sum(1)
    same = (owners[:, None] == owners).to(lengths)
    return mask / (same @ lengths).clamp(min=1)[:, None]
""",
                "Each trajectory has the weight 1. Divide by the number of trajectories, so that all weights add up "
                "to 1.",
            ),
            Mistake(
                """
def trajectory_mean_weights(mask, owners):
    n = len(owners[mask.sum(1) > 0].unique())
    return mask / n
""",
                "Every token weighs 1 / N. That is the sum over the tokens of a trajectory, not their mean: long ones "
                "have more than one vote. (It is also the exact gradient, but not what is asked for.)",
            ),
        ),
        alternatives=(
            """
def trajectory_mean_weights(mask, owners):
    tokens = {}
    for row, owner in zip(mask.tolist(), owners.tolist()):
        tokens[owner] = tokens.get(owner, 0) + sum(row)
    n = sum(1 for count in tokens.values() if count > 0)
    return [[m / (tokens[o] * n) if m else 0.0 for m in row] for row, o in zip(mask.tolist(), owners.tolist())]
""",
            """
def trajectory_mean_weights(mask, owners):
    mask, owners = np.asarray(mask, dtype=float), np.asarray(owners)
    _, index = np.unique(owners, return_inverse=True)
    tokens = np.bincount(index, mask.sum(1))
    return mask / np.maximum(tokens[index] * (tokens > 0).sum(), 1)[:, None]
""",
            """
def trajectory_mean_weights(mask, owners):
    same = (owners[:, None] == owners).double()
    tokens = same @ mask.sum(1).double()
    votes = mask / tokens.clamp(min=1)[:, None]
    return votes / votes.sum().clamp(min=1)
""",
        ),
    ),
    Exercise(
        id="08.6",
        title="Efficiency among successes",
        minutes=10,
        difficulty=2,
        kind="code",
        stub='''
def efficiency_advantages(costs, successes):
    """clip((c̄ − c_i) / c̄, −1, 1) for the successes of one group, 0 for its failures.

    costs: tensor (N,), above 0
    successes: tensor (N,) of 0 and 1
    returns: tensor (N,); c̄ is the mean cost of the successes; all 0 if there are fewer than two successes
    """
    raise NotImplementedError
''',
        hints=(
            "The mean is over the successes only: costs[successes == 1].mean().",
            "Compute the clipped expression for everybody, then multiply with `successes`; and look at successes.sum() "
            "first.",
        ),
        solution="""
def efficiency_advantages(costs, successes):
    if successes.sum() < 2:
        return torch.zeros_like(costs)
    mean = costs[successes == 1].mean()
    return ((mean - costs) / mean).clamp(-1, 1) * successes
""",
        explanation="Failures are neither rewarded for being cheap nor do they move the mean. Since costs are not "
        "negative, (c̄ − c)/c̄ never exceeds 1: only the lower bound ever binds, at twice the mean cost.",
        cases=(
            _efficiency_case("two successes, a cheap failure", [100.0, 300.0, 50.0], [1, 1, 0]),
            _efficiency_case("one of four is dear enough to be clipped", [1.0, 1.0, 1.0, 13.0], [1, 1, 1, 1]),
            _efficiency_case("one success", [10.0, 20.0, 30.0], [0, 1, 0]),
            _efficiency_case("no success", [10.0, 20.0], [0, 0]),
            _efficiency_case("equal costs", [7.0, 7.0, 9.0], [1, 1, 0]),
            _efficiency_case("a dear failure", [2.0, 4.0, 6.0, 500.0, 4.5], [1, 1, 1, 0, 1]),
        ),
        mistakes=(
            Mistake(
                """
def efficiency_advantages(costs, successes):
    if successes.sum() < 2:
        return torch.zeros_like(costs)
    mean = costs.mean()
    return ((mean - costs) / mean).clamp(-1, 1) * successes
""",
                "Your mean is over the whole group. A dear failure would then make every success look cheap: take the "
                "mean over the successes.",
            ),
            Mistake(
                """
def efficiency_advantages(costs, successes):
    if successes.sum() < 2:
        return torch.zeros_like(costs)
    mean = costs[successes == 1].mean()
    return ((mean - costs) / mean).clamp(-1, 1)
""",
                "Failures get something as well, and a cheap failure gets more. They get 0.",
            ),
            Mistake(
                """
def efficiency_advantages(costs, successes):
    if successes.sum() < 2:
        return torch.zeros_like(costs)
    mean = costs[successes == 1].mean()
    return (mean - costs) / mean * successes
""",
                "The clip is missing. One success of many times the mean cost would be pushed down without bound.",
            ),
            Mistake(
                """
def efficiency_advantages(costs, successes):
    if successes.sum() < 2:
        return torch.zeros_like(costs)
    mean = costs[successes == 1].mean()
    return ((costs - mean) / mean).clamp(-1, 1) * successes
""",
                "The sign is turned round: the dearer success gets more.",
            ),
            Mistake(
                """
def efficiency_advantages(costs, successes):
    if successes.sum() < 2:
        return torch.zeros_like(costs)
    mean = costs[successes == 1].mean()
    return ((mean - costs) / costs).clamp(-1, 1) * successes
""",
                "You divide by the cost itself. Divide by the mean c̄, so that the unit of cost drops out and the scale "
                "is the same for all.",
            ),
            Mistake(
                """
def efficiency_advantages(costs, successes):
    if successes.sum() < 2:
        return torch.zeros_like(costs)
    c = costs[successes == 1]
    std = c.std(correction=0).clamp(min=1e-9)
    return ((c.mean() - costs) / std).clamp(-1, 1) * successes
""",
                "You divide by the std of the costs. Two successes that differ by one token would get ±1; divided by "
                "the mean, a small saving stays small.",
            ),
            Mistake(
                """
def efficiency_advantages(costs, successes):
    if successes.sum() < 1:
        return torch.zeros_like(costs)
    c = costs[successes == 1]
    a = ((c.mean() - costs) / c.mean()).clamp(0, 1)
    return a * successes
""",
                "You clip at 0, so only the cheap successes get something. The range is −1 to 1.",
            ),
        ),
        alternatives=(
            """
def efficiency_advantages(costs, successes):
    solved = [float(c) for c, s in zip(costs, successes) if s]
    if len(solved) < 2:
        return [0.0] * len(costs)
    mean = sum(solved) / len(solved)
    return [max(-1.0, (mean - float(c)) / mean) if s else 0.0 for c, s in zip(costs, successes)]
""",
            """
def efficiency_advantages(costs, successes):
    costs, successes = np.asarray(costs), np.asarray(successes)
    count = successes.sum()
    mean = (costs * successes).sum() / max(count, 1)
    saved = np.clip(1 - costs / max(mean, 1e-12), -1, 1)
    return np.where((successes == 1) & (count >= 2), saved, 0.0)
""",
            """
def efficiency_advantages(costs, successes):
    s = successes.to(costs)
    if s.sum() <= 1:
        return costs * 0
    return torch.where(s > 0, (1 - costs * s.sum() / (costs @ s)).clamp(min=-1), 0.0)
""",
        ),
    ),
)
