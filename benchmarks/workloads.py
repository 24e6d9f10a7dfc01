"""What both sides run: prompts and replies of an exact number of tokens, a reward without ties."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from course_lib.tasks import Problem, SingleTurnTask

UNUSED = "<file_sep>"
"""A special token of SmolLM2 that its instruction tuning never used: as end of sequence it lets every reply run to its
full length, on both sides and without touching what is sampled."""

TEMPLATE_TOKENS = 24
"""Tokens that the small model's chat template puts before every prompt."""


@dataclass(frozen=True)
class Point:
    """One point of the grid.

    Attributes:
        prompts: groups in a batch.
        group: G.
        prompt_tokens: of each prompt, chat template included.
        common_tokens: of these, how many begin every prompt.
        reply_tokens: of each reply.
        seconds: at most so long for the steps of the slower side, though always at least one.
        why: what the point is there to show.
    """

    prompts: int
    group: int
    prompt_tokens: int
    reply_tokens: int
    common_tokens: int = TEMPLATE_TOKENS
    seconds: int = 80
    why: str = ""

    @property
    def name(self) -> str:
        common = f", {self.common_tokens} common" if self.common_tokens > TEMPLATE_TOKENS else ""
        return f"{self.prompts} × {self.group}, {self.prompt_tokens} + {self.reply_tokens} tokens{common}"

    @property
    def padded_tokens(self) -> int:
        """Tokens of the batch where every reply has its own copy of its prompt."""
        return self.prompts * self.group * (self.prompt_tokens + self.reply_tokens)


GRID = (
    Point(4, 8, 45, 6, seconds=140, why="the laptop task's prompts"),
    Point(4, 4, 45, 6, why="smaller groups"),
    Point(4, 16, 45, 6, why="larger groups"),
    Point(16, 8, 45, 6, seconds=60, why="the laptop run's batch"),
    Point(4, 8, 45, 64, why="longer replies"),
    Point(2, 8, 250, 6, why="longer prompts"),
    Point(2, 16, 250, 6, why="longer prompts, larger groups"),
    Point(1, 8, 1000, 6, why="long prompts"),
    Point(4, 8, 545, 6, common_tokens=500, why="a preamble of 500 tokens common to all prompts"),
)
QUICK = (Point(2, 4, 45, 6, seconds=20, why="does everything run"),)


def hashed_reward(text: str, answer: str) -> float:
    """A number in [0, 1) drawn from the text: no two replies tie, so that every row of both sides is trained."""
    return crc32(f"{answer} {text}".encode()) / 2**32


def make_task(point: Point, tokenizer: Any, *, seed: int = 0) -> SingleTurnTask:
    """A task whose prompts have exactly `prompt_tokens` tokens, the first `common_tokens` the same in all."""
    draw = random.Random(seed)
    candidates = (tokenizer.decode([token]) for token in range(300, 8000))
    words = [text for text in candidates if text[0] == " " and text[1:].isalpha() and text.islower()]

    def grown(text: str, count: Callable[[str], int], size: int) -> str:
        """`text` with words of one token behind it until `count` says `size`."""
        while (missing := size - count(text)) > 0:
            text += "".join(draw.choices(words, k=missing))
        if missing < 0:
            raise ValueError(f"{point.name}: expected sizes that leave room for the chat template")
        return text

    def render(system: str | None, prompt: str) -> list[int]:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def common(system: str | None) -> int:
        return next(k for k, (a, b) in enumerate(zip(render(system, "1"), render(system, "2"), strict=True)) if a != b)

    system = grown("Words:", common, point.common_tokens) if point.common_tokens > common(None) else None
    problems = [
        Problem(grown(f"{number}", lambda text: len(render(system, text)), point.prompt_tokens), str(number))
        for number in range(64)
    ]
    return SingleTurnTask(problems, [], hashed_reward, system=system, seed=seed, name=point.name)
