"""Exercises of lesson 06: GRPO in practice."""

import math

from .exercise import Case, Exercise, Mistake


def _filter_case(label, rewards, group_ids, wanted):
    kept = []
    for group in dict.fromkeys(group_ids):
        members = [r for r, g in zip(rewards, group_ids, strict=True) if g == group]
        if max(members) - min(members) > 1e-6 and len(kept) < wanted:
            kept.append(group)
    return Case((rewards, group_ids, wanted), [float(group in kept) for group in group_ids], label)


def _weights_case(label, trainer, rollout, mask, cap, level):
    expected = []
    for rows in zip(trainer, rollout, mask, strict=True):
        logs = [t - r if m else 0.0 for t, r, m in zip(*rows, strict=True)]
        if level == "sequence":
            logs = [math.fsum(logs)] * len(logs)
        expected.append([min(math.exp(x), cap) if m else 0.0 for x, m in zip(logs, rows[2], strict=True)])
    return Case((trainer, rollout, mask, cap, level), expected, f"{level}: {label}")


_TWO_ROWS = (
    [[-0.5, -1.0, -2.0, -0.1], [-0.3, -1.2, -7.0, -0.9]],
    [[-1.5, -0.8, -2.3, -5.0], [-0.4, -1.0, 0.0, -1.1]],
    [[1, 1, 1, 0], [1, 1, 0, 1]],
)

EXERCISES = (
    Exercise(
        id="06.1",
        title="The price of a useful group",
        minutes=4,
        difficulty=2,
        kind="predict",
        tolerance=0.05,
        stub="""
# A prompt is answered right with probability p = 0.4, and groups have G = 4 responses. Groups in which all
# are right or all are wrong are thrown away. How many responses have to be sampled, on average, for one group
# that is kept?
responses = None
""",
        hints=(
            "A group is thrown away with probability 0.4⁴ + 0.6⁴. What is the probability that it is kept?",
            "If a try succeeds with probability u, one needs 1/u tries on average. A try costs 4 responses.",
        ),
        solution=4.735,
        explanation="0.4⁴ + 0.6⁴ = 0.1552, so a group is kept with probability 0.8448: 1.184 groups, "
        "4/0.8448 = 4.735 responses. With groups of 8 it is 14.05 at p = 0.9, and 103.6 at p = 0.99.",
        mistakes=(
            Mistake(25.773, "You divided by the share that is thrown away. One waits for a group that is kept."),
            Mistake(1.184, "This is the number of groups. Each costs four responses."),
            Mistake(4.596, "You threw away only the groups in which all are wrong. All right is as silent."),
            Mistake(4.105, "You threw away only the groups in which all are right. All wrong is as silent."),
            Mistake(3.379, "You multiplied by the share that is kept. The rarer a kept group, the more is sampled."),
            Mistake(0.621, "This is the share that is thrown away times four, not the number of responses sampled."),
        ),
    ),
    Exercise(
        id="06.2",
        title="Write the filter",
        minutes=12,
        difficulty=3,
        kind="code",
        stub='''
def dynamic_sampling(rewards, group_ids, wanted):
    """Which responses are trained on: those of the first `wanted` groups that carry a signal.

    rewards: tensor (N,), any finite numbers; a group carries a signal if its max − min > 1e-6
    group_ids: tensor (N,) of integers; rows of a group may stand anywhere. Groups are taken in the order in
        which their first row comes up
    wanted: integer ≥ 1, groups to keep; fewer are kept if there are not as many
    returns: tensor (N,), 1 for the responses that are kept and 0 for the others
    """
    raise NotImplementedError
''',
        hints=(
            "Go through the distinct ids in the order in which they come up: dict.fromkeys(group_ids.tolist()).",
            "For each, look at rewards[group_ids == g]. Is max − min > 1e-6, and are there fewer than `wanted` yet?",
            "Mark the rows of such a group with 1, count it, and go on.",
        ),
        solution="""
def dynamic_sampling(rewards, group_ids, wanted):
    keep = torch.zeros_like(rewards)
    found = 0
    for group in dict.fromkeys(group_ids.tolist()):
        rows = group_ids == group
        if found < wanted and rewards[rows].max() - rewards[rows].min() > 1e-6:
            keep[rows] = 1
            found += 1
    return keep
""",
        explanation="What counts is whether the rewards of a group differ, not what they are: partial "
        "credit of 0.5 for all eight is as silent as eight failures.",
        cases=(
            _filter_case(
                "the middle one of three groups is dead",
                [1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1],
                [0] * 4 + [1] * 4 + [2] * 4,
                3,
            ),
            _filter_case(
                "two would do, one is wanted", [1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1], [0] * 4 + [1] * 4 + [2] * 4, 1
            ),
            _filter_case(
                "the first group is dead, two are wanted", [0.0, 0, 1, 0, 0, 1, 1, 0, 0], [4, 4, 7, 7, 7, 9, 9, 9, 8], 2
            ),
            _filter_case(
                "shuffled rows; group 5 comes up first", [1.0, 1, 0, 0, 0, 1, 1, 0, 1], [5, 3, 5, 2, 3, 2, 5, 3, 2], 2
            ),
            _filter_case(
                "partial credit: all 0.5 is dead, 1 and 2 are not",
                [0.5, 0.5, 0.5, 1.0, 2.0, 2.0, -1.0, -1.0],
                [1, 1, 1, 2, 2, 2, 3, 3],
                3,
            ),
            _filter_case("0.1 + 0.2 and 0.3 count as equal", [0.1 + 0.2, 0.3, 0.3, 0.0, 1.0], [6, 6, 6, 1, 1], 1),
            _filter_case("all dead", [1.0, 1.0, 0.0, 0.0], [1, 1, 2, 2], 2),
        ),
        mistakes=(
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep, found = torch.zeros_like(rewards), 0
    for g in dict.fromkeys(group_ids.tolist()):
        if found < wanted and 0 < rewards[group_ids == g].mean() < 1:
            keep[group_ids == g] = 1
            found += 1
    return keep
""",
                "You ask whether the group's mean lies between 0 and 1. That is right for rewards of 0 and 1 "
                "only: eight times 0.5 passes and says nothing, and 1 against 2 is thrown away.",
            ),
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep, found = torch.zeros_like(rewards), 0
    for g in dict.fromkeys(group_ids.tolist()):
        r = rewards[group_ids == g]
        if found < wanted and r.max() - r.min() <= 1e-6:
            keep[group_ids == g] = 1
            found += 1
    return keep
""",
                "You keep the dead groups and throw away the others.",
            ),
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep = torch.zeros_like(rewards)
    for g in dict.fromkeys(group_ids.tolist()):
        r = rewards[group_ids == g]
        if r.max() - r.min() > 1e-6:
            keep[group_ids == g] = 1
    return keep
""",
                "You keep every group with a signal. A batch has room for `wanted` groups.",
            ),
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep = torch.zeros_like(rewards)
    for g in list(dict.fromkeys(group_ids.tolist()))[:wanted]:
        r = rewards[group_ids == g]
        if r.max() - r.min() > 1e-6:
            keep[group_ids == g] = 1
    return keep
""",
                "You take the first `wanted` groups and then drop the dead ones, so dead groups use up places. "
                "Others should move up.",
            ),
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep, found = torch.zeros_like(rewards), 0
    for g in sorted(set(group_ids.tolist())):
        r = rewards[group_ids == g]
        if found < wanted and r.max() - r.min() > 1e-6:
            keep[group_ids == g] = 1
            found += 1
    return keep
""",
                "You go through the groups by the size of their ids. They are taken as they come up.",
            ),
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep, found = torch.zeros_like(rewards), 0
    for g in dict.fromkeys(group_ids.tolist()):
        r = rewards[group_ids == g]
        if found < wanted and r.max() > r.min():
            keep[group_ids == g] = 1
            found += 1
    return keep
""",
                "You ask whether the rewards differ at all. 0.1 + 0.2 and 0.3 differ by 5e-17, which is rounding "
                "and no signal: compare max − min with the tolerance.",
            ),
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep, found = torch.zeros_like(rewards), 0
    for g in dict.fromkeys(group_ids.tolist()):
        r = rewards[group_ids == g]
        if found < wanted and r.max() > 0:
            keep[group_ids == g] = 1
            found += 1
    return keep
""",
                "You drop only groups without a single success. Where all are right nothing is learnt either.",
            ),
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep, found = torch.zeros_like(rewards), 0
    for i, g in enumerate(group_ids.tolist()):
        r = rewards[group_ids == g]
        if found < wanted and r.max() - r.min() > 1e-6:
            keep[i] = 1
            found += 1
    return keep
""",
                "You count responses. `wanted` is a number of groups, and a group is kept whole.",
            ),
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep, found, start = torch.zeros_like(rewards), 0, 0
    counts = [(group_ids == g).sum().item() for g in dict.fromkeys(group_ids.tolist())]
    for count in counts:
        r = rewards[start:start + count]
        if found < wanted and r.max() - r.min() > 1e-6:
            keep[start:start + count] = 1
            found += 1
        start += count
    return keep
""",
                "You take rows that stand next to each other for a group. Find the members by their id.",
            ),
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep, found = torch.zeros_like(rewards), 0
    size = int((group_ids == group_ids[0]).sum())
    for start in range(0, len(rewards), size):
        r = rewards[start:start + size]
        if found < wanted and r.max() - r.min() > 1e-6:
            keep[start:start + size] = 1
            found += 1
    return keep
""",
                "You cut the rows into pieces of one size. Groups can differ in size and stand anywhere.",
            ),
            Mistake(
                """
def dynamic_sampling(rewards, group_ids, wanted):
    keep, found = torch.zeros_like(rewards), 0
    for g in dict.fromkeys(group_ids.tolist()):
        r = rewards[group_ids == g]
        if found < wanted and r.max() - r.min() > 1e-6:
            keep[group_ids == g] = 1
            found += 1
    return keep * rewards
""",
                "You return the rewards of what is kept. Wanted is which responses are kept: 1 or 0 for each.",
            ),
        ),
        alternatives=(
            """
def dynamic_sampling(rewards, group_ids, wanted):
    groups = {}
    for reward, group in zip(rewards, group_ids):
        groups.setdefault(int(group), []).append(float(reward))
    useful = [g for g, r in groups.items() if max(r) - min(r) > 1e-6][: int(wanted)]
    return [1.0 if int(group) in useful else 0.0 for group in group_ids]
""",
            """
def dynamic_sampling(rewards, group_ids, wanted):
    rewards, group_ids = np.asarray(rewards), np.asarray(group_ids)
    ids, first = np.unique(group_ids, return_index=True)
    ids = ids[np.argsort(first)]
    useful = [g for g in ids if np.ptp(rewards[group_ids == g]) > 1e-6]
    return np.isin(group_ids, useful[:wanted])
""",
            """
def dynamic_sampling(rewards, group_ids, wanted):
    same = group_ids[:, None] == group_ids[None, :]
    infinity = float("inf")
    span = torch.where(same, rewards, -infinity).amax(1) - torch.where(same, rewards, infinity).amin(1)
    useful = span > 1e-6
    first_row = same.int().argmax(dim=1)
    leads = useful & (first_row == torch.arange(len(rewards)))
    return (useful & (leads.cumsum(0)[first_row] <= wanted)).double()
""",
        ),
    ),
    Exercise(
        id="06.3",
        title="Truncated importance weights",
        minutes=12,
        difficulty=3,
        kind="code",
        stub='''
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    """How much each sampled token counts, given who sampled it: min(w, cap).

    trainer_log_probs: tensor (B, T), log π_old of the sampled tokens, by the trainer's model
    rollout_log_probs: tensor (B, T), the same by the engine that sampled them
    mask: tensor (B, T) of 0 and 1; what stands under a 0 is finite and means nothing
    cap: number > 0
    level: "token"     w is the token's own π_old / π_rollout
           "sequence"  w is the product over the response's tokens, the same for all of them
    returns: tensor (B, T), 0 where the mask is 0
    """
    raise NotImplementedError
''',
        hints=(
            "Start from log_ratio = (trainer_log_probs − rollout_log_probs) · mask, (B, T).",
            "A product of ratios is the exp of a sum: log_ratio.sum(dim=1, keepdim=True) for the sequence.",
            "The cap comes last, after exp and after the sum, and only from above.",
        ),
        solution="""
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    log_ratio = (trainer_log_probs - rollout_log_probs) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    return log_ratio.exp().clamp(max=cap) * mask
""",
        explanation="The token was drawn from the engine's distribution and shall count as if drawn from "
        "the trainer's. The sequence weight is unbiased before the cap and varies more the longer the response; "
        "the token weight ignores that the tokens before and after were drawn by the engine too, and hardly varies.",
        cases=(
            Case(
                ([[math.log(0.5), math.log(0.2)]], [[math.log(0.25), math.log(0.4)]], [[1, 1]], 4.0, "token"),
                [[2.0, 0.5]],
                "token: 0.5/0.25 and 0.2/0.4",
            ),
            Case(
                ([[math.log(0.5), math.log(0.2)]], [[math.log(0.25), math.log(0.4)]], [[1, 1]], 4.0, "sequence"),
                [[1.0, 1.0]],
                "sequence: 2 · 0.5 = 1",
            ),
            _weights_case("cap 1.5, padding and a tool token", *_TWO_ROWS, 1.5, "token"),
            _weights_case("cap 1.5, padding and a tool token", *_TWO_ROWS, 1.5, "sequence"),
            _weights_case("nothing capped", *_TWO_ROWS, 50.0, "sequence"),
            _weights_case("a small product is not raised", [[-2.0, -2.5]], [[-0.5, -0.5]], [[1, 1]], 2.0, "sequence"),
            _weights_case(
                "a row without tokens",
                [[-1.0, -1.0], [0.0, 0.0]],
                [[-2.0, -1.5], [9.0, 9.0]],
                [[1, 1], [0, 0]],
                2.0,
                "token",
            ),
        ),
        mistakes=(
            Mistake(
                """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    d = (rollout_log_probs - trainer_log_probs) * mask
    d = d.sum(1, keepdim=True) if level == "sequence" else d
    return d.exp().clamp(max=cap) * mask
""",
                "The ratio is upside down. What one wants (the trainer's policy) stands above, what was drawn from "
                "(the engine) below.",
            ),
            Mistake(
                """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    d = (trainer_log_probs - rollout_log_probs) * mask
    d = d.sum(1, keepdim=True) if level == "sequence" else d
    return d.exp() * mask
""",
                "Nothing is capped: these are plain importance weights, whose variance grows without bound.",
            ),
            Mistake(
                """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    d = (trainer_log_probs - rollout_log_probs) * mask
    d = d.sum(1, keepdim=True) if level == "sequence" else d
    return d.exp().clamp(1 / cap, cap) * mask
""",
                "You also raise small weights to 1/cap. A small weight does no harm: only large ones blow up the "
                "variance, so the cap is from above only.",
            ),
            Mistake(
                """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    d = (trainer_log_probs - rollout_log_probs) * mask
    if level == "sequence":
        d = d.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return d.exp().clamp(max=cap) * mask
""",
                "Your sequence weight is the geometric mean of the token ratios, as in GSPO. The probability of a "
                "response is the product, without the root.",
            ),
            Mistake(
                """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    d = (trainer_log_probs - rollout_log_probs) * mask
    w = d.exp().clamp(max=cap)
    if level == "sequence":
        w = w.prod(1, keepdim=True)
    return w * mask
""",
                "You cap the tokens before you multiply. A product of capped ratios can still be far beyond the "
                "cap, and is wrong where one large and one small ratio cancel.",
            ),
            Mistake(
                """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    d = trainer_log_probs - rollout_log_probs
    d = d.sum(1, keepdim=True) if level == "sequence" else d
    return d.exp().clamp(max=cap) * mask
""",
                "Your product runs over padding and tool tokens too. Only what the policy wrote counts.",
            ),
            Mistake(
                """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    d = (trainer_log_probs - rollout_log_probs) * mask
    return d.exp().clamp(max=cap) * mask
""",
                "Both levels give the token's own weight. At the sequence level all tokens of a response share one.",
            ),
            Mistake(
                """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    d = (trainer_log_probs - rollout_log_probs) * mask
    d = d.sum(1, keepdim=True) if level == "sequence" else d
    return d.exp().clamp(max=cap) * torch.ones_like(mask)
""",
                "Where the mask is 0 the weight is 0.",
            ),
            Mistake(
                """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    d = (trainer_log_probs - rollout_log_probs) * mask
    d = d.sum(1, keepdim=True) if level == "sequence" else d
    return d.clamp(max=cap) * mask
""",
                "You return the log of the ratio; the exp is missing.",
            ),
            Mistake(
                """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    d = (trainer_log_probs - rollout_log_probs) * mask
    d = d.sum(1, keepdim=True) if level == "sequence" else d
    w = d.exp() * mask
    return torch.where(w > cap, 0, w)
""",
                "You drop what weighs more than the cap. That is a rule of its own, TRL's sequence_mask; a truncated "
                "weight stays, and counts as much as the cap.",
            ),
        ),
        alternatives=(
            """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    weights = []
    for new, old, active in zip(trainer_log_probs, rollout_log_probs, mask):
        ratios = [math.exp(float(n) - float(o)) if a else 1.0 for n, o, a in zip(new, old, active)]
        if level == "sequence":
            ratios = [math.prod(ratios)] * len(ratios)
        weights.append([min(w, cap) if a else 0.0 for w, a in zip(ratios, active)])
    return weights
""",
            """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    new, old, mask = (np.asarray(t, dtype=float) for t in (trainer_log_probs, rollout_log_probs, mask))
    log_ratio = np.where(mask > 0, new - old, 0.0)
    if level == "sequence":
        log_ratio = np.broadcast_to(log_ratio.sum(axis=1, keepdims=True), mask.shape)
    return np.minimum(np.exp(log_ratio), cap) * mask
""",
            """
def importance_weights(trainer_log_probs, rollout_log_probs, mask, cap, level):
    ratio = torch.where(mask > 0, (trainer_log_probs - rollout_log_probs).exp(), 1.0)
    if level == "sequence":
        ratio = ratio.prod(dim=1, keepdim=True).expand_as(ratio)
    return torch.where(mask > 0, torch.minimum(ratio, torch.full_like(ratio, cap)), 0.0)
""",
        ),
    ),
    Exercise(
        id="06.4",
        title="Find the fault: run A",
        minutes=4,
        difficulty=2,
        kind="choose",
        stub="""
# What is wrong with run A?
#   A  the sampler still has the weights of an earlier step
#   B  the learning rate is too high
#   C  replies are sampled at one temperature and scored at another
#   D  the engine computes in bfloat16, the trainer in float32
#   E  the groups are dead
#   F  the end-of-sequence tokens are masked out
choice = None
""",
        hints=(
            "Before the first update nothing has been learnt. What can differ between sampler and trainer then?",
            "sampler_mismatch stays, so it does not come from learning. It is 0.4 nats a token: is that rounding?",
        ),
        solution="C",
        explanation="Sampled at 0.6, scored at 1. The two distributions differ by a fixed transform, so the "
        "mismatch is large at once and stays. The run improves another policy than the one that writes.",
        mistakes=(
            Mistake("A", "In the first step there are no earlier weights: the mismatch would start at 0 and grow."),
            Mistake("B", "Too large steps show in ratios, KL and entropy. Before the first step they can do nothing."),
            Mistake("D", "Rounding to bfloat16 made 0.04 a token in section 3. This is ten times as much."),
            Mistake("E", "Dead groups show in dead_groups, and they have no mismatch: nothing of them is scored."),
            Mistake("F", "What is masked out is not compared, so it cannot be what makes sampler_mismatch large."),
        ),
    ),
    Exercise(
        id="06.5",
        title="Find the fault: run B",
        minutes=4,
        difficulty=2,
        kind="choose",
        stub="""
# What is wrong with run B?
#   A  the sampler gets the new weights every few steps only
#   B  replies are sampled at one temperature and scored at another
#   C  the mask is off by one token
#   D  the learning rate is too high
#   E  the engine computes in bfloat16, the trainer in float32
#   F  the reference model of the KL penalty is out of date
choice = None
""",
        hints=(
            "What is different between the steps in which the mismatch is 0 and the others?",
            "sampler_mismatch grows with what has been learnt since, and something sets it back.",
        ),
        solution="A",
        explanation="The replies of a step come from the weights of up to seven steps before. The trainer weighs each "
        "token by min(π_old/π_rollout, 2), which mends what a small mismatch does. Here it reaches 0.5 to 1.2 nats a "
        "token in each round.",
        mistakes=(
            Mistake("B", "Another temperature is there from the first step on, and nothing sets it back to 0."),
            Mistake("C", "A wrong mask compares the wrong tokens in every step, the first included."),
            Mistake(
                "D",
                "With the right weights on both sides, even large steps leave the mismatch at 0: it compares the "
                "sampler with the trainer before the update, not the trainer with itself.",
            ),
            Mistake("E", "Rounding is there in every step, the first included, and far smaller: 0.04 in section 3."),
            Mistake("F", "The reference does not take part in sampler_mismatch. An old one shows in kl."),
        ),
    ),
    Exercise(
        id="06.6",
        title="Find the fault: run C",
        minutes=5,
        difficulty=2,
        kind="choose",
        stub="""
# What is wrong with run C?
#   A  each reply's loss is divided by its own length
#   B  the end-of-sequence tokens are masked out
#   C  the learning rate is too high, and entropy has collapsed
#   D  the reward finds the answer anywhere in the reply
#   E  the KL penalty is missing
#   F  the sampler still has the weights of an earlier step
choice = None
""",
        hints=(
            "Reward and exam read the same replies. How can they disagree?",
            "One of four letters is right, and a reply has room for six words. What can one do with them?",
        ),
        solution="D",
        explanation="The policy lists all four letters, and the right one is among them. An exam that the reward "
        "cannot reach, and reading a few replies, are the only ways to see it.",
        mistakes=(
            Mistake("A", "That makes wrong replies longer. It does not raise the reward."),
            Mistake("B", "Then right replies do not end, but what they say first is still judged by the same rule."),
            Mistake("C", "A collapse holds the reward where it was. Here it climbs, and the exam does not follow."),
            Mistake(
                "E",
                "A penalty would slow this down, as it slows everything. It is not why reward and exam disagree.",
            ),
            Mistake("F", "Look at sampler_mismatch: it is 0 throughout."),
        ),
    ),
)
