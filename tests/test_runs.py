"""What a run leaves behind is complete, or reading it says what is missing."""

import json
import math
import re
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import psutil
import pytest
from small_worlds import letters_task, word_tokenizer

from course_lib import runs
from course_lib.models import tiny_model
from course_lib.runs import Evaluation, Run, pass_at_k, read_run, wilson_interval
from course_lib.training import GRPOConfig, GRPOTrainer

TOKENIZER = word_tokenizer()
QUICK = GRPOConfig(steps=3, prompts_per_step=4, group_size=4, max_new_tokens=2, temperature=1.0, learning_rate=1e-2)
RECORDED = sorted(path.parent for path in (Path(__file__).parents[1] / "data" / "runs").glob("*/run.json"))


def trainer(folder, **changes):
    config = replace(QUICK, output_dir=str(folder), **changes)
    return GRPOTrainer(tiny_model(vocab_size=len(TOKENIZER)), TOKENIZER, letters_task(), config)


@pytest.fixture
def run(tmp_path):
    """The folder of a finished run of three steps."""
    made = trainer(tmp_path / "run")
    runs.write_evaluation(tmp_path / "run" / "evaluation_before.json", made.evaluate())
    made.train()
    runs.write_evaluation(tmp_path / "run" / "evaluation_after.json", made.evaluate())
    return tmp_path / "run"


def test_a_run_is_read_as_it_was_made(run):
    read = read_run(run)
    assert (read.name, read.config["steps"], len(read.metrics), read.after.total) == ("run", 3, 3, 4)
    assert read.column("reward") == ([1, 2, 3], [row["reward"] for row in read.metrics])
    assert 0 < read.minutes < 1
    session = read.made_by["sessions"][0]
    assert (session["from_step"], session["to_step"]) == (0, 3)
    assert session["versions"]["torch"] and session["device"] and session["peak_memory_gib"] > 0
    assert read.made_by["model"].startswith("LlamaForCausalLM, ")
    with pytest.raises(ValueError, match=r"metric: expected one of .*reward.*, got 'nonsense'"):
        read.column("nonsense")


def test_a_resumed_run_has_two_sessions(tmp_path):
    first = trainer(tmp_path / "run", checkpoint_every=1)
    with pytest.raises(RuntimeError, match="power cut"):
        first.train(on_step=cut)
    second = trainer(tmp_path / "run", checkpoint_every=1)
    second.resume()
    second.train()
    sessions = json.loads((tmp_path / "run" / "run.json").read_text())["sessions"]
    assert [session["from_step"] for session in sessions] == [0, 1]
    assert "seconds" not in sessions[0] and sessions[1]["to_step"] == 3


def cut(metrics):
    if metrics["step"] == 2:
        raise RuntimeError("power cut")


@pytest.mark.parametrize("name", ["config.json", "run.json", "metrics.jsonl", "times.jsonl", "evaluation_after.json"])
def test_a_missing_or_broken_file_is_named(run, name):
    text = (run / name).read_text()
    (run / name).write_text("{nonsense\n" + text)
    with pytest.raises(ValueError, match=re.escape(f"run/{name}")):
        read_run(run)
    (run / name).unlink()
    with pytest.raises(ValueError, match=f"run: expected a recorded run, {re.escape(name)} is missing"):
        read_run(run)


def test_a_missing_step_and_an_unfinished_session_are_named(run):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl: expected the steps 1 to 3, got 2 lines"):
        read_run(run)
    (run / "metrics.jsonl").write_text("".join([*lines[:2], "no json\n"]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3: expected a JSON object, got 'no json'"):
        read_run(run)
    (run / "metrics.jsonl").write_text("".join(lines))
    record = json.loads((run / "run.json").read_text())
    del record["sessions"][0]["seconds"]
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"run\.json: expected a session that came to its end"):
        read_run(run)


def test_the_record_names_no_path_of_the_machine(run):
    text = (run / "run.json").read_text()
    assert str(Path(__file__).parents[1]) not in text and str(Path.home()) + "/" not in text


def test_an_exam_prints_its_interval():
    replies = tuple(("", "", float(place < 72)) for place in range(200))
    assert str(Evaluation(72, 200, replies)) == "36.0% of 200 (95 % interval 29.7% to 42.9%)"


def test_several_replies_a_problem():
    replies = tuple(("ab"[place // 3], "", reward) for place, reward in enumerate([1, 0, 0, 1, 1, 1]))
    exam = Evaluation(4, 6, replies, samples=3)
    assert str(exam).startswith("66.7% of 2 × 3 (")
    assert exam.interval == wilson_interval(4 / 3, 2)  # two problems, however many replies to each
    assert [exam.pass_at(k) for k in (1, 2, 3)] == pytest.approx([4 / 6, (2 / 3 + 1) / 2, 1.0])


def test_samples_are_kept_with_their_number(run):
    exam = Evaluation(1, 4, (("a", "x", 1.0), ("a", "y", 0.0), ("b", "z", 0.0), ("b", "z", 0.5)), samples=2)
    assert (read_run(run).samples_before, read_run(run).samples_after) == (None, None)
    runs.write_evaluation(run / "samples_after.json", exam)
    assert read_run(run).samples_after == exam
    assert read_run(run).after.samples == 1


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    for c in range(n + 1):
        right = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = [max(subset) for subset in combinations(right, k)]
            assert pass_at_k(c, n, k) == float(Fraction(sum(subsets), len(subsets)))


def test_pass_at_k_is_unbiased():
    """Averaged over the binomial number of right replies it is 1 − (1−p)^k."""
    p, n = 0.3, 12
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in (1, 3, 12):
        mean = sum(chance * pass_at_k(c, n, k) for c, chance in enumerate(chances))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-14)


def test_pass_at_k_of_many_replies():
    assert pass_at_k(1, 100_000, 100) == pytest.approx(1e-3, abs=1e-15)
    assert pass_at_k(50_000, 100_000, 5_000) == 1.0
    assert pass_at_k(3, 100_000, 50_000) == pytest.approx(1 - 0.5**3, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((3, 2, 1), "correct: expected 0 to total=2, got 3"), ((1, 2, 3), "k: expected 1 to total=2, got 3"),
     ((1, 2, 0), "k: expected a whole number of at least 1, got 0"),
     ((0, 0, 1), "total: expected a whole number of at least 1")],
)  # fmt: skip
def test_pass_at_k_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(*arguments)


def test_wilson_interval_against_the_quadratic_it_solves():
    for successes, total in [(0, 10), (3, 10), (10, 10), (190, 200)]:
        for bound in wilson_interval(successes, total):
            z = 1.959963984540054
            assert (successes / total - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound) / total, abs=1e-12)
    with pytest.raises(ValueError, match="successes: expected 0 to total=3"):
        wilson_interval(4, 3)
    with pytest.raises(ValueError, match="total at least 1"):
        wilson_interval(0, 0)


def test_what_a_run_says_of_its_sessions():
    first = {"peak_memory_gib": 3.0, "device": "old", "threads": 4, "memory_gib": 16.0}
    last = {"peak_memory_gib": 1.0, "device": "new", "threads": 2, "memory_gib": 7.7}
    times = [{"sampling": 60.0, "updating": 30.0}, {"sampling": 20.0, "updating": 10.0}]
    exam = Evaluation(0, 1, (("", "", 0.0),))
    run = Run("run", {}, {"sessions": [first, last]}, [], times, exam, exam)
    assert (run.minutes, run.peak_memory, run.hardware) == (2.0, 3.0, "new, 2 threads, 8 GiB")


def test_throughput_from_the_rows():
    sessions = [{"peak_memory_gib": 3.0}, {"peak_memory_gib": 1.0, "device_memory_gib": 7.0}]
    metrics = [
        {"reply_tokens": 5.0, "calls": 2.0, "groups_sampled": 3, "tokens_run": 1000},
        {"reply_tokens": 10.0, "calls": 1.0, "groups_sampled": 1},  # every group was dead
    ]
    times = [{"sampling": 6.0, "scoring": 1.0, "updating": 3.0}, {"sampling": 10.0, "updating": 0.0}]
    exam = Evaluation(0, 1, (("", "", 0.0),))
    made_by = {"model": "Llama, 2,000 parameters", "sessions": sessions}
    made = Run("run", {"group_size": 4}, made_by, metrics, times, exam, exam)
    found = made.throughput(peak_flops=1e6)
    assert found == pytest.approx(
        {
            "sampled_tokens_per_second": 160 / 16,
            "trained_tokens_per_second": 1000 / 3,
            "tokens_per_second": 160 / 20,
            "sampling": 0.8,
            "scoring": 0.05,
            "updating": 0.15,
            "peak_memory_gib": 3.0,
            "device_memory_gib": 7.0,
            "model_flops_utilisation": 2000 * (2 * 160 + 6 * 1000) / (20 * 1e6),
        }
    )
    assert made.minutes == pytest.approx(20 / 60)


def test_memory_is_counted_in_gib():
    pytest.importorskip("resource")
    now = psutil.Process().memory_info().rss / runs.GIB
    assert now / 2 < runs.peak_memory()["peak_memory_gib"] < 64 * now


def test_a_run_from_step_0_is_a_new_record(tmp_path):
    for task in ("first", "second"):
        runs.begin_session(tmp_path, task=task, model="m", step=0)
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["task"], len(record["sessions"])) == ("second", 1)


@pytest.mark.parametrize("folder", RECORDED, ids=lambda path: path.name)
def test_recorded_runs_are_complete(folder):
    run = read_run(folder)
    sessions = run.made_by["sessions"]
    assert all(session["revision"] for session in sessions)
    assert [session["from_step"] for session in sessions] == [0, *[s["to_step"] for s in sessions[:-1]]]
    assert run.config["output_dir"] is None or not run.config["output_dir"].startswith("/")
    assert run.before.total == run.after.total == len(run.after.replies)
    speed = run.throughput(peak_flops=1e15)
    assert 0 < speed["model_flops_utilisation"] < 1
    assert speed["sampling"] + speed["scoring"] + speed["updating"] == pytest.approx(1)


def test_what_was_sampled_comes_back_and_a_broken_record_of_it_is_named(tmp_path):
    replies = (("a", "x\n", 1.0), ("b", "é", 0.0))
    exam = Evaluation(1, 2, replies, outputs=(((5, 6), (7,)), ((8,),)))
    path = tmp_path / "evaluation_after.json"
    runs.write_evaluation(path, exam)
    assert runs.read_evaluation(path) == exam
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2 + 3 + 2 * (2 + 2)  # an attempt a line
    for outputs in ([[[5]]], 3, [[[5]], [["5"]]], [[[5]], [[-1]]], [[[5]], [[1.5]]], [[[5]], 7]):
        path.write_text(json.dumps({"correct": 1, "total": 2, "replies": replies, "outputs": outputs}))
        with pytest.raises(ValueError, match=r"evaluation_after.json: expected outputs as lists of token ids"):
            runs.read_evaluation(path)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("config.json", "steps", 2**40),
        ("config.json", "group_size", 0),
        ("run.json", "model", "a large one"),
        ("evaluation_after.json", "correct", 10**6),
        ("evaluation_after.json", "total", 0),
        ("evaluation_after.json", "samples", 10**6),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(run, file, name, value):
    kept = json.loads((run / file).read_text())
    (run / file).write_text(json.dumps(kept | {name: value}))
    with pytest.raises(ValueError, match=f"(?s){file}|config.json|metrics.jsonl"):
        read_run(run)


def test_numbers_that_are_none_are_refused(run):
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(json.loads(rows[0]) | {"reward": math.nan}), *rows[1:]]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: expected reward as float"):
        read_run(run)


@pytest.mark.parametrize("name", ["peak_memory_gib", "device_memory_gib"])
def test_memory_is_a_finite_number(run, name):
    kept = json.loads((run / "run.json").read_text())
    kept["sessions"][0][name] = math.nan
    (run / "run.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=f"run.json: expected {name} as float"):
        read_run(run)


def test_a_record_without_what_throughput_needs_says_so(run):
    made = read_run(run)
    with pytest.raises(ValueError, match="metrics: expected reply_tokens in each step"):
        replace(made, metrics=[{"calls": 1, "groups_sampled": 1}]).throughput()
    with pytest.raises(ValueError, match="times: expected more than 0 seconds"):
        replace(made, times=[{"sampling": 0.0}]).throughput()


@pytest.mark.parametrize("folder", [None, 3, Path(__file__)])
def test_what_is_no_folder_is_no_run(folder):
    with pytest.raises(ValueError, match=r"folder: expected a path|expected a recorded run, config.json is missing"):
        read_run(folder)


@pytest.mark.parametrize("exam", [(0, 0, ()), (1, 1, (("", "", 0.0),)), (0, 1, (("", "", math.nan),))])
def test_an_exam_is_its_replies(exam):
    with pytest.raises(ValueError, match=r"correct|total|replies"):
        Evaluation(*exam)


def test_half_a_surrogate_pair_comes_back(tmp_path):
    exam = Evaluation(1, 1, (("a", "\ud800 é", 1.0),))
    runs.write_evaluation(str(tmp_path / "exam.json"), exam)
    assert runs.read_evaluation(str(tmp_path / "exam.json")) == exam
    assert [path.name for path in tmp_path.iterdir()] == ["exam.json"]


@pytest.mark.parametrize("k", [None, "1", 1.5, math.nan, [1], 0, 5])
def test_k_is_a_whole_number_up_to_n(k):
    with pytest.raises(ValueError, match=r"^k: expected"):
        runs.pass_at_k(1, 4, k)


@pytest.mark.parametrize("record", ["{}", '{"sessions": 5}', '{"sessions": []}'])
def test_a_broken_list_of_sessions_is_named(tmp_path, record):
    (tmp_path / "run.json").write_text(record)
    with pytest.raises(ValueError, match=r"run\.json: expected"):
        runs.end_session(tmp_path, step=1, seconds=1.0)
