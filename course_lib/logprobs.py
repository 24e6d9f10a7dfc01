"""From logits to log-probabilities of tokens, their entropy, and the mask of a sampled response."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib._tensors import as_tensor, compute_dtype, require, require_number, require_shape

# Logits worked on at a time. It bounds the temporary memory: 16 MiB in float32.
CHUNK = 2**22


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
    _check_logits(logits, temperature)
    tokens = _check_ids("tokens", tokens)
    require_shape("tokens", tokens, logits.shape[:-1], "(B, T), that of logits without V")
    last = logits.shape[-1] - 1
    outside = tokens[(tokens < 0) | (tokens > last)]
    require(len(outside) == 0, "tokens", f"ids from 0 to V − 1 = {last}", outside[:1].tolist())
    return _TokenLogProbs.apply(logits, tokens.to(logits.device), float(temperature))


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
    _check_logits(logits, temperature)
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


def _check_logits(logits: Tensor, temperature: float) -> None:
    floats = logits.ndim >= 2 and logits.is_floating_point()
    require(floats, "logits", "floats of shape (B, T, V)", _kind(logits))
    require_number("temperature", temperature, "a finite number > 0", lambda t: 0 < t < float("inf"))


def _check_ids(name: str, ids: Any) -> Tensor:
    ids = as_tensor(name, ids)
    ids = ids.long() if ids.numel() == 0 else ids
    whole = not ids.is_floating_point() and ids.dtype != torch.bool
    require(whole, name, "integer token ids", _kind(ids))
    return ids.long()


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
