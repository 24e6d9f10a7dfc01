"""Training a policy one can enumerate: every curve is exact, not an average of samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from course_lib.toy.estimators import Estimator, Loss, loss_value
from course_lib.toy.policy import EnumerablePolicy, Samples

OnStep = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Attributes:
        policy: the trained policy; the one that was handed in is unchanged.
        curves: name to (steps + 1,) values, entry k after k updates: "J", "entropy" (nats a response),
            "gradient_norm" (of the exact ∇J), "kl" (exact KL(π_θ ‖ π at the start)). "loss" and the metrics
            of the loss's report are (steps,): entry k belongs to the first update on batch k. A report's own "kl",
            an estimate from the batch, gives way to the exact one.
    """

    policy: EnumerablePolicy
    curves: dict[str, Tensor]

    @property
    def objective(self) -> Tensor:
        return self.curves["J"]


def train(
    policy: EnumerablePolicy,
    loss: Loss,
    *,
    steps: int,
    groups: int = 1,
    group_size: int = 8,
    learning_rate: float = 0.5,
    updates_per_batch: int = 1,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Run:
    """Sample a batch, step down the loss, repeat; record exact quantities after every batch.

    Args:
        loss: `loss(log_probs, samples)`, log_probs (n, T) at the current θ; returns a scalar or a report with `.loss`.
        steps: batches.
        groups: prompts a batch, each with `group_size` responses; `samples.group_ids` tells them apart.
        updates_per_batch: optimiser steps on each batch; beyond one the ratio leaves 1.
        on_step: called as `on_step(step, values)` at the start and after every batch, for a live picture.

    Example:
        >>> from course_lib.toy import ToyPolicy
        >>> policy = ToyPolicy(("a", "b"), 2, lambda prompt, response: float(response == ("a", "b")))
        >>> def reinforce(log_probs, samples):
        ...     return -(samples.rewards * log_probs.sum(dim=1)).mean()
        >>> run = train(policy, reinforce, steps=100, seed=1)
        >>> bool(run.objective[-1] > 0.9 > run.objective[0])
        True
    """
    learner = policy.with_theta(policy.theta)
    stepper = optimizer([learner.theta], lr=learning_rate)

    def update(samples: Samples) -> dict[str, float]:
        first: dict[str, float] = {}
        for _ in range(updates_per_batch):
            result = loss(learner.log_probs(samples), samples)
            value = loss_value(result)
            first = first or {"loss": value.item(), **getattr(result, "metrics", {})}
            stepper.zero_grad()
            value.backward()
            stepper.step()
        return first

    return _run(policy, learner, update, steps, groups, group_size, seed, on_step)


def ascend(
    policy: EnumerablePolicy,
    estimator: Estimator,
    *,
    steps: int,
    groups: int = 1,
    group_size: int = 8,
    learning_rate: float = 0.5,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Run:
    """`train` with a gradient estimate in place of a loss: θ ← θ + learning_rate · estimator(samples).

    Args:
        estimator: `estimator(samples) -> (P,)`, as for `moments`; here it is given the whole batch.
        steps, groups, group_size, seed, on_step: as for `train`.

    Example:
        >>> from course_lib.toy import ToyPolicy
        >>> policy = ToyPolicy(("a", "b"), 2, lambda prompt, response: float(response == ("a", "b")))
        >>> run = ascend(policy, lambda samples: samples.policy_gradient(samples.rewards), steps=100, seed=1)
        >>> bool(run.objective[-1] > 0.9 > run.objective[0])
        True
    """
    learner = policy.with_theta(policy.theta)

    def update(samples: Samples) -> dict[str, float]:
        step = estimator(samples)
        with torch.no_grad():
            learner.theta += learning_rate * step
        return {}

    return _run(policy, learner, update, steps, groups, group_size, seed, on_step)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors of a few numbers are slower on several threads, and many times so where other programs run as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def _run(
    start: EnumerablePolicy,
    learner: EnumerablePolicy,
    update: Callable[[Samples], dict[str, float]],
    steps: int,
    groups: int,
    group_size: int,
    seed: int,
    on_step: OnStep | None,
) -> Run:
    """Sample from `learner`, let `update` change it in place, record; `steps` times."""
    generator = torch.Generator().manual_seed(seed)
    curves: dict[str, list[float]] = {}
    extra: dict[str, float] = {}
    for step in range(steps + 1):
        if step > 0:
            extra = update(learner.sample(groups, group_size, seed=generator))
        values = extra | exact_state(learner, start)
        for name, value in values.items():
            curves.setdefault(name, []).append(value)
        if on_step is not None:
            on_step(step, values)
    return Run(learner, {name: torch.tensor(values, dtype=torch.float64) for name, values in curves.items()})


def exact_state(policy: EnumerablePolicy, start: EnumerablePolicy) -> dict[str, float]:
    """J, the norm of ∇J, the entropy and KL(π_θ ‖ π_start), each by summing over all outcomes."""
    log_probs = policy.log_probs().sum(dim=1)
    p = policy.chance * log_probs.exp()
    objective = (p * policy.rewards).sum()
    (gradient,) = torch.autograd.grad(objective, policy.theta)
    p, log_probs = p.detach(), log_probs.detach()
    return {
        "J": objective.item(),
        "entropy": -(p * log_probs).sum().item(),
        "gradient_norm": gradient.norm().item(),
        "kl": (p * (log_probs - start.log_probs().detach().sum(dim=1))).sum().item(),
    }
