"""Records part B of lesson 10 under data/runs: `python data/research/train.py NAME ...`, or all of them in this order.

`warm-start` teaches SmolLM2 from an expert to search, open, note and answer, in both modes at once. `edit_context` and
`append_only` train what came out by stepwise GRPO, each in its mode, with an exam before and after. A CUDA device takes
the settings GPU, anything else LAPTOP: a quarter of an hour for the warm start on two cores, an hour for a mode.
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from course_lib.models import load_model, load_small_model, save_model
from course_lib.research import Corpus, Mode, ResearchTask, expert_trajectory
from course_lib.runs import prepare_folder, provenance, write_evaluation, write_whole
from course_lib.training import GRPOConfig, GRPOTrainer
from course_lib.trajectories import Trajectory
from course_lib.warm_start import warm_start

ROOT = Path(__file__).parents[2]
CORPUS = Path("data/research")
RUNS = Path("data/runs")
WARM = Path("runs/research-warm")  # 540 MB, not shipped
MODES: tuple[Mode, ...] = ("edit_context", "append_only")
BUDGET, CALLS = 160, 9
"""Tokens a call may see, and calls. Four look-ups take nine calls. With notes an expert never sees more than 117 tokens
of SmolLM2. Its whole transcript takes about 96 with one look-up, 154 with two, 239 with three and 308 with four: all of
the first fit, 64 % of the second, 4 % of the third, none of the fourth. Its longest reply has 13."""


@dataclass(frozen=True)
class WarmStart:
    """Steps of supervised training, each on `questions` questions in both modes.

    `noise` of the expert's notes hold a random fact, of the right kind: what to note is left to be learnt.
    """

    steps: int
    questions: int = 4
    learning_rate: float = 2e-4
    noise: float = 0.3
    tokens_per_row: int = 1024


@dataclass(frozen=True)
class Settings:
    """All that depends on the machine."""

    warm_start: WarmStart
    grpo: GRPOConfig
    samples: int
    """Replies to each question of the exam."""


LAPTOP = Settings(
    warm_start=WarmStart(steps=70),
    grpo=GRPOConfig(
        steps=22, prompts_per_step=8, group_size=8, max_new_tokens=16, temperature=1.0, max_resamples=0,
        learning_rate=2e-5, warmup_steps=2, tokens_per_row=1024, eval_problems=96,
    ),
    samples=1,
)  # fmt: skip
GPU = Settings(
    warm_start=WarmStart(steps=300, questions=8, tokens_per_row=4096),
    grpo=GRPOConfig(
        steps=20, prompts_per_step=32, group_size=16, max_new_tokens=16, temperature=1.0, max_resamples=0,
        learning_rate=2e-5, warmup_steps=2, tokens_per_row=4096, eval_problems=240,
    ),
    samples=4,
)  # fmt: skip


def make_task(mode: Mode, seed: int = 0) -> ResearchTask:
    """The research agent's task in one mode."""
    return ResearchTask(Corpus(CORPUS, seed=seed), mode=mode, context_budget=BUDGET, max_calls=CALLS)


def teach(model: Any, tokenizer: Any, settings: WarmStart, folder: Path) -> None:
    """Trains `model` on the expert's trajectories and writes it, with the losses, to `folder`."""
    tasks = [make_task(mode, seed=1000) for mode in MODES]  # the order is not that of the runs

    def batches() -> Iterator[list[Trajectory]]:
        for step in range(settings.steps):
            indices = range(step * settings.questions, (step + 1) * settings.questions)
            yield [
                expert_trajectory(task, task.training_problem(index), tokenizer, noise=settings.noise)
                for index in indices
                for task in tasks
            ]

    def rate(step: int) -> float:
        return settings.learning_rate * min(1, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / settings.steps))

    losses, began = [], time.perf_counter()

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        print(f"warm start {step + 1}/{settings.steps}: {loss:.3f} nats a token", flush=True)

    rows = settings.tokens_per_row
    warm_start(model, batches(), learning_rate=rate, tokens_per_row=rows, on_step=report)
    save_model(model, tokenizer, folder)
    record = {**asdict(settings), "losses": losses, "seconds": time.perf_counter() - began, **provenance()}
    write_whole(folder / "warm_start.json", json.dumps(record, indent=1))


def record(mode: Mode, settings: Settings, warm: Path, folder: Path) -> None:
    """Trains the warm model in one mode and leaves the run in `folder`."""
    task = make_task(mode)
    if not warm.exists():
        raise SystemExit(f"expected the warm model in {warm}, found none: run warm-start first")
    prepare_folder(folder)  # refuses another run's before the minutes of the exam
    trainer = GRPOTrainer(*load_model(warm), task, replace(settings.grpo, output_dir=str(folder)))
    before = trainer.evaluate(temperature=1.0, samples=settings.samples)
    print(f"{mode}: {before}", flush=True)
    trainer.train()
    after = trainer.evaluate(temperature=1.0, samples=settings.samples)
    write_evaluation(folder / "evaluation_before.json", before)
    write_evaluation(folder / "evaluation_after.json", after)
    shutil.copy(warm / "warm_start.json", folder)
    shutil.rmtree(folder / "checkpoints")
    print(f"{mode}: {before} -> {after}", flush=True)


def main(names: list[str]) -> None:
    """Does what was asked for, in the order of asking."""
    settings = GPU if torch.cuda.is_available() else LAPTOP
    for name in names or ["warm-start", *MODES]:
        if name == "warm-start":
            teach(*load_small_model(), settings.warm_start, WARM)
        else:
            record(name, settings, WARM, RUNS / f"research-{name}")


if __name__ == "__main__":
    os.chdir(ROOT)
    main(sys.argv[1:])
