"""Scoring a batch as a token tree gives the plain padded forward's log-probabilities and gradient."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_worlds import float64_model

import course_lib.logprobs as logprobs
from course_lib.logprobs import response_log_probs, score_tokens, supports_tree
from course_lib.models import tiny_model
from course_lib.trajectories import Call, Trajectory, stepwise_batch

ARCHITECTURES = ("llama", "qwen2", "gpt2")


MODELS = {name: float64_model(name) for name in ARCHITECTURES}

PROMPTS = [[2, 3, 4], [2, 3, 4], [2, 3, 4], [9], [2, 3], [2, 3, 4]]
RESPONSES = [[5, 6, 1], [5, 6], [5, 6, 1], [7], [4, 5, 6, 8, 8, 8], [1]]
"""Ragged prompts, one-token responses, identical ones, one that is a prefix of another, one prompt inside another."""


def both_ways(model, prompts, responses, **options):
    """(log-probabilities, gradient) by the tree and by the plain forward."""
    results = []
    for share in (True, False):
        model.zero_grad()
        values = response_log_probs(model, prompts, responses, share_prompts=share, **options)
        scale = torch.linspace(-1, 2, values.numel(), dtype=values.dtype).reshape(values.shape)
        (values * scale).sum().backward()
        results.append((values.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    return results


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tree_equals_plain_forward_with_gradient(architecture, temperature):
    (tree, tree_grad), (plain, plain_grad) = both_ways(
        MODELS[architecture], PROMPTS, RESPONSES, temperature=temperature
    )
    assert torch.allclose(tree, plain, rtol=0, atol=1e-10)
    assert torch.allclose(tree_grad, plain_grad, rtol=0, atol=1e-10)
    assert plain_grad.abs().max() > 0.1


@settings(max_examples=30)
@given(st.data())
def test_tree_equals_plain_forward_on_random_batches(data):
    ids = st.lists(st.integers(0, 5), min_size=1, max_size=5)
    prompts = data.draw(st.lists(ids, min_size=1, max_size=6))
    responses = [data.draw(st.lists(st.integers(0, 5), max_size=4)) for _ in prompts]
    if not any(responses):
        responses[0] = [1]
    (tree, tree_grad), (plain, plain_grad) = both_ways(MODELS["llama"], prompts, responses)
    assert torch.allclose(tree, plain, rtol=0, atol=1e-10)
    assert torch.allclose(tree_grad, plain_grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_segments_of_an_agent_that_edits_its_context(architecture):
    calls = [Call([2, 3], [4, 5]), Call([2, 3, 4, 5, 9], [6]), Call([2, 3, 6], [7, 8])]
    batch = stepwise_batch(
        [Trajectory(calls, 1.0, 0), Trajectory([Call([2, 3], [4])], 0.0, 0)], pad_token_id=1
    )
    shared, plain = (
        score_tokens(
            MODELS[architecture], batch.tokens, batch.attention_mask, batch.mask, share_prefixes=share
        )
        for share in (True, False)
    )
    assert torch.allclose(shared.log_probs, plain.log_probs, rtol=0, atol=1e-10)
    assert torch.allclose(shared.entropy, plain.entropy, rtol=0, atol=1e-10)
    assert (shared.log_probs[~batch.mask] == 0).all()


def test_by_hand_against_one_row_at_a_time():
    model = MODELS["gpt2"]
    values = response_log_probs(model, PROMPTS, RESPONSES)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
        expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])
        assert torch.allclose(values[row, : len(response)], expected[:, 0], rtol=0, atol=1e-12)
        assert (values[row, len(response) :] == 0).all()


def test_padding_id_and_width_do_not_matter():
    model = MODELS["llama"]
    alone = response_log_probs(model, PROMPTS[:1], RESPONSES[:1])
    for share in (True, False):
        wide = response_log_probs(
            model, [*PROMPTS, [1] * 30], [*RESPONSES, [2] * 9], pad_token_id=7, share_prompts=share
        )
        assert torch.allclose(wide[:1, :3], alone, rtol=0, atol=1e-12)


def test_logits_made_in_chunks_change_nothing(monkeypatch):
    whole = both_ways(MODELS["llama"], PROMPTS, RESPONSES)[0]
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", 3 * 64)
    pieces = both_ways(MODELS["llama"], PROMPTS, RESPONSES)[0]
    for a, b in zip(whole, pieces, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def test_eager_attention_takes_the_tree_too():
    model = float64_model("llama")
    model.set_attn_implementation("eager")
    (tree, _), (plain, _) = both_ways(model, PROMPTS, RESPONSES)
    assert torch.allclose(tree, plain, rtol=0, atol=1e-5)  # its softmax is float32


def test_autocast_stays_within_its_rounding():
    model = tiny_model("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (tree, tree_grad), (plain, plain_grad) = both_ways(model, PROMPTS, RESPONSES)
    assert tree.dtype == torch.float32
    assert torch.allclose(tree, plain, atol=0.1)
    assert torch.nn.functional.cosine_similarity(tree_grad, plain_grad, dim=0) > 0.999


def test_a_model_that_cannot_take_the_mask_is_run_plainly_and_says_so_once():
    model = tiny_model("llama", dtype=torch.float64)
    run = model.base_model.forward

    def two_dimensional_masks_only(*args, attention_mask=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError("attention_mask: expected two dimensions")
        return run(*args, attention_mask=attention_mask, **kwargs)

    model.base_model.forward = two_dimensional_masks_only
    with pytest.warns(UserWarning, match="without sharing prefixes .*two dimensions"):
        values = response_log_probs(model, PROMPTS, RESPONSES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(values, response_log_probs(model, PROMPTS, RESPONSES, share_prompts=False))
        assert not supports_tree(model)


def test_a_model_that_transforms_its_logits_is_run_plainly():
    model = tiny_model("llama", dtype=torch.float64)
    run = model.forward

    def capped(*args, **kwargs):
        output = run(*args, **kwargs)
        output.logits = torch.tanh(output.logits)
        return output

    model.forward = capped
    with pytest.warns(UserWarning, match="came out differently"):
        assert not supports_tree(model)


def test_a_window_that_the_tree_would_ignore_is_noticed():
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.warns(UserWarning, match="window of 4 tokens"):
        assert not supports_tree(model)


def test_nothing_to_score_gives_zeros():
    values = response_log_probs(MODELS["llama"], [[1, 2]], [[]])
    assert values.shape == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[1]]}, "responses: expected one for each of 1 prompts, got 6"),
        ({"prompts": [[], *PROMPTS[1:]]}, "prompts: expected at least one token"),
        ({"temperature": 0.0}, "temperature: expected"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"prompts": PROMPTS, "responses": RESPONSES, **change}
    with pytest.raises(ValueError, match=message):
        response_log_probs(MODELS["llama"], **arguments)


@pytest.mark.parametrize("column", [0, 3])
def test_only_tokens_with_one_before_them_can_be_scored(column):
    mask = torch.zeros(1, 4, dtype=torch.bool)
    mask[0, column] = True
    with pytest.raises(ValueError, match="mask: expected scored tokens to have a token before them"):
        score_tokens(MODELS["llama"], torch.ones(1, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 0]]), mask)
