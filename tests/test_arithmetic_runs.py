"""The recipe of part A, data/arithmetic/train.py, with a tiny model."""

import importlib.util
import signal
from pathlib import Path

import pytest
from small_worlds import word_tokenizer

from course_lib.models import tiny_model
from course_lib.runs import read_run
from course_lib.training import GRPOTrainer

ROOT = Path(__file__).parents[1]
TINY = ["--steps=2", "--prompts-per-step=2", "--group-size=2", "--max-new-tokens=2", "--eval-problems=4", "--samples=2"]


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("arithmetic_train", ROOT / "data" / "arithmetic" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = word_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"--model={folder}"


def run(recipe, name, settings, folder, monkeypatch):
    monkeypatch.setitem(recipe.NAMES, name, [*recipe.NAMES[name], *TINY])
    assert recipe.record(name, settings, folder) == 0
    return read_run(folder)


def test_each_run_differs_from_the_first_in_one_thing(recipe, model, tmp_path, monkeypatch):
    runs = {name: run(recipe, name, [*recipe.LAPTOP, model], tmp_path / name, monkeypatch) for name in recipe.NAMES}
    first = runs["sums"]
    assert first.made_by["task"] == "Arithmetic(level=3)" and first.samples_after.total == 8
    assert first.config["updates_per_batch"] == 2  # with one, nothing is ever clipped
    for name, changed in (("kl", {"beta"}), ("symmetric", {"clip_high"}), ("curriculum", set())):
        config = runs[name].config
        assert {key for key in config if config[key] != first.config[key]} - {"output_dir"} == changed
    assert runs["symmetric"].config["clip_high"] == first.config["clip_low"]
    for name, level in (("curriculum", 3), ("three-operands", 4), ("products", 5)):
        assert runs[name].made_by["task"].endswith(f", Arithmetic(level={level}))")


def test_the_settings_of_a_gpu_run_here_too(recipe, model, tmp_path, monkeypatch):
    config = run(recipe, "sums", [*recipe.GPU, model], tmp_path / "sums", monkeypatch).config
    assert (config["tokens_per_row"], config["updates_per_batch"]) == (8192, 2)


def test_an_unknown_run_is_refused(recipe):
    with pytest.raises(SystemExit, match="expected some of sums, kl, symmetric"):
        recipe.main(["sum"])


def test_a_stopped_run_goes_on_and_the_next_is_not_begun(recipe, model, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "RUNS", tmp_path)
    monkeypatch.setattr(recipe, "LAPTOP", [*recipe.LAPTOP, model])
    for name in ("sums", "kl"):
        monkeypatch.setitem(recipe.NAMES, name, [*recipe.NAMES[name], *TINY])
    train = GRPOTrainer.train
    with monkeypatch.context() as once:
        stop = lambda metrics: signal.raise_signal(signal.SIGINT)  # noqa: E731
        once.setattr(GRPOTrainer, "train", lambda trainer, on_step: train(trainer, on_step=stop))
        with pytest.raises(SystemExit, match="sums: stopped on its way; the same command goes on"):
            recipe.main(["sums", "kl"])
    assert [path.name for path in tmp_path.iterdir()] == ["arithmetic-sums"]
    assert recipe.main(["sums"]) == 0
    assert len(read_run(tmp_path / "arithmetic-sums").metrics) == 2
