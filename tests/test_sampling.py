"""Sampling draws from the model's own distribution and records what it drew, with everything shared run once."""

import math

import numpy as np
import pytest
import torch
from small_worlds import NotesTask, letters_task, word_tokenizer

import course_lib.sampling as sampling
from course_lib.logprobs import response_log_probs
from course_lib.models import load_tiny_agent, tiny_model
from course_lib.research import RandomLibraries, ResearchTask
from course_lib.sampling import draw, replay, sample_replies, sample_trajectories, stop_token_ids
from course_lib.tasks import Problem

TOKENIZER = word_tokenizer()
MODELS = {name: tiny_model(name, vocab_size=len(TOKENIZER)) for name in ("llama", "qwen2", "gpt2")}
CONTEXTS = [[2, 3, 4], [2, 3, 4], [5], [2, 3], [2, 3, 4, 6, 7, 8]]


def play(task, count, **options):
    episodes = [task.open(task.training_problem(i // 2), TOKENIZER) for i in range(count)]
    options = {"temperature": 1.0, "max_new_tokens": 5, "seed": 3, **options}
    return sample_trajectories(MODELS["llama"], TOKENIZER, episodes, **options)


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_log_probs_are_those_of_the_plain_forward(architecture, temperature):
    model = MODELS[architecture]
    uniforms = np.random.default_rng(0).random((len(CONTEXTS), 6))
    replies = sample_replies(
        model, CONTEXTS, uniforms=uniforms, temperature=temperature, stop_ids=[{1}] * len(CONTEXTS)
    )
    outputs = [tokens for tokens, _ in replies]
    expected = response_log_probs(model, CONTEXTS, outputs, temperature=temperature, share_prompts=False)
    for row, (tokens, recorded) in enumerate(replies):
        assert recorded == pytest.approx(expected[row, : len(tokens)].tolist(), abs=1e-5)


def test_draw_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    grid = (torch.arange(8) + 0.5) / 8
    tokens, log_probs = draw(probabilities.log().repeat(8, 1), grid, 1.0)
    assert tokens.tolist() == [0, 0, 0, 0, 1, 1, 2, 3]
    assert torch.allclose(log_probs.exp(), probabilities[tokens])


def test_draw_at_the_edges():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]]).repeat(2, 1)
    tokens, log_probs = draw(logits, torch.tensor([0.0, 1 - 2**-24]), 1.0)
    assert tokens.tolist() == [0, 1]
    assert torch.isfinite(log_probs).all()
    rare = torch.tensor([[0.0, math.log(1e-9), -torch.inf], [-torch.inf, 0.0, 0.0]])  # 1 − 1e-9 is no float32 number
    assert draw(rare, torch.tensor([1 - 5e-10, 0.0], dtype=torch.float64), 1.0)[0].tolist() == [1, 1]


def test_a_half_precision_model_is_drawn_from_in_float32():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    half, single = (draw(given, torch.tensor([0.5]), 0.6) for given in (logits.bfloat16(), logits))
    assert all(map(torch.equal, half, single))


def test_draw_at_temperature_zero_takes_the_most_probable():
    tokens, log_probs = draw(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0.9]), 0.0)
    assert (tokens.item(), log_probs.item()) == (1, 0.0)


def test_frequencies_match_the_reported_probabilities():
    model = MODELS["llama"]
    count = 4000
    uniforms = np.random.default_rng(1).random((count, 1))
    replies = sample_replies(model, [[2, 3]] * count, uniforms=uniforms, temperature=1.0, stop_ids=[set()] * count)
    drawn = torch.tensor([tokens[0] for tokens, _ in replies])
    probabilities = model(input_ids=torch.tensor([[2, 3]])).logits[0, -1].softmax(-1)
    expected = probabilities * count
    observed = torch.bincount(drawn, minlength=len(probabilities))
    pooled = expected >= 5
    chi2 = ((observed - expected)[pooled] ** 2 / expected[pooled]).sum().item()
    freedom = int(pooled.sum())
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5


def test_a_trajectory_does_not_depend_on_what_shares_its_batch():
    whole = play(letters_task(), 12)
    part = play(letters_task(), 6)
    assert [t.calls[0].output for t in whole[:6]] == [t.calls[0].output for t in part]
    assert len({tuple(t.calls[0].output) for t in whole}) > 1


def test_the_ending_token_stays_and_ends_the_reply():
    ends = stop_token_ids(TOKENIZER, (".", "a")) | {1}
    assert ends == {1, *TOKENIZER.convert_tokens_to_ids([".", "a"])}
    task = letters_task(stop=(".", "a"))
    for trajectory in play(task, 24, max_new_tokens=12):
        (call,) = trajectory.calls
        assert not ends & set(call.output[:-1])
        assert call.output[-1] in ends or len(call.output) == 12
        assert call.truncated == (call.output[-1] not in ends)


def test_agents_are_stepped_together_and_see_their_own_contexts():
    task = NotesTask()
    for trajectory in play(task, 4):
        first, second, third = trajectory.calls
        assert second.context == [*first.context, *first.output, 5]
        assert third.context == [*first.context, *second.output]
        assert all(len(call.log_probs) == len(call.output) for call in trajectory.calls)


def test_every_call_draws_numbers_of_its_own(monkeypatch):
    seeds, uniforms = [], sampling._uniforms
    monkeypatch.setattr(sampling, "_uniforms", lambda seed, count: seeds.append(tuple(seed)) or uniforms(seed, count))
    calls = sum(len(trajectory.calls) for trajectory in play(NotesTask(), 4))
    assert len(set(seeds)) == len(seeds) == calls == 12


def test_groups_and_order():
    task = letters_task()
    trajectories = play(task, 6, group_ids=["p", "p", "q", "q", "r", "r"])
    assert [t.group_id for t in trajectories] == ["p", "p", "q", "q", "r", "r"]
    contexts = [task.open(task.training_problem(i // 2), TOKENIZER).context() for i in range(6)]
    assert [t.calls[0].context for t in trajectories] == contexts


def test_contexts_read_in_several_rows(monkeypatch):
    whole = play(letters_task(), 12)
    monkeypatch.setattr(sampling, "PREFILL_TOKENS", 5)
    assert [t.calls[0].output for t in play(letters_task(), 12)] == [t.calls[0].output for t in whole]


@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_without_a_tree_draws_the_same(monkeypatch, architecture):
    uniforms = np.random.default_rng(0).random((len(CONTEXTS), 6))
    options = {"uniforms": uniforms, "temperature": 1.0, "stop_ids": [{1}] * len(CONTEXTS)}
    shared = sample_replies(MODELS[architecture], CONTEXTS, **options)
    monkeypatch.setattr(sampling, "supports_tree", lambda model: False)
    plain = sample_replies(MODELS[architecture], CONTEXTS, **options)
    assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in shared]
    for (_, a), (_, b) in zip(shared, plain, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_greedy_replies_are_recorded_as_certain():
    trajectory = play(letters_task(), 2, temperature=0.0)[0]
    assert set(trajectory.calls[0].log_probs) == {0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected"),
        ({"temperature": float("nan")}, "temperature: expected"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1"),
        ({"group_ids": [1]}, "group_ids: expected one for each of 2"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        play(letters_task(), 2, **options)


def test_a_context_that_does_not_fit_is_refused():
    task = letters_task()
    episode = task.open(Problem("a " * 300, "a"), TOKENIZER)
    with pytest.raises(ValueError, match="context: expected at most 251 tokens"):
        sample_trajectories(MODELS["llama"], TOKENIZER, [episode], max_new_tokens=5)


def test_a_replay_of_another_episode_is_refused():
    task, (_, tokenizer) = ResearchTask(RandomLibraries(hops=1)), load_tiny_agent()
    answer = tokenizer.encode(" answer juice\n", add_special_tokens=False)
    for outputs, said in (([answer, answer], "expected 1 calls"), ([], "expected more than 0 calls")):
        with pytest.raises(ValueError, match=f"outputs: {said}"):
            replay(task.open(task.training_problem(0), tokenizer), outputs, tokenizer)
