"""The failure gallery: ten ways in which a run goes wrong, each made in seconds, beside the same run without the fault.

A module of its own, above `training`: half of its entries are the course's own trainer with one method broken, the
others a policy that can be enumerated, so that their curves are exact. Lesson 06 shows them; tests hold that the metric
which gives a fault away moves as claimed, and stays where it belongs without the fault.

    failure = GALLERY["a lenient parser"]
    failure.faulty()[failure.metric], failure.fixed()[failure.metric]      # one value a step
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from course_lib import losses, toy
from course_lib.advantages import group_relative_advantages
from course_lib.logprobs import ScoredTokens, score_tokens
from course_lib.models import tiny_model
from course_lib.runs import Evaluation
from course_lib.tasks import Problem, SingleTurnTask
from course_lib.toy import EnumerablePolicy, Outcome, ToyPolicy
from course_lib.training import GRPOConfig, GRPOTrainer
from course_lib.trajectories import SegmentBatch, Trajectory

Curves = dict[str, list[float]]
"""Metric to its values, one a step; NaN in a step that had none. "step" holds the steps' numbers."""


@dataclass(frozen=True)
class Failure:
    """One fault.

    Attributes:
        metric: name of the metric that gives it away.
        faulty, fixed: make the run with the fault, and the same run without it.
        symptom: what the metric does.
        cause: why.
        remedy: what to do.
    """

    metric: str
    faulty: Callable[[], Curves]
    fixed: Callable[[], Curves]
    symptom: str
    cause: str
    remedy: str


# ------------------------------------------------------------------ runs of the trainer on a tiny transformer

WORDS = ("<unk>", "<eos>", "?", ".", *"abcdefgh", *"1234")


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of `WORDS`; the end-of-sequence token is also the padding token, as in the small model."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")


SETTINGS = GRPOConfig(
    steps=40, prompts_per_step=4, group_size=8, max_new_tokens=4, temperature=1.0, max_resamples=0, learning_rate=1e-2,
    warmup_steps=0, final_learning_rate=1.0, tokens_per_row=4096,
)  # fmt: skip


def train(task: Any, kind: type[GRPOTrainer] = GRPOTrainer, **settings: Any) -> Curves:
    """The metrics of a tiny random transformer trained on `task`, and two made of them.

    `dead_groups` is the share of groups without signal, `exam_gap` the reward minus the exam's result.

    Args:
        task: yields problems and opens episodes.
        kind: the trainer, or one with a fault.
        settings: those of `GRPOConfig` that differ from `SETTINGS`.
    """
    trainer = kind(tiny_model(vocab_size=len(WORDS)), tokenizer(), task, replace(SETTINGS, **settings))
    rows = []
    for row in trainer.steps():
        row = row | {"dead_groups": row["groups_dropped"] / row["groups_sampled"]}
        rows.append(row | {"exam_gap": row["reward"] - row["held_out"]} if "held_out" in row else row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def says_first(text: str, answer: str) -> float:
    """1 if the reply begins with the answer."""
    return float(text.split()[: len(answer.split())] == answer.split())


def mentions(text: str, answer: str) -> float:
    """1 if the answer is among the words of the reply, wherever and whatever else is: a lenient parser."""
    return float(answer in text.split())


NEXT = [Problem(f"{letter} ?", following) for letter, following in ("ab", "bc", "cd", "da")]
"""Say the next letter; after d comes a."""
UNKNOWN = [Problem("?", letter) for letter in "abcd"]
"""What cannot be known: one prompt, four answers."""
SPELL = [Problem(f"{n} ?", " ".join("abcd"[:n])) for n in (1, 2, 3, 4)]
"""Say the first n letters."""


def letters(reward: Callable[[str, str], float] = says_first, problems: list[Problem] = NEXT) -> SingleTurnTask:
    """A task of one reply, which a period ends."""
    return SingleTurnTask(problems, [], reward, stop=(".",))


@cache
def healthy() -> Curves:
    """The run that several faults are set beside: say the next letter, the first word counts."""
    return train(letters())


class WithExam(GRPOTrainer):
    """After each step it sits a strict exam, whatever its task rewards."""

    def evaluate(self) -> Evaluation:
        exam = SingleTurnTask(NEXT, 4 * UNKNOWN, says_first, stop=(".",))
        return GRPOTrainer(self.model, self.tokenizer, exam, self.config).evaluate(temperature=1.0)


class MaskOffByOne(GRPOTrainer):
    """Trains the token before each token that was sampled."""

    def make_batch(self, trajectories: list[Trajectory]) -> SegmentBatch:
        batch = super().make_batch(trajectories)
        return replace(batch, mask=batch.mask.roll(-1, dims=1))


class OneTemperature(GRPOTrainer):
    """Samples at the temperature of its config and scores at 1."""

    def _score(self, model: Any, batch: SegmentBatch, row: list[int]) -> ScoredTokens:
        return score_tokens(model, batch.tokens[row], batch.attention_mask[row], batch.mask[row], temperature=1.0)


class StaleSampler(GRPOTrainer):
    """Samples with a copy of the model that gets the new weights every eighth step only."""

    def sample_groups(self, count: int) -> list[Trajectory]:
        if self.step % 8 == 0:
            self.engine = deepcopy(self.model)
        learner, self.model = self.model, self.engine
        try:
            return super().sample_groups(count)
        finally:
            self.model = learner


class BaselineOverSteps(GRPOTrainer):
    """Compares calls and not trajectories: one of three calls is in its group three times."""

    def make_batch(self, trajectories: list[Trajectory]) -> SegmentBatch:
        batch = super().make_batch(trajectories)
        owners = [trajectories[i] for i in batch.owners.tolist()]
        rewards, groups = [t.reward for t in owners], [t.group_id for t in owners]
        advantages = group_relative_advantages(rewards, groups, scale=self.config.scale)
        return replace(batch, advantages=advantages.to(batch.advantages.device))


class Pondering:
    """An agent's episode: one word a call, each call sees only the word before. a to d answer, a and b are right;
    other words are thoughts, and after three of them the episode is over."""

    stop, reward = WORDS, 0.0

    def __init__(self, tokenizer: Any):
        self.seen, self.calls, self.done = tokenizer.encode("?"), 0, False

    def context(self) -> list[int]:
        return list(self.seen)

    def step(self, output_ids: list[int], text: str) -> None:
        self.seen, self.calls = list(output_ids), self.calls + 1
        self.done, self.reward = text in tuple("abcd") or self.calls == 3, float(text in ("a", "b"))


class PonderingTask:
    """Every problem is the same question; every episode is `Pondering`."""

    def training_problem(self, index: int) -> Problem:
        return Problem("?", "")

    def held_out_problems(self) -> list[Problem]:
        return []

    def open(self, problem: Problem, tokenizer: Any) -> Pondering:
        return Pondering(tokenizer)


# ------------------------------------------------------------------ runs of policies that can be enumerated


def enumerate_run(
    policy: EnumerablePolicy, loss: toy.Loss, *, learning_rate: float, groups: int = 4, points: int = 13, every: int = 5
) -> Curves:
    """Exact metrics of an enumerable policy, every few steps: reward, entropy, kl, reply_tokens and truncated.

    Args:
        policy: where the run starts.
        loss: as for `toy.train`.
        learning_rate: of SGD.
        groups: prompts a batch, with eight responses each.
        points: how often the metrics are taken.
        every: steps between two points.
    """
    lengths = policy.mask.sum(dim=1)
    cut = torch.tensor([not text.endswith("stop") for text in policy.texts]).double()
    start = policy.log_probs().detach().sum(dim=1)
    curves: Curves = {}
    for point in range(points):
        p, log_probs = policy.probabilities().detach(), policy.log_probs().detach().sum(dim=1)
        means = {
            "step": point * every,
            "reward": p @ policy.rewards,
            "entropy": -p @ log_probs,
            "kl": p @ (log_probs - start),
            "reply_tokens": p @ lengths,
            "truncated": p @ cut,
        }
        for name, value in means.items():
            curves.setdefault(name, []).append(float(value))
        policy = toy.train(policy, loss, steps=every, groups=groups, learning_rate=learning_rate, seed=point).policy
    return curves


def grpo(
    mode: str = "fixed-length",
    *,
    unmasked: int | None = None,
    reference: EnumerablePolicy | None = None,
    beta: float = 0.0,
) -> toy.Loss:
    """The course's loss as `toy.train` wants it.

    Args:
        mode: loss normalisation.
        unmasked: a token id that is left out of the mask.
        reference: the policy that a KL penalty of weight `beta` (estimator k2) holds to.
    """

    def loss(log_probs: torch.Tensor, samples: toy.Samples) -> losses.LossReport:
        mask = samples.mask if unmasked is None else samples.mask * (samples.tokens != unmasked)
        ref = None if reference is None else reference.log_probs(samples).detach()
        return losses.grpo_loss(
            log_probs, samples.old_log_probs, group_relative_advantages(samples.rewards, samples.group_ids), mask,
            mode=mode, max_length=mask.shape[1], ref_log_probs=ref, beta=beta, kl_estimator="k2",
        )  # fmt: skip

    return loss


def with_luck(policy: EnumerablePolicy, chance: Callable[[tuple[str, ...]], float]) -> EnumerablePolicy:
    """`policy` where a response is right with probability `chance(response)`, whatever its reward was."""
    outcomes, rewards = [], []
    for outcome in policy.outcomes:
        right = chance(outcome.calls[0][1])
        for reward, share in ((1.0, right), (0.0, 1 - right)):
            if share > 0:
                outcomes.append(Outcome(outcome.prompt, outcome.calls, outcome.chance * share))
                rewards.append(reward)
    shape = (policy.vocabulary, policy.prompts, policy.prompt_probabilities, outcomes, rewards, lambda context: context)
    return EnumerablePolicy(*shape).with_theta(policy.theta)


def rambler() -> ToyPolicy:
    """The first word is the answer, "yes" is right; then it may go on until it says "stop", or for six words."""
    return ToyPolicy(
        ("yes", "no", "stop"),
        6,
        lambda prompt, y: float(y[0] == "yes"),
        end="stop",
        key=lambda context: context[1:2],
        spread=0.0,
    )


def guesser() -> ToyPolicy:
    """Three questions it cannot tell apart before its first word, the answer; then it knows whether it was right.

    So it stays right once in three times, and all it can learn is how long to talk afterwards. At first it stops
    about every second time.
    """
    answers = {"first question": "a", "second question": "b", "third question": "c"}
    policy = ToyPolicy(
        ("a", "b", "c", "stop"),
        5,
        lambda prompt, y: float(y[0] == answers[prompt]),
        end="stop",
        prompts=tuple(answers),
        key=lambda context: "answer" if len(context) == 1 else context[1] == answers[context[0]],
        spread=0.0,
    )
    stop = torch.tensor([-6.0 if key == "answer" else 1.0 for key in policy.row_keys], dtype=torch.float64)
    return policy.with_theta(torch.stack([*[torch.zeros_like(stop)] * 3, stop], dim=1).flatten())


def coin_judge() -> EnumerablePolicy:
    """The research agent before a judge that flips a coin."""
    return with_luck(toy.deep_research(), lambda y: 0.5)


# ------------------------------------------------------------------ the gallery

GALLERY: dict[str, Failure] = {
    "dead groups": Failure(
        metric="dead_groups",
        faulty=lambda: train(letters(problems=SPELL[3:])),
        fixed=lambda: train(letters(problems=SPELL)),
        symptom="dead_groups is 1: no step has a gradient, the reward stays at 0.",
        cause="Four right words in a row, of sixteen there are: by chance that is one reply in 65,000.",
        remedy="Problems of all lengths: what is learnt on the short ones makes the long ones possible.",
    ),
    "a lenient parser": Failure(
        metric="exam_gap",
        faulty=lambda: train(letters(mentions, UNKNOWN), WithExam, eval_every=1, max_new_tokens=6, learning_rate=2e-2),
        fixed=lambda: train(letters(says_first, UNKNOWN), WithExam, eval_every=1, max_new_tokens=6, learning_rate=2e-2),
        symptom="The reward leaves the strict exam behind: exam_gap grows.",
        cause="The parser looks for the answer anywhere in the reply. Who cannot know the answer names all there are.",
        remedy="Reward what you mean, and watch an exam that the reward cannot reach.",
    ),
    "length growth": Failure(
        metric="reply_tokens",
        faulty=lambda: enumerate_run(guesser(), grpo("sequence-mean"), learning_rate=1.0, groups=16, every=8),
        fixed=lambda: enumerate_run(guesser(), grpo("token-mean"), learning_rate=1.0, groups=16, every=8),
        symptom="reply_tokens climbs while the reward stands still.",
        cause="Divided by its own length, a wrong reply is punished less per token the longer it is.",
        remedy="A normaliser that does not look at a reply's own length: token-mean or fixed-length.",
    ),
    "entropy collapse": Failure(
        metric="entropy",
        faulty=lambda: train(letters(), learning_rate=0.1),
        fixed=healthy,
        symptom="entropy is gone after a dozen steps. Then all groups are dead, and the reward stays where it is.",
        cause="Steps so large that the first replies drive out all others, before each question has found its answer.",
        remedy="A lower learning rate, fewer updates on a batch, larger batches.",
    ),
    "KL blow-up": Failure(
        metric="kl",
        faulty=lambda: enumerate_run(coin_judge(), grpo(reference=coin_judge()), learning_rate=8.0, groups=2),
        fixed=lambda: enumerate_run(
            coin_judge(), grpo(reference=coin_judge(), beta=0.5), learning_rate=8.0, groups=2
        ),
        symptom="kl grows and the reward does not.",
        cause="The reward is noise. Divided by its std, noise makes steps of full size, in random directions.",
        remedy="A KL penalty, a lower learning rate, and above all a reward that means something.",
    ),
    "mask off by one": Failure(
        metric="sampler_mismatch",
        faulty=lambda: train(letters(), MaskOffByOne),
        fixed=healthy,
        symptom="sampler_mismatch is large from the first step on.",
        cause="The last token of each prompt is trained, which nobody drew, and the last of each reply is not.",
        remedy="One convention for the column a log-probability stands in, and a test that sampler and scorer agree.",
    ),
    "end of sequence lost": Failure(
        metric="truncated",
        faulty=lambda: enumerate_run(rambler(), grpo(unmasked=2), learning_rate=6.0),
        fixed=lambda: enumerate_run(rambler(), grpo(), learning_rate=6.0),
        symptom="truncated climbs with the reward: right replies no longer end.",
        cause="Masked by id: padding and end of sequence are one token. The end of a right reply is never trained, all "
        "its other tokens are pushed up, and so the end goes down.",
        remedy="Mask by place, not by id: the first end-of-sequence token belongs to the reply.",
    ),
    "two temperatures": Failure(
        metric="sampler_mismatch",
        faulty=lambda: train(letters(), OneTemperature, temperature=0.6),
        fixed=lambda: train(letters(), temperature=0.6),
        symptom="sampler_mismatch is large from the first step on.",
        cause="Replies are drawn at temperature 0.6 and scored at 1: another policy is improved than the one sampled.",
        remedy="Divide the logits by the same temperature on both sides.",
    ),
    "stale sampler": Failure(
        metric="sampler_mismatch",
        faulty=lambda: train(letters(), StaleSampler),
        fixed=healthy,
        symptom="sampler_mismatch is 0 in the first step, grows, and falls back to 0 every eighth.",
        cause="The sampler has old weights, so the recorded log-probabilities are those of an older policy.",
        remedy="Hand the weights over after every step, and check it by this metric.",
    ),
    "baseline over steps": Failure(
        metric="loss",
        faulty=lambda: train(PonderingTask(), BaselineOverSteps, mode="trajectory-mean", max_new_tokens=1, steps=12),
        fixed=lambda: train(PonderingTask(), mode="trajectory-mean", max_new_tokens=1, steps=12),
        symptom="The loss of a first pass, each trajectory counted once, is minus their mean advantage. It is not 0.",
        cause="An agent answers in up to three calls (lesson 07). In a mean over calls, one of three counts three "
        "times, so the baseline is not the mean over trajectories.",
        remedy="Mean and std over trajectories; the calls then share their trajectory's advantage.",
    ),
}  # fmt: skip
"""Name to failure."""
