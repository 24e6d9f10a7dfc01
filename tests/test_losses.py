"""Losses: value and gradient region by region, masks that nothing leaks through, weights that a split cannot change."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from course_lib import (
    aggregate,
    clipped_surrogate,
    grpo_loss,
    kl_estimate,
    reinforce_loss,
    token_weights,
    truncated_importance_weights,
)
from course_lib.losses import effective_sample_size

MODES = ("token-mean", "sequence-mean", "sequence-sum", "fixed-length", "trajectory-mean")
ESTIMATORS = ("k1", "k2", "k3")


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def value_and_gradient(function, log_probs):
    log_probs = log_probs.detach().clone().requires_grad_()
    value = function(log_probs)
    value.sum().backward()
    return value.detach(), log_probs.grad


def mode_options(mode, rows):
    return {"mode": mode, "max_length": 7, "owners": [i // 2 for i in range(rows)]}


@st.composite
def batches(draw, max_rows=4):
    """Random inputs of grpo_loss, every mask included: log_probs, old, ref, rollout, advantages, mask."""
    rows, width = draw(st.integers(1, max_rows)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tensors = [-torch.rand(rows, width, generator=generator, dtype=torch.float64) * 2 for _ in range(4)]
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    bits = draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width))
    return *tensors, advantages, torch.tensor(bits).reshape(rows, width)


# --- clipped surrogate ----------------------------------------------------------------------------------------

# ρ, A, loss, d loss / d log π with ε_low = 0.2, ε_high = 0.28. The gradient vanishes in two of the six regions only.
REGIONS = [
    (0.5, 1.0, -0.5, -0.5),
    (1.1, 1.0, -1.1, -1.1),
    (1.5, 1.0, -1.28, 0.0),
    (0.5, -1.0, 0.8, 0.0),
    (1.1, -1.0, 1.1, 1.1),
    (1.5, -1.0, 1.5, 1.5),
]


@pytest.mark.parametrize("ratio, advantage, loss, gradient", REGIONS)
def test_six_regions_of_the_clip(ratio, advantage, loss, gradient):
    value, grad = value_and_gradient(
        lambda lp: clipped_surrogate(lp, double([[0.0]]), double([advantage]), [[1]], clip_high=0.28),
        double([[math.log(ratio)]]),
    )
    assert value.item() == pytest.approx(loss) and grad.item() == pytest.approx(gradient)


def test_clips_can_be_switched_off():
    off = {"clip_low": math.inf, "clip_high": math.inf}
    for ratio, advantage, *_ in REGIONS:
        arguments = double([[math.log(ratio)]]), double([[0.0]]), double([advantage]), [[1]]
        assert clipped_surrogate(*arguments, **off).item() == pytest.approx(-ratio * advantage)


def test_clips_of_zero_leave_a_ratio_of_one():
    arguments = double([[1.0, -1.0]]), double([[0.0, 0.0]]), double([[1.0, -1.0]]), [[1, 1]]
    assert clipped_surrogate(*arguments, clip_low=0, clip_high=0).tolist() == [[-1.0, 1.0]]


@pytest.mark.parametrize("ratio, loss, gradient", [(2.0, 2.0, 2.0), (5.0, 3.0, 0.0), (0.5, 0.8, 0.0)])
def test_dual_clip_bounds_the_loss_of_negative_advantages(ratio, loss, gradient):
    old, advantage = double([[0.0]]), double([-1.0])
    value, grad = value_and_gradient(
        lambda lp: clipped_surrogate(lp, old, advantage, [[1]], dual_clip=3.0), double([[math.log(ratio)]])
    )
    assert value.item() == pytest.approx(loss) and grad.item() == pytest.approx(gradient)


def test_dual_clip_leaves_positive_advantages_alone():
    arguments = double([[0.1, 3.0, -3.0]]), double([[0.0, 0.0, 0.0]]), double([1.0]), [[1, 1, 1]]
    assert torch.equal(clipped_surrogate(*arguments, dual_clip=1.5), clipped_surrogate(*arguments))


@settings(max_examples=30)
@given(batches())
def test_the_first_step_is_reinforce(batch):
    """ρ = 1: the per-token loss is −A whatever the policy, and the gradient is that of −A log π. Not 0."""
    log_probs, *_, advantages, mask = batch
    loss, grad = value_and_gradient(lambda lp: clipped_surrogate(lp, log_probs, advantages, mask), log_probs)
    torch.testing.assert_close(loss, -advantages[:, None] * mask)
    torch.testing.assert_close(grad, -advantages[:, None] * mask)
    _, grpo = value_and_gradient(lambda lp: grpo_loss(lp, log_probs, advantages, mask).loss, log_probs)
    _, reinforce = value_and_gradient(lambda lp: reinforce_loss(lp, advantages, mask, mode="token-mean"), log_probs)
    torch.testing.assert_close(grpo, reinforce)


def test_the_ratio_leaves_one_in_the_second_epoch():
    new, old = double([[-1.0, -2.0]]), double([[-1.5, -2.5]])
    assert grpo_loss(old, old, double([1.0]), [[1, 1]]).metrics["ratio_mean"] == 1.0
    assert grpo_loss(new, old, double([1.0]), [[1, 1]]).metrics["ratio_mean"] == pytest.approx(math.exp(0.5))


@settings(max_examples=30)
@given(batches())
def test_sequence_ratio_is_the_exponential_of_the_mean_log_ratio(batch):
    log_probs, old, *_, advantages, mask = batch
    log_probs.requires_grad_()
    loss = clipped_surrogate(
        log_probs, old, advantages, mask, clip_low=math.inf, clip_high=math.inf, ratio_level="sequence"
    )
    for row, length in enumerate(mask.sum(1).tolist()):
        if not length:
            assert loss[row].tolist() == [0.0] * mask.shape[1]
            continue
        ratio = ((log_probs - old)[row][mask[row]].mean()).exp()
        torch.testing.assert_close(loss[row], -ratio * advantages[row] * mask[row])
        (grad,) = torch.autograd.grad(loss[row].sum(), log_probs, retain_graph=True)
        # length tokens carry the ratio, each log-prob is 1/length of its exponent
        torch.testing.assert_close(grad[row], -ratio * advantages[row] * mask[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [199.5, 1e4, 1e30, -199.5, -1e30])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_any_finite_log_ratio_gives_finite_loss_and_gradient(dtype, log_ratio, advantage, level):
    log_probs, old = torch.tensor([[log_ratio, -1.0]], dtype=dtype), torch.tensor([[0.0, -1.0]], dtype=dtype)
    loss, grad = value_and_gradient(
        lambda lp: clipped_surrogate(lp, old, torch.tensor([advantage]), [[1, 1]], ratio_level=level), log_probs
    )
    assert loss.isfinite().all() and grad.isfinite().all()


def test_ratio_is_exact_up_to_its_cap():
    arguments = double([[0.0, 0.0]]), double([-1.0]), [[1, 1]]
    loss, grad = value_and_gradient(lambda lp: clipped_surrogate(lp, *arguments), double([[199.5, 400.0]]))
    assert loss[0, 0].item() == pytest.approx(math.exp(199.5)) and grad[0, 0] == loss[0, 0]
    assert loss[0, 1].item() == pytest.approx(math.sqrt(torch.finfo(torch.float64).max)) and grad[0, 1] == 0


# --- what stands under a zero mask ----------------------------------------------------------------------------


def every_loss(log_probs, old, ref, rollout, advantages, mask, mode="token-mean"):
    """Name → tensor, for each function that takes a mask."""
    options = mode_options(mode, len(mask))
    results = {f"kl {k}": kl_estimate(log_probs, ref, mask, estimator=k) for k in ESTIMATORS}
    for level in ("token", "sequence"):
        results[f"clip {level}"] = clipped_surrogate(log_probs, old, advantages, mask, ratio_level=level)
        results[f"weights {level}"] = truncated_importance_weights(old, rollout, mask, level=level)
    results["reinforce"] = reinforce_loss(log_probs, advantages, mask, **options)
    extras = {"ref_log_probs": ref, "beta": 0.1, "rollout_log_probs": rollout, "dual_clip": 3.0}
    report = grpo_loss(log_probs, old, advantages, mask, **extras, **options)
    return results | {"grpo": report.loss, "metrics": double(list(report.metrics.values()))}


def losses_and_gradients(log_probs, *others):
    log_probs = log_probs.detach().clone().requires_grad_()
    results = every_loss(log_probs, *others)
    gradients = {
        f"gradient of {name}": torch.autograd.grad(result.sum(), log_probs, retain_graph=True)[0]
        for name, result in results.items()
        if result.requires_grad
    }
    return results | gradients


@settings(max_examples=30)
@given(batches(), st.sampled_from([math.nan, math.inf, -math.inf, 199.5, -1e30]), st.sampled_from(MODES))
def test_nothing_leaks_from_under_the_mask(batch, junk, mode):
    *tensors, advantages, mask = batch
    spread = advantages[:, None].expand_as(mask)
    clean = losses_and_gradients(*tensors, spread, mask, mode)
    dirty = losses_and_gradients(
        *(torch.where(mask, t, sign * junk) for t, sign in zip([*tensors, spread], [1, -1, 1, -1, 1], strict=True)),
        mask,
        mode,
    )
    for name, result in clean.items():
        torch.testing.assert_close(dirty[name], result, rtol=0, atol=0, msg=name)
        if result.shape == mask.shape:
            assert not result[~mask].any() and not result[~mask].signbit().any(), name  # −0 would print as -0.


def test_a_ratio_that_overflows_under_the_mask():
    """exp(199.5) is inf in float32; masked after the exp, the loss is finite and the gradient 0 · inf = NaN."""
    old, mask = torch.tensor([[0.0, 0.0]]), torch.tensor([[1, 0]])
    loss, grad = value_and_gradient(lambda lp: grpo_loss(lp, old, [-1.0], mask).loss, torch.tensor([[0.0, 199.5]]))
    assert loss.item() == 1.0 and grad.tolist() == [[1.0, 0.0]]


def test_a_row_without_active_tokens_may_have_any_advantage():
    log_probs, mask = double([[-1.0], [-2.0]]), [[1], [0]]
    advantages = double([1.0, math.nan])
    assert reinforce_loss(log_probs, advantages, mask).item() == 1.0
    assert grpo_loss(log_probs, log_probs, advantages, mask).loss.item() == -1.0


@pytest.mark.parametrize("name", ["log_probs", "old_log_probs", "advantages", "ref_log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_an_active_value_that_is_not_finite_raises(name, junk):
    arguments = dict.fromkeys(
        ("log_probs", "old_log_probs", "advantages", "ref_log_probs", "rollout_log_probs"), double([[-1.0, -1.0]])
    )
    arguments[name] = double([[-1.0, junk]])
    message = f"{name}: expected finite values at active tokens, got {junk} in row 0, column 1"
    with pytest.raises(ValueError, match=message):
        grpo_loss(**arguments, mask=[[1, 1]], beta=0.1)
    grpo_loss(**arguments, mask=[[1, 0]], beta=0.1)


# --- KL estimators --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [-700.0, -1.0, -1e-6, 0.0, 1e-6, 1e-3, 5.0, 20.0])
def test_kl_values(x):
    log_probs, ref = double([[0.0]]), double([[x]])
    k1, k2, k3 = (kl_estimate(log_probs, ref, [[1]], estimator=k).item() for k in ESTIMATORS)
    assert (k1, k2, k3) == (-x, x * x / 2, pytest.approx(math.expm1(x) - x, rel=1e-14))


def test_kl_by_enumeration():
    """Values: k1 and k3 average to KL(π‖π_ref), k2 does not. Gradients as losses: 0, reverse KL, forward KL."""
    theta, ref = double([0.2, -0.4, 1.0, 0.0]), double([0.5, 0.1, -0.3, 0.2]).log_softmax(0)
    jacobian = torch.autograd.functional.jacobian(lambda t: t.log_softmax(0), theta)
    log_p = theta.log_softmax(0)
    p = log_p.exp()

    def gradient(function):
        return torch.autograd.functional.jacobian(function, theta)

    reverse = (p * (log_p - ref)).sum()
    reverse_gradient = gradient(lambda t: (t.softmax(0) * (t.log_softmax(0) - ref)).sum())
    forward_gradient = gradient(lambda t: (ref.exp() * (ref - t.log_softmax(0))).sum())
    mean, slope = {}, {}
    for k in ESTIMATORS:
        value, grad = value_and_gradient(
            lambda lp, k=k: kl_estimate(lp, ref[None], torch.ones(1, 4), estimator=k), log_p[None]
        )
        mean[k], slope[k] = p @ value[0], (p * grad[0]) @ jacobian
    torch.testing.assert_close(mean["k1"], reverse)
    torch.testing.assert_close(mean["k3"], reverse)
    assert abs(mean["k2"] - reverse) > 0.01
    torch.testing.assert_close(slope["k1"], torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(slope["k2"], reverse_gradient)
    torch.testing.assert_close(slope["k3"], forward_gradient)


@given(x=st.floats(allow_nan=False, allow_infinity=False, width=32))
@example(x=3e38)  # past the place where the tangent itself overflows in float32
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_finite_for_any_finite_x(dtype, x):
    value, grad = value_and_gradient(
        lambda lp: kl_estimate(lp, torch.zeros_like(lp), [[1]]), torch.tensor([[-x]], dtype=dtype)
    )
    assert value.isfinite() and grad.isfinite() and value >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_keeps_its_gradient_in_every_precision(dtype):
    """A bend written as slope · (x − min(x, knee)) cancels to a gradient of exactly 0 in float32."""
    x = torch.tensor([[-50.0, -1.0, -0.01, 0.0, 0.1, 2.5, 19.9]], dtype=dtype)
    _, grad = value_and_gradient(lambda lp: kl_estimate(lp, torch.zeros_like(lp), torch.ones(1, 7)), -x)
    torch.testing.assert_close(-grad, x.expm1(), rtol=1e-6, atol=2 * torch.finfo(dtype).eps)


def test_k3_goes_on_along_its_tangent():
    knee = math.exp(20.0)
    x = double([[20.0 - 1e-9, 20.0, 20.0 + 1e-9, 30.0, 1000.0]])
    value, grad = value_and_gradient(lambda lp: kl_estimate(lp, torch.zeros_like(lp), torch.ones(1, 5)), -x)
    torch.testing.assert_close(value, (knee - 1 - x) + knee * (x - 20), rtol=1e-12, atol=0)
    torch.testing.assert_close(-grad, torch.full_like(x, knee - 1), rtol=1e-8, atol=0)


# --- importance weights ---------------------------------------------------------------------------------------


def test_importance_weights_by_token_and_sequence():
    trainer, rollout = double([[0.5, 0.9, 0.5]]).log(), double([[0.4, 0.1, 0.5]]).log()
    token = truncated_importance_weights(trainer, rollout, [[1, 1, 0]], cap=3.0)
    torch.testing.assert_close(token, double([[1.25, 3.0, 0.0]]))
    sequence = truncated_importance_weights(trainer, rollout, [[1, 1, 0]], cap=20.0, level="sequence")
    torch.testing.assert_close(sequence, double([[11.25, 11.25, 0.0]]))
    assert not truncated_importance_weights(trainer.requires_grad_(), rollout, [[1, 1, 1]]).requires_grad


def test_effective_sample_size_by_hand_and_at_its_bounds():
    assert effective_sample_size(double([3.0, 1.0])).item() == pytest.approx(16 / 10)
    assert effective_sample_size(torch.full((5, 2), 0.3)).item() == pytest.approx(10)
    assert effective_sample_size([[1.0, 1e-9], [0.0, 0.0]]).item() == pytest.approx(1)
    assert effective_sample_size([2.0, 2.0, 7.0], [1, 1, 0]).item() == pytest.approx(2)
    assert effective_sample_size([0.0, 0.0]).item() == effective_sample_size([]).item() == 0
    assert effective_sample_size(torch.tensor([1e38, 1e38])).item() == pytest.approx(2)  # squares beyond float32
    assert effective_sample_size([2.0, math.nan], [1, 0]).item() == 1
    assert not effective_sample_size(torch.ones(2, requires_grad=True)).requires_grad
    for bad in ([1.0, -1.0], [math.inf], [math.nan]):
        with pytest.raises(ValueError, match="weights: expected finite numbers ≥ 0, got"):
            effective_sample_size(bad)
    with pytest.raises(ValueError, match="mask: expected shape"):
        effective_sample_size([1.0, 2.0], [1])


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.floats(1e-3, 1e3))
def test_effective_sample_size_is_what_the_variance_says(weights, scale):
    """Var(Σ w x / Σ w) = σ² / ESS for independent x; a common factor of the weights means nothing."""
    w = double(weights)
    size = effective_sample_size(w)
    torch.testing.assert_close(1 / size, (w / w.sum()).square().sum())
    torch.testing.assert_close(effective_sample_size(w * scale), size)
    assert 1 - 1e-9 <= size <= len(w) + 1e-9


def test_importance_weights_never_exceed_the_cap_and_stay_finite():
    trainer = torch.tensor([[500.0, -500.0, 1e30]])
    weights = truncated_importance_weights(trainer, torch.zeros(1, 3), torch.ones(1, 3))
    assert weights.tolist() == [[2.0, 0.0, 2.0]]
    assert truncated_importance_weights(trainer, torch.zeros(1, 3), torch.ones(1, 3), cap=math.inf).isfinite().all()


@settings(max_examples=30)
@given(batches())
def test_the_importance_weight_multiplies_the_policy_term_only(batch):
    log_probs, old, ref, rollout, advantages, mask = batch
    report = grpo_loss(
        log_probs, old, advantages, mask, ref_log_probs=ref, beta=0.3, rollout_log_probs=rollout, importance_cap=1.5
    )
    policy = clipped_surrogate(log_probs, old, advantages, mask, clip_high=0.28)
    weighted = policy * (old - rollout).exp().clamp(max=1.5)
    expected = aggregate(weighted + 0.3 * kl_estimate(log_probs, ref, mask), token_weights(mask.double(), "token-mean"))
    torch.testing.assert_close(report.loss, expected)


# --- token weights --------------------------------------------------------------------------------------------


def reference_weights(mask, mode, max_length, owners):
    """One token at a time, straight from the table."""
    mask = mask.tolist()
    rows = [i for i, row in enumerate(mask) if any(row)]
    tokens = {owner: sum(sum(mask[i]) for i in rows if owners[i] == owner) for owner in owners}
    denominators = {
        "token-mean": lambda i: sum(map(sum, mask)),
        "sequence-mean": lambda i: sum(mask[i]) * len(rows),
        "sequence-sum": lambda i: len(rows),
        "fixed-length": lambda i: len(rows) * max_length,
        "trajectory-mean": lambda i: tokens[owners[i]] * len({owners[i] for i in rows}),
    }
    return double([[1 / denominators[mode](i) if on else 0.0 for on in row] for i, row in enumerate(mask)])


@given(batches(max_rows=6), st.sampled_from(MODES))
def test_weights_follow_the_table(batch, mode):
    mask = batch[-1]
    options = mode_options(mode, len(mask))
    weights = token_weights(mask.double(), **options)
    torch.testing.assert_close(weights, reference_weights(mask, **options))
    if mode.endswith("mean") and mask.any():
        assert weights.sum().item() == pytest.approx(1)


@settings(max_examples=30)
@given(batches(), st.sampled_from(MODES), st.data())
def test_micro_batches_add_up_to_the_batch(batch, mode, data):
    """Loss and gradient, whatever the rows are split into and in whatever order they are visited."""
    log_probs, old, ref, rollout, advantages, mask = batch
    weights = token_weights(mask.double(), **mode_options(mode, len(mask)))
    rows = data.draw(st.permutations(range(len(mask))))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(mask)))))
    parts = [rows[a:b] for a, b in itertools.pairwise([0, *cuts, len(mask)])]

    def loss(lp, rows):
        return grpo_loss(
            lp[rows],
            old[rows],
            advantages[rows],
            mask[rows],
            ref_log_probs=ref[rows],
            beta=0.1,
            rollout_log_probs=rollout[rows],
            ratio_level="sequence",
            weights=weights[rows],
        ).loss

    whole = value_and_gradient(lambda lp: loss(lp, list(range(len(mask)))), log_probs)
    split = value_and_gradient(lambda lp: sum(loss(lp, part) for part in parts), log_probs)
    torch.testing.assert_close(split, whole)


@settings(max_examples=30)
@given(batches(), st.sampled_from(MODES), st.integers(0, 9))
def test_padding_changes_nothing(batch, mode, extra):
    *tensors, advantages, mask = batch
    wide = [torch.nn.functional.pad(t, (0, extra), value=math.nan) for t in tensors]
    wide_mask = torch.nn.functional.pad(mask, (0, extra))
    options = mode_options(mode, len(mask))

    def loss(lp, old, ref, rollout, mask):
        extras = {"ref_log_probs": ref, "beta": 0.1, "rollout_log_probs": rollout}
        return grpo_loss(lp, old, advantages, mask, **extras, **options).loss

    narrow_loss, narrow_grad = value_and_gradient(lambda lp: loss(lp, *tensors[1:], mask), tensors[0])
    wide_loss, wide_grad = value_and_gradient(lambda lp: loss(lp, *wide[1:], wide_mask), wide[0])
    torch.testing.assert_close(wide_loss, narrow_loss)
    torch.testing.assert_close(wide_grad[:, : mask.shape[1]], narrow_grad)


def test_token_mean_over_micro_batches_is_not_the_mean_of_their_means():
    per_token, mask = torch.tensor([[6.0, 0, 0], [1, 2, 3]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    weights = token_weights(mask, "token-mean")
    assert aggregate(per_token, weights).item() == 3.0
    assert sum(aggregate(per_token[i : i + 1], weights[i : i + 1]).item() for i in (0, 1)) == 3.0


def test_the_same_rows_padded_to_8_and_16():
    losses = []
    for width in (8, 16):
        per_token, mask = torch.zeros(2, width), torch.zeros(2, width)
        per_token[0, :4], mask[0, :4] = 1.0, 1
        per_token[1, :6], mask[1, :6] = 2.0, 1
        losses.append([aggregate(per_token, token_weights(mask, **mode_options(m, 2))).item() for m in MODES])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean", "trajectory-mean"])
def test_a_truncated_row_that_is_masked_out_does_not_count(mode):
    per_token, mask = torch.ones(2, 4), torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    assert aggregate(per_token, token_weights(mask, mode, owners=["a", "b"])).item() == 1.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_nothing_active_gives_zero_and_a_zero_gradient(mode, shape):
    log_probs = torch.full(shape, math.nan)
    mask, advantages = torch.zeros(shape), torch.zeros(shape[0])
    options = mode_options(mode, shape[0])
    report = grpo_loss(log_probs, log_probs, advantages, mask, **options)
    assert report.loss.item() == 0 and set(report.metrics.values()) == {0.0}
    loss, grad = value_and_gradient(lambda lp: reinforce_loss(lp, advantages, mask, **options), log_probs)
    assert loss.item() == 0 and not grad.any()


def test_rows_with_zero_advantage_stay_in_the_denominators():
    log_probs, mask = double([[-1.0, -1.0], [-1.0, -1.0]]), torch.ones(2, 2)
    _, grad = value_and_gradient(lambda lp: grpo_loss(lp, log_probs, double([1.0, 0.0]), mask).loss, log_probs)
    assert grad.tolist() == [[-0.25, -0.25], [0.0, 0.0]]


def test_owners_are_one_vote_each():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    for owners in (["a", "a", "b", "c"], torch.tensor([7, 7, 2, 9]), [("x", 1), ("x", 1), None, ("x", 2)]):
        weights = token_weights(mask, "trajectory-mean", owners=owners)
        expected = [[1 / 8, 1 / 8, 1 / 8], [1 / 8, 0, 0], [1 / 4, 1 / 4, 0], [0, 0, 0]]
        assert weights.tolist() == expected
    one_token = token_weights(torch.tensor([[1, 0], [1, 1]]), "trajectory-mean", owners=[0, 1])
    assert one_token.tolist() == [[1 / 2, 0], [1 / 4, 1 / 4]]


@pytest.mark.parametrize(
    "given_dtype, result",
    [
        (torch.bool, torch.float32),
        (torch.int64, torch.float32),
        (torch.uint8, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_weights_take_the_dtype_of_a_floating_mask(given_dtype, result):
    assert token_weights(torch.ones(2, 3, dtype=given_dtype), "token-mean").dtype == result


def test_long_half_precision_masks_are_counted_exactly():
    weights = token_weights(torch.ones(1, 5000, dtype=torch.float16), "sequence-sum")
    assert weights.sum(dtype=torch.float32).item() == 5000
    mask = torch.ones(1, 4097, dtype=torch.bfloat16)  # 4097 is no bfloat16 number
    log_probs = -torch.ones(1, 4097)
    assert reinforce_loss(log_probs, [1.0], mask, mode="token-mean").item() == pytest.approx(1, rel=1e-5)


# --- reports, dtypes, gradients -------------------------------------------------------------------------------


def test_metrics_by_hand():
    ratio = double([[1.5, 0.5, 1.1, 9.0], [1.5, 0.5, 0.9, 9.0]])
    old = double([[-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
    rollout = old + double([[-0.25, 0.25, -0.25, 9.0], [0.25, -0.25, 0.25, 9.0]])  # off by as much in both directions
    report = grpo_loss(
        old + ratio.log(), old, [1.0, -1.0], mask, ref_log_probs=old, kl_estimator="k1", rollout_log_probs=rollout
    )
    assert report.metrics == pytest.approx(
        {
            "ratio_mean": (1.5 + 0.5 + 1.1 + 1.5 + 0.5 + 0.9) / 6,
            "clip_fraction_low": 1 / 6,  # ρ = 0.5 where A < 0; the one where A > 0 keeps its gradient
            "clip_fraction_high": 1 / 6,
            "kl": math.log(1.5 * 0.5 * 1.1 * 1.5 * 0.5 * 0.9) / 6,
            "sampler_mismatch": 0.25,
            "active_tokens": 6.0,
        }
    )
    assert all(type(value) is float for value in report.metrics.values())


def test_metrics_without_reference_and_engine():
    metrics = grpo_loss(double([[-1.0]]), double([[-1.0]]), [1.0], [[1]]).metrics
    assert (metrics["kl"], metrics["sampler_mismatch"]) == (0.0, 0.0)


@settings(max_examples=30)
@given(batches())
def test_only_log_probs_receive_a_gradient(batch):
    *tensors, advantages, mask = batch
    log_probs, *others = [t.requires_grad_() for t in (*tensors, advantages)]
    old, ref, rollout, advantages = others
    weights = token_weights(mask.double(), "token-mean").requires_grad_()
    options = {"ref_log_probs": ref, "beta": 0.1, "rollout_log_probs": rollout, "weights": weights}
    grpo_loss(log_probs, old, advantages, mask, **options).loss.backward()
    assert log_probs.grad is not None and all(t.grad is None for t in (*others, weights))


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
    tensors = [torch.tensor([[-1.0, -2.0]], dtype=given_dtype) for _ in range(4)]
    before = [t.clone() for t in tensors]
    for mask_dtype in (torch.bool, torch.int64, torch.float32, torch.bfloat16):
        mask = torch.tensor([[1, 0]], dtype=mask_dtype)
        for name, value in every_loss(*tensors, torch.ones(1, dtype=given_dtype), mask).items():
            assert value.dtype == (torch.float64 if "metrics" in name else result), name
        assert torch.equal(mask, torch.tensor([[1, 0]]).to(mask_dtype))
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


@settings(max_examples=20)
@given(batches(), st.sampled_from(MODES))
def test_float32_agrees_with_float64(batch, mode):
    """Value and gradient of everything: an expression that cancels in float32 looks right in float64."""
    *tensors, advantages, mask = batch
    exact = losses_and_gradients(*tensors, advantages, mask, mode)
    single = losses_and_gradients(*(t.float() for t in (*tensors, advantages)), mask, mode)
    for name, result in exact.items():
        torch.testing.assert_close(single[name].double(), result, rtol=1e-4, atol=1e-5, msg=name)


def test_a_bool_mask_costs_float64_no_digits():
    """Weights in float32 would: 1/3 is off by 1e-8 there."""
    log_probs = double([[-1.0, -1.0, -1.0]])
    for function in (reinforce_loss, lambda lp, *rest, **o: grpo_loss(lp, lp, *rest, **o).loss):
        loss = function(log_probs, double([1.0]), torch.ones(1, 3, dtype=torch.bool), mode="token-mean")
        assert abs(loss.item()) == 1.0
        assert loss.dtype == torch.float64


@settings(max_examples=30)
@given(batches())
def test_gradients_against_finite_differences(batch):
    """At random points: the clip's kinks have measure zero."""
    log_probs, old, ref, rollout, advantages, mask = batch
    options = {"ref_log_probs": ref, "beta": 0.1, "rollout_log_probs": rollout, "dual_clip": 3.0}
    assert torch.autograd.gradcheck(
        lambda lp: grpo_loss(lp, old, advantages, mask, **options).loss, log_probs.requires_grad_()
    )


# --- errors ---------------------------------------------------------------------------------------------------

ONE = torch.ones(1, 2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: clipped_surrogate(ONE, ONE, [1.0], ONE, clip_low=-0.1), "clip_low: expected a number ≥ 0, got -0.1"),
        (lambda: clipped_surrogate(ONE, ONE, [1.0], ONE, clip_high=math.nan), "clip_high: expected a number ≥ 0"),
        (lambda: clipped_surrogate(ONE, ONE, [1.0], ONE, dual_clip=1.0), "dual_clip: expected a finite number > 1"),
        (lambda: clipped_surrogate(ONE, ONE, [1.0], ONE, ratio_level="row"), 'ratio_level: expected one of "token"'),
        (lambda: clipped_surrogate(ONE, ONE, [1.0, 2.0], ONE), r"advantages: expected shape \(1,\)"),
        (lambda: clipped_surrogate(ONE, ONE, torch.ones(1, 1), ONE), r"advantages: expected shape \(1, 2\)"),
        (lambda: clipped_surrogate(ONE, torch.ones(2, 2), [1.0], ONE), r"old_log_probs: expected shape \(1, 2\)"),
        (lambda: clipped_surrogate(ONE[0], ONE[0], ONE[0], ONE[0]), r"mask: expected shape \(B, T\), got \(2,\)"),
        (lambda: clipped_surrogate(ONE, ONE, [1.0], ONE / 2), r"mask: expected only 0 and 1, got \[0.5\]"),
        (lambda: clipped_surrogate(ONE, ONE, [1.0], ONE * math.nan), r"mask: expected only 0 and 1, got \[nan\]"),
        (lambda: kl_estimate(ONE, ONE, ONE, estimator="k4"), 'estimator: expected one of "k1", "k2", "k3", got \'k4\''),
        (lambda: truncated_importance_weights(ONE, ONE, ONE, cap=0), "cap: expected a number > 0, got 0"),
        (lambda: truncated_importance_weights(ONE, ONE, ONE, cap=-1.0), "cap: expected a number > 0, got -1.0"),
        (lambda: truncated_importance_weights(ONE, ONE, ONE, level="row"), 'level: expected one of "token"'),
        (lambda: token_weights(ONE, "mean"), 'mode: expected one of "token-mean"'),
        (lambda: token_weights(ONE, "fixed-length"), "max_length: expected a whole number of tokens ≥ 1.*got None"),
        (lambda: token_weights(ONE, "fixed-length", max_length=0), "max_length: .*got 0"),
        (lambda: token_weights(ONE, "fixed-length", max_length=2.5), "max_length: .*got 2.5"),
        (lambda: token_weights(ONE, "trajectory-mean"), 'owners: expected one id a row, because mode is "trajectory-'),
        (lambda: token_weights(ONE, "trajectory-mean", owners=[1, 2]), "owners: expected 1 values, one for each row"),
        (lambda: aggregate(ONE, torch.ones(2, 2)), r"per_token: expected shape \(2, 2\) = \(B, T\), that of weights"),
        (lambda: aggregate(ONE * math.nan, ONE), "per_token: expected finite values"),
        (lambda: aggregate(ONE, ONE * math.nan), "weights: expected finite values"),
        (lambda: grpo_loss(ONE, ONE, [1.0], ONE, beta=0.1), "ref_log_probs: expected a tensor, because beta is not 0"),
        (lambda: grpo_loss(ONE, ONE, [1.0], ONE, beta=-1, ref_log_probs=ONE), "beta: expected a finite number ≥ 0"),
        (lambda: grpo_loss(ONE, ONE, [1.0], ONE, mode="trajectory-mean"), "owners: expected one id a row"),
        (lambda: reinforce_loss(ONE, [1.0], ONE, mode="trajectory-mean"), "owners: expected one id a row"),
        (lambda: reinforce_loss(ONE, [1.0], ONE, weights=torch.ones(2)), r"weights: expected shape \(1, 2\)"),
    ],
)
def test_errors_name_the_argument_and_what_came(call, message):
    with pytest.raises(ValueError, match=message):
        call()
