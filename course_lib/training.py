"""GRPO on a transformers causal language model: one trainer for single replies and for agents of many calls.

A step samples groups of trajectories, turns rewards into advantages, cuts the trajectories into segments, scores
each distinct token once and takes a few clipped steps on the batch. It knows nothing of prompts and replies: a
single-turn problem is a trajectory of one call.
"""

import copy
import json
import math
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from course_lib._tensors import require_temperature
from course_lib.advantages import informative_groups
from course_lib.checkpoints import CheckpointError, newest_good_checkpoint, save_checkpoint
from course_lib.logprobs import ScoredTokens, score_tokens
from course_lib.losses import grpo_loss, token_weights
from course_lib.models import autocast_dtype, save_model
from course_lib.processes import (
    alike,
    assembled,
    clip_gradients,
    gathered,
    is_part,
    part_of,
    rank,
    shard,
    sharded,
    share,
    size,
    sum_gradients,
    wait,
)
from course_lib.runs import Evaluation, Metrics, begin_session, end_session, prepare_folder, write_whole
from course_lib.sampling import sample_trajectories
from course_lib.tasks import Problem, Task
from course_lib.trajectories import SegmentBatch, Trajectory, stepwise_batch, trajectory_advantages
from course_lib.tree import split_rows, tree_size


@dataclass(frozen=True)
class GRPOConfig:
    """Settings of a run. The defaults are those of the course's laptop run.

    Attributes:
        steps: sampling rounds, each followed by `updates_per_batch` optimizer steps.
        prompts_per_step: groups in a batch.
        group_size: G, trajectories a group.
        max_new_tokens: longest reply of one call, in tokens.
        temperature: of the policy, when sampling and when scoring.
        max_resamples: rounds of fresh problems drawn in place of dead groups (DAPO's dynamic sampling). Groups that are
            still dead are dropped and counted.
        baseline: "mean" (GRPO) or "leave-one-out" (RLOO).
        scale: "std" (GRPO) or "none" (Dr. GRPO).
        updates_per_batch: passes over one batch; from the second on the ratio differs from 1 and the clip acts.
        clip_low, clip_high: ε_low and ε_high.
        dual_clip: bound on the loss for A < 0, or None.
        ratio_level: "token" or "sequence" (GSPO).
        mode: loss normalisation, see `losses.token_weights`.
        beta: β, weight of the KL penalty; 0 needs no reference model.
        kl_estimator: "k1", "k2" or "k3".
        importance_cap: cap of the importance weights that correct for the sampler's numerics.
        importance_level: "token" or "sequence".
        learning_rate: of AdamW at the end of the warm-up.
        adam_beta1, adam_beta2, weight_decay: of AdamW.
        warmup_steps: optimizer steps of linear warm-up.
        final_learning_rate: where the linear decay ends, as a fraction of `learning_rate`.
        max_grad_norm: gradients are scaled down to this norm.
        tokens_per_row: tree nodes of one forward and backward pass; bounds memory, never changes the gradient.
        precision: "auto", "float32" or "bfloat16" (autocast; weights and log-probabilities stay float32). "auto" is
            bfloat16 on GPUs that compute in it; float32 products are made in TF32 on a GPU.
        gradient_checkpointing: recompute activations in the backward pass.
        eval_every: steps between evaluations on held-out problems; 0 for before and after only.
        eval_problems: at most so many held-out problems.
        checkpoint_every: steps between checkpoints; 0 for one at the end only.
        keep_checkpoints: how many stay on disk.
        output_dir: folder of the run (config, metrics, checkpoints), or None to keep nothing.
        seed: of everything that is drawn.
    """

    steps: int = 36
    prompts_per_step: int = 16
    group_size: int = 8
    max_new_tokens: int = 6
    temperature: float = 1.2
    max_resamples: int = 1
    baseline: Literal["mean", "leave-one-out"] = "mean"
    scale: Literal["std", "none"] = "std"
    updates_per_batch: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    ratio_level: Literal["token", "sequence"] = "token"
    mode: Literal["token-mean", "sequence-mean", "sequence-sum", "fixed-length", "trajectory-mean"] = "token-mean"
    beta: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    importance_cap: float = 2.0
    importance_level: Literal["token", "sequence"] = "token"
    learning_rate: float = 2e-5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    weight_decay: float = 0.0
    warmup_steps: int = 5
    final_learning_rate: float = 0.1
    max_grad_norm: float = 1.0
    tokens_per_row: int = 1024
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    gradient_checkpointing: bool = False
    eval_every: int = 0
    eval_problems: int = 200
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    output_dir: str | None = None
    seed: int = 0

    def __post_init__(self):
        hints = get_type_hints(type(self))
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            kinds = get_args(hints[name]) or (hints[name],)
            if isinstance(kinds[0], str):
                good, expected = isinstance(value, str) and value in kinds, "one of " + ", ".join(kinds)
            else:
                good, expected = any(_is_a(kind, value) for kind in kinds), " or ".join(map(KINDS.get, kinds))
            if not good:
                raise ValueError(f"{name}: expected {expected}, got {value!r:.80}")
            if float in kinds and value is not None:  # 0 is not 0.0 to AdamW
                object.__setattr__(self, name, float(value))
        least = {"steps": 1, "prompts_per_step": 1, "group_size": 2, "max_new_tokens": 1, "updates_per_batch": 1,
                 "tokens_per_row": 1, "keep_checkpoints": 1, "eval_problems": 1, "max_resamples": 0,
                 "warmup_steps": 0, "eval_every": 0, "checkpoint_every": 0, "seed": 0, "beta": 0, "clip_low": 0,
                 "clip_high": 0, "adam_beta1": 0, "adam_beta2": 0, "weight_decay": 0, "final_learning_rate": 0,
                 }  # fmt: skip
        for name, bound in least.items():
            if getattr(self, name) < bound:
                why = " (a group of one has no one to be compared with)" if name == "group_size" else ""
                raise ValueError(f"{name}: expected at least {bound}{why}, got {getattr(self, name)}")
        for name in ("temperature", "learning_rate", "max_grad_norm", "importance_cap"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")
        for name in ("adam_beta1", "adam_beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}: expected less than 1, got {getattr(self, name)}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip: expected more than 1, or None, got {self.dual_clip}")
        require_temperature(self.temperature)


KINDS = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a text", type(None): "None"}


def _is_a(kind: type, value: Any) -> bool:
    """Is `value` of the kind that a setting has? A whole number is also a finite one; neither True nor 10**400 is."""
    if kind in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, kind) and (kind is not float or abs(value) <= torch.finfo(torch.float32).max)


PRESETS = {
    "laptop": GRPOConfig(),
    "gpu": GRPOConfig(steps=150, prompts_per_step=64, group_size=16, max_resamples=1, tokens_per_row=8192),
}


class GRPOTrainer:
    """Trains `model` in place by GRPO on `task`.

    Args:
        model: a transformers causal language model, float32.
        tokenizer: its tokenizer.
        task: yields problems and opens episodes.
        config: settings.
        reference_model: π_ref of the KL penalty; a frozen copy of `model` where β ≠ 0 and none is given. With β = 0 the
            KL is only measured.

    Example:
        A runnable one is in the README; in short ``GRPOTrainer(model, tokenizer, task, GRPOConfig()).train()``.

    Source:
        Shao et al. (2024), DeepSeekMath, arXiv 2402.03300; Yu et al. (2025), DAPO, arXiv 2503.14476.
    """

    def __init__(self, model: Any, tokenizer: Any, task: Task, config: GRPOConfig, *, reference_model: Any = None):
        self.model, self.tokenizer, self.task, self.config = model, tokenizer, task, config
        self.held_out = list(task.held_out_problems())[: config.eval_problems]
        if model.device.type == "cuda":  # TF32: what stays float32 is multiplied in tensor cores, summed in float32
            torch.set_float32_matmul_precision("high")
        # Dropout would make π_θ differ from the policy that sampled before anything was learned.
        model.eval()
        if config.gradient_checkpointing:
            _enable_gradient_checkpointing(model)
        self.reference_model = reference_model
        if config.beta != 0 and reference_model is None:
            self.reference_model = copy.deepcopy(model).eval().requires_grad_(False)
        for each in (model, self.reference_model):
            if each is not None:
                shard(each)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = dict(sorted(trained, key=lambda pair: is_part(pair[1])))
        self.optimizer = torch.optim.AdamW(
            [{"params": kind} for kind in alike(self.parameters.values())],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.step = 0
        self.problems_drawn = 0
        self._step_began_with: int | None = None
        self.history: list[Metrics] = []
        self.times: list[Metrics] = []
        self._scoring = 0.0
        self.output = None if config.output_dir is None else Path(config.output_dir)

    # ---------------------------------------------------------------- the run

    def train(self, on_step: Callable[[Metrics], None] | None = None) -> list[Metrics]:
        """Runs the remaining steps; returns the metrics of all steps so far.

        Ctrl-C (or the notebook's stop button) ends the run after the current step, with a checkpoint; a second one
        ends it at once.

        Args:
            on_step: called with each step's metrics, for example a live figure.
        """
        recorded = self.output is not None and rank() == 0
        if recorded:
            self._claim_output()
            begin_session(self.output, task=self._task_name(), model=self._model_name(), step=self.step)
        quiet, began = None if rank() == 0 else True, time.perf_counter()
        with (
            _stop_signal() as stop,
            self._lost_process(),
            tqdm(total=self.config.steps, initial=self.step, disable=quiet) as bar,
        ):
            for metrics in self.steps():
                bar.update()
                bar.set_postfix(reward=f"{metrics['reward']:.2f}")
                if on_step is not None:
                    on_step(metrics)
                due = self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0
                if self.output is not None and (due or stop.is_set() or self.step == self.config.steps):
                    self.save()
                if stop.is_set():
                    break
        if recorded:
            end_session(self.output, step=self.step, seconds=time.perf_counter() - began)
        return self.history

    def steps(self) -> Iterator[Metrics]:
        """The run as a generator: one item a step, for a loop of your own."""
        while self.step < self.config.steps:
            self._step_began_with = self.problems_drawn
            started = time.perf_counter()
            trajectories, counts = self.sample_batch()
            sampled, self._scoring = time.perf_counter(), 0.0
            metrics = {"step": self.step + 1, **counts, "learning_rate": self.learning_rate()}
            if trajectories:
                metrics |= self.update(trajectories)
            ended = time.perf_counter()
            self.step += 1
            if self.config.eval_every and self.step % self.config.eval_every == 0:
                metrics["held_out"] = self.evaluate().accuracy
            self.history.append(metrics)
            self._append("metrics.jsonl", metrics)
            # In a file of their own: metrics are the same in every run of a seed, times are not.
            times = {"sampling": sampled - started, "updating": ended - sampled, "all": time.perf_counter() - started}
            if self.reference_model is not None:
                times |= {"scoring": self._scoring, "updating": times["updating"] - self._scoring}
            self.times.append({"step": self.step, **times})
            self._append("times.jsonl", self.times[-1])
            yield metrics

    # ------------------------------------------------------------ the samples

    def sample_batch(self) -> tuple[list[Trajectory], Metrics]:
        """Groups that carry signal, and what was met on the way to them.

        A group whose rewards are all equal is dead: its advantages are 0. Up to `max_resamples` rounds of fresh
        problems take the place of dead groups.
        """
        config, kept, seen = self.config, [], []
        for _ in range(config.max_resamples + 1):
            wanted = config.prompts_per_step - len(kept) // config.group_size
            if wanted == 0:
                break
            fresh = self.sample_groups(wanted)
            useful = informative_groups([t.reward for t in fresh], [t.group_id for t in fresh]).tolist()
            kept += [trajectory for trajectory, keep in zip(fresh, useful, strict=True) if keep]
            seen += fresh
        calls = [call for trajectory in seen for call in trajectory.calls]
        return kept, {
            "reward": float(np.mean([trajectory.reward for trajectory in seen])),
            "groups_sampled": len(seen) // config.group_size,
            "groups_dropped": (len(seen) - len(kept)) // config.group_size,
            "reply_tokens": float(np.mean([len(call.output) for call in calls])),
            "truncated": float(np.mean([call.truncated for call in calls])),
            "calls": len(calls) / len(seen),
        }

    def sample_groups(self, count: int) -> list[Trajectory]:
        """G trajectories for each of the next `count` problems of the task's stream, shared among the processes."""
        config, first = self.config, self.problems_drawn
        self.problems_drawn += count
        places = [(index, member) for index in range(first, first + count) for member in range(config.group_size)]

        def play(mine: Sequence[tuple[int, int]]) -> list[Trajectory]:
            problems = {index: self.task.training_problem(index) for index in dict(mine)}
            # A trajectory's draws depend on the run's seed and its own place, so not on who samples it.
            seeds = [int(np.random.SeedSequence([config.seed, *place]).generate_state(1)[0]) for place in mine]
            return self._play([problems[i] for i, _ in mine], config.temperature, seeds, [i for i, _ in mine])

        return share(places, play)

    def _play(
        self, problems: Sequence[Problem], temperature: float, seeds: Sequence[int], ids: Sequence[int]
    ) -> list[Trajectory]:
        with gathered(self.model), self._precision():
            return sample_trajectories(
                self.model,
                self.tokenizer,
                [self.task.open(problem, self.tokenizer) for problem in problems],
                temperature=temperature,
                max_new_tokens=self.config.max_new_tokens,
                seed=seeds,
                group_ids=ids,
            )

    # ------------------------------------------------------------- the update

    def make_batch(self, trajectories: Sequence[Trajectory]) -> SegmentBatch:
        """The segments of `trajectories`, each with the advantage of its trajectory."""
        advantages = trajectory_advantages(trajectories, baseline=self.config.baseline, scale=self.config.scale)
        return stepwise_batch(trajectories, pad_token_id=0, advantages=advantages).to(self.model.device)

    def update(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """`updates_per_batch` optimizer steps on one batch.

        Token weights are computed over the whole batch, before it is cut into rows, so that the cut cannot change the
        gradient; nor can the number of processes, which share the rows. Segments with advantage 0 keep their share of
        the denominators and are left out of the passes where β = 0, since they add nothing to the gradient.
        """
        config, batch = self.config, self.make_batch(trajectories)
        weights = token_weights(batch.mask, config.mode, max_length=config.max_new_tokens, owners=batch.owners)
        all_rows = self._rows(batch)
        if not all_rows:
            return {}
        rows = all_rows[rank() :: size()]
        # Processes that share the layers pass through them together; one without a row left takes part with nothing.
        idle = all_rows[: sharded() and math.ceil(len(all_rows) / size()) - len(rows)]
        old: list[torch.Tensor | None] = [None] * len(rows)
        reference = self._score_reference(batch, rows + idle)
        for _ in range(config.updates_per_batch):
            reports: list[Metrics] = []
            for number, row in enumerate(rows):
                scored = self._score(self.model, batch, row)
                if old[number] is None:  # the first pass is made by the policy that sampled
                    old[number] = scored.log_probs.detach()
                report = grpo_loss(
                    scored.log_probs,
                    old[number],
                    batch.advantages[row],
                    batch.mask[row],
                    ref_log_probs=reference[number],
                    beta=config.beta,
                    kl_estimator=config.kl_estimator,
                    rollout_log_probs=batch.log_probs[row],
                    importance_cap=config.importance_cap,
                    importance_level=config.importance_level,
                    clip_low=config.clip_low,
                    clip_high=config.clip_high,
                    dual_clip=config.dual_clip,
                    ratio_level=config.ratio_level,
                    weights=weights[row],
                )
                report.loss.backward()
                entropy = float(scored.entropy.sum() / batch.mask[row].sum())
                largest = float((scored.log_probs.detach() - old[number])[batch.mask[row]].max().exp())
                measured = {"loss": report.loss.item(), "entropy": entropy, "ratio_max": largest}
                reports.append(report.metrics | measured)
            for row in idle:
                (0 * self._score(self.model, batch, row).log_probs.sum()).backward()
            norm = self._optimizer_step()
        merged = _merge(share(all_rows, lambda _: reports))
        tokens_run = sum(tree_size(batch.inputs(row)) for row in all_rows) * config.updates_per_batch
        return {**merged, "gradient_norm": norm, "segments": len(batch.tokens), "tokens_run": tokens_run}

    def _rows(self, batch: SegmentBatch) -> list[list[int]]:
        """Indices of the segments that are scored together."""
        counts = batch.mask.any(1) & ((batch.advantages != 0) | (self.config.beta != 0))
        used = counts.nonzero()[:, 0].tolist()
        if not used:
            return []
        inputs = batch.inputs(used)
        distinct, most = tree_size(inputs), self.config.tokens_per_row
        rows = split_rows(inputs, min(most, math.ceil(distinct / size())))
        run = sum(tree_size([inputs[i] for i in row]) for row in rows)
        if run > 1.5 * distinct and size() == 1:
            warnings.warn(
                f"tokens_per_row: {most} cuts groups apart, and what they share is run once for every piece; a larger "
                "value shares more and takes more memory",
                stacklevel=2,
            )
        return [[used[i] for i in row] for row in rows]

    def _score(self, model: Any, batch: SegmentBatch, row: list[int]) -> ScoredTokens:
        with self._precision():
            return score_tokens(
                model,
                batch.tokens[row],
                batch.attention_mask[row],
                batch.mask[row],
                temperature=self.config.temperature,
            )

    def _score_reference(self, batch: SegmentBatch, rows: list[list[int]]) -> Sequence[torch.Tensor | None]:
        """log π_ref of each row, or None for each where there is no reference model."""
        if self.reference_model is None:
            return [None] * len(rows)
        began = time.perf_counter()
        with torch.no_grad():
            scores = [self._score(self.reference_model, batch, row).log_probs for row in rows]
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()  # or its work would be counted where the first result is waited for
        self._scoring = time.perf_counter() - began
        return scores

    def _optimizer_step(self) -> float:
        sum_gradients(self.parameters.values())
        norm = clip_gradients(self.parameters.values(), self.config.max_grad_norm)
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"gradient: expected a finite norm in step {self.step + 1}, got {norm}; the weights were not changed. "
                "A lower learning_rate or a smaller clip range usually helps."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self._step_began_with = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def learning_rate(self) -> float:
        """Rate of the current step: linear warm-up, then linear decay to its final fraction."""
        config = self.config
        warm = min(1.0, (self.step + 1) / (config.warmup_steps + 1))
        decayed = 1 - (1 - config.final_learning_rate) * self.step / config.steps
        return config.learning_rate * warm * decayed

    # --------------------------------------------------------- the evaluation

    def evaluate(
        self, *, temperature: float = 0.0, samples: int = 1, problems: Sequence[Problem] | None = None
    ) -> Evaluation:
        """Plays each held-out problem; it counts as solved where its reward is at least 1.

        Args:
            temperature: 0 plays greedily; that of the policy samples, and the fraction solved then estimates the
                objective J itself. The draws are the same in every call, so before and after differ by the policy only.
            samples: n, replies to each problem; more than one at temperature 0 would all be the same.
            problems: to play in place of `held_out`.
        """
        problems = self.held_out if problems is None else problems
        if not problems:
            raise ValueError("held_out_problems: expected at least one problem to evaluate on, got none")
        if samples < 1 or (samples > 1 and temperature == 0):
            raise ValueError(f"samples: expected 1, or more at a temperature > 0, got {samples} at {temperature}")

        def play(mine: Sequence[tuple[int, Problem]]) -> list[Trajectory]:
            places, played = zip(*mine, strict=True) if mine else ((), ())
            return self._play(played, temperature, places, places)

        # A round at a time, numbered on: round 0 has the draws of an exam of one reply a problem.
        starts = range(0, samples * len(problems), len(problems))
        rounds = [share(list(enumerate(problems, start)), play) for start in starts]
        attempts = [attempt for of_problem in zip(*rounds, strict=True) for attempt in of_problem]
        replies = tuple(
            (
                problems[place // samples].prompt,
                self.tokenizer.decode(attempt.calls[-1].output, skip_special_tokens=True),
                attempt.reward,
            )
            for place, attempt in enumerate(attempts)
        )
        several_calls = any(len(attempt.calls) > 1 for attempt in attempts)
        outputs = tuple(tuple(tuple(call.output) for call in attempt.calls) for attempt in attempts if several_calls)
        return Evaluation(sum(reward >= 1 for *_, reward in replies), len(replies), replies, samples, outputs)

    # -------------------------------------------------------- save and resume

    def save(self) -> Path:
        """Writes a checkpoint of the finished steps into the run's folder."""
        if self.output is None:
            raise ValueError("output_dir: expected a folder to save to, got None")
        weights = sum(p.numel() * p.element_size() for p in self.parameters.values())
        root, write = self.output / "checkpoints", self._writer()
        if rank() == 0:  # weights and AdamW's two moments
            save_checkpoint(root, self.step, write, keep=self.config.keep_checkpoints, size=3 * weights + 2**24)
        wait()
        return root / f"step-{self.step:06d}"

    def _writer(self) -> Callable[[Path], None]:
        """Writes a checkpoint, which process 0 can do alone once all have put together what is to be written."""
        state = self.optimizer.state_dict()["state"]
        names = list(self.parameters)
        moments = {f"{names[i]}/{key}": value for i, entry in state.items() for key, value in entry.items()}
        return partial(self._write, assembled(self.model.state_dict()), assembled(moments))

    def _write(self, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor], folder: Path) -> None:
        save_model(self.model, self.tokenizer, folder, weights=weights)
        generators = {"torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators |= {f"cuda{i}": value for i, value in enumerate(torch.cuda.get_rng_state_all())}
        save_file(moments, folder / "optimizer.safetensors")
        save_file(generators, folder / "generators.safetensors")
        numpy_state = np.random.get_state()
        state = {
            "step": self.step,
            "problems_drawn": self.problems_drawn,
            "history": self.history,
            "times": self._times_of_all_sessions(),
            "config": asdict(self.config),
            "task": self._task_name(),
            "python_random": random.getstate(),
            "numpy_random": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        }
        (folder / "state.json").write_text(json.dumps(state))

    def resume(self) -> int:
        """Goes on from the newest checkpoint that is whole; returns the number of steps it has.

        The run continues bit for bit as if it had not been interrupted (same machine, same number of threads).

        Raises:
            CheckpointError: no whole checkpoint, or one of a run with other settings, task or model.
        """
        if self.output is None:
            raise ValueError("output_dir: expected the folder of the run to resume, got None")
        folder = newest_good_checkpoint(self.output / "checkpoints", report=_say)
        state = json.loads((folder / "state.json").read_text())
        self._require_same_run(state, folder)
        self._read_weights(folder)
        generators = load_file(folder / "generators.safetensors")
        torch.set_rng_state(generators.pop("torch"))
        if torch.cuda.is_available() and generators:
            torch.cuda.set_rng_state_all([generators[f"cuda{i}"] for i in range(len(generators))])
        version, internal, gauss = state["python_random"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(state["numpy_random"]))
        self.step, self.problems_drawn, self.history = state["step"], state["problems_drawn"], state["history"]
        if rank() == 0:
            # Lines of steps after the checkpoint go; one that a power cut kept from reaching the disk comes back.
            write_whole(self.output / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in self.history))
            write_whole(self.output / "times.jsonl", state["times"])
        return self.step

    def _read_weights(self, folder: Path) -> None:
        weights = {}
        for path in sorted(folder.glob("model*.safetensors")):
            weights |= load_file(path)
        expected = f"checkpoint {folder.name}: expected weights of this model"
        own = self.model.state_dict()
        for name in filter(weights.__contains__, own):
            if (here := tuple(own[name].shape)) != (there := tuple(weights[name].shape)):
                raise CheckpointError(f"{expected}, whose {name} is {here}, got {there}: another model's")
        weights = {name: part_of(value, own.get(name)) for name, value in weights.items()}
        missing = self.model.load_state_dict(weights, strict=False).missing_keys
        tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
        if lost := [name for name in missing if name not in tied and name in self.parameters]:
            raise CheckpointError(f"{expected}, {lost[0]} is missing")
        moments = load_file(folder / "optimizer.safetensors")
        saved = self.optimizer.state_dict()
        saved["state"] = {
            index: {"step": moments[f"{name}/step"]}
            | {key: part_of(moments[f"{name}/{key}"], parameter) for key in ("exp_avg", "exp_avg_sq")}
            for index, (name, parameter) in enumerate(self.parameters.items())
            if f"{name}/step" in moments
        }
        self.optimizer.load_state_dict(saved)

    def _require_same_run(self, saved: dict[str, Any], folder: Path) -> None:
        pairs = {name: (saved["config"].get(name), value) for name, value in asdict(self.config).items()}
        pairs |= {"task": (saved.get("task"), self._task_name())}
        for name, (there, here) in pairs.items():
            if name not in FREE_TO_CHANGE and there != here:
                raise CheckpointError(
                    f"{name}: expected {there!r} as in the run that {folder.name} belongs to, got {here!r}"
                )

    def _claim_output(self) -> None:
        """Makes the run's folder, or refuses one that holds another run."""
        if self.step == 0:
            prepare_folder(self.output)
        write_whole(self.output / "config.json", json.dumps(asdict(self.config), indent=1))

    @contextmanager
    def _lost_process(self) -> Iterator[None]:
        """Ends the run with a message when another process of it has died, and keeps what was learned if it can."""
        try:
            yield
        except RuntimeError as error:
            if size() == 1:
                raise
            kept = "resume from the newest checkpoint"
            alone = self.output is not None and rank() == 0 and not sharded()  # has all that was learned
            if alone and self._step_began_with is not None:
                self.problems_drawn = self._step_began_with  # the unfinished step will be made again, from its start
                root, keep = self.output / "checkpoints", self.config.keep_checkpoints
                save_checkpoint(root, self.step, self._writer(), keep=keep)
                kept = f"the checkpoint of step {self.step} was written; resume from it"
            raise RuntimeError(f"another process of this run ended in step {self.step + 1}; {kept}") from error

    def _task_name(self) -> str:
        return getattr(self.task, "name", type(self.task).__name__)

    def _model_name(self) -> str:
        return f"{type(self.model).__name__}, {sum(p.numel() for p in self.model.parameters()):,} parameters"

    def _append(self, name: str, row: Metrics) -> None:
        if self.output is not None and rank() == 0:
            self.output.mkdir(parents=True, exist_ok=True)
            path, before = self.output / name, self._file_size(name)
            try:
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            except OSError as error:
                with suppress(OSError):
                    os.truncate(path, before)  # no half line
                said = f"{path} could not be written ({error}); checkpoints are untouched"
                raise OSError(f"output_dir: {said}") from error

    def _times_of_all_sessions(self) -> str:
        path = self.output / "times.jsonl"
        return path.read_text() if path.exists() else ""

    def _file_size(self, name: str) -> int:
        path = self.output / name
        return path.stat().st_size if path.exists() else 0

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Matrix products in bfloat16 where wanted, from and to weights that stay float32.

        Log-probabilities are float32 all the same: `logprobs._log_softmax` and `sampling.draw` turn the logits into
        float32 before they exponentiate and sum, which is where 8 bits of mantissa would do harm.
        """
        device, wanted = self.model.device.type, self.config.precision
        dtype = {"float32": None, "bfloat16": torch.bfloat16, "auto": autocast_dtype(self.model.device)}[wanted]
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            yield


FREE_TO_CHANGE = {"output_dir", "eval_every", "eval_problems", "checkpoint_every", "keep_checkpoints"}
"""Settings that may differ when a run is resumed: they change nothing that is learned."""


def _merge(reports: Sequence[Metrics]) -> Metrics:
    """Metrics of a batch from those of its rows: sums, the largest ratio, and token means of the rest."""
    tokens = sum(report["active_tokens"] for report in reports)
    whole = {name: sum(report[name] for report in reports) for name in ("loss", "active_tokens")}
    whole["ratio_max"] = max(report["ratio_max"] for report in reports)
    return whole | {
        name: sum(report[name] * report["active_tokens"] for report in reports) / tokens
        for name in reports[0]
        if name not in whole
    }


def _enable_gradient_checkpointing(model: Any) -> None:
    """transformers recomputes activations only in train mode; dropout is set to 0 so that the mode changes nothing."""
    for module in model.modules():
        for name in ("p", "attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.activation_checkpointing_enable()
    model.train()


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C, or a launcher's SIGTERM, into an event; a second Ctrl-C is let through."""
    stop = threading.Event()

    def ask(number: int, _: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()
        _say("stopping after this step; press again to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(message: str) -> None:
    tqdm.write(message)
