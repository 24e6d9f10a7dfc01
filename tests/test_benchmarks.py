"""The pages quote what was measured, and the floor is the formula it says it is."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import rates  # noqa: E402
import report  # noqa: E402
import workloads  # noqa: E402

RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("page", "inner"),
    [("benchmarks/README.md", report.tables(RESULTS)), ("README.md", report.quoted(RESULTS))],
    ids=["table", "quotation"],
)
def test_pages_show_what_was_measured(page, inner):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert report.between_marks(text, inner) == text, "run benchmarks/report.py"


def test_the_readme_quotes_the_table_only():
    """Every number of the quotation's rows is one of results.json, rounded."""
    known = {row["name"].removesuffix(" tokens"): row for row in report.rows(RESULTS)}
    lines = [line for line in report.quoted(RESULTS).splitlines() if line.startswith("| ") and "×" in line][1:]
    assert lines
    for line in lines:
        name, trl, ours, faster, memory = (cell.strip() for cell in line.strip("| ").split("|"))
        row = known[name.removesuffix(" tokens")]
        assert trl == f"{row['trl']['seconds']:.1f} s" and ours == f"{row['ours']['seconds']:.1f} s"
        assert faster == f"{row['trl']['seconds'] / row['ours']['seconds']:.1f} ×"
        assert memory == f"{row['trl']['peak_gib']:.1f} → {row['ours']['peak_gib']:.1f} GiB"


def test_both_sides_wrote_replies_of_full_length():
    for point in report.measured_points(RESULTS):
        result = RESULTS[point.name]
        for side in ("trl", "course_lib"):
            assert result[side]["reply_tokens"] == point.prompts * point.group * point.reply_tokens
        assert result["trl"]["tokens_run"] == point.padded_tokens > result["course_lib"]["tokens_run"]


def test_floor_by_hand():
    point = {"prompts": 2, "group": 4, "prompt_tokens": 30, "common_tokens": 10, "reply_tokens": 3}
    machine = {"body": 100, "head": 50, "flops": 1000.0, "decode": {"8": 0.5}}
    ours = {"tokens_run": 70, "predicting": 20}
    training, reading, decoding = 6 * (100 * 70 + 50 * 20) / 1000, 2 * 100 * (10 + 2 * 20) / 1000, 2 * 0.5
    assert rates.floor_seconds(point, ours, machine) == training + reading + decoding


def test_a_line_is_fitted_as_a_line():
    batch = lambda x: {"tokens_run": x, "updating": 0.5 + 0.01 * x}  # noqa: E731
    results = {point.name: {"course_lib": batch(100 * k)} for k, point in enumerate(workloads.GRID, 1)}
    results["agents"] = {"4": {"tree": {"tokens_run": 50, "seconds": 1.0}}}
    points, slope, start, fit = report.linear_fit(results)
    assert points[0] == (50, 1.0) and len(points) == len(workloads.GRID) + 1
    assert (slope, start, fit) == pytest.approx((10, 0.5, 1))


def test_rewards_of_different_texts_do_not_tie():
    rewards = {workloads.hashed_reward(f"reply {number}", "1") for number in range(1000)}
    assert len(rewards) == 1000 and all(0 <= reward < 1 for reward in rewards)


def test_prompts_have_the_sizes_they_are_said_to_have():
    from transformers import AutoTokenizer

    from course_lib.models import find_small_model

    folder = Path(find_small_model())
    if not (folder / "tokenizer.json").exists():
        pytest.skip("the converted small model is not here")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for point in (workloads.GRID[0], workloads.GRID[-1]):
        task = workloads.make_task(point, tokenizer)
        contexts = [task.open(task.training_problem(index), tokenizer).context() for index in range(4)]
        assert {len(context) for context in contexts} == {point.prompt_tokens}
        assert len({tuple(context[: point.common_tokens]) for context in contexts}) == 1
        assert len({context[point.common_tokens] for context in contexts}) > 1
