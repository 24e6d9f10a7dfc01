"""The exercises of the lessons: `check` an answer, get a `hint`, read the `solution`, see your `progress`.

A teacher declares an exercise once, as an `Exercise` in `EXERCISES` of the lesson's file (lesson_05.py; a new lesson's
file is found by its name). tests/test_exercises.py tries its solution, its alternatives and every known mistake. Then
it gets its place, and tests say what is missing:

1. in the notebook: put a code cell with the line ``check("05.8", None)`` where the exercise belongs;
   ``python tools/notebooks.py exercises NOTEBOOK`` puts the heading and the stub there, and brings a declaration that
   changed into its cell; ``python tools/notebooks.py execute NOTEBOOK`` stores the outputs;
2. in the index: name it in an `Entry` of course_lib/index.py, then run ``python tools/index.py``.

Example:
    >>> from course_lib.exercises import registry
    >>> registry["05.2"].kind
    'predict'
"""

import difflib
import pkgutil
from importlib import import_module
from typing import Any

from . import store
from .engine import judge
from .exercise import AnswerError, Case, Exercise, Mistake, value_and_gradient
from .message import Message

__all__ = [
    "AnswerError",
    "Case",
    "Exercise",
    "Mistake",
    "check",
    "hint",
    "progress",
    "progress_table",
    "registry",
    "reset",
    "solution",
    "value_and_gradient",
]


def _collect() -> dict[str, Exercise]:
    found: dict[str, Exercise] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name.startswith("lesson_")):
        for exercise in import_module(f"{__name__}.{module}").EXERCISES:
            if exercise.id in found:
                raise ValueError(f"exercise ids: {exercise.id!r} is used twice")
            found[exercise.id] = exercise
    return found


registry: dict[str, Exercise] = _collect()
_hints_given: dict[str, int] = {}


def check(exercise_id: str, answer: Any) -> None:
    """Judge an answer and print what was found; remember a solved exercise.

    Any correct implementation passes, whether it uses NumPy, torch or plain loops, float32 or float64. What a
    function prints while it is checked is not shown.

    Args:
        exercise_id: Lesson and number, "05.2".
        answer: The function itself, or for the other kinds the number or letter.
    """
    if (exercise := _find(exercise_id)) is None:
        return
    message = judge(exercise, answer)
    if message.status != "unsolved":
        notice = store.record(exercise.id, "solved" if message.status == "solved" else "tried")
        if notice:
            message.say(notice)
    message.show()


def hint(exercise_id: str) -> None:
    """Print the next hint; after the last one, all of them again."""
    if (exercise := _find(exercise_id)) is None:
        return
    given, total = _hints_given.get(exercise.id, 0), len(exercise.hints)
    message = Message("note", f"{exercise.id} {exercise.title}: ")
    if given < total:
        left = total - given - 1
        message.title += f"hint {given + 1} of {total}"
        message.say(exercise.hints[given])
        message.say(f"{left} hint{'s' * (left != 1)} left." if left else "That was the last hint.")
    else:
        message.title += "all hints"
        for number, text in enumerate(exercise.hints, start=1):
            message.say(f"{number}. {text}")
        message.say(f'No hints left. solution("{exercise.id}") shows the answer.')
    _hints_given[exercise.id] = min(given + 1, total)
    message.show()


def solution(exercise_id: str) -> None:
    """Print the solution with its explanation."""
    if (exercise := _find(exercise_id)) is None:
        return
    message = Message("note", f"{exercise.id} {exercise.title}: solution")
    if exercise.is_function:
        message.code(exercise.solution)
    else:
        message.say(f"{exercise.solution}")
    message.say(exercise.explanation).show()


def progress() -> None:
    """Print a table of all exercises: solved, tried, or still to do."""
    _progress_message().show()


def progress_table() -> str:
    """The text that `progress` prints."""
    return _progress_message().text()


def reset(exercise_id: str | None = None) -> None:
    """Forget that an exercise was solved, and its hints; without an id, forget all of them."""
    if exercise_id is None:
        ids = set(registry)
    elif (exercise := _find(exercise_id)) is None:
        return
    else:
        ids = {exercise.id}
    states, notice = store.read()
    notice = store.write({key: state for key, state in states.items() if key not in ids}) or notice
    for key in ids:
        _hints_given.pop(key, None)
    message = Message("note", "All exercises reset." if exercise_id is None else f"{exercise_id} reset.")
    if notice:
        message.say(notice)
    message.show()


def _progress_message() -> Message:
    states, notice = store.read()
    marks = {"solved": "✓ solved", "tried": "· tried"}
    rows = [
        (
            exercise.id,
            exercise.title,
            exercise.kind,
            f"{exercise.minutes} min",
            "*" * exercise.difficulty,
            marks.get(states.get(exercise.id, ""), "to do"),
        )
        for exercise in registry.values()
    ]
    solved = sum(states.get(key) == "solved" for key in registry)
    message = Message("note", f"{solved} of {len(registry)} exercises solved").table(rows)
    if notice:
        message.say(notice)
    return message


def _find(exercise_id: str) -> Exercise | None:
    exercise = registry.get(exercise_id) if isinstance(exercise_id, str) else None
    if exercise is None:
        near = difflib.get_close_matches(str(exercise_id), registry, n=1, cutoff=0.0)
        message = Message("note", f"There is no exercise {exercise_id!r}.")
        message.say(f'Did you mean "{near[0]}"? progress() lists all of them.' if near else "").show()
    return exercise
