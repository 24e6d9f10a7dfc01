"""Judge an answer: run it on every case, compare, and name the likely mistake.

A diagnosis is found by comparison, not by reading code: the learner's outputs are set beside those of each
known wrong implementation, and equal outputs on all cases mean the same mistake.
"""

import contextlib
import inspect
import io
import math
import numbers
import random
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .exercise import AnswerError, Case, Exercise, plain_call
from .limits import TimeLimit, call_with_limit
from .message import Message

TIME_LIMIT = 5.0  # seconds for all cases together; a right answer needs a small fraction of one
# Largest error, relative to max(1, |expected|), by the bytes of a number in what came back.
TOLERANCE = {8: 1e-6, 4: 2e-5, 2: 2e-2}


@dataclass
class Outcome:
    """What one call gave: one array a part, or a problem in words."""

    parts: tuple[np.ndarray, ...] = ()
    item_bytes: int = 8
    problem: str = ""
    error: BaseException | None = None
    mutated: str = ""


# ---------------------------------------------------------------- judging


def judge(exercise: Exercise, answer: Any) -> Message:
    """The message for `answer`; its `status` is "solved", "wrong" or "unsolved"."""
    if exercise.is_function:
        return _judge_function(exercise, answer)
    return _judge_value(exercise, answer)


def _judge_function(exercise: Exercise, answer: Any) -> Message:
    call = f"{exercise.name}({', '.join(exercise.parameters)})"
    if not callable(answer):
        return _wrong(exercise).say(
            f'Hand over the function itself, without calling it: check("{exercise.id}", {exercise.name}).'
        )
    if not _accepts(answer, len(exercise.parameters)):
        return _wrong(exercise).say(f"Your function cannot be called as {call}. Keep the signature of the stub.")
    try:
        with _quiet():
            outcomes, again = call_with_limit(lambda: _outcomes_twice(exercise, answer), TIME_LIMIT)
    except TimeLimit:
        return _wrong(exercise).say(
            f"No answer within {TIME_LIMIT:g} seconds. The inputs are tiny, so a loop probably never ends."
        )
    raised = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
    if _is_stub(raised):
        return _unsolved(exercise)
    right = [_is_right(outcome, case) for outcome, case in zip(outcomes, exercise.cases, strict=True)]
    if raised is None and not all(map(_same, outcomes, again)):
        return _wrong(exercise).say(
            "Two calls with the same input gave different results. Draw no random numbers, and keep nothing "
            "from one call to the next: the result may depend on the arguments only."
        )
    mutated = next((outcome.mutated for outcome in outcomes if outcome.mutated), "")
    if all(right):
        if mutated:
            return _wrong(exercise).say(
                f"The values are right, but your function changes its argument `{mutated}`: the caller's "
                "tensor is different afterwards. Work on a copy, or build a new tensor."
            )
        message = _solved(exercise)
        message.say(f"Checked {len(right)} inputs: {'; '.join(case.label for case in exercise.cases)}.")
        return message.say(exercise.explanation) if exercise.kind == "find-the-bug" else message
    first = right.index(False)
    still_given = exercise.kind == "find-the-bug" and all(
        map(_same, outcomes, _wrong_outcomes(exercise, exercise.stub))
    )
    if still_given:
        message = _unsolved(exercise)
    else:
        message = _wrong(exercise).say(_diagnosis(exercise, outcomes, outcomes[first], exercise.cases[first]))
    if outcomes[first].error is None or outcomes[first].parts:
        _add_comparison(message, exercise, exercise.cases[first], outcomes[first])
    else:
        message.table([("input", _show_arguments(exercise, exercise.cases[first]))])
    if mutated and not still_given:
        message.say(f"It also changes its argument `{mutated}` in place. Work on a copy.")
    count = f"{sum(right)} of {len(right)} inputs come out right."
    return message.say(f'{count} hint("{exercise.id}") helps on.')


def _judge_value(exercise: Exercise, answer: Any) -> Message:
    if answer is None:
        return _unsolved(exercise)
    given = _same_choice if exercise.kind == "choose" else _same_number
    help_on = f'hint("{exercise.id}") helps on.'
    try:
        if given(exercise, answer, exercise.solution):
            rule = f" (within {exercise.tolerance:g})" if exercise.kind == "predict" else ""
            return _solved(exercise).say(f"{_plain(answer)} is right{rule}. {exercise.explanation}")
        for mistake in exercise.mistakes:
            if given(exercise, answer, mistake.wrong):
                return _wrong(exercise).say(f"{_plain(answer)}: {mistake.diagnosis} {help_on}")
    except (TypeError, ValueError, RuntimeError):
        wanted = 'a letter, such as "A"' if exercise.kind == "choose" else "one number"
        return _wrong(exercise).say(f"Expected {wanted}, got {type(answer).__name__}.")
    if exercise.kind == "choose":
        return _wrong(exercise).say(f"{_plain(answer)} is none of the letters offered.")
    return _wrong(exercise).say(
        f"{_plain(answer)} is not it; the right number is accepted within {exercise.tolerance:g}. {help_on}"
    )


def _same_number(exercise: Exercise, answer: Any, number: float) -> bool:
    if isinstance(answer, (str, bytes, bool)):
        raise TypeError
    return abs(float(answer) - number) <= exercise.tolerance


def _same_choice(exercise: Exercise, answer: Any, letter: str) -> bool:
    if not isinstance(answer, str):
        raise TypeError
    return answer.strip().strip(".()").upper() == letter


def _solved(exercise: Exercise) -> Message:
    return Message("solved", f"{exercise.id} {exercise.title}: solved")


def _wrong(exercise: Exercise) -> Message:
    return Message("wrong", f"{exercise.id} {exercise.title}: not right yet")


def _unsolved(exercise: Exercise) -> Message:
    todo = {
        "code": "Replace the line `raise NotImplementedError` with your code.",
        "find-the-bug": "The bug is still there. This is what it does:",
        "predict": "Put your number in place of None.",
        "choose": "Put a letter in place of None.",
    }[exercise.kind]
    message = Message("unsolved", f"{exercise.id} {exercise.title}: not solved yet")
    return message.say(f"{exercise.minutes} minutes, difficulty {exercise.difficulty} of 5. {todo}")


# ---------------------------------------------------------------- running


def _outcomes(exercise: Exercise, function: Callable) -> tuple[list[Outcome], Callable]:
    """What the function gives on all cases, and the form of argument it was given.

    Arguments come as tensors first, then, where an answer cannot take these, as NumPy arrays or lists: the form
    a function was written for is the one it is judged by.
    """
    first = None
    for convert in (_tensor, _array, _list) if exercise.probe is plain_call else (_tensor,):
        outcomes = [_outcome(exercise, function, case, convert) for case in exercise.cases]
        if all(outcome.error is None for outcome in outcomes) or any(_is_stub(o.error) for o in outcomes):
            return outcomes, convert
        first = first or (outcomes, convert)
    return first  # no form works: show what went wrong with tensors, which the stub's docstring promises


def _outcomes_twice(exercise: Exercise, function: Callable) -> tuple[list[Outcome], list[Outcome]]:
    """All cases, and all of them again from another random state."""
    outcomes, convert = _outcomes(exercise, function)
    torch.default_generator.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    return outcomes, [_outcome(exercise, function, case, convert) for case in exercise.cases]


def _outcome(exercise: Exercise, function: Callable, case: Case, convert: Callable) -> Outcome:
    args = [convert(arg) for arg in case.args]
    before = [convert(arg) for arg in case.args]
    try:
        value = exercise.probe(function, *args)
    except (TimeLimit, KeyboardInterrupt):
        raise
    except AnswerError as error:
        return Outcome(problem=str(error))
    except BaseException as error:
        return Outcome(problem=_their_error(error), error=error)
    outcome = _read(value, case.expected)
    pairs = zip(exercise.parameters, args, before, strict=True)
    outcome.mutated = next((name for name, now, then in pairs if not _equal(now, then)), "")
    return outcome


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallow prints and warnings, and leave the global random states as they were found."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _accepts(function: Callable, count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # some built-ins have no signature to look at
        return True
    return True


def build(source: str, name: str) -> Callable:
    """The function `name` that `source`, a text of this package, defines; torch, np and math are at hand."""
    namespace: dict[str, Any] = {"torch": torch, "np": np, "math": math}
    exec(compile(source, "<exercise>", "exec"), namespace)
    return namespace[name]


def _wrong_outcomes(exercise: Exercise, source: str) -> list[Outcome]:
    with _quiet():
        return _outcomes(exercise, build(source, exercise.name))[0]


def _is_stub(error: BaseException | None) -> bool:
    """Whether the learner's own code, and not something it called, raised NotImplementedError."""
    if not isinstance(error, NotImplementedError):
        return False
    return _is_theirs(traceback.extract_tb(error.__traceback__)[-1].filename)


# ---------------------------------------------------------------- arguments in the three forms


def _is_rectangle(value: Any) -> bool:
    try:
        return np.asarray(value).dtype != object and all(isinstance(x, numbers.Number) for x in _flat(value))
    except ValueError:
        return False


def _flat(value: Any) -> Iterator[Any]:
    for item in value:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item


def _tensor(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if not _is_rectangle(value):
        return [_tensor(item) for item in value]
    whole = bool(value) and all(isinstance(item, int) for item in _flat(value))
    return torch.tensor(value, dtype=torch.int64 if whole else torch.float64)


def _array(value: Any) -> Any:
    tensor = _tensor(value)
    if isinstance(tensor, list):
        return [_array(item) for item in value]
    return tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor


def _list(value: Any) -> Any:
    return [_list(item) for item in value] if isinstance(value, list) else value


def _equal(now: Any, then: Any) -> bool:
    if isinstance(then, list):
        return len(now) == len(then) and all(map(_equal, now, then))
    if isinstance(then, torch.Tensor):
        return now.shape == then.shape and torch.equal(torch.nan_to_num(now), torch.nan_to_num(then))
    if isinstance(then, np.ndarray):
        return now.shape == then.shape and bool(np.array_equal(np.nan_to_num(now), np.nan_to_num(then)))
    return now == then or now != now


# ---------------------------------------------------------------- results


def _read(value: Any, expected: Any) -> Outcome:
    """Turn whatever came back into float64 arrays, one for each part of the expected value."""
    if value is None:
        return Outcome(problem="Your function returned None. Is the return statement missing?")
    wanted = expected if isinstance(expected, tuple) else (expected,)
    if isinstance(expected, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(wanted):
            return Outcome(problem=f"Expected {len(wanted)} results, returned as a tuple, got {_kind(value)}.")
        values = tuple(value)
    else:
        values = (value,)
    try:
        read = [_as_array(item) for item in values]
    except (TypeError, ValueError) as error:
        return Outcome(problem=str(error))
    return Outcome(parts=tuple(array for array, _ in read), item_bytes=min(size for _, size in read))


def _as_array(value: Any) -> tuple[np.ndarray, int]:
    if isinstance(value, torch.Tensor):
        size = value.element_size() if value.is_floating_point() else 8
        if value.is_complex():
            raise TypeError("Expected real numbers, got complex ones.")
        return value.detach().cpu().double().numpy(), size
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fiub":
        return value.astype(np.float64), value.dtype.itemsize if value.dtype.kind == "f" else 8
    if isinstance(value, numbers.Real):
        return np.asarray(float(value)), 8
    if isinstance(value, (list, tuple)):
        read = [_as_array(item) for item in value]
        if len({array.shape for array, _ in read}) > 1:
            raise ValueError("The rows of the result have different lengths.")
        return np.array([array for array, _ in read], dtype=np.float64), min((size for _, size in read), default=8)
    raise TypeError(f"Expected a number, a tensor, an array or a list of numbers, got {_kind(value)}.")


def _expected_parts(case: Case) -> tuple[np.ndarray, ...]:
    parts = case.expected if isinstance(case.expected, tuple) else (case.expected,)
    return tuple(np.asarray(part, dtype=np.float64) for part in parts)


def _close(got: np.ndarray, expected: np.ndarray, item_bytes: int, atol: float | None = None) -> bool:
    if got.shape != expected.shape:
        return False
    finite = np.isfinite(expected)
    size = np.where(finite, np.abs(expected), 0.0)
    if item_bytes < 8 and size.size:  # what cancels in low precision leaves an error as large as the largest entry's
        size = np.full_like(size, size.max())
    tolerance = TOLERANCE[item_bytes]
    allowed = tolerance * np.maximum(1.0, size) if atol is None or item_bytes < 8 else atol + tolerance * size
    with np.errstate(invalid="ignore"):
        near = finite & (np.abs(got - expected) <= allowed)
    return bool((near | (got == expected) | (np.isnan(got) & np.isnan(expected))).all())


def _is_right(outcome: Outcome, case: Case) -> bool:
    expected = _expected_parts(case)
    return len(outcome.parts) == len(expected) and all(
        _close(got, want, outcome.item_bytes, case.atol) for got, want in zip(outcome.parts, expected, strict=True)
    )


def _same(outcome: Outcome, other: Outcome) -> bool:
    if type(outcome.error) is not type(other.error) or outcome.problem != other.problem:
        return False
    item_bytes = min(outcome.item_bytes, other.item_bytes)
    return len(outcome.parts) == len(other.parts) and all(
        _close(got, want, item_bytes) for got, want in zip(outcome.parts, other.parts, strict=True)
    )


# ---------------------------------------------------------------- words


def _diagnosis(exercise: Exercise, outcomes: list[Outcome], worst: Outcome, case: Case) -> str:
    if worst.error is not None:
        return worst.problem
    if known := _known_mistake(exercise, outcomes):
        return known
    if worst.problem:
        return worst.problem
    expected = _expected_parts(case)
    for got, want in zip(worst.parts, expected, strict=True):
        if got.shape != want.shape:
            return f"The result has {_shape(got)}; expected is {_shape(want)}."
        if np.isnan(got).any() and not np.isnan(want).any():
            return "The result contains NaN. Look for 0/0, inf − inf, 0 · inf, or the log of something negative."
        if np.isinf(got).any() and not np.isinf(want).any():
            return "The result contains inf. Look for a division by 0, log 0, or an exponential that overflows."
    return _pattern(exercise, outcomes) or "The values differ from the expected ones."


def _known_mistake(exercise: Exercise, outcomes: list[Outcome]) -> str:
    """The diagnosis of the known mistake that gives the same outcomes, or nearly so.

    A learner often makes a mistake together with a slip on an edge case. So, failing full agreement, a mistake
    counts that agrees wherever the learner is right, on the first wrong case, and on at least half of these.
    """
    right = [_is_right(outcome, case) for outcome, case in zip(outcomes, exercise.cases, strict=True)]
    best, most = "", (len(right) - sum(right) - 1) // 2
    for mistake in exercise.mistakes:
        agrees = list(map(_same, outcomes, _wrong_outcomes(exercise, mistake.wrong)))
        if all(agrees):
            return mistake.diagnosis
        explained = sum(agrees) - sum(right)
        if all(a for a, r in zip(agrees, right, strict=True) if r) and agrees[right.index(False)] and explained > most:
            best, most = mistake.diagnosis, explained
    return best and f"{best} (This explains {most} of {right.count(False)} wrong results.)"


def _pattern(exercise: Exercise, outcomes: list[Outcome]) -> str:
    """What can be said of any exercise: all values negated, or all off by one factor."""
    pairs = [
        (got, want)
        for outcome, case in zip(outcomes, exercise.cases, strict=True)
        for got, want in zip(outcome.parts, _expected_parts(case), strict=False)
    ]
    if any(got.shape != want.shape for got, want in pairs):
        return ""
    got = np.concatenate([got.ravel() for got, _ in pairs])
    want = np.concatenate([want.ravel() for _, want in pairs])
    large = np.abs(want) > 1e-3
    if large.sum() < 2 or not np.isfinite(got).all():
        return ""
    factor = got[large][0] / want[large][0]
    if abs(factor) < 1e-6 or not np.allclose(got, factor * want, rtol=1e-4, atol=1e-6):
        return ""
    if abs(factor - 1) < 1e-3:
        return ""
    if abs(factor + 1) < 1e-4:
        return "Right up to the sign: every value is the negative of the expected one."
    return f"Right up to a factor: every value is {factor:.4g} times the expected one."


def _their_error(error: BaseException) -> str:
    """The learner's own line and the last line of the traceback; nothing of the checker's."""
    last = traceback.format_exception_only(error)[-1].strip()
    if len(last) > 300:
        last = last[:300] + " …"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
    if not frames:
        return f"Your function raised an error.\n{last}"
    line = f": {frames[-1].line}" if frames[-1].line else ""
    return f"Your function raised an error in line {frames[-1].lineno}{line}\n{last}"


@cache
def _is_theirs(filename: str) -> bool:
    if filename.startswith(("<frozen", "<__array_function__")):
        return False
    path = Path(filename)
    libraries = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))
    return "site-packages" not in path.parts and not any(path.is_relative_to(folder) for folder in libraries)


def _add_comparison(message: Message, exercise: Exercise, case: Case, outcome: Outcome) -> None:
    rows = [("input", f"{_show_arguments(exercise, case)}\n({case.label})")]
    expected = _expected_parts(case)
    names = exercise.returns or ("",) * len(expected)
    for name, want, got in zip(names, expected, outcome.parts or (None,) * len(expected), strict=False):
        shown_want, shown_got = _show_both(want, got)
        rows.append((f"expected {name}".strip(), shown_want))
        rows.append((f"got {name}".strip(), shown_got))
    message.table(rows)


def _show_arguments(exercise: Exercise, case: Case) -> str:
    return "\n".join(f"{name} = {_plain(arg)}" for name, arg in zip(exercise.parameters, case.args, strict=True))


def _show_both(want: np.ndarray, got: np.ndarray | None) -> tuple[str, str]:
    """Both with as many digits as it takes to see the difference."""
    if got is None:
        return _plain(want.tolist()), "nothing that can be compared"
    for digits in (4, 6, 9, 15):
        shown = _plain(want.tolist(), digits), _plain(got.tolist(), digits)
        if shown[0] != shown[1]:
            break
    return shown


def _plain(value: Any, digits: int = 6) -> str:
    """Numbers and nested lists the way one writes them by hand; long ones cut."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        shown = [_plain(item, digits) for item in value[:16]] + ["…"] * (len(value) > 16)
        return f"[{', '.join(shown)}]"
    if isinstance(value, float):
        return f"{value + 0.0:.{digits}g}"  # + 0.0 turns −0.0 into 0.0
    text = str(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _shape(array: np.ndarray) -> str:
    return f"shape {tuple(array.shape)}" if array.ndim else "no dimensions (one number)"


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
