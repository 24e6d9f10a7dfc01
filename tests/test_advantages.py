"""Advantages: closed forms, groups by id, nothing silent, and the baseline's effect on the gradient enumerated."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib import (
    efficiency_advantages,
    generalized_advantages,
    group_relative_advantages,
    informative_groups,
    leave_one_out_advantages,
)

ALL = (group_relative_advantages, leave_one_out_advantages, informative_groups)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def binary(successes, size):
    return double([1.0] * successes + [0.0] * (size - successes))


@st.composite
def batches(draw, min_size=1):
    """(rewards, ids): some groups of some sizes in any order."""
    ids = draw(st.lists(st.integers(0, 3), min_size=min_size, max_size=14))
    rewards = draw(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=len(ids), max_size=len(ids)))
    return double(rewards), ids


# --- group-relative and leave-one-out -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8, 32])
def test_binary_rewards_follow_the_closed_forms(size):
    for successes in range(1, size):
        p = successes / size
        advantages = group_relative_advantages(binary(successes, size), [0] * size)
        expected = [math.sqrt((1 - p) / p)] * successes + [-math.sqrt(p / (1 - p))] * (size - successes)
        torch.testing.assert_close(advantages, double(expected), rtol=1e-14, atol=0)


@pytest.mark.parametrize("successes, expected", [(2, 3.873), (30, 0.258)])
def test_a_rare_success_counts_more(successes, expected):
    advantages = group_relative_advantages(binary(successes, 32), [0] * 32)
    assert round(advantages[0].item(), 3) == expected


def test_sample_std_and_eps_as_in_trl():
    rewards = double([0.2, 0.5, 0.0, 0.9])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(group_relative_advantages(rewards, [0] * 4, ddof=1, eps=1e-4), expected)


@given(batches())
def test_group_mean_is_a_shrunken_leave_one_out(batch):
    """r_i − mean(r) = (G−1)/G · (r_i − mean of the others)."""
    rewards, ids = batch
    size = double([ids.count(i) for i in ids])
    centred = group_relative_advantages(rewards, ids, scale="none")
    torch.testing.assert_close(centred, (size - 1) / size * leave_one_out_advantages(rewards, ids))


@given(batches())
def test_against_one_group_at_a_time(batch):
    rewards, ids = batch
    expected = torch.zeros_like(rewards)
    for group in set(ids):
        rows = torch.tensor([i == group for i in ids])
        r = rewards[rows]
        if len(r.unique()) > 1:
            expected[rows] = (r - r.mean()) / r.std(correction=0)
    torch.testing.assert_close(group_relative_advantages(rewards, ids), expected, rtol=1e-12, atol=1e-12)


@given(batches(), st.randoms(use_true_random=False))
@pytest.mark.parametrize("function", ALL)
def test_shuffling_the_batch_leaves_each_row_alone(function, batch, random):
    rewards, ids = batch
    order = list(range(len(ids)))
    random.shuffle(order)
    shuffled = function(rewards[order], [ids[i] for i in order])
    torch.testing.assert_close(shuffled, function(rewards, ids)[order], rtol=1e-12, atol=1e-12)


@given(batches(), st.floats(0.1, 100), st.floats(-100, 100))
def test_dividing_by_std_forgets_scale_and_offset(batch, scale, offset):
    rewards, ids = batch
    torch.testing.assert_close(
        group_relative_advantages(rewards * scale + offset, ids),
        group_relative_advantages(rewards, ids),
        rtol=1e-8,
        atol=1e-8,
    )


@given(batches())
def test_each_group_sums_to_zero_with_unit_std(batch):
    rewards, ids = batch
    advantages = group_relative_advantages(rewards, ids)
    informative = informative_groups(rewards, ids)
    for group in set(ids):
        rows = torch.tensor([i == group for i in ids])
        assert advantages[rows].sum().item() == pytest.approx(0, abs=1e-12)
        assert advantages[rows].square().mean().item() == pytest.approx(float(informative[rows][0]), abs=1e-12)


def test_groups_of_different_sizes_anywhere_in_the_batch():
    rewards = [1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    ids = ["a", "b", "c", "a", "b", "c", "a", "c", "b", "a", "c"]  # 4, 3 and 4 rows
    advantages = group_relative_advantages(rewards, ids, scale="none")
    expected = {"a": 2 / 4, "b": 1 / 3, "c": 1 / 4}
    means = torch.tensor([r - expected[i] for r, i in zip(rewards, ids, strict=True)])
    torch.testing.assert_close(advantages, means)


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([3, 3, -1, -1]),
        torch.tensor([0.5, 0.5, 1.5, 1.5]),
        ["x", "x", "y", "y"],
        [("x", 1), ("x", 1), ("x", 2), ("x", 2)],
        [torch.tensor(3), torch.tensor(3), torch.tensor(4), torch.tensor(4)],
        np.array([3, 3, 4, 4]),
        [None, None, "y", "y"],
    ],
)
def test_ids_are_integers_or_any_hashables(ids):
    assert group_relative_advantages([1.0, 0.0, 5.0, 3.0], ids).tolist() == [1.0, -1.0, 1.0, -1.0]


# --- groups without a signal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reward", [0.3, 0.1, -7.7, 0.0, 1e-30, 1e4])
def test_equal_rewards_give_exactly_zero(reward, dtype):
    """Eight times 0.3 has a mean that is not 0.3 in float32; over a tiny eps that residue once made 30."""
    rewards = torch.full((8,), reward, dtype=dtype)
    for eps in (0.0, 1e-8):
        assert group_relative_advantages(rewards, [0] * 8, eps=eps).tolist() == [0.0] * 8
    assert leave_one_out_advantages(rewards, [0] * 8).tolist() == [0.0] * 8
    assert not informative_groups(rewards, [0] * 8).any()


def test_rewards_that_differ_by_rounding_count_as_equal():
    rewards = double([0.1 + 0.2, 0.3])
    assert rewards[0] != rewards[1]
    assert group_relative_advantages(rewards, [0, 0]).tolist() == [0.0, 0.0]
    assert leave_one_out_advantages(rewards, [0, 0]).tolist() == [0.0, 0.0]
    assert informative_groups(rewards, [0, 0]).tolist() == [False, False]
    assert informative_groups(double([1.0, 1.0 + 2e-6]), [0, 0]).tolist() == [True, True]


def test_a_group_of_one_says_nothing():
    for ddof in (0, 1):
        assert group_relative_advantages([5.0, 1.0, 0.0], [0, 1, 1], ddof=ddof)[0].item() == 0.0
    assert leave_one_out_advantages([5.0, 1.0, 0.0], [0, 1, 1]).tolist() == [0.0, 1.0, -1.0]
    assert informative_groups([5.0, 1.0, 0.0], [0, 1, 1]).tolist() == [False, True, True]


def test_an_empty_batch():
    for function in ALL:
        assert function([], []).shape == (0,)


# --- numbers --------------------------------------------------------------------------------------------------


def test_bfloat16_rewards_are_computed_in_float32():
    rewards = torch.tensor([1, 1, 1, 1.0078125], dtype=torch.bfloat16)
    advantages = group_relative_advantages(rewards, [0] * 4, ddof=1)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [-0.5, -0.5, -0.5, 1.5]


@pytest.mark.parametrize("scale, tolerance", [(1e-30, 1e-6), (1e30, 1e-6), (1e-44, 0.2)])
def test_rewards_whose_squares_leave_float32(scale, tolerance):
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    expected = group_relative_advantages(rewards, [0] * 4)
    scaled = group_relative_advantages(rewards * scale, [0] * 4)
    torch.testing.assert_close(scaled, expected, rtol=tolerance, atol=0)


def test_a_large_offset_costs_no_digits():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]) + 2**16
    small = group_relative_advantages([1.0, 0.0, 0.0, 1.0, 0.0], [0] * 5)
    assert torch.equal(group_relative_advantages(rewards, [0] * 5), small)


@pytest.mark.parametrize(
    "given_dtype, result",
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ],
)
def test_dtypes_and_untouched_inputs(given_dtype, result):
    rewards, ids = torch.tensor([1, 0, 1, 1], dtype=given_dtype), torch.tensor([0, 0, 1, 1])
    before = rewards.clone(), ids.clone()
    assert group_relative_advantages(rewards, ids).dtype == result
    assert leave_one_out_advantages(rewards, ids).dtype == result
    assert informative_groups(rewards, ids).dtype == torch.bool
    assert torch.equal(rewards, before[0]) and torch.equal(ids, before[1])


def test_gradients_are_finite_also_where_the_std_is_zero():
    rewards = double([0.3, 0.3, 1.0, 0.0, 2.0]).requires_grad_()
    for ddof in (0, 1):
        group_relative_advantages(rewards, [0, 0, 1, 1, 2], ddof=ddof).square().sum().backward()
        assert rewards.grad.isfinite().all()
    assert torch.autograd.gradcheck(
        lambda r: group_relative_advantages(r, [0, 0, 0, 1, 1]), double([1, 0, 3, 2, 5]).requires_grad_()
    )


# --- missing rewards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards", [[1.0, None, 0.0, 0.5], [1.0, math.nan, 0.0, 0.5], torch.tensor([1.0, math.nan, 0.0, 0.5])]
)
@pytest.mark.parametrize("function", ALL)
def test_a_missing_reward_raises_or_is_left_out(function, rewards):
    with pytest.raises(ValueError, match=r'rewards: expected a number or missing="ignore".*row 1'):
        function(rewards, [0, 0, 0, 0])
    ignored = function(rewards, [0, 0, 0, 0], missing="ignore")
    complete = function([1.0, 0.0, 0.5], [0, 0, 0])
    assert ignored.tolist() == [complete[0], 0, complete[1], complete[2]]


@pytest.mark.parametrize("function", ALL)
def test_nothing_left_in_a_group_and_one_left(function):
    assert function([None, None, 1.0, None], [0, 0, 1, 1], missing="ignore").tolist() == [0, 0, 0, 0]


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards, ids, options, message",
    [
        ([1.0] * 7, [0] * 8, {}, "rewards: expected 8 values, one for each of group_ids, got 7"),
        ([1.0, math.inf], [0, 0], {}, r"rewards: expected finite values, got \[inf\]"),
        ([1.0, -math.inf], [0, 0], {"missing": "ignore"}, r"rewards: expected finite values, got \[-inf\]"),
        (double([-5e307, 5e307, 5e307]), [0, 0, 0], {}, "rewards: expected finite values"),  # their sum would not be
        (["one"], [0], {}, "rewards: expected numbers"),
        (5.0, [0], {}, r"rewards: expected shape \(N,\), got \(\)"),
        (torch.ones(2, 1), [0, 0], {}, r"rewards: expected shape \(N,\), got \(2, 1\)"),
        (torch.ones(1, dtype=torch.complex64), [0], {}, "rewards: expected real numbers"),
        ([1.0], [[0]], {}, "group_ids: expected one integer or hashable for each row"),
        ([1.0], torch.tensor([[0]]), {}, "group_ids: expected one integer or hashable for each row"),
        ([1.0], 0, {}, "group_ids: expected one integer or hashable for each row"),
        ([1.0, 0.0], [0, math.nan], {}, "group_ids: expected an id for each row, got nan"),
        ([1.0], [0], {"missing": "skip"}, 'missing: expected one of "error", "ignore", got \'skip\''),
        ([1.0], [0], {"scale": "sd"}, 'scale: expected one of "std", "none", got \'sd\''),
        ([1.0], [0], {"ddof": 2}, "ddof: expected 0 .* or 1 .*, got 2"),
        ([1.0], [0], {"ddof": -1}, "ddof: expected 0 .* or 1 .*, got -1"),
        ([1.0], [0], {"eps": -1e-6}, "eps: expected a finite number ≥ 0, got -1e-06"),
        ([1.0], [0], {"eps": math.nan}, "eps: expected a finite number ≥ 0, got nan"),
        ([1.0], [0], {"eps": math.inf}, "eps: expected a finite number ≥ 0, got inf"),
        ([1.0], [0], {"eps": None}, "eps: expected a finite number ≥ 0, got None"),
    ],
)
def test_errors_name_the_argument_and_what_came(rewards, ids, options, message):
    with pytest.raises(ValueError, match=message):
        group_relative_advantages(rewards, ids, **options)


# --- efficiency among successes -------------------------------------------------------------------------------


def test_cheap_successes_get_more_and_failures_nothing():
    costs, solved = double([100, 300, 50, 200, 7]), [True, True, False, True, False]
    assert efficiency_advantages(costs, solved, ["q"] * 5).tolist() == [0.5, -0.5, 0, 0, 0]


def test_a_very_dear_success_is_clipped_and_a_free_one_gets_one():
    found = efficiency_advantages(double([0, 0, 0, 8]), [1, 1, 1, 1], [0] * 4)  # c̄ = 2, unclipped (2 − 8)/2 = −3
    assert found.tolist() == [1, 1, 1, -1]


@pytest.mark.parametrize("solved", [[0, 0, 0], [0, 1, 0]])
def test_efficiency_needs_two_successes(solved):
    assert efficiency_advantages([1.0, 2.0, 3.0], solved, [0, 0, 0]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("cost", [0.0, 0.3, 1e30])
def test_equal_costs_have_no_efficiency(cost):
    assert efficiency_advantages([cost] * 7, [True] * 7, [0] * 7).tolist() == [0] * 7
    assert efficiency_advantages([0.1 + 0.2, 0.3], [True, True], [0, 0]).tolist() == [0, 0]


def test_efficiency_reads_no_cost_of_a_failure():
    found = efficiency_advantages([None, math.inf, -5.0, 1.0, 3.0], [0, 0, 0, 1, 1], [0] * 5)
    assert found.tolist() == [0, 0, 0, 0.5, -0.5]
    assert efficiency_advantages([], [], []).shape == (0,)
    assert efficiency_advantages(torch.tensor([1, 3]), torch.tensor([True, True]), [0, 0]).dtype == torch.float32


@given(batches(), st.data())
def test_efficiency_against_one_group_at_a_time(batch, data):
    costs, ids = batch[0].abs(), batch[1]
    solved = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    expected = torch.zeros_like(costs)
    for group in set(ids):
        rows = torch.tensor([i == group for i in ids]) & solved
        if rows.sum() > 1 and costs[rows].sum() > 0:
            expected[rows] = ((costs[rows].mean() - costs[rows]) / costs[rows].mean()).clamp(-1, 1)
    found = efficiency_advantages(costs, solved, ids)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(efficiency_advantages(8.0 * costs, solved, ids), found)  # the unit does not matter
    order = data.draw(st.permutations(range(len(ids))))
    shuffled = efficiency_advantages(costs[order], solved[order], [ids[i] for i in order])
    torch.testing.assert_close(shuffled, found[order], rtol=1e-12, atol=1e-12)
    assert (found[~solved] == 0).all() and (found.abs() <= 1).all()


def test_efficiency_climbs_the_price_of_a_success():
    """In the limit of large groups: E[A_eff ∇log π] = −J ∇log c̄ with c̄ the mean cost of a success."""
    logits = double([0.3, -0.5, 1.1, 0.2]).requires_grad_()
    rewards, costs = double([1, 0, 1, 1]), double([2, 9, 3, 1])
    p = logits.softmax(0)
    J, price = p @ rewards, (p * rewards) @ costs / (p @ rewards)
    A = rewards * (price - costs) / price
    found = torch.autograd.grad(((p * A).detach() * p.log()).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(found, -J.detach() * torch.autograd.grad(price.log(), logits)[0])


@pytest.mark.parametrize(
    "costs, solved, ids, message",
    [
        ([1.0, 2.0], [1, 1, 1], [0, 0], r"successes: expected shape \(2,\) .* each of costs, got \(3,\)"),
        ([1.0, 2.0], [1, 1], [0], "costs: expected 1 values, one for each of group_ids, got 2"),
        ([1.0, None], [1, 1], [0, 0], r"costs: expected a finite number ≥ 0 for every success, got \[nan\]"),
        ([1.0, -2.0], [1, 1], [0, 0], r"costs: expected a finite number ≥ 0 for every success, got \[-2.0\]"),
        ([1.0, math.inf], [1, 1], [0, 0], r"costs: expected a finite number ≥ 0 for every success, got \[inf\]"),
        ([1.0, 2.0], [1, 0.5], [0, 0], "successes: expected true or false, 1 or 0, got"),
        (5.0, [1], [0], r"costs: expected shape \(N,\), got \(\)"),
    ],
)
def test_efficiency_errors(costs, solved, ids, message):
    with pytest.raises(ValueError, match=message):
        efficiency_advantages(costs, solved, ids)


# --- what a baseline does to the gradient, by enumeration -----------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_expected_gradient_of_both_baselines(size):
    """Over every group of `size` samples: leave-one-out is unbiased, the group mean is (G−1)/G of the gradient."""
    logits, rewards = double([0.3, -0.5, 1.1]), double([1.0, 0.0, 0.4])
    p = logits.softmax(0)
    score = torch.eye(3, dtype=torch.float64) - p  # row y: ∇ log π(y)
    exact = (p * rewards) @ score
    expected = dict.fromkeys((leave_one_out_advantages, group_relative_advantages), 0)
    for group in itertools.product(range(3), repeat=size):
        y = torch.tensor(group)
        for function in expected:
            options = {} if function is leave_one_out_advantages else {"scale": "none"}
            advantages = function(rewards[y], [0] * size, **options)
            expected[function] = expected[function] + p[y].prod() * (advantages @ score[y]) / size
    torch.testing.assert_close(expected[leave_one_out_advantages], exact)
    torch.testing.assert_close(expected[group_relative_advantages], (size - 1) / size * exact)


# --- generalised advantages -----------------------------------------------------------------------------------


def reference_gae(rewards, values, mask, gamma, lam):
    """One row: take the active tokens out, go backwards over them, put the results back."""
    kept = [t for t, m in enumerate(mask) if m]
    advantages, following, advantage = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(kept):
        advantage = rewards[t] + gamma * following - values[t] + gamma * lam * advantage
        advantages[t], following = advantage, values[t]
    return advantages


@st.composite
def episodes(draw):
    rows, width = draw(st.integers(0, 3)), draw(st.integers(0, 6))

    def numbers(element):
        row = st.lists(element, min_size=width, max_size=width)
        return draw(st.lists(row, min_size=rows, max_size=rows))

    number = st.floats(-3, 3)
    shape = (rows, width)
    rewards, values = (double(numbers(number)).reshape(shape) for _ in range(2))
    return rewards, values, torch.tensor(numbers(st.booleans()), dtype=torch.bool).reshape(shape)


@given(episodes(), st.floats(0, 1), st.floats(0, 1))
def test_gae_skips_what_the_policy_did_not_produce(episode, gamma, lam):
    rewards, values, mask = episode
    rows = zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)
    expected = double([reference_gae(*row, gamma, lam) for row in rows]).reshape(rewards.shape)
    junk = torch.where(mask, 0.0, math.nan)
    advantages, returns = generalized_advantages(rewards + junk, values - junk, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0))


def test_gae_over_a_gap():
    rewards, values = double([[0, 0, 0, 1]]), double([[0.5, 9, 9, 0.6]])
    advantages, _ = generalized_advantages(rewards, values, torch.tensor([[1, 0, 0, 1]]))
    torch.testing.assert_close(advantages, double([[0.48, 0, 0, 0.4]]))


@given(episodes())
def test_gae_extremes(episode):
    """λ = 1 is the return minus the critic; λ = 0 and a perfect critic leave nothing to learn."""
    rewards, values, mask = episode
    to_go = torch.where(mask, rewards, 0).flip(1).cumsum(1).flip(1)
    advantages, returns = generalized_advantages(rewards, values, mask, lam=1.0)
    torch.testing.assert_close(returns, torch.where(mask, to_go, 0))
    torch.testing.assert_close(advantages, torch.where(mask, to_go - values, 0))
    perfect, _ = generalized_advantages(rewards, to_go, mask, lam=0.0)
    torch.testing.assert_close(perfect, torch.zeros_like(rewards))


def test_gae_gradient_never_sees_the_gap():
    rewards = double([[0, math.inf, 1]])
    values = double([[0.5, math.nan, 0.2]]).requires_grad_()
    advantages, returns = generalized_advantages(rewards, values, torch.tensor([[1, 0, 1]]), gamma=0.9)
    (advantages.square().sum() + returns.sum()).backward()
    assert values.grad.isfinite().all() and values.grad[0, 1] == 0


@pytest.mark.parametrize("options", [{"gamma": 1.1}, {"gamma": -0.1}, {"lam": math.nan}, {"lam": 2}])
def test_gae_options_out_of_range(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name}: expected a number in \[0, 1\]"):
        generalized_advantages(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2), **options)


@pytest.mark.parametrize(
    "rewards, values, mask, message",
    [
        (torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 2), r"values: expected shape \(1, 2\)"),
        (torch.ones(1, 2), torch.ones(1, 2), torch.ones(2), r"mask: expected shape \(B, T\), got \(2,\)"),
        (torch.ones(1, 2), torch.full((1, 2), math.nan), torch.ones(1, 2), "values: expected finite values"),
    ],
)
def test_gae_errors(rewards, values, mask, message):
    with pytest.raises(ValueError, match=message):
        generalized_advantages(rewards, values, mask)
