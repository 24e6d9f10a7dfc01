"""Tasks: where problems come from, what the model sees, and what its reply is worth.

A `Task` yields `Problem`s and opens an `Episode` for one. Sampling asks the episode for the token ids the
model shall see, hands it the reply, and goes on until it is done. A single-turn task is an episode of one
step.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import islice, product
from numbers import Real
from os import PathLike
from pathlib import Path
from random import Random
from typing import Any, Protocol

from course_lib._tensors import require_whole
from course_lib.rewards import REWARDS, first_integer_reward, lenient_number_reward

RewardFunction = Callable[[str, str], float]


@dataclass(frozen=True)
class Problem:
    """One thing to ask: the prompt x, what counts as right, and how hard it is."""

    prompt: str
    answer: str
    level: int = 0


class Episode(Protocol):
    """One attempt at one problem: contexts c_j out, outputs in, until `done`."""

    stop: tuple[str, ...]
    """A sampled token whose text contains one of these ends the reply and stays part of it; () = nothing but
    end-of-sequence does."""
    done: bool
    reward: float
    """Valid once `done`."""

    def context(self) -> list[int]:
        """The token ids the model shall see now."""
        ...

    def step(self, output_ids: list[int], text: str) -> None:
        """Take the model's output: the sampled ids, and the same decoded with special tokens skipped."""
        ...


class Task(Protocol):
    """An endless reproducible stream of training problems, a fixed exam, and the episodes of both."""

    def training_problem(self, index: int) -> Problem:
        """The index-th training problem, a function of seed and `index` alone: a run resumes from an int."""
        ...

    def held_out_problems(self) -> Sequence[Problem]:
        """A fixed list of problems, none of them ever a training problem."""
        ...

    def open(self, problem: Problem, tokenizer: Any) -> Episode:
        """A fresh episode for one problem."""
        ...


class SingleTurnTask:
    """Ask, read one reply, score it.

    The model sees the prompt as the user's turn of the tokenizer's chat template, then the assistant's turn
    with `reply_prefix` already written in it. Where the tokenizer has no chat template, system message,
    prompt and prefix are plain lines. The reward sees what the model wrote: the reply without the prefix.

    Training problems come in epochs: every problem once, in an order drawn anew for each epoch.

    Args:
        training: the training problems, at least one.
        held_out: the exam; no prompt of it may be a training prompt.
        reward: scores a reply, `reward(text, answer) -> float`.
        system: the system message; None leaves it to the chat template, which may bring its own.
        reply_prefix: how every reply is started, without a space at its end, as tokens carry theirs in front.
        stop: texts that end a reply.
        seed: draws the order of the training problems.
        name: what errors call the task.

    Raises:
        ValueError: if `training` is empty or shares a prompt with `held_out`.

    Example:
        >>> task = SingleTurnTask([Problem("2 + 2?", "4")], [Problem("2 + 3?", "5")], lenient_number_reward)
        >>> task.training_problem(7)
        Problem(prompt='2 + 2?', answer='4', level=0)
        >>> task.score(task.held_out_problems()[0], "It is 5.")
        1.0
    """

    def __init__(
        self,
        training: Sequence[Problem],
        held_out: Sequence[Problem],
        reward: RewardFunction,
        *,
        system: str | None = None,
        reply_prefix: str = "",
        stop: tuple[str, ...] = (),
        seed: int = 0,
        name: str | None = None,
    ):
        self.name = name or type(self).__name__
        if not training:
            raise ValueError(f"training: expected at least one problem for {self.name}, got none")
        shared = {problem.prompt for problem in held_out}.intersection(problem.prompt for problem in training)
        if shared:
            raise ValueError(f"held_out: expected no training prompt among them, got {min(shared)!r}")
        self._training = tuple(training)
        self._held_out = tuple(held_out)
        self.reward = reward
        self.system = system
        self.reply_prefix = reply_prefix
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.seed = seed

    def training_problem(self, index: int) -> Problem:
        """The index-th problem of the training stream."""
        epoch, position = divmod(require_whole("index", index, 0), len(self._training))
        return self._training[_shuffled(len(self._training), f"{self.seed}/{epoch}")[position]]

    def held_out_problems(self) -> Sequence[Problem]:
        """The exam: always the same problems in the same order."""
        return self._held_out

    def open(self, problem: Problem, tokenizer: Any) -> "SingleTurnEpisode":
        """An episode whose context is the rendered prompt and the start of the reply."""
        return SingleTurnEpisode(self, problem, self._context(problem, tokenizer))

    def score(self, problem: Problem, text: str) -> float:
        """The reward of a reply.

        Raises:
            ValueError: if the reward function raises, or returns anything but a finite number.
        """
        function = getattr(self.reward, "__name__", repr(self.reward))
        where = f"the prompt {problem.prompt!r:.300} and the reply {text!r:.300}"
        try:
            value = self.reward(text, problem.answer)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"reward: {function} of task {self.name} raised {what}, for {where}") from error
        if not isinstance(value, Real) or not math.isfinite(value):
            expected = f"expected a finite number from {function} of task {self.name}"
            raise ValueError(f"reward: {expected}, got {value!r:.300}, for {where}")
        return float(value)

    def _context(self, problem: Problem, tokenizer: Any) -> list[int]:
        system = [] if self.system is None else [self.system]
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": "system", "content": text} for text in system]
            messages.append({"role": "user", "content": problem.prompt})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer.encode("\n".join([*system, problem.prompt, ""]))
        # Encoded on its own: glued to the prompt's text, its first token could merge with the prompt's last.
        return [*ids, *tokenizer.encode(self.reply_prefix, add_special_tokens=False)]


class SingleTurnEpisode:
    """One reply to one problem of a `SingleTurnTask`, whose `open` makes these."""

    def __init__(self, task: SingleTurnTask, problem: Problem, context: list[int]):
        self.problem = problem
        self.stop = task.stop
        self._task = task
        self._context = context
        self._reward: float | None = None

    @property
    def done(self) -> bool:
        """Whether the reply has been taken."""
        return self._reward is not None

    @property
    def reward(self) -> float:
        """What the reply was worth; RuntimeError before there is one."""
        if self._reward is None:
            raise RuntimeError("reward: the episode has none before its step")
        return self._reward

    def context(self) -> list[int]:
        """The token ids of the prompt and of the start of the reply."""
        return list(self._context)

    def step(self, output_ids: list[int], text: str) -> None:
        """Take the reply and score it; RuntimeError for a second one."""
        if self.done:
            raise RuntimeError("step: this episode is done, a single-turn episode takes one reply")
        self._reward = self._task.score(self.problem, text)


class Arithmetic(SingleTurnTask):
    """Sums, differences and products of small whole numbers, in words a small model knows.

    | level | expressions | how many |
    |---|---|---|
    | 1 | a + b and a - b, numbers 0–9 | 155 |
    | 2 | a + b and a - b, numbers 0–20 | 672 |
    | 3 | a + b and a - b, numbers 0–99 | 15,050 |
    | 4 | a ± b ± c, numbers 0–20 | 26,474 |
    | 5 | a * b, numbers 0–20 | 441 |

    Every ordered pair (triple) whose value is not negative is there. Expressions that differ only in the
    order of their terms, such as 7 + 12 and 12 + 7, stand on the same side of the split; an interval that
    takes the exam's problems for independent is a little too narrow for it. The split depends on `level` and
    `held_out` alone: runs with different seeds sit the same exam.

    Args:
        level: 1 to 5.
        seed: draws the order of the training problems.
        held_out: size of the exam; None means 200, or three tenths of the level where that is less.
        system, reply_prefix, stop, reward: as for `SingleTurnTask`.

    Raises:
        ValueError: if `level` is unknown or `held_out` leaves nothing to train on.

    Example:
        >>> task = Arithmetic(level=2, seed=0)
        >>> task.training_problem(0)
        Problem(prompt='What is 6 - 2?', answer='4', level=2)
        >>> len(task.held_out_problems())
        200
        >>> task.score(task.training_problem(0), " 4.")
        1.0
    """

    def __init__(
        self,
        *,
        level: int = 2,
        seed: int = 0,
        held_out: int | None = None,
        system: str | None = None,
        reply_prefix: str = "The answer is",
        stop: tuple[str, ...] = (".", "\n"),
        reward: RewardFunction = first_integer_reward,
    ):
        if level not in _LEVELS:
            raise ValueError(f"level: expected one of {', '.join(map(str, _LEVELS))}, got {level!r}")
        space = _expressions(level)
        count = min(200, len(space) * 3 // 10) if held_out is None else held_out
        if not 0 <= count < len(space):
            raise ValueError(f"held_out: expected 0 to {len(space) - 1} for level {level}, got {count}")
        training, exam = _split(space, count)
        super().__init__(
            training, exam, reward, system=system, reply_prefix=reply_prefix, stop=stop, seed=seed,
            name=f"Arithmetic(level={level})",
        )  # fmt: skip


# level: (joining signs of each expression, largest number)
_LEVELS: dict[int, tuple[tuple[str, ...], int]] = {
    1: (("+", "-"), 9),
    2: (("+", "-"), 20),
    3: (("+", "-"), 99),
    4: (("++", "+-", "-+", "--"), 20),
    5: (("*",), 20),
}


def _expressions(level: int) -> list[tuple[str, Problem]]:
    """Every problem of a level, each with a key that is the same for all orders of its terms."""
    kinds, largest = _LEVELS[level]
    problems = []
    for signs in kinds:
        for first, *rest in product(range(largest + 1), repeat=len(signs) + 1):
            written = str(first) + "".join(f" {sign} {n}" for sign, n in zip(signs, rest, strict=True))
            if signs == "*":
                terms, value = [first, *rest], first * rest[0]
            else:
                terms = [first, *(n if sign == "+" else -n for sign, n in zip(signs, rest, strict=True))]
                value = sum(terms)
            # -0 is 0, so 7 - 0 would share the key of 7 + 0: the signs are part of the key.
            key = f"{''.join(sorted(signs))} {sorted(terms)}"
            if value >= 0:
                problems.append((key, Problem(f"What is {written}?", str(value), level)))
    return problems


def _split(keyed: Iterable[tuple[str, Problem]], count: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held out): problems with one key stay together; `count`, or as many as fit, are held out.

    Keys are taken in the order of their hashes, so neither the order of the source nor a seed changes the
    choice.
    """
    groups: dict[str, list[Problem]] = {}
    for key, problem in keyed:
        groups.setdefault(key, []).append(problem)
    training: list[Problem] = []
    held_out: list[Problem] = []
    for key in sorted(groups, key=lambda key: sha256(key.encode()).digest()):
        fits = len(held_out) + len(groups[key]) <= count
        (held_out if fits else training).extend(groups[key])
    return training, held_out


@lru_cache(maxsize=8)
def _shuffled(n: int, seed: str) -> list[int]:
    """A permutation of range(n) drawn from the seed.

    By way of `Random.random`, the one method whose values Python promises never to change.
    """
    draw = Random(seed).random
    keys = [draw() for _ in range(n)]
    return sorted(range(n), key=keys.__getitem__)


class Curriculum:
    """Problems of easier tasks first, then those of the task that is meant.

    The stages lend their problems and nothing else: `task` opens and scores every episode, and the exam is its exam.
    Problems of a stage that stand in the exam are left out, since each task splits by itself: of the expressions that
    level 3 of `Arithmetic` trains on, 186 are held out at level 2. (The other way round there are none.)

    Args:
        stages: (a task, how many of its problems), in the order they are met.
        task: whose problems follow without end.

    Raises:
        ValueError: there is no stage, a number below 1, or a stage with too few problems outside of the exam.

    Source:
        Bengio et al. (2009), Curriculum learning, ICML.

    Example:
        >>> task = Curriculum([(Arithmetic(level=1), 500)], Arithmetic(level=3))
        >>> [task.training_problem(index).level for index in (0, 499, 500, 10**6)]
        [1, 1, 3, 3]
        >>> task.name
        'Curriculum(500 x Arithmetic(level=1), Arithmetic(level=3))'
    """

    def __init__(self, stages: Sequence[tuple[Task, int]], task: Task):
        if not stages:
            raise ValueError("stages: expected at least one task that comes first, got none")
        self.task = task
        exam = {problem.prompt for problem in task.held_out_problems()}
        self._first = [problem for stage, count in stages for problem in _outside(exam, stage, count)]
        parts = [*(f"{count} x {_name(stage)}" for stage, count in stages), _name(task)]
        self.name = f"Curriculum({', '.join(parts)})"

    def training_problem(self, index: int) -> Problem:
        """The index-th problem of the stages, then of the task."""
        index = require_whole("index", index, 0)
        if index < len(self._first):
            return self._first[index]
        return self.task.training_problem(index - len(self._first))

    def held_out_problems(self) -> Sequence[Problem]:
        """The exam of the task."""
        return self.task.held_out_problems()

    def open(self, problem: Problem, tokenizer: Any) -> Episode:
        """An episode of the task."""
        return self.task.open(problem, tokenizer)


def _outside(exam: set[str], task: Task, count: int) -> list[Problem]:
    """The first `count` training problems of `task` whose prompt does not stand in `exam`."""
    if count < 1:
        raise ValueError(f"stages: expected at least 1 problem of {_name(task)}, got {count}")
    looked_at = map(task.training_problem, range(10 * count + 1000))
    found = list(islice((problem for problem in looked_at if problem.prompt not in exam), count))
    if len(found) < count:
        raise ValueError(f"stages: expected {count} problems of {_name(task)} outside of the exam, got {len(found)}")
    return found


def _name(task: Task) -> str:
    return getattr(task, "name", type(task).__name__)


def load_jsonl(
    path: str | PathLike[str],
    *,
    reward: RewardFunction = lenient_number_reward,
    held_out: float | int = 0.2,
    seed: int = 0,
    system: str | None = None,
    reply_prefix: str = "",
    stop: tuple[str, ...] = (),
) -> SingleTurnTask:
    r"""A task from your own rows: one JSON object a line, {"prompt": "What is 7 + 12?", "answer": "19"}.

    An answer is a text or a number; numbers are kept as they are written. Other keys and blank lines are
    ignored. Rows with the same prompt stay on the same side of the split, which depends on the prompts alone:
    neither the order of the rows nor the seed moves a row to the other side.

    Args:
        path: the file, UTF-8.
        reward: scores a reply, `reward(text, answer) -> float`.
        held_out: how much is kept for the exam: a fraction of the rows (0.2) or a number of rows (200).
        seed: draws the order of the training problems.
        system, reply_prefix, stop: as for `SingleTurnTask`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file or a row is not as described (the line is named), if a reward of
            `course_lib.rewards` cannot use an answer, or if `held_out` leaves either side of the split empty.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "sums.jsonl")
        >>> with open(path, "w") as file:
        ...     _ = file.write('{"prompt": "2 + 2?", "answer": 4}\n{"prompt": "2 + 3?", "answer": "5"}\n')
        >>> task = load_jsonl(path, held_out=1)
        >>> sorted(p.answer for p in [task.training_problem(0), *task.held_out_problems()])
        ['4', '5']
    """
    path = Path(path)
    problems = _read_problems(path)
    if reward in REWARDS.values():  # they refuse an answer that is none before they look at the reply
        for line, problem in problems:
            try:
                reward("", problem.answer)
            except ValueError as error:
                raise ValueError(f"path: {path}, line {line}: {error} (for {reward.__name__})") from None
    whole = isinstance(held_out, int)
    if held_out < 0 or (held_out >= 1 and not whole) or held_out != held_out:
        raise ValueError(f"held_out: expected a fraction below 1 or a number of rows, got {held_out!r}")
    count = held_out if whole or not held_out else max(1, round(held_out * len(problems)))
    training, exam = _split([(problem.prompt, problem) for _, problem in problems], count)
    if not training or (count and not exam):
        raise ValueError(
            f"held_out: expected {held_out!r} to leave problems on both sides, got {len(exam)} held out and "
            f"{len(training)} for training from the {len(problems)} rows of {path}"
        )
    return SingleTurnTask(
        training, exam, reward, system=system, reply_prefix=reply_prefix, stop=stop, seed=seed, name=path.name
    )


class _Literal(str):
    """A JSON number as it was written: 0.10 stays 0.10, and no number is too long."""


def _read_problems(path: Path) -> list[tuple[int, Problem]]:
    """The problems of a JSON Lines file with their line numbers."""
    if not path.exists():
        raise FileNotFoundError(f"path: expected a JSON Lines file, found nothing at {path}")
    if path.is_dir():
        raise ValueError(f"path: expected a JSON Lines file, got the folder {path}")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"path: expected UTF-8 text, got byte {error.start} of {path} that is not") from None
    if "\0" in text:
        raise ValueError(f"path: expected text, got a binary file (a zero byte in {path})")
    # Only "\n" ends a line: JSON texts may hold U+2028 and others that str.splitlines would cut at.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    problems = [(number, _problem(line, f"path: {path}, line {number}")) for number, line in lines]
    if not problems:
        raise ValueError(f"path: expected at least one row, got none in {path}")
    return problems


def _problem(line: str, where: str) -> Problem:
    def not_a_number(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        row = json.loads(line, parse_int=_Literal, parse_float=_Literal, parse_constant=not_a_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected one JSON object, got {line.strip()!r:.100} ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected one JSON object, got {line.strip()!r:.100}")
    for key in ("prompt", "answer"):
        if key not in row:
            raise ValueError(f"{where}: expected the keys 'prompt' and 'answer', got {list(row)!r:.200}")
    prompt, answer = row["prompt"], row["answer"]
    if type(prompt) is not str or not prompt.strip():
        raise ValueError(f"{where}: expected a text for 'prompt', got {json.dumps(prompt):.100}")
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"{where}: expected a text or a number for 'answer', got {json.dumps(answer):.100}")
    try:
        (prompt + answer).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: expected whole characters, got half of a surrogate pair") from None
    return Problem(prompt, str(answer))
