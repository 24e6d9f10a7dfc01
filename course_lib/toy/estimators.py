"""Exact mean and covariance of any gradient estimator."""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb, factorial

import torch
from torch import Tensor

from course_lib.toy.policy import EnumerablePolicy, Samples, Snapshot

Estimator = Callable[[Samples], Tensor]
Loss = Callable[[Tensor, Samples], object]

_CHECKED = 40  # groups on which an estimator is tried before it is trusted to be vectorised or reordered


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of a gradient estimator.

    Attributes:
        mean: (P,).
        covariance: (P, P).
        bias: (P,), mean − ∇J.
        exact: True if summed over all groups, False if sampled.
        groups: how many groups were evaluated.
        group_size: G.
        interval: (P,) half-width of the mean's 95 % confidence interval; zeros if exact.
        variance_interval: the same for `variance`.
    """

    mean: Tensor
    covariance: Tensor
    bias: Tensor
    exact: bool
    groups: int
    group_size: int
    interval: Tensor
    variance_interval: float

    @property
    def variance(self) -> float:
        """Total variance E‖g − E g‖², the trace of the covariance."""
        return self.covariance.trace().item()

    def __repr__(self) -> str:
        bias, groups = f"‖bias‖ = {self.bias.norm():.3g}", f"{self.groups:,} groups of {self.group_size}"
        if self.exact:
            return f"Moments(exact over {groups}: {bias}, variance = {self.variance:.4g})"
        spread = f"{self.variance:.4g} ± {self.variance_interval:.2g}"
        bias = f"{bias} with noise {self.interval.norm():.2g}"
        return f"Moments(Monte Carlo over {groups}: {bias}, variance = {spread})"


def moments(
    policy: EnumerablePolicy, estimator: Estimator, group_size: int, *, budget: int = 50_000, seed: int = 0
) -> Moments:
    """Mean and covariance of `estimator` over groups of `group_size` responses to one prompt.

    Sums over all groups when there are no more than `budget`; samples `budget` groups otherwise, and says
    which. If the estimator does not care about the order of its samples (this is tried out), each unordered
    group is visited once with its number of orderings. It is written for one group; where `torch.vmap` can
    run it, all groups run at once.

    Args:
        estimator: `estimator(samples) -> (P,)` with `samples` a `Samples` of `group_size` rows. Must be
            deterministic.
        budget: largest number of groups to evaluate.
        seed: of the groups sampled.

    Raises:
        ValueError: the estimator returns the wrong shape or NaN, or two values for the same group.

    Example:
        >>> from course_lib.toy import ToyPolicy
        >>> policy = ToyPolicy(("a", "b"), 2, lambda prompt, response: float("b" in response))
        >>> def reinforce(samples):
        ...     return (samples.rewards[:, None] * samples.scores).mean(dim=0)
        >>> found = moments(policy, reinforce, group_size=3)
        >>> found.exact, bool(found.bias.abs().max() < 1e-12)
        (True, True)
    """
    generator = torch.Generator().manual_seed(seed)
    snapshot = Snapshot(policy)
    tried = _trial_groups(policy, group_size, generator)
    run, values = _runner(snapshot, estimator, tried)
    shuffled = tried[:, torch.randperm(group_size, generator=generator)]
    symmetric = _same(values, run(shuffled)) and _same(values, run(tried.flip(1)))
    sizes = torch.bincount(policy.prompt_ids, minlength=len(policy.prompts)).tolist()
    count = sum(comb(n + group_size - 1, group_size) if symmetric else n**group_size for n in sizes)
    exact = count <= budget
    if exact:
        indices, weights = _all_groups(policy, group_size, symmetric)
    else:
        indices = policy.sample(budget, group_size, seed=generator).indices.view(budget, group_size)
        weights = torch.full((budget,), 1 / budget, dtype=torch.float64)
    values = run(indices)
    mean = weights @ values
    centred = values - mean
    covariance = centred.T @ (weights[:, None] * centred)
    interval, variance_interval = torch.zeros_like(mean), 0.0
    if not exact:
        interval = 1.96 * (covariance.diagonal() / budget).sqrt()
        variance_interval = 1.96 * centred.square().sum(dim=1).std().item() / budget**0.5
    bias = mean - policy.gradient()
    return Moments(mean, covariance, bias, exact, len(indices), group_size, interval, variance_interval)


def _all_groups(policy: EnumerablePolicy, group_size: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Every group of every prompt as outcome indices (M, G), and its probability (M,)."""
    p = policy.probabilities().detach()
    indices, weights = [], []
    for prompt, share in enumerate(policy.prompt_probabilities):
        outcomes = (policy.prompt_ids == prompt).nonzero().flatten()
        if symmetric:
            group = torch.combinations(outcomes, group_size, with_replacement=True)
            orderings = factorial(group_size) / _repeats(group)
        else:
            group = torch.cartesian_prod(*[outcomes] * group_size).view(-1, group_size)
            orderings = 1.0
        indices.append(group)
        weights.append(share * orderings * (p[group] / share).prod(dim=1))
    return torch.cat(indices), torch.cat(weights)


def _repeats(sorted_groups: Tensor) -> Tensor:
    """Π count! over the distinct members of each row of sorted indices."""
    product = torch.ones(len(sorted_groups), dtype=torch.float64)
    run = torch.ones_like(product)
    for left, right in zip(sorted_groups.T[:-1], sorted_groups.T[1:], strict=True):
        run = torch.where(left == right, run + 1, 1.0)
        product *= run
    return product


def _trial_groups(policy: EnumerablePolicy, group_size: int, generator: torch.Generator) -> Tensor:
    """Groups drawn evenly over outcomes, so that rare ones are tried too."""
    prompts = torch.multinomial(policy.prompt_probabilities, _CHECKED, replacement=True, generator=generator)
    same_prompt = (policy.prompt_ids == prompts[:, None]).double()
    return torch.multinomial(same_prompt, group_size, replacement=True, generator=generator)


def _runner(snapshot: Snapshot, estimator: Estimator, tried: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A function from groups of outcome indices (M, G) to estimates (M, P), and its values on `tried`."""
    size = snapshot.policy.theta.numel()
    group_ids = torch.zeros(tried.shape[1], dtype=torch.long)

    def one(indices: Tensor) -> Tensor:
        return estimator(Samples(snapshot, indices, group_ids))

    def one_by_one(groups: Tensor) -> Tensor:
        values = []
        for indices in groups:
            value = one(indices)
            if not isinstance(value, Tensor) or value.shape != (size,):
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"estimator: expected shape ({size},), one value a parameter, got {got}")
            values.append(value.detach().to(torch.float64))
        return _finite(snapshot, groups, torch.stack(values))

    def at_once(groups: Tensor) -> Tensor:
        chunk = max(1, 2_000_000 // (tried.shape[1] * size))
        return _finite(snapshot, groups, torch.vmap(one, chunk_size=chunk)(groups).detach().to(torch.float64))

    expected = one_by_one(tried)
    if not _same(expected[:8], one_by_one(tried[:8])):
        raise ValueError("estimator: expected one value for each group, got two for the same samples")
    try:
        vectorised = _same(expected, at_once(tried))
    except Exception:  # vmap refuses .item(), if and NumPy, each in its own way; such code runs group by group
        vectorised = False
    return (at_once if vectorised else one_by_one), expected


def _finite(snapshot: Snapshot, groups: Tensor, values: Tensor) -> Tensor:
    broken = ~values.isfinite().all(dim=1)
    if broken.any():
        rewards = snapshot.policy.rewards[groups[broken][0]].tolist()
        raise ValueError(f"estimator: expected finite values, got NaN or inf for rewards {rewards}")
    return values


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-10 * max(1.0, a.abs().max().item()))


def from_loss(loss: Loss) -> Estimator:
    """The estimator whose step is one step down a loss: g = −∇_θ loss, taken at θ = θ_old.

    Args:
        loss: `loss(log_probs, samples)` with log_probs (G, T) the token log-probabilities to differentiate;
            returns a scalar, or a report with a `.loss`.

    Example:
        >>> from course_lib.toy import ToyPolicy
        >>> policy = ToyPolicy(("a", "b"), 2, lambda prompt, response: float("b" in response))
        >>> surrogate = lambda log_probs, samples: -(samples.rewards * log_probs.sum(dim=1)).mean()
        >>> bool(moments(policy, from_loss(surrogate), group_size=2).bias.abs().max() < 1e-12)
        True
    """

    def estimator(samples: Samples) -> Tensor:
        log_probs = samples.old_log_probs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_value(loss(log_probs, samples)), log_probs)
        return -torch.einsum("gt,gtp->p", slope, samples.token_scores)

    return estimator


def several_steps(loss: Loss, *, steps: int, learning_rate: float) -> Estimator:
    """The estimator of a whole inner loop: (θ after `steps` descents on one group − θ_old) / learning_rate.

    With one step it equals `from_loss(loss)`. With more, the ratio leaves 1 and clipping begins to act.

    Args:
        loss: as for `from_loss`; log_probs are those of the parameters as they move.
    """

    def estimator(samples: Samples) -> Tensor:
        policy = samples.snapshot.policy
        theta = policy.theta.detach()
        for _ in range(steps):
            theta = theta.detach().requires_grad_()
            value = loss_value(loss(policy.log_probs(samples, theta), samples))
            theta = theta - learning_rate * torch.autograd.grad(value, theta)[0]
        return (theta - policy.theta).detach() / learning_rate

    return estimator


def loss_value(result) -> Tensor:
    """The scalar of a loss that may have come with a report."""
    value = getattr(result, "loss", result)
    if not isinstance(value, Tensor) or value.ndim:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss: expected a scalar tensor, got {got}")
    return value


def optimal_baseline(policy: EnumerablePolicy) -> Tensor:
    """The baseline of least total variance, b(x) = E[R ‖∇log π‖²] / E[‖∇log π‖²].

    It follows from setting the derivative of E‖(R − b) ∇log π‖² in b to 0; the mean does not depend on b.

    Returns:
        (number of prompts,).

    Source:
        Greensmith, Bartlett and Baxter 2004, Variance Reduction Techniques for Gradient Estimates.
    """
    weight = policy.probabilities().detach() * policy.scores().square().sum(dim=1)
    zeros = torch.zeros(len(policy.prompts), dtype=torch.float64)
    total = zeros.index_add(0, policy.prompt_ids, weight)
    return zeros.index_add(0, policy.prompt_ids, weight * policy.rewards) / total
