"""From logits to log-probabilities of tokens, their entropy, and the mask of a sampled response."""

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from course_lib._tensors import as_tensor, compute_dtype, require, require_shape, require_temperature
from course_lib.tree import TokenTree, build_tree

# Logits worked on at a time. It bounds the temporary memory: 16 MiB in float32.
CHUNK = 2**22
# Logits of scored tokens kept for the backward pass; beyond it they are made again there, a chunk at a time.
KEPT_LOGITS = 2**25


def token_log_probs(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """log π(y_k | x, y_<k) at a temperature: log_softmax(logits / temperature) read off at each token.

    Keeps only the logits for the backward pass, which computes the softmax again; plain autograd would keep a
    second (B, T, V) tensor. A token whose incoming gradient is 0 passes exactly 0 on, whatever its logits
    hold.

    Args:
        logits: (B, T, V); `logits[:, t]` is the prediction *of* `tokens[:, t]`, so the caller has shifted
            them.
        tokens: (B, T) token ids in 0 … V−1. Padding needs a valid id as well; the mask takes it out later.
        temperature: > 0, the one the tokens were sampled at.

    Returns:
        (B, T) log-probabilities.

    Raises:
        ValueError: shapes do not match, an id is outside the vocabulary, or temperature is not positive.

    Example:
        >>> logits, tokens = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[0]])
        >>> round(token_log_probs(logits, tokens).item(), 4)
        -0.1269
        >>> round(token_log_probs(logits, tokens, temperature=0.6).item(), 4)
        -0.0351
    """
    logits, temperature = _check_logits(logits, temperature)
    tokens = _check_ids("tokens", tokens)
    require_shape("tokens", tokens, logits.shape[:-1], "(B, T), that of logits without V")
    last = logits.shape[-1] - 1
    outside = tokens[(tokens < 0) | (tokens > last)]
    require(len(outside) == 0, "tokens", f"ids from 0 to V − 1 = {last}", outside[:1].tolist())
    return _TokenLogProbs.apply(logits, tokens.to(logits.device), temperature)


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """H = −Σ_v p_v log p_v in nats, with p = softmax(logits / temperature); 0 log 0 counts as 0.

    Args:
        logits: (B, T, V); −inf is allowed for tokens that cannot occur.
        temperature: > 0.

    Returns:
        (B, T) entropies, between 0 and log V.

    Raises:
        ValueError: logits have no vocabulary dimension, or temperature is not positive.

    Example:
        >>> round(token_entropy(torch.zeros(1, 1, 4)).item(), 4)  # log 4
        1.3863
    """
    logits, temperature = _check_logits(logits, temperature)
    return torch.cat([_entropy(_log_softmax(part, temperature)) for part in _parts(logits)], dim=-1)


def response_mask(tokens: Tensor, eos_token_ids: int | Sequence[int]) -> Tensor:
    """1 up to and including the first end-of-sequence token of each row, 0 after it.

    The end-of-sequence token is something the policy produced and is trained. Padding is what comes after it,
    never what has a certain id: pad and end-of-sequence are often the same token.

    Args:
        tokens: (B, T) sampled token ids.
        eos_token_ids: the id, or several of which any ends the row.

    Returns:
        (B, T) bool.

    Raises:
        ValueError: tokens are not (B, T) integers, or eos_token_ids are no integers.

    Example:
        >>> response_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), 2).int().tolist()
        [[1, 1, 0], [1, 1, 1]]
    """
    tokens = _check_ids("tokens", tokens)
    require(tokens.ndim == 2, "tokens", "shape (B, T)", tuple(tokens.shape))
    ends = torch.isin(tokens, _check_ids("eos_token_ids", eos_token_ids).to(tokens.device))
    return (ends.cumsum(dim=1) - ends.long()) == 0


@dataclass(frozen=True)
class ScoredTokens:
    """Log-probability (differentiable) and entropy (detached) of each scored token, both (B, T), 0 elsewhere."""

    log_probs: Tensor
    entropy: Tensor


def score_tokens(
    model: Any,
    tokens: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    share_prefixes: bool = True,
) -> ScoredTokens:
    """log π(token | tokens before it in its row) of every token under `mask`, with a causal language model.

    The batch is laid out as a token tree (`course_lib.tree`): each distinct prefix runs once, nothing is padded, and a
    row's last scored token is predicted but not read. The logits are made in chunks that are recomputed in the
    backward pass once they would outgrow `KEPT_LOGITS` numbers. A model that cannot take the tree's mask is run the
    plain way, one padded row a sequence.

    Args:
        model: a transformers causal language model; called, not imported.
        tokens: (B, T) token ids, each row starting in its first column.
        attention_mask: (B, T) 1 where a row has a token; ones before zeros.
        mask: (B, T) 1 at the tokens to score; never in the first column, which nothing predicts.
        temperature: T > 0, as in `token_log_probs`.
        share_prefixes: False runs the plain padded forward, the reading version and the tests' reference.

    Returns:
        (B, T) log-probabilities and entropies in float32 (float64 for a float64 model).

    Raises:
        ValueError: shapes that differ, a scored first token, a scored padding place, temperature ≤ 0.

    Example:
        >>> from course_lib.models import tiny_model
        >>> tokens, seen = torch.tensor([[5, 6, 7], [5, 6, 8]]), torch.ones(2, 3)
        >>> scored = score_tokens(tiny_model(), tokens, seen, torch.tensor([[0, 0, 1], [0, 0, 1]]))
        >>> scored.log_probs.shape, bool((scored.log_probs[:, 2] < 0).all())
        (torch.Size([2, 3]), True)
    """
    if not tokens.shape == attention_mask.shape == mask.shape or tokens.dim() != 2:
        shapes = ", ".join(str(tuple(x.shape)) for x in (tokens, attention_mask, mask))
        raise ValueError(f"tokens, attention_mask, mask: expected one shape (B, T), got {shapes}")
    temperature = require_temperature(temperature)
    scored, present = mask.bool(), attention_mask.bool()
    if (scored & ~present).any() or scored[:, :1].any():
        raise ValueError(
            "mask: expected scored tokens to have a token before them and to be present, got others"
        )
    if not scored.any():
        empty = torch.zeros(mask.shape, dtype=torch.float32, device=tokens.device)
        return ScoredTokens(empty, empty)
    if share_prefixes and supports_tree(model):
        values, entropy = _tree_scores(model, tokens, scored, temperature)
    else:
        values, entropy = _padded_scores(model, tokens, present, scored, temperature)
    blank = values.new_zeros(mask.shape)
    return ScoredTokens(blank.masked_scatter(scored, values), blank.masked_scatter(scored, entropy))


def response_log_probs(
    model: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    pad_token_id: int = 0,
    temperature: float = 1.0,
    share_prompts: bool = True,
) -> Tensor:
    """log π(y_k | x, y_<k) for every token of every response.

    Args:
        model: a transformers causal language model.
        prompts: B lists of token ids, none empty; they may differ in length.
        responses: B lists of token ids.
        pad_token_id: id to fill rows with; any id will do, since padding is told by place and not by id.
        temperature: T > 0, as in `token_log_probs`.
        share_prompts: run each distinct prompt (and any other shared prefix) once; False runs all rows padded.

    Returns:
        (B, T) with T the longest response, padded on the right with 0; differentiable.

    Raises:
        ValueError: lists of different length, an empty prompt, temperature ≤ 0.

    Example:
        >>> from course_lib.models import tiny_model
        >>> response_log_probs(tiny_model(), [[1, 2, 3], [4]], [[5], [6, 7]]).shape
        torch.Size([2, 2])
    """
    if len(prompts) != len(responses):
        raise ValueError(f"responses: expected one for each of {len(prompts)} prompts, got {len(responses)}")
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("prompts: expected at least one token in each, got an empty one")
    device = next(model.parameters()).device
    width = max((len(x) + len(y) for x, y in zip(prompts, responses, strict=True)), default=0)
    span = max((len(y) for y in responses), default=0)
    pad = lambda row, fill, to: [*row, *[fill] * (to - len(row))]  # noqa: E731
    pairs = list(zip(prompts, responses, strict=True))
    tokens = torch.tensor([pad([*x, *y], pad_token_id, width) for x, y in pairs], device=device)
    present = torch.tensor([pad([1] * (len(x) + len(y)), 0, width) for x, y in pairs], device=device)
    mask = torch.tensor([pad([0] * len(x) + [1] * len(y), 0, width) for x, y in pairs], device=device)
    values = score_tokens(
        model, tokens, present, mask, temperature=temperature, share_prefixes=share_prompts
    ).log_probs
    own = torch.tensor([pad([1] * len(y), 0, span) for _, y in pairs], dtype=torch.bool, device=device)
    return values.new_zeros(own.shape).masked_scatter(own, values[mask.bool()])


def run_tree(model: Any, tree: TokenTree, **cache: Any) -> Tensor:
    """(N, D) last hidden states of the nodes of `tree`, one forward pass of one row."""
    mask = tree.attention_mask()
    if model.config._attn_implementation == "eager":  # adds its mask where the other kernels select by it
        dtype = next(model.parameters()).dtype
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
            ~mask, torch.finfo(dtype).min
        )
    return model.base_model(
        input_ids=tree.tokens[None],
        position_ids=tree.positions[None],
        attention_mask=mask[None, None],
        use_cache=bool(cache),
        **cache,
    ).last_hidden_state[0]


_TREE_SUPPORT: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def supports_tree(model: Any) -> bool:
    """Does `model` give the plain forward's log-probabilities when it is run as a token tree?

    Found out once for each model by running seven tokens both ways. A model that looks back over a limited window, adds
    its own position bias or transforms its logits may not; it is run the plain way, and a warning says so once.
    """
    if model not in _TREE_SUPPORT:
        tokens = torch.tensor(
            [[1, 2, 3, 0], [1, 2, 4, 5], [2, 1, 0, 0]], device=next(model.parameters()).device
        )
        present = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]], device=tokens.device).bool()
        scored = present & (torch.arange(4, device=tokens.device) > 0)
        try:
            with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):  # rounded, two ways may differ
                tree, _ = _tree_scores(model, tokens, scored, 1.0)
                plain, _ = _padded_scores(model, tokens, present, scored, 1.0)
            good = bool(torch.allclose(tree, plain, atol=0.05 if plain.dtype != torch.float64 else 1e-8))
            reason = "its log-probabilities came out differently"
        except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
            good, reason = False, f"{type(error).__name__}: {error}"
        window = getattr(model.config, "sliding_window", None)
        if (
            good
            and window
            and "sliding_attention" in (getattr(model.config, "layer_types", None) or ["sliding_attention"])
        ):
            good, reason = False, f"it looks back over a window of {window} tokens only"
        if not good:
            warnings.warn(f"{type(model).__name__} is run without sharing prefixes ({reason})", stacklevel=3)
        _TREE_SUPPORT[model] = good
    return _TREE_SUPPORT[model]


class _GatheredLogProbs(torch.autograd.Function):
    """log p(token) / entropy where several tokens may be predicted by one row of logits: (M, V), (S,), (S,)."""

    @staticmethod
    def forward(logits: Tensor, rows: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        parts = [_log_softmax(part, temperature) for part in _parts(logits)]
        entropy = torch.cat([_entropy(part) for part in parts])
        return torch.cat(parts)[rows, tokens], entropy[rows]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        logits, rows, tokens, ctx.temperature = inputs
        ctx.save_for_backward(logits, rows, tokens)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, rows, tokens = ctx.saved_tensors
        slope = grad / ctx.temperature
        total = slope.new_zeros(len(logits)).index_add_(0, rows, slope)
        grad_logits = _log_softmax(logits, ctx.temperature).exp_().mul_(-total[:, None])
        grad_logits.index_put_((rows, tokens), slope, accumulate=True)
        return grad_logits.to(logits.dtype), None, None, None


class _TokenLogProbs(torch.autograd.Function):
    """d log p(y) / d logit_v = (1[v = y] − p_v) / temperature."""

    @staticmethod
    def forward(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        parts = zip(_parts(logits), tokens.split(_columns(logits), dim=-1), strict=True)
        chosen = [_log_softmax(part, temperature).gather(-1, ids[..., None])[..., 0] for part, ids in parts]
        return torch.cat(chosen, dim=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        logits, tokens, ctx.temperature = inputs
        ctx.save_for_backward(logits, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        split = (x.split(_columns(logits), dim=-1) for x in (tokens, grad))
        for part, out, ids, g in zip(_parts(logits), _parts(grad_logits), *split, strict=True):
            slope = (g / ctx.temperature)[..., None]
            rows = _log_softmax(part, ctx.temperature).exp_().mul_(-slope)
            rows.scatter_add_(-1, ids[..., None], slope).masked_fill_(slope == 0, 0)
            out.copy_(rows)
        return grad_logits, None, None


def _tree_scores(model, tokens, scored, temperature):
    """Scores by the token tree, in the order of the True places of `scored`."""
    # A row is run up to the token that predicts its last scored one: nothing reads what comes out later.
    ends = [places[-1] if places else 0 for places in (row.nonzero()[:, 0].tolist() for row in scored.cpu())]
    rows = [row[:end] for row, end in zip(tokens.tolist(), ends, strict=True) if end]
    tree = build_tree(rows).to(tokens.device)
    hidden = run_tree(model, tree)
    predicting = scored[torch.tensor(ends, device=scored.device) > 0, 1 : tree.paths.shape[1] + 1]
    # Tokens that follow the same prefix are read off the same logits.
    parents, logit_row = torch.unique(tree.paths[predicting], return_inverse=True)
    return _head_scores(model, hidden[parents], logit_row, tokens[scored], temperature)


def _padded_scores(model, tokens, present, scored, temperature):
    """The reading version of `_tree_scores`: one padded forward."""
    logits = model(input_ids=tokens, attention_mask=present.long(), use_cache=False).logits
    predicting = scored.roll(-1, dims=1)
    logits = logits[predicting]
    values = token_log_probs(logits[None], tokens[scored][None], temperature=temperature)[0]
    return values, token_entropy(logits.detach()[None], temperature=temperature)[0]


def _head_scores(model, hidden, logit_row, tokens, temperature):
    """Log-probabilities of `tokens` (S,) where token s is predicted by row logit_row[s] of `hidden` (M, D)."""
    head = model.get_output_embeddings()

    def part(states, rows, targets):
        return _GatheredLogProbs.apply(head(states), rows, targets, temperature)

    size = max(1, KEPT_LOGITS // head.weight.shape[0])
    if len(hidden) <= size:
        return part(hidden, logit_row, tokens)
    pieces, order = [], []
    for start in range(0, len(hidden), size):
        mine = ((logit_row >= start) & (logit_row < start + size)).nonzero()[:, 0]
        states = hidden[start : start + size]
        pieces.append(checkpoint(part, states, logit_row[mine] - start, tokens[mine], use_reentrant=False))
        order.append(mine)
    back = torch.argsort(torch.cat(order))
    return tuple(torch.cat(column)[back] for column in zip(*pieces, strict=True))


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.to(compute_dtype(logits)) / temperature, dim=-1)


def _entropy(log_p: Tensor) -> Tensor:
    log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)  # exp(−inf) · −inf would be NaN
    return -(log_p.exp() * log_p).sum(dim=-1)


def _columns(logits: Tensor) -> int:
    """How many token positions make a chunk."""
    return max(1, CHUNK * logits.shape[-2] // max(1, logits.numel()))


def _parts(logits: Tensor) -> Iterator[Tensor]:
    yield from logits.split(_columns(logits), dim=-2)


def _check_logits(logits: Any, temperature: Any) -> tuple[Tensor, float]:
    logits = as_tensor("logits", logits)
    floats = logits.ndim >= 2 and logits.is_floating_point()
    require(floats, "logits", "floats of shape (B, T, V)", _kind(logits))
    return logits, require_temperature(temperature)


def _check_ids(name: str, ids: Any) -> Tensor:
    ids = as_tensor(name, ids)
    ids = ids.long() if ids.numel() == 0 else ids
    whole = not ids.is_floating_point() and ids.dtype != torch.bool
    require(whole, name, "integer token ids", _kind(ids))
    return ids.long()


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
