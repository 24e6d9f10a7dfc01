"""Supervised training on an expert's trajectories, before reinforcement learning has anything to reinforce.

A module of its own: it is what `training` starts from and needs neither tasks nor sampling.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

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
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True)
    for step, trajectories in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        batch = stepwise_batch(trajectories, pad_token_id=0, advantages=[1.0] * len(trajectories)).to(model.device)
        total, loss = batch.mask.sum(), 0.0
        for row in split_rows(batch.inputs(), tokens_per_row):
            scored = score_tokens(model, batch.tokens[row], batch.attention_mask[row], batch.mask[row])
            part = -scored.log_probs.sum() / total
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if on_step is not None:
            on_step(step, loss)
