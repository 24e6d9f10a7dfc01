"""Exercises of lesson 10: the capstone."""

from .exercise import Case, Exercise, Mistake

EXERCISES = (
    Exercise(
        id="10.1",
        title="One of k",
        minutes=10,
        difficulty=3,
        kind="code",
        stub='''
def pass_at_k(right, k):
    """Chance that at least one of k replies is right, averaged over the problems.

    Each problem was tried n times. Of all ways to pick k of its n replies, count the share that holds a
    right one; then take the mean over the problems.

    right: tensor (P, n) of 0 and 1, reply i to problem p right or not
    k: int, from 1 to n
    returns: one number from 0 to 1
    """
    raise NotImplementedError
''',
        hints=(
            "Count the ways that fail: all k replies come from the wrong ones. math.comb(n, k) is the number of ways "
            "to pick k of n.",
            "With c right replies of n, a problem's share is 1 − C(n − c, k) / C(n, k). math.comb gives 0 where k is "
            "larger than n − c, so nothing needs a special case.",
        ),
        solution="""
def pass_at_k(right, k):
    problems, n = right.shape
    shares = [1 - math.comb(n - int(c), k) / math.comb(n, k) for c in right.sum(dim=1)]
    return sum(shares) / problems
""",
        explanation="The mean over all picks is exactly 1 − (1 − p)^k on average, whatever n is. The tempting "
        "1 − (1 − c/n)^k puts each reply back before the next is drawn, and is too small on average. The library has "
        "it as runs.pass_at_k.",
        cases=(
            Case(([[1, 0, 0, 0]], 1), 0.25, "one of four right, k = 1"),
            Case(([[1, 0, 0, 0]], 2), 0.5, "one of four right, k = 2"),
            Case(([[1, 1, 0, 0]], 2), 5 / 6, "two of four right, k = 2"),
            Case(([[0, 0, 0, 0]], 3), 0.0, "all wrong"),
            Case(([[0, 1, 0, 0]], 4), 1.0, "k = n with one right"),
            Case(([[1, 1, 1, 1], [0, 0, 0, 0]], 3), 0.5, "one problem always right, one never"),
            Case(([[0, 0, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0]], 2), 0.5, "three problems, k = 2"),
            Case(([[0, 0, 0, 0, 0, 0, 1, 1]], 3), 36 / 56, "two of eight right, the last ones, k = 3"),
        ),
        mistakes=(
            Mistake(
                """
def pass_at_k(right, k):
    share = right.double().mean(dim=1)
    return (1 - (1 - share) ** k).mean()
""",
                "You put each reply back before the next is drawn. The k replies are different ones: two of four with "
                "one right make 1/2, not 7/16.",
            ),
            Mistake(
                """
def pass_at_k(right, k):
    return right[:, :k].amax(dim=1).double().mean()
""",
                "You look at the first k replies only. That is right on average and wastes the others: take the mean "
                "over all ways to pick k.",
            ),
            Mistake(
                """
def pass_at_k(right, k):
    return right.double().mean()
""",
                "This is pass@1, whatever k is.",
            ),
            Mistake(
                """
def pass_at_k(right, k):
    return right.amax(dim=1).double().mean()
""",
                "You ask whether any of all n replies is right. That is pass@n, whatever k is.",
            ),
            Mistake(
                """
def pass_at_k(right, k):
    n, c = right.numel(), int(right.sum())
    return 1 - math.comb(n - c, k) / math.comb(n, k)
""",
                "You pool the replies of all problems. k replies to one problem must hold a right one, and an easy "
                "problem cannot answer for a hard one.",
            ),
            Mistake(
                """
def pass_at_k(right, k):
    n = right.shape[1]
    return sum(math.comb(int(c), k) / math.comb(n, k) for c in right.sum(dim=1)) / len(right)
""",
                "This is the chance that all k are right. One is enough.",
            ),
            Mistake(
                """
def pass_at_k(right, k):
    n = right.shape[1]
    return sum(math.comb(n - int(c), k) / math.comb(n, k) for c in right.sum(dim=1)) / len(right)
""",
                "This is the chance that all k are wrong. Asked is that one of them is not.",
            ),
            Mistake(
                """
def pass_at_k(right, k):
    n = right.shape[1]
    return sum(1 - math.comb(int(c), k) / math.comb(n, k) for c in right.sum(dim=1)) / len(right)
""",
                "This is the chance that one of the k is wrong. Count the picks from the n − c wrong replies.",
            ),
            Mistake(
                """
def pass_at_k(right, k):
    n = right.shape[1]
    return sum(1 - math.comb(n - int(c), k) / math.comb(n, k) for c in right.sum(dim=1))
""",
                "You add up the problems. Take their mean.",
            ),
            Mistake(
                """
def pass_at_k(right, k):
    blocks = right[:, : right.shape[1] // k * k].reshape(len(right), -1, k)
    return blocks.amax(dim=2).double().mean()
""",
                "You cut the replies into blocks of k. That is right on average and wastes the other picks: two right "
                "replies in one block count once.",
            ),
        ),
        alternatives=(
            """
def pass_at_k(right, k):
    from course_lib import runs

    return sum(runs.pass_at_k(int(row.sum()), len(row), k) for row in right) / len(right)
""",
            """
def pass_at_k(right, k):
    from itertools import combinations

    picks = list(combinations(range(right.shape[1]), k))
    return torch.stack([right[:, list(pick)].amax(dim=1).double() for pick in picks]).mean()
""",
            """
def pass_at_k(right, k):
    right = np.asarray(right)
    n, c = right.shape[1], right.sum(axis=1)
    wrong = np.ones(len(right))
    for i in range(k):
        wrong = wrong * np.maximum(n - c - i, 0) / (n - i)
    return (1 - wrong).mean()
""",
        ),
    ),
    Exercise(
        id="10.2",
        title="What the records show",
        minutes=8,
        difficulty=3,
        kind="choose",
        stub="""
# The four runs above began alike, with one seed, and took the same exam of 200 problems. Which sentence do
# their records bear out?
#   A  The symmetric clip is the better one: it has the highest exam.
#   B  The KL penalty keeps the policy less certain than sums: it pulls towards a model that is uncertain.
#   C  The curriculum learns faster: early in the run it has the highest reward.
#   D  The penalty keeps the policy from learning: its reward at the end is the lowest.
#   E  Clip-higher finds better answers: it ends with more entropy than the symmetric clip.
#   F  The curriculum was of no use: it ends where sums ends.
choice = None
""",
        hints=(
            "Ask of each sentence what it compares: the same exam, or rewards on different problems? And is the "
            "difference larger than what another seed or another exam would have made?",
            "The exams lie between 62 % and 66 %, each with an interval of 13 points. Which sentence does not need a "
            "difference between them?",
        ),
        solution="B",
        explanation="The penalty pulls towards the reference model, whose replies at temperature 1.2 are nearly "
        "random: entropy 3.1 nats at the start. It is a mechanism with a measured trace: a kl that stops growing near "
        "0.7 nats, and an entropy two to five times that of sums from step 8 to step 21. And it needs no difference in "
        "the exam, where there is none to be told from luck.",
        mistakes=(
            Mistake(
                "A",
                "66 against 63 of a hundred is six problems of 200, and the intervals share most of their length. One "
                "seed each: call it equal.",
            ),
            Mistake(
                "C",
                "Its first half is on easier problems. Rewards compare runs on the same problems; on the exam it is "
                "the last one after eight steps and after sixteen.",
            ),
            Mistake(
                "D",
                "Reward is that of samples at temperature 1.2, and a policy with more entropy errs more often when it "
                "is sampled. Taken greedily, its exam is as good as the others'.",
            ),
            Mistake(
                "E",
                "That its entropy is higher is in the records. That the answers are better is not: its exam is not "
                "higher.",
            ),
            Mistake(
                "F",
                "Equal ends of one seed each do not show that it was of no use, as they do not show that it was: with "
                "half its steps on other problems it ended level. More seeds or other lengths might tell.",
            ),
        ),
    ),
    Exercise(
        id="10.3",
        title="Pay for the answer",
        minutes=15,
        difficulty=3,
        kind="code",
        stub='''
def research_reward(actions, answer):
    """1.0 if the agent answered, and its answer is right; else 0.0.

    An answer is an action whose first word is "answer", as in "answer Otto Kern"; the words behind it, if
    there are any, are compared with the right answer. The first one ends the attempt: whatever comes later
    does not count. Case, the number of spaces and a period at the end make no difference, in the action
    and in the right answer.

    actions: list of str, what the agent wrote in its acting calls, in order; anything at all
    answer: str, the right answer
    returns: 1.0 or 0.0
    """
    raise NotImplementedError
''',
        hints=(
            "Go through the actions until one has \"answer\" as its first word; an attempt without one gets 0.",
            "Compare all of the words behind it with the answer, both in lower case, split at spaces, and without the "
            "period at the end.",
        ),
        solution="""
def research_reward(actions, answer):
    def words(text):
        return text.lower().strip(" .\\n").split()

    for action in actions:
        said = words(action)
        if said and said[0] == "answer":
            return float(said[1:] == words(answer))
    return 0.0
""",
        explanation="Right or wrong, and nothing for being on the way. Each door left open here is found in training: "
        "an answer that lists all colours, a second try, a page opened for its own sake. The environment of this "
        "lesson pays by the same rule.",
        cases=(
            Case((["open Ada Lee", "answer red"], "red"), 1.0, "a look-up, then the right answer"),
            Case((["open Ada Lee", "answer blue"], "red"), 0.0, "a wrong answer"),
            Case((["open Ada Lee", "open Otto Kern", "search red ship"], "red"), 0.0, "never answered"),
            Case((["answer red blue green"], "red"), 0.0, "an answer that lists everything"),
            Case((["answer blue", "answer red"], "red"), 0.0, "a second try"),
            Case((["answer red", "answer blue"], "red"), 1.0, "right, then something else"),
            Case((["answer red", "open Ada Lee"], "red"), 1.0, "right, then a look-up"),
            Case((["open otto kern", "  Answer  otto  KERN. "], "Otto Kern"), 1.0, "case, spaces and a period"),
            Case((["", "answer"], "red"), 0.0, "nothing behind the word"),
            Case((["the answer red", "answered red"], "red"), 0.0, "not the word, or not in front"),
            Case((["answer dark red"], "red"), 0.0, "the right word at the end of a longer answer"),
            Case((["open a", "open b", "open c", "answer red"], "red"), 1.0, "right after many look-ups"),
            Case((["answer", "answer red"], "red"), 0.0, "the word alone, which ends the attempt"),
            Case((["answers come later", "answer red"], "red"), 1.0, "a longer word in front, then the right answer"),
            Case((["answer Kern Otto"], "Otto Kern"), 0.0, "the right words in another order"),
            Case((["answer ottokern"], "Otto Kern"), 0.0, "the right words without the space"),
            Case((["answer red"], "Red."), 1.0, "a period in the right answer"),
        ),
        mistakes=(
            Mistake(
                """
def research_reward(actions, answer):
    return float(answer.lower() in " ".join(actions).lower())
""",
                "You look for the words anywhere. They also occur in a search, and in an answer that lists everything.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    said = [" ".join(a.lower().strip(" .").split()) for a in actions]
    return float(f"answer {answer.lower().strip(' .')}" in said)
""",
                "Any of several answers may be the right one. With enough calls a policy tries every colour: the first "
                "answer ends the attempt.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    said = [" ".join(a.lower().strip(" .").split()) for a in actions]
    said = [s for s in said if s.split()[:1] == ["answer"]]
    return float(bool(said) and said[-1] == f"answer {answer.lower().strip(' .')}")
""",
                "You score the last answer. The first one ends the attempt.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    for action in actions:
        if action.startswith("answer"):
            return float(action == f"answer {answer}")
    return 0.0
""",
                "You compare spellings. Case, spaces and a period at the end should make no difference.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    for action in actions:
        said = action.lower().strip(" .").split()
        if said and said[0] == "answer":
            right = answer.lower().strip(" .").split()
            return float(all(word in said[1:] for word in right))
    return 0.0
""",
                "An answer that lists everything has the right words among the others. Compare the whole of it.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    for i, action in enumerate(actions):
        said = action.lower().strip(" .").split()
        if said and said[0] == "answer":
            right = said[1:] == answer.lower().strip(" .").split()
            return 1.0 if right else 0.1 * i
    return 0.1 * len(actions)
""",
                "You pay for each look-up on the way. An agent that opens pages and never answers then earns more than "
                "one that tries and errs: what you pay for is what you get.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    for i, action in enumerate(actions):
        said = action.lower().strip(" .").split()
        if said and said[0] == "answer":
            return float(said[1:] == answer.lower().strip(" .").split()) * (1 - 0.1 * i)
    return 0.0
""",
                "You take something off for each call. A hard question needs more of them, and a guess at once then "
                "competes with looking it up. Asked is 1 or 0.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    said = actions[-1].lower().strip(" .").split() if actions else []
    return float(said[:1] == ["answer"] and said[1:] == answer.lower().strip(" .").split())
""",
                "You look at the last action only. The first answer counts, wherever it stands.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    for action in actions:
        said = action.lower().strip(" .").split()
        if said and said[0].startswith("answer"):
            return float(said[1:] == answer.lower().strip(" .").split())
    return 0.0
""",
                "You take a word that only begins with \"answer\" for it.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    for action in actions:
        said = action.lower().strip(" .").split()
        if said and said[0] == "answer":
            return float(sorted(said[1:]) == sorted(answer.lower().strip(" .").split()))
    return 0.0
""",
                "You compare the words without their order.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    for action in actions:
        said = action.lower().strip(" .").split()
        if said and said[0] == "answer":
            return 1.0 if said[1:] == answer.lower().strip(" .").split() else -1.0
    return 0.0
""",
                "You punish a wrong answer. Asked is 1 or 0: below that, never answering would be better than trying.",
            ),
            Mistake(
                """
def research_reward(actions, answer):
    for action in actions:
        said = action.lower().strip(" .").split()
        if len(said) > 1 and said[0] == "answer":
            return float(said[1:] == answer.lower().strip(" .").split())
    return 0.0
""",
                "The word alone ends the attempt as well: it is an answer that says nothing.",
            ),
        ),
        alternatives=(
            r"""
def research_reward(actions, answer):
    import re

    plain = lambda text: re.sub(r"\s+", " ", text).strip(" .").casefold()
    tries = [plain(action).partition(" ")[2] for action in actions if re.match(r"answer\b(?!\S)", plain(action))]
    return 1.0 if tries and tries[0] == plain(answer) else 0.0
""",
            """
def research_reward(actions, answer):
    plain = lambda text: " ".join(text.casefold().split()).rstrip(" .")
    first = next((plain(a) for a in actions if (plain(a) + " ").startswith("answer ")), None)
    return int(first == "answer " + plain(answer))
""",
            """
def research_reward(actions, answer):
    from course_lib.research import Document, Library, Question, RandomLibraries, ResearchTask

    class Letters:
        def encode(self, text, add_special_tokens):
            return list(map(ord, text))

    library = Library([Document("a", "b")])
    task = ResearchTask(RandomLibraries(held_out=0), context_budget=10**6, max_calls=10**6)
    episode = task.open(Question("q", answer, asked="q", library=library), Letters())
    for action in actions:
        if not episode.done:
            episode.step([], action)
            if not episode.done:
                episode.step([], "noted")
    return episode.reward
""",
        ),
    ),
    Exercise(
        id="10.4",
        title="Will it fit?",
        minutes=6,
        difficulty=2,
        kind="predict",
        stub="""
# PPO on a model of 7.6 billion parameters, with AdamW. Policy and critic are two models of this size, both
# trained; a third one, the reference of the KL penalty, is not. Each number of weights, gradients and moments
# is a float32. How many GiB (2^30 bytes) do weights, gradients and moments take?
gib = None
""",
        hints=(
            "Count the bytes for one parameter: what is kept for a model that is trained, and for one that is not?",
            "Trained: weight, gradient, and the two moments of AdamW, 4 bytes each. The reference: its weight.",
        ),
        solution=254.8,
        explanation="(16 + 16 + 4) bytes · 7.6·10⁹ / 2³⁰ = 254.8. GRPO without a penalty takes 16 bytes a parameter, "
        "113.2 GiB: the critic is the half that the group's mean replaces.",
        tolerance=1.0,
        mistakes=(
            Mistake(113.2, "This is a policy alone: GRPO without a KL penalty. PPO trains a critic as well."),
            Mistake(141.6, "Policy and reference: GRPO with a KL penalty. PPO trains a critic as well."),
            Mistake(226.5, "Policy and critic are there. The reference of the KL penalty has weights too."),
            Mistake(169.9, "The critic is trained: it has gradients and moments, not its weights alone."),
            Mistake(273.6, "These are GB of 10⁹ bytes. A GiB has 2³⁰, 7 % more."),
            Mistake(127.4, "Each number takes 4 bytes in float32. Two would be bfloat16."),
            Mistake(198.2, "AdamW keeps two moments for each parameter: of the gradient and of its square."),
            Mistake(270.0, "This is the peak of the figure, with copies, activations and logits. Leave them out."),
            Mistake(339.7, "Nothing trains the reference: it has weights, and neither gradients nor moments."),
        ),
    ),
)
