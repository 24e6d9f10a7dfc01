"""Trajectories: every sampled token trained once in its own context, one advantage a trajectory."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_worlds import float64_model

from course_lib import (
    Call,
    Segment,
    SegmentBatch,
    Trajectory,
    group_relative_advantages,
    grpo_loss,
    leave_one_out_advantages,
    reinforce_loss,
    segments,
    stepwise_batch,
    token_log_probs,
    token_weights,
    trajectory_advantages,
)

VOCABULARY = 5
EXACT = {"rtol": 0, "atol": 1e-10}
ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=4)


@st.composite
def trajectories(draw):
    """A run of an agent that appends to its context, cuts it, rewrites it, or starts over, call after call."""
    calls, context = [], draw(ids)
    for _ in range(draw(st.integers(0, 5))):
        output = draw(ids)
        log_probs = [-(1 + token) / 4 for token in output]
        calls.append(Call(context, output, log_probs))
        transcript, added = context + output, draw(ids)
        context = draw(
            st.sampled_from([transcript + added, transcript[: len(context)] + added, added, transcript[1:], context])
        )
    return Trajectory(calls, reward=draw(st.integers(0, 2)) / 2, group_id=draw(st.integers(0, 1)))


def made(trajectory):
    """(tokens before, token, log-probability) for every token the policy produced."""
    return Counter(
        (tuple(call.context + call.output[:k]), token, call.log_probs[k])
        for call in trajectory.calls
        for k, token in enumerate(call.output)
    )


def trained(rows):
    return Counter(
        (tuple(row.tokens[:t]), token, row.log_probs[t])
        for row in rows
        for t, token in enumerate(row.tokens)
        if row.mask[t]
    )


# --- calls ----------------------------------------------------------------------------------------------------


def test_an_agent_may_go_on_appending_to_its_lists():
    context, output = [1, 2], [3]
    call = Call(context, output)
    context.append(9)
    output.append(9)
    assert (call.context, call.output, call.log_probs) == ([1, 2], [3], None)


def test_tensors_and_tuples_become_lists():
    call = Call(torch.tensor([1, 2]), (torch.tensor(3), 4), torch.tensor([-0.5, -1.5]))
    assert call == Call([1, 2], [3, 4], [-0.5, -1.5])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([1], "hello"), "output: expected token ids .integers., got 'hello'"),
        (([1.5], [2]), "context: expected token ids"),
        (([1], 2), "output: expected token ids"),
        (([1], [-100]), "output: expected token ids ≥ 0, got -100"),
        (([1], [2, 3], [-0.5]), "log_probs: expected 2 values, one for each of output, got 1"),
        (([1], [2], [math.nan]), r"log_probs: expected finite values, got \[nan\]"),
        (([1], [2], [-math.inf]), "log_probs: expected finite values"),
    ],
)
def test_a_call_refuses_what_is_no_token(arguments, message):
    with pytest.raises(ValueError, match=message):
        Call(*arguments)


# --- segments -------------------------------------------------------------------------------------------------


def test_an_append_only_agent_is_its_transcript():
    calls = [Call([1, 2], [3, 4], [-0.1, -0.2]), Call([1, 2, 3, 4, 8, 9], [5], [-0.3])]
    (row,) = segments(Trajectory(calls, 1.0, 0))
    assert row == Segment([1, 2, 3, 4, 8, 9, 5], [0, 0, 1, 1, 0, 0, 1], [0, 0, -0.1, -0.2, 0, 0, -0.3])
    assert [r.tokens for r in segments(Trajectory(calls, 1.0, 0), merge_prefixes=False)] == [
        [1, 2, 3, 4],
        [1, 2, 3, 4, 8, 9, 5],
    ]


def test_an_edited_context_starts_a_new_segment():
    calls = [Call([1, 2], [3]), Call([1, 7], [4]), Call([1, 7, 4, 8], [5]), Call([1, 2, 3, 6], [6])]
    rows = segments(Trajectory(calls, 1.0, 0))
    assert [(r.tokens, r.mask) for r in rows] == [
        ([1, 2, 3], [0, 0, 1]),
        ([1, 7, 4, 8, 5], [0, 0, 1, 0, 1]),
        ([1, 2, 3, 6, 6], [0, 0, 0, 0, 1]),  # goes on from the first call, not from the one just before
    ]


def test_only_the_preceding_call_is_a_prefix():
    """The same call twice: the second does not contain the first one's output, so it stands on its own."""
    rows = segments(Trajectory([Call([1], [2]), Call([1], [2])], 1.0, 0))
    assert [(r.tokens, r.mask) for r in rows] == [([1, 2], [0, 1])] * 2


def test_sampled_ids_are_trained_even_if_decoding_would_merge_them():
    """The policy sampled "he" + "llo"; decoded and encoded again that is the one token "hello"."""
    prompt, he, llo, hello, answer = 0, 1, 2, 3, 4
    kept = Trajectory([Call([prompt], [he, llo]), Call([prompt, he, llo, 9], [answer])], 1.0, 0)
    (row,) = segments(kept)
    assert [t for t, m in zip(row.tokens, row.mask, strict=True) if m] == [he, llo, answer]
    rewritten = Trajectory([Call([prompt], [he, llo]), Call([prompt, hello, 9], [answer])], 1.0, 0)
    assert [(r.tokens, r.mask) for r in segments(rewritten)] == [
        ([prompt, he, llo], [0, 1, 1]),
        ([prompt, hello, 9, answer], [0, 0, 0, 1]),
    ]


@pytest.mark.parametrize("merge_prefixes", [True, False])
def test_an_empty_output_trains_nothing(merge_prefixes):
    calls = [Call([1], []), Call([1, 2], [3])]
    rows = segments(Trajectory(calls, 1.0, 0), merge_prefixes=merge_prefixes)
    assert sum(sum(row.mask) for row in rows) == 1
    assert len(rows) == (1 if merge_prefixes else 2)
    assert segments(Trajectory([], 1.0, 0), merge_prefixes=merge_prefixes) == []


@settings(max_examples=1200)
@given(trajectories(), st.booleans())
def test_every_sampled_token_is_trained_once_in_its_own_context(trajectory, merge_prefixes):
    rows = segments(trajectory, merge_prefixes=merge_prefixes)
    assert trained(rows) == made(trajectory)
    assert all(len(r.tokens) == len(r.mask) == len(r.log_probs) for r in rows)
    assert all(p == 0 for r in rows for p, m in zip(r.log_probs, r.mask, strict=True) if not m)
    if merge_prefixes:
        assert len(rows) <= len(trajectory.calls)
    else:
        assert [r.tokens for r in rows] == [c.context + c.output for c in trajectory.calls]


@st.composite
def broken_prefixes(draw):
    """An append-only agent, but for one call: there a token of the transcript is another one, or the end is missing."""
    before, after = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    some = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4)
    calls, transcript = [], draw(some)
    for j in range(before + after):
        if j == before:
            k = draw(st.integers(0, len(transcript) - 1))
            other = (transcript[k] + draw(st.integers(1, VOCABULARY - 1))) % VOCABULARY
            transcript = draw(st.sampled_from([[*transcript[:k], other, *transcript[k + 1 :], 0], transcript[:k]]))
        elif j:
            transcript = transcript + draw(ids)
        output = draw(some)
        calls.append(Call(transcript, output, [-(1 + token) / 4 for token in output]))
        transcript = transcript + output
    return Trajectory(calls, 1.0, 0), before


@settings(max_examples=300)
@given(broken_prefixes())
def test_one_different_token_is_no_prefix(broken):
    trajectory, before = broken
    rows = segments(trajectory)
    assert [row.tokens for row in rows] == [
        trajectory.calls[j].context + trajectory.calls[j].output for j in (before - 1, len(trajectory.calls) - 1)
    ]
    assert trained(rows) == made(trajectory)


@given(trajectories())
def test_segments_leave_the_calls_alone(trajectory):
    before = [(list(c.context), list(c.output), list(c.log_probs)) for c in trajectory.calls]
    segments(trajectory)
    assert [(c.context, c.output, c.log_probs) for c in trajectory.calls] == before


# --- advantages -----------------------------------------------------------------------------------------------


def attempt(reward, calls=1, group_id="q"):
    return Trajectory([Call([1], [2])] * calls, reward, group_id)


def test_the_baseline_is_over_trajectories_not_steps():
    """Over steps a 3-call success and a 1-call failure would get +0.25 and −0.75."""
    both = [attempt(1.0, calls=3), attempt(0.0)]
    assert trajectory_advantages(both, scale="none").tolist() == [0.5, -0.5]
    assert trajectory_advantages(both).tolist() == [1.0, -1.0]
    assert trajectory_advantages(both, baseline="leave-one-out").tolist() == [1.0, -1.0]
    batch = stepwise_batch(both, pad_token_id=0, advantages=trajectory_advantages(both, scale="none"))
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]


def test_options_reach_the_function_they_belong_to():
    rewards, groups = [1.0, 0.0, 0.5, 1.0, None, 0.0], ["a", "b", "a", "b", "a", "a"]
    runs = [attempt(r, group_id=g) for r, g in zip(rewards, groups, strict=True)]
    options = {"scale": "std", "ddof": 1, "eps": 0.1, "missing": "ignore"}
    expected = group_relative_advantages(rewards, groups, **options)
    assert torch.equal(trajectory_advantages(runs, **options), expected)
    expected = leave_one_out_advantages(rewards, groups, missing="ignore")
    assert torch.equal(trajectory_advantages(runs, baseline="leave-one-out", missing="ignore"), expected)
    with pytest.raises(ValueError, match="rewards: expected a number"):
        trajectory_advantages(runs)
    with pytest.raises(ValueError, match='baseline: expected one of "mean", "leave-one-out", got \'rloo\''):
        trajectory_advantages(runs[:2], baseline="rloo")


# --- batches --------------------------------------------------------------------------------------------------


def test_a_batch_by_hand():
    runs = [
        Trajectory([Call([1], [2, 9], [-0.5, -0.25]), Call([1, 2, 9, 4], [9], [-1.0]), Call([9], [9], [-2.0])], 1.0, 0),
        Trajectory([Call([1], [3], [-3.0])], 0.0, 0),
    ]
    batch = stepwise_batch(runs, pad_token_id=9)
    assert batch.tokens.tolist() == [[1, 2, 9, 4, 9], [9, 9, 9, 9, 9], [1, 3, 9, 9, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 1, 1, 0, 1], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert batch.log_probs.tolist() == [[0, -0.5, -0.25, 0, -1], [0, -2, 0, 0, 0], [0, -3, 0, 0, 0]]
    assert batch.advantages.tolist() == [1.0, 1.0, -1.0]
    assert batch.owners.tolist() == [0, 0, 1]


@given(st.lists(trajectories(), max_size=4), st.booleans(), st.integers(0, VOCABULARY - 1))
def test_columns_refer_to_the_same_token(runs, merge_prefixes, pad):
    batch = stepwise_batch(runs, pad_token_id=pad, merge_prefixes=merge_prefixes)
    lengths = batch.attention_mask.sum(1).tolist()
    columns = batch.tokens, batch.mask, batch.log_probs
    rows = [Segment(*(c[i, :n].tolist() for c in columns)) for i, n in enumerate(lengths)]
    assert trained(rows) == sum((made(t) for t in runs), Counter())
    assert torch.equal(batch.attention_mask, batch.attention_mask.sort(1, descending=True).values)  # right-padded
    assert not (batch.mask & (batch.attention_mask == 0)).any()
    assert (batch.tokens[batch.attention_mask == 0] == pad).all()
    assert torch.equal(batch.advantages, trajectory_advantages(runs)[batch.owners])
    assert batch.owners.tolist() == sorted(batch.owners.tolist())


def test_no_trajectories():
    batch = stepwise_batch([], pad_token_id=0)
    assert batch.tokens.shape == batch.mask.shape == (0, 0) and batch.owners.shape == (0,)
    assert reinforce_loss(batch.log_probs, batch.advantages, batch.mask).item() == 0


def test_to_moves_every_tensor():
    batch = stepwise_batch([attempt(1.0), attempt(0.0)], pad_token_id=0).to("meta")
    assert {tensor.device.type for tensor in vars(batch).values()} == {"meta"}


def test_a_call_without_log_probs_cannot_pass_for_one_with():
    """Zeros would be a claim that every token had probability 1."""
    batch = stepwise_batch([attempt(1.0), attempt(0.0)], pad_token_id=0)
    new = torch.full(batch.tokens.shape, -1.0)
    reinforce_loss(new, batch.advantages, batch.mask)
    with pytest.raises(ValueError, match="old_log_probs: expected finite values at active tokens, got nan"):
        grpo_loss(new, batch.log_probs, batch.advantages, batch.mask)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pad_token_id": None}, "pad_token_id: expected token ids .integers., got .None."),
        ({"pad_token_id": -1}, "pad_token_id: expected token ids ≥ 0, got -1"),
        ({"pad_token_id": 0, "advantages": [1.0]}, r"advantages: expected shape \(2,\)"),
        ({"pad_token_id": 0, "advantages": torch.ones(2, 3)}, r"advantages: expected shape \(2,\)"),
    ],
)
def test_batch_errors(options, message):
    with pytest.raises(ValueError, match=message):
        stepwise_batch([attempt(1.0), attempt(0.0)], **options)


# --- one idea: what is trained is the same, however it is laid out --------------------------------------------


def causal_log_probs(embedding, head, tokens):
    """A differentiable policy whose next token depends on the whole prefix, its order included."""
    position = torch.arange(1, tokens.shape[1] + 1, dtype=embedding.dtype)[:, None]
    seen = torch.cumsum(embedding[tokens] / position, dim=1)
    before = torch.nn.functional.pad(seen, (0, 0, 1, 0))[:, :-1]
    return token_log_probs(before.tanh() @ head, tokens)


def batch_of(runs, **options):
    """Advantages in float64, so that what is compared below may be compared to 1e-10."""
    rewards = torch.tensor([run.reward for run in runs], dtype=torch.float64)
    advantages = group_relative_advantages(rewards, [run.group_id for run in runs])
    return stepwise_batch(runs, pad_token_id=0, advantages=advantages, **options)


def weights_of(batch, mode):
    return token_weights(batch.mask.double(), mode, owners=batch.owners)


def gradient(batch, weights, rows=slice(None)):
    """What some rows of a batch add to the gradient of the whole."""
    generator = torch.Generator().manual_seed(0)
    shapes = (VOCABULARY, 4), (4, VOCABULARY)
    parameters = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    new, old = causal_log_probs(*parameters, batch.tokens[rows]), batch.log_probs[rows].double()
    report = grpo_loss(new, old, batch.advantages[rows], batch.mask[rows], weights=weights[rows])
    return torch.cat([g.flatten() for g in torch.autograd.grad(report.loss, parameters)])


several = st.lists(trajectories(), min_size=1, max_size=4)
modes = st.sampled_from(["token-mean", "trajectory-mean"])


def assert_merging_changes_nothing(runs, mode):
    merged, apart = batch_of(runs), batch_of(runs, merge_prefixes=False)
    torch.testing.assert_close(
        gradient(merged, weights_of(merged, mode)), gradient(apart, weights_of(apart, mode)), **EXACT
    )


def assert_layout_changes_nothing(runs, mode, width, random):
    batch = batch_of(runs)
    expected = gradient(batch, weights_of(batch, mode))

    order = random.sample(range(len(runs)), len(runs))
    reordered = batch_of([runs[i] for i in order])
    torch.testing.assert_close(gradient(reordered, weights_of(reordered, mode)), expected, **EXACT)

    size = len(batch.tokens)
    wider = SegmentBatch(
        *(torch.nn.functional.pad(column, (0, width), value=fill) for column, fill in (
            (batch.tokens, VOCABULARY - 1), (batch.attention_mask, 0), (batch.mask, False), (batch.log_probs, math.nan),
        )),
        batch.advantages,
        batch.owners,
    )  # fmt: skip
    torch.testing.assert_close(gradient(wider, weights_of(wider, mode)), expected, **EXACT)

    rows = torch.tensor(random.sample(range(size), size), dtype=torch.long)
    weights, step = weights_of(batch, mode), random.randint(1, max(size, 1))
    parts = [gradient(batch, weights, part) for part in rows.split(step)] if size else [torch.zeros_like(expected)]
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, **EXACT)


@settings(max_examples=200)
@given(several, modes)
def test_merging_prefixes_changes_no_gradient(runs, mode):
    assert_merging_changes_nothing(runs, mode)


@settings(max_examples=100)
@given(several, modes, st.integers(0, 5), st.randoms(use_true_random=False))
def test_order_padding_and_micro_batches_change_no_gradient(runs, mode, width, random):
    assert_layout_changes_nothing(runs, mode, width, random)


@pytest.mark.slow
@settings(max_examples=2000)
@given(several, modes, st.integers(0, 5), st.randoms(use_true_random=False))
def test_neither_merging_nor_layout_changes_a_gradient_in_2000_cases(runs, mode, width, random):
    assert_merging_changes_nothing(runs, mode)
    assert_layout_changes_nothing(runs, mode, width, random)


@settings(max_examples=10)
@given(several, modes)
def test_merging_prefixes_changes_no_gradient_of_a_transformer(runs, mode):
    model, found = float64_model("llama", vocab_size=VOCABULARY), []
    for batch in (batch_of(runs), batch_of(runs, merge_prefixes=False)):
        mask = batch.mask.clone()
        mask[:, :1] = False  # an output in an empty context has no logits that predict its first token
        if not mask.any():
            return
        logits = model(batch.tokens).logits  # causal, padded on the right: needs no attention mask
        new = torch.nn.functional.pad(token_log_probs(logits[:, :-1], batch.tokens[:, 1:]), (1, 0))
        loss = reinforce_loss(new, batch.advantages, mask, weights=weights_of(batch, mode) * mask)
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    torch.testing.assert_close(*found, **EXACT)


@pytest.mark.parametrize("stepwise, single", [("token-mean", "token-mean"), ("trajectory-mean", "sequence-mean")])
def test_one_call_trajectories_are_plain_grpo(stepwise, single):
    prompt, responses, rewards = [1, 4], [[2], [3, 3], [0, 1, 2], [2, 2]], [1.0, 0.0, 0.0, 1.0]
    calls = [Call(prompt, y, [-0.5] * len(y)) for y in responses]
    runs = [Trajectory([call], reward, "x") for call, reward in zip(calls, rewards, strict=True)]
    batch = stepwise_batch(runs, pad_token_id=0)
    new = -torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    plain = grpo_loss(
        new,
        torch.full((4, 3), -0.5),
        group_relative_advantages(rewards, ["x"] * 4),
        torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]),
        mode=single,
    )
    behind_the_prompt = torch.nn.functional.pad(new, (2, 0))
    report = grpo_loss(
        behind_the_prompt, batch.log_probs, batch.advantages, batch.mask, mode=stepwise, owners=batch.owners
    )
    torch.testing.assert_close(report.loss, plain.loss)
    assert report.metrics == pytest.approx(plain.metrics)


def test_a_trajectory_has_one_vote_however_many_segments_it_has():
    runs = [attempt(1.0, calls=3), attempt(0.0)]
    batch = stepwise_batch(runs, pad_token_id=0)
    votes = token_weights(batch.mask, "trajectory-mean", owners=batch.owners).sum(1)
    torch.testing.assert_close(votes, torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2]))
