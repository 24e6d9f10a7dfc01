"""The commands `finetune` and `evaluate`: what the command line does with the trainer.

Apart from `__main__`, which only dispatches, so that the other commands start without torch; apart from `training`,
which knows no terminal.
"""

import argparse
import builtins
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from course_lib import runs
from course_lib.models import load_model, load_small_model
from course_lib.processes import join, rank
from course_lib.rewards import REWARDS
from course_lib.runs import Evaluation, Metrics
from course_lib.tasks import Arithmetic, Curriculum, SingleTurnTask, load_jsonl
from course_lib.training import PRESETS, GRPOConfig, GRPOTrainer

ATTRIBUTE_LINES = {
    name.strip(): text.strip()
    for line in (GRPOConfig.__doc__ or "").splitlines()
    if ": " in line
    for names, text in [line.split(": ", 1)]
    for name in names.split(",")
}


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Options that `finetune` and `evaluate` share: which model, which problems."""
    parser.add_argument("--model", metavar="PATH", help="model folder, .gguf file or hub id; default: the small model")
    parser.add_argument("--data", metavar="FILE", help='JSON lines {"prompt": ..., "answer": ...}; default: arithmetic')
    parser.add_argument("--reward", choices=sorted(REWARDS), help="default: lenient-number; arithmetic: first-integer")
    parser.add_argument(
        "--level", type=_levels, default=(2,), metavar="N[,N...]",
        help="level of the arithmetic task, 1 to 5 (default: 2); several, as in 2,3, come in turn, an equal part of "
        "the run each, with the exam of the last",
    )  # fmt: skip
    parser.add_argument("--show", type=int, default=6, metavar="N", help="replies to print (default: 6)")


def _levels(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a level such as 3, or several such as 2,3, got {text!r}") from None


def add_finetune_options(parser: argparse.ArgumentParser) -> None:
    """Every setting of `GRPOConfig` as an option; those not given come from the preset."""
    add_task_options(parser)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="laptop", help="(default: laptop)")
    parser.add_argument("--output", metavar="DIR", help="folder for metrics and checkpoints (default: keep nothing)")
    parser.add_argument(
        "--samples", type=int, default=0, metavar="N",
        help="before and after, also draw N replies to each held-out problem at the run's temperature, for pass@k",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint in --output")
    hints = get_type_hints(GRPOConfig)
    for field in fields(GRPOConfig):
        if field.name == "output_dir":
            continue
        flag, text = "--" + field.name.replace("_", "-"), ATTRIBUTE_LINES.get(field.name)
        choices = [choice for choice in get_args(hints[field.name]) if isinstance(choice, str)]
        if hints[field.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif choices:
            parser.add_argument(flag, choices=choices, help=text)
        else:
            number = int if hints[field.name] is int else float
            parser.add_argument(flag, type=number, metavar="N", help=text)


def finetune(options: argparse.Namespace) -> int:
    """Fine-tune a model with GRPO; prints held-out accuracy and replies before and after."""
    given = {
        field.name: value
        for field in fields(GRPOConfig)
        if (value := getattr(options, field.name, None)) is not None
    }
    config = replace(PRESETS[options.preset], **given, output_dir=options.output)
    join()
    print = partial(builtins.print, flush=True) if rank() == 0 else lambda *_: None
    if options.resume and options.output is None:
        raise ValueError("--output: expected the folder of the run to resume, got none")
    if options.output is not None and not options.resume:  # before the minutes of the first exam, and its file there
        runs.prepare_folder(Path(options.output))
    task = _task(options, config)
    trainer = GRPOTrainer(*_model(options), task, config)
    if options.resume:
        print(f"resumed after step {trainer.resume()} of {config.steps}")
    batch = f"{config.prompts_per_step} x {config.group_size} replies"
    exam = f"{len(trainer.held_out)} held-out problems before and after"
    print(f"{task.name} on {trainer.model.device}: {config.steps} steps of {batch}, {exam}")
    before = _exam(trainer, "before", options.samples, print)
    trainer.train(on_step=None if sys.stderr.isatty() or rank() else partial(_log, steps=config.steps))
    if trainer.step < config.steps:
        print(f"stopped after step {trainer.step} of {config.steps}; --resume goes on")
        return 0
    minutes = sum(times["sampling"] + times["updating"] for times in trainer.times) / 60
    print(f"{len(trainer.times)} steps in {minutes:.1f} minutes{_peak_memory()}")
    after = _exam(trainer, "after", options.samples, print)
    for (prompt, old, _), (_, new, reward) in list(zip(before.replies, after.replies, strict=False))[: options.show]:
        print(f"  {prompt!r}: {old!r} -> {new!r} (reward {reward:g})")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Play the held-out problems greedily; prints the accuracy with its interval and some replies."""
    config = replace(
        PRESETS["laptop"], eval_problems=options.eval_problems, max_new_tokens=options.max_new_tokens
    )
    task = _task(options, config)
    result = GRPOTrainer(*_model(options), task, config).evaluate()
    print(f"held out: {result}")
    for prompt, reply, reward in result.replies[: options.show]:
        print(f"  {prompt!r}: {reply!r} (reward {reward:g})")
    return 0


def add_evaluate_options(parser: argparse.ArgumentParser) -> None:
    """Which model on which problems."""
    add_task_options(parser)
    for name in ("eval_problems", "max_new_tokens"):
        default = getattr(PRESETS["laptop"], name)
        text = f"{ATTRIBUTE_LINES[name]} (default: {default})"
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, metavar="N", help=text)


def _model(options: argparse.Namespace) -> tuple[Any, Any]:
    return load_model(options.model) if options.model else load_small_model()


def _task(options: argparse.Namespace, config: GRPOConfig) -> SingleTurnTask | Curriculum:
    settings = {"seed": config.seed} | ({"reward": REWARDS[options.reward]} if options.reward else {})
    if options.data:
        return load_jsonl(options.data, **settings)
    *earlier, last = (Arithmetic(level=level, **settings) for level in options.level)
    part = config.steps * config.prompts_per_step // len(options.level)
    return Curriculum([(task, part) for task in earlier], last) if earlier else last


def _log(metrics: Metrics, *, steps: int) -> None:
    """A line a step where no progress bar can be drawn, as in a log."""
    builtins.print(f"step {metrics['step']} of {steps}: reward {metrics['reward']:.2f}", file=sys.stderr, flush=True)


def _peak_memory() -> str:
    peak = runs.peak_memory().get("peak_memory_gib")
    return f", at most {peak:.1f} GiB of memory" if peak else ""


def _exam(trainer: GRPOTrainer, when: str, samples: int, print: Callable[..., None]) -> Evaluation:
    """The greedy exam and, with `samples`, the drawn one; a resumed run has those of before its first step on disk."""
    greedy = _taken(trainer, f"evaluation_{when}", trainer.evaluate)
    print(f"{when + ':':7} {greedy}")
    if samples:
        temperature = trainer.config.temperature
        draw = partial(trainer.evaluate, temperature=temperature, samples=samples)
        drawn = _taken(trainer, f"samples_{when}", draw)
        shown = ", ".join(f"pass@{k} {drawn.pass_at(k):.1%}" for k in sorted({1, samples}))
        print(f"        at temperature {temperature:g}: {shown}")
    return greedy


def _taken(trainer: GRPOTrainer, name: str, take: Callable[[], Evaluation]) -> Evaluation:
    """An exam, kept beside the run's metrics; one of before the first step is not taken a second time."""
    if trainer.output is None:
        return take()
    path = trainer.output / f"{name}.json"
    known = trainer.step and name.endswith("before") and path.exists()
    result = runs.read_evaluation(path) if known else take()
    if rank() == 0:
        runs.write_evaluation(path, result)
    return result
