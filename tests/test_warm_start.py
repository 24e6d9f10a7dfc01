import math

import pytest
import torch
from small_worlds import float64_model, word_tokenizer

from course_lib.losses import reinforce_loss
from course_lib.models import load_tiny_agent, tiny_model
from course_lib.research import RandomLibraries, ResearchTask, expert_trajectory
from course_lib.sampling import sample_trajectories
from course_lib.trajectories import Call, Trajectory, stepwise_batch
from course_lib.warm_start import warm_start

EXPERT = [
    Trajectory([Call([5, 6], [7, 1]), Call([5, 6, 7, 1, 3], [8, 9, 1])], reward=1.0, group_id=0),
    Trajectory([Call([5, 4], [6, 1]), Call([2], [9, 1])], reward=1.0, group_id=1),
]


def trained(batches, **options):
    model, losses = float64_model("llama", vocab_size=12), []
    options = {"learning_rate": lambda step: 0.0, "max_grad_norm": math.inf} | options
    warm_start(model, batches, on_step=lambda step, loss: losses.append(loss), **options)
    return model, losses


def test_loss_is_the_mean_negative_log_probability_of_what_the_expert_wrote():
    model, losses = trained([EXPERT])
    total, count = 0.0, 0
    for call in (call for trajectory in EXPERT for call in trajectory.calls):
        logits = model(torch.tensor([call.context + call.output])).logits[0].log_softmax(-1)
        for k, token in enumerate(call.output):
            total, count = total - logits[len(call.context) + k - 1, token].item(), count + 1
    assert losses == [pytest.approx(total / count, abs=1e-10)]


@pytest.mark.parametrize("tokens_per_row", [1, 6, 1000])
def test_rows_change_nothing(tokens_per_row):
    whole, _ = trained([EXPERT] * 3, learning_rate=lambda step: 0.01)
    cut, _ = trained([EXPERT] * 3, learning_rate=lambda step: 0.01, tokens_per_row=tokens_per_row)
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_gradient_is_that_of_reinforce_with_advantage_one():
    model = float64_model("llama", vocab_size=12)
    batch = stepwise_batch(EXPERT, pad_token_id=0, advantages=[1.0, 1.0])
    logits = model(batch.tokens).logits.log_softmax(-1)[:, :-1]
    log_probs = torch.nn.functional.pad(logits.gather(-1, batch.tokens[:, 1:, None])[..., 0], (1, 0))
    reinforce_loss(log_probs, batch.advantages, batch.mask, mode="token-mean").backward()
    start, gradients = float64_model("llama", vocab_size=12), {}
    for name, parameter in start.named_parameters():
        parameter.register_hook(lambda g, name=name: gradients.update({name: gradients.get(name, 0) + g}))
    warm_start(start, [EXPERT], learning_rate=lambda step: 0.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-10)


def test_the_rate_of_each_step_is_asked_for():
    asked = []
    trained([EXPERT] * 4, learning_rate=lambda step: asked.append(step) or 0.001)
    assert asked == [0, 1, 2, 3]


def test_the_expert_of_the_research_task_is_learned():
    tokenizer = word_tokenizer()
    task = ResearchTask(RandomLibraries(held_out=0), context_budget=100)
    attempts = [expert_trajectory(task, task.training_problem(index), tokenizer) for index in range(2)]
    model, losses = float64_model("llama", vocab_size=len(tokenizer)), []
    warm_start(model, [attempts] * 12, learning_rate=lambda step: 0.01, on_step=lambda _, loss: losses.append(loss))
    assert losses[-1] < losses[0] / 2


def test_the_tiny_agent_looks_things_up_and_writes_noise():
    model, tokenizer = load_tiny_agent()
    assert 200_000 < model.num_parameters() < 500_000
    task = ResearchTask(RandomLibraries(hops=2, held_out=100))
    exam = task.held_out_problems()
    played = sample_trajectories(
        model, tokenizer, [task.open(problem, tokenizer) for problem in exam], max_new_tokens=8, seed=0
    )
    firsts = [tokenizer.decode(trajectory.calls[0].output).strip() for trajectory in played]
    right = [f"open {problem.asked.split(' of ')[-1]}" for problem in exam]
    assert sum(a == b for a, b in zip(firsts, right, strict=True)) >= 95
    assert 3 <= sum(trajectory.reward for trajectory in played) <= 25


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_grad_norm", value) for value in (0, -1, math.nan, None, "1")),
        *(("weight_decay", value) for value in (-1, math.inf, "0")),
        *(("tokens_per_row", value) for value in (0, 1.5)),
        *(("learning_rate", lambda step, value=value: value) for value in (-1, math.nan, 10**400, None)),
    ],
)
def test_a_number_out_of_its_range_changes_nothing(name, value):
    model = tiny_model()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"{name}: expected"):
        warm_start(model, [EXPERT], **{"learning_rate": lambda step: 0.01, name: value})
    assert all(map(torch.equal, before, model.parameters()))


def test_nothing_to_imitate_and_nothing_to_train_are_told():
    with pytest.raises(ValueError, match="batches: expected at least one token of the expert in batch 0"):
        warm_start(tiny_model(), [[Trajectory([Call([5], [])], 1.0, 0)]], learning_rate=lambda step: 0.01)
    with pytest.raises(ValueError, match="model: expected parameters that are trained"):
        warm_start(tiny_model().requires_grad_(False), [EXPERT], learning_rate=lambda step: 0.01)


def test_a_gradient_that_is_not_finite_stops_before_the_weights(monkeypatch):
    model = tiny_model()
    before = [p.clone() for p in model.parameters()]
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: torch.tensor(math.nan))
    with pytest.raises(FloatingPointError, match="gradient: expected a finite norm in step 0"):
        warm_start(model, [EXPERT], learning_rate=lambda step: 0.01)
    assert all(map(torch.equal, before, model.parameters()))


def test_gradients_that_were_left_over_do_not_count():
    fresh, used = tiny_model(), tiny_model()
    for parameter in used.parameters():
        parameter.grad = torch.ones_like(parameter)
    for model in (fresh, used):
        warm_start(model, [EXPERT], learning_rate=lambda step: 0.01)
    assert all(map(torch.equal, fresh.parameters(), used.parameters()))
