"""The two sides, each in a process of its own that waits for the word before every step.

Only one of the two ever computes: while one makes a step the other waits on its pipe. A process reports the
seconds of a step, the tokens it ran and the most memory it ever held. Seconds are those of the clock on the wall: the
machine should have nothing else to do.
"""

import contextlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

THREADS = 2
END = "end"
clock = time.perf_counter


class Side:
    """A process that makes one step each time it is asked."""

    def __init__(self, run: Callable[..., None], *arguments: Any):
        os.environ |= {
            "OMP_NUM_THREADS": str(THREADS),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, run, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def step(self) -> dict[str, Any]:
        """What the side reports of its next step."""
        self._pipe.send("step")
        return self._pipe.recv()

    def end(self) -> None:
        """Ends the process."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(END)
        self._process.join()


class _Ended(Exception):
    """The parent has asked for the end."""


def _serve(pipe: Connection, run: Callable[..., None], arguments: tuple) -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(THREADS)
    logging.set_verbosity_error()
    sys.stdout = sys.stderr  # TRL prints its logs

    def wait() -> None:
        if pipe.recv() == END:
            raise _Ended

    def report(**values: Any) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB
        pipe.send({**values, "peak_gib": peak})

    with contextlib.suppress(_Ended, EOFError):
        run(*arguments, wait, report)


def load(point=None):
    """The model and its tokenizer; for a point of the grid with an end of sequence that does not occur."""
    from workloads import UNUSED

    from course_lib.models import load_small_model

    model, tokenizer = load_small_model(device="cpu")
    if point is not None:
        tokenizer.eos_token = UNUSED
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def settings(point):
    """What both sides are told: one optimizer step a batch, no fresh groups, no KL term, float32."""
    from course_lib.training import GRPOConfig

    return GRPOConfig(
        steps=1000,
        prompts_per_step=point.prompts,
        group_size=point.group,
        max_new_tokens=point.reply_tokens,
        temperature=1.0,
        max_resamples=0,
        learning_rate=1e-6,
        warmup_steps=0,
        precision="float32",
    )


def course_lib_steps(point, wait, report) -> None:
    """A step of our trainer at a time: `sample_batch` and `update`, as `GRPOTrainer.steps` makes them."""
    from workloads import make_task

    from course_lib.training import GRPOTrainer

    model, tokenizer = load(point)
    trainer = GRPOTrainer(model, tokenizer, make_task(point, tokenizer), settings(point))
    while True:
        wait()
        began = clock()
        trajectories, _ = trainer.sample_batch()
        sampled = clock()
        metrics = trainer.update(trajectories)
        ended = clock()
        trainer.step += 1
        calls = [call for trajectory in trajectories for call in trajectory.calls]
        predicting = {(*call.context, *call.output[:k]) for call in calls for k in range(len(call.output))}
        report(
            seconds=ended - began,
            sampling=sampled - began,
            updating=ended - sampled,
            tokens_run=metrics["tokens_run"],
            predicting=len(predicting),
            samples=len(trajectories),
            reply_tokens=metrics["active_tokens"],
        )


def trl_steps(point, checkpointing, wait, report) -> None:
    """A step of TRL's trainer at a time; the first is on prompts of a few tokens, to warm up.

    Args:
        point: of the grid.
        checkpointing: recompute activations in the backward pass; TRL's default.
        wait: returns when the next step may begin.
        report: takes what is to be said of it.
    """
    from workloads import make_task

    from course_lib.handover import trl_options, trl_reward, trl_rows

    model, tokenizer = load(point)
    task = make_task(point, tokenizer)
    warm = [{"prompt": f"Warm {number}", "answer": ""} for number in range(point.prompts)]
    rows = warm + trl_rows(task, [task.training_problem(index) for index in range(10 * point.prompts)], tokenizer)
    options = trl_options(settings(point)) | {"gradient_checkpointing": checkpointing, "shuffle_dataset": False}
    replies: list[int] = []

    def reward(completion_ids, **columns):
        replies[:] = map(len, completion_ids)
        return trl_reward(task)(**columns)

    def done(seconds: float, _: int) -> None:
        report(
            seconds=seconds,
            tokens_run=point.padded_tokens,
            samples=point.prompts * point.group,
            reply_tokens=sum(replies),
        )

    _train_with_trl(model, tokenizer, rows, reward, options, wait, done)


def _train_with_trl(model, tokenizer, rows, reward, options, wait, done) -> None:
    """TRL's own training loop, held before each step until `wait` returns; `done(seconds, step)` after each."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Pace(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            wait()
            self.began = clock()

        def on_step_end(self, args, state, control, **_):
            done(clock() - self.began, state.global_step)

    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            model,
            reward_funcs=reward,
            args=GRPOConfig(**options | quiet | {"output_dir": folder}),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Pace()],
        ).train()


# ------------------------------------------------------------------------------------------ agents


def agent_trajectories(calls: int, *, trajectories: int = 2, start: int = 45, reply: int = 6, tool: int = 6):
    """A group of append-only agents: each call sees the transcript so far, the tool answers with a few tokens."""
    import random

    from course_lib.trajectories import Call, Trajectory

    draw = random.Random(0)
    tokens = lambda count: [draw.randrange(300, 8000) for _ in range(count)]  # noqa: E731
    prompt, group = tokens(start), []
    for number in range(trajectories):
        context, made = list(prompt), []
        for _ in range(calls):
            output = tokens(reply)
            made.append(Call(list(context), output, [-1.0] * reply))
            context += output + tokens(tool)
        group.append(Trajectory(made, float(number), 0))
    return group


def agent_updates(calls, way, wait, report) -> None:
    """Updates on one batch of agents: "tree" as the trainer does it, "padded" with a padded row for each call."""
    from course_lib.training import GRPOConfig, GRPOTrainer
    from course_lib.trajectories import stepwise_batch

    model, tokenizer = load()
    config = GRPOConfig(learning_rate=1e-6, warmup_steps=0, temperature=1.0, precision="float32", steps=1000)
    trainer = GRPOTrainer(model, tokenizer, _NoTask(), config)
    trainer.update(agent_trajectories(1))  # to warm up
    trajectories = agent_trajectories(calls)
    apart = stepwise_batch(trajectories, pad_token_id=0, merge_prefixes=False)
    while True:
        wait()
        began = clock()
        tokens = trainer.update(trajectories)["tokens_run"] if way == "tree" else _padded_update(trainer, trajectories)
        report(seconds=clock() - began, tokens_run=tokens, samples=len(trajectories), calls=len(apart.tokens))


class _NoTask:
    """The updates are given their trajectories."""

    def held_out_problems(self):
        return []


def _padded_update(trainer, trajectories, rows: int = 8) -> int:
    """The same update with a row a call, padded, `rows` at a time; returns the number of tokens run."""
    import torch

    from course_lib.logprobs import score_tokens
    from course_lib.losses import grpo_loss, token_weights
    from course_lib.trajectories import stepwise_batch, trajectory_advantages

    batch = stepwise_batch(
        trajectories, pad_token_id=0, merge_prefixes=False, advantages=trajectory_advantages(trajectories)
    )
    weights = token_weights(batch.mask, "token-mean")
    for part in torch.arange(len(batch.tokens)).split(rows):
        scored = score_tokens(
            trainer.model, batch.tokens[part], batch.attention_mask[part], batch.mask[part], share_prefixes=False
        )
        grpo_loss(
            scored.log_probs,
            scored.log_probs.detach(),
            batch.advantages[part],
            batch.mask[part],
            rollout_log_probs=batch.log_probs[part],
            weights=weights[part],
        ).loss.backward()
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return batch.tokens.numel()


# ------------------------------------------------------------------------- memory and time in detail


def memory_updates(tokens_per_row, checkpointing, wait, report) -> None:
    """Updates on one batch of 1,024 distinct tokens, with rows of a given size."""
    import random

    from course_lib.training import GRPOConfig, GRPOTrainer
    from course_lib.trajectories import Call, Trajectory

    draw = random.Random(0)
    tokens = lambda count: [draw.randrange(300, 8000) for _ in range(count)]  # noqa: E731
    prompts = [tokens(40) for _ in range(4)]
    batch = [
        Trajectory([Call(prompts[group], tokens(54), [-9.0] * 54)], draw.random(), group)
        for group in range(4)
        for _ in range(4)
    ]
    model, tokenizer = load()
    config = GRPOConfig(
        learning_rate=1e-9,
        warmup_steps=0,
        temperature=1.0,
        precision="float32",
        steps=1000,
        tokens_per_row=tokens_per_row,
        gradient_checkpointing=checkpointing,
    )
    trainer = GRPOTrainer(model, tokenizer, _NoTask(), config)
    while True:
        wait()
        began = clock()
        metrics = trainer.update(batch)
        seconds = clock() - began
        report(seconds=seconds, tokens_run=metrics["tokens_run"], gradient_norm=metrics["gradient_norm"])


KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product",),
    "optimizer and gradient norm": ("aten::_fused_adamw_", "aten::linalg_vector_norm", "aten::mul_"),
    "log-softmax and entropy": ("aten::_log_softmax", "aten::exp", "aten::clamp", "aten::cumsum"),
}
"""Where the time of a step goes, by the beginning of an operation's name; the rest is norms, activations, residuals,
copies and Python."""


def profiled_step(point, wait, report) -> None:
    """A step of ours under torch's profiler, on one thread, whose operations it can tell apart."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from workloads import make_task

    from course_lib.training import GRPOTrainer

    torch.set_num_threads(1)
    model, tokenizer = load(point)
    trainer = GRPOTrainer(model, tokenizer, make_task(point, tokenizer), settings(point))
    trainer.update(trainer.sample_batch()[0])

    def watched(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        with profile(activities=[ProfilerActivity.CPU]) as operations:
            made = work()
        spent = {event.key: event.self_cpu_time_total for event in operations.key_averages()}
        kinds = {
            kind: sum(time for name, time in spent.items() if name.startswith(names)) / sum(spent.values())
            for kind, names in KINDS.items()
        }
        return made, kinds | {"the rest": 1 - sum(kinds.values())}

    while True:
        wait()
        (trajectories, _), sampling = watched(trainer.sample_batch)
        _, updating = watched(lambda batch=trajectories: trainer.update(batch))
        report(sampling=sampling, updating=updating)


# ------------------------------------------------------------------- the laptop task, to 60 % held out


def laptop():
    """Model, tokenizer, task and settings of the laptop run, without fresh groups, which TRL does not draw."""
    from course_lib.tasks import Arithmetic
    from course_lib.training import PRESETS

    model, tokenizer = load()
    config = replace(PRESETS["laptop"], max_resamples=0, eval_problems=100, precision="float32")
    return model, tokenizer, Arithmetic(level=2, seed=config.seed), config


def course_lib_learns(every, wait, report) -> None:
    """Steps of the laptop run; held-out accuracy, off the clock, after every few of them."""
    from course_lib.training import GRPOTrainer

    model, tokenizer, task, config = laptop()
    trainer = GRPOTrainer(model, tokenizer, task, config)
    wait()
    report(seconds=0.0, held_out=trainer.evaluate().accuracy)
    steps = trainer.steps()
    while True:
        wait()
        began = clock()
        next(steps)
        seconds = clock() - began
        report(seconds=seconds, held_out=trainer.evaluate().accuracy if trainer.step % every == 0 else None)


def trl_learns(every, wait, report) -> None:
    """The same run by TRL, with the task, the reward and the settings handed over."""
    from course_lib.handover import reply_end_ids, trl_options, trl_reward, trl_rows
    from course_lib.training import GRPOTrainer

    model, tokenizer, task, config = laptop()
    judge = GRPOTrainer(model, tokenizer, task, config)
    wait()
    report(seconds=0.0, held_out=judge.evaluate().accuracy)
    problems = [task.training_problem(index) for index in range(config.steps * config.prompts_per_step)]
    rows = trl_rows(task, problems, tokenizer)
    model.generation_config.eos_token_id = reply_end_ids(task, model, tokenizer)

    def done(seconds: float, step: int) -> None:
        model.eval()
        report(seconds=seconds, held_out=judge.evaluate().accuracy if step % every == 0 else None)
        model.train()

    options = trl_options(config) | {"gradient_checkpointing": True, "shuffle_dataset": False}
    _train_with_trl(model, tokenizer, rows, trl_reward(task), options, wait, done)
