"""The trainer learns, resumes bit for bit, and loses nothing."""

import json
import math
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_worlds import NotesTask, early, letters_task, word_tokenizer

import course_lib.training as training
from course_lib.checkpoints import CheckpointError
from course_lib.logprobs import supports_tree
from course_lib.losses import grpo_loss, token_weights
from course_lib.models import tiny_model
from course_lib.tasks import Problem, SingleTurnTask
from course_lib.training import GRPOConfig, GRPOTrainer
from course_lib.trajectories import Call, Trajectory, stepwise_batch

TOKENIZER = word_tokenizer()
QUICK = GRPOConfig(
    steps=4,
    prompts_per_step=4,
    group_size=4,
    max_new_tokens=2,
    temperature=1.0,
    max_resamples=0,
    learning_rate=1e-2,
    seed=5,
)


def trainer(task=None, *, model=None, **settings):
    model = model or tiny_model(vocab_size=len(TOKENIZER))
    return GRPOTrainer(model, TOKENIZER, task or letters_task(), replace(QUICK, **settings))


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_it_learns():
    run = trainer(steps=40, prompts_per_step=12, group_size=8)
    before = run.evaluate()
    history = run.train()
    assert history[-1]["reward"] > history[0]["reward"] + 0.3
    assert run.evaluate().correct > before.correct


def test_an_agent_of_many_calls_learns_with_the_same_trainer():
    history = trainer(NotesTask(), steps=25, prompts_per_step=8, group_size=8, max_new_tokens=4).train()
    assert history[-1]["reward"] > history[0]["reward"] + 0.1
    assert history[0]["calls"] == 3
    assert history[0]["segments"] > 8


def test_the_first_step_has_ratio_one_and_the_second_pass_has_not():
    assert trainer(steps=1).train()[0]["ratio_mean"] == 1.0
    assert trainer(steps=1, updates_per_batch=2).train()[0]["ratio_mean"] != 1.0


@pytest.mark.filterwarnings("ignore:tokens_per_row")
@pytest.mark.parametrize("tokens_per_row", [4, 1024])
def test_the_largest_ratio_is_that_of_all_rows(tokens_per_row):
    run = trainer(tokens_per_row=tokens_per_row)
    assert run.update(run.sample_batch()[0])["ratio_max"] == 1.0
    run = trainer(updates_per_batch=2, tokens_per_row=tokens_per_row)
    seen, score = [], run._score
    run._score = lambda *args: seen.append(score(*args).log_probs.detach()) or score(*args)
    found = run.update(run.sample_batch()[0])["ratio_max"]
    half = len(seen) // 2
    expected = max((new - old).exp().max() for old, new in zip(seen[:half], seen[half:], strict=True))
    assert found == pytest.approx(float(expected)) and found > 1.01


def test_the_kl_from_a_reference_is_measured_without_a_penalty():
    other = tiny_model(vocab_size=len(TOKENIZER), seed=9)
    task, model = letters_task(), tiny_model(vocab_size=len(TOKENIZER))
    watched = GRPOTrainer(model, TOKENIZER, task, replace(QUICK, steps=1), reference_model=other)
    plain = trainer(task, steps=1)
    assert watched.train()[0]["kl"] > 0.01
    assert plain.train()[0]["kl"] == 0
    assert torch.equal(weights(watched), weights(plain))


@pytest.mark.parametrize("stop", [(), (".",)])
def test_a_reply_is_truncated_if_nothing_but_the_limit_ended_it(stop):
    run = trainer(letters_task(stop=stop), max_new_tokens=3, prompts_per_step=12)
    ends = {TOKENIZER.eos_token_id, *TOKENIZER.convert_tokens_to_ids(list(stop))}
    replies = [trajectory.calls[0].output for trajectory in run.sample_groups(12)]
    run.problems_drawn = 0
    _, counts = run.sample_batch()
    assert counts["truncated"] == np.mean([reply[-1] not in ends for reply in replies])
    assert 0 < counts["truncated"] < np.mean([len(reply) == 3 for reply in replies])  # some end there by themselves


def test_dropout_in_the_model_does_not_break_the_first_step():
    model = tiny_model("gpt2", vocab_size=len(TOKENIZER), attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    model.train()
    metrics = trainer(model=model, steps=1).train()[0]
    assert metrics["sampler_mismatch"] < 1e-5


def test_sampler_and_scorer_agree():
    assert all(m["sampler_mismatch"] < 1e-5 for m in trainer(temperature=0.7).train())


def gradient(run, trajectories):
    """The gradient of the first pass over `trajectories`; the weights stay as they are."""
    seen = []
    run._optimizer_step = lambda: seen.append([p.grad.clone() for p in run.model.parameters()]) or 0.0
    run.update(trajectories)
    return torch.cat([g.flatten() for g in seen[0]])


def test_rows_too_short_for_a_group_are_told_of():
    run = trainer(prompts_per_step=6, tokens_per_row=4)
    with pytest.warns(UserWarning, match="tokens_per_row: 4 cuts groups apart"):
        run.update(run.sample_batch()[0])


@pytest.mark.filterwarnings("ignore:tokens_per_row")
@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean", "sequence-sum", "fixed-length", "trajectory-mean"])
@pytest.mark.parametrize("task", [letters_task(), NotesTask()], ids=["one call", "many calls"])
def test_rows_and_order_change_no_gradient(mode, task):
    sampler = trainer(task)
    trajectories, _ = sampler.sample_batch()
    whole = gradient(trainer(task, mode=mode), trajectories)
    cut = gradient(trainer(task, mode=mode, tokens_per_row=4), trajectories)
    reversed_ = gradient(trainer(task, mode=mode), trajectories[::-1])
    assert torch.allclose(whole, cut, atol=1e-5)
    assert torch.allclose(whole, reversed_, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_gradient_is_that_of_the_plain_loss(beta):
    task = letters_task()
    trajectories, _ = trainer(task).sample_batch()
    reference = tiny_model(vocab_size=len(TOKENIZER), seed=9)
    run = GRPOTrainer(
        tiny_model(vocab_size=len(TOKENIZER)), TOKENIZER, task, replace(QUICK, beta=beta), reference_model=reference
    )
    found = gradient(run, trajectories)
    run.model.zero_grad()
    batch = stepwise_batch(trajectories, pad_token_id=1)

    def log_probs(model):
        logits = model(input_ids=batch.tokens, attention_mask=batch.attention_mask).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(chosen, (1, 0))

    new = log_probs(run.model)
    grpo_loss(
        new,
        new.detach(),
        batch.advantages,
        batch.mask,
        ref_log_probs=log_probs(reference).detach(),
        beta=beta,
        weights=token_weights(batch.mask, "token-mean"),
    ).loss.backward()
    expected = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    assert torch.allclose(found, expected, atol=2e-5)


def test_dead_groups_are_drawn_again_then_dropped_and_counted():
    problems = [Problem(f"{letter} ?", "never" if letter in "abc" else "any") for letter in "abcdefghij"]
    task = SingleTurnTask(problems, [], lambda text, answer: 0.0 if answer == "never" else float(len(text) % 2))
    run = trainer(task, max_resamples=3, prompts_per_step=5, group_size=8, max_new_tokens=3)
    trajectories, counts = run.sample_batch()
    groups = {t.group_id for t in trajectories}
    assert counts["groups_sampled"] - counts["groups_dropped"] == len(groups)
    assert counts["groups_dropped"] > 0
    rewards = {group: {t.reward for t in trajectories if t.group_id == group} for group in groups}
    assert all(len(values) > 1 for values in rewards.values())
    assert len(groups) == 5 or counts["groups_sampled"] > 15


def test_a_batch_of_dead_groups_changes_nothing():
    run = trainer(SingleTurnTask([Problem("a ?", "a")], [], lambda text, answer: 1.0), steps=2, max_resamples=0)
    before = weights(run).clone()
    history = run.train()
    assert torch.equal(weights(run), before)
    assert [m["groups_dropped"] for m in history] == [4, 4]


def test_a_batch_without_signal_or_without_tokens_is_no_update():
    run = trainer()
    before = weights(run).clone()
    alike = [Trajectory([Call([2], [3], [-1.0])], 1.0, 0), Trajectory([Call([2], [4], [-1.0])], 1.0, 0)]
    silent = [Trajectory([Call([2], [])], 1.0, 0), Trajectory([Call([2], [])], 0.0, 0)]
    assert run.update(alike) == run.update(silent) == {}
    assert torch.equal(weights(run), before)
    mixed = run.update([silent[0], Trajectory([Call([2], [4], [-1.0])], 0.0, 0)])
    assert math.isfinite(mixed["entropy"])


def settings_of(task):
    return {"one call": {}, "many calls": {"max_new_tokens": 3}}[task]


@pytest.mark.parametrize("task", ["one call", "many calls"])
def test_resuming_equals_not_stopping_to_the_last_bit(tmp_path, task):
    def make(folder):
        made = letters_task() if task == "one call" else NotesTask()
        return trainer(
            made, output_dir=str(tmp_path / folder), checkpoint_every=2, max_resamples=1, **settings_of(task)
        )

    whole = make("whole")
    whole.train()
    first = make("cut")
    for _ in first.steps():
        if first.step == 2:
            first.save()
        if first.step == 3:  # killed with a step beyond the checkpoint already written down
            break
    second = make("cut")
    assert second.resume() == 2
    second.train()
    assert torch.equal(weights(whole), weights(second))
    assert whole.history == second.history
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "cut/metrics.jsonl").read_bytes()
    for a, b in zip(whole.optimizer.state.values(), second.optimizer.state.values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_same_seed_gives_the_same_run_and_another_does_not():
    assert trainer().train() == trainer().train()
    assert trainer().train() != trainer(seed=6).train()


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, capsys):
    options = {"output_dir": str(tmp_path), "checkpoint_every": 1, "keep_checkpoints": 3}
    trainer(**options).train()
    newest = tmp_path / "checkpoints/step-000004/model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    assert trainer(**options).resume() == 3
    assert "step-000004 is damaged (model.safetensors" in capsys.readouterr().out


def test_ctrl_c_ends_after_the_step_with_a_checkpoint(tmp_path, capsys):
    run = trainer(output_dir=str(tmp_path))
    run.train(on_step=lambda metrics: signal.raise_signal(signal.SIGINT) if metrics["step"] == 2 else None)
    assert run.step == 2
    assert (tmp_path / "checkpoints/step-000002").is_dir()
    assert trainer(output_dir=str(tmp_path)).resume() == 2
    assert "stopping after this step" in capsys.readouterr().out


def test_a_second_ctrl_c_ends_at_once():
    def twice(metrics):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started the tests in the background
    with pytest.raises(KeyboardInterrupt):
        trainer().train(on_step=twice)
    assert signal.getsignal(signal.SIGINT) is before


def test_it_trains_in_another_thread_too():
    histories = []
    thread = threading.Thread(target=lambda: histories.append(trainer(steps=1).train()))
    thread.start()
    thread.join()
    assert len(histories[0]) == 1


def test_metrics_and_times_are_written_as_lines(tmp_path):
    history = trainer(output_dir=str(tmp_path), eval_every=2).train()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == history
    assert "held_out" in history[1]
    assert len((tmp_path / "times.jsonl").read_text().splitlines()) == 4
    assert json.loads((tmp_path / "config.json").read_text())["group_size"] == 4


def test_gradient_checkpointing_changes_nothing():
    plain, recomputed = trainer(steps=2), trainer(steps=2, gradient_checkpointing=True)
    plain.train()
    recomputed.train()
    assert torch.allclose(weights(plain), weights(recomputed), atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("task", [letters_task(), NotesTask()], ids=["one call", "many calls"])
def test_bfloat16_computes_and_float32_remembers(task, checkpointing):
    """Matrix products are bfloat16; weights, moments, gradients and log-probabilities stay float32."""
    run = trainer(task, steps=2, precision="bfloat16", gradient_checkpointing=checkpointing, max_new_tokens=3)
    supports_tree(run.model)  # its one look at the model is not part of a step
    products, scored = set(), []
    run.model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *args: products.add(args[-1].dtype))
    score = run._score
    run._score = lambda *args: scored.append(score(*args)) or scored[-1]
    history = run.train()
    assert products == {torch.bfloat16}
    assert {part.dtype for made in scored for part in (made.log_probs, made.entropy)} == {torch.float32}
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert {m.dtype for state in run.optimizer.state.values() for m in state.values()} == {torch.float32}
    assert all(math.isfinite(value) for metrics in history for value in metrics.values())
    # Sampler and scorer round differently, by a unit of bfloat16 here and there.
    assert 0 < history[0]["sampler_mismatch"] < 0.05
    calls = [call for trajectory in run.sample_batch()[0] for call in trajectory.calls]
    values = torch.tensor([value for call in calls for value in call.log_probs], dtype=torch.float64)
    assert torch.equal(values, values.float().double()) and not torch.equal(values, values.bfloat16().double())


def test_bfloat16_runs_as_a_tree(recwarn):
    """Whether a model can be run as a tree is asked in its own precision; in bfloat16 two ways differ by rounding."""
    model = tiny_model(vocab_size=len(TOKENIZER), initializer_range=1.0)  # logits far from 0
    trainer(model=model, steps=1, precision="bfloat16").train()
    assert not [w for w in recwarn if "without sharing prefixes" in str(w.message)]


@pytest.mark.parametrize(("device", "precision"), [("cuda", "high"), ("cpu", None)])
def test_tf32_is_asked_for_on_a_gpu_only(monkeypatch, device, precision):
    asked = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    model = tiny_model(vocab_size=len(TOKENIZER))
    monkeypatch.setattr(type(model), "device", torch.device(device))
    GRPOTrainer(model, TOKENIZER, letters_task(), QUICK)
    assert asked == ([precision] if precision else [])


def test_learning_rate_warms_up_and_decays():
    run = trainer(steps=10, warmup_steps=4, learning_rate=1.0, final_learning_rate=0.5)
    rates = []
    for run.step in range(10):
        rates.append(run.learning_rate())
    assert rates[0] == pytest.approx(1 / 5)
    assert rates[:5] == sorted(rates[:5])
    assert rates[9] == pytest.approx(1 - 0.5 * 0.9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "group_size: expected at least 2 .*no one to be compared with"),
        ({"mode": "mean"}, "mode: expected one of token-mean, sequence-mean"),
        ({"kl_estimator": "k4"}, "kl_estimator: expected one of k1, k2, k3, got 'k4'"),
        ({"temperature": 0.0}, "temperature: expected more than 0"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a finite number"),
        ({"steps": 0}, "steps: expected at least 1"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(QUICK, **settings)


@pytest.mark.parametrize("value", [None, float("nan"), "1"])
def test_a_reward_that_is_no_number_is_named(value):
    task = SingleTurnTask([Problem("a ?", "a")], [], lambda text, answer: value)
    with pytest.raises(ValueError, match=r"reward: expected a finite number .*'a \?'"):
        trainer(task).train()


def test_a_reward_that_raises_is_named():
    with pytest.raises(ValueError, match=r"reward: .* raised ZeroDivisionError"):
        trainer(SingleTurnTask([Problem("a ?", "a")], [], lambda text, answer: 1 / 0)).train()


def test_several_replies_to_each_held_out_problem():
    run = trainer()
    one, three = run.evaluate(temperature=1.0), run.evaluate(temperature=1.0, samples=3)
    assert (one.samples, three.samples, three.total) == (1, 3, 12)
    assert three.replies[::3] == one.replies
    prompts = [prompt for prompt, *_ in three.replies]
    assert prompts == [problem.prompt for problem in run.held_out for _ in range(3)]
    assert three.correct == sum(reward >= 1 for *_, reward in three.replies)
    assert len({reply for _, reply, _ in three.replies}) > len({reply for _, reply, _ in one.replies})
    assert three == run.evaluate(temperature=1.0, samples=3)


@pytest.mark.parametrize(("temperature", "samples"), [(0.0, 2), (1.0, 0)])
def test_samples_that_make_no_sense(temperature, samples):
    with pytest.raises(ValueError, match=f"samples: expected 1, or more at a temperature > 0, got {samples} at"):
        trainer().evaluate(temperature=temperature, samples=samples)


def test_scoring_is_timed_where_there_is_a_reference_model(monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(seconds)))
    plain, watched = trainer(steps=1), trainer(steps=1, beta=0.1)
    plain.train()
    watched.train()
    assert plain.times == [{"step": 1, "sampling": 1.0, "updating": 1.0, "all": 3.0}]
    assert watched.times == [{"step": 1, "sampling": 1.0, "updating": 2.0, "scoring": 1.0, "all": 5.0}]


def test_nothing_held_out_is_said():
    with pytest.raises(ValueError, match="held_out_problems: expected at least one"):
        trainer(SingleTurnTask([Problem("a ?", "a")], [], early)).evaluate()


def test_a_folder_of_another_run_is_refused(tmp_path):
    trainer(output_dir=str(tmp_path), steps=1).train()
    with pytest.raises(ValueError, match="output_dir: expected a new or empty folder"):
        trainer(output_dir=str(tmp_path), steps=1).train()


def test_resuming_needs_a_checkpoint_of_the_same_run(tmp_path):
    with pytest.raises(CheckpointError, match="found no checkpoint"):
        trainer(output_dir=str(tmp_path)).resume()
    trainer(output_dir=str(tmp_path), steps=1).train()
    with pytest.raises(CheckpointError, match=r"learning_rate: expected 0\.01 as in the run"):
        trainer(output_dir=str(tmp_path), steps=1, learning_rate=1.0).resume()
    with pytest.raises(CheckpointError, match=r"task: expected 'SingleTurnTask' as in the run .*, got 'NotesTask'"):
        trainer(NotesTask(), output_dir=str(tmp_path), steps=1).resume()


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    run = trainer(output_dir=str(tmp_path), checkpoint_every=1)
    steps = run.steps()
    next(steps)
    kept = run.save()
    next(steps)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(CheckpointError, match=r"step 2 could not be written .* earlier checkpoints are untouched"):
        run.save()
    assert [path.name for path in Path(kept).parent.iterdir()] == ["step-000001"]


def test_an_infinite_gradient_stops_before_the_weights(monkeypatch):
    run = trainer()
    before = weights(run).clone()
    monkeypatch.setattr("course_lib.training.clip_gradients", lambda *args: float("nan"))
    with pytest.raises(FloatingPointError, match="gradient: expected a finite norm in step 1"):
        run.train()
    assert torch.equal(weights(run), before)



@pytest.mark.parametrize("name", training.PRESETS)
def test_every_preset_runs_when_made_small(name):
    small = replace(training.PRESETS[name], steps=1, prompts_per_step=2, group_size=4, max_new_tokens=2)
    GRPOTrainer(tiny_model(vocab_size=len(TOKENIZER)), TOKENIZER, letters_task(), small).train()
