"""Exercises of lesson 05: GRPO."""

import math

from .exercise import Case, Exercise, Mistake


def _group_case(label, rewards, group_ids):
    expected = []
    for reward, group in zip(rewards, group_ids, strict=True):
        members = [r for r, g in zip(rewards, group_ids, strict=True) if g == group]
        mean = math.fsum(members) / len(members)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in members) / len(members))
        expected.append((reward - mean) / std if max(members) - min(members) > 1e-6 else 0.0)
    return Case((rewards, group_ids), expected, label)


def _weights_case(mask, mode, max_length, label):
    total = sum(map(sum, mask))
    rows = sum(1 for row in mask if sum(row))
    expected = []
    for row in mask:
        share = {
            "token-mean": lambda row: total,
            "sequence-mean": lambda row: sum(row) * rows,
            "sequence-sum": lambda row: rows,
            "fixed-length": lambda row: rows * max_length,
        }[mode](row)
        expected.append([1 / share if m else 0.0 for m in row])
    return Case((mask, mode, max_length), expected, f"{mode}: {label}")


def _micro_case(label, losses, mask, micro_batch):
    active = [v for row, row_mask in zip(losses, mask, strict=True) for v, m in zip(row, row_mask, strict=True) if m]
    return Case((losses, mask, micro_batch), math.fsum(active) / len(active), label)


def _k3_case(label, log_probs, ref_log_probs, atol=None):
    def k3(x):
        if abs(x) < 0.01:  # the series of exp(x) − 1 − x
            return math.fsum(x**n / math.factorial(n) for n in range(2, 12))
        return math.exp(x) - 1 - x

    expected = [[k3(r - p) for p, r in zip(*rows, strict=True)] for rows in zip(log_probs, ref_log_probs, strict=True)]
    return Case((log_probs, ref_log_probs), expected, label, atol)


def _sequence_case(label, log_probs, old_log_probs, mask):
    expected = []
    for rows in zip(log_probs, old_log_probs, mask, strict=True):
        differences = [new - old for new, old, m in zip(*rows, strict=True) if m]
        expected.append(math.exp(math.fsum(differences) / max(len(differences), 1)))
    return Case((log_probs, old_log_probs, mask), expected, label)


EXERCISES = (
    Exercise(
        id="05.1",
        title="Group-relative advantages",
        minutes=15,
        difficulty=3,
        kind="code",
        stub='''
def group_relative_advantages(rewards, group_ids):
    """GRPO's advantages: (r_i − mean of its group) / population std of its group.

    rewards: tensor (N,)
    group_ids: tensor (N,) of integers; rows of a group may stand anywhere, groups may differ in size
    returns: tensor (N,); 0 where all rewards of the group are equal up to rounding
        (max − min ≤ 1e-6), so also for a group of one
    """
    raise NotImplementedError
''',
        hints=(
            "Go through the distinct ids; rewards[group_ids == g] are the rewards of group g.",
            "The population std divides by the size of the group: std(correction=0) in torch, np.std in NumPy.",
            "Look at max − min before you divide. Rewards that differ by rounding only have a tiny std that is not 0.",
        ),
        solution="""
def group_relative_advantages(rewards, group_ids):
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = group_ids == group
        r = rewards[members]
        if r.max() - r.min() > 1e-6:
            advantages[members] = (r - r.mean()) / r.std(correction=0)
    return advantages
""",
        explanation="Groups are found by id, not by position. Where all rewards are equal nothing can be "
        "learnt; dividing the rounding residue by a tiny std would turn it into advantages of "
        "any size.",
        cases=(
            Case(([1.0, 0.0, 0.0, 1.0], [7, 7, 7, 7]), [1.0, -1.0, -1.0, 1.0], "two of four right"),
            Case(([1.0, 0.0, 0.0, 0.0, 0.0], [0] * 5), [2.0, -0.5, -0.5, -0.5, -0.5], "one of five right"),
            _group_case(
                "groups of 4, 3 and 4, shuffled",
                [1.0, 0.0, 2.0, 0.5, 0.0, 1.0, 3.0, 1.0, 0.0, 0.0, 1.0],
                [2, 0, 1, 0, 2, 0, 1, 2, 1, 0, 2],
            ),
            Case(
                ([1.0, 0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1, 1]),
                [1.0, -1.0, 0.0, 0.0, 0.0],
                "a group in which all are right",
            ),
            Case(([0.1 + 0.2, 0.3, 0.3], [4, 4, 4]), [0.0, 0.0, 0.0], "0.1 + 0.2 and 0.3 count as equal"),
            Case(([0.0, 5.0, 2.0], [1, 2, 1]), [-1.0, 0.0, 1.0], "a group of one"),
        ),
        mistakes=(
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        r = rewards[m]
        if r.max() - r.min() > 1e-6:
            out[m] = (r - r.mean()) / r.std()
    return out
""",
                "Your std divides by G − 1, as torch's .std() does by itself. The closed forms need "
                "the population std, which divides by G.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        r = rewards[m]
        out[m] = (r - r.mean()) / (r.std() + 1e-4) if len(r) > 1 else 0.0
    return out
""",
                "This is TRL's version: sample std plus an eps of 1e-4. Here the population std is "
                "asked for, and no eps.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        r = rewards[m]
        out[m] = (r - r.mean()) / (r.std(correction=0) + 1e-4)
    return out
""",
                "An eps of 1e-4 in the denominator shrinks every advantage a little. Treat equal "
                "rewards as a case of their own.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        r = rewards[m]
        out[m] = (r - r.mean()) / (r.std(correction=0) + 1e-6)
    return out
""",
                "An eps of 1e-6 in the denominator is small but not nothing. Treat equal rewards as a "
                "case of their own.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        r = rewards[m]
        out[m] = (r - r.mean()) / r.std(correction=0)
    return out
""",
                "Where all rewards of a group are equal you divide 0 by 0, or one rounding error by "
                "another. Such a group gets 0.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        r = rewards[m]
        if r.std(correction=0) > 0:
            out[m] = (r - r.mean()) / r.std(correction=0)
    return out
""",
                "You skip groups whose std is exactly 0. 0.1 + 0.2 and 0.3 differ by 5e-17, and "
                "dividing by such a std gives advantages of the order of 1: compare max − min with a "
                "tolerance.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    if rewards.max() - rewards.min() <= 1e-6:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / rewards.std(correction=0)
""",
                "You take mean and std over the whole batch. Each response is compared with its own "
                "group, the answers to the same prompt.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        out[m] = rewards[m] - rewards[m].mean()
    return out
""",
                "You subtract the mean but do not divide by the std. That is Dr. GRPO; here the std is asked for.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        r = rewards[m]
        if r.max() - r.min() > 1e-6:
            out[m] = (r - r.mean()) / r.var(correction=0)
    return out
""",
                "You divide by the variance. The std is its square root.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        r = rewards[m]
        if r.max() - r.min() > 1e-6:
            out[m] = r / r.std(correction=0)
    return out
""",
                "The group mean is not subtracted, so every rewarded response is pushed up and none down.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    _, counts = group_ids.unique(return_counts=True)
    out = []
    for r in rewards.split(counts.tolist()):
        equal = r.max() - r.min() <= 1e-6
        out.append(torch.zeros_like(r) if equal else (r - r.mean()) / r.std(correction=0))
    return torch.cat(out)
""",
                "You take rows that stand next to each other for a group. Find the members by their "
                "id: rows may come shuffled.",
            ),
            Mistake(
                """
def group_relative_advantages(rewards, group_ids):
    out = torch.zeros_like(rewards)
    for g in group_ids.unique():
        m = group_ids == g
        r = rewards[m]
        if r.max() - r.min() > 1e-6:
            out[m] = (r - (r.sum() - r) / (len(r) - 1)) / r.std(correction=0)
    return out
""",
                "Your mean leaves the response itself out. That is the leave-one-out baseline; GRPO "
                "takes the mean of the whole group.",
            ),
        ),
        alternatives=(
            """
def group_relative_advantages(rewards, group_ids):
    groups = {}
    for reward, group in zip(rewards, group_ids):
        groups.setdefault(int(group), []).append(float(reward))
    result = []
    for reward, group in zip(rewards, group_ids):
        r = groups[int(group)]
        mean = sum(r) / len(r)
        std = math.sqrt(sum((x - mean) ** 2 for x in r) / len(r))
        result.append(0.0 if max(r) - min(r) <= 1e-6 else (float(reward) - mean) / std)
    return result
""",
            """
def group_relative_advantages(rewards, group_ids):
    member = (group_ids[:, None] == group_ids[None, :]).to(rewards)
    size = member.sum(1)
    centred = rewards - member @ rewards / size
    std = (member @ centred**2 / size).sqrt()
    return torch.where(std > 1e-7, centred / std.clamp(min=1e-7), 0.0)
""",
            """
def group_relative_advantages(rewards, group_ids):
    rewards, group_ids = np.asarray(rewards), np.asarray(group_ids)
    _, index, counts = np.unique(group_ids, return_inverse=True, return_counts=True)
    mean = np.bincount(index, rewards) / counts
    centred = rewards - mean[index]
    std = np.sqrt(np.bincount(index, centred**2) / counts)[index]
    return np.divide(centred, std, out=np.zeros_like(centred), where=std > 1e-6)
""",
        ),
    ),
    Exercise(
        id="05.2",
        title="The advantage of a rare success",
        minutes=4,
        difficulty=2,
        kind="predict",
        tolerance=0.005,
        stub="""
# Of 32 responses to one prompt 2 are right (reward 1), the others wrong (reward 0). Which advantage does a
# right one get, with the group's mean and population std?
advantage = None
""",
        hints=(
            "The mean of 0/1 rewards is the success fraction p, and their population std is √(p(1 − p)).",
            "(1 − p)/√(p(1 − p)) = √((1 − p)/p), with p = 2/32.",
        ),
        solution=3.873,
        explanation="√(30/2) = √15 = 3.873, and each of the 30 failures gets −√(2/30) = −0.258. With 30 "
        "of 32 right it is the other way round: a success gets 0.258 and a failure −3.873.",
        mistakes=(
            Mistake(3.812, "You used the sample std, which divides by 31. The closed form needs the population std."),
            Mistake(
                0.258, "This is the size of a failure's advantage, √(p/(1 − p)), or a success's with 30 of 32 right."
            ),
            Mistake(-0.258, "This is the advantage of a failure. Asked for is a right answer."),
            Mistake(15.0, "You have (1 − p)/p; its square root is missing."),
            Mistake(0.9375, "This is r − mean = 1 − p. It still has to be divided by the std."),
            Mistake(16.0, "You divided by the variance p(1 − p) instead of the std."),
            Mistake(5.568, "This is √31, the advantage of a single success among 32. Two are right here."),
            Mistake(4.131, "This is 1/std. The numerator is 1 − p, not 1: subtract the mean first."),
        ),
    ),
    Exercise(
        id="05.3",
        title="One weight per token",
        minutes=12,
        difficulty=3,
        kind="code",
        stub='''
def token_weights(mask, mode, max_length):
    """The weight of each token in the loss Σ weights · per-token loss.

    mask: tensor (B, T) of 0 and 1; a row may have no 1 at all, and then does not count as a row
    mode: "token-mean"     1 / (number of active tokens)
          "sequence-mean"  1 / (active tokens of the own row · number of rows that count)
          "sequence-sum"   1 / (number of rows that count)
          "fixed-length"   1 / (max_length · number of rows that count)
    max_length: integer, used by "fixed-length" only
    returns: tensor (B, T), 0 where the mask is 0
    """
    raise NotImplementedError
''',
        hints=(
            "lengths = mask.sum(1) are the active tokens of each row. How many rows have at least one?",
            "Each mode is mask divided by something: one number, or for sequence-mean one number a row, shape (B, 1).",
            "A row without active tokens must not divide by 0: raise its length to 1, its mask makes it 0 anyway.",
        ),
        solution="""
def token_weights(mask, mode, max_length):
    lengths = mask.sum(dim=1, keepdim=True)       # (B, 1)
    rows = (lengths > 0).sum()
    share = {
        "token-mean": lengths.sum(),
        "sequence-mean": lengths.clamp(min=1) * rows,
        "sequence-sum": rows,
        "fixed-length": rows * max_length,
    }[mode]
    return mask / share
""",
        explanation="With token-mean a long response weighs more than a short one; with sequence-mean "
        "each response weighs the same, so each token of a long one weighs less, and that is "
        "the length bias. The last two treat every token alike and do not look at lengths.",
        cases=(
            Case(
                ([[1, 0, 0], [1, 1, 1]], "token-mean", 4),
                [[0.25, 0.0, 0.0], [0.25, 0.25, 0.25]],
                "token-mean: lengths 1 and 3",
            ),
            Case(
                ([[1, 0, 0], [1, 1, 1]], "sequence-mean", 4),
                [[0.5, 0.0, 0.0], [1 / 6, 1 / 6, 1 / 6]],
                "sequence-mean: lengths 1 and 3",
            ),
            Case(
                ([[1, 0, 0], [1, 1, 1]], "sequence-sum", 4),
                [[0.5, 0.0, 0.0], [0.5, 0.5, 0.5]],
                "sequence-sum: lengths 1 and 3",
            ),
            Case(
                ([[1, 0, 0], [1, 1, 1]], "fixed-length", 4),
                [[0.125, 0.0, 0.0], [0.125, 0.125, 0.125]],
                "fixed-length: lengths 1 and 3",
            ),
            *(
                _weights_case(
                    [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1]],
                    mode,
                    16,
                    "a row without tokens, and one with a gap",
                )
                for mode in ("token-mean", "sequence-mean", "sequence-sum", "fixed-length")
            ),
        ),
        mistakes=(
            Mistake(
                """
def token_weights(mask, mode, max_length):
    n, rows = mask.sum(1, keepdim=True), len(mask)
    share = {"token-mean": n.sum(), "sequence-mean": n.clamp(min=1) * rows,
             "sequence-sum": rows, "fixed-length": rows * max_length}
    return mask / share[mode]
""",
                "You count all rows of the batch. A row without active tokens does not count, or a "
                "response that was masked out would shrink the rest.",
            ),
            Mistake(
                """
def token_weights(mask, mode, max_length):
    n = mask.sum(1, keepdim=True)
    rows = (n > 0).sum()
    share = {"token-mean": mask.numel(), "sequence-mean": n.clamp(min=1) * rows,
             "sequence-sum": rows, "fixed-length": rows * max_length}
    return mask / share[mode]
""",
                "Your token-mean divides by B·T, padding included, so the loss changes with the "
                "padding. Divide by the active tokens.",
            ),
            Mistake(
                """
def token_weights(mask, mode, max_length):
    n = mask.sum(1, keepdim=True)
    rows = (n > 0).sum()
    share = {"token-mean": n.sum(), "sequence-mean": n.clamp(min=1),
             "sequence-sum": rows, "fixed-length": rows * max_length}
    return mask / share[mode]
""",
                "In your sequence-mean each row sums to 1, so the batch sums to the number of rows. "
                "Divide by that number as well.",
            ),
            Mistake(
                """
def token_weights(mask, mode, max_length):
    n = mask.sum(1, keepdim=True)
    rows = (n > 0).sum()
    share = {"token-mean": n.sum(), "sequence-mean": n * rows,
             "sequence-sum": rows, "fixed-length": rows * max_length}
    return mask / share[mode]
""",
                "A row without active tokens divides 0 by 0 in your sequence-mean. Its weights are 0.",
            ),
            Mistake(
                """
def token_weights(mask, mode, max_length):
    n = mask.sum(1, keepdim=True)
    rows = (n > 0).sum()
    share = {"token-mean": n.sum(), "sequence-mean": n.clamp(min=1) * rows,
             "sequence-sum": 1, "fixed-length": rows * max_length}
    return mask / share[mode]
""",
                "Your sequence-sum is the bare mask. Summed is within a row; over the rows it is a mean.",
            ),
            Mistake(
                """
def token_weights(mask, mode, max_length):
    n = mask.sum(1, keepdim=True)
    rows = (n > 0).sum()
    share = {"token-mean": n.sum(), "sequence-mean": n.clamp(min=1) * rows,
             "sequence-sum": rows, "fixed-length": rows * mask.shape[1]}
    return mask / share[mode]
""",
                "Your fixed-length divides by T, the width of this batch. max_length is the same in "
                "every batch; T is not.",
            ),
            Mistake(
                """
def token_weights(mask, mode, max_length):
    n = mask.sum(1, keepdim=True)
    rows = (n > 0).sum()
    share = {"token-mean": n.sum(), "sequence-mean": n.clamp(min=1) * rows,
             "sequence-sum": rows, "fixed-length": max_length}
    return mask / share[mode]
""",
                "Your fixed-length does not divide by the number of rows, so the loss grows with the batch.",
            ),
            Mistake(
                """
def token_weights(mask, mode, max_length):
    n = mask.sum(1, keepdim=True)
    rows = (n > 0).sum()
    share = {"token-mean": n.sum(), "sequence-mean": n.sum(),
             "sequence-sum": rows, "fixed-length": rows * max_length}
    return mask / share[mode]
""",
                "Your sequence-mean is the same as token-mean. Each row is divided by its own length first.",
            ),
            Mistake(
                """
def token_weights(mask, mode, max_length):
    n = mask.sum(1, keepdim=True)
    rows = (n > 0).sum()
    share = {"sequence-mean": n.sum(), "token-mean": n.clamp(min=1) * rows,
             "sequence-sum": rows, "fixed-length": rows * max_length}
    return mask / share[mode]
""",
                "token-mean and sequence-mean have changed places.",
            ),
            Mistake(
                """
def token_weights(mask, mode, max_length):
    n = mask.sum(1, keepdim=True)
    rows = (n > 0).sum()
    share = {"token-mean": n.sum(), "sequence-mean": n.clamp(min=1) * rows,
             "sequence-sum": rows, "fixed-length": rows * max_length}
    return torch.ones_like(mask) / share[mode]
""",
                "The denominators are right, but tokens under a zero mask get a weight too.",
            ),
        ),
        alternatives=(
            """
def token_weights(mask, mode, max_length):
    lengths = [sum(int(m) for m in row) for row in mask]
    rows = sum(1 for length in lengths if length)
    weights = []
    for row, length in zip(mask, lengths):
        if mode == "token-mean":
            share = sum(lengths)
        elif mode == "sequence-mean":
            share = length * rows
        else:
            share = rows if mode == "sequence-sum" else rows * max_length
        weights.append([1 / share if m else 0.0 for m in row])
    return weights
""",
            """
def token_weights(mask, mode, max_length):
    mask = np.asarray(mask, dtype=float)
    rows = mask.any(axis=1).sum()
    if mode == "token-mean":
        return mask / mask.sum()
    if mode == "sequence-mean":
        return mask / np.maximum(mask.sum(axis=1, keepdims=True), 1) / rows
    return mask / rows / (max_length if mode == "fixed-length" else 1)
""",
            """
def token_weights(mask, mode, max_length):
    mask = mask.double()
    rows = mask.any(dim=1).sum()
    per_row = {
        "token-mean": torch.full((len(mask),), 1.0) * rows / mask.sum(),
        "sequence-mean": 1 / mask.sum(1),
        "sequence-sum": torch.ones(len(mask)),
        "fixed-length": torch.full((len(mask),), 1 / max_length, dtype=torch.float64),
    }[mode]
    return torch.where(mask > 0, per_row[:, None] / rows, 0.0)
""",
        ),
    ),
    Exercise(
        id="05.4",
        title="Find the bug: micro-batches",
        minutes=8,
        difficulty=3,
        kind="find-the-bug",
        stub='''
def accumulated_loss(losses, mask, micro_batch):
    """Token-mean loss of a batch, a few rows at a time to save memory. How many must not matter.

    losses: tensor (B, T), the loss of each token
    mask: tensor (B, T) of 0 and 1, at least one 1 in every row
    micro_batch: integer, rows handled at a time
    returns: one number
    """
    total, parts = 0.0, 0
    for start in range(0, len(losses), micro_batch):
        rows = slice(start, start + micro_batch)
        total += (losses[rows] * mask[rows]).sum() / mask[rows].sum()
        parts += 1
    return total / parts
''',
        hints=(
            "Take losses [[6], [1, 2, 3]]. The mean of the four tokens is 3. What is the mean of the two rows' means?",
            "A mean of means weights each part alike, though the parts have different numbers of tokens.",
            "The denominator belongs to the whole batch. Compute it once, before the loop, and only add up inside.",
        ),
        solution="""
def accumulated_loss(losses, mask, micro_batch):
    total, active = 0.0, mask.sum()  # the denominator is the batch's, not the part's
    for start in range(0, len(losses), micro_batch):
        rows = slice(start, start + micro_batch)
        total += (losses[rows] * mask[rows]).sum() / active
    return total
""",
        explanation="A mean of means is the mean only if all parts have the same number of tokens. With "
        "weights computed once over the whole batch and sliced with it, no split can change "
        "the gradient. Training libraries carried this bug for years.",
        cases=(
            Case(
                ([[6.0, 0.0, 0.0], [1.0, 2.0, 3.0]], [[1, 0, 0], [1, 1, 1]], 1), 3.0, "6 and 1, 2, 3, one row at a time"
            ),
            Case(
                ([[6.0, 0.0, 0.0], [1.0, 2.0, 3.0]], [[1, 0, 0], [1, 1, 1]], 2), 3.0, "6 and 1, 2, 3, both rows at once"
            ),
            _micro_case(
                "three rows, two at a time", [[1.0, -2.0], [4.0, 9.0], [0.5, 2.5]], [[1, 1], [1, 0], [1, 1]], 2
            ),
            _micro_case(
                "four rows, three at a time",
                [[1.0, 7.0], [2.0, 7.0], [3.0, 1.0], [8.0, 2.0]],
                [[1, 0], [1, 0], [1, 1], [1, 1]],
                3,
            ),
            _micro_case("equal lengths: here even the bug is right", [[1.0, 2.0], [3.0, 5.0]], [[1, 1], [1, 1]], 1),
        ),
        mistakes=(
            Mistake(
                """
def accumulated_loss(losses, mask, micro_batch):
    total = 0.0
    for s in range(0, len(losses), micro_batch):
        total += (losses[s:s + micro_batch] * mask[s:s + micro_batch]).sum() / mask[s:s + micro_batch].sum()
    return total
""",
                "You add the means of the parts. The loss then grows with the number of parts.",
            ),
            Mistake(
                """
def accumulated_loss(losses, mask, micro_batch):
    total = 0.0
    for s in range(0, len(losses), micro_batch):
        m = mask[s:s + micro_batch]
        total += (losses[s:s + micro_batch] * m).sum() / m.sum() * len(m) / len(mask)
    return total
""",
                "You weight each part with its number of rows. A token-mean weights it with its number of tokens.",
            ),
            Mistake(
                """
def accumulated_loss(losses, mask, micro_batch):
    total, parts = 0.0, 0
    for s in range(0, len(losses), micro_batch):
        total += (losses[s:s + micro_batch] * mask[s:s + micro_batch]).sum() / mask.sum()
        parts += 1
    return total / parts
""",
                "The denominator is right now, but you still divide by the number of parts.",
            ),
            Mistake(
                """
def accumulated_loss(losses, mask, micro_batch):
    return losses.mean()
""",
                "You average over padding as well. Only tokens with mask 1 count.",
            ),
            Mistake(
                """
def accumulated_loss(losses, mask, micro_batch):
    return losses.sum() / mask.sum()
""",
                "The denominator is right. The numerator adds up losses of padding as well: multiply by the mask.",
            ),
            Mistake(
                """
def accumulated_loss(losses, mask, micro_batch):
    return ((losses * mask).sum(1) / mask.sum(1)).mean()
""",
                "You average each row by its own length. That is the sequence-mean, another loss; "
                "here every token counts alike.",
            ),
            Mistake(
                """
def accumulated_loss(losses, mask, micro_batch):
    total = 0.0
    for s in range(0, len(losses), micro_batch):
        total += (losses[s:s + micro_batch] * mask[s:s + micro_batch]).sum()
    return total
""",
                "You add up the losses and divide by nothing. A mean divides by the number of active tokens.",
            ),
            Mistake(
                """
def accumulated_loss(losses, mask, micro_batch):
    return (losses * mask).sum() / len(losses)
""",
                "You divide by the number of rows: the sequence-sum. A token-mean divides by the "
                "number of active tokens.",
            ),
        ),
        alternatives=(
            """
def accumulated_loss(losses, mask, micro_batch):
    weights = mask / mask.sum()
    parts = zip(losses.split(micro_batch), weights.split(micro_batch))
    return sum((part * weight).sum() for part, weight in parts)
""",
            """
def accumulated_loss(losses, mask, micro_batch):
    total = count = 0.0
    for row, row_mask in zip(losses, mask):
        for loss, active in zip(row, row_mask):
            if active:
                total += float(loss)
                count += 1
    return total / count
""",
            """
def accumulated_loss(losses, mask, micro_batch):
    return np.average(np.asarray(losses), weights=np.asarray(mask))
""",
            """
def accumulated_loss(losses, mask, micro_batch):
    total = 0.0
    for start in range(0, len(losses), micro_batch):
        part, active = losses[start:start + micro_batch], mask[start:start + micro_batch]
        total += (part * active).sum() / active.sum() * (active.sum() / mask.sum())
    return total
""",
        ),
    ),
    Exercise(
        id="05.5",
        title="k3, without losing digits",
        minutes=8,
        difficulty=3,
        kind="code",
        stub='''
def k3(log_probs, ref_log_probs):
    """The k3 estimate of KL(π_θ ‖ π_ref), e^x − 1 − x with x = ref_log_probs − log_probs, of each token.

    log_probs: tensor (B, T), log π_θ of the sampled tokens
    ref_log_probs: tensor (B, T), log π_ref of the same tokens
    returns: tensor (B, T), never negative, and right to six digits even where the two are nearly equal
    """
    raise NotImplementedError
''',
        hints=(
            "x = ref − own. For x = 1e-6 the result is about x²/2 = 5e-13, but e^x is about 1: "
            "what survives of 13 digits when 1 is subtracted?",
            "torch.expm1(x) computes e^x − 1 without the detour over a number near 1.",
        ),
        solution="""
def k3(log_probs, ref_log_probs):
    x = ref_log_probs - log_probs
    return torch.expm1(x) - x
""",
        explanation="As a value k3 is unbiased, since E[e^x] = 1 under π_θ, and it is never negative, "
        "since e^x ≥ 1 + x. Computed as e^x − 1 − x it can come out negative for small x: the "
        "digits are gone before the subtraction.",
        cases=(
            Case(
                ([[-1.0, -1.0 - math.log(2)]], [[-1.0 - math.log(2), -1.0]]),
                [[math.log(2) - 0.5, 1 - math.log(2)]],
                "half and twice the probability",
            ),
            _k3_case("five differences", [[-1.0, -0.5, -3.0, -2.0, -0.1]], [[-1.5, -2.0, -1.0, -2.0, -4.0]]),
            _k3_case(
                "two rows of three", [[-0.2, -1.0, -0.7], [-2.0, -0.3, -1.1]], [[-0.3, -1.4, -0.2], [-1.0, -0.9, -1.3]]
            ),
            _k3_case("nearly equal: x is about 1e-6", [[0.0, -1e-6]], [[-1e-6, 0.0]], atol=0.0),
            _k3_case("far apart: x is 20 and −50", [[-20.0, 0.0]], [[0.0, -50.0]]),
        ),
        mistakes=(
            Mistake(
                """
def k3(log_probs, ref_log_probs):
    x = log_probs - ref_log_probs
    return torch.expm1(x) - x
""",
                "Your x has the wrong sign. x = log π_ref − log π_θ: only then is E[e^x] = 1 under "
                "the policy that sampled.",
            ),
            Mistake(
                """
def k3(log_probs, ref_log_probs):
    x = ref_log_probs - log_probs
    return x.exp() - 1 - x
""",
                "Right on paper, but e^x − 1 loses its digits where x is tiny: at x = 1e-6 only four "
                "are left, and at 1e-9 none.",
            ),
            Mistake(
                """
def k3(log_probs, ref_log_probs):
    return log_probs - ref_log_probs
""",
                "This is k1 = −x: unbiased too, but it can be negative and varies more.",
            ),
            Mistake(
                """
def k3(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs) ** 2 / 2
""",
                "This is k2 = x²/2: close to k3 for small x, biased for large ones.",
            ),
            Mistake(
                """
def k3(log_probs, ref_log_probs):
    x = ref_log_probs - log_probs
    return x.exp() - x
""",
                "The −1 is missing: where the two policies agree the result must be 0.",
            ),
            Mistake(
                """
def k3(log_probs, ref_log_probs):
    x = ref_log_probs - log_probs
    return torch.expm1(x)
""",
                "The −x is missing. e^x − 1 has mean 0 whatever the two policies are, so it measures nothing.",
            ),
            Mistake(
                """
def k3(log_probs, ref_log_probs):
    x = ref_log_probs - log_probs
    return (torch.expm1(x) - x).mean()
""",
                "You average. Asked for is one value a token, so that weights can decide later what counts.",
            ),
            Mistake(
                """
def k3(log_probs, ref_log_probs):
    x = ref_log_probs - log_probs
    return torch.expm1(x) + x
""",
                "The sign of the last term is turned round: e^x − 1 − x is 0 with slope 0 at x = 0, yours is not.",
            ),
        ),
        alternatives=(
            """
def k3(log_probs, ref_log_probs):
    return [[math.expm1(r - p) - float(r - p) for p, r in zip(*rows)] for rows in zip(log_probs, ref_log_probs)]
""",
            """
def k3(log_probs, ref_log_probs):
    x = np.asarray(ref_log_probs) - np.asarray(log_probs)
    return np.expm1(x) - x
""",
            """
def k3(log_probs, ref_log_probs):
    x = ref_log_probs - log_probs
    series = x**2 / 2 + x**3 / 6 + x**4 / 24
    return torch.where(x.abs() < 1e-3, series, x.exp() - 1 - x)
""",
        ),
    ),
    Exercise(
        id="05.6",
        title="k1 as a loss",
        minutes=5,
        difficulty=4,
        kind="choose",
        stub="""
# Responses are sampled from π_θ itself, and β · mean(k1) with k1 = log π_θ(y) − log π_ref(y) is added to the
# loss and differentiated. What does this term do to the gradient, in expectation?
#   A  it pulls π_θ towards π_ref: the gradient is that of KL(π_θ ‖ π_ref)
#   B  nothing: its expected gradient is 0
#   C  it pulls π_θ towards π_ref: the gradient is that of KL(π_ref ‖ π_θ)
#   D  it raises the entropy of π_θ, whatever π_ref is
#   E  it pushes π_θ away from π_ref
choice = None
""",
        hints=(
            "Only log π_θ(y) depends on θ; log π_ref(y) is a constant once y is drawn.",
            "The expectation of ∇ log π_θ(y) over y ~ π_θ has a name: the EGLP lemma.",
        ),
        solution="B",
        explanation="∇k1 = ∇ log π_θ(y), whose expectation is 0, and π_ref has dropped out altogether. As "
        "a value k1 estimates the KL without bias; as a loss it adds nothing but noise. k2 "
        "as a loss gives the gradient of KL(π_θ ‖ π_ref), k3 that of KL(π_ref ‖ π_θ).",
        mistakes=(
            Mistake(
                "A",
                "The value of k1 has this mean, but the gradient of a mean over samples from π_θ has "
                "a second part, which differentiating the samples' term leaves out. k2 as a loss "
                "gives this gradient.",
            ),
            Mistake("C", "That is what k3 as a loss gives. Differentiate k1: what is left of log π_ref?"),
            Mistake(
                "D",
                "Pushing log π_θ of the drawn samples down looks like it, but likely samples come "
                "often and unlikely ones seldom: on average the pushes cancel.",
            ),
            Mistake("E", "For that the term would have to know π_ref. Its gradient does not contain it."),
        ),
    ),
    Exercise(
        id="05.7",
        title="GSPO's sequence ratio",
        minutes=8,
        difficulty=2,
        kind="code",
        stub='''
def sequence_ratio(log_probs, old_log_probs, mask):
    """GSPO's ratio of a response, (π_θ(y|x) / π_old(y|x))^(1/|y|).

    log_probs, old_log_probs: tensors (B, T)
    mask: tensor (B, T) of 0 and 1; |y| is the number of ones in the row
    returns: tensor (B,), 1 for a row without active tokens
    """
    raise NotImplementedError
''',
        hints=(
            "Take the log of the formula: the mean of log_probs − old_log_probs over the active tokens of the row.",
            "Sum under the mask, divide by the number of ones (at least 1), then exp.",
        ),
        solution="""
def sequence_ratio(log_probs, old_log_probs, mask):
    log_ratio = ((log_probs - old_log_probs) * mask).sum(dim=1)
    return torch.exp(log_ratio / mask.sum(dim=1).clamp(min=1))
""",
        explanation="The geometric mean of the token ratios. The product alone would leave any clip range "
        "after a few dozen tokens; the |y|-th root keeps long and short responses on one "
        "scale.",
        cases=(
            Case(
                ([[-1.0, -1.0, -5.0]], [[-1.0 - math.log(4), -1.0, -1.0]], [[1, 1, 0]]), [2.0], "ratios 4 and 1: √4 = 2"
            ),
            _sequence_case(
                "three rows of different length",
                [[-0.5, -1.0, -2.0], [-0.3, -0.2, 0.0], [-1.0, 0.0, 0.0]],
                [[-0.7, -0.8, -1.5], [-0.4, -0.4, -9.0], [-1.5, -9.0, -9.0]],
                [[1, 1, 1], [1, 1, 0], [1, 0, 0]],
            ),
            _sequence_case(
                "a gap for tool tokens", [[-1.0, -7.0, -2.0, -0.5]], [[-1.2, 0.0, -1.5, -0.4]], [[1, 0, 1, 1]]
            ),
            _sequence_case(
                "before the first step", [[-0.5, -1.5], [-2.0, -1.0]], [[-0.5, -1.5], [-2.0, -1.0]], [[1, 1], [1, 1]]
            ),
            _sequence_case(
                "a row without active tokens",
                [[-1.0, -2.0], [-1.0, -1.0]],
                [[-1.5, -1.0], [-3.0, -2.0]],
                [[1, 1], [0, 0]],
            ),
        ),
        mistakes=(
            Mistake(
                """
def sequence_ratio(log_probs, old_log_probs, mask):
    return ((log_probs - old_log_probs) * mask).sum(1).exp()
""",
                "You return the plain product of the token ratios. The |y|-th root is missing: divide "
                "the log by the length.",
            ),
            Mistake(
                """
def sequence_ratio(log_probs, old_log_probs, mask):
    n = mask.sum(1)
    mean = ((log_probs - old_log_probs).exp() * mask).sum(1) / n.clamp(min=1)
    return torch.where(n > 0, mean, 1.0)
""",
                "You take the arithmetic mean of the ratios. The root of a product is the geometric "
                "mean: average the logs.",
            ),
            Mistake(
                """
def sequence_ratio(log_probs, old_log_probs, mask):
    return ((log_probs - old_log_probs) * mask).mean(1).exp()
""",
                "You divide by T, padding included. |y| counts the active tokens of the row.",
            ),
            Mistake(
                """
def sequence_ratio(log_probs, old_log_probs, mask):
    return ((log_probs - old_log_probs) * mask).sum(1) / mask.sum(1).clamp(min=1)
""",
                "You return the log of the ratio; the exp is missing.",
            ),
            Mistake(
                """
def sequence_ratio(log_probs, old_log_probs, mask):
    return (((old_log_probs - log_probs) * mask).sum(1) / mask.sum(1).clamp(min=1)).exp()
""",
                "The ratio is upside down: π_θ stands above, π_old below.",
            ),
            Mistake(
                """
def sequence_ratio(log_probs, old_log_probs, mask):
    return ((log_probs - old_log_probs).sum(1) / mask.sum(1).clamp(min=1)).exp()
""",
                "Tokens under a zero mask are in your sum. Multiply the log-ratios by the mask first.",
            ),
            Mistake(
                """
def sequence_ratio(log_probs, old_log_probs, mask):
    return (((log_probs - old_log_probs) * mask).sum(1) / mask.sum(1)).exp()
""",
                "A row without active tokens divides 0 by 0. Divide by at least 1; its ratio is then exp(0) = 1.",
            ),
            Mistake(
                """
def sequence_ratio(log_probs, old_log_probs, mask):
    return (log_probs - old_log_probs).mean(1).exp()
""",
                "The mask is not used: padding and tool tokens change the ratio.",
            ),
        ),
        alternatives=(
            """
def sequence_ratio(log_probs, old_log_probs, mask):
    ratios = []
    for new, old, active in zip(log_probs, old_log_probs, mask):
        logs = [float(n) - float(o) for n, o, a in zip(new, old, active) if a]
        ratios.append(math.exp(sum(logs) / len(logs)) if logs else 1.0)
    return ratios
""",
            """
def sequence_ratio(log_probs, old_log_probs, mask):
    new, old, mask = (np.asarray(t, dtype=float) for t in (log_probs, old_log_probs, mask))
    return np.exp(((new - old) * mask).sum(1) / np.maximum(mask.sum(1), 1))
""",
            """
def sequence_ratio(log_probs, old_log_probs, mask):
    ratio = torch.where(mask > 0, (log_probs - old_log_probs).exp(), 1.0)
    return ratio.prod(dim=1) ** (1 / mask.sum(dim=1).clamp(min=1))
""",
        ),
    ),
)
