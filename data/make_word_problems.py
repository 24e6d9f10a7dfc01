"""Writes data/word_problems.jsonl: every template below with every one of its settings.

Run it from the repository root: python data/make_word_problems.py
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

# (text with gaps, how the answer follows from what fills them, the fillings)
TEMPLATES: list[tuple[str, Callable[..., int], list[tuple[int, ...]]]] = [
    (
        "A baker makes {} rolls in the morning and {} in the afternoon. How many rolls does the baker make that day?",
        lambda a, b: a + b,
        [(12, 7), (18, 15), (24, 9), (30, 26), (45, 38)],
    ),
    (
        "There are {} birds on a wire. {} of them fly away. How many birds are left on the wire?",
        lambda a, b: a - b,
        [(9, 4), (14, 6), (20, 13), (31, 17), (50, 28)],
    ),
    (
        "A shelf has {} rows with {} books in each row. How many books are on the shelf?",
        lambda a, b: a * b,
        [(3, 4), (5, 6), (7, 8), (4, 12), (9, 11)],
    ),
    (
        "{} pencils are shared equally among {} children. How many pencils does each child get?",
        lambda a, b: a // b,
        [(12, 3), (20, 5), (42, 6), (56, 7), (96, 8)],
    ),
    (
        "A ticket costs ${}. You buy {} tickets and pay with a $100 bill. How many dollars do you get back?",
        lambda a, b: 100 - a * b,
        [(8, 2), (15, 3), (12, 5), (9, 8), (20, 4)],
    ),
    (
        "A train has {} passengers. At the first stop {} get off and {} get on. How many passengers are on it now?",
        lambda a, b, c: a - b + c,
        [(40, 12, 5), (65, 20, 18), (28, 9, 14), (73, 31, 6), (90, 45, 27)],
    ),
    (
        "A garden has {} rows of {} tulips and {} roses besides. How many flowers are in the garden?",
        lambda a, b, c: a * b + c,
        [(3, 5, 4), (6, 4, 10), (8, 7, 9), (5, 9, 12), (7, 11, 20)],
    ),
    (
        "A ribbon is {} cm long. You cut off {} pieces of {} cm each. How many centimetres are left?",
        lambda a, b, c: a - b * c,
        [(50, 3, 10), (80, 4, 15), (64, 5, 9), (100, 7, 12), (72, 6, 8)],
    ),
    (
        "A box holds {} eggs. How many boxes do you need for {} eggs?",
        lambda a, b: b // a,
        [(6, 30), (10, 70), (12, 60), (4, 52), (8, 72)],
    ),
    (
        "You read {} pages on Monday and twice as many on Tuesday. How many pages do you read on both days together?",
        lambda a: a + 2 * a,
        [(8,), (11,), (15,), (24,), (32,)],
    ),
    (
        "In the morning it is {} degrees. By night it is {} degrees colder. How many degrees is it at night?",
        lambda a, b: a - b,
        [(12, 5), (7, 7), (3, 8), (-2, 6), (10, 25)],
    ),
    (
        "A tank holds {} litres and loses {} litres an hour. How many litres are in it after {} hours?",
        lambda a, b, c: a - b * c,
        [(60, 5, 4), (100, 8, 3), (250, 20, 7), (1200, 150, 6), (90, 9, 10)],
    ),
]


def rows() -> Iterator[dict[str, str]]:
    """The rows of the file, in order."""
    for text, answer, fillings in TEMPLATES:
        for filling in fillings:
            yield {"prompt": text.format(*filling), "answer": str(answer(*filling))}


if __name__ == "__main__":
    lines = [json.dumps(row) + "\n" for row in rows()]
    (Path(__file__).parent / "word_problems.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
