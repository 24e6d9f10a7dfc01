"""Exact quantities of enumerable policies against autograd, finite differences and brute force."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import toy
from course_lib.losses import grpo_loss, reinforce_loss

TINY = {"rtol": 0, "atol": 1e-12}


@pytest.fixture
def policy():
    return toy.ToyPolicy(
        ("a", "b", "."), 3, lambda x, y: float("b" in y and y[-1] == "."), end=".", prompts=("x", "z"),
        prompt_probabilities=(0.3, 0.7), seed=3,
    )  # fmt: skip


def reinforce(samples):
    return (samples.rewards[:, None] * samples.scores).mean(dim=0)


def group_mean(samples):
    return samples.policy_gradient(samples.rewards - samples.rewards.mean())


def leave_one_out(samples):
    others = (samples.rewards.sum() - samples.rewards) / (len(samples) - 1)
    return samples.policy_gradient(samples.rewards - others)


def test_outcomes_are_all_distinct_and_their_probabilities_sum_to_one(policy):
    assert len(policy) == 2 * 15 == len({(o.prompt, o.calls) for o in policy.outcomes})
    assert policy.probabilities().sum().item() == pytest.approx(1, abs=1e-14)
    assert policy.theta.numel() == 2 * (1 + 2 + 4) * 3
    by_prompt = torch.zeros(2, dtype=torch.float64).index_add(
        0, policy.prompt_ids, policy.probabilities().detach()
    )
    torch.testing.assert_close(by_prompt, torch.tensor([0.3, 0.7], dtype=torch.float64), **TINY)


def test_log_probability_is_a_sum_of_context_dependent_logs(policy):
    outcome = policy.texts.index("b a .")
    table = dict(zip(policy.row_keys, policy.token_distribution().detach(), strict=True))
    expected = [table[("x",)][1], table[("x", "b")][0], table[("x", "b", "a")][2]]
    torch.testing.assert_close(policy.log_probs()[outcome].exp(), torch.stack(expected), **TINY)
    assert not torch.allclose(table[("x",)], table[("x", "b")])


def test_gradient_is_the_score_form_and_finite_differences(policy):
    gradient = policy.gradient()
    by_scores = (policy.probabilities() * policy.rewards).detach() @ policy.scores()
    torch.testing.assert_close(gradient, by_scores, **TINY)
    step = 1e-5
    for i in range(policy.theta.numel()):
        nudge = torch.zeros_like(policy.theta)
        nudge[i] = step
        up, down = policy.objective(policy.theta + nudge), policy.objective(policy.theta - nudge)
        assert ((up - down) / (2 * step)).item() == pytest.approx(gradient[i].item(), abs=1e-9)


def test_token_scores_are_autograd_of_log_probs(policy):
    jacobian = torch.autograd.functional.jacobian(
        lambda theta: policy.log_probs(theta=theta), policy.theta.detach()
    )
    torch.testing.assert_close(policy.token_scores(), jacobian, **TINY)
    torch.testing.assert_close(policy.scores(), jacobian.sum(dim=1), **TINY)


def test_scores_have_mean_zero(policy):
    mean = policy.probabilities().detach() @ policy.scores()
    torch.testing.assert_close(mean, torch.zeros_like(mean), **TINY)


@pytest.mark.parametrize("group_size", [2, 3])
def test_reinforce_and_leave_one_out_are_unbiased(policy, group_size):
    for estimator in (reinforce, leave_one_out):
        found = toy.moments(policy, estimator, group_size)
        assert found.exact
        torch.testing.assert_close(found.mean, policy.gradient(), **TINY)


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_group_mean_shrinks_the_gradient(policy, group_size):
    found = toy.moments(policy, group_mean, group_size)
    torch.testing.assert_close(found.mean, (group_size - 1) / group_size * policy.gradient(), **TINY)


def test_moments_equal_a_loop_over_every_ordered_group():
    policy = toy.ToyPolicy(("a", "b"), 2, [0.0, 1.0, 3.0, -1.0], seed=1)
    p, scores, mean, second = policy.probabilities().detach(), policy.scores(), 0, 0
    for group in map(list, product(range(4), repeat=3)):
        rewards = policy.rewards[group]
        g = ((rewards - rewards.mean())[:, None] * scores[group]).mean(dim=0)
        mean, second = mean + p[group].prod() * g, second + p[group].prod() * torch.outer(g, g)
    found = toy.moments(policy, group_mean, 3)
    torch.testing.assert_close(found.mean, mean, **TINY)
    torch.testing.assert_close(found.covariance, second - torch.outer(mean, mean), **TINY)
    assert found.groups == 20 and found.exact  # 4 + 3 − 1 choose 3 unordered groups instead of 64


def test_an_estimator_that_sees_the_order_is_summed_over_ordered_groups():
    policy = toy.ToyPolicy(("a", "b"), 2, [0.0, 1.0, 3.0, -1.0], seed=1)
    found = toy.moments(policy, lambda s: s.rewards[0] * s.scores[0], 3)
    assert found.groups == 64
    torch.testing.assert_close(found.mean, policy.gradient(), **TINY)
    assert found.variance == pytest.approx(toy.moments(policy, reinforce, 1).variance, rel=1e-12)


def test_the_mean_of_independent_samples_divides_the_covariance():
    policy = toy.deep_research(seed=4)
    one, three = toy.moments(policy, reinforce, 1), toy.moments(policy, reinforce, 3)
    torch.testing.assert_close(three.covariance, one.covariance / 3, **TINY)


def test_code_that_vmap_refuses_gives_the_same_moments(policy):
    slow = toy.moments(policy, lambda s: s.policy_gradient(s.rewards - s.rewards.mean().item()), 2)
    fast = toy.moments(policy, group_mean, 2)
    torch.testing.assert_close(slow.mean, fast.mean, **TINY)
    torch.testing.assert_close(slow.covariance, fast.covariance, **TINY)


def test_monte_carlo_says_so_and_its_intervals_hold(policy):
    exact = toy.moments(policy, leave_one_out, 3)
    inside, variance_inside = [], 0
    for seed in range(20):
        sampled = toy.moments(policy, leave_one_out, 3, budget=800, seed=seed)
        assert not sampled.exact and sampled.groups == 800 and "Monte Carlo" in repr(sampled)
        inside.append(((sampled.mean - exact.mean).abs() <= sampled.interval).double().mean().item())
        variance_inside += abs(sampled.variance - exact.variance) <= sampled.variance_interval
    assert 0.85 < sum(inside) / 20 < 1 and variance_inside >= 15
    assert "exact" in repr(exact) and exact.interval.abs().max() == 0


def test_optimal_baseline_is_the_minimum_of_a_scan():
    policy = toy.deep_research(seed=2)
    best = toy.optimal_baseline(policy).item()

    def variance(b):
        return toy.moments(policy, lambda s: s.policy_gradient(s.rewards - b), 1).variance

    scanned = {
        b: variance(b) for b in torch.linspace(best - 0.3, best + 0.3, 21, dtype=torch.float64).tolist()
    }
    assert min(scanned, key=scanned.get) == pytest.approx(best, abs=1e-12)
    assert variance(best) < variance(policy.objective().item()) < variance(0.0)
    unbiased = toy.moments(policy, lambda s: s.policy_gradient(s.rewards - best), 1)
    torch.testing.assert_close(unbiased.mean, policy.gradient(), **TINY)


def test_loss_estimators(policy):
    def surrogate(log_probs, samples):
        return -((samples.rewards - samples.rewards.mean()) * log_probs.sum(dim=1)).mean()

    by_hand = toy.moments(policy, group_mean, 2)
    for estimator in (toy.from_loss(surrogate), toy.several_steps(surrogate, steps=1, learning_rate=0.3)):
        found = toy.moments(policy, estimator, 2)
        torch.testing.assert_close(found.mean, by_hand.mean, **TINY)
        torch.testing.assert_close(found.covariance, by_hand.covariance, **TINY)


def test_the_surrogate_loss_has_the_policy_gradient(policy):
    """On responses of unequal length: sum over tokens, mean over responses."""
    samples = policy.sample(1, 6, seed=3)
    assert len(set(samples.mask.sum(dim=1).tolist())) > 1 and samples.rewards.any()
    by_loss = toy.from_loss(lambda log_probs, s: reinforce_loss(log_probs, s.rewards, s.mask))
    torch.testing.assert_close(by_loss(samples), samples.policy_gradient(samples.rewards), **TINY)
    torch.testing.assert_close(toy.moments(policy, by_loss, 2).mean, policy.gradient(), **TINY)


def test_several_steps_equal_gradient_descent_written_out():
    policy = toy.ToyPolicy(("a", "b"), 2, [0.0, 1.0, 3.0, -1.0], seed=1)

    def ratio_loss(log_probs, samples):
        ratio = (log_probs - samples.old_log_probs).sum(dim=1).exp()
        return -(ratio * samples.rewards).mean()

    samples = policy.sample(1, 4)
    moving = policy.with_theta(policy.theta)
    optimizer = torch.optim.SGD([moving.theta], lr=0.2)
    for _ in range(3):
        optimizer.zero_grad()
        ratio_loss(moving.log_probs(samples), samples).backward()
        optimizer.step()
    walked = toy.several_steps(ratio_loss, steps=3, learning_rate=0.2)(samples)
    torch.testing.assert_close(walked, ((moving.theta - policy.theta) / 0.2).detach(), **TINY)


def test_token_advantages_and_row_advantages_agree(policy):
    samples = policy.sample(1, 5)
    by_row = samples.policy_gradient(samples.rewards)
    by_token = samples.policy_gradient(samples.rewards[:, None].expand_as(samples.mask))
    torch.testing.assert_close(by_row, by_token, **TINY)


def test_sampling_frequencies_and_groups(policy):
    samples = policy.sample(40_000, seed=5)
    counts = torch.bincount(samples.indices, minlength=len(policy)) / 40_000
    p = policy.probabilities().detach()
    assert ((counts - p).abs() <= 4.5 * (p * (1 - p) / 40_000).sqrt()).all()
    grouped = policy.sample(50, 6, seed=1)
    assert grouped.group_ids.bincount().tolist() == [6] * 50
    assert (grouped.prompt_ids.view(50, 6) == grouped.prompt_ids.view(50, 6)[:, :1]).all()
    assert torch.equal(policy.sample(9, 2, seed=7).indices, policy.sample(9, 2, seed=7).indices)


def test_samples_remember_the_policy_that_drew_them(policy):
    samples = policy.sample(1, 4)
    before = samples.old_log_probs.clone()
    with torch.no_grad():
        policy.theta += 1
        policy.theta[0] += 1
    assert torch.equal(samples.old_log_probs, before)
    assert not torch.equal(policy.log_probs(samples), before)


def test_training_raises_the_objective_and_leaves_its_policy_alone(policy):
    before = policy.theta.detach().clone()
    seen = []
    run = toy.train(
        policy,
        lambda log_probs, s: -((s.rewards - s.rewards.mean()) * log_probs.sum(dim=1)).mean(),
        steps=30, group_size=16, seed=2, on_step=lambda step, values: seen.append((step, values["J"])),
    )  # fmt: skip
    assert torch.equal(policy.theta, before)
    assert run.objective[-1] > run.objective[0] + 0.2
    assert (
        run.objective[0] == policy.objective().item() and run.objective[-1] == run.policy.objective().item()
    )
    assert [k for k, _ in seen] == list(range(31)) and seen[-1][1] == run.objective[-1]
    assert run.curves["gradient_norm"][0].item() == pytest.approx(policy.gradient().norm().item())
    assert run.curves["entropy"][0].item() == pytest.approx(policy.entropy())
    assert run.curves["kl"][0] == 0 < run.curves["kl"][-1]
    assert len(run.curves["loss"]) == 30


def test_the_kl_curve_is_exact_though_the_loss_reports_an_estimate(policy):
    reference = policy.log_probs().detach()

    def loss(log_probs, s):
        advantages = s.rewards - s.rewards.mean()
        return grpo_loss(log_probs, s.old_log_probs, advantages, s.mask, ref_log_probs=reference[s.indices])

    run = toy.train(policy, loss, steps=5, group_size=16, learning_rate=2.0)
    log_ratio = (run.policy.log_probs() - policy.log_probs()).sum(dim=1)
    assert run.curves["kl"][-1].item() == pytest.approx((run.policy.probabilities() @ log_ratio).item())
    assert len(run.curves["kl"]) == 6 and len(run.curves["ratio_mean"]) == 5


def test_shared_rows_share_parameters():
    policy = toy.ToyPolicy(
        ("a", "b"), 2, lambda x, y: 0.0, prompts=("x", "z"), key=lambda context: context[1:]
    )
    assert policy.theta.numel() == 3 * 2
    p = policy.probabilities()
    torch.testing.assert_close(p[:4], p[4:])


def test_two_questions():
    policy = toy.easy_and_hard()
    easy, hard = policy.prompt_objectives().tolist()
    assert easy > hard > 0
    assert (easy + hard) / 2 == pytest.approx(policy.objective().item())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 10_000))
def test_any_policy_is_a_distribution_with_centred_scores(size, length, ends, seed):
    vocabulary = tuple("abc"[:size])
    policy = toy.ToyPolicy(
        vocabulary, length, lambda x, y: float(len(y)), end=vocabulary[-1] if ends else None, seed=seed
    )
    p = policy.probabilities().detach()
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    assert (p @ policy.scores()).abs().max() < 1e-12
    torch.testing.assert_close(policy.gradient(), (p * policy.rewards) @ policy.scores(), **TINY)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda p: toy.moments(p, lambda s: s.scores, 2),
            r"estimator: expected shape \(42,\).*\(2, 42\)",
        ),
        (lambda p: toy.moments(p, lambda s: 1.0, 2), "estimator: .*float"),
        (
            lambda p: toy.moments(p, lambda s: s.policy_gradient(torch.randn(len(s)).double()), 2),
            "two for the same samples",
        ),
        (
            lambda p: toy.moments(p, lambda s: s.scores[0] * (0 * s.rewards.mean() / s.rewards.std()), 2),
            "NaN",
        ),
        (lambda p: toy.train(p, lambda lp, s: lp, steps=1), "loss: expected a scalar"),
        (lambda p: p.with_theta(torch.zeros(3)), "theta: expected shape"),
        (lambda p: p.with_rewards([1.0]), "rewards: expected 30"),
        (lambda p: p.with_rewards([float("nan")] * 30), "rewards: .*NaN"),
        (lambda p: toy.ToyPolicy(("a",), 0, lambda x, y: 0.0), "max_tokens"),
        (lambda p: toy.ToyPolicy(("a",), 1, lambda x, y: 0.0, end="b"), "end: expected"),
        (lambda p: toy.ToyPolicy(("a", "a"), 1, lambda x, y: 0.0), "vocabulary"),
        (
            lambda p: toy.ToyPolicy(("a",), 1, lambda x, y: 0.0, prompt_probabilities=[0.5]),
            "prompt_probabilities",
        ),
    ],
)
def test_errors_name_the_argument(policy, call, message):
    with pytest.raises(ValueError, match=message):
        call(policy)


def test_hasty_research_is_right_by_chance():
    policy = toy.hasty_research()
    p = policy.probabilities().detach()
    assert p.sum().item() == pytest.approx(1, abs=1e-14)
    by_hand = {"answer": 0.4, "think answer": 0.4, "think search answer": 0.8, "think think think think": 0}
    for said, right in by_hand.items():
        chosen = torch.tensor([text == said for text in policy.texts])
        assert (p * policy.rewards)[chosen].sum().item() / p[chosen].sum().item() == pytest.approx(right, abs=1e-12)
    assert policy.token_distribution()[0, 2] > 2 / 3  # answers at once
