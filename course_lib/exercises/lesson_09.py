"""Exercises of lesson 09: fine-tuning a small model."""

import math

from .exercise import Case, Exercise, Mistake


def _paired_case(label, gained, lost, right, wrong):
    """`right` and `wrong` problems stay what they are; the others change."""
    before = [0] * gained + [1] * lost + [1] * right + [0] * wrong
    after = [1] * gained + [0] * lost + [1] * right + [0] * wrong
    order = sorted(range(len(before)), key=lambda i: (7 * i + 3) % (len(before) + 1))  # mixed, always the same way
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(max(gained, lost), n + 1))
    return Case(([before[i] for i in order], [after[i] for i in order]), min(1.0, 2 * tail / 2**n), label)


EXERCISES = (
    Exercise(
        id="09.1",
        title="Tokens in a tree",
        minutes=5,
        difficulty=2,
        kind="predict",
        stub="""
# A batch has 12 prompts with 8 responses each. Every prompt starts with the same 30 tokens and goes on
# with 15 tokens of its own; no two prompts agree in the first of these. Every response has 6 tokens. The
# 8 responses to one prompt all begin with the same token, and no two of them agree in the second.
# How many tokens does the model run when the batch is laid out as a token tree?
tokens_run = None
""",
        hints=(
            "Count level by level: what all 96 rows share, what the 8 rows of a group share, what is a row's own.",
            "Shared by all: 30. Shared within a group: 15 tokens of the prompt and the first token of the response.",
        ),
        solution=702.0,
        explanation="30 + 12 · (15 + 1) + 12 · 8 · 5 = 702, where the padded batch has 96 · 51 = 4,896 places. A tree "
        "does not know what a prompt is: whatever begins alike is run once.",
        tolerance=0.5,
        mistakes=(
            Mistake(4896.0, "This is the padded batch: 96 rows of 51 tokens, the shared ones run again in every row."),
            Mistake(
                786.0,
                "You share the prompts only. The first token of the 8 responses stands behind the same tokens too, "
                "so it is one node.",
            ),
            Mistake(
                1032.0,
                "You run the first 30 tokens once for each prompt. They begin all 96 rows: one path in the tree.",
            ),
            Mistake(1116.0, "Each prompt once and each response in full: two things that begin alike are missing."),
            Mistake(
                2046.0,
                "You share the first 30 tokens only. The 8 responses to a prompt share its own 15 tokens as well.",
            ),
            Mistake(
                222.0,
                "30 + 12 · (15 + 1) is what is shared. The 8 responses of a group go on apart, and each is run.",
            ),
        ),
    ),
    Exercise(
        id="09.2",
        title="Is the improvement real?",
        minutes=12,
        difficulty=3,
        kind="code",
        stub='''
def sign_test(before, after):
    """Exact two-sided p-value of the change between two exams on the same problems.

    Problems that stayed right or stayed wrong say nothing. If training had changed nothing, each of the n
    problems that did change would be as likely gained (wrong → right) as lost: gained ~ Binomial(n, 1/2).
    The p-value is the probability of a split at least as uneven as the one seen, in either direction.

    before, after: tensors (N,) of 0 and 1, problem i solved or not
    returns: one number in (0, 1]; 1 where nothing changed
    """
    raise NotImplementedError
''',
        hints=(
            "Count gained (before 0, after 1) and lost (before 1, after 0); n is their sum. The rest is not needed.",
            "One tail: Σ C(n, k) / 2^n for k from the larger of the two counts to n. math.comb(n, k) is C(n, k).",
            "The other tail is as large by symmetry. Twice one tail can exceed 1 when the two counts are equal; "
            "a probability cannot.",
        ),
        solution="""
def sign_test(before, after):
    gained = int(((before == 0) & (after == 1)).sum())
    lost = int(((before == 1) & (after == 0)).sum())
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(max(gained, lost), n + 1)) / 2**n
    return min(1.0, 2 * tail)
""",
        explanation="This is McNemar's test in its exact form. Both exams have the same problems, so most of the "
        "randomness of which problems were drawn cancels: a difference can be clear although the two "
        "intervals overlap. A p-value says how surprising the change would be, not how large it is.",
        cases=(
            Case(([0, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 0]), 0.25, "three gained, none lost"),
            Case(([0, 1, 0, 1], [0, 1, 0, 1]), 1.0, "nothing changed"),
            Case(([0] * 5 + [1] * 3, [1] * 5 + [0] + [1] * 2), 0.21875, "five gained, one lost"),
            Case(([1, 1, 1, 1, 0], [0, 0, 0, 0, 0]), 0.125, "four lost, none gained"),
            Case(([0, 0, 1, 1, 1], [1, 1, 0, 0, 1]), 1.0, "two gained, two lost"),
            _paired_case("thirty gained, twelve lost, 200 problems", 30, 12, 60, 98),
            _paired_case("two gained, nine lost, 40 problems", 2, 9, 20, 9),
        ),
        mistakes=(
            Mistake(
                """
def sign_test(before, after):
    gained = int(((before == 0) & (after == 1)).sum())
    lost = int(((before == 1) & (after == 0)).sum())
    n = gained + lost
    return sum(math.comb(n, k) for k in range(max(gained, lost), n + 1)) / 2**n
""",
                "This is one tail. You would have been as surprised by a change the other way, so both count.",
            ),
            Mistake(
                """
def sign_test(before, after):
    gained = int(((before == 0) & (after == 1)).sum())
    lost = int(((before == 1) & (after == 0)).sum())
    n = gained + lost
    return 2 * sum(math.comb(n, k) for k in range(max(gained, lost), n + 1)) / 2**n
""",
                "Where the two counts are equal the tails overlap in the middle, and twice one tail is more than 1.",
            ),
            Mistake(
                """
def sign_test(before, after):
    gained = int(((before == 0) & (after == 1)).sum())
    lost = int(((before == 1) & (after == 0)).sum())
    n = gained + lost
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(gained, n + 1)) / 2**n)
""",
                "You sum from the number of gained problems upwards, also where more were lost. The larger count marks "
                "the tail.",
            ),
            Mistake(
                """
def sign_test(before, after):
    gained = int(((before == 0) & (after == 1)).sum())
    lost = int(((before == 1) & (after == 0)).sum())
    n = gained + lost
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(max(gained, lost) + 1, n + 1)) / 2**n) if n else 1.0
""",
                "Your tail starts one too late: the split that was seen is itself at least as uneven as the one seen.",
            ),
            Mistake(
                """
def sign_test(before, after):
    gained = int(((before == 0) & (after == 1)).sum())
    lost = int(((before == 1) & (after == 0)).sum())
    n = len(before)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(max(gained, lost), n + 1)) / 2**n)
""",
                "Your n counts all problems. Those that stayed as they were are no coin tosses: n counts the changed.",
            ),
            Mistake(
                """
def sign_test(before, after):
    n, p, q = len(before), float((before == 1).sum()) / len(before), float((after == 1).sum()) / len(after)
    both = (p + q) / 2
    spread = math.sqrt(2 * both * (1 - both) / n)
    return math.erfc(abs(q - p) / spread / math.sqrt(2))
""",
                "You compare the two totals as if two exams with different problems had been taken. The problems are "
                "the same: pair them.",
            ),
            Mistake(
                """
def sign_test(before, after):
    gained = int(((before == 0) & (after == 1)).sum())
    lost = int(((before == 1) & (after == 0)).sum())
    return math.erfc(abs(gained - lost) / math.sqrt(2 * (gained + lost))) if gained + lost else 1.0
""",
                "This is the normal approximation (the χ² form of McNemar's test). With few changes it is far off; the "
                "exact sum is no more work.",
            ),
        ),
        alternatives=(
            """
def sign_test(before, after):
    change = [int(a) - int(b) for b, a in zip(before, after)]
    small, n = min(change.count(1), change.count(-1)), change.count(1) + change.count(-1)
    p = 2 * sum(math.factorial(n) // math.factorial(k) // math.factorial(n - k) for k in range(small + 1)) / 2**n
    return p if p < 1 else 1.0
""",
            """
def sign_test(before, after):
    change = np.asarray(after) - np.asarray(before)
    n, net = int(np.abs(change).sum()), int(abs(change.sum()))
    chances = np.ones(1)
    for _ in range(n):
        chances = np.convolve(chances, [0.5, 0.5])
    uneven = np.abs(2 * np.arange(n + 1) - n)
    return chances[uneven >= net].sum()
""",
            """
def sign_test(before, after):
    change = (after - before).double()
    n, net = change.abs().sum(), change.sum().abs()
    k = torch.arange(int(n) + 1, dtype=torch.float64)
    log_chances = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1) - n * math.log(2)
    return log_chances.exp()[(2 * k - n).abs() >= net].sum()
""",
        ),
    ),
    Exercise(
        id="09.3",
        title="A reward of your own",
        minutes=15,
        difficulty=2,
        kind="code",
        stub='''
def answer_line_reward(text, answer):
    """1.0 if the reply ends its reasoning with the right answer line, else 0.0.

    The model was asked to reason and to close with a line such as "Answer: 1,200." The last line that
    starts with "Answer:" counts. Behind the colon stands one whole number and nothing else: a sign,
    commas between groups of three digits and a period at the end are allowed, spaces around it as well.

    text: str, what the model wrote: anything at all, also nothing
    answer: str, the right whole number in plain digits, such as "1200" or "-5"
    returns: 1.0 or 0.0
    """
    raise NotImplementedError
''',
        hints=(
            'First find the line: keep the lines that start with "Answer:", take the last, and think of the '
            "reply that has none.",
            "Then read what stands behind the colon as a whole: re.fullmatch refuses anything beside the number, "
            "where re.search would find a number in the middle of a sentence.",
            "Compare int(...) with int(answer), after the commas are gone: values, not spellings.",
        ),
        solution=r"""
def answer_line_reward(text, answer):
    import re

    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("Answer:")]
    if not lines:
        return 0.0
    number = re.fullmatch(r"Answer:\s*([-+]?(?:\d{1,3}(?:,\d{3})+|\d+))\s*\.?", lines[-1])
    return float(number is not None and int(number[1].replace(",", "")) == int(answer))
""",
        explanation="Thousands of replies will be scored, and what pays will be written more often. So a reward has "
        "to survive every text, refuse a reply that hedges, and never run what it reads. "
        "course_lib.rewards.parse_number does the reading for fractions, units and LaTeX too.",
        cases=(
            Case(("12 + 7 = 19\nAnswer: 19", "19"), 1.0, "reasoning, then the answer line"),
            Case(("12 + 7 = 18\nAnswer: 18", "19"), 0.0, "a wrong answer"),
            Case(("300 times 4.\nAnswer: 1,200.\n", "1200"), 1.0, "a comma, a period and an empty line"),
            Case(("", "0"), 0.0, "an empty reply"),
            Case(("12 + 7 = 19. So it is 19.", "19"), 0.0, "right, but no answer line"),
            Case(("Answer: 18\nNo, I forgot to carry.\nAnswer: 19", "19"), 1.0, "two answer lines, the last is right"),
            Case(("Answer: 19\nOr rather:\nAnswer: 20", "19"), 0.0, "two answer lines, the last is wrong"),
            Case(("Answer: 119", "19"), 0.0, "the right digits inside another number"),
            Case(("Answer: 18 or 19", "19"), 0.0, "an answer that hedges"),
            Case(("Answer: -5", "-5"), 1.0, "a negative number"),
            Case(("Answer: 5", "-5"), 0.0, "the sign is missing"),
            Case(("Answer: 12 + 7", "19"), 0.0, "a sum that was not worked out"),
            Case(("12 and 7\nAnswer:", "19"), 0.0, "an answer line without a number"),
            Case(("Answer: nineteen", "19"), 0.0, "a number in words"),
        ),
        mistakes=(
            Mistake(
                """
def answer_line_reward(text, answer):
    return float(answer in text)
""",
                "You ask whether the answer occurs anywhere. It also occurs inside 119 and in a reply that lists every "
                "number: a policy finds that out soon.",
            ),
            Mistake(
                """
def answer_line_reward(text, answer):
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("Answer:")]
    return float(bool(lines) and lines[-1][7:].strip() == answer)
""",
                'You compare spellings. "1,200." and "1200" are one number: compare values.',
            ),
            Mistake(
                r"""
def answer_line_reward(text, answer):
    import re
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("Answer:")]
    number = re.fullmatch(r"Answer:\s*([-+]?[\d,]*\d)\s*\.?", lines[0]) if lines else None
    return float(number is not None and int(number[1].replace(",", "")) == int(answer))
""",
                "You read the first answer line. A reply may correct itself, so the last one counts.",
            ),
            Mistake(
                r"""
def answer_line_reward(text, answer):
    import re
    numbers = re.findall(r"[-+]?\d[\d,]*", text)
    return float(bool(numbers) and int(numbers[-1].replace(",", "")) == int(answer))
""",
                "You take the last number of the whole reply. Then no answer line is needed, and a hedged answer is "
                "paid like a clear one.",
            ),
            Mistake(
                r"""
def answer_line_reward(text, answer):
    import re
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("Answer:")]
    numbers = re.findall(r"[-+]?\d[\d,]*", lines[-1]) if lines else []
    return float(int(answer) in [int(n.replace(",", "")) for n in numbers])
""",
                'You look for the answer among the numbers of the line, so "18 or 19" passes. Nothing but the number '
                "may stand behind the colon.",
            ),
            Mistake(
                r"""
def answer_line_reward(text, answer):
    import re
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("Answer:")]
    number = re.fullmatch(r"Answer:\s*[-+]?([\d,]*\d)\s*\.?", lines[-1]) if lines else None
    return float(number is not None and int(number[1].replace(",", "")) == abs(int(answer)))
""",
                "The sign gets lost on the way: 5 is not -5.",
            ),
            Mistake(
                """
def answer_line_reward(text, answer):
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("Answer:")]
    try:
        return float(eval(lines[-1][7:].replace(",", "")) == int(answer))
    except Exception:
        return 0.0
""",
                "Your function runs what the model wrote as a program. It pays for a sum that was not worked out, and "
                "a reply could do anything to your machine. Read a text; never run it.",
            ),
            Mistake(
                r"""
def answer_line_reward(text, answer):
    import re
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("Answer:")]
    number = re.fullmatch(r"Answer:\s*([-+]?[\d,]*\d)\s*\.?", lines[-1]) if lines else None
    if number is None:
        return 0.0
    return 1.0 if int(number[1].replace(",", "")) == int(answer) else 0.1
""",
                "You pay something for the form alone. In a group without a right answer the well-formed wrong ones "
                "then count as successes, and they are trained. Asked is 1 or 0.",
            ),
        ),
        alternatives=(
            """
def answer_line_reward(text, answer):
    from course_lib.rewards import parse_number

    found = None
    for line in text.split("\\n"):
        if line.strip().startswith("Answer:"):
            found = line.strip()[len("Answer:"):]
    return 1.0 if found is not None and parse_number(found) == int(answer) else 0.0
""",
            """
def answer_line_reward(text, answer):
    said = [line.split(":", 1)[1] for line in map(str.strip, text.splitlines()) if line.startswith("Answer:")]
    digits = said[-1].strip().removesuffix(".").strip() if said else ""
    sign, digits = (-1, digits[1:]) if digits[:1] == "-" else (1, digits.removeprefix("+"))
    groups = digits.split(",")
    grouped = all(len(group) == 3 for group in groups[1:]) and (len(groups) == 1 or 1 <= len(groups[0]) <= 3)
    if not grouped or not all(group.isascii() and group.isdigit() for group in groups):
        return 0
    return int(sign * int("".join(groups)) == int(answer))
""",
            """
def answer_line_reward(text, answer):
    _, colon, last = ("\\n" + text.replace("\\n ", "\\n")).rpartition("\\nAnswer:")
    said = last.split("\\n")[0].strip().rstrip(".").strip()
    if said != said.replace(" ", "") or "_" in said:
        return False
    try:
        return bool(colon) and int(said.replace(",", "")) == int(answer)
    except ValueError:
        return False
""",
        ),
    ),
)
