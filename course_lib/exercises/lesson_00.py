"""The exercise of lesson 00: it shows how exercises work."""

from .exercise import Case, Exercise, Mistake

EXERCISES = (
    Exercise(
        id="00.1",
        title="Better than average",
        minutes=3,
        difficulty=1,
        kind="code",
        stub='''
def better_than_average(rewards):
    """How much better than the mean of its group each response scored.

    rewards: tensor (G,), one reward a response
    returns: tensor (G,), above 0 where a response beat the mean, 0 where it equals it; one success among
        four failures beat it by 0.8
    """
    raise NotImplementedError
''',
        hints=(
            "The mean is one number for the whole group; rewards.mean() computes it.",
            "Subtracting one number from a tensor subtracts it from every entry.",
        ),
        solution="""
def better_than_average(rewards):
    return rewards - rewards.mean()
""",
        explanation="What is left says which responses to make more likely and which less. The values of "
        "a group always sum to 0: what some gain, others lose.",
        cases=(
            Case(([1.0, 0.0, 0.0, 1.0],), [0.5, -0.5, -0.5, 0.5], "two of four right"),
            Case(([1.0, 0.0, 0.0, 0.0],), [0.75, -0.25, -0.25, -0.25], "one of four right"),
            Case(([1.0, 1.0, 1.0],), [0.0, 0.0, 0.0], "all right"),
            Case(([-2.0, 4.0, 0.5, 1.5, 6.0],), [-4.0, 2.0, -1.5, -0.5, 4.0], "rewards that are not 0 or 1"),
            Case(([0.7],), [0.0], "a group of one"),
        ),
        mistakes=(
            Mistake(
                """
def better_than_average(rewards):
    return rewards.mean() - rewards
""",
                "The sign is turned round: a response that beats the mean should come out positive.",
            ),
            Mistake(
                """
def better_than_average(rewards):
    return rewards - rewards.sum()
""",
                "You subtract the sum of the rewards. The mean is the sum divided by the number of responses.",
            ),
            Mistake(
                """
def better_than_average(rewards):
    return rewards - rewards.median()
""",
                "You subtract the median. With 0/1 rewards that is nearly always 0 or 1; the mean is the success rate.",
            ),
            Mistake(
                """
def better_than_average(rewards):
    return rewards.mean() + 0 * rewards
""",
                "You return the mean itself. Asked for is how far each reward lies above it.",
            ),
            Mistake(
                """
def better_than_average(rewards):
    return rewards / rewards.mean()
""",
                "You divide by the mean. The question is how far above it, not how many times as large.",
            ),
            Mistake(
                """
def better_than_average(rewards):
    return (rewards - rewards.mean()) / rewards.std(correction=0).clamp(min=1e-9)
""",
                "You also divide by the standard deviation. That is GRPO's next step (exercise 05.1); only subtract.",
            ),
            Mistake(
                """
def better_than_average(rewards):
    return (rewards - rewards.mean()) / rewards.std().nan_to_num(1).clamp(min=1e-9)
""",
                "You also divide by the sample standard deviation (G − 1). GRPO divides too (05.1); only subtract.",
            ),
            Mistake(
                """
def better_than_average(rewards):
    others = (rewards.sum() - rewards) / max(len(rewards) - 1, 1)
    return rewards - others
""",
                "You subtract the mean of the *other* responses. That is leave-one-out, of lesson 03; here take the "
                "mean of the whole group.",
            ),
            Mistake(
                """
def better_than_average(rewards):
    return (rewards > rewards.mean()) * 1.0
""",
                "You say whether a reward lies above the mean. Asked for is how far above it, or below.",
            ),
        ),
        alternatives=(
            """
def better_than_average(rewards):
    average = sum(rewards) / len(rewards)
    return [reward - average for reward in rewards]
""",
            """
def better_than_average(rewards):
    rewards = np.asarray(rewards)
    return rewards - np.mean(rewards)
""",
            """
def better_than_average(rewards):
    size = len(rewards)
    centring = torch.eye(size, dtype=rewards.dtype) - 1 / size
    return centring @ rewards
""",
        ),
    ),
)
