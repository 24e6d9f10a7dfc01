"""Records part B of lesson 10 under data/runs: `python data/research/train.py NAME ...`, or all of them in this order.

`warm-start` teaches SmolLM2 from an expert to search, open, note and answer, in both modes at once. `adapter` keeps
what it learnt in 8.5 MB. `edit_context` and `append_only` train the small model with this adapter by stepwise GRPO,
each in its mode, with an exam before and after. A CUDA device takes the settings GPU, anything else LAPTOP; the runs
are called gpu-research-NAME and research-NAME.
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

from course_lib.models import add_adapter, load_model, load_small_model, save_adapter, save_model
from course_lib.research import Corpus, Mode, ResearchTask, expert_trajectory
from course_lib.runs import Evaluation, prepare_folder, provenance, read_evaluation, write_evaluation, write_whole
from course_lib.training import GRPOConfig, GRPOTrainer
from course_lib.trajectories import Trajectory
from course_lib.warm_start import warm_start

ROOT = Path(__file__).parents[2]
CORPUS = Path("data/research")
RUNS = Path("data/runs")
WARM = Path("runs/research-warm")  # 540 MB, not shipped
ADAPTER = CORPUS / "adapter.safetensors"
RANK = 12
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
    groups: int
    """Questions of the exam that are also tried as often as in training, for pass@k and to see what an advantage is."""


LAPTOP = Settings(
    warm_start=WarmStart(steps=70),
    grpo=GRPOConfig(
        steps=36, prompts_per_step=12, group_size=8, max_new_tokens=16, temperature=1.0, max_resamples=0,
        learning_rate=2e-5, warmup_steps=2, tokens_per_row=1024, eval_problems=128,
    ),
    groups=12,
)  # fmt: skip
GPU = Settings(
    warm_start=WarmStart(steps=300, questions=8, tokens_per_row=4096),
    grpo=GRPOConfig(
        steps=20, prompts_per_step=32, group_size=16, max_new_tokens=16, temperature=1.0, max_resamples=0,
        learning_rate=2e-5, warmup_steps=2, tokens_per_row=4096, eval_problems=240,
    ),
    groups=48,
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


def shrink(folder: Path, base: Any, path: Path) -> None:
    """Writes the difference of the model in `folder` to `base` as an adapter, and beside it how it was trained."""
    if not (folder / "warm_start.json").exists():  # written last
        raise SystemExit(f"expected the warm model in {folder}, found none: run warm-start first")
    model, _ = load_model(folder, device=base.device)
    save_adapter(model, base, path, rank=RANK)
    shutil.copy(folder / "warm_start.json", path.parent)


def record(mode: Mode, settings: Settings, model: Any, tokenizer: Any, folder: Path) -> None:
    """Trains the warm model in one mode and leaves the run in `folder`; goes on with a run that was stopped there."""
    task = make_task(mode)
    trainer = GRPOTrainer(model, tokenizer, task, replace(settings.grpo, output_dir=str(folder)))
    if (folder / "checkpoints").exists():
        trainer.resume()
    else:
        prepare_folder(folder)  # refuses another run's before the minutes of the exam
        keep(folder, "before", exams(trainer, settings))
    before = read_evaluation(folder / "evaluation_before.json")
    print(f"{mode}: {before}", flush=True)
    trainer.train()
    if trainer.step < settings.grpo.steps:
        raise SystemExit(f"{mode}: stopped after step {trainer.step}; the same command goes on")
    after = exams(trainer, settings)
    keep(folder, "after", after)
    shutil.rmtree(folder / "checkpoints")
    print(f"{mode}: {before} -> {after[0]}", flush=True)


def keep(folder: Path, when: str, taken: tuple[Evaluation, Evaluation]) -> None:
    """Writes the two exams beside the run's metrics."""
    for name, result in zip(("evaluation", "samples"), taken, strict=True):
        write_evaluation(folder / f"{name}_{when}.json", result)


def exams(trainer: GRPOTrainer, settings: Settings) -> tuple[Evaluation, Evaluation]:
    """One attempt at each question of the exam, and a group of attempts at each of the first ones."""
    some, size = trainer.held_out[: settings.groups], settings.grpo.group_size
    return trainer.evaluate(temperature=1.0), trainer.evaluate(temperature=1.0, samples=size, problems=some)


def main(names: list[str]) -> None:
    """Does what was asked for, in the order of asking."""
    settings, runs = (GPU, "gpu-research") if torch.cuda.is_available() else (LAPTOP, "research")
    for name in names or ["warm-start", "adapter", *MODES]:
        model, tokenizer = load_small_model()
        if name == "warm-start":
            teach(model, tokenizer, settings.warm_start, WARM)
        elif name == "adapter":
            shrink(WARM, model, ADAPTER)
        else:
            add_adapter(model, ADAPTER)
            record(name, settings, model, tokenizer, RUNS / f"{runs}-{name}")


if __name__ == "__main__":
    os.chdir(ROOT)
    main(sys.argv[1:])
