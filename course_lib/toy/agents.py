"""Agents of two or three calls, small enough to sum over every trajectory."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from course_lib.toy.policy import (
    EnumerablePolicy,
    Outcome,
    Tokens,
    complete_responses,
    prompt_distribution,
    written,
)

Answers = Tokens | Mapping[Tokens, float] | None


def append_only(context: Tokens, output: Tokens, answer: Tokens) -> Tokens:
    """The next context of an agent that forgets nothing: context + output + answer."""
    return (*context, *output, *answer)


def keep_last(context: Tokens, output: Tokens, answer: Tokens) -> Tokens:
    """The next context of an agent that keeps the question, what it just wrote and what came back, no more."""
    return (*context[:1], *output, *answer)


class ToyAgent(EnumerablePolicy):
    """A policy that is called several times in one episode, with an environment that answers in between.

    The probability of a trajectory is D(x) · P(world) · Π_j π_θ(y_j | c_j) · P(answer_j | …). Only π_θ depends on θ.

    Args:
        vocabulary: what the policy can say. The environment may use the same tokens.
        respond: `respond(world, context, output)`, the environment's answer to a call: a tuple of tokens; or a mapping
            from such tuples to probabilities; or None, which ends the episode.
        reward: `reward(world, outputs)` with the outputs of all calls, a tuple of tuples of tokens.
        worlds: what the environment knows and the policy does not, with probabilities; drawn once an episode. A mapping
            from prompt to such a mapping where it depends on the prompt.
        next_context: `next_context(context, output, answer)`; it should only select and join tokens of its arguments.
        max_calls: calls after which the episode ends.
        max_tokens, end: longest output of a call and the token that ends it early, as for `ToyPolicy`.
        prompts, prompt_probabilities, key, seed, spread: as for `ToyPolicy`.

    Attributes:
        worlds: (N,) the world of each trajectory, a tuple of texts.

    Example:
        >>> agent = ToyAgent(
        ...     ("left", "right"),
        ...     respond=lambda world, context, output: ("warm",) if output == (world,) else ("cold",),
        ...     reward=lambda world, outputs: float(outputs[-1] == (world,)),
        ...     worlds={"left": 0.5, "right": 0.5},
        ...     max_calls=2,
        ... )
        >>> len(agent), agent.outcomes[0].calls[1][0]
        (8, ('question', 'left', 'warm'))
    """

    def __init__(
        self,
        vocabulary: Sequence[str],
        respond: Callable[[str, Tokens, Tokens], Answers],
        reward: Callable[[str, tuple[Tokens, ...]], float],
        *,
        worlds: Mapping,
        next_context: Callable[[Tokens, Tokens, Tokens], Tokens] = append_only,
        max_calls: int,
        max_tokens: int = 1,
        end: str | None = None,
        prompts: Sequence[str] = ("question",),
        prompt_probabilities: Sequence[float] | None = None,
        key: Callable[[Tokens], Hashable] | None = None,
        seed: int = 0,
        spread: float = 1.0,
    ):
        outputs = complete_responses(vocabulary, max_tokens, end)
        distribution = prompt_distribution(prompts, prompt_probabilities)
        outcomes: list[Outcome] = []
        rewards: list[float] = []
        drawn: list[str] = []

        def play(prompt: int, world: str, context: Tokens, calls: tuple, chance: float, spoken: int) -> None:
            for output in (written(o, spoken) for o in outputs):
                made = (*calls, (context, output))
                answers = respond(world, context, output) if len(made) < max_calls else None
                if answers is None:
                    outcomes.append(Outcome(prompt, made, chance))
                    rewards.append(float(reward(world, tuple(y for _, y in made))))
                    drawn.append(world)
                    continue
                for answer, p in _distribution("respond", answers).items():
                    following = next_context(context, output, answer)
                    play(prompt, world, following, made, chance * p, spoken + len(output))

        for i, prompt in enumerate(prompts):
            for world, p in _distribution("worlds", worlds.get(prompt, worlds)).items():
                play(i, world, (prompt,), (), distribution[i].item() * p, 0)
        self.worlds = tuple(drawn)
        # Wrong ways of training need rows too: for the environment's tokens, and for what a final transcript claims.
        sequences = {(*context, *output) for o in outcomes for context, output in o.calls}
        extra = sorted({s[:k] for s in sequences for k in range(1, len(s)) if s[k] in vocabulary})
        super().__init__(
            vocabulary, prompts, distribution, outcomes, rewards, key or (lambda context: context),
            extra_contexts=extra, seed=seed, spread=spread,
        )  # fmt: skip

    @property
    def texts(self) -> list[str]:
        """World and outputs of each trajectory; calls are separated by " | "."""
        return [f"{world}: {text}" for world, text in zip(self.worlds, super().texts, strict=True)]


def research_agent(*, edit_context: bool, random_answers: bool = True, seed: int = 0, spread: float = 0.3) -> ToyAgent:
    """The course's running example as an agent of one to three calls: is the answer red or blue?

    Call 1: the agent says "red" or "blue" and is done, or says "search" and is told the colour. Call 2: it writes a
    note, any word. Call 3: it answers. The append-only agent still sees what the search found; the one that edits its
    context sees only its note. Reward 1 for the right colour. 22 trajectories for each question.

    It starts out as after a warm start: it mostly searches and mostly answers with the colour it sees, but its notes
    are noise. What there is to learn is what to write down.

    Args:
        edit_context: True for `keep_last`, False for `append_only`.
        random_answers: True: the colour is drawn anew each episode, red or blue evenly. False: the question fixes it,
            and there are two questions.

    Example:
        >>> agent = research_agent(edit_context=True)
        >>> agent.outcomes[agent.texts.index("red: search | blue | red")].calls
        ((('question',), ('search',)), (('question', 'search', 'red'), ('blue',)), (('question', 'blue'), ('red',)))
    """
    fixed = {"red question": {"red": 1.0}, "blue question": {"blue": 1.0}}
    agent = ToyAgent(
        ("search", "red", "blue"),
        _look_up,
        lambda world, outputs: float(outputs[-1] == (world,)),
        worlds={"red": 0.5, "blue": 0.5} if random_answers else fixed,
        next_context=keep_last if edit_context else append_only,
        max_calls=3,
        prompts=("question",) if random_answers else tuple(fixed),
        seed=seed,
        spread=spread,
    )
    colour = 1 if edit_context else 2  # where it stands when the agent answers: its note, or the search's result
    answering = {o.calls[-1][0] for o in agent.outcomes if len(o.calls) == 3}
    habits = {(prompt,): "search" for prompt in agent.prompts}
    habits |= {context: context[colour] for context in answering if context[colour] != "search"}
    bias = torch.zeros(len(agent.row_keys), len(agent.vocabulary), dtype=torch.float64)
    for context, word in habits.items():
        bias[agent.row_keys.index(context), agent.token_ids[word]] = 1.5
    return agent.with_theta(agent.theta + bias.flatten())


def _look_up(world: str, context: Tokens, output: Tokens) -> Answers:
    """A first call that searches is told the colour, any other first call was the answer; a note gets no answer."""
    if len(context) > 1:
        return ()
    return (world,) if output == ("search",) else None


def _distribution(name: str, given: Tokens | Mapping) -> Mapping:
    """A mapping from values to probabilities; a single value has probability 1."""
    if not isinstance(given, Mapping):
        return {given: 1.0}
    if any(p <= 0 for p in given.values()) or abs(sum(given.values()) - 1) > 1e-9:
        raise ValueError(f"{name}: expected positive probabilities that sum to 1, got {dict(given)}")
    return given
