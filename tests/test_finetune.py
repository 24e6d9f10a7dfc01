"""The commands `finetune` and `evaluate`, on a tiny model: what they print, keep and refuse."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_worlds import word_tokenizer

from course_lib.__main__ import main
from course_lib.models import tiny_model
from course_lib.runs import read_run

QUICK = ["--steps=2", "--prompts-per-step=2", "--group-size=2", "--max-new-tokens=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder and a file of rows."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = word_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    rows = [{"prompt": f"{a} {b} ?", "answer": str(number)} for number, (a, b) in enumerate(["ab", "cd", "ef", "gh"])]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def finetune(folder, *options):
    return main(["finetune", "--model", str(folder), "--data", str(folder / "rows.jsonl"), *QUICK, *options])


def test_it_prints_before_after_and_replies(folder, capsys):
    assert finetune(folder) == 0
    output = capsys.readouterr().out
    accuracy = r"[\d.]+% of 1 \(95 % interval [\d.]+% to [\d.]+%\)"
    pattern = rf"before: {accuracy}\n2 steps in .* minutes.*\nafter:  {accuracy}\n  '.*' -> .* \(reward [01]\)"
    assert re.search(pattern, output)


def test_it_stops_and_resumes(folder, tmp_path, capsys):
    output = str(tmp_path / "run")
    assert finetune(folder, "--output", output, "--checkpoint-every", "1") == 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.json",
        "evaluation_after.json",
        "evaluation_before.json",
        "metrics.jsonl",
        "run.json",
        "times.jsonl",
    ]
    capsys.readouterr()
    assert finetune(folder, "--output", output, "--checkpoint-every", "1", "--resume") == 0
    assert "resumed after step 2 of 2" in capsys.readouterr().out


def test_levels_one_after_the_other(folder, tmp_path):
    model = ["finetune", "--model", str(folder), *QUICK, "--eval-problems=2"]
    assert main([*model, "--level=1,3,2", "--steps=6", "--output", str(tmp_path)]) == 0
    task = json.loads((tmp_path / "run.json").read_text())["task"]
    assert task == "Curriculum(4 x Arithmetic(level=1), 4 x Arithmetic(level=3), Arithmetic(level=2))"


@pytest.mark.parametrize(
    ("level", "message"),
    [("2,x", "expected a level such as 3, or several such as 2,3, got '2,x'"), ("2,6", "level: expected one of 1, 2")],
)
def test_levels_that_there_are_not(folder, capsys, level, message):
    try:
        code = main(["finetune", "--model", str(folder), *QUICK, "--level", level])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1


def test_several_replies_to_each_held_out_problem(folder, tmp_path, capsys):
    output = ["--output", str(tmp_path), "--samples=3", "--checkpoint-every=1"]
    assert finetune(folder, *output) == 0
    assert len(re.findall(r" at temperature 1\.2: pass@1 [\d.]+%, pass@3 [\d.]+%\n", capsys.readouterr().out)) == 2
    made = read_run(tmp_path)
    assert (made.samples_before.samples, made.samples_after.total) == (3, 3)
    before = (tmp_path / "samples_before.json").read_bytes()
    assert finetune(folder, *output, "--resume") == 0
    assert (tmp_path / "samples_before.json").read_bytes() == before  # not taken again, from the trained model


def test_evaluate(folder, capsys):
    assert main(["evaluate", "--model", str(folder), "--data", str(folder / "rows.jsonl")]) == 0
    assert re.match(r"held out: [\d.]+% of 1", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group-size", "1"], "group_size: expected at least 2"),
        (["--resume"], "--output: expected the folder of the run to resume"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--learning-rate", "nan"], "learning_rate: expected a finite number"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(folder, capsys, options, message):
    assert finetune(folder, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_model_that_is_neither_a_folder_nor_asked_of_the_hub(folder, capsys, monkeypatch):
    monkeypatch.setattr("course_lib.models.is_offline_mode", lambda: True)
    assert finetune(folder, "--model", "nosuch") == 2
    assert "no folder here; the hub itself is only asked with HF_HUB_OFFLINE=0" in capsys.readouterr().err


def test_ctrl_c_before_the_run_is_one_line(folder, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("course_lib.finetune._model", interrupted)
    assert finetune(folder) == 130
    assert capsys.readouterr().err == "course_lib finetune: stopped\n"


def test_a_folder_of_another_run_is_refused(folder, tmp_path, capsys):
    assert finetune(folder, "--output", str(tmp_path)) == 0
    assert finetune(folder, "--output", str(tmp_path)) == 2
    assert "output_dir: expected a new or empty folder" in capsys.readouterr().err


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "another run"),
        (["--resume", "--data", "{other}"], "task: expected 'rows.jsonl' as in the run that step-000002 belongs to"),
        (["--resume", "--model", "{wide}"], "another model's"),
        (["--resume", "--steps=3"], "steps: expected 2"),
    ],
)
def test_a_run_is_not_touched_by_a_wrong_command(folder, tmp_path, capsys, options, message):
    output, wide, other = (tmp_path / name for name in ("run", "wide", "other.jsonl"))
    tiny_model(vocab_size=len(word_tokenizer()), hidden_size=32).save_pretrained(wide)
    word_tokenizer().save_pretrained(wide)
    other.write_text((folder / "rows.jsonl").read_text().replace("a b", "b a"))
    assert finetune(folder, "--output", str(output), "--learning-rate=0.1") == 0
    before = contents(output)
    capsys.readouterr()
    given = [option.format(wide=wide, other=other) for option in options]
    assert finetune(folder, "--output", str(output), "--learning-rate=0.1", *given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert contents(output) == before


def test_an_output_that_is_a_file_is_refused_before_anything_is_loaded(folder, capsys):
    assert finetune(folder, "--output", str(folder / "rows.jsonl"), "--model", "nowhere/at/all") == 2
    assert "output_dir: expected a folder, got the file" in capsys.readouterr().err


def test_the_exam_may_have_another_length_after_a_resume(folder, tmp_path, capsys):
    assert finetune(folder, "--output", str(tmp_path), "--reward=exact-match") == 0
    assert finetune(folder, "--output", str(tmp_path), "--eval-problems=100", "--resume") == 0


def test_a_log_gets_a_line_a_step(folder, capsys):
    assert finetune(folder) == 0
    assert re.fullmatch(r"(step \d of 2: reward [\d.]+\n){2}", capsys.readouterr().err)


@pytest.mark.parametrize("content", [b"", b"\x00\xff\x00", b'{"prompt": "a ?"}\n'])
def test_a_bad_file_is_named(folder, tmp_path, capsys, content):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    assert finetune(folder, "--data", str(path)) == 2
    assert "bad.jsonl" in capsys.readouterr().err


def test_a_folder_without_weights_is_named(tmp_path, capsys):
    tiny_model().config.save_pretrained(tmp_path)
    assert main(["finetune", "--model", str(tmp_path), *QUICK]) == 2
    assert "has no weights" in capsys.readouterr().err


def test_an_unknown_option_value_lists_the_valid_ones(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        finetune(folder, "--mode", "mean")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "token-mean" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("command", "code"), [("finetune", 2), ("progress", 2), ("doctor", 1), ("--help", 0)])
def test_before_the_set_up_one_sentence_says_what_to_do(command, code):
    """-S: a Python that has nothing but its standard library."""
    root = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-S", "-m", "course_lib", command], cwd=root, capture_output=True, text=True, check=False
    )
    assert ran.returncode == code, ran.stderr
    assert ran.stderr.count("\n") == (code == 2)
    if code:
        assert "make learn" in ran.stderr + ran.stdout
