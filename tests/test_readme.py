"""The Python on the README's page runs as it stands there, on a tiny model and with fewer steps."""

import argparse
import json
import re
from pathlib import Path

import pytest
from small_worlds import word_tokenizer

from course_lib.__main__ import main
from course_lib.finetune import add_evaluate_options, add_finetune_options
from course_lib.models import save_model, tiny_model
from course_lib.runs import read_run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
FEWER = {
    "steps=100": "steps=2, prompts_per_step=2, group_size=2",
    "max_new_tokens=64": "max_new_tokens=2",
    "checkpoint_every=10": "checkpoint_every=1",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The reader's folder, with what the README calls my-model and my-rows.jsonl."""
    monkeypatch.chdir(tmp_path)
    tokenizer = word_tokenizer()
    save_model(tiny_model(vocab_size=len(tokenizer)), tokenizer, "my-model")
    rows = [{"prompt": f"{a} {b} ?", "answer": a} for a in "abcde" for b in "fg"]
    Path("my-rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(block, names):
    for text, smaller in FEWER.items():
        block = block.replace(text, smaller)
    exec(compile(block, "README.md", "exec"), names)
    return names["trainer"]


def test_the_library_in_ten_lines_trains_saves_and_resumes(folder, capsys):
    library = BLOCKS[0]
    trainer = run(library, {})
    assert trainer.step == 2
    assert re.search(r"% of 2 \(95 % interval", capsys.readouterr().out)

    assert "# trainer.resume()" in library
    checkpoint = folder / "runs/mine/checkpoints/step-000002"
    weights = (checkpoint / "model.safetensors").read_bytes()
    (folder / "runs/mine/checkpoints/step-000002").rename(folder / "last")
    resumed = run(library.replace("# trainer.resume()", "trainer.resume()"), {})
    assert resumed.history == trainer.history
    assert (checkpoint / "model.safetensors").read_bytes() == weights

    options = ["--model", str(checkpoint), "--data", "my-rows.jsonl", "--reward", "exact-match", "--max-new-tokens=2"]
    assert main(["evaluate", *options]) == 0


def test_the_agent_makes_several_calls(folder):
    library, agent = BLOCKS
    names = {}
    run(library, names)
    trainer = run(agent, names)
    assert trainer.step == 2
    assert trainer.history[0]["calls"] > 1
    training = {trainer.task.training_problem(index) for index in range(500)}
    assert not training.intersection(trainer.task.held_out_problems())


def test_options_on_the_page_exist():
    known = set()
    for add in (add_finetune_options, add_evaluate_options):
        parser = argparse.ArgumentParser()
        add(parser)
        known |= {option for action in parser._actions for option in action.option_strings}
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL))
    lines = [line.rpartition("-m course_lib")[2] for line in shell.splitlines() if re.search("finetune|evaluate", line)]
    used = set(re.findall(r"(?<![\w-])--[a-z-]+", "\n".join(lines)))
    assert {"--output", "--resume", "--data"} <= used <= known


def test_links_and_pictures_of_the_page_exist():
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\(([^)#:\s]+)[^)]*\)", README):
        assert (root / target).exists(), target


def test_the_readme_quotes_the_recorded_runs():
    runs = [read_run(ROOT / "data" / "runs" / f"laptop-{seed}") for seed in range(3)]
    (before,), first, second, third = {run.before.correct for run in runs}, *(run.after.correct for run in runs)
    minutes = round(sum(run.minutes for run in runs) / 3)
    told = f"from {before} of 200 held-out problems to {first}, {second} and {third}, in {minutes} minutes of training"
    assert told in " ".join(README.split())
    longer = read_run(ROOT / "data" / "runs" / "laptop-long")
    assert f"A longer run reaches {longer.after.correct} in {longer.minutes:.0f} minutes." in " ".join(README.split())
