"""Policies small enough to sum over everything they can say."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from course_lib.trajectories import Call, Trajectory

Tokens = tuple[str, ...]
Seed = int | torch.Generator


class Written(str):
    """The text of a token that the policy wrote; equal to the same text from elsewhere, but it can be told apart.

    Attributes:
        position: which of the trajectory's sampled tokens it is, counted from 0.
    """

    position: int

    def __new__(cls, text: str, position: int) -> "Written":
        token = super().__new__(cls, text)
        token.position = position
        return token


@dataclass(frozen=True)
class Outcome:
    """One thing that can happen: a prompt and the calls that follow it.

    Args:
        prompt: index of the prompt.
        calls: (context c_j, output y_j) of each model call, as token texts; those the policy wrote are `Written`.
            A single-turn response is one call.
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
        tokens, rows, mask: (N, T) sampled token id, table row it was drawn from, and 1 where there is one.
        call_ids: (N, T) which call the token belongs to, counted from 0.
        call_counts: (N,) number of calls.
        prompt_ids, rewards, chance: (N,) for each of the N outcomes.
        row_keys: the context key of each row, in order.
        token_ids: text to id: the vocabulary first, then what only prompts and the environment say.
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
        self.token_ids = {text: i for i, text in enumerate(self.vocabulary)}
        for text in (text for o in self.outcomes for context, _ in o.calls for text in context):
            self.token_ids.setdefault(text, len(self.token_ids))
        self._texts = tuple(self.token_ids)
        sampled = [
            [
                (self._row((*context, *output[:k])), self.token_ids[token], j)
                for j, (context, output) in enumerate(o.calls)
                for k, token in enumerate(output)
            ]
            for o in self.outcomes
        ]
        for context in extra_contexts:
            self._row(context)
        width = max(map(len, sampled))
        self.mask = torch.tensor([[float(t < len(s)) for t in range(width)] for s in sampled], dtype=torch.float64)
        padded = torch.tensor([s + [(0, 0, 0)] * (width - len(s)) for s in sampled])
        self.rows, self.tokens, self.call_ids = (column.contiguous() for column in padded.unbind(dim=-1))
        self.call_counts = torch.tensor([len(o.calls) for o in self.outcomes])
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

    def sequence_log_probs(self, tokens: Tensor, mask: Tensor, theta: Tensor | None = None) -> Tensor:
        """log π_θ(token | the tokens before it in its row) where the mask is 1, 0 elsewhere; differentiable in θ.

        This is what a language model computes of a padded batch, read off the table.

        Args:
            tokens: (B, T) ids as in `token_ids`.
            mask: (B, T) tokens to score. Their contexts must have a row in the table.
            theta: (P,) parameters; None for the policy's own.

        Raises:
            ValueError: a scored token is not in the vocabulary, or its context has no row.
        """
        rows, columns = mask.bool().nonzero(as_tuple=True)
        texts = [[self._texts[token] for token in row] for row in tokens.tolist()]
        contexts = [tuple(texts[b][:t]) for b, t in zip(rows.tolist(), columns.tolist(), strict=True)]
        scored = tokens[rows, columns]
        for context, token in zip(contexts, scored.tolist(), strict=True):
            if token >= len(self.vocabulary):
                raise ValueError(f"mask: {self._texts[token]!r} after {context} is not in the policy's vocabulary")
            if self._key(context) not in self._row_of:
                raise ValueError(f"tokens: expected contexts that occur, got {context}, which has no row in the table")
        table_rows = torch.tensor([self._row_of[self._key(context)] for context in contexts], dtype=torch.long)
        values = self._log_table(theta)[table_rows, scored]
        return torch.zeros(tokens.shape, dtype=torch.float64).index_put((rows, columns), values)

    def descent(self, loss: Tensor) -> Tensor:
        """−∇_θ loss, (P,): the step that a loss built from this policy's log-probabilities asks for."""
        return -torch.autograd.grad(loss, self.theta)[0]

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
        outcomes = [Outcome(i, (((prompts[i],), written(y)),), chance[i].item()) for i, y in pairs]
        super().__init__(vocabulary, prompts, chance, outcomes, values, key or (lambda c: c), seed=seed, spread=spread)


def written(response: Tokens, start: int = 0) -> Tokens:
    """The response with its tokens marked as the policy's, counted from `start`."""
    return tuple(Written(text, start + k) for k, text in enumerate(response))


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


def hasty_research() -> EnumerablePolicy:
    """`deep_research` for a policy that likes to answer at once, where luck decides whether an answer is right.

    It is right with probability 0.8 after a search and 0.4 without one, so every answered response stands twice in
    the table, with reward 1 and with reward 0: 46 outcomes, 45 parameters.

    Example:
        >>> policy = hasty_research()
        >>> sum(policy.chance[i].item() for i, text in enumerate(policy.texts) if text == "answer")
        1.0
    """
    policy = deep_research()
    outcomes, rewards = [], []
    for outcome in policy.outcomes:
        response = outcome.calls[0][1]
        right = 0.0 if response[-1] != "answer" else 0.8 if "search" in response else 0.4
        for reward, chance in ((1.0, right), (0.0, 1 - right)):
            if chance > 0:
                outcomes.append(Outcome(0, outcome.calls, chance))
                rewards.append(reward)
    haste = torch.tensor([0.0, 0.0, 1.5]).repeat(policy.theta.numel() // 3)
    shape = (policy.vocabulary, policy.prompts, policy.prompt_probabilities, outcomes, rewards, lambda context: context)
    return EnumerablePolicy(*shape).with_theta(policy.theta + haste)


def _searched(prompt: str, response: Tokens) -> float:
    return float("search" in response and response[-1] == "answer")


class Snapshot:
    """Tables of a policy as it was when it sampled (π_old): later changes of θ do not reach them."""

    def __init__(self, policy: EnumerablePolicy):
        self.policy = policy.with_theta(policy.theta)
        self.log_probs = self.policy.log_probs().detach()

    @cached_property
    def calls(self) -> list[list[Call]]:
        """The calls of each outcome as token ids, with the log-probabilities they were drawn with."""
        ids = self.policy.token_ids
        found = []
        for outcome, log_probs in zip(self.policy.outcomes, self.log_probs.tolist(), strict=True):
            drawn = iter(log_probs)
            found.append(
                [
                    Call([ids[t] for t in context], [ids[t] for t in output], [next(drawn) for _ in output])
                    for context, output in outcome.calls
                ]
            )
        return found

    @cached_property
    def final_transcripts(self) -> list[list[Call]]:
        """What is left of each outcome's calls in the last call's context and output."""
        ids = self.policy.token_ids
        found = []
        for outcome, log_probs in zip(self.policy.outcomes, self.log_probs.tolist(), strict=True):
            context, output = outcome.calls[-1]
            transcript = [*context, *output]
            found.append(
                [
                    Call([ids[t] for t in transcript[:k]], [ids[token]], [log_probs[token.position]])
                    for k, token in enumerate(transcript)
                    if isinstance(token, Written)
                ]
            )
        return found

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
        mask: (n, T) 1 on response tokens; the tokens of an agent's calls stand in one row, `call_ids` tells which.
        tokens: (n, T) token ids.
        old_log_probs: (n, T) log π_old of each token, 0 under the mask.
        scores: (n, P) ∇ log π(y_i | x).
        token_scores: (n, T, P) the same by token.
    """

    snapshot: Snapshot
    indices: Tensor
    group_ids: Tensor

    @property
    def policy(self) -> EnumerablePolicy:
        """π_old: the policy as it was when these were drawn."""
        return self.snapshot.policy

    def __len__(self) -> int:
        return self.indices.shape[0]

    @property
    def rewards(self) -> Tensor:
        return self.policy.rewards[self.indices]

    @property
    def prompt_ids(self) -> Tensor:
        return self.policy.prompt_ids[self.indices]

    @property
    def tokens(self) -> Tensor:
        return self.policy.tokens[self.indices]

    @property
    def mask(self) -> Tensor:
        return self.policy.mask[self.indices]

    @property
    def call_ids(self) -> Tensor:
        return self.policy.call_ids[self.indices]

    @property
    def call_counts(self) -> Tensor:
        return self.policy.call_counts[self.indices]

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
        return [self.policy.texts[i] for i in self.indices.tolist()]

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

    def trajectories(self) -> list[Trajectory]:
        """The samples as the library's trajectories: token ids as seen and sampled, call by call."""
        return self._as_trajectories(self.snapshot.calls)

    def final_transcripts(self) -> list[Trajectory]:
        """The samples as they look to one who kept only each one's final transcript: the last context and output.

        Tokens the policy wrote are marked as such wherever they still stand, with the log-probability they were drawn
        with. For an append-only agent this is all there was, and training on it is exact. If the context was edited,
        tokens are missing and others stand behind something else than what the policy saw.
        """
        return self._as_trajectories(self.snapshot.final_transcripts)

    def _as_trajectories(self, calls: list[list[Call]]) -> list[Trajectory]:
        groups, rewards = self.group_ids.tolist(), self.rewards.tolist()
        chosen = self.indices.tolist()
        return [Trajectory(calls[i], r, g) for i, r, g in zip(chosen, rewards, groups, strict=True)]
