"""Sampling from a policy: whole batches of episodes stepped together, every drawn token kept as it was drawn.

The distribution a token is drawn from is softmax(logits / temperature), nothing else: no top-k, no top-p, no
penalties. A truncated distribution is a different policy, and the ratio of the trainer's probability to the
sampler's would no longer be a ratio of the same thing.
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from course_lib._tensors import as_tensor, require, require_shape, require_temperature
from course_lib.logprobs import run_tree, supports_tree
from course_lib.models import eos_token_ids
from course_lib.tasks import Episode
from course_lib.trajectories import Call, Trajectory
from course_lib.tree import build_tree, split_rows

PREFILL_TOKENS = 2048
"""Tree nodes run at once, at most, when contexts are read; bounds the quadratic attention mask."""
KEEP_WHILE = 0.75
"""Finished rows are taken out once no more than this share of the batch is still being written."""


def sample_trajectories(
    model: Any,
    tokenizer: Any,
    episodes: Sequence[Episode],
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 64,
    seed: int | Sequence[int] = 0,
    group_ids: Sequence[Hashable] | None = None,
) -> list[Trajectory]:
    """Plays `episodes` to their end, all open ones together, and returns what the model saw and produced.

    Token k of a call is drawn by inverting the cumulative distribution of softmax(logits / T) at a uniform number
    that depends only on (the episode's seed, number of the call, k). A trajectory therefore does not depend on which
    other episodes share its batch, up to the rounding of the matrix products.

    Args:
        model: a transformers causal language model.
        tokenizer: its tokenizer, used to decode replies for `episode.step`.
        episodes: B fresh episodes.
        temperature: T > 0, or 0 for the most probable token each time (recorded with log-probability 0, which is
            what a greedy policy gives it).
        max_new_tokens: longest reply of one call, in tokens.
        seed: of all draws: one number, from which each episode's is made by its place, or B numbers.
        group_ids: B group ids for the trajectories; the episode's index where None.

    Returns:
        B trajectories in the order of `episodes`; `call.log_probs` are those of the distribution drawn from.

    Raises:
        ValueError: a bad temperature or length, an episode that is over before it began, a context that does not
            fit the model.
    """
    if not temperature >= 0 or temperature == float("inf"):
        raise ValueError(f"temperature: expected a finite number ≥ 0, got {temperature}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    if group_ids is not None and len(group_ids) != len(episodes):
        raise ValueError(f"group_ids: expected one for each of {len(episodes)} episodes, got {len(group_ids)}")
    calls: list[list[Call]] = [[] for _ in episodes]
    open_ = [index for index, episode in enumerate(episodes) if not episode.done]
    if len(open_) < len(episodes):
        raise ValueError("episodes: expected fresh ones, got one that is already done")
    end_ids = eos_token_ids(model, tokenizer)
    seeds = [[seed, place] for place in range(len(episodes))] if isinstance(seed, int) else [[s] for s in seed]
    if len(seeds) != len(episodes):
        raise ValueError(f"seed: expected one number, or one for each of {len(episodes)} episodes, got {len(seeds)}")
    while open_:
        contexts = [episodes[index].context() for index in open_]
        endings = [stop_token_ids(tokenizer, episodes[index].stop) | set(end_ids) for index in open_]
        outputs = sample_replies(
            model,
            contexts,
            uniforms=np.stack([_uniforms([*seeds[i], len(calls[i])], max_new_tokens) for i in open_]),
            temperature=temperature,
            stop_ids=endings,
        )
        for index, context, ends, (tokens, log_probs) in zip(open_, contexts, endings, outputs, strict=True):
            calls[index].append(Call(context, tokens, log_probs, truncated=tokens[-1] not in ends))
            episodes[index].step(tokens, tokenizer.decode(tokens, skip_special_tokens=True))
        open_ = [index for index in open_ if not episodes[index].done]
    ids = range(len(episodes)) if group_ids is None else group_ids
    return [
        Trajectory(made, episode.reward, group_id)
        for made, episode, group_id in zip(calls, episodes, ids, strict=True)
    ]


def replay(
    episode: Episode, outputs: Iterable[Sequence[int]], tokenizer: Any, *, group_id: Hashable = 0
) -> Trajectory:
    r"""Plays a recorded attempt again, without a model: what each call saw follows from what was sampled before it.

    Args:
        episode: a fresh one, of the same task, problem and tokenizer as the recorded one.
        outputs: token ids of each call, as `Evaluation.outputs` keeps them.
        tokenizer: decodes them for `episode.step`.
        group_id: of the trajectory.

    Raises:
        ValueError: the episode ends before the outputs do, or goes on after them: it is not the recorded one; a token
            that the tokenizer does not have.

    Example:
        >>> from course_lib.research import RandomLibraries, ResearchTask
        >>> from course_lib.models import load_tiny_agent
        >>> task, (_, tokenizer) = ResearchTask(RandomLibraries(hops=1)), load_tiny_agent()
        >>> said = [" open jack swan\n", " drink juice\n", " answer juice\n"]
        >>> outputs = [tokenizer.encode(line, add_special_tokens=False) for line in said]
        >>> attempt = replay(task.open(task.training_problem(0), tokenizer), outputs, tokenizer)
        >>> attempt.reward, tokenizer.decode(attempt.calls[2].context)
        (1.0, 'Question: drink of jack swan \n Notes: drink juice \n Action:')
    """
    calls = []
    for output in outputs:
        if episode.done:
            raise ValueError(f"outputs: expected {len(calls)} calls, after which this episode is done, got more")
        known = all(0 <= token < len(tokenizer) for token in output)
        require(known, "outputs", f"token ids from 0 to {len(tokenizer) - 1}", f"{list(output)!s:.80}")
        calls.append(Call(episode.context(), list(output)))
        episode.step(calls[-1].output, tokenizer.decode(calls[-1].output, skip_special_tokens=True))
    if not episode.done:
        raise ValueError(f"outputs: expected more than {len(calls)} calls, since this episode is not done after them")
    return Trajectory(calls, episode.reward, group_id)


def _uniforms(seed: list[int], count: int) -> np.ndarray:
    return np.random.default_rng(seed).random(count)


@lru_cache(maxsize=64)
def _stop_token_ids(tokenizer: Any, strings: tuple[str, ...]) -> frozenset[int]:
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return frozenset(token for token, text in enumerate(texts) if any(string in text for string in strings))


def stop_token_ids(tokenizer: Any, strings: Sequence[str]) -> frozenset[int]:
    """Ids of all tokens whose text contains one of `strings`: drawing one of them ends a reply."""
    return _stop_token_ids(tokenizer, tuple(strings)) if strings else frozenset()


def draw(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token a row from softmax(logits / temperature) by inverting the cumulative distribution.

    Args:
        logits: (B, V).
        uniforms: (B,) numbers in [0, 1).
        temperature: > 0, or 0 for the most probable token.

    Returns:
        tokens (B,) and their log-probabilities (B,) under the distribution drawn from.

    Raises:
        ValueError: shapes that do not match, a bad temperature, uniforms outside of [0, 1), logits of no distribution.

    Example:
        >>> logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]])).repeat(3, 1)
        >>> tokens, log_probs = draw(logits, torch.tensor([0.49, 0.51, 0.76]), temperature=1.0)
        >>> tokens.tolist(), [round(p, 4) for p in log_probs.exp().tolist()]
        ([0, 1, 2], [0.5, 0.25, 0.25])
    """
    logits, uniforms = as_tensor("logits", logits), as_tensor("uniforms", uniforms)
    require(logits.ndim == 2 and logits.shape[1] > 0, "logits", "shape (B, V)", tuple(logits.shape))
    require_shape("uniforms", uniforms, logits.shape[:1], "(B,), one for each row of logits")
    logits, uniforms = logits.to(torch.promote_types(logits.dtype, torch.float32)), uniforms.to(logits.device)
    if isinstance(temperature, int | float) and temperature == 0:
        tokens = logits.argmax(-1)
        _require_drawable(uniforms, logits.gather(-1, tokens[:, None])[:, 0])
        return tokens, logits.new_zeros(len(logits))
    temperature = require_temperature(temperature)
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    # Float32 sums of 50,000 probabilities drift by 1e-5 and would favour the last tokens.
    cumulative = log_probs.to(torch.float64, copy=True).exp_().cumsum(-1)
    points = uniforms.to(cumulative)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, points, right=True).clamp_(max=logits.shape[-1] - 1)
    drawn = log_probs.gather(-1, tokens)[:, 0]
    _require_drawable(uniforms, drawn)
    return tokens[:, 0], drawn


def _require_drawable(uniforms: torch.Tensor, drawn: torch.Tensor) -> None:
    """NaN or inf among the logits of a row shows in what is drawn from it. One look: each waits for the device."""
    inside = (uniforms >= 0) & (uniforms < 1)
    if not (inside & drawn.isfinite()).all():
        require(bool(inside.all()), "uniforms", "numbers in [0, 1)", uniforms[~inside][:1].tolist())
        require(False, "logits", "a finite one in every row, no nan and no inf", "others")


class _Buffer(DynamicLayer):
    """Keys and values of one layer in a buffer with room for the whole reply, so that a token is written in place
    where a growing cache would copy everything seen so far."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int):
        """`keys` and `values` are (B, heads, length + room, D), filled up to `length`."""
        super().__init__()
        self.all_keys, self.all_values, self.length = keys, values, length
        self.is_initialized, self.device, self.dtype = True, keys.device, keys.dtype

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        end = self.length + keys.shape[2]
        self.all_keys[:, :, self.length : end], self.all_values[:, :, self.length : end] = keys, values
        self.length = end
        self.keys, self.values = self.all_keys[:, :, :end], self.all_values[:, :, :end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.all_keys, self.all_values = (_rows(part, indices) for part in (self.all_keys, self.all_values))


def _rows(part: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`part[indices]`, with a token's heads kept side by side in memory: four times faster to copy."""
    return part.transpose(1, 2)[indices].transpose(1, 2)


def read_contexts(
    model: Any, contexts: Sequence[Sequence[int]], room: int
) -> tuple[Cache, torch.Tensor, torch.Tensor]:
    """Runs each distinct prefix of `contexts` once and lays the keys and values out a row for each context.

    Args:
        model: a transformers causal language model.
        contexts: B lists of token ids.
        room: tokens that the cache must still take.

    Returns:
        The cache, padded on the left; (B, V) logits of the next token; (B, T) bool, True where it holds a token.
    """
    length = max(map(len, contexts))
    device = model.device
    held = torch.tensor([[False] * (length - len(c)) + [True] * len(c) for c in contexts], device=device)
    if not supports_tree(model):
        return *_read_padded(model, contexts, held), held
    rows = [sorted(row) for row in split_rows(contexts, _prefill_tokens(model))]
    pieces = [_read_tree(model, [contexts[index] for index in row], length, room) for row in rows]
    layers, logits = pieces[0]
    if len(pieces) > 1:
        back = torch.argsort(torch.tensor([index for row in rows for index in row], device=device))
        logits = torch.cat([part for _, part in pieces])[back]
        layers = [
            tuple(_rows(torch.cat(parts), back) for parts in zip(*layer, strict=True))
            for layer in zip(*(layers for layers, _ in pieces), strict=True)
        ]
    cache = DynamicCache()
    cache.layers.extend(_Buffer(keys, values, length) for keys, values in layers)
    return cache, logits, held


def _prefill_tokens(model: Any) -> int:
    """Tree nodes N of a row, few enough that attention, 4·N·D operations a token and layer, stays below the weights'
    2 a parameter: a small model reads short rows faster."""
    width = model.config.hidden_size * model.config.num_hidden_layers
    return min(PREFILL_TOKENS, max(256, model.num_parameters() // (2 * width)))


def _read_tree(
    model: Any, contexts: Sequence[Sequence[int]], length: int, room: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Keys and values of each layer, (b, heads, length + room, D), and the (b, V) logits after each context."""
    tree = build_tree(contexts).to(model.device)
    grown = DynamicCache()
    hidden = run_tree(model, tree, cache=grown)
    sizes = torch.tensor([len(context) for context in contexts], device=model.device)
    last, inverse = torch.unique(tree.paths.gather(1, sizes[:, None] - 1)[:, 0], return_inverse=True)
    logits = model.get_output_embeddings()(hidden[last])[inverse]
    # Column t of the padded row holds token t − (length − own length); what stands before is masked.
    column = torch.arange(length + room, device=model.device)[None] - (length - sizes[:, None])
    nodes = tree.paths.gather(1, column.clamp(0, tree.paths.shape[1] - 1)).clamp(min=0)
    spread = [
        tuple(part[0].transpose(0, 1)[nodes].transpose(1, 2) for part in (layer.keys, layer.values))
        for layer in grown.layers
    ]
    return spread, logits


def _read_padded(
    model: Any, contexts: Sequence[Sequence[int]], held: torch.Tensor
) -> tuple[Cache, torch.Tensor]:
    """The plain way, for a model that cannot take a tree: every context in full, padded on the left."""
    tokens = torch.zeros(held.shape, dtype=torch.long, device=held.device)
    tokens[held] = torch.tensor([token for context in contexts for token in context], device=held.device)
    positions = (held.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    logits = model(
        input_ids=tokens, attention_mask=held.long(), position_ids=positions, cache=cache, use_cache=True
    ).logits[:, -1]
    return cache, logits


@torch.inference_mode()
def sample_replies(
    model: Any,
    contexts: Sequence[Sequence[int]],
    *,
    uniforms: np.ndarray,
    temperature: float,
    stop_ids: Sequence[set[int]],
) -> list[tuple[list[int], list[float]]]:
    """Draws one reply to each context; finished rows leave the batch, several at a time, since that copies the cache.

    Args:
        model: a transformers causal language model.
        contexts: B lists of token ids.
        uniforms: (B, K) numbers in [0, 1), one for each token that may be drawn.
        temperature: see `draw`.
        stop_ids: for each row the ids that end it.

    Returns:
        For each row its token ids, the ending one included, and their log-probabilities.
    """
    device, room = model.device, uniforms.shape[1]
    limit = getattr(model.config, "max_position_embeddings", None) or float("inf")
    if (longest := max(map(len, contexts))) + room > limit:
        raise ValueError(
            f"context: expected at most {limit - room} tokens, so that a reply of {room} fits the model's {limit}, "
            f"got {longest}"
        )
    cache, logits, held = read_contexts(model, contexts, room)
    positions = torch.tensor([len(context) for context in contexts], device=device)
    chances = torch.as_tensor(uniforms, device=device)
    endings = torch.zeros(len(contexts), logits.shape[-1], dtype=torch.bool, device=device)
    for row, ids in enumerate(stop_ids):
        endings[row, list(ids)] = True
    index = torch.arange(len(contexts), device=device)  # which context each row of the batch belongs to
    open_ = torch.ones_like(index, dtype=torch.bool)
    tokens = torch.zeros(len(contexts), room, dtype=torch.long, device=device)
    log_probs = torch.zeros(len(contexts), room, dtype=torch.float64, device=device)
    lengths = torch.zeros_like(index)
    for k in range(room):
        drawn, drawn_log_probs = draw(logits, chances[index, k], temperature)
        tokens[index, k], log_probs[index, k] = drawn, drawn_log_probs.double()
        lengths[index[open_]] = k + 1
        open_ &= ~endings[index, drawn]
        left = int(open_.sum())
        if left == 0 or k + 1 == room:
            break
        if left <= KEEP_WHILE * len(index):
            kept = open_.nonzero()[:, 0]
            index, open_, drawn, held, positions = (x[kept] for x in (index, open_, drawn, held, positions))
            cache.batch_select_indices(kept)
        held = torch.cat([held, held.new_ones(len(held), 1)], dim=1)
        logits = model(
            input_ids=drawn[:, None],
            attention_mask=held.long(),
            position_ids=positions[:, None],
            cache=cache,
            use_cache=True,
        ).logits[:, 0]
        positions = positions + 1
    sizes = lengths.tolist()
    rows = zip(tokens.tolist(), log_probs.tolist(), sizes, strict=True)
    return [(ids[:size], values[:size]) for ids, values, size in rows]
