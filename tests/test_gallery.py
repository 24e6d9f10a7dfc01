"""Each fault's metric gives it away, and is where it belongs in the run without the fault."""

import math
from functools import cache

import pytest

from course_lib.gallery import GALLERY, NEXT, WORDS, healthy, letters, mentions, says_first, tokenizer, train


@cache
def runs(name):
    return GALLERY[name].faulty(), GALLERY[name].fixed()


def mean(values):
    seen = [value for value in values if not math.isnan(value)]
    return sum(seen) / len(seen)


def early(values):
    return mean(values[: len(values) // 4])


def late(values):
    return mean(values[-(len(values) // 4) :])


@pytest.mark.parametrize("name", GALLERY)
def test_both_runs_have_the_metric_at_every_step(name):
    for curves in runs(name):
        values = curves[GALLERY[name].metric]
        assert len(values) == len(curves["step"]) == len(curves["reward"]) > 10
        assert curves["step"] == sorted(curves["step"])
        assert not all(map(math.isnan, values))


def test_dead_groups():
    bad, good = runs("dead groups")
    assert set(bad["dead_groups"]) == {1.0} and set(bad["reward"]) == {0.0}
    assert "gradient_norm" not in bad
    assert mean(good["dead_groups"]) < 0.8 and late(good["reward"]) > early(good["reward"]) + 0.2


def test_a_lenient_parser():
    bad, good = runs("a lenient parser")
    assert late(bad["reward"]) > 0.6 and late(bad["exam_gap"]) > max(0.35, early(bad["exam_gap"]) + 0.1)
    assert late(bad["reply_tokens"]) > 5.5
    assert abs(late(good["exam_gap"])) < 0.2


def test_length_growth():
    bad, good = runs("length growth")
    assert bad["reply_tokens"][-1] > bad["reply_tokens"][0] + 0.8
    assert abs(good["reply_tokens"][-1] - good["reply_tokens"][0]) < 0.2
    assert all(0.32 < reward < 0.34 for run in (bad, good) for reward in run["reward"])


def test_entropy_collapse():
    bad, good = runs("entropy collapse")
    assert mean(bad["entropy"][5:15]) < 0.65 * mean(good["entropy"][5:15])
    assert late(bad["dead_groups"]) > 0.9 > 0.8 > late(good["dead_groups"])
    assert max(bad["reward"][-5:]) < 0.78 < mean(good["reward"][-5:])


def test_kl_blow_up():
    bad, good = runs("KL blow-up")
    assert late(bad["kl"]) > max(0.5, 4 * late(good["kl"])) and max(good["kl"]) < 0.4
    assert bad["reward"] == pytest.approx([0.5] * 13) and good["reward"] == pytest.approx([0.5] * 13)


@pytest.mark.parametrize("name", ["mask off by one", "two temperatures"])
def test_what_is_wrong_from_the_first_step_on(name):
    bad, good = runs(name)
    assert min(bad["sampler_mismatch"]) > 0.2
    assert max(good["sampler_mismatch"]) < 1e-5


def test_a_stale_sampler():
    bad, good = runs("stale sampler")
    mismatch = bad["sampler_mismatch"]
    assert max(mismatch[0::8]) < 1e-5 and min(mismatch[7::8]) > 0.1
    assert max(good["sampler_mismatch"]) < 1e-5


def test_end_of_sequence_lost():
    bad, good = runs("end of sequence lost")
    assert bad["truncated"][0] == good["truncated"][0] < 0.1
    assert bad["truncated"][-1] > 0.6 > 0.25 > good["truncated"][-1]
    assert all(late(run["reward"]) > 0.8 for run in (bad, good))


def test_a_baseline_over_steps():
    bad, good = runs("baseline over steps")
    assert max(map(abs, good["loss"])) < 1e-5
    assert mean(map(abs, bad["loss"])) > 0.05


def test_the_tokenizer_has_a_token_for_each_word():
    for place, word in enumerate(WORDS[2:], start=2):
        assert tokenizer().encode(word) == [place]
    assert tokenizer().pad_token_id == tokenizer().eos_token_id == 1


def test_a_lenient_parser_is_lenient():
    assert mentions("d c b a", "b") == 1 and says_first("d c b a", "b") == 0
    assert says_first("b .", "b") == says_first("a b c", "a b") == 1
    assert says_first("", "b") == says_first("a", "a b") == mentions("", "b") == 0
    assert [problem.answer for problem in NEXT] == ["b", "c", "d", "a"]


def test_the_same_run_comes_out_twice():
    assert train(letters(), steps=3) == {k: v[:3] for k, v in healthy().items() if k != "held_out"}
