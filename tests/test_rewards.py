import ast
import inspect
import time
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from course_lib import rewards, tasks
from course_lib.rewards import (
    MAX_DIGITS,
    REWARDS,
    boxed,
    exact_match_reward,
    first_integer,
    first_integer_reward,
    last_number,
    lenient_number_reward,
    numbers_in,
    parse_number,
    strict_number_reward,
)

F = Fraction


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("no number at all", []),
        # units and marks around
        ("72 clips, altogether.", [72]),
        ("72kg", [72]),
        ("**72**", [72]),
        ("__72__", [72]),
        ("$18", [18]),
        ("5%", [5]),
        (r"50\%", [50]),
        ("the 3rd of 12", [3, 12]),
        ("答案是72个", [72]),
        ("72", [72]),
        # spellings of one value
        ("72.0", [72]),
        ("072", [72]),
        ("1,000", [1000]),
        ("1,234,567.50", [F(2469135, 2)]),
        ("1\u00a0000", [1000]),
        ("1\u202f000\u2009000", [1_000_000]),
        ("1_000", [1000]),
        ("1{,}000", [1000]),
        (r"1\,000", [1000]),
        (r"1,\!000", [1000]),
        ("1.5e3 1.5E+3 15e-1", [1500, 1500, F(3, 2)]),
        ("1.5 × 10^3", [1500]),
        (r"1.5\times10^{-3}", [F(3, 2000)]),
        ("1.5×10⁻³", [F(3, 2000)]),
        # lists, and what only looks like groups of three
        ("1,2,3", [1, 2, 3]),
        ("100,200,3", [100, 200, 3]),
        ("1,50", [1, 50]),
        ("0,500", [0, 500]),
        ("1,0000", [1, 0]),
        ("1 000", [1, 0]),
        # signs
        ("-5 −5 –5 - 5", [-5, -5, -5, 5]),
        ("+5", [5]),
        ("(-5) [-5] =-5 *-5", [-5, -5, -5, -5]),
        ("-$5 $-5", [-5, -5]),
        ("3-5", [3, 5]),
        ("3 - 5", [3, 5]),
        ("3 -5", [3, -5]),
        ("3–5 3−5", [3, 5, 3, 5]),
        ("x-5, covid-19", [5, 19]),
        ("(2)-5", [2, 5]),
        ("±5 --5", [5, 5]),
        ("5--3", [5, 3]),
        # decimals
        ("3.14", [F(157, 50)]),
        (".5 -.5 $.5", [F(1, 2), F(-1, 2), F(1, 2)]),
        ("It is 5.", [5]),
        ("well...5", [5]),
        # fractions
        ("3/4 −3/4 12/4", [F(3, 4), F(-3, 4), 3]),
        ("1,000/4", [250]),
        ("1 3/4, -1 3/4", [F(7, 4), F(-7, 4)]),
        ("10 20/4", [10, 5]),
        ("1.5 3/4", [F(3, 2), F(3, 4)]),
        ("½ -½ 1½ -1½", [F(1, 2), F(-1, 2), F(3, 2), F(-3, 2)]),
        (r"\frac{3}{4} -\frac{3}{4} \frac{-3}{4} \frac{3}{-4}", [F(3, 4), F(-3, 4), F(-3, 4), F(-3, 4)]),
        (r"\dfrac{1}{2} \tfrac12 \frac1{2} 1\frac{3}{4}", [F(1, 2), F(1, 2), F(1, 2), F(7, 4)]),
        (r"x\frac{3}{4}", [F(3, 4)]),
        # no numbers
        ("3:45 and 12:30:15", []),
        ("2024-05-06, 12/05/2024", []),
        ("version 1.2.3", []),
        ("10^2 10^{-2} 10² m²", []),
        (r"x2 B12 v1.2 x_2 x_{2} x^2", []),
        ("3/0 0/0", []),
        ("Q1: 5", [5]),
    ],
)
def test_numbers_in(text, numbers):
    assert numbers_in(text) == numbers
    assert last_number(text) == (numbers[-1] if numbers else None)
    assert first_integer(text) == next((n for n in numbers if F(n).denominator == 1), None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        (" \u00a072.\n", 72),
        ("$1,000.50.", F(2001, 2)),
        ("18 $", 18),
        ("50%", 50),
        (r"\(-\frac{3}{4}\)", F(-3, 4)),
        ("$-5$", -5),
        ("**72**", 72),
        ("1 3/4", F(7, 4)),
        ("−5", -5),
        (".5", F(1, 2)),
        ("", None),
        ("72 clips", None),
        ("x = 72", None),
        ("1,2", None),
        ("3-5", None),
        ("10 20/4", None),
        ("3:45", None),
        ("10^2", None),
        ("x2", None),
        ("2x", None),
        ("3/0", None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_parse_number(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("none", None),
        (r"\boxed{72}", "72"),
        (r"\boxed{1} no \boxed{2}.", "2"),
        (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed {\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{\boxed{72}}", "72"),
        (r"\boxed{72} \boxed{73", "72"),
        (r"\boxed{7", None),
        (r"}}\boxed{72}{", "72"),
        (r"{\boxed{72}", "72"),
        (r"\boxed{}", ""),
    ],
)
def test_boxed(text, inside):
    assert boxed(text) == inside


@pytest.mark.parametrize(
    ("reward", "text", "answer", "expected"),
    [
        (lenient_number_reward, "48 + 24 = 72 clips, altogether.", "72", 1.0),
        (lenient_number_reward, "72, not 73", "72", 0.0),
        (lenient_number_reward, r"\boxed{72} after 2 days", "72.0", 1.0),
        (lenient_number_reward, r"72 \boxed{none}", "72", 0.0),
        (lenient_number_reward, "#### 1,000", "1000", 1.0),
        (lenient_number_reward, "0.75", r"\boxed{\frac{3}{4}}", 1.0),
        (lenient_number_reward, "5", "-5", 0.0),
        (lenient_number_reward, "", "0", 0.0),
        (strict_number_reward, " 72.", "72", 1.0),
        (strict_number_reward, "72 clips", "72", 0.0),
        (strict_number_reward, r"So \boxed{72.0}, in 2 steps", "72", 1.0),
        (strict_number_reward, r"\boxed{72 clips}", "72", 0.0),
        (strict_number_reward, "", "0", 0.0),
        (first_integer_reward, " 19. You add 7 and 12.", "19", 1.0),
        (first_integer_reward, " 7 + 12 = 19", "19", 0.0),
        (first_integer_reward, " -5", "-5", 1.0),
        (first_integer_reward, " −5.", "-5", 1.0),
        (first_integer_reward, " 5.", "-5", 0.0),
        (first_integer_reward, " 19.5", "19", 0.0),
        (first_integer_reward, "", "0", 0.0),
        (exact_match_reward, " blue\n", "blue ", 1.0),
        (exact_match_reward, "blue.", "blue", 0.0),
        (exact_match_reward, "72.0", "72", 0.0),
    ],
)
def test_rewards(reward, text, answer, expected):
    value = reward(text, answer)
    assert value == expected
    assert type(value) is float


@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        (lenient_number_reward, "blue"),
        (strict_number_reward, "72 clips"),
        (first_integer_reward, "1.5"),
        (first_integer_reward, ""),
        (exact_match_reward, " "),
        *[(reward, None) for reward in REWARDS.values()],
    ],
)
def test_an_answer_that_is_none_is_named(reward, answer):
    with pytest.raises(ValueError, match=r"^answer: expected") as error:
        reward("72", answer)
    assert repr(answer) in str(error.value)


@given(st.text())
def test_no_text_raises(text):
    values = numbers_in(text)
    assert last_number(text) == (values[-1] if values else None)
    assert parse_number(text) in [None, *values[:1]]
    for reward in REWARDS.values():
        assert reward(text, "72") in (0.0, 1.0)


@given(st.text(alphabet="0123456789.,/:^-−+–$%eE×x*_{}[]() \\fracboxed½²\u00a0٣", max_size=60))
def test_no_text_like_numbers_raises(text):
    assert all(isinstance(value, Fraction) for value in numbers_in(text))
    whole = parse_number(text)
    assert whole is None or numbers_in(text) == [whole]
    for reward in REWARDS.values():
        assert reward(text, "72") in (0.0, 1.0)


def spellings(value: Fraction) -> list[str]:
    """Ways to write one number."""
    sign, n, d = "-" * (value < 0), abs(value.numerator), value.denominator
    magnitudes = [f"{n}/{d}", rf"\frac{{{n}}}{{{d}}}", f"{n:,}/{d:,}"]
    if d == 1:
        magnitudes += [
            f"{n}", f"{n:,}", f"{n:_}", f"{n:,}".replace(",", "{,}"), f"{n:,}".replace(",", "\u202f"),
            f"{n}.0", f"{n:,}.00", f"00{n}", f"{n}e0", f"{n} × 10^0", f"{10 * n}e-1",
        ]  # fmt: skip
    elif n > d:
        magnitudes += [f"{n // d} {n % d}/{d}", rf"{n // d}\frac{{{n % d}}}{{{d}}}"]
    if 10**6 % d == 0:
        magnitudes += [f"{n * 10**6 // d}e-6", f"{n // d:,}.{n * 10**6 // d % 10**6:06}"]
    return [written for m in magnitudes for written in ([m, "+" + m] if not sign else ["-" + m, "−" + m, "–" + m])]


numbers = st.integers(-(10**12), 10**12).map(F) | st.fractions(max_denominator=1000) | st.integers(-99, 99).map(F)


@given(numbers)
def test_every_spelling_is_the_same_number(value):
    for written in spellings(value):
        assert parse_number(written) == value, written
        assert numbers_in(f"So it is {written} clips, altogether.") == [value], written
        answer = str(value)
        assert strict_number_reward(rf"First 3, then \boxed{{{written}}} in 7 days.", answer) == 1.0, written
        assert lenient_number_reward(f"First 3, then it is **{written}**.", answer) == 1.0, written


@given(numbers)
def test_a_negative_number_never_equals_a_positive_one(value):
    assume(value)
    for written in spellings(value):
        for reward in (lenient_number_reward, strict_number_reward):
            assert reward(written, str(-value)) == 0.0, written


@given(numbers, numbers)
def test_different_numbers_are_told_apart(a, b):
    assert lenient_number_reward(spellings(a)[0], str(b)) == float(a == b)


def test_numbers_too_long_to_be_cheap_are_passed_over():
    assert numbers_in("9" * MAX_DIGITS) == [10**MAX_DIGITS - 1]
    assert numbers_in("9" * (MAX_DIGITS + 1)) == []
    assert numbers_in("9" * 10_000 + " 5") == [5]
    assert numbers_in("1" + ",000" * 2000 + " 5") == [5]
    assert numbers_in(f"1e{MAX_DIGITS}") == [10**MAX_DIGITS]
    assert numbers_in("1e999999999 1e-999999999 1×10^999999999 1e" + "9" * 10_000) == []
    str(numbers_in(f"{'9' * MAX_DIGITS}e{MAX_DIGITS}"))  # still short enough to be printed


@pytest.mark.parametrize(
    "piece",
    [
        *("9", "9 ", "1,", "100,", "1.", "1:", "1/", "1^", "-", "1 1/2 ", "1e-990 ", "x1", "$", "\\", " ", ".", "_000"),
        *("\\boxed{", "}", "{1", "\\frac{", "\\frac{1", "\\frac{1}{2}", "1\\,000", "½", "²", "𝟗", "\0", "\n"),
    ],
)
def test_time_grows_no_faster_than_the_text(piece):
    def seconds(length):
        text = (piece * (length // len(piece) + 1))[:length]
        times = []
        for _ in range(3):
            start = time.process_time()
            for read in (numbers_in, parse_number, boxed):
                read(text)
            times.append(time.process_time() - start)
        return min(times)

    # Eight times the text: 8 times as long if linear, 64 times if quadratic.
    assert seconds(24_000) < 24 * seconds(3_000) + 0.1


def test_a_megabyte_in_linear_time():
    text = "1,000 of 3/4 is -5 at 3:45, \\frac{1}{2} -- and some words that are not numbers, as replies have. " * 12_000
    start = time.process_time()
    assert lenient_number_reward(text, "1/2") == 1.0
    assert strict_number_reward(text, "1/2") == 0.0
    assert time.process_time() - start < 20


@pytest.mark.parametrize("module", [rewards, tasks])
def test_text_is_never_executed(module):
    allowed = {"json", "math", "re", "collections", "dataclasses", "fractions", "functools", "hashlib", "itertools"}
    allowed |= {"numbers", "os", "pathlib", "random", "typing", "unicodedata", "course_lib"}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Name):
            assert node.id not in {"eval", "exec", "compile", "__import__", "globals", "breakpoint"}
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= allowed - {"os"}  # os.system is a call away
        if isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in allowed
            assert not {"system", "popen"} & {alias.name for alias in node.names}
