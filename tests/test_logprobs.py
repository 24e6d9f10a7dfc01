"""Log-probabilities, entropy and response masks against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import logprobs, response_mask, token_entropy, token_log_probs

TEMPERATURES = (0.6, 1.0, 2.5)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def random_batch(rows=3, width=5, vocabulary=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, width, vocabulary, generator=generator, dtype=torch.float64) * 3
    tokens = torch.randint(vocabulary, (rows, width), generator=generator)
    return logits.to(dtype), tokens


def plain_log_probs(logits, tokens, temperature):
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def gradient(function, logits, upstream):
    logits = logits.detach().clone().requires_grad_()
    function(logits).backward(upstream)
    return logits.grad


# --- token_log_probs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature, expected", [(1.0, -0.1269), (0.6, -0.0351)])
def test_the_temperature_is_inside(temperature, expected):
    log_prob = token_log_probs(double([[[2.0, 0.0]]]), torch.tensor([[0]]), temperature=temperature)
    assert round(log_prob.item(), 4) == expected


@pytest.mark.parametrize("chunk", [1, 20, 2**22])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_value_and_gradient_equal_log_softmax(monkeypatch, chunk, temperature):
    """Also where the work is cut into chunks, down to one column each."""
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    logits, tokens = random_batch()
    upstream = torch.linspace(-1, 1, tokens.numel(), dtype=torch.float64).reshape(tokens.shape)
    ours = lambda z: token_log_probs(z, tokens, temperature=temperature)  # noqa: E731
    plain = lambda z: plain_log_probs(z, tokens, temperature)  # noqa: E731
    torch.testing.assert_close(ours(logits), plain(logits))
    torch.testing.assert_close(gradient(ours, logits, upstream), gradient(plain, logits, upstream))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_gradient_against_finite_differences(temperature):
    logits, tokens = random_batch()
    function = lambda z: token_log_probs(z, tokens, temperature=temperature)  # noqa: E731
    assert torch.autograd.gradcheck(function, logits.requires_grad_())
    assert torch.func.grad(lambda z: function(z).sum())(logits.detach()).shape == logits.shape


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_backward_keeps_the_logits_and_nothing_else_of_that_size(temperature, dtype):
    logits, tokens = random_batch(dtype=dtype)
    logits.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_log_probs(logits, tokens, temperature=temperature)
    large = [t for t in kept if t.numel() >= logits.numel()]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]
    assert sum(t.numel() for t in kept) <= logits.numel() + 2 * tokens.numel()


def test_a_shifted_view_of_the_logits():
    """`logits[:, :-1]` predicts `tokens[:, 1:]`; neither copies nor gradients go to the wrong place."""
    logits, tokens = random_batch()
    ours = gradient(lambda z: token_log_probs(z[:, :-1], tokens[:, 1:]), logits, torch.ones(3, 4, dtype=torch.float64))
    plain = gradient(
        lambda z: plain_log_probs(z[:, :-1], tokens[:, 1:], 1.0), logits, torch.ones(3, 4, dtype=torch.float64)
    )
    torch.testing.assert_close(ours, plain)
    assert not ours[:, -1].any()


def test_leading_dimensions_are_free():
    logits, tokens = random_batch(rows=2)
    torch.testing.assert_close(token_log_probs(logits[0], tokens[0]), token_log_probs(logits, tokens)[0])
    deep = token_log_probs(logits[None], tokens[None].int())
    torch.testing.assert_close(deep[0], token_log_probs(logits, tokens))


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)])
def test_empty_batches(shape):
    logits = torch.zeros(shape, requires_grad=True)
    log_probs = token_log_probs(logits, torch.zeros(shape[:2], dtype=torch.long))
    assert log_probs.shape == shape[:2]
    log_probs.sum().backward()
    assert logits.grad.shape == shape
    assert token_entropy(logits).shape == shape[:2]


@pytest.mark.parametrize(
    "given_dtype, result",
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_dtypes_and_untouched_inputs(given_dtype, result):
    logits, tokens = random_batch(dtype=given_dtype)
    before = logits.clone(), tokens.clone()
    logits.requires_grad_()
    log_probs, entropy = token_log_probs(logits, tokens, temperature=0.7), token_entropy(logits, temperature=0.7)
    assert log_probs.dtype == entropy.dtype == result
    torch.testing.assert_close(log_probs, plain_log_probs(before[0].to(result), tokens, 0.7))
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad.dtype == given_dtype
    assert torch.equal(logits, before[0]) and torch.equal(tokens, before[1])


def test_large_logits_keep_their_digits():
    """In float32 x − logsumexp(x) loses them; subtracting the maximum first does not."""
    logits = torch.tensor([[[100000.0, 99999.0, 0.0]]])
    log_prob = token_log_probs(logits, torch.tensor([[1]])).item()
    assert log_prob == pytest.approx(-1 - math.log1p(math.exp(-1)), rel=1e-6)


def test_a_token_without_weight_passes_nothing_on():
    """A masked position may hold NaN logits: their gradient is 0, not 0 · NaN."""
    logits, tokens = random_batch()
    logits[0, 1], logits[1, 2] = math.nan, math.inf
    upstream = torch.ones(3, 5, dtype=torch.float64)
    upstream[0, 1] = upstream[1, 2] = 0
    grad = gradient(lambda z: token_log_probs(z, tokens), logits, upstream)
    assert grad.isfinite().all() and not grad[0, 1].any() and grad[2].any()


def test_tokens_that_cannot_occur():
    logits = double([[[0.0, -math.inf, 0.0]]])
    assert token_log_probs(logits, torch.tensor([[0]])).item() == pytest.approx(-math.log(2))
    grad = gradient(lambda z: token_log_probs(z, torch.tensor([[0]])), logits, double([[1.0]]))
    torch.testing.assert_close(grad, double([[[0.5, 0.0, -0.5]]]))


# --- token_entropy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2**22])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_entropy_is_the_expected_surprise(monkeypatch, chunk, temperature):
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    logits, _ = random_batch()
    p = (logits / temperature).softmax(-1)
    torch.testing.assert_close(token_entropy(logits, temperature=temperature), -(p * p.log()).sum(-1))
    function = lambda z: token_entropy(z, temperature=temperature)  # noqa: E731
    assert torch.autograd.gradcheck(function, logits.requires_grad_())


def test_entropy_of_certainty_and_of_ignorance():
    logits = double([[[0.0] * 8, [0.0] + [-math.inf] * 7, [1e4] + [0.0] * 7, [-math.inf] * 4 + [0.0] * 4]])
    entropy = token_entropy(logits)
    torch.testing.assert_close(entropy, double([[math.log(8), 0.0, 0.0, math.log(4)]]))
    grad = gradient(token_entropy, logits, torch.ones_like(entropy))
    assert grad.isfinite().all()


def test_the_entropy_is_the_mean_of_the_log_probs():
    """H = −E log p: the two functions agree on what the policy is."""
    logits, _ = random_batch(rows=1)
    every = torch.arange(7).repeat(5, 1).T  # (V, T): token v at every position
    log_p = token_log_probs(logits.expand(7, -1, -1), every, temperature=0.7)
    torch.testing.assert_close(-(log_p.exp() * log_p).sum(0), token_entropy(logits, temperature=0.7)[0])


# --- response_mask --------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), max_size=4), st.sets(st.integers(0, 4)))
@settings(max_examples=50)
def test_mask_against_a_loop(rows, ends):
    expected = []
    for row in rows:
        first = next((t for t, token in enumerate(row) if token in ends), len(row))
        expected.append([t <= first for t in range(len(row))])
    tokens = torch.tensor(rows, dtype=torch.long).reshape(len(rows), 4)
    assert response_mask(tokens, list(ends)).tolist() == expected


def test_the_first_end_is_trained_where_padding_has_the_same_id():
    end = 2
    assert response_mask(torch.tensor([[5, end, end]]), end).tolist() == [[1, 1, 0]]
    assert response_mask([[5, end, end]], end).tolist() == [[1, 1, 0]]
    assert response_mask(torch.tensor([[end, 5, 5]]), end).tolist() == [[1, 0, 0]]
    assert response_mask(torch.tensor([[5, 6, 7]]), end).tolist() == [[1, 1, 1]]


def test_several_ends():
    tokens = torch.tensor([[5, 3, 2], [2, 3, 5], [5, 5, 3]])
    for ends in ([2, 3], (3, 2), torch.tensor([2, 3])):
        assert response_mask(tokens, ends).tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]


# --- errors ---------------------------------------------------------------------------------------------------

LOGITS, TOKENS = torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long)


@pytest.mark.parametrize(
    "function", [lambda **o: token_log_probs(LOGITS, TOKENS, **o), lambda **o: token_entropy(LOGITS, **o)]
)
@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, None])
def test_a_temperature_that_is_none(function, temperature):
    with pytest.raises(ValueError, match="temperature: expected a finite number > 0, got"):
        function(temperature=temperature)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: token_log_probs(LOGITS, TOKENS[:, :1]), r"tokens: expected shape \(1, 2\) = \(B, T\).*got \(1, 1\)"),
        (lambda: token_log_probs(LOGITS, TOKENS - 100), r"tokens: expected ids from 0 to V − 1 = 2, got \[-100\]"),
        (lambda: token_log_probs(LOGITS, TOKENS + 3), r"tokens: expected ids from 0 to V − 1 = 2, got \[3\]"),
        (lambda: token_log_probs(LOGITS, TOKENS.float()), "tokens: expected integer token ids, got torch.float32"),
        (lambda: token_log_probs(LOGITS.long(), TOKENS), "logits: expected floats of shape"),
        (lambda: token_log_probs(LOGITS[0, 0], TOKENS[0, 0]), r"logits: expected floats of shape \(B, T, V\)"),
        (lambda: token_entropy(LOGITS[0, 0]), r"logits: expected floats of shape \(B, T, V\)"),
        (lambda: response_mask(TOKENS[0], 2), r"tokens: expected shape \(B, T\), got \(2,\)"),
        (lambda: response_mask(TOKENS.float(), 2), "tokens: expected integer token ids"),
        (lambda: response_mask(TOKENS, None), "eos_token_ids: expected numbers"),
        (lambda: response_mask(TOKENS, "</s>"), "eos_token_ids: expected numbers"),
        (lambda: response_mask(TOKENS, 2.0), "eos_token_ids: expected integer token ids"),
    ],
)
def test_errors_name_the_argument_and_what_came(call, message):
    with pytest.raises(ValueError, match=message):
        call()
