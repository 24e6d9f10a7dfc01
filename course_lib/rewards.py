r"""Rewards that can be checked: does a reply contain the right number?

Numbers are read exactly, as `fractions.Fraction`, and compared as values: 72, 72.0 and 72.00 are one
number, 1,000 and 1000 are one number, 5 and −5 are two. Text is only ever searched; nothing a model wrote is
evaluated.

How numbers are read:

| written | read as |
|---|---|
| `72 clips`, `72kg`, `$72`, `72%`, `72.` | 72: units are set aside, a percent sign too (50% is 50) |
| `1,000`, `1_000`, `1{,}000`, `1\,000` | 1000; so with no-break and thin spaces, never with plain ones |
| `1,2,3` and `1,50` | 1, 2, 3 and 1, 50: not groups of three, so a list; a comma is no decimal point |
| `-5`, `−5`, `–5`, `-$5`, `is -5` | −5: a sign touches its number and follows no operand |
| `3-5`, `3 - 5`, `x-5`, `covid-19` | 3, 5 and 3, 5 and 5 and 19: here the dash joins or subtracts |
| `3/4`, `\frac{3}{4}`, `¾` | 3/4 |
| `1 3/4`, `1\frac{3}{4}`, `1¾` | 7/4: a whole number, then a proper fraction |
| `1.5e3`, `1.5 × 10^3`, `1.5\times10^{3}` | 1500 |
| `3:45`, `2024-05-06`, `12/05/2024`, `1.2.3` | nothing: times, dates, versions |
| `10^2`, `m²`, `x2`, `3/0` | nothing: powers, names, no number at all |

Number words ("seven") are not read, nor is a number of more than `MAX_DIGITS` characters.
"""

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from unicodedata import normalize

MAX_DIGITS = 1000
"""Longer numbers and larger exponents are passed over: exact arithmetic on them would not be cheap."""

# Typography first, so that the grammar below is written in ASCII.
_SAME = str.maketrans(dict.fromkeys("−–‐‑﹣-", "-") | dict.fromkeys("⁄∕", "/") | {"+": "+"})
_SUPERSCRIPT = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_FRAC = re.compile(r"\\[dt]?frac *" + r" *".join([r"(?:\{ *([-+]?)([\d.,]++) *\}|()(\d))"] * 2))
_GROUP_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|[_\u00a0\u2009\u202f])(?=\d{3}(?!\d))")

# A run is digits glued by single marks; it is taken whole, so that no reading starts in the middle of one.
_RUN = r"\d++(?:(?:[,.:/]|\^\{?[-+]?)\d++)*+"
# In turn: a name (x2, x_{2}), a power (^2), a date (2024-05-06).
_NOT_A_NUMBER = r"[A-Za-z](?:_\{?[-+]?)?\d++(?:\.\d++)*+|\^\{?[-+]?\d++|\d{4}-\d\d?-\d\d?(?!\d)"
_NUMBER = rf"""
    (?P<sign>(?<![A-Za-z\d_)\]}}%-])[-+])?+
    (?:\\?[$€£¥])?
    (?P<run>{_RUN}|(?<![A-Za-z\d.])\.\d++)
    (?:(?:[eE]|[ ]?(?:[×x*]|\\times|\\cdot)[ ]?10\^\{{?)(?P<exponent>[-+]?\d++)\}}?)?
    (?:[ ](?P<fraction>\d++/\d++)(?![,.:/^]\d))?
"""
_SCAN = re.compile(rf"{_NOT_A_NUMBER}|{_NUMBER}", re.VERBOSE)
_WHOLE = re.compile(rf"(?:\s|[\\$€£¥*`(\[])*+{_NUMBER}(?:\s|[\\$€£¥%*`)\].])*+", re.VERBOSE)
_DECIMAL = r"(?:(?:[1-9]\d{0,2}(?:,\d{3})++|\d++)(?:\.\d++)?|\.\d++)"
_RATIONAL = re.compile(rf"{_DECIMAL}(?:/{_DECIMAL})?")
_BRACE = re.compile(r"\\[{}]|(?P<box>\\boxed\s*+\{)|(?P<open>\{)|(?P<close>\})")


def _plain(text: str) -> str:
    """The text with one spelling for each sign, fraction, power and group separator."""

    def apart(match: re.Match, written: str) -> str:  # 1½ is "1 1/2", -½ is "-1/2"
        before = match.string[match.start() - 1 : match.start()]
        return " " + written if before.isalnum() else written

    def frac(match: re.Match) -> str:
        sign_n, n, _, digit_n, sign_d, d, _, digit_d = (group or "" for group in match.groups())
        negative = (sign_n == "-") != (sign_d == "-")
        return apart(match, f"{'-' * negative}{n or digit_n}/{d or digit_d}")

    text = _VULGAR.sub(lambda m: apart(m, normalize("NFKC", m[0])), text).translate(_SAME)
    text = _SUPERSCRIPT.sub(lambda m: "^" + normalize("NFKC", m[0]).translate(_SAME), text)
    return _GROUP_SEPARATOR.sub(",", _FRAC.sub(frac, text))


def _rational(written: str) -> Fraction | None:
    """The value of 12, 1,000.5 or 3/4; None for anything else."""
    if len(written) > MAX_DIGITS:
        return None
    if written.isdecimal():  # most are, and this is four times as fast
        return Fraction(int(written))
    if not _RATIONAL.fullmatch(written):
        return None
    numerator, _, denominator = written.replace(",", "").partition("/")
    divisor = Fraction(denominator or 1)
    return Fraction(numerator) / divisor if divisor else None


def _values(match: re.Match) -> list[Fraction]:
    """The numbers in one match of _NUMBER: one, or several (a list), or none (a time, a power)."""
    run, exponent, fraction = match["run"], match["exponent"], match["fraction"]
    is_list = "," in run and not _RATIONAL.fullmatch(run)
    values = [_rational(part) for part in (run.split(",") if is_list else [run])]
    if exponent and values[-1] is not None:
        small = len(exponent) <= 6 and abs(int(exponent)) <= MAX_DIGITS
        values[-1] = values[-1] * Fraction(10) ** int(exponent) if small else None
    if fraction:
        part = _rational(fraction)
        if part is not None and 0 < part < 1 and run.isdecimal() and not exponent and values[-1] is not None:
            values[-1] += part
        else:
            values.append(part)
    if match["sign"] == "-" and values[0] is not None:
        values[0] = -values[0]
    return [value for value in values if value is not None]


def _numbers(text: str) -> Iterator[Fraction]:
    for match in _SCAN.finditer(_plain(text)):
        if match["run"]:
            yield from _values(match)


def numbers_in(text: str) -> list[Fraction]:
    """Every number in a text, in order; the table at the top of this module says what is one.

    Example:
        >>> [str(n) for n in numbers_in("From 1,000 she took −3/4 and 2.50 at 3:45, so 3-5 remain.")]
        ['1000', '-3/4', '5/2', '3', '5']
    """
    return list(_numbers(text))


def parse_number(text: str) -> Fraction | None:
    r"""The number a text consists of, or None if it says anything else.

    White space, currency and percent signs, math and Markdown marks and a closing period may stand around it.

    Example:
        >>> parse_number(" $1,000.50. "), parse_number(r"\(-\frac{3}{4}\)"), parse_number("72 clips")
        (Fraction(2001, 2), Fraction(-3, 4), None)
    """
    match = _WHOLE.fullmatch(_plain(text))
    values = _values(match) if match else []
    return values[0] if len(values) == 1 else None


def first_integer(text: str) -> int | None:
    """The first number in a text whose value is whole, or None.

    Example:
        >>> first_integer(" -5, because 7 - 12 = -5"), first_integer("1.5 or 2"), first_integer("none")
        (-5, 2, None)
    """
    return next((value.numerator for value in _numbers(text) if value.denominator == 1), None)


def last_number(text: str) -> Fraction | None:
    """The last number in a text, or None.

    Example:
        >>> last_number("48 + 24 = 72 clips, altogether.")
        Fraction(72, 1)
    """
    last = None
    for last in _numbers(text):  # noqa: B007
        pass
    return last


def boxed(text: str) -> str | None:
    r"""What stands in the last complete LaTeX \boxed{...} of a text, or None.

    Braces inside it are balanced. Of a box in a box the inner one counts. A box that is never closed is none.

    Example:
        >>> boxed(r"first \boxed{1}, no: \boxed{\frac{3}{4}}, and \boxed{cut off")
        '\\frac{3}{4}'
    """
    opened: list[tuple[int, bool]] = []
    last = None
    for match in _BRACE.finditer(text):
        if match["box"] or match["open"]:
            opened.append((match.end(), bool(match["box"])))
        elif match["close"] and opened:
            start, is_box = opened.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[slice(*last)]


def _final(text: str) -> str:
    box = boxed(text)
    return text if box is None else box


def _answer_value(answer: str) -> Fraction:
    value = parse_number(_final(answer)) if isinstance(answer, str) else None
    if value is None:
        raise ValueError(f"answer: expected one number as text, such as '72' or '3/4', got {answer!r:.200}")
    return value


def lenient_number_reward(text: str, answer: str) -> float:
    r"""1.0 if the reply's last number equals the answer, else 0.0.

    A reply with a complete \boxed{...} is read inside its last box only.

    Args:
        text: the reply.
        answer: the right number.

    Raises:
        ValueError: if the answer is not a number.

    Example:
        >>> lenient_number_reward("48 + 24 = 72 clips, altogether.", "72.0")
        1.0
    """
    value = _answer_value(answer)
    return float(last_number(_final(text)) == value)


def strict_number_reward(text: str, answer: str) -> float:
    r"""1.0 if the reply's last \boxed{...}, or the whole reply if it has none, is just the answer; else 0.0.

    Args:
        text: the reply.
        answer: the right number.

    Raises:
        ValueError: if the answer is not a number.

    Example:
        >>> strict_number_reward(r"It is \boxed{72}: 2 steps.", "72"), strict_number_reward("It is 72.", "72")
        (1.0, 0.0)
    """
    value = _answer_value(answer)
    return float(parse_number(_final(text)) == value)


def first_integer_reward(text: str, answer: str) -> float:
    """1.0 if the first whole number in the reply equals the answer, else 0.0.

    For replies that were started for the model ("The answer is"), so that its first number is its answer.

    Args:
        text: the reply.
        answer: the right whole number.

    Raises:
        ValueError: if the answer is not a whole number.

    Example:
        >>> first_integer_reward(" 19. You add 7 and 12.", "19"), first_integer_reward(" 7 + 12 = 19", "19")
        (1.0, 0.0)
    """
    value = _answer_value(answer)
    if value.denominator != 1:
        raise ValueError(f"answer: expected a whole number as text, such as '72', got {answer!r:.200}")
    return float(first_integer(text) == value)


def exact_match_reward(text: str, answer: str) -> float:
    """1.0 if the reply is the answer, letter for letter, apart from white space around both; else 0.0.

    Args:
        text: the reply.
        answer: the right text.

    Raises:
        ValueError: if the answer is blank.

    Example:
        >>> exact_match_reward(" blue\\n", "blue"), exact_match_reward("Blue", "blue")
        (1.0, 0.0)
    """
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"answer: expected some text, got {answer!r:.200}")
    return float(text.strip() == answer.strip())


REWARDS: dict[str, Callable[[str, str], float]] = {
    "lenient-number": lenient_number_reward,
    "strict-number": strict_number_reward,
    "first-integer": first_integer_reward,
    "exact-match": exact_match_reward,
}
"""The reward functions of this module by the name a command line can use."""
