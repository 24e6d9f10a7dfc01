"""What an exercise is: one declaration from which check, hint, solution, notebook cell and tests follow."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

KINDS = ("code", "predict", "find-the-bug", "choose")


class AnswerError(Exception):
    """Raised by a probe when an answer cannot be probed; its text is shown to the learner."""


@dataclass(frozen=True)
class Case:
    """One input of an exercise and what must come out.

    Args:
        args: The arguments as numbers, strings and nested lists. A rectangular list of numbers reaches the
            learner as a tensor (float64, or int64 where every entry is an int).
        expected: Number, nested list, or a tuple of those; worked out by hand or by plain loops, never by the
            solution.
        label: What is special about this input, shown to the learner: "a group of one".
        atol: Replaces the usual absolute tolerance for float64 results, where tiny values must be right.
    """

    args: tuple
    expected: Any
    label: str
    atol: float | None = None


@dataclass(frozen=True)
class Mistake:
    """A wrong answer and the sentence that tells the learner what went wrong.

    Args:
        wrong: For a function, the source of a wrong implementation: a learner whose outputs equal its outputs
            on every case made this mistake. For predict and choose, the wrong answer itself.
        diagnosis: One or two sentences that name the mistake without giving the code.
    """

    wrong: Any
    diagnosis: str


def plain_call(function: Callable, *args: Any) -> Any:
    return function(*args)


def value_and_gradient(function: Callable, leaf: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Probe for losses: the scalar `function(leaf, *rest)` and its gradient with respect to `leaf`."""
    leaf = leaf.clone().requires_grad_()
    with torch.enable_grad():
        value = function(leaf, *rest)
        if value is None:
            raise AnswerError("Your function returned None. Is the return statement missing?")
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise AnswerError("A loss must be a tensor with one element, so that .backward() can start from it.")
        if not value.requires_grad:
            raise AnswerError(
                "The loss has no gradient: between the first argument and the result the graph was cut "
                "(.item(), .detach(), float(), NumPy, or a new tensor made from numbers)."
            )
        (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
    if gradient is None:
        raise AnswerError("The loss does not depend on the first argument.")
    return value, gradient


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise; `course_lib.exercises` says how to add one.

    Args:
        id: Lesson and number, "05.2".
        title: Short, as it stands in the progress table.
        minutes: How long a learner needs.
        difficulty: 1 (one line) to 5 (needs a derivation).
        kind: "code", "predict" (a number), "find-the-bug" (the stub is wrong) or "choose" (a letter).
        stub: Exact text of the notebook's stub. A function with shapes in its docstring, or a question in
            comments followed by `name = None`.
        hints: At least two, from a nudge to nearly the answer.
        solution: Source of the function, or the right value.
        explanation: Why the solution is right.
        cases: Four inputs or more with independent expected values, an edge case among them (functions only).
        mistakes: At least four, each with its own diagnosis.
        alternatives: Sources of three or more differently written right answers (functions only).
        tolerance: Largest absolute error of a predicted number.
        probe: How a function is called; `value_and_gradient` checks a loss together with its gradient.
        returns: Names of the parts where the expected value is a tuple.
    """

    id: str
    title: str
    minutes: int
    difficulty: int
    kind: str
    stub: str
    hints: tuple[str, ...]
    solution: Any
    explanation: str
    mistakes: tuple[Mistake, ...]
    cases: tuple[Case, ...] = ()
    alternatives: tuple[str, ...] = ()
    tolerance: float = 0.0
    probe: Callable = plain_call
    returns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        def require(condition: bool, expected: str) -> None:
            if not condition:
                raise ValueError(f"exercise {self.id!r}: {expected}")

        require(re.fullmatch(r"\d\d\.\d+", self.id) is not None, 'id: expected lesson and number like "05.2"')
        require(self.kind in KINDS, f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        require(1 <= self.difficulty <= 5, f"difficulty: expected 1 to 5, got {self.difficulty}")
        require(len(self.hints) >= 2, f"hints: expected at least two, got {len(self.hints)}")
        require(self.is_function == bool(self.cases), "cases: expected for functions, and only for them")
        require(self.kind != "predict" or self.tolerance > 0, "tolerance: expected for a predicted number")
        require(
            self.kind != "code" or "raise NotImplementedError" in self.stub,
            "stub: expected NotImplementedError",
        )
        require(self.is_function or f"{self.name} = None" in self.stub, "stub: expected `name = None`")

    @property
    def is_function(self) -> bool:
        return self.kind in ("code", "find-the-bug")

    @cached_property
    def name(self) -> str:
        """The name the stub defines and the check is given: the last thing bound at its top level."""
        last = ast.parse(self.stub).body[-1]
        return last.name if isinstance(last, ast.FunctionDef) else last.targets[0].id

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        function = ast.parse(self.stub).body[-1]
        return tuple(argument.arg for argument in function.args.args)

    @property
    def heading(self) -> str:
        """The two lines of prose above the notebook's cell."""
        return (
            f"### Exercise {self.id} · {self.title}\n{self.minutes} minutes, difficulty {self.difficulty} of 5. "
            f'Stuck? `hint("{self.id}")`; the answer with its reason is `solution("{self.id}")`.'
        )

    @property
    def cell(self) -> str:
        """The text of the notebook's cell: the stub and its check."""
        gap = "\n\n\n" if self.is_function else "\n\n"
        return f'{self.stub.strip()}{gap}check("{self.id}", {self.name})'
