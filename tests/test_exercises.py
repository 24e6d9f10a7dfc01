"""Every exercise is tried with its own right and wrong answers, then the checker with answers of every kind."""

import ast
import html
import io
import json
import os
import random
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from course_lib import advantages, exercises, logprobs, losses, trajectories
from course_lib.exercises import Case, Exercise, Mistake, engine, registry, store
from course_lib.exercises.limits import TimeLimit, call_with_limit

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
ALL = list(registry.values())
FUNCTIONS = [exercise for exercise in ALL if exercise.is_function]
VALUES = [exercise for exercise in ALL if not exercise.is_function]


def by_id(exercise):
    return exercise.id


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    """No test may touch the progress file of whoever runs the tests."""
    path = tmp_path / "progress.json"
    monkeypatch.setenv("COURSE_PROGRESS", str(path))
    monkeypatch.setattr(exercises, "_hints_given", {})
    return path


# Mistakes in digits that float32 does not have.
INVISIBLE_IN_FLOAT32 = ("loses its digits", "An eps of 1e-6", "differ by 5e-17")


def judge(exercise_id, answer):
    return engine.judge(registry[exercise_id], answer)


def in_float32(function):
    """The same function, doing all of its arithmetic in float32."""

    def single(*args):
        cast = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return function(*cast)

    return single


# ---------------------------------------------------------------- the exercises


def test_there_are_enough_of_every_kind():
    lessons = [exercise.id[:2] for exercise in ALL]
    assert all(lessons.count(lesson) >= 2 for lesson in ("01", "02", "03", "04", "05"))
    kinds = [exercise.kind for exercise in ALL]
    assert len(ALL) >= 20 and kinds.count("find-the-bug") >= 3 and kinds.count("predict") >= 4


@pytest.mark.parametrize("exercise", ALL, ids=by_id)
def test_declaration_is_complete(exercise):
    diagnoses = [mistake.diagnosis for mistake in exercise.mistakes]
    lines = exercise.cell.splitlines()
    missing = {
        f"mistakes: expected at least four, got {len(diagnoses)}": len(diagnoses) < 4,
        "mistakes: expected a diagnosis of its own for each": len(set(diagnoses)) < len(diagnoses),
        f"minutes: expected at most 20, got {exercise.minutes}": exercise.minutes > 20,
        f"stub: expected at most 40 lines with its check, got {len(lines)}": len(lines) > 40,
        "stub: expected lines of at most 110 characters": max(map(len, lines)) > 110,
    }
    if exercise.is_function:
        described = ast.get_docstring(ast.parse(exercise.stub).body[0]) or ""
        labels = {case.label for case in exercise.cases}
        undescribed = [p for p in exercise.parameters if not re.search(rf"^[\w, ]*\b{p}\b.*:", described, re.M)]
        missing |= {
            f"alternatives: expected at least three, got {len(exercise.alternatives)}": len(exercise.alternatives) < 3,
            f"cases: expected at least four, got {len(exercise.cases)}": len(exercise.cases) < 4,
            "cases: expected a label of its own for each": len(labels) < len(exercise.cases),
            f"stub: expected a line of the docstring for each of {undescribed}": bool(undescribed),
        }
    assert [what for what, is_missing in missing.items() if is_missing] == []
    assert f'check("{exercise.id}", {exercise.name})' in exercise.cell


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=by_id)
def test_right_functions_pass_however_they_are_written(exercise):
    for number, source in enumerate((exercise.solution, *exercise.alternatives)):
        which = f"alternatives[{number - 1}]" if number else "solution"
        function = engine.build(source, exercise.name)
        message = engine.judge(exercise, function)
        assert message.status == "solved", f"{which} and cases do not agree: {source}\n{message.text()}"
        message = engine.judge(exercise, in_float32(function))
        assert message.status == "solved", f"{which} in float32: {source}\n{message.text()}"


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=by_id)
def test_each_wrong_function_gets_its_own_diagnosis_and_not_the_solution(exercise):
    code = [line.split("#")[0].strip() for line in exercise.solution.splitlines()[2:]]
    secret = [line for line in code if len(line) > 24 and line not in exercise.stub]
    for number, mistake in enumerate(exercise.mistakes):
        message = engine.judge(exercise, engine.build(mistake.wrong, exercise.name))
        said = f"mistakes[{number}]: {mistake.wrong}\n{message.text()}"
        assert message.status == "wrong", f"no case tells it from the solution; add one that does\n{said}"
        own = message.parts[0] == ("text", mistake.diagnosis)
        assert own, f"expected {mistake.diagnosis!r}; another mistake gives the same on all cases?\n{said}"
        assert not any(line in message.text() for line in secret), f"shows a line of the solution\n{said}"
        visible = not any(words in mistake.diagnosis for words in INVISIBLE_IN_FLOAT32)
        status = engine.judge(exercise, in_float32(engine.build(mistake.wrong, exercise.name))).status
        assert status == ("wrong" if visible else "solved"), f"in float32 it is judged {status!r}\n{said}"


@pytest.mark.parametrize("exercise", VALUES, ids=by_id)
def test_numbers_and_letters(exercise):
    assert engine.judge(exercise, exercise.solution).status == "solved"
    for mistake in exercise.mistakes:
        message = engine.judge(exercise, mistake.wrong)
        assert message.status == "wrong" and mistake.diagnosis in message.parts[0][1]
    if exercise.kind == "predict":
        for answer in (
            np.float32(exercise.solution),
            torch.tensor(exercise.solution),
            exercise.solution + 0.9 * exercise.tolerance,
        ):
            assert engine.judge(exercise, answer).status == "solved"
        assert engine.judge(exercise, 1e9).status == "wrong"
        assert engine.judge(exercise, float("nan")).status == "wrong"
        values = sorted([exercise.solution, *(mistake.wrong for mistake in exercise.mistakes)])
        assert min(np.diff(values)) > 2 * exercise.tolerance, "answers that the tolerance cannot tell apart"
    else:
        letters = re.findall(r"^#   ([A-Z])  ", exercise.stub, flags=re.MULTILINE)
        answers = sorted([exercise.solution, *(mistake.wrong for mistake in exercise.mistakes)])
        assert answers == letters, f"stub: expected lines like '#   A  text' for {answers}, got {letters}"
        assert engine.judge(exercise, f" {exercise.solution.lower()}. ").status == "solved"
        assert engine.judge(exercise, "Z").status == "wrong"
    assert engine.judge(exercise, ["no"]).status == "wrong"


@pytest.mark.parametrize("exercise", ALL, ids=by_id)
def test_an_unsolved_stub_says_so_and_leaves_no_trace(exercise, capsys, own_progress):
    namespace = {"torch": torch, "np": np, "check": exercises.check}
    exec(exercise.cell, namespace)
    fresh = capsys.readouterr().out
    assert "not solved yet" in fresh and f"{exercise.minutes} minutes" in fresh
    assert not own_progress.exists()
    store.write({key: "solved" for key in registry})
    exec(exercise.cell, namespace)
    assert capsys.readouterr().out == fresh, "the text must not depend on the progress file"


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=by_id)
def test_a_check_takes_well_under_a_second(exercise):
    function = engine.build((exercise.solution, *exercise.alternatives)[-1], exercise.name)
    start = time.process_time()
    engine.judge(exercise, function)
    engine.judge(exercise, engine.build(exercise.mistakes[-1].wrong, exercise.name))
    assert time.process_time() - start < 1


def packed_segments(contexts, outputs):
    calls = [trajectories.Call(c, y) for c, y in zip(contexts, outputs, strict=True)]
    rows = trajectories.segments(trajectories.Trajectory(calls, 1.0, 0))
    packed = [(token, m, i) for i, row in enumerate(rows) for token, m in zip(row.tokens, row.mask, strict=True)]
    return tuple(list(column) for column in zip(*packed, strict=True))


@pytest.mark.parametrize(
    ("exercise_id", "answer"),
    [
        ("01.1", lambda logits, tokens: logprobs.token_log_probs(logits[None], tokens[None]).sum()),
        ("03.4", lambda rewards: advantages.leave_one_out_advantages(rewards, [0] * len(rewards))),
        (
            "04.2",
            lambda lp, old, a, low, high: losses.clipped_surrogate(
                lp, old, a, torch.ones_like(lp), clip_low=low, clip_high=high
            ),
        ),
        (
            "04.5",
            lambda r, v, m, gamma, lam: advantages.generalized_advantages(
                r[None], v[None], m[None], gamma=gamma, lam=lam
            )[0][0],
        ),
        ("05.1", advantages.group_relative_advantages),
        ("05.3", lambda mask, mode, max_length: losses.token_weights(mask, mode, max_length=max_length)),
        ("05.5", lambda lp, ref: losses.kl_estimate(lp, ref, torch.ones_like(lp), estimator="k3")),
        ("08.1", packed_segments),
        ("08.2", lambda rewards, groups, owners: advantages.leave_one_out_advantages(rewards, groups)[owners]),
        ("08.5", lambda mask, owners: losses.token_weights(mask.double(), "trajectory-mean", owners=owners)),
        ("08.6", lambda costs, successes: advantages.efficiency_advantages(costs, successes, [0] * len(costs))),
    ],
)
def test_the_library_passes_its_own_exercises(exercise_id, answer):
    message = judge(exercise_id, answer)
    assert message.status == "solved", message.text()


# ---------------------------------------------------------------- answers of every kind


def test_an_error_shows_their_line_and_not_the_checkers():
    def leave_one_out(rewards):
        others = rewards.sum() - rewards
        return others / {}["size"]  # their line

    text = judge("03.4", leave_one_out).text()
    assert 'return others / {}["size"]  # their line' in text and "KeyError: 'size'" in text
    assert "Traceback" not in text and "engine" not in text and os.sep + "tests" not in text


def test_an_error_inside_torch_is_reported_at_their_line():
    def leave_one_out(rewards):
        return rewards @ torch.ones(99, dtype=rewards.dtype)  # their line

    text = judge("03.4", leave_one_out).text()
    assert "their line" in text and "RuntimeError" in text


@pytest.mark.parametrize("ending", [SystemExit, RecursionError, AssertionError, StopIteration, GeneratorExit])
def test_no_error_of_theirs_escapes(ending):
    def leave_one_out(rewards):
        raise ending("theirs")

    message = judge("03.4", leave_one_out)
    assert message.status == "wrong" and ending.__name__ in message.text()


def test_runaway_recursion():
    def leave_one_out(rewards):
        return leave_one_out(rewards)

    assert "RecursionError" in judge("03.4", leave_one_out).text()


def test_not_implemented_of_a_library_is_an_error_and_theirs_is_unsolved():
    def calls_abstract(rewards):
        return torch.autograd.Function.forward(rewards)

    assert judge("03.4", calls_abstract).status == "wrong"

    def half_done(rewards):
        if len(rewards) == 1:
            raise NotImplementedError
        return rewards

    assert judge("03.4", half_done).status == "unsolved"


def never(rewards):
    while True:
        pass


def never_and_swallows(rewards):
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


def sleeps(rewards):
    time.sleep(5)


@pytest.mark.parametrize("answer", [never, never_and_swallows, sleeps])
@pytest.mark.parametrize("in_main_thread", [True, False])
def test_time_limit(answer, in_main_thread, monkeypatch):
    monkeypatch.setattr(engine, "TIME_LIMIT", 0.2)
    found = []
    start = time.monotonic()
    if in_main_thread:
        found.append(judge("03.4", answer))
    else:
        thread = threading.Thread(target=lambda: found.append(judge("03.4", answer)))
        thread.start()
        thread.join()
    assert "0.2 seconds" in found[0].text() and found[0].status == "wrong"
    assert time.monotonic() - start < 4
    assert sys.stdout is not None and judge("00.1", lambda rewards: rewards - rewards.mean()).status == "solved"


def test_an_endless_loop_is_stopped_and_not_left_running():
    before = set(threading.enumerate())
    with pytest.raises(TimeLimit):
        call_with_limit(lambda: never(None), 0.1)
    assert not [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]


def test_call_with_limit_passes_values_and_errors_on():
    assert call_with_limit(lambda: 3, 1.0) == 3
    with pytest.raises(KeyError):
        call_with_limit(lambda: {}["x"], 1.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda rewards: None, "returned None"),
        (lambda rewards: "0.5", "got a str"),
        (lambda rewards: {"a": 1}, "got a dict"),
        (lambda rewards: [[1.0], [1.0, 2.0]], "different lengths"),
        (lambda rewards: (rewards - rewards.mean())[:, None], "shape (4, 1); expected is shape (4,)"),
        (lambda rewards: float(rewards[0]), "no dimensions (one number)"),
        (lambda rewards: rewards * float("nan"), "contains NaN"),
        (lambda rewards: rewards / 0 + float("inf"), "contains NaN"),
        (lambda rewards: torch.full_like(rewards, float("inf")), "contains inf"),
        (lambda rewards: (rewards - rewards.mean()) * torch.tensor(1j), "complex"),
        (lambda rewards: 3 * (rewards - rewards.mean()), "3 times the expected"),
        (lambda rewards: rewards - 0.123, "differ from the expected"),
        (lambda: 1, "cannot be called as better_than_average(rewards)"),
        (0.5, "without calling it"),
        (None, "without calling it"),
    ],
)
def test_unfit_results_are_named(answer, said):
    message = judge("00.1", answer)
    assert message.status == "wrong" and said in message.text(), message.text()


def test_the_sign_is_noticed_where_no_known_mistake_says_so():
    exercise = registry["05.7"]
    negated = engine.build(exercise.solution, exercise.name)
    assert "Right up to the sign" in judge("05.7", lambda *args: -negated(*args)).text()


def test_input_expected_and_got_are_shown():
    text = judge("00.1", lambda rewards: rewards).text()
    for line in ("input     rewards = [1, 0, 0, 1]", "expected  [0.5, -0.5, -0.5, 0.5]", "got       [1, 0, 0, 1]"):
        assert line in text


def test_mutation_is_detected_and_said():
    def right_but_in_place(rewards):
        rewards -= rewards.mean()
        return rewards

    message = judge("00.1", right_but_in_place)
    assert message.status == "wrong" and "changes its argument `rewards`" in message.text()

    def in_place_list(rewards):
        values = rewards.tolist()
        rewards[0] = 7.0
        return [value - sum(values) / len(values) for value in values]

    assert "changes its argument" in judge("00.1", in_place_list).text()


def test_randomness_and_memory_are_detected():
    calls = []

    def remembers(rewards):
        calls.append(1)
        return rewards - rewards.mean() + len(calls)

    for answer in (
        remembers,
        lambda rewards: rewards + torch.rand(1),
        lambda rewards: np.asarray(rewards) + np.random.rand(),
        lambda rewards: rewards + random.random(),
    ):
        assert "different results" in judge("00.1", answer).text()


def test_a_check_leaves_random_states_alone():
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    judge(
        "00.1",
        lambda rewards: rewards - rewards.mean() + 0 * torch.rand(1) + 0 * np.random.rand() + 0 * random.random(),
    )
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


def test_prints_and_warnings_of_theirs_are_not_shown(capsys, recwarn):
    def noisy(rewards):
        print("debugging")
        np.array([1.0]) / np.array([0.0])
        return rewards - rewards.mean()

    exercises.check("00.1", noisy)
    out = capsys.readouterr()
    assert "debugging" not in out.out and out.err == "" and not recwarn.list


@pytest.mark.parametrize(
    "answer",
    [
        lambda rewards: (rewards - rewards.mean()).half(),
        lambda rewards: (rewards - rewards.mean()).bfloat16(),
        lambda rewards: (rewards - rewards.mean()).numpy().astype(np.float32),
        lambda rewards: tuple(np.float32(r - rewards.mean()) for r in rewards),
        lambda rewards: (rewards - rewards.mean()).requires_grad_(),
        lambda rewards: [r - np.mean(rewards.astype(float)) for r in rewards],  # takes NumPy arrays only
        lambda rewards: [r - sum(rewards.copy()) / len(rewards) for r in rewards],  # takes lists only
        torch.nn.Module.__call__ and type("Module", (torch.nn.Module,), {"forward": lambda self, r: r - r.mean()})(),
    ],
)
def test_results_of_every_type_and_precision(answer):
    message = judge("00.1", answer)
    assert message.status == "solved", message.text()


def test_losses_are_checked_with_their_gradient():
    for answer, said in (
        (lambda lp, r, m: -(r * (lp * m).sum(-1)).mean().item(), "one element"),
        (lambda lp, r, m: -(r * (lp.detach() * m).sum(-1)).mean(), "no gradient"),
        (lambda lp, r, m: torch.zeros(1, requires_grad=True).sum(), "does not depend on the first argument"),
        (lambda lp, r, m: None, "returned None"),
        (lambda lp, r, m: lp, "one element"),
    ):
        message = judge("02.3", answer)
        assert message.status == "wrong" and said in message.text()


def test_a_mistake_is_recognised_in_spite_of_a_slip_on_an_edge_case():
    def sample_std_and_no_guard(rewards, group_ids):
        out = torch.zeros_like(rewards)
        for group in group_ids.unique():
            r = rewards[group_ids == group]
            out[group_ids == group] = (r - r.mean()) / r.std()
        return out

    assert "divides by G − 1" in judge("05.1", sample_std_and_no_guard).text()


def test_the_given_bug_counts_as_unsolved_and_shows_its_symptom():
    exercise = registry["05.4"]
    message = engine.judge(exercise, engine.build(exercise.stub, exercise.name))
    assert message.status == "unsolved"
    assert "expected  3" in message.text() and "got       4" in message.text()
    fixed = engine.judge(exercise, engine.build(exercise.solution, exercise.name))
    assert exercise.explanation in fixed.parts[-1]


# ---------------------------------------------------------------- check, hint, solution, progress, reset


def solve(exercise_id):
    exercise = registry[exercise_id]
    answer = engine.build(exercise.solution, exercise.name) if exercise.is_function else exercise.solution
    assert exercises.check(exercise_id, answer) is None


def test_progress_is_kept_and_reset(capsys, own_progress):
    solve("01.2")
    solve("05.2")
    exercises.check("03.4", lambda rewards: rewards)
    assert json.loads(own_progress.read_text())["exercises"] == {"01.2": "solved", "03.4": "tried", "05.2": "solved"}
    exercises.check("05.2", 1.0)
    table = exercises.progress_table()
    assert f"2 of {len(registry)} exercises solved" in table
    assert all(exercise.id in table and exercise.title in table for exercise in ALL)
    capsys.readouterr()
    assert exercises.progress() is None
    assert capsys.readouterr().out.strip() == table
    exercises.reset("05.2")
    assert store.read()[0] == {"01.2": "solved", "03.4": "tried"}
    exercises.reset()
    assert store.read()[0] == {} and list(own_progress.parent.iterdir()) == [own_progress]


def test_hints_come_one_by_one(capsys):
    hints = registry["02.2"].hints
    for number, text in enumerate(hints, start=1):
        exercises.hint("02.2")
        out = " ".join(capsys.readouterr().out.split())
        assert f"hint {number} of {len(hints)}" in out and " ".join(text.split()) in out
        left = len(hints) - number
        assert (f"{left} hint" in out) if left else ("last hint" in out)
    exercises.hint("02.2")
    out = " ".join(capsys.readouterr().out.split())
    assert all(" ".join(text.split()) in out for text in hints) and 'solution("02.2")' in out
    exercises.reset("02.2")
    exercises.hint("02.2")
    assert "hint 1 of" in capsys.readouterr().out


@pytest.mark.parametrize("exercise", ALL, ids=by_id)
def test_solution_shows_code_and_explanation(exercise, capsys):
    exercises.solution(exercise.id)
    out = " ".join(capsys.readouterr().out.split())
    assert " ".join(str(exercise.solution).split()) in out and " ".join(exercise.explanation.split()) in out


@pytest.mark.parametrize("wrong_id", ["5.2", "99.9", 5.2, None, "05.02"])
def test_an_unknown_id_is_answered_in_words(wrong_id, capsys):
    exercises.check(wrong_id, 1)
    exercises.hint(wrong_id)
    exercises.solution(wrong_id)
    if wrong_id is not None:
        exercises.reset(wrong_id)
    out = capsys.readouterr().out
    assert out.count("There is no exercise") == (3 if wrong_id is None else 4)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"exercises": 3}', '{"other": {}}', "\x00\xff"])
def test_a_damaged_progress_file_is_kept_aside(damage, own_progress, capsys):
    own_progress.write_text(damage, encoding="latin-1")
    solve("05.2")
    assert "kept as progress.json.bak" in capsys.readouterr().out
    assert own_progress.with_name("progress.json.bak").read_text(encoding="latin-1") == damage
    assert store.read() == ({"05.2": "solved"}, "")
    own_progress.write_text("again")
    assert "progress.json.bak1" in exercises.progress_table()
    assert own_progress.with_name("progress.json.bak").read_text(encoding="latin-1") == damage


def test_progress_that_cannot_be_saved_is_said_and_does_not_stop_the_check(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "file" / "progress.json"))
    solve("05.2")
    out = capsys.readouterr().out
    assert "solved" in out and "could not be" in out


def test_an_interrupted_write_leaves_the_old_file(monkeypatch, own_progress):
    store.write({"05.2": "solved"})
    before = own_progress.read_text()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in store.write({})
    assert own_progress.read_text() == before and list(own_progress.parent.iterdir()) == [own_progress]


def test_where_the_progress_file_is(monkeypatch, tmp_path):
    monkeypatch.delenv("COURSE_PROGRESS")
    (tmp_path / "course" / "course_lib").mkdir(parents=True)
    (tmp_path / "course" / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "course" / "notebooks")
    assert store.progress_path() == tmp_path / "course" / ".course_progress.json"


def test_messages_survive_a_console_without_unicode(monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    exercises.check("05.2", 15)
    console.flush()
    assert b"05.2 The advantage of a rare success: not right yet" in console.buffer.getvalue()


def test_html_says_the_same_and_escapes_what_it_shows():
    def leave_one_out(rewards):
        raise ValueError("<script>alert(1)</script>")

    page = judge("03.4", leave_one_out).html()
    assert "&lt;script&gt;" in page and "<script>" not in page
    message = judge("00.1", lambda rewards: rewards)
    words = html.unescape(re.sub(r"<[^>]+>", " ", message.html()))
    assert "".join(words.split()) == "".join(message.text().split())
    unsolved = engine.judge(registry["00.1"], engine.build(registry["00.1"].stub, registry["00.1"].name))
    assert "<code>raise NotImplementedError</code>" in unsolved.html()


# ---------------------------------------------------------------- adding one


def test_a_teacher_adds_an_exercise_in_one_place(tmp_path, monkeypatch, capsys):
    (tmp_path / "lesson_99.py").write_text(
        '''
from course_lib.exercises.exercise import Case, Exercise, Mistake

EXERCISES = (
    Exercise(
        id="99.1",
        title="Twice",
        minutes=1,
        difficulty=1,
        kind="code",
        stub=\'\'\'
def twice(x):
    """x: one number; returns: one number"""
    raise NotImplementedError
\'\'\',
        hints=("Multiply.", "By 2."),
        solution="def twice(x):\\n    return 2 * x",
        explanation="2x = x + x.",
        cases=(Case((3.0,), 6.0, "three"), Case((0.0,), 0.0, "zero")),
        mistakes=(Mistake("def twice(x):\\n    return x * x", "That is the square."),),
    ),
)
''',
        encoding="utf-8",
    )
    monkeypatch.setattr(exercises, "__path__", [*exercises.__path__, str(tmp_path)])
    monkeypatch.setattr(exercises, "registry", exercises._collect())
    exercises.check("99.1", lambda x: x * x)
    assert "That is the square." in capsys.readouterr().out
    exercises.check("99.1", lambda x: x + x)
    assert "99.1 Twice: solved" in capsys.readouterr().out
    assert "Twice" in exercises.progress_table()


def test_declarations_that_cannot_work_are_refused():
    given = dict(
        id="99.1",
        title="t",
        minutes=1,
        difficulty=1,
        kind="predict",
        stub="x = None",
        hints=("a", "b"),
        solution=1.0,
        explanation="e",
        mistakes=(Mistake(2.0, "d"),),
        tolerance=0.1,
    )
    Exercise(**given)
    for change, said in (
        ({"id": "9.1"}, "id"),
        ({"kind": "essay"}, "kind"),
        ({"difficulty": 6}, "difficulty"),
        ({"hints": ("a",)}, "hints"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"cases": (Case((1.0,), 1.0, "c"),)}, "cases"),
        ({"stub": "x = 3"}, "stub"),
        ({"kind": "code", "stub": "def f(x): pass", "cases": (Case((1.0,), 1.0, "c"),)}, "stub"),
    ):
        with pytest.raises(ValueError, match=said):
            Exercise(**{**given, **change})


# ---------------------------------------------------------------- the notebooks


def notebook_cells(path, kind="code"):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.mark.parametrize("lesson", sorted({exercise.id[:2] for exercise in ALL}))
def test_notebooks_hold_every_exercise_once_and_word_for_word(lesson):
    (notebook,) = list(NOTEBOOKS.glob(f"{lesson}_*.ipynb")) or [None]
    if notebook is None:
        pytest.skip(f"lesson {lesson} has no notebook yet")
    cells, prose = notebook_cells(notebook), notebook_cells(notebook, "markdown")
    for exercise in (exercise for exercise in ALL if exercise.id.startswith(lesson)):
        for text, places in ((exercise.cell, cells), (exercise.heading, prose)):
            found = sum(text in place for place in places)
            assert found == 1, (
                f"{notebook.name}: expected this once, got it {found} times. Where the exercise belongs, put a code "
                f'cell check("{exercise.id}", None) unless it has one; then run\n  python tools/notebooks.py exercises '
                f"notebooks/{notebook.name}\n  python tools/notebooks.py execute notebooks/{notebook.name}\n\n{text}"
            )


def test_notebooks_check_no_exercise_that_does_not_exist_and_none_twice():
    checked = [
        found
        for notebook in sorted(NOTEBOOKS.glob("*.ipynb"))
        for cell in notebook_cells(notebook)
        for found in re.findall(r'\bcheck\("([^"]+)"', cell)
    ]
    assert set(checked) <= set(registry)
    assert len(set(checked)) == len(checked)
