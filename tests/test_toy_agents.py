"""Stepwise GRPO and the usual shortcuts, against the exact gradient over all trajectories of small agents."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import toy
from course_lib.advantages import group_relative_advantages, leave_one_out_advantages
from course_lib.losses import grpo_loss, reinforce_loss, token_weights
from course_lib.trajectories import segments, stepwise_batch

EXACT = {"rtol": 0, "atol": 1e-10}


@pytest.fixture(params=[False, True], ids=["append-only", "edits"])
def agent(request):
    return toy.research_agent(edit_context=request.param)


def library(weights=None, *, mode=None, kept="trajectories", merge=True, advantages=leave_one_out_advantages):
    """An estimator made of nothing but the library's trajectories, segments and loss."""

    def estimator(samples):
        batch = stepwise_batch(
            getattr(samples, kept)(),
            pad_token_id=0,
            merge_prefixes=merge,
            advantages=advantages(samples.rewards, samples.group_ids),
        )
        mask = batch.mask.double()
        log_probs = samples.policy.sequence_log_probs(batch.tokens, mask)
        weights = mask / len(samples) if mode is None else None
        loss = reinforce_loss(
            log_probs, batch.advantages, mask, mode=mode or "sequence-sum", owners=batch.owners, weights=weights
        )
        return samples.policy.descent(loss)

    return estimator


def test_trajectories_are_a_distribution(agent):
    assert len(agent) == 22 == len(set(agent.texts))
    assert agent.probabilities().sum().item() == pytest.approx(1, abs=1e-14)
    uniform = agent.with_theta(torch.zeros_like(agent.theta))
    assert uniform.objective().item() == pytest.approx(2 / 3 * 1 / 2 + 1 / 3 * 1 / 3, abs=1e-14)


def test_contexts_are_what_the_agent_saw():
    texts = "red: search | blue | red"
    kept = [toy.research_agent(edit_context=edit) for edit in (False, True)]
    calls = [agent.outcomes[agent.texts.index(texts)].calls for agent in kept]
    assert [context for context, _ in calls[0]] == [
        ("question",),
        ("question", "search", "red"),
        ("question", "search", "red", "blue"),
    ]
    assert [context for context, _ in calls[1]] == [("question",), ("question", "search", "red"), ("question", "blue")]


def test_the_score_splits_by_call_and_the_environment_has_none(agent):
    def log_probability(theta):
        return agent.probabilities(theta).log()

    whole = torch.autograd.functional.jacobian(log_probability, agent.theta.detach())
    by_call = torch.stack([(agent.token_scores() * (agent.call_ids == j)[..., None]).sum(dim=1) for j in range(3)])
    torch.testing.assert_close(by_call.sum(dim=0), whole, **EXACT)
    assert agent.call_counts.tolist() == [len(o.calls) for o in agent.outcomes]
    moved = agent.with_theta(agent.theta)
    moved.chance = agent.chance * torch.linspace(0.5, 2, len(agent), dtype=torch.float64)
    torch.testing.assert_close(moved.scores(), agent.scores(), **EXACT)


def test_gradient_is_the_score_form_and_finite_differences(agent):
    by_scores = (agent.probabilities() * agent.rewards).detach() @ agent.scores()
    torch.testing.assert_close(agent.gradient(), by_scores, **EXACT)
    step = 1e-5
    for i in range(agent.theta.numel()):
        nudge = torch.zeros_like(agent.theta)
        nudge[i] = step
        slope = (agent.objective(agent.theta + nudge) - agent.objective(agent.theta - nudge)) / (2 * step)
        assert slope.item() == pytest.approx(agent.gradient()[i].item(), abs=1e-9)


def test_trajectories_carry_ids_and_log_probs_as_drawn(agent):
    samples = agent.every_outcome()
    for i, trajectory in enumerate(samples.trajectories()):
        outcome = agent.outcomes[i]
        assert trajectory.reward == agent.rewards[i]
        assert [[agent._texts[t] for t in c.context] for c in trajectory.calls] == [list(c) for c, _ in outcome.calls]
        assert [token for c in trajectory.calls for token in c.output] == agent.tokens[i][agent.mask[i].bool()].tolist()
        drawn = torch.tensor([value for c in trajectory.calls for value in c.log_probs], dtype=torch.float64)
        torch.testing.assert_close(drawn, samples.old_log_probs[i][agent.mask[i].bool()], **EXACT)


def test_an_append_only_agent_is_one_segment_and_an_editing_one_several():
    for edit, expected in ((False, {1: 1, 3: 1}), (True, {1: 1, 3: 2})):
        trajectories = toy.research_agent(edit_context=edit).every_outcome().trajectories()
        assert {len(t.calls): len(segments(t)) for t in trajectories} == expected


@pytest.mark.parametrize("merge", [True, False])
def test_segment_log_probs_are_the_trajectory_log_probs(agent, merge):
    samples = agent.every_outcome()
    batch = stepwise_batch(samples.trajectories(), pad_token_id=0, merge_prefixes=merge, advantages=samples.rewards)
    log_probs = agent.sequence_log_probs(batch.tokens, batch.mask)
    by_owner = torch.zeros(len(agent), dtype=torch.float64).index_add(0, batch.owners, log_probs.sum(dim=1))
    torch.testing.assert_close(by_owner, agent.log_probs().sum(dim=1), **EXACT)
    assert (log_probs[~batch.mask] == 0).all()


@pytest.mark.parametrize("merge", [True, False])
def test_stepwise_with_leave_one_out_over_trajectories_is_exact(agent, merge):
    found = toy.moments(agent, library(merge=merge), 2)
    assert found.exact
    torch.testing.assert_close(found.mean, agent.gradient(), **EXACT)


def test_stepwise_grpo_loss_is_exact_at_the_first_step(agent):
    """Ratio 1, so clipping does nothing and its gradient is that of REINFORCE."""
    samples = agent.every_outcome()
    batch = stepwise_batch(samples.trajectories(), pad_token_id=0, advantages=samples.rewards - 0.4)
    log_probs = agent.sequence_log_probs(batch.tokens, batch.mask)
    p = agent.probabilities().detach()[batch.owners]
    report = grpo_loss(log_probs, log_probs.detach(), batch.advantages, batch.mask, weights=batch.mask * p[:, None])
    torch.testing.assert_close(agent.descent(report.loss), agent.gradient(), **EXACT)
    torch.testing.assert_close(batch.log_probs.double(), log_probs.detach(), rtol=0, atol=1e-6)  # recorded in float32


def test_group_mean_is_a_shrunk_gradient(agent):
    def centred(rewards, group_ids):
        return group_relative_advantages(rewards, group_ids, scale="none")

    found = toy.moments(agent, library(advantages=centred), 2)
    torch.testing.assert_close(found.mean, agent.gradient() / 2, **EXACT)


def std_normalised(samples):
    centred = samples.rewards - samples.rewards.mean()
    return samples.policy_gradient(centred / centred.square().mean().clamp(min=1e-12).sqrt())


def test_std_division_rescales_the_gradient_of_one_prompt(agent):
    """For one prompt and binary rewards the mean depends on θ only through J(θ), so it points along ∇J."""
    found = toy.moments(agent, std_normalised, 4)
    assert found.exact and found.mean.norm() > 1.2 * agent.gradient().norm()
    assert torch.cosine_similarity(found.mean, agent.gradient(), dim=0).item() == pytest.approx(1, abs=1e-12)


def test_std_division_bends_the_gradient_of_two_prompts():
    """From four responses on: in a group of two or three, every informative group has the same std."""
    policy = toy.ToyPolicy(
        ("a", "b"), 2, lambda x, y: float(y == ("a", "a") if x == "hard" else y != ("a", "a")), prompts=("hard", "easy")
    )
    for group_size, bent in ((2, False), (3, False), (4, True)):
        mean = toy.moments(policy, std_normalised, group_size).mean
        cosine = torch.cosine_similarity(mean, policy.gradient(), dim=0).item()
        assert (cosine < 1 - 1e-5) == bent


def test_the_final_transcript_is_exact_for_an_append_only_agent():
    agent = toy.research_agent(edit_context=False)
    found = toy.moments(agent, library(kept="final_transcripts"), 2)
    torch.testing.assert_close(found.mean, agent.gradient(), **EXACT)


def test_the_final_transcript_of_an_editing_agent_never_trains_the_note():
    agent = toy.research_agent(edit_context=True)
    found = toy.moments(agent, library(kept="final_transcripts"), 2)
    size = len(agent.vocabulary)
    mean, exact = found.mean.view(-1, size), agent.gradient().view(-1, size)
    rows = {key: row for row, key in enumerate(agent.row_keys)}
    for colour in ("red", "blue"):
        note, answer = rows["question", "search", colour], rows["question", colour]
        assert mean[note].abs().max() == 0 and exact[note].abs().max() > 0.02  # the context in which notes are written
        torch.testing.assert_close(mean[answer], exact[answer], **EXACT)  # the last call is trained where it was made
    start = rows["question",]
    assert (mean - exact)[start].norm() > 0.3 * exact[
        start
    ].norm()  # notes are credited to the context before the search
    assert found.bias.norm() > 0.3 * agent.gradient().norm()


def test_the_final_transcript_of_an_editing_agent_shows_in_the_first_ratio():
    for edit in (False, True):
        samples = toy.research_agent(edit_context=edit).every_outcome()
        batch = stepwise_batch(samples.final_transcripts(), pad_token_id=0, advantages=samples.rewards)
        log_probs = samples.policy.sequence_log_probs(batch.tokens, batch.mask)
        drift = (log_probs - batch.log_probs).abs().max().item()
        assert drift > 0.1 if edit else drift < 1e-6


def test_stepwise_learns_what_the_final_transcript_cannot():
    agent = toy.research_agent(edit_context=True)
    options = {"steps": 120, "group_size": 16, "learning_rate": 1.0}
    assert toy.ascend(agent, library(), **options).objective[-1] > 0.9
    assert toy.ascend(agent, library(kept="final_transcripts"), **options).objective[-1] < 0.55


def step_mixed(rewards, call_counts):
    return rewards - (rewards * call_counts).sum() / call_counts.sum()


def test_a_baseline_over_steps_is_biased(agent):
    found = toy.moments(agent, lambda s: s.policy_gradient(step_mixed(s.rewards, s.call_counts)), 2)
    over_trajectories = toy.moments(agent, lambda s: s.policy_gradient(s.rewards - s.rewards.mean()), 2)
    assert found.exact and found.groups == 253
    cosine = torch.cosine_similarity(found.mean, agent.gradient(), dim=0)
    assert cosine < 0.999
    torch.testing.assert_close(over_trajectories.mean, agent.gradient() / 2, **EXACT)


def test_a_baseline_over_steps_climbs_against_the_share_of_calls_in_successes(agent):
    """E[(r − b) s] = ∇(J − E[nR] / (G · E[n])) up to order 1/G²: what is left over falls four times as fast as G."""
    theta = agent.theta.detach().requires_grad_()
    p, n = agent.probabilities(theta), agent.call_counts.double()
    (share,) = torch.autograd.grad((p * n * agent.rewards).sum() / (p * n).sum(), theta)
    rest = []
    for size in (2, 4):
        found = toy.moments(agent, lambda s: s.policy_gradient(step_mixed(s.rewards, s.call_counts)), size)
        assert found.exact
        rest.append((found.mean - (agent.gradient() - share / size)).norm() / agent.gradient().norm())
        assert rest[-1] < found.bias.norm() / agent.gradient().norm() / 4
    assert rest[1] < rest[0] / 3


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean", "trajectory-mean"])
def test_length_normalised_weights_follow_another_gradient(mode):
    agent = toy.research_agent(edit_context=True)
    found = toy.moments(agent, library(mode=mode, merge=False), 2)
    assert torch.cosine_similarity(found.mean, agent.gradient(), dim=0) < 0.999


def test_trajectory_mean_gives_trajectories_equal_weight_whatever_their_calls(agent):
    samples = agent.every_outcome()
    batch = stepwise_batch(samples.trajectories(), pad_token_id=0, merge_prefixes=False, advantages=samples.rewards)
    share = torch.zeros(22, dtype=torch.float64)
    per_row = {
        m: token_weights(batch.mask.double(), m, owners=batch.owners).sum(dim=1)
        for m in ("trajectory-mean", "token-mean")
    }
    torch.testing.assert_close(
        share.index_add(0, batch.owners, per_row["trajectory-mean"]), torch.full_like(share, 1 / 22)
    )
    by_tokens = share.index_add(0, batch.owners, per_row["token-mean"])
    torch.testing.assert_close(by_tokens, agent.call_counts / agent.call_counts.sum().double())


def test_training_on_the_environments_tokens_is_biased(agent):
    def on_everything(samples):
        batch = stepwise_batch(
            samples.trajectories(),
            pad_token_id=0,
            advantages=leave_one_out_advantages(samples.rewards, samples.group_ids),
        )
        mask = batch.attention_mask.double()
        mask[:, 0] = 0
        log_probs = samples.policy.sequence_log_probs(batch.tokens, mask)
        return samples.policy.descent(reinforce_loss(log_probs, batch.advantages, mask, weights=mask / len(samples)))

    found = toy.moments(agent, on_everything, 2)
    size = len(agent.vocabulary)
    before_the_answer = agent.row_keys.index(("question", "search"))
    assert found.bias.view(-1, size)[before_the_answer].norm() > 0.01
    others = [row for row in range(len(agent.row_keys)) if row != before_the_answer]
    if len(agent.row_keys) == 10:  # append-only: every other context stands once in the transcript, and stays exact
        torch.testing.assert_close(found.bias.view(-1, size)[others], torch.zeros(9, 3, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("tool_tokens", [2, 4])
def test_tool_tokens_in_a_shared_row_hold_the_search_at_one_over_their_number(tool_tokens):
    """The expected step of the logit of "search" is p·A·(1 − m·p), m tool tokens that share its row; masked: p·A."""

    def respond(world, context, output):
        return (*["page"] * (tool_tokens - 1), world) if output == ("search",) and len(context) == 1 else None

    def colour(context):
        return next((token for token in reversed(context) if token in ("red", "blue")), None)

    agent = toy.ToyAgent(
        ("search", "red", "blue", "page"), respond, lambda world, outputs: float(outputs[-1] == (world,)),
        worlds={"red": 0.5, "blue": 0.5}, max_calls=2, key=colour, seed=1,
    )  # fmt: skip
    samples, row = agent.every_outcome(), agent.row_keys.index(None)
    outcome_p, J = agent.probabilities().detach(), agent.objective().item()
    searched = torch.tensor([len(o.calls) == 2 for o in agent.outcomes])
    p = agent.token_distribution()[row, 0].item()
    gain = (outcome_p * samples.rewards)[searched].sum().item() / p - J
    batch = stepwise_batch(samples.trajectories(), pad_token_id=0, advantages=samples.rewards - J)
    for mask, m in ((batch.mask, 0), (batch.attention_mask.bool(), tool_tokens)):
        mask = mask & (torch.arange(mask.shape[1]) > 0)
        log_probs = agent.sequence_log_probs(batch.tokens, mask)
        loss = reinforce_loss(log_probs, batch.advantages, mask, weights=mask * outcome_p[batch.owners, None])
        found = agent.descent(loss).view(-1, 4)[row, 0].item()
        assert found == pytest.approx(p * gain * (1 - m * p), abs=1e-12)


def test_a_deterministic_environment():
    agent = toy.research_agent(edit_context=True, random_answers=False)
    assert agent.prompts == ("red question", "blue question") and len(agent) == 22
    assert set(zip(agent.prompt_ids.tolist(), agent.worlds, strict=True)) == {(0, "red"), (1, "blue")}
    found = toy.moments(agent, library(), 2)
    torch.testing.assert_close(found.mean, agent.gradient(), **EXACT)


def forget_the_question(context, output, answer):
    return (*context[1:], *output, *answer) or context


def shuffle(context, output, answer):
    return (*answer, *context[::-1], *output)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([toy.append_only, toy.keep_last, forget_the_question, shuffle]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_stepwise_segments_are_exact_for_any_way_of_editing(edit, max_calls, max_tokens, merge, seed):
    noise = torch.rand(5, generator=torch.Generator().manual_seed(seed)).tolist()

    def respond(world, context, output):
        if output == ("b", "b"):
            return None
        p = 0.1 + 0.8 * noise[(len(context) + len(output)) % 5]
        return {(world,): p, ("doc", "a"): 1 - p}

    agent = toy.ToyAgent(
        ("a", "b"), respond, lambda world, outputs: noise[len(outputs)] + float(outputs[-1][0] == world),
        worlds={"a": 0.3, "b": 0.7}, next_context=edit, max_calls=max_calls, max_tokens=max_tokens, end="a", seed=seed,
    )  # fmt: skip
    assert agent.probabilities().sum().item() == pytest.approx(1, abs=1e-12)
    samples = agent.every_outcome()
    batch = stepwise_batch(samples.trajectories(), pad_token_id=0, merge_prefixes=merge, advantages=samples.rewards)
    log_probs = agent.sequence_log_probs(batch.tokens, batch.mask)
    weights = batch.mask * agent.probabilities().detach()[batch.owners, None]
    loss = reinforce_loss(log_probs, batch.advantages, batch.mask, weights=weights)
    torch.testing.assert_close(agent.descent(loss), agent.gradient(), **EXACT)
    assert batch.mask.sum() == agent.mask.sum()


def test_a_single_call_policy_is_an_agent_of_one_call():
    policy = toy.deep_research()
    samples = policy.sample(2, 3)
    batch = stepwise_batch(samples.trajectories(), pad_token_id=0, advantages=samples.rewards)
    assert len(batch.tokens) == 6 and (batch.owners == torch.arange(6)).all()
    log_probs = policy.sequence_log_probs(batch.tokens, batch.mask)
    torch.testing.assert_close(log_probs.sum(dim=1), policy.log_probs(samples).sum(dim=1), **EXACT)
    assert [t.group_id for t in samples.trajectories()] == [0, 0, 0, 1, 1, 1]


def test_errors_name_what_is_missing(agent):
    tokens = torch.tensor([[agent.token_ids["question"], agent.token_ids["question"]]])
    with pytest.raises(ValueError, match=r"mask: 'question' after .* not in the policy's vocabulary"):
        agent.sequence_log_probs(tokens, torch.tensor([[0, 1]]))
    tokens = torch.zeros(1, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="tokens: expected contexts that occur"):
        agent.sequence_log_probs(tokens, torch.tensor([[0, 0, 0, 0, 0, 1]]))
    with pytest.raises(ValueError, match="worlds: expected positive probabilities"):
        toy.ToyAgent(("a",), lambda *_: None, lambda *_: 0.0, worlds={"w": 0.5}, max_calls=1)
