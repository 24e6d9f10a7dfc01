"""The recipe of part B, data/research/train.py, from warm start to recorded run, with a tiny model."""

import copy
import importlib.util
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib import research
from course_lib.models import add_adapter, find_small_model, load_small_model, tiny_model, word_level_tokenizer
from course_lib.runs import read_run
from course_lib.sampling import replay

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("research_train", ROOT / "data" / "research" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    """A token for each word of the corpus and of the environment."""
    folder = ROOT / "data" / "research"
    rows = [json.loads(line) for name in ("documents", "questions") for line in (folder / f"{name}.jsonl").open()]
    spoken = ("QUESTION", "NOTES", "ACTION", "PAGE", "NOTHING", "FOUND", "NO_ACTION", "NO_PAGE", "NO_HITS")
    frame = [*(getattr(research, name) for name in spoken), "search open answer ; captain author of"]
    texts = [*frame, *(row.get(key, "") for row in rows for key in ("title", "text", "prompt", "asked", "answer"))]
    return word_level_tokenizer(sorted({word for text in texts for word in text.split()}))


@pytest.mark.slow
def test_from_warm_start_to_a_recorded_run(recipe, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=32, max_position_embeddings=512, initializer_range=0.05)
    warm_start = replace(recipe.LAPTOP.warm_start, steps=12, questions=1, learning_rate=0.02)
    base = copy.deepcopy(model)
    recipe.teach(model, tokenizer, warm_start, tmp_path / "warm")
    kept = json.loads((tmp_path / "warm" / "warm_start.json").read_text())
    assert kept["noise"] == warm_start.noise and len(kept["losses"]) == 12
    assert kept["losses"][-1] < kept["losses"][0] - 1
    recipe.shrink(tmp_path / "warm", base, tmp_path / "adapter.safetensors")
    assert json.loads((tmp_path / "warm_start.json").read_text()) == kept
    grpo = replace(recipe.LAPTOP.grpo, steps=2, prompts_per_step=2, group_size=2, eval_problems=4)
    settings = replace(recipe.LAPTOP, grpo=grpo, groups=3)
    for mode in recipe.MODES:
        warm = copy.deepcopy(base)
        add_adapter(warm, tmp_path / "adapter.safetensors")
        recipe.record(mode, settings, warm, tokenizer, tmp_path / mode)
        run = read_run(tmp_path / mode)
        assert run.made_by["task"] == f"ResearchTask(Corpus, {mode})"
        assert (run.before.total, run.before.samples, run.config["steps"]) == (4, 1, 2)
        assert (run.samples_after.total, run.samples_after.samples) == (6, 2)
        assert not (tmp_path / mode / "checkpoints").exists()
        replay_all(recipe.make_task(mode), tokenizer, run)


@pytest.mark.slow
def test_a_stopped_recording_goes_on_where_it_stopped(recipe, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    grpo = replace(recipe.LAPTOP.grpo, steps=3, prompts_per_step=2, group_size=2, eval_problems=2)
    settings = replace(recipe.LAPTOP, grpo=grpo, groups=1)
    train = recipe.GRPOTrainer.train

    def record(folder):
        model = tiny_model(vocab_size=len(tokenizer), hidden_size=32, max_position_embeddings=512)
        recipe.record("edit_context", settings, model, tokenizer, folder)

    record(tmp_path / "whole")
    with monkeypatch.context() as once:
        stop = lambda metrics: signal.raise_signal(signal.SIGINT)  # noqa: E731
        once.setattr(recipe.GRPOTrainer, "train", lambda trainer: train(trainer, on_step=stop))
        with pytest.raises(SystemExit, match="edit_context: stopped after step 1; the same command goes on"):
            record(tmp_path / "stopped")
    assert (tmp_path / "stopped" / "checkpoints" / "step-000001").exists()
    record(tmp_path / "stopped")
    whole, stopped = (read_run(tmp_path / name) for name in ("whole", "stopped"))
    assert (stopped.metrics, stopped.before, stopped.after) == (whole.metrics, whole.before, whole.after)
    assert [session["from_step"] for session in stopped.made_by["sessions"]] == [0, 1]


def replay_all(task, tokenizer, run):
    """Every recorded attempt, played again from its sampled tokens alone, has the reward and last reply it had."""
    questions = task.held_out_problems()
    for exam in (run.before, run.after, run.samples_before, run.samples_after):
        for place, (outputs, (prompt, reply, reward)) in enumerate(zip(exam.outputs, exam.replies, strict=True)):
            question = questions[place // exam.samples]
            attempt = replay(task.open(question, tokenizer), outputs, tokenizer)
            assert (question.prompt, attempt.reward) == (prompt, reward)
            assert tokenizer.decode(attempt.calls[-1].output, skip_special_tokens=True) == reply


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted((ROOT / "data" / "runs").glob("research-*")), ids=lambda folder: folder.name)
def test_the_shipped_records_are_what_their_sampled_tokens_say(recipe, folder, monkeypatch):
    if not os.path.exists(find_small_model()):
        pytest.skip("the small model is not on this machine")
    monkeypatch.chdir(ROOT)
    run = read_run(folder)
    mode = run.made_by["task"].removeprefix("ResearchTask(Corpus, ").removesuffix(")")
    assert len(run.before.outputs) == run.before.total and len(run.samples_after.outputs) == run.samples_after.total
    replay_all(recipe.make_task(mode), load_small_model(device="cpu")[1], run)


def test_what_is_missing_or_in_the_way_is_said_before_minutes_are_spent(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=r"expected the warm model in .*: run warm-start first"):
        recipe.shrink(tmp_path / "warm", tiny_model(), tmp_path / "adapter.safetensors")
    with pytest.raises(ValueError, match="mode: expected one of edit_context, append_only, got 'warm'"):
        recipe.record("warm", recipe.LAPTOP, tiny_model(), None, tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="which holds another run"):
        recipe.record("append_only", recipe.LAPTOP, tiny_model(), None, tmp_path / "run")


@pytest.mark.parametrize("settings", ["LAPTOP", "GPU"])
def test_the_settings_fit_the_task(recipe, settings):
    grpo = getattr(recipe, settings).grpo
    task = recipe.make_task("edit_context")
    assert task.max_calls >= 2 * max(problem.level for problem in task.held_out_problems()) + 1
    assert grpo.max_new_tokens >= 13  # the longest reply of the expert in SmolLM2's tokens
    levels = [problem.level for problem in task.held_out_problems()[: grpo.eval_problems]]
    assert len({levels.count(level) for level in (1, 2, 3, 4)}) == 1  # as many of each


def test_only_an_agent_with_notes_fits_the_budget(recipe, tokenizer):
    """With a word a token as with SmolLM2's: one look-up fits whole, four never do, and notes always do."""
    solved = {}
    for mode in recipe.MODES:
        task = recipe.make_task(mode)
        task.context_budget = 100  # a word-level tokenizer needs fewer tokens
        for question in task.held_out_problems()[:40]:
            attempt = research.expert_trajectory(task, question, tokenizer)
            solved.setdefault((mode, question.level), []).append(attempt.reward)
    assert all(min(solved["edit_context", hops]) == 1 for hops in (1, 2, 3, 4))
    assert min(solved["append_only", 1]) == 1 and max(solved["append_only", 4]) == 0
