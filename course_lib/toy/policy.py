"""Policies small enough to sum over everything they can say."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Tokens = tuple[str, ...]
Seed = int | torch.Generator


@dataclass(frozen=True)
class Outcome:
    """One thing that can happen: a prompt and the calls that follow it.

    Args:
        prompt: index of the prompt.
        calls: (context, output) of each model call, as token texts. A single-turn response is one call.
        chance: probability of all that the policy does not decide: the prompt and the environment's answers.
    """

    prompt: int
    calls: tuple[tuple[Tokens, Tokens], ...]
    chance: float


class EnumerablePolicy:
    """A table of logits, one row a context, over every outcome it can produce. Float64 throughout.

    π_θ(token | context) = softmax(θ[row of the context])[token]. Two contexts with the same `key` share a
    row. You normally build one through `ToyPolicy` or `ToyAgent`.

    Attributes:
        theta: parameters, (P,) with P = rows · V; a leaf that requires a gradient.
        tokens, rows, mask: (N, T) sampled token id, table row it was drawn from, 1 where there is one.
        prompt_ids, rewards, chance: (N,) for each of the N outcomes.
        row_keys: the context key of each row, in order.
    """

    def __init__(
        self,
        vocabulary: Sequence[str],
        prompts: Sequence[str],
        prompt_probabilities: Tensor,
        outcomes: Sequence[Outcome],
        rewards: Sequence[float] | Tensor,
        key: Callable[[Tokens], Hashable],
        *,
        extra_contexts: Sequence[Tokens] = (),
        seed: int = 0,
        spread: float = 1.0,
    ):
        self.vocabulary, self.prompts, self.outcomes = tuple(vocabulary), tuple(prompts), tuple(outcomes)
        self.prompt_probabilities = prompt_probabilities
        self._key = key
        self._row_of: dict[Hashable, int] = {}
        column = {text: i for i, text in enumerate(self.vocabulary)}
        sampled = [
            [
                (self._row(context + output[:k]), column[token])
                for context, output in o.calls
                for k, token in enumerate(output)
            ]
            for o in self.outcomes
        ]
        for context in extra_contexts:
            self._row(context)
        width = max(map(len, sampled))
        self.mask = torch.tensor(
            [[float(t < len(s)) for t in range(width)] for s in sampled], dtype=torch.float64
        )
        padded = torch.tensor([s + [(0, 0)] * (width - len(s)) for s in sampled])
        self.rows, self.tokens = padded[..., 0].clone(), padded[..., 1].clone()
        self.prompt_ids = torch.tensor([o.prompt for o in self.outcomes])
        self.chance = torch.tensor([o.chance for o in self.outcomes], dtype=torch.float64)
        self.rewards = self._checked_rewards(rewards)
        generator = torch.Generator().manual_seed(seed)
        size = len(self._row_of) * len(self.vocabulary)
        self.theta = (spread * torch.randn(size, dtype=torch.float64, generator=generator)).requires_grad_()

    def _row(self, context: Tokens) -> int:
        return self._row_of.setdefault(self._key(context), len(self._row_of))

    @property
    def row_keys(self) -> tuple[Hashable, ...]:
        return tuple(self._row_of)

    @property
    def texts(self) -> list[str]:
        """What the policy says in each outcome; calls are separated by " | "."""
        return [" | ".join(" ".join(output) for _, output in o.calls) for o in self.outcomes]

    def __len__(self) -> int:
        return len(self.outcomes)

    def __repr__(self) -> str:
        size = f"{len(self)} outcomes, {self.theta.numel()} parameters"
        return f"{type(self).__name__}({size}, J = {self.objective().item():.4f})"

    def with_theta(self, theta: Tensor):
        """The same outcomes under other parameters; `policy.theta / 0.5` is temperature 0.5.

        Args:
            theta: (P,); copied and detached.
        """
        if theta.shape != self.theta.shape:
            raise ValueError(f"theta: expected shape {tuple(self.theta.shape)}, got {tuple(theta.shape)}")
        other = copy(self)
        other.theta = theta.detach().to(torch.float64).clone().requires_grad_()
        return other

    def with_rewards(self, rewards: Tensor | Sequence[float]):
        """The same policy with another reward for each outcome, (N,)."""
        other = copy(self)
        other.rewards = self._checked_rewards(rewards)
        return other

    def _checked_rewards(self, rewards: Tensor | Sequence[float]) -> Tensor:
        rewards = torch.as_tensor(rewards, dtype=torch.float64).detach().clone()
        if rewards.shape != (len(self),) or not rewards.isfinite().all():
            got = "NaN or inf" if rewards.shape == (len(self),) else f"shape {tuple(rewards.shape)}"
            raise ValueError(f"rewards: expected {len(self)} finite values, one for each outcome, got {got}")
        return rewards

    def token_distribution(self, theta: Tensor | None = None) -> Tensor:
        """π_θ(v | context) for every row of the table: (rows, V)."""
        return self._log_table(theta).exp()

    def _log_table(self, theta: Tensor | None) -> Tensor:
        theta = self.theta if theta is None else theta
        return theta.view(-1, len(self.vocabulary)).log_softmax(dim=-1)

    def log_probs(self, samples: "Samples | None" = None, theta: Tensor | None = None) -> Tensor:
        """log π_θ of each token, 0 where there is none; differentiable in θ.

        Args:
            samples: whose tokens; None for every outcome.
            theta: (P,) parameters; None for the policy's own.

        Returns:
            (N, T), or (n, T) for n samples. Its sum over T is log π_θ(y | x).
        """
        index = slice(None) if samples is None else samples.indices
        return self._log_table(theta)[self.rows[index], self.tokens[index]] * self.mask[index]

    def probabilities(self, theta: Tensor | None = None) -> Tensor:
        """Probability of each outcome, D(x) · π_θ(y | x) (· the environment's answers): (N,), sums to 1."""
        return self.chance * self.log_probs(theta=theta).sum(dim=-1).exp()

    def objective(self, theta: Tensor | None = None) -> Tensor:
        """J(θ) = Σ over outcomes of probability · reward: an exact, differentiable scalar."""
        return (self.probabilities(theta) * self.rewards).sum()

    def prompt_objectives(self) -> Tensor:
        """The expected reward of each prompt by itself, (number of prompts,)."""
        p = self.probabilities().detach()
        zeros = torch.zeros(len(self.prompts), dtype=torch.float64)
        return zeros.index_add(0, self.prompt_ids, p * self.rewards) / self.prompt_probabilities

    def gradient(self) -> Tensor:
        """∇J(θ), (P,), by differentiating the sum over all outcomes.

        The score form gives the same vector: `(policy.probabilities() * policy.rewards) @ policy.scores()`.
        """
        return torch.autograd.grad(self.objective(), self.theta)[0]

    def entropy(self) -> float:
        """Entropy of what the policy says, −E[log π_θ(y | x)], in nats a response."""
        return -(self.probabilities() * self.log_probs().sum(dim=-1)).sum().item()

    def token_scores(self) -> Tensor:
        """∇_θ log π_θ of each token of each outcome: (N, T, P).

        For a softmax table it is (one-hot of the token − π_θ(· | context)) in the context's row, else 0.
        """
        rows, size = self.theta.numel() // len(self.vocabulary), len(self.vocabulary)
        one_hot = torch.nn.functional.one_hot(self.tokens, size).to(torch.float64)
        value = (one_hot - self.token_distribution().detach()[self.rows]) * self.mask[..., None]
        scores = torch.zeros(*self.tokens.shape, rows, size, dtype=torch.float64)
        scores.scatter_(2, self.rows[..., None, None].expand(-1, -1, 1, size), value[:, :, None])
        return scores.flatten(2)

    def scores(self) -> Tensor:
        """∇_θ log π_θ(y | x) for every outcome: (N, P). Exact means are products with this matrix."""
        return self.token_scores().sum(dim=1)

    def sample(self, groups: int, group_size: int = 1, *, seed: Seed = 0) -> "Samples":
        """Draw `groups` prompts from D and `group_size` responses to each.

        `policy.sample(1000)` are 1,000 independent draws; `policy.sample(4, 8)` are four groups of eight.

        Args:
            seed: an integer, or a `torch.Generator` to go on drawing from.
        """
        generator = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
        p = self.probabilities().detach()
        prompts = torch.multinomial(self.prompt_probabilities, groups, replacement=True, generator=generator)
        drawn = torch.empty(groups, group_size, dtype=torch.long)
        for prompt in prompts.unique().tolist():
            chosen = prompts == prompt
            count = int(chosen.sum()) * group_size
            weights = p * (self.prompt_ids == prompt)
            drawn[chosen] = torch.multinomial(weights, count, True, generator=generator).view(-1, group_size)
        return Samples(Snapshot(self), drawn.flatten(), torch.arange(groups).repeat_interleave(group_size))

    def every_outcome(self) -> "Samples":
        """All N outcomes once each; weighted by `probabilities()` they give exact expectations."""
        return Samples(Snapshot(self), torch.arange(len(self)), self.prompt_ids)


class ToyPolicy(EnumerablePolicy):
    """A single-call policy: a prompt x, then up to `max_tokens` tokens y_1 … y_K, drawn one by one.

    Args:
        vocabulary: token texts.
        max_tokens: longest response.
        reward: R(x, y) as `reward(prompt, response)`, the response a tuple of token texts; or one value for
            each outcome.
        end: the token that ends a response early (and belongs to it); None: every response has `max_tokens`
            tokens.
        prompts: prompt texts.
        prompt_probabilities: D(x); None: uniform.
        key: which contexts share a row of the table: contexts are tuples (prompt, y_1, …, y_k−1); None: none
            do.
        seed: of the initial parameters, drawn from a normal distribution …
        spread: … with this standard deviation; 0 gives the uniform policy.

    Example:
        >>> reward = lambda prompt, response: float(response == ("a", "b"))
        >>> policy = ToyPolicy(("a", "b"), 2, reward, spread=0.0)
        >>> policy.texts
        ['a a', 'a b', 'b a', 'b b']
        >>> policy.objective().item()
        0.25
        >>> policy.gradient()
        tensor([ 0.1250, -0.1250, -0.1250,  0.1250,  0.0000,  0.0000], dtype=torch.float64)
    """

    def __init__(
        self,
        vocabulary: Sequence[str],
        max_tokens: int,
        reward: Callable[[str, Tokens], float] | Sequence[float] | Tensor,
        *,
        end: str | None = None,
        prompts: Sequence[str] = ("x",),
        prompt_probabilities: Sequence[float] | None = None,
        key: Callable[[Tokens], Hashable] | None = None,
        seed: int = 0,
        spread: float = 1.0,
    ):
        responses = complete_responses(vocabulary, max_tokens, end)
        chance = prompt_distribution(prompts, prompt_probabilities)
        pairs = [(i, y) for i in range(len(prompts)) for y in responses]
        values = [float(reward(prompts[i], y)) for i, y in pairs] if callable(reward) else reward
        outcomes = [Outcome(i, (((prompts[i],), y),), chance[i].item()) for i, y in pairs]
        super().__init__(
            vocabulary, prompts, chance, outcomes, values, key or (lambda c: c), seed=seed, spread=spread
        )


def complete_responses(vocabulary: Sequence[str], max_tokens: int, end: str | None) -> list[Tokens]:
    """Every response that `end` or the length limit closes, in order of first token."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens: expected at least 1, got {max_tokens}")
    if end is not None and end not in vocabulary:
        raise ValueError(f"end: expected one of the vocabulary {tuple(vocabulary)}, got {end!r}")
    if len(set(vocabulary)) != len(vocabulary):
        raise ValueError(f"vocabulary: expected distinct tokens, got {tuple(vocabulary)}")
    found: list[Tokens] = []

    def grow(prefix: Tokens) -> None:
        for token in vocabulary:
            response = (*prefix, token)
            if token == end or len(response) == max_tokens:
                found.append(response)
            else:
                grow(response)

    grow(())
    return found


def prompt_distribution(prompts: Sequence[str], probabilities: Sequence[float] | None) -> Tensor:
    """D(x) as a float64 vector that sums to 1."""
    if probabilities is None:
        probabilities = [1 / len(prompts)] * len(prompts)
    distribution = torch.as_tensor(probabilities, dtype=torch.float64)
    size = len(prompts)
    if distribution.shape != (size,) or (distribution <= 0).any() or abs(distribution.sum() - 1) > 1e-9:
        got = distribution.tolist()
        raise ValueError(f"prompt_probabilities: expected {size} positive values that sum to 1, got {got}")
    return distribution


def deep_research(*, seed: int = 0, spread: float = 0.5) -> ToyPolicy:
    """The course's running example, made tiny: a question, up to four actions, one answer.

    Actions are "search", "think" and "answer"; "answer" ends the response. It is right if the policy searched
    first: 1, else 0. 31 outcomes, 45 parameters.

    Example:
        >>> policy = deep_research()
        >>> [text for text, r in zip(policy.texts, policy.rewards) if r == 1][:3]
        ['search search search answer', 'search search think answer', 'search search answer']
    """
    return ToyPolicy(
        ("search", "think", "answer"),
        4,
        _searched,
        end="answer",
        prompts=("question",),
        seed=seed,
        spread=spread,
    )


def easy_and_hard(*, seed: int = 0, spread: float = 0.5) -> ToyPolicy:
    """Two questions, each half of the time: the hard one needs two searches before the answer."""
    return ToyPolicy(
        ("search", "think", "answer"),
        4,
        lambda prompt, y: _searched(prompt, y) * (prompt == "easy" or y.count("search") >= 2),
        end="answer",
        prompts=("easy", "hard"),
        seed=seed,
        spread=spread,
    )


def _searched(prompt: str, response: Tokens) -> float:
    return float("search" in response and response[-1] == "answer")


class Snapshot:
    """Tables of a policy as it was when it sampled (π_old): later changes of θ do not reach them."""

    def __init__(self, policy: EnumerablePolicy):
        self.policy = policy.with_theta(policy.theta)
        self.log_probs = self.policy.log_probs().detach()

    @cached_property
    def token_scores(self) -> Tensor:
        return self.policy.token_scores()

    @cached_property
    def scores(self) -> Tensor:
        return self.policy.scores()


@dataclass(frozen=True)
class Samples:
    """n sampled outcomes: what an estimator or a loss is given. All tensors are float64 and carry no
    gradient.

    Attributes:
        indices: (n,) which outcome each sample is.
        group_ids: (n,) samples of one group answer the same prompt.
        rewards: (n,) R(x, y_i).
        mask: (n, T) 1 on response tokens.
        tokens: (n, T) token ids.
        old_log_probs: (n, T) log π_old of each token, 0 under the mask.
        scores: (n, P) ∇ log π(y_i | x).
        token_scores: (n, T, P) the same by token.
    """

    snapshot: Snapshot
    indices: Tensor
    group_ids: Tensor

    def __len__(self) -> int:
        return self.indices.shape[0]

    @property
    def rewards(self) -> Tensor:
        return self.snapshot.policy.rewards[self.indices]

    @property
    def prompt_ids(self) -> Tensor:
        return self.snapshot.policy.prompt_ids[self.indices]

    @property
    def tokens(self) -> Tensor:
        return self.snapshot.policy.tokens[self.indices]

    @property
    def mask(self) -> Tensor:
        return self.snapshot.policy.mask[self.indices]

    @property
    def old_log_probs(self) -> Tensor:
        return self.snapshot.log_probs[self.indices]

    @property
    def scores(self) -> Tensor:
        return self.snapshot.scores[self.indices]

    @property
    def token_scores(self) -> Tensor:
        return self.snapshot.token_scores[self.indices]

    @property
    def texts(self) -> list[str]:
        return [self.snapshot.policy.texts[i] for i in self.indices.tolist()]

    def policy_gradient(self, advantages: Tensor) -> Tensor:
        """(1/n) Σ_i A_i ∇log π(y_i | x): the policy-gradient estimate with these weights.

        Args:
            advantages: (n,), or (n, T) to weigh each token by itself.

        Returns:
            (P,).
        """
        if advantages.ndim == 2:
            return torch.einsum("nt,ntp->p", advantages, self.token_scores) / len(self)
        return torch.einsum("n,np->p", advantages, self.scores) / len(self)
