"""Whatever comes in: the mathematics gives what a plain loop in float64 gives or a ValueError that names the argument,
and readers of texts, files and answers give what is there or say what is wrong with it.

`CASES` is the table: a function, arguments drawn for it, and the loop. One of them is spoilt in a fifth of the rounds.
"""

import inspect
import json
import math
import random
import re
import socketserver
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import plain_loops as plain
import pytest
import torch
from plain_loops import flat, largest

from course_lib import advantages, engines, logprobs, losses, rewards, runs, sampling, trajectories, tree
from course_lib.checkpoints import newest_good_checkpoint, save_checkpoint
from course_lib.research import Corpus
from course_lib.tasks import load_jsonl
from course_lib.training import GRPOConfig
from course_lib.trajectories import Call, Trajectory

ROOT = Path(__file__).resolve().parents[1]
EXHAUSTIVE = [pytest.mark.slow, pytest.mark.exhaustive]
HUGE = 1e12  # from here on a result may be too large for float32, and a ValueError that says so is an answer


# --- what is drawn --------------------------------------------------------------------------------------------------


class Dice(random.Random):
    """Draws arguments as somebody might pass them."""

    def often(self, percent):
        return self.random() < percent / 100

    def size(self):
        return self.choice([0, 1, 1, 2, 3, 4, 5])

    def values(self, *shape):
        """Numbers of one order of magnitude, now and then one of another among them."""
        unit = self.choice([1.0] * 8 + [1e4, 1e30, 1e-30, 1e-44])
        flat = [self.choice([0.0, 1.0, -1.0, 0.5, self.gauss(0, 2)]) * unit for _ in range(math.prod(shape))]
        if flat and self.often(10):
            flat[self.randrange(len(flat))] = self.choice([1e30, -1e30, 1e4, 1e-44])
        return torch.tensor(flat, dtype=torch.float64).reshape(shape)

    def dress(self, values):
        """The same, up to rounding, as a list, an array or a tensor of some dtype."""
        if values.numel() == 0 or not values.isfinite().all():
            kinds = ["float64", "float32", "numpy"]
        elif values.abs().max() > 6e4:
            kinds = ["float64", "float32", "numpy", "list"]
        else:
            kinds = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "numpy", "list"]
        kind = self.choice(kinds)
        if kind == "list":
            return values.tolist()
        if kind == "numpy":
            return values.numpy().astype(self.choice([np.float64, np.float32]))
        if kind in ("uint8", "bool"):
            values = values.round().abs().clamp(max=8)
        values = values.to(getattr(torch, kind))
        if values.ndim == 2 and self.often(20):
            values = values.T.contiguous().T
        return values.requires_grad_() if values.is_floating_point() and self.often(20) else values

    def mask(self, rows, width):
        """(B, T) zeros and ones, and the same dressed."""
        mask = torch.tensor([[self.often(65) for _ in range(width)] for _ in range(rows)], dtype=torch.bool)
        mask = mask.reshape(rows, width)
        kinds = [torch.bool, torch.int64, torch.float32, torch.float64, torch.float16, torch.uint8]
        dressed = mask.to(self.choice(kinds))
        return mask, self.choice([dressed, dressed.numpy(), dressed.tolist()] if rows * width else [dressed])

    def masked(self, mask):
        """Values at active tokens, and anything at all under the mask."""
        values, junk = self.values(*mask.shape), self.choice([0.0, math.nan, math.inf, -math.inf, 1e30])
        return self.dress(torch.where(mask, values, junk) if self.often(50) else values)

    def ids(self, count):
        """Ids of groups or owners: numbers, words, tuples, an array or a tensor."""
        numbers = [self.randrange(3) for _ in range(count)]
        return self.choice([list, tuple, torch.tensor, np.array, lambda n: list(map(str, n)),
                            lambda n: [(i,) for i in n], lambda n: list(torch.tensor(n))])(numbers)  # fmt: skip

    def tokens(self, *shape, vocabulary=5):
        """Token ids as a tensor of some integer dtype, an array (uint16 is how corpora are stored) or a list."""
        flat = [self.randrange(vocabulary) for _ in range(math.prod(shape))]
        array = np.array(flat, dtype=np.int64).reshape(shape)
        kinds = ["int64", "int32", "int16", "uint8", "uint16", "uint32"]
        array = array.astype(self.choice(kinds))
        return self.choice([torch.as_tensor(array), array, array.tolist()] if flat else [torch.as_tensor(array)])

    def trajectories(self):
        """Attempts of several calls, some of which go on from the one before."""
        made, kept = [], self.often(80)
        for _ in range(self.size()):
            calls, seen = [], []
            for _ in range(self.size()):
                fresh = [self.randrange(5) for _ in range(self.size())]
                context = [*seen, *fresh] if self.often(50) else fresh
                output = [self.randrange(5) for _ in range(self.size())]
                calls.append(Call(context, output, [-self.random() for _ in output] if kept else None))
                seen = [*context, *output]
            made.append(Trajectory(calls, self.choice([0.0, 1.0, 0.5, 1e30, 1]), self.randrange(2)))
        return made

    def json(self, depth=3):
        """Any JSON value."""
        if depth == 0 or self.often(50):
            return self.choice([None, True, False, 0, 1, -1, 2, 7, 0.5, -0.5, 1e308, math.nan, math.inf, 10**400, "",
                                "x", "step", "\0", "\ud800", [], {}])  # fmt: skip
        parts = [self.json(depth - 1) for _ in range(self.size())]
        return parts if self.often(50) else {self.choice("abcde"): part for part in parts}

    def mutated(self, value):
        """`value` with one place in it replaced by any JSON value, or taken out."""
        if not isinstance(value, dict | list) or not value or self.often(15):
            return self.json()
        value = value.copy()
        place = self.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if self.often(15):
            del value[place]
        else:
            value[place] = self.mutated(value[place])
        return value

    def harmed(self, content):
        """Bytes with some of them flipped, cut, doubled, put in or replaced by other JSON; or others altogether."""
        content, at, other = bytearray(content), self.randrange(len(content) + 1), self.randrange(len(content) + 1)
        start, end = sorted((at, other))
        match self.randrange(9):
            case 0:
                content[at : at + 1] = self.randbytes(1)
            case 1:
                del content[start:end]
            case 2:
                content[at:at] = content[start:end]
            case 3:
                content[at:at] = self.randbytes(self.size())
            case 4:
                content = self.randbytes(self.randrange(200))
            case 5:
                content = self.choice([b"[", b'{"a":', b'"']) * 100_000
            case 6:
                content = b"\n".join(json.dumps(self.json()).encode() for _ in range(self.size()))
            case _:
                lines = bytes(content).split(b"\n")
                place = self.choice([number for number, line in enumerate(lines) if line.strip()])
                for part in (slice(place, place + 1), slice(None)):  # a value on a line, or one on all of them
                    with suppress(ValueError):
                        lines[part] = [json.dumps(self.mutated(json.loads(b"\n".join(lines[part])))).encode()]
                        break
                content = b"\n".join(lines)
        return bytes(content)


# --- what is compared -----------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A row of the table.

    Attributes:
        function: what is tested.
        draw: its arguments, from dice.
        plain: the loop, given the same arguments read as float64, and `top`, the logarithm of the largest number of the
            dtype that is computed in.
        spoilt: for each argument that can be, the kind of spoiling.
        names: what an error may name beside the arguments: parts of them.
    """

    function: Callable
    draw: Callable[[Dice], dict[str, Any]]
    plain: Callable[..., Any]
    spoilt: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()


NUMBERS = ["x", "0.5", math.nan, -1.0, [1.0, 2.0], torch.tensor([1.0, 2.0]), {}, 10**400, -(10**400), 1j]
NO_TENSOR = [None, "x", {}, object(), [[1.0, 2.0], [3.0]], np.array([None]), torch.tensor([1j]), [[10**400]]]
NO_TOKENS = [None, "x", {}, torch.zeros(7, 7), [["x"]], [[0.5]], [[10**400]], [["1"]]]
WRONG = {  # what is never right, by the kind of argument
    "values": lambda good: [*NO_TENSOR, torch.zeros(7, 7), torch.zeros(2, 2, 2, 2)],
    "weights": lambda good: [*NO_TENSOR, [-1.0], [math.nan], [math.inf]],
    "mask": lambda good: [*NO_TENSOR, torch.full((2, 2), 0.5), torch.zeros(2), 5],
    "ids": lambda good: [None, 5, [*good, 1], [[1]] * (len(good) + 1), [math.nan] * (len(good) + 1), torch.zeros(2, 2)],
    "number": lambda good: [*NUMBERS, None],
    "choice": lambda good: ["", "x", None, 5, ["std"], {}, math.nan, np.array(["std", "none"]), torch.ones(2)],
    "logits": lambda good: [None, "x", 5, {}, torch.zeros(3), torch.zeros(1, 2, 3, dtype=torch.long), [["x"]]],
    "tokens": lambda good: [*NO_TOKENS, torch.full((7, 7), 9)],
    "token rows": lambda good: [*NO_TOKENS, [1, 2], 5],
    "ends": lambda good: [None, "x", 0.5, [0.5], {}, [10**400]],
    "sequences": lambda good: [None, 5, [], [[]], [[1], []], [5], [[1], 5], [[1], None]],
    "token sequences": lambda good: [None, 5, [], [[1], []], [[1], 5], ["ab"], [[1.5]], [["a"]], [[None]], [[10**400]]],
    "token": lambda good: [None, "x", -1, 0.5, [], 10**400],
    "token list": lambda good: [None, 5, [-1], [0.5], ["x"], [None], torch.tensor([0.5]), [[1]], [10**400]],
    "log-probs": lambda good: [5, ["x"], [None], [math.nan], [math.inf], [[1.0]], [1.0] * 9, [10**400]],
}


def seen(value):
    """An argument as the function reads it, in plain Python: float64, None where there is nothing."""
    if isinstance(value, list | tuple) and any(v is None for v in value):
        return [math.nan if v is None else float(torch.tensor(v)) for v in value]
    try:
        if isinstance(value, torch.Tensor | np.ndarray) or (isinstance(value, list) and value and _numeric(value)):
            return torch.as_tensor(value).detach().double().tolist()
    except ValueError:  # rows of different lengths
        pass
    return value


def _numeric(values):
    return all(_numeric(v) if isinstance(v, list) else isinstance(v, int | float) for v in values)


def in_float64(result):
    """Whether a result, or every one of several, is float64."""
    parts = result if isinstance(result, tuple) else vars(result).values() if hasattr(result, "__dict__") else []
    kinds = {part.dtype for part in [result, *parts] if isinstance(part, torch.Tensor) and part.is_floating_point()}
    return kinds == {torch.float64}


def play(case: Case, dice: Dice) -> None:
    """One round: draw, spoil perhaps, call, compare."""
    arguments, spoilt = case.draw(dice), None
    if case.spoilt and dice.often(20):
        spoilt = dice.choice(list(case.spoilt))
        kind = case.spoilt[spoilt]
        wrong = WRONG[kind.removesuffix(" or None")](arguments.get(spoilt))
        arguments[spoilt] = dice.choice([value for value in wrong if value is not None or not kind.endswith("or None")])
    try:
        got = case.function(**arguments)
    except ValueError as error:
        names = {*inspect.signature(case.function).parameters, *case.names}
        assert set(re.split(", ?", str(error).partition(":")[0])) <= names, f"names no argument: {error}"
        got, refused = None, error
    else:
        assert spoilt is None, f"taken: {spoilt} = {arguments[spoilt]!r}"
    if spoilt is None:
        compare(case, arguments, got, None if got is not None else refused)


def compare(case, arguments, got, refused):
    double = in_float64(got)
    limits = torch.finfo(torch.float64 if double else torch.float32)
    top = {"top": math.log(limits.max)} if "top" in inspect.signature(case.plain).parameters else {}
    expected = case.plain(**{name: seen(value) for name, value in arguments.items()}, **top)
    expected = expected if isinstance(expected, plain.Near) else plain.Near(expected)
    want = flat(expected.value)
    if refused:
        large = largest(list(arguments.values())) >= HUGE or any(w != w or abs(w) > limits.max**0.9 for w in want if w)
        assert large, f"refused: {refused}"
        return
    have, scales = flat(got), expected.scale
    scales = flat(scales) if isinstance(scales, list) else [scales] * len(want)
    assert len(have) == len(want) == len(scales)
    close, near = (1e-9, 1e-12) if double else (1e-4, 1e-5)
    if getattr(got, "dtype", None) in (torch.float16, torch.bfloat16):
        close, near = 1e-2, 1e-6
    for number, right, size in zip(have, want, scales, strict=True):
        if right is None:
            assert number is None or not math.isfinite(number)
        elif not isinstance(right, float) or math.isinf(right):
            assert number == right, (number, right)
        elif math.isnan(right) or abs(right) > limits.max / 2**22:
            assert math.isfinite(number), f"not finite: {number}"
        else:
            assert abs(number - right) <= close * abs(right) + near * size + 16 * limits.tiny, (number, right)


# --- the table ------------------------------------------------------------------------------------------------------


def row_sizes(sequences, max_tokens):
    """What is said of split_rows: each index once, and no row above the budget but a single sequence."""
    rows = tree.split_rows(sequences, max_tokens)
    fits = all(len(row) == 1 or tree.tree_size([sequences[i] for i in row]) <= max_tokens for row in rows)
    return [sorted(i for row in rows for i in row), fits]


def of_groups(dice, name="rewards"):
    count = dice.choice([0, 1, 2, 3, 4, 6, 8])
    values, ids = dice.dress(dice.values(count)), dice.ids(count)
    if isinstance(values, list) and dice.often(30):
        values = [None if dice.often(20) else value for value in values]
    missing = isinstance(values, list) and None in values
    return {name: values, "group_ids": ids, "missing": "ignore" if missing else dice.choice(["error", "ignore"])}


def of_group_relative(dice):
    options = {"scale": ["std", "none"], "ddof": [0, 1], "eps": [0.0, 1e-4, 1, 1e30]}
    return of_options(of_groups, **options)(dice)


def of_efficiency(dice):
    count = dice.choice([0, 1, 2, 3, 5, 8])
    solved = torch.tensor([dice.often(70) for _ in range(count)], dtype=torch.bool)
    costs = dice.values(count).abs()
    costs = dice.dress(torch.where(solved, costs, dice.choice([math.nan, math.inf, -1.0])) if dice.often(40) else costs)
    solved = solved.to(dice.choice([torch.bool, torch.float32, torch.int64]))
    return {"costs": costs, "successes": dice.choice([solved, solved.tolist()]), "group_ids": dice.ids(count)}


def of_tokens(dice, names):
    """A mask and values for it; a row's advantage may stand for all of its tokens."""
    mask, dressed = dice.mask(dice.size(), dice.size())
    arguments = {name: dice.masked(mask) for name in names}
    if "advantages" in names and dice.often(50):
        arguments["advantages"] = dice.dress(dice.values(len(mask)))
    if names[0].endswith("log_probs") and dice.often(50):  # near each other, as they are in a run
        first = torch.as_tensor(arguments[names[0]]).detach()
        first = first if first.is_floating_point() else first.float()
        for name in set(names[1:]) - {"advantages"}:
            arguments[name] = first + torch.tensor(dice.gauss(0, 0.3)).to(first) * torch.arange(mask.shape[1])
    return arguments | {"mask": dressed}


def of_aggregate(dice):
    mask, _ = dice.mask(dice.size(), dice.size())
    weights = dice.dress(torch.where(mask, dice.values(*mask.shape), 0))
    return {"per_token": dice.masked(torch.as_tensor(weights) != 0), "weights": weights}


def of_weights(dice):
    """Everything that says how tokens are weighted."""
    rows = dice.size()
    _, dressed = dice.mask(rows, dice.size())
    return {"mask": dressed, "mode": dice.choice(losses.MODES), "max_length": dice.choice([1, 7, 3.0, 4096, 2**40]),
            "owners": dice.ids(rows)}  # fmt: skip


CLIPS = {"clip_low": [0, 0.2, 0.9, math.inf, 1e300], "clip_high": [0, 0.28, 5, math.inf, 1e300],
         "dual_clip": [None, 1.5, 3, 1e300], "ratio_level": ["token", "sequence"]}  # fmt: skip
LEVELS = ["token", "sequence"]
CAPS = [1e-3, 2, math.inf, 1e300]


def of_grpo(dice):
    optional = ["ref_log_probs"] * dice.often(70) + ["rollout_log_probs"] * dice.often(60)
    arguments = of_tokens(dice, ["log_probs", "old_log_probs", "advantages", *optional])
    dtype = dice.choice([torch.float32, torch.float64])  # one for all, so that it is known what overflows
    arguments |= {name: torch.as_tensor(arguments[name]).to(dtype) for name in arguments if name != "mask"}
    choices = CLIPS | {
        "beta": [0, 0.1, 1, 1e30] if "ref_log_probs" in arguments else [0.0],
        "kl_estimator": ["k1", "k2", "k3"], "importance_cap": CAPS, "importance_level": LEVELS, "mode": losses.MODES,
        "max_length": [7], "owners": [dice.ids(len(arguments["mask"]))],
    }  # fmt: skip
    return arguments | {name: dice.choice(values) for name, values in choices.items()}


def of_positive(dice):
    return {"weights": dice.dress(dice.values(dice.size(), dice.size()).abs())}


def of_logits(dice):
    rows, width, vocabulary = dice.size(), dice.size(), dice.choice([1, 2, 5])
    logits = dice.values(rows, width, vocabulary)
    if dice.often(30) and logits.numel():
        logits[..., dice.randrange(vocabulary)] = dice.choice([-math.inf, -math.inf, math.inf, math.nan])
    fits = logits[logits.isfinite()].abs().max() < 6e4 if logits.isfinite().any() else True
    kinds = [torch.float64, torch.float32, *[torch.float16, torch.bfloat16] * bool(fits)]
    logits = logits.to(dice.choice(kinds))
    return {"logits": logits, "temperature": dice.choice([1.0, 1, 0.6, 2.5, 1e-6, 1e6])}


def of_log_probs(dice):
    arguments = of_logits(dice)
    *shape, vocabulary = arguments["logits"].shape
    return arguments | {"tokens": dice.tokens(*shape, vocabulary=vocabulary)}


def of_draw(dice):
    rows, vocabulary = dice.size(), dice.choice([1, 2, 5, 9])
    drawn = [dice.gauss(0, 2) for _ in range(rows * vocabulary)]
    logits = torch.tensor(drawn).reshape(rows, vocabulary) * dice.choice([1.0, 1.0, 1e4, 1e30, 1e-30])
    if dice.often(20) and vocabulary > 1:
        logits[:, dice.randrange(vocabulary)] = -math.inf
    temperature = dice.choice([1.0, 0.6, 2.5, 1e-6, 0, 0.0])
    # In the middle of a token's part of [0, 1): at its ends rounding decides.
    p = (logits.double() / (temperature or 1)).softmax(-1).tolist()
    tokens = [dice.choices(range(vocabulary), row)[0] for row in p]
    uniforms = torch.tensor([sum(row[:k]) + row[k] / 2 for row, k in zip(p, tokens, strict=True)], dtype=torch.float64)
    return {"logits": dice.choice([logits, logits.double()]), "uniforms": uniforms, "temperature": temperature}


def of_sequences(dice):
    tokens = [[dice.randrange(3) for _ in range(dice.randint(1, 6))] for _ in range(dice.randint(1, 7))]
    return {"sequences": dice.choice([tokens, tuple(map(tuple, tokens)), [np.array(row) for row in tokens]])}


def of_call(dice):
    context, output = ([dice.randrange(9) for _ in range(dice.size())] for _ in range(2))
    log_probs = dice.choice([None, [-dice.random() for _ in output], torch.zeros(len(output))])
    return {"context": dice.choice([list, tuple, torch.tensor, np.array])(context), "output": output,
            "log_probs": log_probs}  # fmt: skip


def of_batch(dice):
    made = dice.trajectories()
    return {"trajectories": made, "pad_token_id": dice.choice([0, 3, np.int64(1)]), "merge_prefixes": dice.often(70),
            "advantages": dice.choice([None, dice.dress(dice.values(len(made)))])}  # fmt: skip


def of_segments(dice):
    one = dice.choice([*dice.trajectories(), Trajectory([], None, 0)])
    return {"trajectory": one, "merge_prefixes": dice.often(70)}


def of_wilson(dice):
    total = dice.choice([1, 2, 10, 10**6, 10**15])
    right = dice.choice([0, total, dice.randint(0, total), total / 3])
    return {"successes": right, "total": total, "z": dice.choice([0.5, 1.96, 5])}


def of_options(draw, **choices):
    """Further arguments, each one of several."""
    return lambda dice: draw(dice) | {name: dice.choice(values) for name, values in choices.items()}


GROUPS = {"rewards": "values", "group_ids": "ids", "missing": "choice"}
CLIPPING = {"clip_low": "number", "clip_high": "number", "dual_clip": "number or None", "ratio_level": "choice"}
POLICY = {"log_probs": "values", "old_log_probs": "values", "advantages": "values", "mask": "mask"}
LOSS = {"mode": "choice", "weights": "values or None"}
PARTS = ("rewards", "group_ids")

CASES = [
    Case(advantages.group_relative_advantages, of_group_relative, plain.group_relative,
         GROUPS | {"scale": "choice", "ddof": "number", "eps": "number"}),
    Case(advantages.leave_one_out_advantages, of_groups, plain.leave_one_out, GROUPS),
    Case(advantages.informative_groups, of_groups, plain.informative, GROUPS),
    Case(advantages.efficiency_advantages, of_efficiency, plain.efficiency,
         {"costs": "values", "successes": "values", "group_ids": "ids"}),
    Case(advantages.generalized_advantages,
         of_options(partial(of_tokens, names=("rewards", "values")), gamma=[0, 0.9, 1], lam=[0, 0.95, 1.0]),
         plain.generalized,
         {"rewards": "values", "values": "values", "mask": "mask", "gamma": "number", "lam": "number"}),
    Case(losses.clipped_surrogate,
         of_options(partial(of_tokens, names=("log_probs", "old_log_probs", "advantages")), **CLIPS),
         plain.clipped, POLICY | CLIPPING),
    Case(losses.kl_estimate,
         of_options(partial(of_tokens, names=("log_probs", "ref_log_probs")), estimator=["k1", "k2", "k3"]),
         plain.kl_estimate, {"log_probs": "values", "ref_log_probs": "values", "mask": "mask", "estimator": "choice"}),
    Case(losses.truncated_importance_weights,
         of_options(partial(of_tokens, names=("trainer_log_probs", "rollout_log_probs")), cap=CAPS, level=LEVELS),
         plain.truncated,
         {"trainer_log_probs": "values", "rollout_log_probs": "values", "mask": "mask", "cap": "number",
          "level": "choice"}),
    Case(losses.effective_sample_size, of_positive, plain.effective_size, {"weights": "weights"}),
    Case(losses.token_weights, of_weights, plain.token_weights, {"mask": "mask", "mode": "choice"}),
    Case(losses.aggregate, of_aggregate, plain.aggregate, {"per_token": "values", "weights": "values"}),
    Case(losses.reinforce_loss,
         of_options(partial(of_tokens, names=("log_probs", "advantages")), mode=losses.MODES[:3]),
         plain.reinforce, LOSS | {"log_probs": "values", "advantages": "values", "mask": "mask"}),
    Case(losses.grpo_loss, of_grpo, plain.grpo,
         POLICY | CLIPPING | LOSS | {"beta": "number", "kl_estimator": "choice", "importance_cap": "number",
                                     "importance_level": "choice"}),
    Case(logprobs.token_log_probs, of_log_probs, plain.token_log_probs,
         {"logits": "logits", "tokens": "tokens", "temperature": "number"}),
    Case(logprobs.token_entropy, of_logits, plain.token_entropy, {"logits": "logits", "temperature": "number"}),
    Case(logprobs.response_mask,
         of_options(lambda dice: {"tokens": dice.tokens(dice.size(), dice.size())}, eos_token_ids=[0, [1, 3], ()]),
         plain.response_mask, {"tokens": "token rows", "eos_token_ids": "ends"}),
    Case(tree.build_tree, of_sequences, plain.build_tree, {"sequences": "token sequences"}),
    Case(tree.tree_size, of_sequences, lambda sequences: len(plain.build_tree(sequences)[0]),
         {"sequences": "sequences"}),
    Case(row_sizes, of_options(of_sequences, max_tokens=[1, 2, 5, 9, 50, 2.5, math.inf]),
         lambda sequences, max_tokens: [list(range(len(sequences))), True],
         {"sequences": "sequences", "max_tokens": "number"}),
    Case(trajectories.Call, of_call, lambda context, output, log_probs: [*context, *output, *flat(log_probs), False],
         {"context": "token list", "output": "token list", "log_probs": "log-probs"}),
    Case(trajectories.segments, of_segments, plain.segments),
    Case(trajectories.trajectory_advantages,
         of_options(lambda dice: {"trajectories": dice.trajectories()}, baseline=["mean", "leave-one-out"],
                    scale=["std", "none"], ddof=[0, 1], eps=[0, 1e-4]),
         plain.trajectory_advantages, {"baseline": "choice"}, PARTS),
    Case(trajectories.stepwise_batch, of_batch, plain.batch,
         {"pad_token_id": "token", "advantages": "values or None"}, PARTS),
    Case(runs.wilson_interval, of_wilson, plain.wilson, {"successes": "number", "total": "number", "z": "number"}),
    Case(sampling.draw, of_draw, plain.draw, {"logits": "logits", "uniforms": "values", "temperature": "number"}),
]  # fmt: skip


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function.__name__)
def test_as_a_plain_loop_or_a_value_error_that_names_the_argument(case, rounds):
    for seed in range(rounds):
        try:
            play(case, Dice(seed))
        except Exception as error:
            arguments = case.draw(Dice(seed))
            error.add_note(f"round {seed} of {case.function.__name__}, before any spoiling: {arguments}")
            raise


def test_the_table_holds_every_public_function():
    here = {case.function.__name__ for case in CASES} | {"split_rows"}
    need_a_model = {"score_tokens", "response_log_probs", "run_tree", "supports_tree"}
    for module in (advantages, losses, logprobs, tree, trajectories):
        own = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
        assert {f.__name__ for f in own if not f.__name__.startswith("_")} <= here | need_a_model


# --- texts ----------------------------------------------------------------------------------------------------------

ALPHABETS = ["0123456789.,/:^-−+$%e×_{}[]() \\½²", "{}", "(){}\\boxed ", "9", "\\boxed{", "-−–.5 ", "٣५௧ↂ½⅒²₅𝟗①",
             "abc\0\x1b\u202e\u2028\ud800\U0001f600é\u0301", "\\frac{1}2 3/4,000"]  # fmt: skip
READ = (rewards.numbers_in, rewards.parse_number, rewards.first_integer, rewards.last_number, rewards.boxed)


def text(dice):
    """Odd signs, nested braces, huge numbers, and all of them."""
    parts = [dice.choice(ALPHABETS) for _ in range(dice.size())] + ["".join(map(chr, dice.choices(range(0x3000), k=5)))]
    return "".join(dice.choice(dice.choice(parts)) for _ in range(dice.choice([0, 1, 5, 50, 500])))


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=EXHAUSTIVE)])
def test_no_text_is_too_odd_for_a_reward(rounds):
    for seed in range(rounds):
        dice = Dice(seed)
        reply, answer = text(dice), dice.choice(["72", text(dice), None, 5, b"5", []])
        for function in READ:
            function(reply)
        for reward in rewards.REWARDS.values():
            try:
                assert reward(reply, answer) in (0.0, 1.0)
            except ValueError as error:
                assert str(error).startswith("answer: expected") and answer != "72"


SLOWER_PIECES = ["x = \\frac{1}{2}, so 1,000 of 3/4 is −5 at 3:45. ", *("{", "}", "9 ", "1,", "-", "\0", "½", "é"),
                 "1e-990 ", "\\frac{", "_000"]  # fmt: skip


@pytest.mark.parametrize(
    "piece",
    ["9", "\\boxed{", *(pytest.param(piece, marks=EXHAUSTIVE) for piece in SLOWER_PIECES)],
)  # fmt: skip
def test_a_megabyte_takes_sixteen_times_as_long_as_a_sixteenth(piece):
    def seconds(length):
        reply, times = (piece * length)[:length], []
        for _ in range(2):
            start = time.process_time()
            for function in (*READ, partial(rewards.strict_number_reward, answer="72")):
                function(reply)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(2**20) < 4 * 16 * seconds(2**16) + 0.5  # 256 times if it were quadratic


# --- files ----------------------------------------------------------------------------------------------------------


def use_run(folder):
    run = runs.read_run(folder)
    assert run.minutes >= 0 and run.peak_memory >= 0 and run.hardware and str(run.before) and str(run.after)
    assert all(isinstance(number, int | float) for metric in ("reward", "loss") for number in run.column(metric)[1])


def use_task(folder):
    task = load_jsonl(folder / "rows.jsonl")
    problems = [task.training_problem(0), *task.held_out_problems()]
    assert all(task.score(problem, problem.answer) == 1.0 for problem in problems)


def use_corpus(folder):
    corpus = Corpus(folder)
    question = corpus.training_problem(0)
    assert question.library.search(question.prompt + question.answer) is not None
    assert all(isinstance(page.text, str) for page in map(question.library.page, question.asked.split(" of ")) if page)


def use_recording(folder):
    recording = engines.load_recording(folder / "some.jsonl")
    assert all(math.isfinite(sum(call.log_probs)) for call in recording.calls if call.log_probs)
    assert all(math.isfinite(sum(row)) for rows in recording.trainer.values() for row in rows)


def use_checkpoint(folder):
    assert newest_good_checkpoint(folder, lambda line: None).name == "step-000001"


def good_files(folder):
    """A folder of each kind with a reader of it."""
    for name in ("run", "task", "corpus", "recording", "checkpoint"):
        (folder / name).mkdir()
    for path in (ROOT / "data/runs/laptop-0").iterdir():
        (folder / "run" / path.name).write_bytes(path.read_bytes())
    (folder / "task/rows.jsonl").write_text("".join(f'{{"prompt": "p{i}", "answer": {i}}}\n' for i in range(5)))
    for name, count in (("documents.jsonl", 20), ("questions.jsonl", 20), ("searches.json", 9)):
        lines = (ROOT / "data/research" / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "corpus" / name).write_text("".join(lines[:count]), encoding="utf-8")
    lines = (ROOT / "data/engine_samples/llamacpp.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "recording/some.jsonl").write_text("".join(lines[:4]), encoding="utf-8")
    save_checkpoint(folder / "checkpoint", 1, lambda step: (step / "state.json").write_text('{"step": 1}'), keep=1)
    return dict(run=use_run, task=use_task, corpus=use_corpus, recording=use_recording, checkpoint=use_checkpoint)


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("kind", ["run", "task", "corpus", "recording", "checkpoint"])
def test_a_harmed_file_is_read_or_named(tmp_path, kind, rounds):
    use, folder = good_files(tmp_path)[kind], tmp_path / kind
    use(folder)
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    for seed in range(rounds):
        dice = Dice(seed)
        path = dice.choice(list(files))
        content = dice.harmed(files[path])
        path.write_bytes(content)
        try:
            use(folder)
        except (ValueError, OSError) as error:
            named = str(error).partition(":")[0] in ("held_out", "hops", "documents", "metric")
            assert named or path.name in str(error) or folder.name in str(error), f"round {seed} names nothing: {error}"
        except Exception as error:
            error.add_note(f"round {seed}, {path.name}: {content[:300]!r}")
            raise
        path.write_bytes(files[path])


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [2000, pytest.param(100_000, marks=EXHAUSTIVE)])
def test_settings_are_good_for_training_or_named(rounds):
    weight, one = torch.nn.Parameter(torch.zeros(1)), torch.zeros(1, 1)
    for seed in range(rounds):
        dice = Dice(seed)
        name = dice.choice([f.name for f in fields(GRPOConfig)])
        odd = [torch.ones(2), np.int64(3), np.float32(0.5), 1j, object(), 1e-320, -0.0, 10**400, "token", b"x", (), {1}]
        value = dice.choice([dice.json(1), dice.choice(odd), dice.gauss(0, 10), dice.randint(-3, 9)])
        try:
            config = GRPOConfig(**{name: value})
        except ValueError as error:
            assert str(error).startswith(f"{name}: expected"), (name, value, error)
            continue
        assert GRPOConfig(**json.loads(json.dumps(asdict(config)))) == config
        betas = (config.adam_beta1, config.adam_beta2)
        torch.optim.AdamW([weight], lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay)
        logprobs.token_entropy(one[None], temperature=config.temperature)
        options = {f.name: getattr(config, f.name) for f in fields(config) if f.name in GRPO_OPTIONS}
        others = {"ref_log_probs": one, "rollout_log_probs": one, "max_length": 1, "owners": [0]}
        losses.grpo_loss(one, one, [1.0], one + 1, **others, **options)
        assert [type(v) for v in (config.steps, config.seed, config.gradient_checkpointing)] == [int, int, bool]


GRPO_OPTIONS = set(inspect.signature(losses.grpo_loss).parameters) - {"max_length", "owners", "weights"}


# --- engines --------------------------------------------------------------------------------------------------------

CARD = {"object": "list", "data": [{"id": "some/model", "owned_by": "vllm", "meta": {"n_vocab": 100}}]}
CHOICE = {"logprobs": {"token_logprobs": [-0.5, -1.25]}, "finish_reason": "length", "token_ids": [11, 12]}
META = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 11, None], [-1.25, 12, None]]}
TOKENS = [{"id": 11, "prob": 0.5, "top_logprobs": [{"id": 11, "logprob": -0.5}]}, {"id": 12, "prob": 0.25}]
ANSWERS = {
    "vllm": {"choices": [CHOICE]},
    "sglang": {"meta_info": META},
    "llamacpp": {"tokens": [11, 12], "stop_type": "limit", "completion_probabilities": TOKENS},
}


@pytest.fixture(scope="module")
def server():
    """Answers everything that is asked with the bytes in `server.answer`."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.server.asked += 1
            length = 0
            while (line := self.rfile.readline().strip().lower()) != b"":
                length = int(line.partition(b":")[2]) if line.startswith(b"content-length") else length
            self.rfile.read(length)
            self.wfile.write(self.server.answer)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, asked, answer = True, 0, b""

        def handle_error(self, *args):
            pass  # whoever asked has gone

    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        running.url = f"http://127.0.0.1:{running.server_address[1]}"
        yield running
        running.shutdown()
        thread.join()


def http(body, head="HTTP/1.1 200 OK"):
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("kind", [*ANSWERS, "connect"])
def test_an_answer_is_whole_or_the_server_named(server, kind, rounds):
    engine = engines.Engine(server.url, kind, "some/model", vocab_size=100, timeout=5)
    good = CARD if kind == "connect" else ANSWERS[kind]
    for seed in range(rounds):
        dice = Dice(seed)
        body = json.dumps(dice.mutated(good) if seed else good).encode()
        server.answer = http(body) if dice.often(70) or not seed else dice.harmed(http(body))
        try:
            if kind == "connect":
                found = engines.connect(server.url, timeout=5)
                assert found.kind in ANSWERS and isinstance(found.model, str)
                assert found.vocab_size is None or found.vocab_size > 0
            else:
                (call,) = engine.sample([[1, 2]], max_tokens=2)
                assert 1 <= len(call.output) == len(call.log_probs) <= 2
                assert all(type(token) is int and 0 <= token < 100 for token in call.output)
                assert all(math.isfinite(value) and value <= 1e-5 for value in call.log_probs)
        except engines.EngineError as error:
            assert server.url in str(error) and seed
        except Exception as error:
            error.add_note(f"round {seed}: {server.answer[:500]!r}")
            raise


def test_a_redirection_is_not_followed(server):
    """It would take the key along, to wherever the answer says."""
    for target in ("file:///etc/passwd", server.url + "/elsewhere", "http://[", "ftp://127.0.0.1/"):
        server.answer, before = http(b"", f"HTTP/1.1 302 Found\r\nLocation: {target}"), server.asked
        with pytest.raises(engines.EngineError, match="got error 302"):
            engines.connect(server.url, api_key="secret")
        assert server.asked == before + 1
