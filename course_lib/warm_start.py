"""Supervised training on an expert's trajectories, before reinforcement learning has anything to reinforce.

A module of its own: it is what `training` starts from and needs neither tasks nor sampling.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from course_lib._tensors import require, require_number, require_whole
from course_lib.logprobs import score_tokens
from course_lib.trajectories import Trajectory, stepwise_batch
from course_lib.tree import split_rows


def warm_start(
    model: Any,
    batches: Iterable[Sequence[Trajectory]],
    *,
    learning_rate: Callable[[int], float],
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    tokens_per_row: int = 512,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Trains `model` in place to write what the expert wrote: one AdamW step a batch on the mean of −log π(y_jk | c_j).

    These are the segments of stepwise GRPO, each with advantage 1: the gradient of maximum likelihood is that of
    REINFORCE on the expert's samples when every sample is a success.

    Args:
        model: a transformers causal language model.
        batches: trajectories of the expert.
        learning_rate: from the number of the step, beginning with 0, to its rate.
        weight_decay: of AdamW.
        max_grad_norm: gradients are scaled down to this norm.
        tokens_per_row: tree nodes of one forward and backward pass; bounds memory, never changes the gradient.
        on_step: called with the number of the step and its loss, in nats a token.

    Raises:
        ValueError: a number out of its range, nothing to train, a batch in which the expert wrote nothing.
        FloatingPointError: the gradient is not finite; the weights are those of the step before.

    Example:
        >>> from course_lib.models import tiny_model
        >>> from course_lib.trajectories import Call
        >>> losses = []
        >>> parrot = [Trajectory([Call([5, 6], [7, 1]), Call([8], [7, 1])], reward=1.0, group_id=0)]
        >>> warm_start(tiny_model(), [parrot] * 20, learning_rate=lambda step: 0.01,
        ...            on_step=lambda step, loss: losses.append(loss))
        >>> losses[0] > 1 > 0.1 > losses[-1]
        True
    """
    weight_decay = require_number("weight_decay", weight_decay, "a finite number ≥ 0", lambda w: 0 <= w < math.inf)
    max_grad_norm = require_number("max_grad_norm", max_grad_norm, "a number > 0", lambda n: n > 0)
    tokens_per_row = require_whole("tokens_per_row", tokens_per_row, 1)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    require(bool(parameters), "model", "parameters that are trained", "none")
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True)
    optimizer.zero_grad()  # of gradients that were left from elsewhere
    for step, trajectories in enumerate(batches):
        rate = require_number("learning_rate", learning_rate(step), "finite numbers ≥ 0", lambda r: 0 <= r < math.inf)
        for group in optimizer.param_groups:
            group["lr"] = rate
        written = any(call.output for trajectory in trajectories for call in trajectory.calls)
        require(written, "batches", f"at least one token of the expert in batch {step}", "none")
        batch = stepwise_batch(trajectories, pad_token_id=0, advantages=[1.0] * len(trajectories)).to(model.device)
        total, loss = batch.mask.sum(), 0.0
        for row in split_rows(batch.inputs(), tokens_per_row):
            scored = score_tokens(model, batch.tokens[row], batch.attention_mask[row], batch.mask[row])
            part = -scored.log_probs.sum() / total
            part.backward()
            loss += part.item()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient: expected a finite norm in step {step}, got {norm}; lower the rate")
        optimizer.step()
        optimizer.zero_grad()
        if on_step is not None:
            on_step(step, loss)
