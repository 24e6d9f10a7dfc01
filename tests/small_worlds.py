"""Small worlds for tests of sampling and training: a word-level tokenizer, a one-call task and an agent."""

from functools import partial

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from course_lib.models import tiny_model
from course_lib.tasks import Problem, SingleTurnTask

WORDS = ["<unk>", "<eos>", *"abcdefghij", *map(str, range(10)), ".", "?"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; the end-of-sequence token is also the padding token, as in the small model."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )


def float64_model(architecture, **options):
    """A tiny model that is float64 throughout: transformers' RMS norms round to float32 on the way."""
    model = tiny_model(architecture, dtype=torch.float64, **options)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)
    return model


def _rms_norm(module, states):
    return torch.nn.functional.rms_norm(states, module.weight.shape, module.weight, module.variance_epsilon)


def early(text: str, answer: str) -> float:
    """1 if the reply starts with a letter up to the answer."""
    return float("a" <= text[:1] <= answer)


def letters_task(**options) -> SingleTurnTask:
    """Prompts of letters; a reply is right if it starts with a letter up to h."""
    problems = [Problem(f"{a} {b} ?", "h") for a in "abcdef" for b in "ghij"]
    return SingleTurnTask(problems[4:], problems[:4], early, **options)


class NotesEpisode:
    """Three calls. The first two append to the transcript, the third sees only the last output: one context edit."""

    stop = (".",)

    def __init__(self, tokenizer):
        self.end = tokenizer.eos_token_id
        self.start = tokenizer.encode("a b ?")
        self.seen, self.calls, self.reward = list(self.start), 0, 0.0

    @property
    def done(self):
        return self.calls == 3

    def context(self):
        return list(self.seen)

    def step(self, output_ids, text):
        self.calls += 1
        self.reward += 0.25 * len(set(output_ids))
        self.seen = [*self.seen, *output_ids, 5] if self.calls == 1 else [*self.start, *output_ids]


class NotesTask:
    """Problems are only numbered; every episode is a `NotesEpisode`."""

    def training_problem(self, index):
        return Problem(f"{index}", "")

    def held_out_problems(self):
        return [Problem("held out", "")]

    def open(self, problem, tokenizer):
        return NotesEpisode(tokenizer)
